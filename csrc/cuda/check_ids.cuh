// Looks for ids outside the table and does nothing else.
#pragma once

#include "bad_id.cuh"
#include "element.cuh"

namespace posenc::cuda {

constexpr int kCheckThreads = 256;

__global__ void check_ids(const void* ids, bool wide, int64_t count, const IdCheck check);

#if !defined(POSENC_KERNELS_FROM_PTX)

__global__ void __launch_bounds__(kCheckThreads)
    check_ids(const void* ids, bool wide, int64_t count, const IdCheck check) {
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < count; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t id = load_integer(static_cast<const char*>(ids) + at * (wide ? 8 : 4), wide).value();
    if (!in_table(id, check.rows)) record_bad_id(check, at, id);
  }
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
