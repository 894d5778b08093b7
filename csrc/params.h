// What ops.cpp hands to a backend: pointers, sizes, strides and the recipe. No torch types, no ownership.
//
// Tokens stand on a grid [outer, seq, inner]: `seq` is the axis along which the position runs, `outer` and `inner` are
// whatever lies before and after it (batch-first: inner = 1; sequence-first: outer = 1). All strides are in elements.
#pragma once

#include <cstdint>

#include "layout.h"

namespace posenc {

enum class Dtype : int64_t { float32, float64, bfloat16, float16 };
// In bytes.
inline int64_t element_size(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

enum class Precision : int64_t { exact = 0, reference = 1 };
enum class Divisor : int64_t { d = 0, half_minus_1 = 1 };

struct Grid {
  int64_t outer = 1, seq = 1, inner = 1;
  int64_t tokens() const { return outer * seq * inner; }
};

struct GridStrides {
  int64_t outer = 0, seq = 0, inner = 0;
  int64_t at(int64_t o, int64_t s, int64_t i) const { return o * outer + s * seq + i * inner; }
};

// An int32 or int64 tensor of token ids or positions.
struct Integers {
  const void* data = nullptr;
  bool wide = true;  // int64
  int64_t operator[](int64_t index) const {
    return wide ? static_cast<const int64_t*>(data)[index] : static_cast<const int32_t*>(data)[index];
  }
};

// The recipe's angular frequencies for one width, in both precisions; `pairs` entries each, memory of the backend.
struct Frequencies {
  int64_t pairs = 0;
  const uint32_t* turns[4] = {};   // exact: bits of w / 2pi, most significant word first
  const float* angular = nullptr;  // reference: w as an fp32 table builder forms it
};

struct Waves {
  Layout layout;
  Precision precision = Precision::exact;
  Frequencies frequencies;
  Integers positions;  // data == nullptr: the running index along seq
  GridStrides position_strides;
  int64_t offset = 0;  // added to either
  // One position for all tokens of a step of seq: its waves are computed once and serve them all.
  bool shared() const {
    return positions.data == nullptr || (position_strides.outer == 0 && position_strides.inner == 0);
  }
};

enum class Source { gathered, dense, none };

struct ForwardParams {
  Grid grid;
  Waves waves;
  Dtype dtype = Dtype::float32;
  Source source = Source::none;
  const void* base = nullptr;  // gathered: the table; dense: the activations
  Integers ids;                // gathered: one per token, contiguous over the grid
  int64_t rows = 0;            // gathered: of the table
  int64_t row_stride = 0;      // gathered: from one row of the table to the next
  GridStrides base_strides;    // dense
  int64_t column_stride = 1;   // of the base term
  void* out = nullptr;
  GridStrides out_strides;  // its columns are contiguous
  double token_scale = 1.0;
};

// The tokens of a weight gradient; those of padding_idx (negative: none) have no part in it.
struct GradientTokens {
  Integers ids;  // contiguous
  int64_t count = 0;
  int64_t rows = 0;  // of the table: ids lie in [0, rows)
  int64_t padding_idx = -1;
};

// Tokens sorted by id, ties in token order: run r holds tokens order[start[r]] .. order[start[r + 1] - 1], all with id
// row[r]. Tokens of padding_idx are left out.
struct Runs {
  int64_t count = 0;
  const int64_t* order = nullptr;
  const int64_t* start = nullptr;  // count + 1 entries
  const int64_t* row = nullptr;    // ascending
};

struct BackwardParams {
  Runs runs;
  Dtype dtype = Dtype::float32;
  const void* grad = nullptr;
  int64_t token_stride = 0;  // of grad
  int64_t column_stride = 1;
  int64_t width = 0;
  int64_t rows = 0;  // of out; those without a run are set to zero
  bool scale_by_frequency = false;
  void* out = nullptr;  // contiguous
  double token_scale = 1.0;
};

// A run longer than this is summed in pieces of this many tokens, and the pieces are summed in order. Part of the
// definition of the result, on every backend.
constexpr int64_t kSumPiece = 64;

// Runs body(begin, end, context) over disjoint parts of [begin, end), perhaps in parallel; body must not throw.
using ParallelBody = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);

}  // namespace posenc
