// The CUDA backend: what ops.cpp and python.cpp may call. Always there; in a build without nvcc every call says so
// (absent.cpp).
#pragma once

#include <memory>
#include <mutex>

#include "../frequency.h"
#include "../params.h"
#include "backward.h"
#include "check_ids.h"
#include "forward.h"
#include "launch.h"

namespace posenc::cuda {

class ErrorRecord;

// `check` is a call that only looks at ids; `other` has none.
enum class Op : uint64_t { embed = 0, embed_backward = 1, embed_backward_sparse = 2, check = 3, other = 4 };

// One call of an op: from before its first launch to after its last.
//
// A bad id is found on the device, after the call has returned, so it is raised (std::out_of_range) by the first call
// after that, or in this one where POSENC_EXT_SYNC_ERRORS=1 asks for that; never while a graph is captured. The first
// call on a device waits for what is set up there.
class Call {
 public:
  // `device` must be the current one. Raises what earlier calls have left.
  Call(Op op, int device, void* stream);

  const Launch& launch() const { return launch_; }
  // The table in memory of the device; uploaded at its first use, for which the call waits.
  Frequencies frequencies(const std::shared_ptr<const FrequencyTable>& table) const;
  // One of the running sums that number_runs made; waits for the stream, and raises a bad id that was found by then.
  int64_t read(const int32_t* value) const;
  // Raises what has gone wrong with the launches; and, where POSENC_EXT_SYNC_ERRORS=1, in them.
  void finish() const;
  // Waits for the stream and raises a bad id of this call or of an earlier one.
  void finish_and_wait() const;

 private:
  bool capturing() const;
  void raise_launch_error() const;
  void raise_bad_id() const;

  Op op_;
  int device_;
  Launch launch_;
  ErrorRecord* record_ = nullptr;
  std::unique_lock<std::mutex> alone_;  // of a check
};

// Waits for every device that was used, and raises a bad id found on one.
void check_errors();

}  // namespace posenc::cuda
