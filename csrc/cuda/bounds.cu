#include "bounds.cuh"

#include "launch_config.h"

namespace posenc::cuda {

void take_out_of_range(OutOfRange* record, uint32_t* found, OutOfRange* taken, void* stream) {
  POSENC_LAUNCH(take_record, 1, 1, stream, record, found, taken);
}

void check_bounds(const ForwardParams& params, const Launch& launch) {
  const int64_t count = params.tokens.count();
  if (count == 0) return;
  const int64_t blocks =
      balanced(divide_up(count, kBoundsThreads), 1, launch.resident_blocks(find_out_of_range, kBoundsThreads)).x;
  POSENC_LAUNCH(find_out_of_range, blocks, kBoundsThreads, launch.stream, params, launch.errors);
}

}  // namespace posenc::cuda
