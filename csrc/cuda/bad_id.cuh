// What becomes of an id outside the table: its row is NaN, and the first one of a call is written down for the host,
// which raises at its next chance. No thread traps, so the context stays usable.
#pragma once

#include "launch.h"
#include "platform.cuh"

namespace posenc::cuda {

struct IdCheck {
  int64_t rows = 0;
  uint64_t call = 0;
  BadId* record = nullptr;
  uint32_t* found = nullptr;
};

__device__ __forceinline__ bool in_table(int64_t id, int64_t rows) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(rows);
}

// The earliest call wins, and within it the first place. Under a lock, since call, place and id belong together; only
// reached where something is wrong, so its cost does not matter.
__device__ __forceinline__ void record_bad_id(const IdCheck& check, int64_t place, int64_t id) {
  volatile BadId* const record = check.record;
  // Where everything is bad, most threads come too late, and need not queue to learn it.
  if (record->found != 0u && record->call == check.call) {
    __threadfence();  // the place is written before the call, and must be read after it
    if (record->place < place) return;
  }
  while (atomicCAS(&check.record->locked, 0u, 1u) != 0u) {
  }
  __threadfence();
  const bool first =
      record->found == 0u || check.call < record->call || (check.call == record->call && place < record->place);
  if (first) {
    record->place = place;
    record->id = id;
    record->rows = check.rows;
    __threadfence();  // whoever looks without the lock must not see a call with the place of another
    record->call = check.call;
    record->found = 1u;
  }
  __threadfence_system();
  *const_cast<volatile uint32_t*>(check.found) = 1u;
  atomicExch(&check.record->locked, 0u);
}

}  // namespace posenc::cuda
