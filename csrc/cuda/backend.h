// The CUDA backend: what ops.cpp and python.cpp may call. Always there; in a build without nvcc every call says so
// (absent.cpp).
#pragma once

#include <memory>

#include "../frequency.h"
#include "../params.h"
#include "backward.h"
#include "check_ids.h"
#include "forward.h"
#include "launch.h"

namespace posenc::cuda {

enum class Op : uint64_t { embed = 0, embed_backward = 1, embed_backward_sparse = 2, other = 3 };

// One call of an op: from before its first launch to after its last.
//
// A bad id is found on the device, after the call has returned, so it is raised (std::out_of_range) by whatever call
// comes next, or in this one where POSENC_EXT_SYNC_ERRORS=1 asks for that; never while a graph is captured.
class Call {
 public:
  // `device` must be the current one. Raises what earlier calls have left.
  Call(Op op, int device, void* stream);

  const Launch& launch() const { return launch_; }
  // The table in memory of the device; uploaded once, which is the only time that a call waits for anything.
  Frequencies frequencies(const std::shared_ptr<const FrequencyTable>& table) const;
  // The last of the running sums that number_runs made; waits for the stream.
  int64_t read(const int32_t* value) const;
  // Raises what has gone wrong with the launches.
  void finish() const;
  // Waits for the stream and raises a bad id of this call or of an earlier one.
  void finish_and_wait() const;

 private:
  bool capturing() const;

  Op op_;
  int device_;
  Launch launch_;
};

// Waits for every device that was used, and raises the first bad id found on one.
void check_errors();

}  // namespace posenc::cuda
