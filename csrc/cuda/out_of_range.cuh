// What becomes of an out-of-range index: the first one is recorded for the host, which raises at its next chance. No
// thread traps, so the CUDA context stays usable.
#pragma once

#include "../token.h"
#include "backend.h"
#include "platform.cuh"

namespace posenc::cuda {

__device__ __forceinline__ bool in_range(int64_t index, int64_t rows) {
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows);
}

// Whether no thread that came here with this one, in its warp, has a smaller key.
__device__ __forceinline__ bool is_first_of_warp(unsigned long long key) {
  const unsigned together = __activemask();
  bool first = true;
#pragma unroll 1
  for (unsigned rest = together; rest != 0; rest &= rest - 1)
    first &= key <= __shfl_sync(together, key, __ffs(static_cast<int>(rest)) - 1);
  return first;
}

// Index and rows belong to a key, hence the lock. A thread waits for it only while its key is the smallest of all, so
// hardly ever two at a time do. The fences make the atomics of the lock acquire and release: what one thread has
// written under the lock, the next one sees.
__device__ __forceinline__ void record_out_of_range(const ErrorSink& errors, int64_t place, int64_t index, int64_t rows,
                                                    IndexOf of = IndexOf::ids) {
  OutOfRange* const record = errors.record;
  const volatile unsigned long long* const first = &record->first;
  const unsigned long long key = errors.call << kPlaceBits | static_cast<unsigned long long>(place);
  // Where every id is out of range, most threads come too late. They learn it without an atomic.
  if (*first <= key || !is_first_of_warp(key) || atomicMin(&record->first, key) <= key) return;
  while (atomicCAS(&record->locked, 0u, 1u) != 0u)
    if (*first != key) return;  // a smaller one came, and its thread writes
  __threadfence();
  if (*first == key) {
    record->key = key;
    record->index = index;
    record->rows = rows;
    record->of = of;
    *static_cast<volatile uint32_t*>(errors.found) = 1u;
  }
  __threadfence();
  atomicExch(&record->locked, 0u);
}

// Of a token its id, or else its position, if it is out of range.
__device__ __forceinline__ void record_token(const ForwardParams& params, int64_t b, int64_t t,
                                             const ErrorSink& errors) {
  const int64_t place = params.tokens.order.at(b, t);
  if (params.source == Source::gathered && !in_range(params.ids[place], params.rows))
    return record_out_of_range(errors, place, params.ids[place], params.rows);
  const PositionTable& table = params.encoding.table;
  if (table.data == nullptr) return;
  const int64_t position = position_of(params, b, t).whole;
  if (!has_row(table, position)) record_out_of_range(errors, place, position, table.rows, IndexOf::positions);
}

}  // namespace posenc::cuda
