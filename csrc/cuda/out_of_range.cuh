// What becomes of an out-of-range index: the first one of a call is recorded for the host, which raises at its next
// chance. No thread traps, so the CUDA context stays usable.
#pragma once

#include "backend.h"
#include "platform.cuh"

namespace posenc::cuda {

__device__ __forceinline__ bool in_range(int64_t index, int64_t rows) {
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows);
}

__device__ __forceinline__ void lock(OutOfRange* record) {
  while (atomicCAS(&record->locked, 0u, 1u) != 0u) {
  }
  __threadfence();
}

__device__ __forceinline__ void unlock(OutOfRange* record) {
  __threadfence_system();
  atomicExch(&record->locked, 0u);
}

// The earliest call wins, and within it the first place. Call, place and index belong together, hence the lock. It is
// slow and only taken where something is wrong.
__device__ __forceinline__ void record_out_of_range(const ErrorSink& errors, int64_t place, int64_t index,
                                                    int64_t rows) {
  volatile OutOfRange* const record = errors.record;
  // Where every id is out of range, most threads come too late. They learn it without the lock.
  if (record->found != 0u && record->call == errors.call) {
    __threadfence();  // the place is written before the call, and must be read after it
    if (record->place < place) return;
  }
  lock(errors.record);
  const bool first =
      record->found == 0u || errors.call < record->call || (errors.call == record->call && place < record->place);
  if (first) {
    record->place = place;
    record->index = index;
    record->rows = rows;
    __threadfence();  // a thread that looks without the lock must not see a call with the place of another
    record->call = errors.call;
    record->found = 1u;
  }
  __threadfence_system();
  *const_cast<volatile uint32_t*>(errors.found) = 1u;
  unlock(errors.record);
}

}  // namespace posenc::cuda
