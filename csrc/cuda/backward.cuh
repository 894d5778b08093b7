// Row sums of the weight gradient.
//
// The tokens are sorted by id (sort.h), so the tokens of a row lie side by side: a run. A row's tokens are added in
// token order in pieces of kSumPiece, and the pieces in order, as on every backend. What is left of a run after its
// first piece is summed piece by piece by other blocks beforehand (sum_pieces), so that a frequent token does not keep
// one block busy alone. Nothing is added atomically; nothing is waited for.
#pragma once

#include <type_traits>

#include "bad_id.cuh"
#include "element.cuh"
#include "launch.h"

namespace posenc::cuda {

struct KeyArgs {
  const void* ids = nullptr;
  bool wide_ids = true;
  int64_t tokens = 0;
  int64_t padding_idx = -1;
  uint32_t* keys = nullptr;  // the id, or the number of rows for tokens that have no part
  int32_t* order = nullptr;  // the token's number
  IdCheck check;
};

struct RunArgs {
  const uint32_t* keys = nullptr;  // sorted
  int64_t tokens = 0;
  uint32_t rows = 0;
  int32_t* head_counts = nullptr;  // heads of runs up to and with each token; null where runs are numbered by row
  int32_t* begin = nullptr;        // of run r: tokens begin[r] .. end[r] - 1 of the order; empty runs are left alone
  int32_t* end = nullptr;
  int64_t* run_rows = nullptr;  // the row of run r, where there are head_counts
};

struct SumArgs {
  RunArgs runs;
  const int32_t* order = nullptr;
  const char* grad = nullptr;
  int64_t token_bytes = 0, column_bytes = 0;  // strides of grad
  int64_t width = 0;
  int64_t units = 0;        // of columns: what one thread owns
  int64_t out_rows = 0;     // run r makes row r of out
  void* partial = nullptr;  // fp32 (fp64) [tokens / kSumPiece + 1, width]
  void* out = nullptr;
  double token_scale = 1.0;
  bool scale_by_frequency = false;
};

constexpr int kBackwardThreads = 256;
constexpr int kBackwardBlocks = 2;  // see kForwardBlocks
constexpr int kGradientsInFlight = 4;

__global__ void mark_keys(const KeyArgs args);
__global__ void mark_heads(const RunArgs args);
__global__ void find_runs(const RunArgs args);

template <class T, bool vectors>
__global__ void sum_pieces(const SumArgs args);

template <class T, bool vectors>
__global__ void sum_rows(const SumArgs args);

#if !defined(POSENC_KERNELS_FROM_PTX)

// ---- runs

__device__ __forceinline__ int64_t first_index() { return blockIdx.x * int64_t{blockDim.x} + threadIdx.x; }
__device__ __forceinline__ int64_t index_step() { return int64_t{gridDim.x} * blockDim.x; }

__global__ void __launch_bounds__(kBackwardThreads) mark_keys(const KeyArgs args) {
  const char* const ids = static_cast<const char*>(args.ids);
  for (int64_t token = first_index(); token < args.tokens; token += index_step()) {
    const int64_t id = load_integer(ids + token * (args.wide_ids ? 8 : 4), args.wide_ids).value();
    const bool good = in_table(id, args.check.rows);
    if (!good) record_bad_id(args.check, token, id);
    const bool counts = good && id != args.padding_idx;
    args.keys[token] = static_cast<uint32_t>(counts ? id : args.check.rows);
    args.order[token] = static_cast<int32_t>(token);
  }
}

__device__ __forceinline__ bool is_head(const RunArgs& runs, int64_t at) {
  return runs.keys[at] < runs.rows && (at == 0 || runs.keys[at - 1] != runs.keys[at]);
}

__device__ __forceinline__ bool is_last(const RunArgs& runs, int64_t at) {
  return runs.keys[at] < runs.rows && (at + 1 == runs.tokens || runs.keys[at + 1] != runs.keys[at]);
}

__device__ __forceinline__ int64_t run_of(const RunArgs& runs, int64_t at) {
  return runs.head_counts == nullptr ? static_cast<int64_t>(runs.keys[at]) : runs.head_counts[at] - 1;
}

// 1 for the first token of each run; their running sums number the runs.
__global__ void __launch_bounds__(kBackwardThreads) mark_heads(const RunArgs args) {
  for (int64_t at = first_index(); at < args.tokens; at += index_step()) args.head_counts[at] = is_head(args, at);
}

__global__ void __launch_bounds__(kBackwardThreads) find_runs(const RunArgs args) {
  for (int64_t at = first_index(); at < args.tokens; at += index_step()) {
    if (is_head(args, at)) {
      const int64_t run = run_of(args, at);
      args.begin[run] = static_cast<int32_t>(at);
      if (args.head_counts != nullptr) args.run_rows[run] = args.keys[at];
    }
    if (is_last(args, at)) args.end[run_of(args, at)] = static_cast<int32_t>(at + 1);
  }
}

// ---- sums

// A thread's columns, one vector of them or a single one, of the tokens it is given.
template <class T, bool vectors>
struct ColumnSums {
  using Real = typename Element<T>::Real;
  static constexpr int kCount = vectors ? kVector<T> : 1;

  const SumArgs& args;
  int64_t column;
  const char* grad;  // its columns of token 0

  __device__ __forceinline__ ColumnSums(const SumArgs& call, int64_t unit)
      : args(call), column(unit * kCount), grad(call.grad + column * call.column_bytes) {}

  using Raw = std::conditional_t<vectors, uint4, T>;

  __device__ __forceinline__ Raw load(int64_t at) const {
    const char* from = grad + __ldg(args.order + at) * args.token_bytes;
    if constexpr (vectors) {
      return load_vector<true>(from);
    } else {
      return *reinterpret_cast<const T*>(from);
    }
  }

  __device__ __forceinline__ void get(const Raw& raw, Real (&values)[kCount]) const {
    if constexpr (vectors) {
      unpack<T>(raw, values);
    } else {
      values[0] = Element<T>::get(raw);
    }
  }

  __device__ __forceinline__ void add(const Raw& raw, Real (&sums)[kCount]) const {
    Real values[kCount];
    get(raw, values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += values[i];
  }

  // Tokens first .. last - 1 of the order, at least one; several are asked for before the first is added.
  __device__ __forceinline__ void piece(int64_t first, int64_t last, Real (&sums)[kCount]) const {
    get(load(first), sums);
    int64_t at = first + 1;
    for (; at + kGradientsInFlight <= last; at += kGradientsInFlight) {
      Raw raw[kGradientsInFlight];
#pragma unroll
      for (int i = 0; i < kGradientsInFlight; ++i) raw[i] = load(at + i);
#pragma unroll
      for (int i = 0; i < kGradientsInFlight; ++i) add(raw[i], sums);
    }
#pragma unroll 1  // a few at most
    for (; at < last; ++at) add(load(at), sums);
  }

  __device__ __forceinline__ Real* partial(int64_t slot) const {
    return static_cast<Real*>(args.partial) + slot * args.width + column;
  }

  __device__ __forceinline__ void store(int64_t row, const Real (&values)[kCount]) const {
    T* const to = static_cast<T*>(args.out) + row * args.width + column;
    if constexpr (vectors) {
      store_vector<T>(to, values);
    } else {
      *to = Element<T>::put(values[0]);
    }
  }
};

// Which piece lies in slot s of `partial`. Of all pieces but the first of each run, at most one begins among the tokens
// [kSumPiece * s, kSumPiece * (s + 1)), so where a piece begins says where its sum is kept, and the slots of a run
// follow one another. Such a piece belongs to the run that goes on across the start of the slot.
struct Piece {
  int64_t first = 0, last = 0;

  __device__ __forceinline__ Piece(const RunArgs& runs, int64_t slot) {
    const int64_t edge = slot * kSumPiece;
    if (edge == 0 || edge >= runs.tokens) return;
    const uint32_t key = runs.keys[edge];
    if (key >= runs.rows || runs.keys[edge - 1] != key) return;
    const int64_t run = run_of(runs, edge);
    const int64_t begin = runs.begin[run], end = runs.end[run];
    const int64_t start = begin + (edge - begin + kSumPiece - 1) / kSumPiece * kSumPiece;
    if (start >= end) return;
    first = start;
    last = start + kSumPiece < end ? start + kSumPiece : end;
  }
};

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks) sum_pieces(const SumArgs args) {
  using Sums = ColumnSums<T, vectors>;
  const int64_t slots = args.runs.tokens / kSumPiece + 1;
  for (int64_t slot = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; slot < slots;
       slot += int64_t{gridDim.x} * blockDim.y) {
    const Piece piece(args.runs, slot);
    if (piece.first == piece.last) continue;
    for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < args.units;
         unit += int64_t{gridDim.y} * blockDim.x) {
      const Sums columns(args, unit);
      typename Sums::Real sums[Sums::kCount];
      columns.piece(piece.first, piece.last, sums);
      store_reals(columns.partial(slot), sums);
    }
  }
}

template <class T, bool vectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks) sum_rows(const SumArgs args) {
  using Sums = ColumnSums<T, vectors>;
  using Real = typename Sums::Real;
  for (int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; row < args.out_rows;
       row += int64_t{gridDim.x} * blockDim.y) {
    const int64_t begin = __ldg(args.runs.begin + row), end = __ldg(args.runs.end + row);
    Real scale = static_cast<Real>(args.token_scale);
    if (args.scale_by_frequency && end > begin) scale = scale / static_cast<Real>(end - begin);
    for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < args.units;
         unit += int64_t{gridDim.y} * blockDim.x) {
      const Sums columns(args, unit);
      Real total[Sums::kCount] = {};
      if (end > begin) {
        columns.piece(begin, begin + kSumPiece < end ? begin + kSumPiece : end, total);
        const Real* partial = columns.partial(begin / kSumPiece + 1);
        for (int64_t at = begin + kSumPiece; at < end; at += kSumPiece, partial += args.width) {
          Real sums[Sums::kCount];
          load_reals(partial, sums);
#pragma unroll
          for (int i = 0; i < Sums::kCount; ++i) total[i] += sums[i];
        }
#pragma unroll
        for (int i = 0; i < Sums::kCount; ++i) total[i] *= scale;
      }
      columns.store(row, total);
    }
  }
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
