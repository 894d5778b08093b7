// What is kept for each device: its size, the place where out-of-range indices are recorded, frequencies.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "../frequency.h"
#include "backend.h"
#include "platform.cuh"

namespace posenc::cuda {

// Where kernels leave the first out-of-range index, and how the host learns of it and takes it.
class ErrorRecord {
 public:
  // `memory` of the device, to hold an OutOfRange.
  ErrorRecord(cudaStream_t stream, void* memory);

  ErrorSink sink(uint64_t call) const { return {record_, &mapped_on_device_->found, call}; }
  bool found() const { return const_cast<const volatile Mapped*>(mapped_)->found != 0; }
  // found == 0 in the result if another thread was faster.
  OutOfRange take();

 private:
  struct Mapped {
    uint32_t found = 0;
    OutOfRange taken;
  };

  cudaStream_t stream_;
  std::mutex mutex_;
  OutOfRange* record_ = nullptr;
  Mapped* mapped_ = nullptr;  // memory of the host
  Mapped* mapped_on_device_ = nullptr;
};

// Made at a device's first use and kept until the process ends, like the CUDA context it belongs to. The current device
// of the calling thread must be this one.
struct Device final : Occupancy {
  Device(int device, const Framework& framework);
  // To be called with every stream before it is used. An event to be recorded after each use, null for a stream that is
  // never destroyed.
  cudaEvent_t use(cudaStream_t stream, const Framework& framework);
  // Waits for all work of those streams that is not under capture.
  void wait();
  // Work that `stream` gets from now on finds what was set up: this waits for it, or the graph under capture will.
  void settle(cudaStream_t stream, const std::function<bool()>& capturing);
  // The table in memory that is never freed, so that no kernel and no graph can lose it; nothing once that memory is
  // full, unless `capturing`.
  std::optional<Frequencies> frequencies(const FrequencyTable& table, cudaStream_t stream,
                                         const std::function<bool()>& capturing, const Framework& framework);

  // Asked of the CUDA runtime once for each kernel, which is launched with so many threads a block at most.
  int64_t resident_blocks(const void* kernel, int threads) override;

  const int index;
  std::unique_ptr<ErrorRecord> errors;  // of all calls but checks
  std::unique_ptr<ErrorRecord> checks;  // of one check at a time, which holds the mutex
  std::mutex checks_mutex;

 private:
  void settle_locked(cudaStream_t stream, const std::function<bool()>& capturing);

  int processors_ = 0;
  std::mutex occupancy_mutex_;
  std::unordered_map<const void*, int64_t> resident_blocks_;
  cudaStream_t copies_ = nullptr;  // for what must not wait for other work, nor be captured with it
  std::mutex streams_mutex_;
  std::map<cudaStream_t, cudaEvent_t> streams_;
  std::atomic<cudaStream_t> last_lasting_;
  cudaEvent_t set_up_ = nullptr;  // after all that was queued there for later calls
  std::atomic<bool> settled_{false};
  std::mutex set_up_mutex_;
  std::map<FrequencyKey, Frequencies> frequencies_;
  int64_t frequency_bytes_ = 0;
};

}  // namespace posenc::cuda
