// Counting along rows: one block for each row, which scans it tile by tile; and a search for each token of packed
// sequences.
#pragma once

#include "../positions.h"
#include "platform.cuh"

namespace posenc::cuda {

constexpr int kScanThreads = 256;
constexpr int kScanItems = 4;  // consecutive tokens of a thread in each tile; 8 spill on 8.0

template <class Row>
__global__ void scan_rows(const typename Row::Params params);

__global__ void find_sequences(const SequenceStartParams params);

#if !defined(POSENC_KERNELS_FROM_PTX)

template <class Row>
__global__ void __launch_bounds__(kScanThreads) scan_rows(const typename Row::Params params) {
  POSENC_SHARED(int64_t, joined, 2 * kScanThreads);  // one half is read while the other is written
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t seq = params.rows.tokens.seq;
  for (int64_t b = blockIdx.x; b < params.rows.tokens.batch; b += gridDim.x) {
    const Row row(params, b);
    int64_t before = 0;  // the tile
    for (int64_t tile = 0; tile < seq; tile += kScanThreads * kScanItems) {
      const int64_t first = tile + thread * kScanItems;
      int64_t terms[kScanItems];
      int64_t own = 0;
#pragma unroll
      for (int i = 0; i < kScanItems; ++i) {
        terms[i] = first + i < seq ? row.term(first + i) : 0;
        own = Row::join(own, terms[i]);
      }
      int half = 0;
      joined[thread] = own;
      __syncthreads();
      for (int step = 1; step < kScanThreads; step *= 2) {
        int64_t sum = joined[half + thread];
        if (thread >= step) sum = Row::join(joined[half + thread - step], sum);
        half = kScanThreads - half;
        joined[half + thread] = sum;
        __syncthreads();
      }
      int64_t scan = before;
      if (thread > 0) scan = Row::join(scan, joined[half + thread - 1]);
      before = Row::join(before, joined[half + kScanThreads - 1]);
#pragma unroll
      for (int i = 0; i < kScanItems; ++i) {
        scan = Row::join(scan, terms[i]);
        if (first + i < seq)
          params.rows.out[params.rows.tokens.order.at(b, first + i)] = row.position(first + i, terms[i], scan);
      }
      __syncthreads();  // the next tile writes where others may still read
    }
  }
}

__global__ void __launch_bounds__(kScanThreads) find_sequences(const SequenceStartParams params) {
  for (int64_t token = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; token < params.total;
       token += int64_t{gridDim.x} * blockDim.x) {
    const int64_t begun = sequences_begun(params, token);
    params.out[token] = wrapping_sum(params.start, token - (begun > 0 ? params.starts[begun - 1] : 0));
  }
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
