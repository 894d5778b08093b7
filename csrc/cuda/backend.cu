#include "backend.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "../checks.h"
#include "device.cuh"

namespace posenc::cuda {
namespace {

const char* name_of(Op op) {
  switch (op) {
    case Op::embed: return "embed";
    case Op::embed_backward: return "embed_backward";
    case Op::embed_backward_sparse: return "embed_backward_sparse";
    case Op::other: break;
  }
  return "CUDA kernels";
}

// Numbers of calls grow, and their lowest two bits say which op it was.
uint64_t next_call(Op op) {
  static std::atomic<uint64_t> calls{0};
  return (calls.fetch_add(1, std::memory_order_relaxed) << 2) | static_cast<uint64_t>(op);
}

bool raises_at_once() {
  static const bool asked = [] {
    const char* value = std::getenv("POSENC_EXT_SYNC_ERRORS");
    return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
  }();
  return asked;
}

// Once all work of the device is done.
void raise_bad_id(Device& device) {
  const BadId bad = device.take_bad_id();
  if (bad.found == 0) return;  // another thread was faster
  throw std::out_of_range(message(name_of(static_cast<Op>(bad.call & 3)), "input must hold ids in [0, ", bad.rows,
                                  "), got ", bad.id, " at flat index ", bad.place,
                                  ", found by a call on cuda:", device.index(),
                                  " (its row is NaN; with POSENC_EXT_SYNC_ERRORS=1 the call itself raises)"));
}

}  // namespace

Call::Call(Op op, int device, void* stream) : op_(op), device_(device) {
  // This library's copy of the CUDA runtime follows the caller's current device only if told.
  check(cudaSetDevice(device), "selecting the device");
  launch_.stream = static_cast<cudaStream_t>(stream);
  Device& state = Device::get(device);
  if (state.found_bad_id() && !capturing()) {
    check(cudaDeviceSynchronize(), "waiting for the device");
    raise_bad_id(state);
  }
  launch_.resident_threads = state.resident_threads();
  launch_.call = next_call(op);
  launch_.bad_id = state.bad_id();
  launch_.bad_id_found = state.bad_id_found();
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
  return result;
}

void Call::finish() const {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(message(name_of(op_), "a CUDA launch failed: ", cudaGetErrorString(error)));
  if (raises_at_once() && !capturing()) finish_and_wait();
}

void Call::finish_and_wait() const {
  check(cudaStreamSynchronize(launch_.stream), "waiting for the stream");
  Device& state = Device::get(device_);
  if (state.found_bad_id()) raise_bad_id(state);
}

void check_errors() {
  int before = 0;
  const std::vector<Device*> devices = Device::all();
  if (devices.empty()) return;
  check(cudaGetDevice(&before), "asking for the current device");
  std::exception_ptr error;
  for (Device* device : devices) {
    try {
      check(cudaSetDevice(device->index()), "selecting a device");
      check(cudaDeviceSynchronize(), "waiting for a device");
      if (device->found_bad_id()) raise_bad_id(*device);
    } catch (...) {
      error = std::current_exception();
      break;
    }
  }
  cudaSetDevice(before);
  if (error) std::rethrow_exception(error);
}

}  // namespace posenc::cuda
