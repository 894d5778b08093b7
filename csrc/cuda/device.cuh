// What is kept for each device: its size, the place where bad ids are written down, frequencies.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../frequency.h"
#include "launch.h"
#include "runtime_check.h"

namespace posenc::cuda {

// Allocations and copies outside every stream under capture: while this lives, a capture in this thread does not mind.
class OutsideCapture {
 public:
  OutsideCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving the capture mode"); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Made at a device's first use and kept until the process ends, like the CUDA context it belongs to.
class Device {
 public:
  // The current device of this thread must be `index`.
  static Device& get(int index);
  // Those in use so far.
  static std::vector<Device*> all();

  int index() const { return index_; }
  int64_t resident_threads() const { return resident_threads_; }
  BadId* bad_id() const { return bad_id_; }
  uint32_t* bad_id_found() const { return found_on_device_; }
  bool found_bad_id() const { return *const_cast<const volatile uint32_t*>(found_) != 0; }
  // Once all work of the device is done.
  BadId take_bad_id();

  Frequencies frequencies(const std::shared_ptr<const FrequencyTable>& table);

 private:
  explicit Device(int index);

  struct Upload {
    std::shared_ptr<const FrequencyTable> table;  // keeps the address that is the key
    Frequencies view;
  };

  int index_;
  int64_t resident_threads_ = 0;
  cudaStream_t copies_ = nullptr;
  BadId* bad_id_ = nullptr;
  uint32_t* found_ = nullptr;  // of the host, mapped
  uint32_t* found_on_device_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<const FrequencyTable*, Upload> uploads_;
};

}  // namespace posenc::cuda
