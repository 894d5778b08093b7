// Row sums of the weight gradient.
//
// The tokens are sorted by id (sort.h), so those of a row of the table lie side by side: a segment. They are added in
// token order in chunks of kSumChunk, and the sums of the chunks (partials) in order, as on every backend. All chunks
// of a segment but the first are summed beforehand by other blocks (sum_chunks), so that a frequent token does not keep
// one block busy alone. Nothing is added atomically, and no block waits for another. Rows without a token are not
// walked over: the output is zero before.
#pragma once

#include "element.cuh"
#include "elements.cuh"
#include "out_of_range.cuh"

namespace posenc::cuda {

constexpr int kBackwardThreads = 256;
constexpr int kBackwardBlocks = 2;  // see kForwardBlocks
// Threads along the columns: few, so that the warps of a segment, which has no order across columns, are far apart.
constexpr int kColumnThreads = 32;
constexpr int kPartialsInFlight = 8;
constexpr int kHeadsInFlight = 4;  // first tokens of segments, among as many tokens of the order

// Writes scratch.keys and scratch.tokens, what is to be sorted. The key is the id, or tokens.rows where the token has
// no part in the gradient.
__global__ void mark_keys(const GradientTokens tokens, const GradientScratch scratch, const ErrorSink errors);
// Sets segment_counts to 1 for the first token of each segment. Their running sums number the segments.
__global__ void mark_heads(const GradientTokens tokens, const GradientScratch scratch);
// Writes begin and end of each segment: tokens begin[s] .. end[s] - 1 of the order. Leaves empty ones alone.
__global__ void find_segments(const GradientTokens tokens, const GradientScratch scratch, int64_t* segment_rows);

template <class T, bool vectors>
__global__ void sum_chunks(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch);

// Writes the rows of the output that have tokens.
template <class T, bool vectors>
__global__ void sum_segments(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch);

// The same of gradients that are dropped first.
template <class T, bool vectors>
__global__ void drop_and_sum_chunks(const BackwardParams params, const GradientTokens tokens,
                                    const GradientScratch scratch);
template <class T, bool vectors>
__global__ void drop_and_sum_segments(const BackwardParams params, const GradientTokens tokens,
                                      const GradientScratch scratch);

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

// What becomes of the gradient of a token before it is added.
struct WholeGradients {
  static constexpr int kInFlight = 8;
  __device__ __forceinline__ explicit WholeGradients(const BackwardParams&) {}
  template <int count, class acc_t>
  __device__ __forceinline__ void drop(int64_t, int64_t, acc_t (&)[count]) const {}
};
struct DroppedGradients {
  static constexpr int kInFlight = 4;  // for the registers of a draw
  const Dropout& dropout;
  const uint64_t seed;
  __device__ __forceinline__ explicit DroppedGradients(const BackwardParams& params)
      : dropout(params.dropout), seed(static_cast<uint64_t>(*params.dropout.seed)) {}
  template <int count, class acc_t>
  __device__ __forceinline__ void drop(int64_t token, int64_t column, acc_t (&values)[count]) const {
    drop_elements(dropout, seed, token, column, values);
  }
};

// The columns of one thread, a vector or a single one, of the tokens it is given.
template <class T, bool vectors, class Kept>
struct ColumnSums {
  using acc_t = acc_of<T>;
  static constexpr int kCount = vectors ? kVector<T> : 1, kInFlight = Kept::kInFlight;
  struct Gradient {
    T element[kCount];
  };
  struct alignas(vectors ? 16 : sizeof(acc_t)) Sum {
    acc_t of[kCount];
  };

  const BackwardParams& params;
  const GradientScratch& scratch;
  const Kept& kept;
  int64_t column;

  __device__ __forceinline__ Gradient load_token(int64_t token) const {
    const T* const from = static_cast<const T*>(params.grad) + token * params.token_stride;
    if constexpr (vectors) return bit_cast<Gradient>(load_vector<true>(from + column));
    else return {from[column * params.column_stride]};
  }

  // Of the gradient of one token.
  __device__ __forceinline__ Sum sum_of(const Gradient& gradient, int64_t token) const {
    Sum sum;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum.of[i] = to_acc(gradient.element[i]);
    kept.drop(token, column, sum.of);
    return sum;
  }

  __device__ __forceinline__ Sum first_of(int64_t at) const {
    const int64_t token = scratch.order[at];
    return sum_of(load_token(token), token);
  }

  // Adds those of tokens at .. last - 1 of the order. Several are loaded before the first is added.
  __device__ __forceinline__ void add_tokens(int64_t at, int64_t last, Sum& sum) const {
    for (; at + kInFlight <= last; at += kInFlight) {
      Gradient gradients[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) gradients[i] = load_token(scratch.order[at + i]);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) add(sum_of(gradients[i], scratch.order[at + i]), sum);
    }
#pragma unroll 1  // a few at most
    for (; at < last; ++at) add(first_of(at), sum);
  }

  __device__ __forceinline__ void add(const Sum& partial, Sum& sum) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum.of[i] += partial.of[i];
  }

  // Adds partials n .. last - 1 likewise.
  __device__ __forceinline__ void add_partials(int64_t n, int64_t last, Sum& sum) const {
    for (; n + kPartialsInFlight <= last; n += kPartialsInFlight) {
      Sum partials[kPartialsInFlight];
#pragma unroll
      for (int i = 0; i < kPartialsInFlight; ++i) partials[i] = partial(n + i);
#pragma unroll
      for (int i = 0; i < kPartialsInFlight; ++i) add(partials[i], sum);
    }
#pragma unroll 1
    for (; n < last; ++n) add(partial(n), sum);
  }

  __device__ __forceinline__ void store(int64_t row, const Sum& sum, acc_t scale) const {
    acc_t values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = sum.of[i] * scale;
    T* const to = static_cast<T*>(params.out) + row * params.width + column;
    if constexpr (vectors) store_vector(to, values);
    else *to = from_acc<T>(values[0]);
  }

  __device__ __forceinline__ void store_partial(int64_t n, const Sum& sum) const {
    if constexpr (vectors) {
      struct Bits {
        uint4 part[sizeof(Sum) / sizeof(uint4)];
      };
      const Bits bits = bit_cast<Bits>(sum);
      uint4* const to = reinterpret_cast<uint4*>(&partial(n));
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Sum) / sizeof(uint4)); ++i) store_bits(to + i, bits.part[i]);
    } else {
      partial(n) = sum;
    }
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

template <class T, bool vectors, class Kept>
__device__ __forceinline__ void sum_each_chunk(const BackwardParams& params, const GradientTokens& tokens,
                                               const GradientScratch& scratch) {
  using Sums = ColumnSums<T, vectors, Kept>;
  const Kept kept(params);
  const int64_t partials = tokens.count / kSumChunk + 1;
  for (int64_t n = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; n < partials; n += int64_t{gridDim.x} * blockDim.y) {
    const Chunk chunk(tokens, scratch, n);
    if (chunk.first == chunk.last) continue;
    for (int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * Sums::kCount; column < params.width;
         column += int64_t{gridDim.y} * blockDim.x * Sums::kCount) {
      const Sums columns{params, scratch, kept, column};
      typename Sums::Sum sum = columns.first_of(chunk.first);
      columns.add_tokens(chunk.first + 1, chunk.last, sum);
      columns.store_partial(n, sum);
    }
  }
}

// Each thread looks at kHeadsInFlight tokens of the order at a time. Most segments have one token, whose gradient is
// all there is to add: those of all such segments are loaded before the first is stored. The others follow one by one.
template <class T, bool vectors, class Kept>
__device__ __forceinline__ void sum_each_segment(const BackwardParams& params, const GradientTokens& tokens,
                                                 const GradientScratch& scratch) {
  using Sums = ColumnSums<T, vectors, Kept>;
  const Kept kept(params);
  using acc_t = typename Sums::acc_t;
  constexpr int heads = kHeadsInFlight;
  const acc_t token_scale = static_cast<acc_t>(params.token_scale);
  for (int64_t first = (blockIdx.x * int64_t{blockDim.y} + threadIdx.y) * heads; first < tokens.count;
       first += int64_t{gridDim.x} * blockDim.y * heads) {
    // With the keys before and after them; past either end is a key that is no row.
    uint32_t keys[heads + 2];
    int64_t order[heads];
#pragma unroll
    for (int i = 0; i < heads + 2; ++i) {
      const int64_t at = first + i - 1;
      keys[i] = at >= 0 && at < tokens.count ? scratch.sorted_keys[at] : static_cast<uint32_t>(tokens.rows);
    }
#pragma unroll
    for (int i = 0; i < heads; ++i) order[i] = scratch.order[first + i < tokens.count ? first + i : first];
    uint32_t longer = 0;  // a bit for each segment of several tokens
    const auto is_single = [&](int i) { return keys[i] != keys[i + 1] && keys[i + 1] != keys[i + 2]; };
#pragma unroll
    for (int i = 0; i < heads; ++i)
      if (keys[i + 1] < tokens.rows && keys[i] != keys[i + 1] && !is_single(i)) longer |= 1u << i;
    for (int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * Sums::kCount; column < params.width;
         column += int64_t{gridDim.y} * blockDim.x * Sums::kCount) {
      const Sums columns{params, scratch, kept, column};
      typename Sums::Gradient gradients[heads];
#pragma unroll
      for (int i = 0; i < heads; ++i)
        if (keys[i + 1] < tokens.rows && is_single(i)) gradients[i] = columns.load_token(order[i]);
#pragma unroll
      for (int i = 0; i < heads; ++i)
        if (keys[i + 1] < tokens.rows && is_single(i))
          columns.store(
              scratch.segment_counts == nullptr ? static_cast<int64_t>(keys[i + 1]) : segment_of(scratch, first + i),
              columns.sum_of(gradients[i], order[i]), token_scale);
#pragma unroll 1
      for (int i = 0; longer >> i != 0; ++i) {
        if ((longer >> i & 1u) == 0) continue;
        const int64_t begin = first + i, segment = segment_of(scratch, begin), end = scratch.end[segment];
        typename Sums::Sum total = columns.first_of(begin);
        columns.add_tokens(begin + 1, begin + kSumChunk < end ? begin + kSumChunk : end, total);
        const int64_t n = begin / kSumChunk + 1;
        columns.add_partials(n, n + (end - begin - 1) / kSumChunk, total);
        columns.store(segment, total,
                      params.scale_by_frequency ? token_scale / static_cast<acc_t>(end - begin) : token_scale);
      }
    }
  }
}

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    sum_chunks(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch) {
  sum_each_chunk<T, vectors, WholeGradients>(params, tokens, scratch);
}

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    sum_segments(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch) {
  sum_each_segment<T, vectors, WholeGradients>(params, tokens, scratch);
}

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    drop_and_sum_chunks(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch) {
  sum_each_chunk<T, vectors, DroppedGradients>(params, tokens, scratch);
}

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    drop_and_sum_segments(const BackwardParams params, const GradientTokens tokens, const GradientScratch scratch) {
  sum_each_segment<T, vectors, DroppedGradients>(params, tokens, scratch);
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
