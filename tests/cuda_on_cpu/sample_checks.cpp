// Runs the sample kernels: all right ones against the host's own arithmetic, or, named on the command line, one wrong
// one, which must not come through. Prints one line for each check that fails; the exit status says whether any did.
#include <cmath>
#include <functional>
#include <map>
#include <string>

#include "buffer.h"
#include "sample_kernels.cuh"

namespace {

using namespace samples;

int failures = 0;

void check(bool passed, const char* what) {
  if (passed) return;
  ++failures;
  std::printf("FAILED %s\n", what);
}

template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (a != a && b != b);
}

Buffer<float> some_floats(int64_t count, uint64_t seed) {
  Random random(seed);
  Buffer<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(random.normal());
  return values;
}

// ---- right ones

float expected_arithmetic(float x, bool negate, int code, int word) {
  float y = std::fma(x, x, -1.0f) / (x + 3.0f);
  if (negate) y = -y;
  const float choices[] = {y + 1.0f, y * 0.5f, y - x, std::fabs(y), std::fmin(y, x), std::fmax(y, x)};
  return (code < 6 ? choices[code] : 7.0f) + static_cast<float>(word);
}

int64_t expected_integer(int64_t n, int64_t i) {
  const uint64_t u = static_cast<uint64_t>(n);
  uint64_t result = static_cast<uint64_t>(static_cast<unsigned __int128>(u) * 0x9E3779B97F4A7C15ull >> 64);
  result ^= static_cast<uint64_t>(n >> (i & 63)) ^ u << ((i * 7) & 63);
  result += (u & 0xFFFFFFFFu) * 0x85EBCA6Bu >> 32;
  result -= static_cast<uint64_t>(n / (i + 1) + n % (i + 3)) + u / static_cast<uint64_t>(i + 5);
  const uint32_t low = static_cast<uint32_t>(u);
  result += static_cast<uint64_t>(__builtin_popcount(low) + (low == 0 ? 32 : __builtin_clz(low)));
  return static_cast<int64_t>(result + static_cast<uint64_t>(std::llabs(n) % 1000));
}

void check_arithmetic() {
  constexpr int64_t kCount = 300;
  Buffer<float> in = some_floats(kCount, 1), out(kCount);
  Buffer<int64_t> integers(kCount), integers_out(kCount);
  Buffer<double> doubles(kCount), doubles_out(kCount);
  Random random(2);
  for (int64_t i = 0; i < kCount; ++i) {
    integers[i] = static_cast<int64_t>(random.bits() >> (i % 60)) * (i % 2 == 0 ? 1 : -1);
    doubles[i] = random.normal();
  }
  for (int code = 0; code < 8; ++code) {
    const bool negate = code % 2 == 1;
    Pointers args{in.data(), out.data(), kCount, negate, static_cast<uint8_t>(code), {5, -3, 0, 1 << 20, 7, -9}, 1.75};
    POSENC_LAUNCH(arithmetic, dim3(3), dim3(128), nullptr, args, integers.data(), doubles.data(), integers_out.data(),
                  doubles_out.data());
    for (int64_t i = 0; i < kCount; ++i) {
      check(same(out[i], expected_arithmetic(in[i], negate, code, args.words[i % 6])), "arithmetic of floats");
      check(integers_out[i] == expected_integer(integers[i], i), "arithmetic of integers");
      const double wanted = doubles[i] * 1.75 / (doubles[i] + 0.25) - static_cast<double>(integers[i]);
      check(same(doubles_out[i], wanted), "arithmetic of doubles");
    }
  }
}

// To `kept` bits of significand, to nearest, ties to even; of numbers in the normal range.
float rounded_to(float x, int kept) {
  uint32_t bits = cuda_on_cpu::reinterpret<uint32_t>(x);
  const int dropped = 24 - kept;
  bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  return cuda_on_cpu::reinterpret<float>(bits >> dropped << dropped);
}

void check_conversions() {
  constexpr int kCount = 400;
  Buffer<float> in = some_floats(kCount, 3);
  Buffer<uint32_t> out(kCount * 12);
  for (int i = 100; i < kCount; ++i) in[i] = std::ldexp(in[i], i % 16);
  for (int i = 300; i < kCount; ++i) in[i] = std::floor(in[i]) + 0.5f;  // halfway
  POSENC_LAUNCH(conversions, dim3(4), dim3(128), nullptr, in.data(), out.data(), kCount);
  const auto bits = [](float x) { return cuda_on_cpu::reinterpret<uint32_t>(x); };
  const auto upper = [&](float x) { return bits(rounded_to(x, 8)) >> 16; };
  for (int i = 0; i < kCount; ++i) {
    const float x = in[i];
    const uint32_t* got = &out[i * 12];
    check(got[0] == bits(rounded_to(x, 8)), "float to bf16 and back");
    if (std::fabs(x) > 1e-4f && std::fabs(x) < 6e4f) check(got[1] == bits(rounded_to(x, 11)), "float to f16 and back");
    check(got[2] == (upper(-x) << 16 | upper(x)), "pair of bf16");
    check((got[3] ^ got[3] >> 16 ^ 0x8000u) % 65536 == 0, "pair of f16 of opposite signs");
    check(static_cast<int32_t>(got[4]) == static_cast<int32_t>(x), "truncation");
    check(static_cast<int32_t>(got[5]) == static_cast<int32_t>(std::floor(x)), "floor");
    check(static_cast<int32_t>(got[6]) == static_cast<int32_t>(std::ceil(x)), "ceiling");
    check(static_cast<int32_t>(got[7]) == static_cast<int32_t>(std::rint(x)), "nearest integer");
    check(got[8] == bits(static_cast<float>(static_cast<int32_t>(bits(x)))), "float of int32");
    check(got[9] == bits(static_cast<float>(uint64_t{bits(x)} * 0x10001u)), "float of uint64");
    check(got[10] == bits(static_cast<float>(static_cast<double>(x) * 1.0000000596)), "float of double");
    const uint32_t narrow =
        static_cast<uint16_t>(bits(x) >> 7) + static_cast<uint32_t>(static_cast<int8_t>(bits(x) >> 3));
    check(got[11] == narrow, "narrow integers");
  }
}

void check_vectors() {
  constexpr int kCount = 70;
  Buffer<uint4> in(kCount), out(kCount);
  Buffer<uint2> halves(kCount);
  for (unsigned i = 0; i < kCount; ++i) in[i] = make_uint4(i, i * 3, i * 5, ~i);
  POSENC_LAUNCH(vectors, dim3(3), dim3(32), nullptr, in.data(), out.data(), halves.data(), kCount);
  for (unsigned i = 0; i < kCount; ++i) {
    check(out[i].x == ~i && out[i].y == i * 5 && out[i].z == i * 3 && out[i].w == i, "16-byte vectors");
    check(halves[i].x == (i ^ i * 3) && halves[i].y == (i * 5 ^ ~i), "8-byte vectors");
  }
}

void check_block_sum() {
  constexpr int kCount = 1000, kThreads = 256, kBlocks = 4;
  Buffer<float> in(kCount), out(kBlocks);
  for (int i = 0; i < kCount; ++i) in[i] = static_cast<float>(i % 37);  // sums are exact in any order
  POSENC_LAUNCH(block_sum, dim3(kBlocks), dim3(kThreads), nullptr, in.data(), out.data(), kCount);
  for (int block = 0; block < kBlocks; ++block) {
    float sum = 0;
    for (int i = block * kThreads; i < std::min(kCount, (block + 1) * kThreads); ++i) sum += in[i];
    check(out[block] == sum, "sum of a block");
  }
}

void check_rotation() {
  constexpr int kThreads = 96, kRounds = 37;
  Buffer<float> in = some_floats(2 * kThreads, 4), out(2 * kThreads);
  for (int i = 0; i < 2 * kThreads; ++i) in[i] = static_cast<float>(i);
  POSENC_LAUNCH(rotate_rounds, dim3(2), dim3(kThreads), nullptr, in.data(), out.data(), kRounds);
  for (int i = 0; i < 2 * kThreads; ++i) {
    const int from = i / kThreads * kThreads + (i + kRounds) % kThreads;
    check(out[i] == static_cast<float>(from + kRounds), "rotation through shared memory");
  }
}

void check_last_block() {
  constexpr int kBlocks = 9;
  Buffer<float> in(kBlocks), partial(kBlocks), out(1);
  Buffer<unsigned> done(1);
  done[0] = 0;
  float sum = 0;
  for (int i = 0; i < kBlocks; ++i) in[i] = static_cast<float>(i + 1), sum += 2 * in[i];
  POSENC_LAUNCH(last_block_sum, kBlocks, 64, nullptr, in.data(), partial.data(), out.data(), done.data());
  check(out[0] == sum, "sum by the last block");
}

void check_atomics() {
  constexpr int kCount = 200;
  Buffer<int> in(kCount), ints(5);
  Buffer<unsigned long long> longs(2);
  Buffer<float> sum(1);
  std::fill_n(ints.data(), 5, 0), std::fill_n(longs.data(), 2, 0), sum[0] = 0;
  int total = 0;
  unsigned long long bytes = 0;
  for (int i = 0; i < kCount; ++i) in[i] = (i * 31) % 57 - 20, total += in[i], bytes += in[i] & 0xFF;
  POSENC_LAUNCH(atomics, dim3(4), dim3(64), nullptr, in.data(), ints.data(), longs.data(), sum.data(), kCount);
  check(ints[0] == total && ints[1] == -20 && ints[2] == 36 && ints[3] == 77 && ints[4] == 9, "atomics of 4 bytes");
  check(longs[0] == bytes && longs[1] == 199ull << 33, "atomics of 8 bytes");
  check(sum[0] == 100.0f, "atomic sum of floats");
}

void check_local_array() {
  constexpr int kCount = 40;
  Buffer<float> in(kCount), out(kCount);
  for (int i = 0; i < kCount; ++i) in[i] = static_cast<float>(i % 5);
  const Pointers args{in.data(), out.data(), kCount, false, 0, {3, 17, 23, 8, 0, 11}, 1.0};
  POSENC_LAUNCH(local_array, dim3(2), dim3(32), nullptr, args);
  for (int i = 0; i < kCount; ++i) {
    float values[24];
    for (int k = 0; k < 24; ++k) values[k] = in[i] * static_cast<float>(k);
    for (int k = 0; k < 48; ++k) values[args.words[k % 6] % 24] += values[(args.words[k % 5] + k) % 24];
    check(out[i] == values[args.words[i % 6] % 24], "local memory");
  }
}

template <class T>
void check_scaled() {
  constexpr int kCount = 300;
  Buffer<T> in(kCount), out(kCount);
  for (int i = 0; i < kCount; ++i) in[i] = static_cast<T>(i) / 7;
  POSENC_LAUNCH((scaled<T>), dim3(2), dim3(64), nullptr, in.data(), out.data(), T{3}, kCount);
  for (int i = 0; i < kCount; ++i) check(out[i] == in[i] * 3, "a template, with scalars");
}

void run_all() {
  check_arithmetic();
  check_conversions();
  check_vectors();
  check_block_sum();
  check_rotation();
  check_last_block();
  check_atomics();
  check_local_array();
  check_scaled<float>();
  check_scaled<double>();
}

// ---- wrong ones

Buffer<float> zeros(int64_t count) {
  Buffer<float> values(count);
  std::fill_n(values.data(), count, 0.0f);
  return values;
}

template <class T>
T argument(const T& scalar) {
  return scalar;
}
template <class T>
T* argument(Buffer<T>& buffer) {
  return buffer.data();
}

// Launches a kernel on buffers and scalars.
template <class Kernel, class... Arguments>
void run(Kernel kernel, const cuda_on_cpu::Extent& grid, const cuda_on_cpu::Extent& block, Arguments&&... arguments) {
  POSENC_LAUNCH(kernel, grid, block, nullptr, argument(arguments)...);
}

const std::map<std::string, std::function<void()>> kWrong = {
    {"reads_too_far", [] { run(reads_too_far, 1, 32, zeros(32), zeros(32)); }},
    {"writes_too_far", [] { run(writes_too_far, 2, 32, zeros(64)); }},
    {"loads_vectors_anywhere",
     [] {
       Buffer<float> in = zeros(33);
       run(loads_vectors_anywhere, 1, 8, in.data() + 1, zeros(32));
     }},
    {"overruns_shared", [] { run(overruns_shared, 1, 32, zeros(32)); }},
    {"reads_unwritten_shared",
     [] {
       Buffer<float> out = zeros(32);
       run(reads_unwritten_shared, 1, 32, out);
       for (int i = 0; i < 32; ++i) check(out[i] == 1.0f, "a value from shared memory");
     }},
    {"leaves_out_barrier", [] { run(leaves_out_barrier, 1, 128, zeros(128), zeros(128)); }},
    {"leaves_out_second_barrier", [] { run(leaves_out_second_barrier, 1, 128, zeros(128), zeros(128), 3); }},
    {"ends_before_barrier", [] { run(ends_before_barrier, 1, 64, zeros(64)); }},
    {"waits_at_two_barriers", [] { run(waits_at_two_barriers, 1, 64, zeros(64)); }},
    {"adds_in_block", [] { run(adds_in_block, 1, 32, zeros(1)); }},
    {"adds_across_blocks", [] { run(adds_across_blocks, 3, 256, zeros(1)); }},
    {"adds_across_blocks_with_barriers", [] { run(adds_across_blocks_with_barriers, 3, 256, zeros(1)); }},
    {"publishes_without_fence",
     [] {
       Buffer<unsigned> done(1);
       done[0] = 0;
       run(publishes_without_fence, 9, 32, zeros(9), zeros(1), done);
     }},
    {"waits_for_another",
     [] {
       Buffer<unsigned> flag(1);
       flag[0] = 0;
       run(waits_for_another, 1, 32, flag);
     }},
    {"adds_to_half_an_atomic",
     [] {
       Buffer<unsigned> words(2);
       run(adds_to_half_an_atomic, 1, 1, reinterpret_cast<char*>(words.data()));
     }},
    {"no_blocks", [] { run(scaled<float>, 0, 32, zeros(1), zeros(1), 1.0f, 1); }},
    {"too_many_threads", [] { run(scaled<float>, 1, dim3(64, 32), zeros(1), zeros(1), 1.0f, 1); }},
    {"grid_beyond_32_bits", [] { run(scaled<float>, int64_t{1} << 32 | 1, 32, zeros(1), zeros(1), 1.0f, 1); }},
    // Only PTX says what they are.
    {"more_threads_than_launch_bounds", [] { run(scaled<float>, 1, 256, zeros(1), zeros(1), 1.0f, 1); }},
};

}  // namespace

int main(int argc, char** argv) {
  fake_cuda::machine.works_at_once = true;
  if (argc == 1) {
    run_all();
  } else {
    kWrong.at(argv[1])();
  }
  std::printf("%s\n", failures == 0 ? "passed" : "failed");
  return failures == 0 ? 0 : 1;
}
