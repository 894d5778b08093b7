#include "runtime.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <thread>
#include <vector>

#include "../errors.h"

namespace posenc::cuda {
namespace {

// Allocations and copies outside every stream under capture: while this lives, a capture in this thread does not mind.
class OutsideCapture {
 public:
  OutsideCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving the capture mode"); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// ---- frequencies

// The arrays of a table, one after the other.
class PackedTable {
 public:
  explicit PackedTable(const FrequencyTable& table)
      : stride_((static_cast<int64_t>(table.angular.size()) + 3) / 4 * 4), words_(5 * stride_, 0) {
    for (int64_t i = 0; i < 4; ++i)
      std::copy(table.turns[i].begin(), table.turns[i].end(), words_.begin() + i * stride_);
    std::memcpy(words_.data() + 4 * stride_, table.angular.data(), table.angular.size() * sizeof(float));
  }

  int64_t bytes() const { return static_cast<int64_t>(words_.size() * sizeof(uint32_t)); }

  // The source is pageable, so it has been read when this returns, though it may not have arrived.
  void copy_to(void* memory, cudaStream_t stream) const {
    check(cudaMemcpyAsync(memory, words_.data(), bytes(), cudaMemcpyHostToDevice, stream), "uploading frequencies");
  }

  Frequencies view(const void* memory) const {
    const auto* first = static_cast<const uint32_t*>(memory);
    Frequencies result;
    for (int64_t i = 0; i < 4; ++i) result.turns[i] = first + i * stride_;
    result.angular = reinterpret_cast<const float*>(first + 4 * stride_);
    return result;
  }

 private:
  int64_t stride_;  // of words, so that every array is aligned
  std::vector<uint32_t> words_;
};

// ---- devices

std::mutex devices_mutex;

std::map<int, std::unique_ptr<Device>>& devices() {
  static auto* map = new std::map<int, std::unique_ptr<Device>>;  // never destroyed: the driver may be gone first
  return *map;
}

// In a child of a process that used CUDA: nothing of CUDA works there, and a lock may be held by a thread that is not.
std::atomic<bool> forked{false};

Device& device_of(int index, const Framework& framework) {
  static const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)watched;
  const std::lock_guard<std::mutex> lock(devices_mutex);
  std::unique_ptr<Device>& device = devices()[index];
  if (!device) device = std::make_unique<Device>(index, framework);
  return *device;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// This library's copy of the CUDA runtime follows the caller's current device only if told.
void select(int device) {
  const cudaError_t error = cudaSetDevice(device);
  int driver = 0;
  if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess) {
    cudaGetLastError();
    const std::string major = std::to_string(CUDART_VERSION / 1000);
    throw std::runtime_error(
        "posenc_ext: built by nvcc " + version_text(CUDART_VERSION) + ", it needs an NVIDIA driver for CUDA " + major +
        ".0 or newer, but this one is for CUDA " + version_text(driver) +
        ": update the driver, or install posenc_ext with an nvcc below " + major + ".0 in CUDA_HOME");
  }
  check(error, "selecting the device");
}

std::vector<Device*> devices_in_use() {
  const std::lock_guard<std::mutex> lock(devices_mutex);
  std::vector<Device*> result;
  for (const auto& entry : devices())
    if (entry.second) result.push_back(entry.second.get());
  return result;
}

// ---- errors

const char* name_of(Op op) {
  switch (op) {
    case Op::embed: return "embed";
    case Op::embed_backward: return "embed_backward";
    case Op::embed_backward_sparse: return "embed_backward_sparse";
    case Op::check: return "embed";
    case Op::add: return "add_positional_encoding";
    case Op::other: break;
  }
  return "CUDA kernels";
}

bool waits(Op op) { return op == Op::check || op == Op::embed_backward_sparse; }

// Numbers of calls grow, and their lowest bits say which op it was. A key has both.
constexpr int kOpBits = 3;

Op op_of(unsigned long long key) { return static_cast<Op>(key >> kPlaceBits & ((1u << kOpBits) - 1)); }
int64_t place_of(unsigned long long key) { return static_cast<int64_t>(key & ((1ull << kPlaceBits) - 1)); }

uint64_t next_call(Op op) {
  static std::atomic<uint64_t> calls{0};
  return (calls.fetch_add(1, std::memory_order_relaxed) << kOpBits) | static_cast<uint64_t>(op);
}

bool raises_at_once() {
  static const bool asked = [] {
    const char* value = std::getenv("POSENC_EXT_SYNC_ERRORS");
    return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
  }();
  return asked;
}

// Where a call has many out-of-range indices, it must have ended: then it is raised once, with its first one.
void raise_if_found(ErrorRecord& record, int device) {
  if (!record.found()) return;
  const OutOfRange error = record.take();
  if (error.key == kNoKey) return;  // another thread was faster, or it is still being written
  const Op op = op_of(error.key);
  const char* const what = op == Op::embed || op == Op::add ? "its row is NaN"
                           : op == Op::check                ? "nothing was written"
                                                            : "it was left out";
  const bool id = error.of == IndexOf::ids;
  throw std::out_of_range(message(name_of(op), id ? "input must hold ids in [0, " : "positions must lie in [0, ",
                                  error.rows, id ? "), got " : "), the rows of position_table, got ", error.index,
                                  id ? " at flat index " : " at the token of flat index ", place_of(error.key),
                                  ", found by a call on cuda:", device, " (", what,
                                  "; with POSENC_EXT_SYNC_ERRORS=1 the call itself raises)"));
}

}  // namespace

ErrorRecord::ErrorRecord(cudaStream_t stream, void* memory)
    : stream_(stream), record_(static_cast<OutOfRange*>(memory)) {
  static const OutOfRange empty;
  check(cudaMemcpyAsync(record_, &empty, sizeof(empty), cudaMemcpyHostToDevice, stream), "clearing device memory");
  void* mapped = nullptr;
  check(cudaHostAlloc(&mapped, sizeof(Mapped), cudaHostAllocMapped), "allocating mapped memory");
  mapped_ = new (mapped) Mapped;
  check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped_on_device_), mapped, 0), "mapping memory");
}

OutOfRange ErrorRecord::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OutsideCapture outside;
  take_out_of_range(record_, &mapped_on_device_->found, &mapped_on_device_->taken, stream_);
  check(cudaGetLastError(), "launching the reading of an error");
  check(cudaStreamSynchronize(stream_), "reading an error");
  return mapped_->taken;
}

Device::Device(int device, const Framework& framework) : index(device), last_lasting_(cudaStreamPerThread) {
  const OutsideCapture outside;
  check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, index), "reading the device's size");
  check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "creating a stream");
  for (auto* record : {&errors, &checks})
    *record = std::make_unique<ErrorRecord>(copies_, framework.keep(index, copies_, sizeof(OutOfRange)));
  check(cudaEventCreateWithFlags(&set_up_, cudaEventDisableTiming), "creating an event");
  check(cudaEventRecord(set_up_, copies_), "recording an event");
}

void Device::settle(cudaStream_t stream, const std::function<bool()>& capturing) {
  if (settled_.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(set_up_mutex_);
  settle_locked(stream, capturing);
}

void Device::settle_locked(cudaStream_t stream, const std::function<bool()>& capturing) {
  if (settled_.load(std::memory_order_relaxed)) return;
  if (capturing()) {
    check(cudaStreamWaitEvent(stream, set_up_, cudaEventWaitExternal), "ordering a graph");
    return;
  }
  const OutsideCapture outside;
  check(cudaEventSynchronize(set_up_), "waiting for what is set up");
  settled_.store(true, std::memory_order_release);
}

int64_t Device::resident_blocks(const void* kernel, int threads) {
  const std::lock_guard<std::mutex> lock(occupancy_mutex_);
  const auto found = resident_blocks_.find(kernel);
  if (found != resident_blocks_.end()) return found->second;
  const OutsideCapture outside;  // the kernel may be loaded only now
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0), "asking how many blocks fit");
  return resident_blocks_[kernel] = int64_t{blocks} * processors_;
}

cudaEvent_t Device::use(cudaStream_t stream, const Framework& framework) {
  if (last_lasting_.load(std::memory_order_relaxed) == stream) return nullptr;
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  const auto [found, is_new] = streams_.try_emplace(stream, nullptr);
  if (is_new && !framework.stream_lasts(index))
    check(cudaEventCreateWithFlags(&found->second, cudaEventDisableTiming), "creating an event");
  if (found->second == nullptr) last_lasting_.store(stream, std::memory_order_relaxed);
  return found->second;
}

void Device::wait() {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  const OutsideCapture outside;
  for (const auto& [stream, ended] : streams_) {
    if (ended != nullptr) {
      check(cudaEventSynchronize(ended), "waiting for a stream");
      continue;
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error == cudaErrorStreamCaptureImplicit) cudaGetLastError();  // the legacy stream, beside a capture
    else check(error, "asking for a capture");
    if (error == cudaSuccess && status == cudaStreamCaptureStatusNone)
      check(cudaStreamSynchronize(stream), "waiting for a stream");
  }
}

std::optional<Frequencies> Device::frequencies(const FrequencyTable& table, cudaStream_t stream,
                                               const std::function<bool()>& capturing, const Framework& framework) {
  const std::lock_guard<std::mutex> lock(set_up_mutex_);
  auto found = frequencies_.find(table.key);
  if (found == frequencies_.end()) {
    const PackedTable packed(table);
    const bool room = frequency_bytes_ + packed.bytes() <= kKeptTableBytes;
    if (!room && !capturing()) return std::nullopt;
    const OutsideCapture outside;
    void* const memory = framework.keep(index, copies_, packed.bytes());
    packed.copy_to(memory, copies_);
    check(cudaEventRecord(set_up_, copies_), "recording an event");
    settled_.store(false, std::memory_order_relaxed);
    frequency_bytes_ += packed.bytes();
    found = frequencies_.emplace(table.key, packed.view(memory)).first;
  }
  settle_locked(stream, capturing);
  return found->second;
}

// ---- calls

Call::Call(Op op, int device, void* stream, const Framework& framework)
    : op_(op), device_(device), framework_(&framework) {
  if (forked)
    throw std::runtime_error(message(
        name_of(op), "this process was forked from one that had used CUDA, so it cannot; start processes by 'spawn'"));
  select(device);
  launch_.stream = stream;
  if (waits(op) && capturing())
    throw std::runtime_error(message(name_of(op), "a call that waits for the device cannot be captured in a graph"));
  Device& state = device_of(device, framework);
  ended_ = state.use(static_cast<cudaStream_t>(stream), framework);
  state.settle(static_cast<cudaStream_t>(stream), [this] { return capturing(); });
  if (state.errors->found() && !capturing()) {
    wait();
    raise_if_found(*state.errors, device);
  }
  if (op == Op::check) alone_ = std::unique_lock<std::mutex>(state.checks_mutex);
  record_ = op == Op::check ? state.checks.get() : state.errors.get();
  launch_.occupancy = &state;
  launch_.errors = record_->sink(next_call(op));
}

bool Call::capturing() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(launch_.stream), &status), "asking for a capture");
  return status != cudaStreamCaptureStatusNone;
}

Frequencies Call::frequencies(const FrequencyTable& table, const std::function<void*(int64_t)>& scratch) const {
  Device& state = device_of(device_, *framework_);
  const auto stream = static_cast<cudaStream_t>(launch_.stream);
  if (const auto kept = state.frequencies(table, stream, [this] { return capturing(); }, *framework_)) return *kept;
  const PackedTable packed(table);
  void* memory = scratch(packed.bytes());
  packed.copy_to(memory, stream);
  return packed.view(memory);
}

// Not for the device: another stream of it may be under capture.
void Call::wait() const {
  const OutsideCapture outside;
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(launch_.stream)), "waiting for the stream");
}

int64_t Call::read(const int32_t* value) const {
  raise_launch_error();  // else what is read was never written
  const auto stream = static_cast<cudaStream_t>(launch_.stream);
  int32_t result = 0;
  check(cudaMemcpyAsync(&result, value, sizeof(result), cudaMemcpyDeviceToHost, stream), "reading a count");
  wait();
  raise_if_found(*record_, device_);
  return result;
}

void Call::raise_launch_error() const {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(message(name_of(op_), "a CUDA launch failed: ", cudaGetErrorString(error)));
}

void Call::finish() const {
  raise_launch_error();
  if (ended_ != nullptr && !capturing())
    check(cudaEventRecord(static_cast<cudaEvent_t>(ended_), static_cast<cudaStream_t>(launch_.stream)),
          "recording an event");
  if (raises_at_once() && !capturing()) finish_and_wait();
}

void Call::finish_and_wait() const {
  raise_launch_error();
  wait();
  raise_if_found(*record_, device_);
}

// In a thread of its own: to ask which device is current in the caller's would set up the first one.
void check_errors() {
  if (forked) return;
  const std::vector<Device*> in_use = devices_in_use();
  if (in_use.empty()) return;
  std::exception_ptr error;
  std::thread([&] {
    for (Device* device : in_use) {
      try {
        select(device->index);
        device->wait();
        raise_if_found(*device->errors, device->index);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

}  // namespace posenc::cuda
