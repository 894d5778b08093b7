#include "bounds.cuh"

#include "launch_config.h"

namespace posenc::cuda {

void take_out_of_range(OutOfRange* record, uint32_t* found, OutOfRange* taken, void* stream) {
  POSENC_LAUNCH(take_record, 1, 1, stream, record, found, taken);
}

void check_bounds(const Integers& ids, int64_t count, int64_t rows, const Launch& launch) {
  if (count == 0) return;
  const int64_t blocks =
      balanced(divide_up(count, kBoundsThreads), 1, launch.resident_blocks(find_out_of_range, kBoundsThreads)).x;
  POSENC_LAUNCH(find_out_of_range, blocks, kBoundsThreads, launch.stream, ids.data, ids.is_int64, count, rows,
                launch.errors);
}

}  // namespace posenc::cuda
