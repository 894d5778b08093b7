// Row sums of the weight gradient.
//
// The tokens are sorted by id (sort.h), so those of a row of the table lie side by side: a segment. They are added in
// token order in chunks of kSumChunk, and the sums of the chunks (partials) in order, as on every backend. All chunks
// of a segment but the first are summed beforehand by other blocks (sum_chunks), so that a frequent token does not keep
// one block busy alone. Nothing is added atomically, and no block waits for another.
#pragma once

#include "element.cuh"
#include "out_of_range.cuh"

namespace posenc::cuda {

constexpr int kBackwardThreads = 256;
constexpr int kBackwardBlocks = 2;  // see kForwardBlocks
constexpr int kGradientsInFlight = 4;

// Writes scratch.keys and scratch.tokens, what is to be sorted. The key is the id, or tokens.rows where the token has
// no part in the gradient.
__global__ void mark_keys(const GradientTokens tokens, const GradientScratch scratch, const ErrorSink errors);
// Sets segment_counts to 1 for the first token of each segment. Their running sums number the segments.
__global__ void mark_heads(const GradientTokens tokens, const GradientScratch scratch);
// Writes begin and end of each segment: tokens begin[s] .. end[s] - 1 of the order. Leaves empty ones alone.
__global__ void find_segments(const GradientTokens tokens, const GradientScratch scratch, int64_t* segment_rows);

template <class T, bool vectors>
__global__ void sum_chunks(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch);

template <class T, bool vectors>
__global__ void sum_rows(const BackwardParams params, const GradientScratch scratch);

#if !defined(POSENC_KERNELS_FROM_PTX)

// ---- segments

__device__ __forceinline__ int64_t first_index() { return blockIdx.x * int64_t{blockDim.x} + threadIdx.x; }
__device__ __forceinline__ int64_t index_step() { return int64_t{gridDim.x} * blockDim.x; }

__global__ void __launch_bounds__(kBackwardThreads)
    mark_keys(const GradientTokens tokens, const GradientScratch scratch, const ErrorSink errors) {
  for (int64_t token = first_index(); token < tokens.count; token += index_step()) {
    const int64_t id = tokens.ids[token];
    const bool valid = in_range(id, tokens.rows);
    if (!valid) record_out_of_range(errors, token, id, tokens.rows);
    scratch.keys[token] = static_cast<uint32_t>(valid && id != tokens.padding_idx ? id : tokens.rows);
    scratch.tokens[token] = static_cast<int32_t>(token);
  }
}

__device__ __forceinline__ bool is_head(const GradientTokens& tokens, const uint32_t* keys, int64_t at) {
  return keys[at] < tokens.rows && (at == 0 || keys[at - 1] != keys[at]);
}

__device__ __forceinline__ bool is_last(const GradientTokens& tokens, const uint32_t* keys, int64_t at) {
  return keys[at] < tokens.rows && (at + 1 == tokens.count || keys[at + 1] != keys[at]);
}

__device__ __forceinline__ int64_t segment_of(const GradientScratch& scratch, int64_t at) {
  return scratch.segment_counts == nullptr ? static_cast<int64_t>(scratch.sorted_keys[at])
                                           : scratch.segment_counts[at] - 1;
}

__global__ void __launch_bounds__(kBackwardThreads)
    mark_heads(const GradientTokens tokens, const GradientScratch scratch) {
  for (int64_t at = first_index(); at < tokens.count; at += index_step())
    scratch.segment_counts[at] = is_head(tokens, scratch.sorted_keys, at);
}

__global__ void __launch_bounds__(kBackwardThreads)
    find_segments(const GradientTokens tokens, const GradientScratch scratch, int64_t* segment_rows) {
  for (int64_t at = first_index(); at < tokens.count; at += index_step()) {
    if (is_head(tokens, scratch.sorted_keys, at)) {
      const int64_t segment = segment_of(scratch, at);
      scratch.begin[segment] = static_cast<int32_t>(at);
      if (segment_rows != nullptr) segment_rows[segment] = scratch.sorted_keys[at];
    }
    if (is_last(tokens, scratch.sorted_keys, at)) scratch.end[segment_of(scratch, at)] = static_cast<int32_t>(at + 1);
  }
}

// ---- sums

// The columns of one thread, a vector or a single one, of the tokens it is given.
template <class T, bool vectors>
struct ColumnSums {
  using acc_t = acc_of<T>;
  static constexpr int kCount = vectors ? kVector<T> : 1;
  struct Gradient {
    T element[kCount];
  };
  struct alignas(vectors ? 16 : sizeof(acc_t)) Sum {
    acc_t of[kCount];
  };

  const BackwardParams& params;
  const GradientScratch& scratch;
  int64_t column;

  __device__ __forceinline__ Gradient load(int64_t at) const {
    const T* const from = static_cast<const T*>(params.grad) + scratch.order[at] * params.token_stride;
    if constexpr (vectors) return bit_cast<Gradient>(load_vector<true>(from + column));
    else return {from[column * params.column_stride]};
  }

  __device__ __forceinline__ void add(const Gradient& gradient, Sum& sum) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum.of[i] += to_acc(gradient.element[i]);
  }

  // Of tokens first .. last - 1 of the order, at least one. Several are loaded before the first is added.
  __device__ __forceinline__ Sum sum_chunk(int64_t first, int64_t last) const {
    const Gradient start = load(first);
    Sum sum;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum.of[i] = to_acc(start.element[i]);
    int64_t at = first + 1;
    for (; at + kGradientsInFlight <= last; at += kGradientsInFlight) {
      Gradient gradients[kGradientsInFlight];
#pragma unroll
      for (int i = 0; i < kGradientsInFlight; ++i) gradients[i] = load(at + i);
#pragma unroll
      for (int i = 0; i < kGradientsInFlight; ++i) add(gradients[i], sum);
    }
#pragma unroll 1  // a few at most
    for (; at < last; ++at) add(load(at), sum);
    return sum;
  }

  __device__ __forceinline__ Sum& partial(int64_t n) const {
    return *reinterpret_cast<Sum*>(static_cast<acc_t*>(scratch.partials) + n * params.width + column);
  }
};

// The chunk whose sum is partial number `n`. Of all chunks but the first of each segment, at most one begins among the
// tokens [kSumChunk * n, kSumChunk * (n + 1)). So where a chunk begins says where its sum is kept, and the partials of
// a segment follow one another. Such a chunk belongs to the segment that goes on across token kSumChunk * n.
struct Chunk {
  int64_t first = 0, last = 0;

  __device__ __forceinline__ Chunk(const GradientTokens& tokens, const GradientScratch& scratch, int64_t n) {
    const int64_t edge = n * kSumChunk;
    if (edge == 0 || edge >= tokens.count) return;
    const uint32_t key = scratch.sorted_keys[edge];
    if (key >= tokens.rows || scratch.sorted_keys[edge - 1] != key) return;
    const int64_t segment = segment_of(scratch, edge);
    const int64_t begin = scratch.begin[segment], end = scratch.end[segment];
    const int64_t start = begin + (edge - begin + kSumChunk - 1) / kSumChunk * kSumChunk;
    if (start >= end) return;
    first = start;
    last = start + kSumChunk < end ? start + kSumChunk : end;
  }
};

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    sum_chunks(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch) {
  using Sums = ColumnSums<T, vectors>;
  const int64_t partials = tokens.count / kSumChunk + 1;
  for (int64_t n = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; n < partials; n += int64_t{gridDim.x} * blockDim.y) {
    const Chunk chunk(tokens, scratch, n);
    if (chunk.first == chunk.last) continue;
    for (int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * Sums::kCount; column < params.width;
         column += int64_t{gridDim.y} * blockDim.x * Sums::kCount) {
      const Sums columns{params, scratch, column};
      columns.partial(n) = columns.sum_chunk(chunk.first, chunk.last);
    }
  }
}

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    sum_rows(const BackwardParams params, const GradientScratch scratch) {
  using Sums = ColumnSums<T, vectors>;
  using acc_t = typename Sums::acc_t;
  for (int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; row < params.rows;
       row += int64_t{gridDim.x} * blockDim.y) {
    const int64_t begin = scratch.begin[row], end = scratch.end[row];
    acc_t scale = static_cast<acc_t>(params.token_scale);
    if (params.scale_by_frequency && end > begin) scale = scale / static_cast<acc_t>(end - begin);
    for (int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * Sums::kCount; column < params.width;
         column += int64_t{gridDim.y} * blockDim.x * Sums::kCount) {
      const Sums columns{params, scratch, column};
      typename Sums::Sum total = {};
      if (end > begin) {
        total = columns.sum_chunk(begin, begin + kSumChunk < end ? begin + kSumChunk : end);
        int64_t n = begin / kSumChunk + 1;
        for (int64_t at = begin + kSumChunk; at < end; at += kSumChunk, ++n) {
          const typename Sums::Sum partial = columns.partial(n);
#pragma unroll
          for (int i = 0; i < Sums::kCount; ++i) total.of[i] += partial.of[i];
        }
#pragma unroll
        for (int i = 0; i < Sums::kCount; ++i) total.of[i] *= scale;
      }
      T* const to = static_cast<T*>(params.out) + row * params.width + column;
      if constexpr (vectors) store_vector(to, total.of);
      else *to = from_acc<T>(total.of[0]);
    }
  }
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
