// A search for out-of-range ids and positions, for callers that must know before they go on; and what takes a record to
// the host.
#pragma once

#include "out_of_range.cuh"

namespace posenc::cuda {

constexpr int kBoundsThreads = 256;

__global__ void find_out_of_range(const ForwardParams params, const ErrorSink errors);

// Moves a record to where the host reads it: one thread, in a stream of its own, while other kernels may record.
__global__ void take_record(OutOfRange* record, uint32_t* found, OutOfRange* taken);

#if !defined(POSENC_KERNELS_FROM_PTX)

__global__ void __launch_bounds__(kBoundsThreads)
    find_out_of_range(const ForwardParams params, const ErrorSink errors) {
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < params.tokens.count();
       at += int64_t{gridDim.x} * blockDim.x)
    record_token(params, at / params.tokens.seq, at % params.tokens.seq, errors);
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
    taken->of = record->of;
    record->key = kNoKey;
    *static_cast<volatile uint32_t*>(found) = 0u;
  }
  __threadfence();
  atomicExch(&record->locked, 0u);
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
