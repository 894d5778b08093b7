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

// Where kernels leave the first bad id, and how the host learns of it and takes it.
class ErrorRecord {
 public:
  explicit ErrorRecord(cudaStream_t stream);

  BadId* bad_id() const { return bad_id_; }
  uint32_t* found_on_device() const { return &mapped_on_device_->found; }
  bool found() const { return const_cast<const volatile Mapped*>(mapped_)->found != 0; }
  // found == 0 in the result if another thread was faster.
  BadId take();

 private:
  struct Mapped {
    uint32_t found = 0;
    BadId taken;
  };

  cudaStream_t stream_;
  std::mutex mutex_;
  BadId* bad_id_ = nullptr;
  Mapped* mapped_ = nullptr;  // of the host
  Mapped* mapped_on_device_ = nullptr;
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
  // Of all calls but checks.
  ErrorRecord& errors() { return *errors_; }
  // Of one check at a time: whoever uses it holds the mutex, so that nobody else takes what the check has found.
  ErrorRecord& checks() { return *checks_; }
  std::mutex& checks_mutex() { return checks_mutex_; }

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
  std::unique_ptr<ErrorRecord> errors_, checks_;
  std::mutex mutex_, checks_mutex_;
  std::unordered_map<const FrequencyTable*, Upload> uploads_;
};

}  // namespace posenc::cuda
