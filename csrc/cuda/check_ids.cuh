// Looks for ids outside the table and does nothing else; and takes what was found.
#pragma once

#include "bad_id.cuh"
#include "element.cuh"

namespace posenc::cuda {

constexpr int kCheckThreads = 256;

__global__ void check_ids(const void* ids, bool wide, int64_t count, const IdCheck check);

// Takes the record away, for the host to read: one thread, in a stream of its own, while other kernels may record.
__global__ void take_record(BadId* record, uint32_t* found, BadId* taken);

#if !defined(POSENC_KERNELS_FROM_PTX)

__global__ void take_record(BadId* record, uint32_t* found, BadId* taken) {
  while (atomicCAS(&record->locked, 0u, 1u) != 0u) {
  }
  __threadfence();
  const volatile BadId* const from = record;
  volatile BadId* const to = taken;
  to->found = from->found;
  to->call = from->call;
  to->place = from->place;
  to->id = from->id;
  to->rows = from->rows;
  const_cast<volatile BadId*>(record)->found = 0u;
  *const_cast<volatile uint32_t*>(found) = 0u;
  __threadfence_system();
  atomicExch(&record->locked, 0u);
}

__global__ void __launch_bounds__(kCheckThreads)
    check_ids(const void* ids, bool wide, int64_t count, const IdCheck check) {
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < count; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t id = load_integer(static_cast<const char*>(ids) + at * (wide ? 8 : 4), wide).value();
    if (!in_table(id, check.rows)) record_bad_id(check, at, id);
  }
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
