// The host half of the CUDA backend: csrc/torch and csrc/cuda on fake_torch.h and fake_cuda.h. Results are compared
// with the CPU backend, bit for bit; most checks are about when and where the work is done, and what becomes of errors.
//
//   host_checks [--only NAME]
//
// Each check runs in a process of its own, since a device is set up once in a process.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>
#include <utility>

#include "buffer.h"
#include "cuda/backend.h"
#include "fake_cuda.h"
#include "fake_torch.h"

namespace {

using fake_torch::kCpu;
using fake_torch::make;
using fake_torch::ScalarType;
using fake_torch::to;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using fake_cuda::machine;

const char* check_name = "";
bool failed = false;

void expect(bool passed, const std::string& what) {
  if (!passed) std::printf("FAILED %s: %s\n", check_name, what.c_str());
  failed |= !passed;
}

// ---- tensors of a call

constexpr int64_t kRows = 16, kBatch = 3, kSeq = 5, kWidth = 8;  // kRows, a power of two, is the key of no row
constexpr int64_t kVaswani = 1052672, kExact = kVaswani - (1 << 12), kNoEncoding = 1 << 20 | 1 << 16;
constexpr double kBase = 10000, kScale = 2.75;
constexpr int64_t kPadding = 3;
const std::optional<Tensor> kNothing;

Tensor numbers(const std::vector<int64_t>& sizes, uint64_t seed) {
  Random random(seed);
  Tensor tensor = make(sizes, ScalarType::Float, kCpu);
  float* const values = static_cast<float*>(tensor.mutable_data_ptr());
  for (int64_t i = 0; i < tensor.numel(); ++i) values[i] = static_cast<float>(random.normal());
  return tensor;
}

Tensor integers(const std::vector<int64_t>& sizes, int64_t limit, uint64_t seed) {
  Random random(seed);
  Tensor tensor = make(sizes, ScalarType::Long, kCpu);
  int64_t* const values = static_cast<int64_t*>(tensor.mutable_data_ptr());
  for (int64_t i = 0; i < tensor.numel(); ++i) values[i] = random.below(limit);
  return tensor;
}

struct Inputs {
  Tensor weight, ids, positions, x, grad, out, columns;

  explicit Inputs(int device, uint64_t seed = 1)
      : weight(to(numbers({kRows, kWidth}, seed), device)),
        ids(to(integers({kBatch, kSeq}, kRows, seed + 1), device)),
        positions(to(integers({kBatch, kSeq}, 1000, seed + 2), device)),
        x(to(numbers({kBatch, kSeq, kWidth}, seed + 3), device)),
        grad(to(numbers({kBatch, kSeq, kWidth}, seed + 4), device)),
        out(to(numbers({kBatch, kSeq, kWidth}, seed + 5), device)),
        columns(to(numbers({kSeq, kBatch, kWidth}, seed + 6), device)) {}

  int64_t& id(int64_t place) const { return static_cast<int64_t*>(ids.mutable_data_ptr())[place]; }
};

// ---- calls

using Op = Tensors (*)(const Inputs&);

Tensors embed(const Inputs& in) {
  return {fake_torch::run("embed", in.weight, in.ids, kNothing, int64_t{7}, kScale, kBase, kVaswani, int64_t{-1}, false,
                          false)[0]};
}
Tensors embed_at_positions(const Inputs& in) {
  return {fake_torch::run("_embed_fwd", in.weight, in.ids, std::optional(in.positions), int64_t{0}, kScale, kBase,
                          kVaswani)[0]};
}
Tensors embed_of_another_base(const Inputs& in) {
  return {fake_torch::run("_embed_fwd", in.weight, in.ids, kNothing, int64_t{7}, kScale, 500.0, kVaswani)[0]};
}
Tensors embed_of_strided_ids(const Inputs& in) {
  return {fake_torch::run("_embed_fwd", in.weight, fake_torch::transposed(in.ids), kNothing, int64_t{7}, kScale, kBase,
                          kVaswani)[0]};
}
Tensors embed_out(const Inputs& in) {
  fake_torch::run<0>("embed_out", in.weight, in.ids, kNothing, int64_t{7}, kScale, kBase, kVaswani, in.out);
  return {in.out};
}
Tensors add(const Inputs& in) {
  return {fake_torch::run("add_positional_encoding", in.x, kNothing, int64_t{0}, kBase, kVaswani)[0]};
}
Tensors add_to_strided(const Inputs& in) {
  return {fake_torch::run("add_positional_encoding", fake_torch::transposed(in.columns), std::optional(in.positions),
                          int64_t{0}, kBase, kVaswani)[0]};
}
Tensors encode(const Inputs& in) {
  return {
      fake_torch::run("positional_encoding", in.positions, kWidth, int64_t{1}, kBase, kVaswani, ScalarType::Float)[0]};
}
Tensors check_ids(const Inputs& in) {
  fake_torch::run<0>("check_embed", in.weight, in.ids, kNothing, int64_t{0}, kBase, kVaswani, kNothing, kNothing,
                     kNothing);
  return {};
}
// The weight is the table of positions too.
Tensors embed_with_table_from(int64_t offset, const Inputs& in) {
  return {fake_torch::run("embed_general", in.weight, in.ids, kNothing, kNothing, std::optional(in.weight), kNothing,
                          kNothing, offset, kScale, kBase, kNoEncoding, int64_t{-1}, false, false, 1.0, int64_t{0}, 0.0,
                          int64_t{0}, int64_t{-1}, int64_t{0}, int64_t{-1})[0]};
}
Tensors add_table_from(int64_t offset, const Inputs& in) {
  return {fake_torch::run("add_general", in.x, kNothing, kNothing, kNothing, kNothing, std::optional(in.weight), offset,
                          kBase, kNoEncoding, kScale, int64_t{0}, int64_t{-1}, 1.0, 0.0)[0]};
}
Tensors embed_with_table(const Inputs& in) { return embed_with_table_from(2, in); }
Tensors add_table(const Inputs& in) { return add_table_from(1, in); }
Tensors embed_beyond_table(const Inputs& in) { return embed_with_table_from(kRows - 2, in); }
Tensors add_before_table(const Inputs& in) { return add_table_from(-3, in); }
Tensors check_beyond_table(const Inputs& in) {
  fake_torch::run<0>("check_embed", in.weight, in.ids, kNothing, kRows - 2, kBase, kNoEncoding, kNothing, kNothing,
                     std::optional(in.weight));
  return {};
}
Tensors backward(const Inputs& in) {
  return {fake_torch::run("embed_backward", in.grad, in.ids, kRows, kScale, kPadding, true)[0]};
}
Tensors backward_of_strided_grad(const Inputs& in) {
  return {fake_torch::run("embed_backward", fake_torch::transposed(in.columns), in.ids, kRows, kScale, int64_t{-1},
                          false)[0]};
}
Tensors sparse_backward(const Inputs& in) {
  const auto results = fake_torch::run<2>("embed_backward_sparse", in.grad, in.ids, kRows, kScale, kPadding, false);
  return {results[0], results[1]};
}

// Those that neither wait nor ask the device for anything.
const std::map<std::string, Op> kQueued = {{"embed", embed},
                                           {"embed at positions", embed_at_positions},
                                           {"embed of another base", embed_of_another_base},
                                           {"embed of strided ids", embed_of_strided_ids},
                                           {"embed_out", embed_out},
                                           {"embed with a table", embed_with_table},
                                           {"add", add},
                                           {"add a table", add_table},
                                           {"add to strided", add_to_strided},
                                           {"encode", encode},
                                           {"backward", backward},
                                           {"backward of a strided grad", backward_of_strided_grad}};
const std::map<std::string, Op> kOps = [] {
  std::map<std::string, Op> all = kQueued;
  all["check"] = check_ids;
  all["sparse backward"] = sparse_backward;
  return all;
}();

cudaStream_t new_stream(int device) {
  cudaStream_t stream = nullptr;
  cudaSetDevice(device);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaSetDevice(0);
  return stream;
}

void wait(int device, void* stream) {
  const int before = fake_cuda::current_device();
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the checks' own waiting disturbs no capture
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaSetDevice(device);
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  cudaSetDevice(before);
  cudaThreadExchangeStreamCaptureMode(&mode);
}

bool same(const Tensor& a, const Tensor& b) {
  const size_t bytes = static_cast<size_t>(a.numel()) * (a.scalar_type() == ScalarType::Long ? 8 : 4);
  return a.numel() == b.numel() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), bytes) == 0;
}

bool same(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto& one, auto& other) { return same(one, other); });
}

// The text of an exception of this type; empty if there is none.
template <class Exception>
std::string raised(const std::function<void()>& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "";
}

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void expect_raised(const std::function<void()>& call, const std::string& part, const std::string& what) {
  const std::string text = raised<std::out_of_range>(call);
  expect(holds(text, part), what + ": '" + text + "' has '" + part + "'");
}

void expect_nothing(const std::function<void()>& call, const std::string& what) {
  const std::string text = raised<std::exception>(call);
  expect(text.empty(), what + ": nothing is raised, but '" + text + "'");
}

// All ops give what the CPU gives, once their stream has been waited for, and leave nothing on another.
void expect_right_results(int device, void* stream, const std::map<std::string, Op>& ops = kOps) {
  for (const auto& [name, op] : ops) {
    const Inputs on_cpu(kCpu), on_device(device);
    const Tensors expected = op(on_cpu), got = op(on_device);
    wait(device, stream);
    expect(fake_cuda::idle(), name + " leaves work on another stream");
    expect(same(expected, got), name + " gives what the CPU gives");
  }
}

// ---- values

void check_results() {
  const int64_t before[] = {static_cast<int64_t>(fake_cuda::allocated(0)),
                            static_cast<int64_t>(fake_cuda::allocated(1))};
  for (const int device : {0, 1})
    for (void* const stream : {static_cast<void*>(nullptr), static_cast<void*>(new_stream(device))}) {
      fake_torch::set_device(1 - device);
      fake_torch::set_stream(device, stream);
      expect_right_results(device, stream);
      expect(fake_torch::device() == 1 - device, "the caller's device is current again");
    }
  for (const int device : {0, 1})
    expect(static_cast<int64_t>(fake_cuda::allocated(device)) <= before[device] + 8192, "scratch memory is given back");
}

// More specs than one would keep, and the first one again; nothing is waited for in between.
void check_many_frequencies() {
  const auto run = [](const Inputs& in, double base, int64_t width) {
    const int64_t flags = width % 2 == 0 ? kVaswani : kExact;
    return fake_torch::run("positional_encoding", in.positions, width, int64_t{1} << 40, base, flags,
                           ScalarType::Float)[0];
  };
  const Inputs on_cpu(kCpu), on_device(0);
  Tensors expected, got;
  for (int i = 0; i < 150; ++i) {
    const double base = 100 + i % 100;
    const int64_t width = 8 + i % 7;
    expected.push_back(run(on_cpu, base, width));
    got.push_back(run(on_device, base, width));
  }
  wait(0, nullptr);
  for (size_t i = 0; i < got.size(); ++i) expect(same(expected[i], got[i]), "spec " + std::to_string(i));
}

void check_small_inputs() {
  fake_torch::set_device(0);
  const auto sizes = [](int64_t tokens, int64_t rows, int device) {
    return std::pair{to(integers({tokens}, std::max<int64_t>(rows, 1), 5), device),
                     to(numbers({tokens, kWidth}, 6), device)};
  };
  for (const int64_t tokens : {0, 1, 2, 70, 300, 900})
    for (const int64_t rows : {1, 2, 3, 4, 255, 256, 257, 65536}) {
      const auto [ids, grad] = sizes(tokens, rows, kCpu);
      const auto [cuda_ids, cuda_grad] = sizes(tokens, rows, 0);
      const int64_t padding = rows > 2 ? 1 : -1;
      const auto dense = fake_torch::run("embed_backward", grad, ids, rows, kScale, padding, false);
      const auto sparse = fake_torch::run<2>("embed_backward_sparse", grad, ids, rows, kScale, padding, false);
      const auto cuda_dense = fake_torch::run("embed_backward", cuda_grad, cuda_ids, rows, kScale, padding, false);
      const auto cuda_sparse =
          fake_torch::run<2>("embed_backward_sparse", cuda_grad, cuda_ids, rows, kScale, padding, false);
      wait(0, nullptr);
      const std::string what = std::to_string(tokens) + " tokens, " + std::to_string(rows) + " rows, ";
      expect(same(dense[0], cuda_dense[0]), what + "dense");
      expect(same(sparse[0], cuda_sparse[0]) && same(sparse[1], cuda_sparse[1]), what + "sparse");
    }
}

// ---- when and where

void check_that_nothing_waits() {
  fake_torch::set_device(1);
  for (const auto& [name, op] : kQueued) op(Inputs(1));
  fake_cuda::let_time_pass();
  const int64_t waits = fake_cuda::waits();
  const size_t calls = fake_cuda::calls().size();
  for (const auto& [name, op] : kQueued) op(Inputs(1));
  expect(fake_cuda::waits() == waits, "a warm call waits");
  for (const auto& launch : fake_cuda::launches())
    expect(launch.kernel != "take_record", "an error is looked for where there is none");
  for (size_t i = calls; i < fake_cuda::calls().size(); ++i) {
    const std::string& name = fake_cuda::calls()[i];
    for (const char* const part : {"Malloc", "HostAlloc", "Memcpy", "Create", "Free", "Destroy"})
      expect(!holds(name, part), "a warm call calls " + name);
  }
}

void check_contexts() {
  fake_torch::set_device(1);
  embed(Inputs(1));
  posenc::cuda::check_errors();
  expect(fake_cuda::contexts() == std::set<int>{1}, "no device is touched but the one that is used");
}

// A big call has threads for all of its device, and a device of another size gets others.
void check_launch_shapes() {
  const auto threads = [](int device) {
    fake_torch::set_device(device);
    const Tensor weight = make({2, 128}, ScalarType::Float, device), ids = to(integers({64, 128}, 2, 1), device);
    const Tensor grad = make({64, 128, 128}, ScalarType::Float, device);
    std::vector<int64_t> counts;
    const size_t before = fake_cuda::launches().size();
    fake_torch::run("_embed_fwd", weight, ids, kNothing, int64_t{0}, 1.0, kBase, kVaswani);
    fake_torch::run("embed_backward", grad, ids, int64_t{50000}, 1.0, int64_t{-1}, false);
    for (size_t i = before; i < fake_cuda::launches().size(); ++i) {
      const fake_cuda::LaunchRecord& launch = fake_cuda::launches()[i];
      counts.push_back(launch.threads());
      // At least one wave of it, and a few at most.
      const int64_t resident = (machine.processors + device) * machine.threads;
      expect(counts.back() >= resident / 2 && counts.back() <= 4 * resident,
             launch.kernel + " has " + std::to_string(counts.back()) + " threads");
    }
    return counts;
  };
  const auto asked = [] {
    return std::count(fake_cuda::calls().begin(), fake_cuda::calls().end(),
                      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  };
  machine.processors = 4;
  const int64_t before = asked();
  const auto small = threads(0);
  const int64_t kernels = asked() - before;
  expect(kernels > 0 && kernels <= static_cast<int64_t>(small.size()), "occupancy is asked for");
  const auto larger = threads(1);
  expect(asked() - before == 2 * kernels, "each device is asked");
  expect(threads(0) == small && threads(1) == larger && asked() - before == 2 * kernels,
         "no kernel is asked for twice");
  expect(small.size() == larger.size() && small != larger, "the launch follows the size of the device");
}

// ---- ids out of range

// A call with an id out of range, which nobody has waited for.
Tensors queue_bad_call(int device, int64_t id, Op op = embed, int64_t place = 4) {
  Inputs in(device);
  in.id(place) = id;
  return op(in);
}

void check_that_the_next_call_raises() {
  fake_torch::set_device(0);
  void* const stream = new_stream(0);
  fake_torch::set_stream(0, stream);
  for (const auto& [name, next] : kOps) {
    Tensors result;
    expect_nothing([&] { result = queue_bad_call(0, 77); }, "the call itself");
    fake_cuda::let_time_pass();
    const float* const row = static_cast<const float*>(result[0].const_data_ptr()) + 4 * kWidth;
    expect(std::all_of(row, row + kWidth, [](float value) { return value != value; }), "the row is NaN");
    const Inputs good(0);
    expect_raised([&] { next(good); }, "embed: input must hold ids in [0, 16), got 77 at flat index 4", name);
    expect_nothing([&] { next(good); }, name + ", the second time");
    expect_nothing([&] { posenc::cuda::check_errors(); }, "asking");
    wait(0, stream);
    expect(fake_cuda::idle(), "the error was read without a wait");
  }
}

void check_what_errors_say() {
  fake_torch::set_device(0);
  const auto raise = [](Op op, const std::string& part) {
    expect_raised(
        [&] {
          queue_bad_call(0, -5, op, 2);
          posenc::cuda::check_errors();
        },
        part, "the error");
  };
  raise(embed,
        "embed: input must hold ids in [0, 16), got -5 at flat index 2, found by a call on cuda:0 (its row is NaN");
  raise(backward, "embed_backward: input must hold ids in [0, 16), got -5 at flat index 2");
  raise(backward, "(it was left out");
  raise(sparse_backward, "embed_backward_sparse: input must hold ids in [0, 16), got -5 at flat index 2");
  raise(check_ids, "embed: input must hold ids in [0, 16), got -5 at flat index 2");
  raise(check_ids, "(nothing was written");
  const auto raise_position = [](Op op, const std::string& part) {
    expect_raised(
        [&] {
          op(Inputs(0));
          posenc::cuda::check_errors();
        },
        part, "the error");
  };
  const std::string in_table = "positions must lie in [0, 16), the rows of position_table, got ";
  raise_position(embed_beyond_table,
                 "embed: " + in_table + "16 at the token of flat index 2, found by a call on cuda:0");
  raise_position(add_before_table, "add_positional_encoding: " + in_table + "-3 at the token of flat index 0");
  raise_position(add_before_table, "(its row is NaN");
  raise_position(check_beyond_table, "embed: " + in_table + "16 at the token of flat index 2");
  raise_position(check_beyond_table, "(nothing was written");
  // Of two calls, the earlier.
  for (const auto& [first, second] : {std::pair<Op, Op>{embed, embed}, {embed, backward}, {backward, embed}}) {
    queue_bad_call(0, 20, first);
    queue_bad_call(0, 21, second, 1);
    expect_raised([] { posenc::cuda::check_errors(); }, "got 20 at flat index 4", "of two calls");
    expect_nothing([] { posenc::cuda::check_errors(); }, "after that");
  }
  // Of many, all in one call, the first.
  Inputs in(0);
  for (int64_t i = 1; i < kBatch * kSeq; ++i) in.id(i) = 100 + i;
  embed(in);
  expect_raised([] { posenc::cuda::check_errors(); }, "got 101 at flat index 1", "of many");
  expect_nothing([] { posenc::cuda::check_errors(); }, "after that");
}

// A check raises for itself alone: others of its device have not been looked at yet.
void check_that_checks_are_apart() {
  fake_torch::set_device(0);
  queue_bad_call(0, 55);
  const Inputs good(0);
  expect_nothing([&] { check_ids(good); }, "a check of good ids behind a bad call");
  expect_raised([&] { queue_bad_call(0, 56, check_ids); }, "got 55", "the next call");
  expect_raised([&] { queue_bad_call(0, 56, check_ids); }, "got 56", "a check of bad ids");
  expect_nothing([&] { check_ids(good); }, "a check after that");
  expect_nothing([] { posenc::cuda::check_errors(); }, "after that");
}

// The number of segments comes late; what else was found by then is raised with it.
void check_sparse_backward() {
  fake_torch::set_device(0);
  void* const stream = new_stream(0);
  fake_torch::set_stream(0, stream);
  queue_bad_call(0, 55);
  expect_raised([] { sparse_backward(Inputs(0)); }, "got 55", "the sparse gradient waits, and so finds the error");
  expect_right_results(0, stream);
}

void check_two_devices() {
  for (const int bad : {0, 1}) {
    const int good = 1 - bad;
    fake_torch::set_device(bad);
    queue_bad_call(bad, 66);
    embed(Inputs(bad));
    fake_torch::set_device(good);
    embed(Inputs(good));
    expect_raised([] { posenc::cuda::check_errors(); }, "cuda:" + std::to_string(bad), "asking waits for every device");
    queue_bad_call(bad, 67);
    fake_cuda::let_time_pass();
    expect_nothing([&] { embed(Inputs(good)); }, "another device");
    expect_raised([&] { embed(Inputs(bad)); }, "got 67", "the same device");
    expect(fake_torch::device() == good, "the caller's device is current again, after an error too");
  }
  expect(fake_cuda::current_device() == 1 || fake_cuda::current_device() == 0, "a device");
}

void check_synchronous_mode() {
  setenv("POSENC_EXT_SYNC_ERRORS", "1", 1);
  fake_torch::set_device(0);
  void* const stream = new_stream(0);
  fake_torch::set_stream(0, stream);
  for (const auto& [name, op] : kOps) {
    if (op == add || op == add_to_strided || op == add_table || op == encode) continue;
    expect_raised([&, op = op] { queue_bad_call(0, 88, op); }, "got 88", name + " itself");
    expect_nothing([&, op = op] { op(Inputs(0)); }, name + " after that");
  }
  expect_nothing([] { add(Inputs(0)); }, "add");
  expect(fake_cuda::idle(), "every call has been waited for");
  // In a capture nothing can be waited for.
  cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeGlobal);
  expect_nothing([] { embed(Inputs(0)); }, "in a capture");
  cudaGraph_t graph = nullptr;
  expect(cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph) == cudaSuccess, "the capture is valid");
}

// Tensors of a call lie on one device, whichever is current.
void check_other_devices() {
  const Inputs here(0), there(1);
  for (const auto& [argument, call] : std::map<std::string, std::function<void()>>{
           {"input must be on the device of weight (cuda:0), got cuda:1",
            [&] {
              fake_torch::run("_embed_fwd", here.weight, there.ids, kNothing, int64_t{0}, kScale, kBase, kVaswani);
            }},
           {"positions must be on the device of weight (cuda:0), got cuda:1",
            [&] {
              fake_torch::run("_embed_fwd", here.weight, here.ids, std::optional(there.positions), int64_t{0}, kScale,
                              kBase, kVaswani);
            }},
           {"out must be on the device of weight (cuda:0), got cuda:1",
            [&] {
              fake_torch::run<0>("embed_out", here.weight, here.ids, kNothing, int64_t{7}, kScale, kBase, kVaswani,
                                 there.out);
            }},
           {"input must be on the device of grad (cuda:0), got cuda:1",
            [&] { fake_torch::run("embed_backward", here.grad, there.ids, kRows, kScale, kPadding, true); }},
           {"input must be on the device of grad (cuda:1), got cpu",
            [&] { fake_torch::run("embed_backward", there.grad, Inputs(kCpu).ids, kRows, kScale, kPadding, true); }}}) {
    const std::string text = raised<std::invalid_argument>(call);
    expect(holds(text, argument), "'" + text + "' has '" + argument + "'");
  }
  expect(fake_cuda::launches().empty(), "nothing is launched");
}

// A stream that torch did not make may be destroyed before somebody asks for errors.
void check_streams_of_others() {
  fake_torch::set_device(0);
  for (const bool destroyed : {false, true}) {
    void* const stream = new_stream(0);
    fake_torch::set_stream(0, stream, true);
    queue_bad_call(0, 30);
    if (destroyed) cudaStreamDestroy(static_cast<cudaStream_t>(stream));
    expect_raised([] { posenc::cuda::check_errors(); }, "got 30", destroyed ? "destroyed" : "not waited for");
    expect_nothing([] { posenc::cuda::check_errors(); }, "after that");
  }
}

// ---- captures

// Captures calls on a stream of device 0; null if the capture became invalid.
cudaGraph_t capture(cudaStream_t stream, const std::function<void()>& calls, bool may_wait = false) {
  const int64_t waits = fake_cuda::waits();
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  expect_nothing(calls, "captured calls");
  expect(may_wait || fake_cuda::waits() == waits, "nothing waits in a capture");
  cudaGraph_t graph = nullptr;
  expect(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture is valid");
  return graph;
}

void set_up_capture(cudaStream_t& stream) {
  fake_torch::set_device(0);
  stream = new_stream(0);
  fake_torch::set_stream(0, stream);
}

void check_replays() {
  cudaStream_t stream = nullptr;
  set_up_capture(stream);
  for (const auto& [name, op] : kQueued) {
    op(Inputs(0));
    wait(0, stream);
    const Inputs in(0);
    Tensors results;
    cudaGraph_t graph = capture(stream, [&, op = op] { results = op(in); });
    if (graph == nullptr) return;
    for (const uint64_t seed : {11, 12}) {
      const Inputs on_cpu(kCpu, seed);
      for (auto member :
           {&Inputs::weight, &Inputs::ids, &Inputs::positions, &Inputs::x, &Inputs::grad, &Inputs::columns})
        std::memcpy((in.*member).mutable_data_ptr(), (on_cpu.*member).const_data_ptr(),
                    (in.*member).numel() * (member == &Inputs::ids || member == &Inputs::positions ? 8 : 4));
      fake_cuda::replay(graph, stream);
      wait(0, stream);
      expect(same(op(on_cpu), results), "a replay of " + name);
    }
    if (op == add || op == add_to_strided || op == add_table || op == encode || op == embed_of_strided_ids) continue;
    for (const int64_t id : {90, 91}) {
      in.id(5) = id;
      fake_cuda::replay(graph, stream);
      wait(0, stream);
      expect_raised([] { add(Inputs(0)); }, "got " + std::to_string(id), "after a replay of " + name);
    }
  }
}

void check_first_use_in_a_capture() {
  cudaStream_t stream = nullptr;
  set_up_capture(stream);
  const Inputs in(0);
  Tensors results;
  const cudaGraph_t graph = capture(stream, [&] { results = embed(in); });
  if (graph == nullptr) return;
  fake_cuda::replay(graph, stream);
  wait(0, stream);
  expect(same(embed(Inputs(kCpu)), results), "what was set up during a capture");
  // A call on another stream finds it too.
  capture(stream, [&] { results = embed_of_another_base(in); });
  const cudaStream_t other = new_stream(0);
  fake_torch::set_stream(0, other);
  expect_right_results(0, other);
}

// By a call without frequencies.
void check_first_use_of_the_record() {
  fake_torch::set_device(0);
  const Inputs in(0);
  in.id(1) = 99;
  backward(in);
  expect_raised([] { posenc::cuda::check_errors(); }, "got 99", "the first call of all");
}

void check_that_captures_raise_nothing() {
  cudaStream_t stream = nullptr;
  set_up_capture(stream);
  embed(Inputs(0));
  queue_bad_call(0, 44);
  wait(0, stream);
  capture(stream, [&] {
    embed(Inputs(0));
    backward(Inputs(0));
  });
  expect_raised([] { add(Inputs(0)); }, "got 44", "after the capture");
}

// While one stream is captured, in any mode, others are used as always; also by another thread, and for the first time.
void check_beside_a_capture() {
  cudaStream_t captured = nullptr;
  set_up_capture(captured);
  for (const bool other_thread : {false, true})
    for (const bool first_use : {true, false}) {
      void* const other = new_stream(0);
      const auto calls = [&] {
        fake_torch::set_device(0);
        fake_torch::set_stream(0, other);
        if (!first_use) queue_bad_call(0, 40);
        if (first_use) expect_right_results(0, other);
        else expect_raised([] { posenc::cuda::check_errors(); }, "got 40", "asking");
        queue_bad_call(0, 41);
        wait(0, other);
        expect_raised([] { embed(Inputs(0)); }, "got 41", "the next call");
        check_ids(Inputs(0));
        sparse_backward(Inputs(0));
        posenc::cuda::check_errors();
        fake_torch::set_stream(0, captured);
      };
      Tensors results;
      const Inputs in(0);
      const auto graph = capture(
          captured,
          [&] {
            if (!first_use) results = embed(in);
            if (other_thread) std::thread(calls).join();
            else calls();
            expect_nothing([] { posenc::cuda::check_errors(); }, "asking in a capture");
            for (Op op : {check_ids, sparse_backward}) {
              const std::string text = raised<std::runtime_error>([&] { op(in); });
              expect(holds(text, "a call that waits for the device cannot be captured"), "refused: '" + text + "'");
            }
          },
          true);
      if (graph == nullptr || first_use) continue;
      fake_cuda::replay(graph, captured);
      wait(0, captured);
      expect(same(embed(Inputs(kCpu)), results), "the replay");
    }
}

// Where the default stream is in use, a stream that waits for it is captured.
void check_beside_a_capture_of_a_blocking_stream() {
  fake_torch::set_device(0);
  fake_torch::set_stream(0, nullptr);
  embed(Inputs(0));
  cudaStream_t blocking = nullptr;
  cudaStreamCreateWithFlags(&blocking, cudaStreamDefault);
  fake_torch::set_stream(0, blocking);
  capture(
      blocking,
      [] {
        embed(Inputs(0));
        posenc::cuda::check_errors();
      },
      true);
}

// What outlives a call is torch's memory, and none of a graph.
void check_kept_memory() {
  check_first_use_in_a_capture();
  check_that_nothing_waits();
  for (const std::string& name : fake_cuda::calls())
    expect(name != "cudaMalloc" && name != "cudaFree" && name != "cudaDeviceSynchronize", "no call of " + name);
}

// ---- failures

// The message names both versions and the way out.
void check_old_driver() {
  machine.driver_version = 12080;
  fake_torch::set_device(0);
  const std::string text = raised<std::runtime_error>([] { check_ids(Inputs(0)); });
  const std::string major = std::to_string(CUDART_VERSION / 1000);
  for (const std::string& part :
       {"built by nvcc " + major + ".", "driver for CUDA " + major + ".0 or newer",
        std::string("this one is for CUDA 12.8"), std::string("update the driver"), "an nvcc below " + major + ".0"})
    expect(holds(text, part), "'" + text + "' has '" + part + "'");
}

// Every call of the runtime fails once, in a process of its own. What was asked for is done or an error says that it is
// not; after that, all is well.
void check_failures() {
  const auto scenario = [](const std::function<void(const std::string&, Op)>& each) {
    cudaStream_t stream = nullptr;
    set_up_capture(stream);
    for (const auto& [name, op] : kOps) each(name, op);
    each("error", [](const Inputs& in) {
      in.id(1) = 99;
      Tensors results = embed(in);
      try {
        posenc::cuda::check_errors();
      } catch (const std::out_of_range&) {
        return Tensors{};
      }
      throw std::runtime_error("nothing was found");
    });
    return stream;
  };
  int64_t count = 0;
  const auto in_child = [&](const std::function<void()>& body) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      body();
      std::fflush(stdout);
      _exit(failed);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
  };
  int pipes[2];
  if (pipe(pipes) != 0) return expect(false, "a pipe");
  const int status = in_child([&] {
    const size_t before = fake_cuda::calls().size();
    scenario([](const std::string&, Op op) { op(Inputs(0)); });
    count = static_cast<int64_t>(fake_cuda::calls().size() - before);
    if (write(pipes[1], &count, sizeof(count)) != sizeof(count)) _exit(1);
  });
  if (status != 0 || read(pipes[0], &count, sizeof(count)) != sizeof(count)) return expect(false, "no failure");
  expect(count > 60, "many calls");
  for (int64_t nth = 5; nth < count; ++nth) {  // the first ones make the stream
    const int status = in_child([&] {
      fake_cuda::fail_call(nth, cudaErrorMemoryAllocation);
      void* const stream = scenario([&](const std::string& name, Op op) {
        const Inputs in(0);
        Tensors got;
        const std::string text = raised<std::runtime_error>([&] { got = op(in); });
        if (!text.empty()) return;
        fake_cuda::let_time_pass();
        if (name != "error") expect(same(op(Inputs(kCpu)), got), name + ", " + fake_cuda::failed_call());
      });
      fake_cuda::fail_call(-1, cudaSuccess);
      cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
      cudaThreadExchangeStreamCaptureMode(&mode);
      expect(mode == cudaStreamCaptureModeGlobal, "the capture mode is what it was, call " + std::to_string(nth));
      expect(cudaGetLastError() == cudaSuccess, "no error is left behind, call " + std::to_string(nth));
      raised<std::out_of_range>([] { posenc::cuda::check_errors(); });  // where asking for it was what failed
      expect_right_results(0, stream);
    });
    expect(status == 0, "after a failure of call " + std::to_string(nth));
    if (failed) return;
  }
}

// Each launch of each op fails once, and that is what the op says.
void check_launch_failure() {
  fake_torch::set_device(0);
  for (const auto& [name, op] : kOps) {
    op(Inputs(0));
    fake_cuda::let_time_pass();
    const size_t before = fake_cuda::calls().size();
    op(Inputs(0));
    const std::vector<std::string> calls(fake_cuda::calls().begin() + static_cast<int64_t>(before),
                                         fake_cuda::calls().end());
    for (size_t i = 0; i < calls.size(); ++i) {
      if (calls[i] != "cudaLaunchKernel") continue;
      const Inputs in(0);
      fake_cuda::fail_call(static_cast<int64_t>(i), cudaErrorIllegalAddress);
      const std::string text = raised<std::runtime_error>([&, op = op] { op(in); });
      expect(holds(text, "a CUDA launch failed: an illegal memory access"), name + ": '" + text + "'");
      expect_nothing([&, op = op] { op(Inputs(0)); }, name + " after that");
    }
  }
}

// A device that is lost: every call fails from then on, and says so.
void check_lost_device() {
  fake_torch::set_device(0);
  embed(Inputs(0));
  queue_bad_call(0, 33);
  fake_cuda::let_time_pass();
  fake_cuda::fail_call(0, cudaErrorIllegalAddress, true);
  for (const auto& [name, op] : kOps) expect(!raised<std::runtime_error>([op = op] { op(Inputs(0)); }).empty(), name);
  expect(holds(raised<std::runtime_error>([] { posenc::cuda::check_errors(); }), "illegal memory access"), "asking");
}

// ---- threads and processes

void check_threads() {
  std::vector<std::thread> threads;
  const Tensors expected = {embed(Inputs(kCpu))[0], backward(Inputs(kCpu))[0], embed_of_another_base(Inputs(kCpu))[0]};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const int device = i % 2;
      void* const stream = i < 2 ? nullptr : new_stream(device);
      fake_torch::set_device(device);
      fake_torch::set_stream(device, stream);
      for (int round = 0; round < 10; ++round) {
        const Inputs in(device);
        const Tensors got = {embed(in)[0], backward(in)[0], embed_of_another_base(in)[0]};
        check_ids(in);
        wait(device, stream);
        expect(same(expected, got), "results of a thread");
        posenc::cuda::check_errors();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// A child of a process that used CUDA: whatever is pending there, and whatever its threads hold, the child neither
// waits nor raises it.
void check_forked_children() {
  fake_torch::set_device(0);
  const Inputs in(0);
  queue_bad_call(0, 50);
  fake_cuda::let_time_pass();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) raised<std::out_of_range>([] { posenc::cuda::check_errors(); });
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      expect_nothing([] { posenc::cuda::check_errors(); }, "asking in a child");
      const std::string text = raised<std::runtime_error>([&] { check_ids(in); });
      expect(holds(text, "forked from one that had used CUDA"), "a call in a child: '" + text + "'");
      std::fflush(stdout);
      _exit(failed);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(status == 0, "a child, status " + std::to_string(status));
  }
  stop = true;
  busy.join();
}

// A process that was forked before CUDA was used may use it.
void check_early_forks() {
  const pid_t child = fork();
  if (child == 0) {
    fake_torch::set_device(0);
    expect_right_results(0, nullptr, kQueued);
    std::fflush(stdout);
    _exit(failed);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(status == 0, "a child");
}

struct Check {
  const char* name;
  void (*run)();
};

const Check kChecks[] = {
    {"results", check_results},
    {"many frequencies", check_many_frequencies},
    {"small inputs", check_small_inputs},
    {"nothing waits", check_that_nothing_waits},
    {"contexts", check_contexts},
    {"launch shapes", check_launch_shapes},
    {"the next call raises", check_that_the_next_call_raises},
    {"what errors say", check_what_errors_say},
    {"checks are apart", check_that_checks_are_apart},
    {"sparse backward", check_sparse_backward},
    {"two devices", check_two_devices},
    {"synchronous mode", check_synchronous_mode},
    {"other devices", check_other_devices},
    {"streams of others", check_streams_of_others},
    {"replays", check_replays},
    {"first use in a capture", check_first_use_in_a_capture},
    {"first use of the record", check_first_use_of_the_record},
    {"captures raise nothing", check_that_captures_raise_nothing},
    {"beside a capture", check_beside_a_capture},
    {"beside a blocking stream", check_beside_a_capture_of_a_blocking_stream},
    {"kept memory", check_kept_memory},
    {"old driver", check_old_driver},
    {"launch failure", check_launch_failure},
    {"lost device", check_lost_device},
    {"threads", check_threads},
    {"forked children", check_forked_children},
    {"early forks", check_early_forks},
    {"failures", check_failures},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc == 3 && std::strcmp(argv[1], "--only") == 0 ? argv[2] : "";
  int ran = 0, failures = 0;
  for (const Check& check : kChecks) {
    if (!only.empty() && only != check.name) continue;
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      alarm(120);
      check_name = check.name;
      machine.knows_all_memory = true;
      const std::string text = raised<std::exception>(check.run);
      expect(text.empty(), "'" + text + "'");
      std::fflush(stdout);
      _exit(failed);
    }
    int status = 0;
    waitpid(child, &status, 0);
    ++ran;
    if (status != 0) ++failures, std::printf("FAILED %s, status %d\n", check.name, status);
  }
  std::printf("%d checks, %d failed\n", ran, failures);
  return ran > 0 && failures == 0 ? 0 : 1;
}
