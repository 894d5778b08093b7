#include "backend.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

#include "../checks.h"
#include "device.cuh"

namespace posenc::cuda {
namespace {

const char* name_of(Op op) {
  switch (op) {
    case Op::embed: return "embed";
    case Op::embed_backward: return "embed_backward";
    case Op::embed_backward_sparse: return "embed_backward_sparse";
    case Op::check: return "embed";
    case Op::other: break;
  }
  return "CUDA kernels";
}

// Numbers of calls grow, and their lowest bits say which op it was.
constexpr int kOpBits = 3;

uint64_t next_call(Op op) {
  static std::atomic<uint64_t> calls{0};
  return (calls.fetch_add(1, std::memory_order_relaxed) << kOpBits) | static_cast<uint64_t>(op);
}

Op op_of(uint64_t call) { return static_cast<Op>(call & ((1u << kOpBits) - 1)); }

bool raises_at_once() {
  static const bool asked = [] {
    const char* value = std::getenv("POSENC_EXT_SYNC_ERRORS");
    return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
  }();
  return asked;
}

// Waits for the device first, so that a call with many bad ids is raised once, with its first one.
void raise_from(ErrorRecord& record, int device) {
  if (cudaDeviceSynchronize() != cudaSuccess) cudaGetLastError();  // what is wrong with the device is told elsewhere
  const BadId bad = record.take();
  if (bad.found == 0) return;  // another thread was faster
  const Op op = op_of(bad.call);
  const char* const what = op == Op::embed   ? "its row is NaN"
                           : op == Op::check ? "nothing was written"
                                             : "it was left out";
  throw std::out_of_range(message(name_of(op), "input must hold ids in [0, ", bad.rows, "), got ", bad.id,
                                  " at flat index ", bad.place, ", found by a call on cuda:", device, " (", what,
                                  "; with POSENC_EXT_SYNC_ERRORS=1 the call itself raises)"));
}

}  // namespace

Call::Call(Op op, int device, void* stream) : op_(op), device_(device) {
  // This library's copy of the CUDA runtime follows the caller's current device only if told.
  check(cudaSetDevice(device), "selecting the device");
  launch_.stream = static_cast<cudaStream_t>(stream);
  Device& state = Device::get(device);
  if (state.errors().found() && !capturing()) raise_from(state.errors(), device);
  if (op == Op::check) alone_ = std::unique_lock<std::mutex>(state.checks_mutex());
  record_ = op == Op::check ? &state.checks() : &state.errors();
  launch_.resident_threads = state.resident_threads();
  launch_.call = next_call(op);
  launch_.bad_id = record_->bad_id();
  launch_.bad_id_found = record_->found_on_device();
}

bool Call::capturing() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(launch_.stream, &status), "asking for a capture");
  return status != cudaStreamCaptureStatusNone;
}

Frequencies Call::frequencies(const std::shared_ptr<const FrequencyTable>& table) const {
  return Device::get(device_).frequencies(table);
}

int64_t Call::read(const int32_t* value) const {
  int32_t result = 0;
  check(cudaMemcpyAsync(&result, value, sizeof(result), cudaMemcpyDeviceToHost, launch_.stream), "reading a count");
  check(cudaStreamSynchronize(launch_.stream), "reading a count");
  raise_bad_id();
  return result;
}

void Call::raise_launch_error() const {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(message(name_of(op_), "a CUDA launch failed: ", cudaGetErrorString(error)));
}

void Call::raise_bad_id() const {
  if (record_->found()) raise_from(*record_, device_);
}

void Call::finish() const {
  raise_launch_error();
  if (raises_at_once() && !capturing()) finish_and_wait();
}

void Call::finish_and_wait() const {
  raise_launch_error();
  check(cudaStreamSynchronize(launch_.stream), "waiting for the stream");
  raise_bad_id();
}

// In a thread of its own: which device is current in the caller's is not to be asked for, since that alone would
// set up the first one.
void check_errors() {
  const std::vector<Device*> devices = Device::all();
  if (devices.empty()) return;
  std::exception_ptr error;
  std::thread([&] {
    for (Device* device : devices) {
      try {
        check(cudaSetDevice(device->index()), "selecting a device");
        check(cudaDeviceSynchronize(), "waiting for a device");
        if (device->errors().found()) raise_from(device->errors(), device->index());
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

}  // namespace posenc::cuda
