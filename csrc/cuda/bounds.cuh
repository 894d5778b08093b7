// A search for out-of-range ids, for callers that must know before they go on; and what takes a record to the host.
#pragma once

#include "out_of_range.cuh"

namespace posenc::cuda {

constexpr int kBoundsThreads = 256;

__global__ void find_out_of_range(const void* ids, bool is_int64, int64_t count, int64_t rows, const ErrorSink errors);

// Moves a record to where the host reads it: one thread, in a stream of its own, while other kernels may record.
__global__ void take_record(OutOfRange* record, uint32_t* found, OutOfRange* taken);

#if !defined(POSENC_KERNELS_FROM_PTX)

__global__ void __launch_bounds__(kBoundsThreads)
    find_out_of_range(const void* ids, bool is_int64, int64_t count, int64_t rows, const ErrorSink errors) {
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < count; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t id = Integers{ids, is_int64}[at];
    if (!in_range(id, rows)) record_out_of_range(errors, at, id, rows);
  }
}

// A thread that has brought a smaller key than the one that is kept has still to write it: then this takes nothing, and
// `found` stays for the next time.
__global__ void take_record(OutOfRange* record, uint32_t* found, OutOfRange* taken) {
  while (atomicCAS(&record->locked, 0u, 1u) != 0u) {
  }
  __threadfence();
  const unsigned long long key = record->key;
  taken->key = kNoKey;
  if (key != kNoKey && atomicCAS(&record->first, key, kNoKey) == key) {
    taken->key = key;
    taken->index = record->index;
    taken->rows = record->rows;
    record->key = kNoKey;
    *static_cast<volatile uint32_t*>(found) = 0u;
  }
  __threadfence();
  atomicExch(&record->locked, 0u);
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
