#include "check_ids.h"

#include "check_ids.cuh"
#include "shape.h"

namespace posenc::cuda {

void take_bad_id(BadId* record, uint32_t* found, BadId* taken, CUstream_st* stream) {
  POSENC_LAUNCH(take_record, dim3(1), dim3(1), 0, stream, record, found, taken);
}

void check_ids(const Integers& ids, int64_t count, int64_t rows, const Launch& launch) {
  if (count == 0) return;
  const int64_t most = std::max<int64_t>(launch.resident_threads / kCheckThreads, 1);
  const dim3 blocks(std::min(divide_up(count, kCheckThreads), most));
  const IdCheck check = {rows, launch.call, launch.bad_id, launch.bad_id_found};
  POSENC_LAUNCH(check_ids, blocks, dim3(kCheckThreads), 0, launch.stream, ids.data, ids.wide, count, check);
}

}  // namespace posenc::cuda
