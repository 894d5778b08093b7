// What a backend is handed: pointers, sizes, strides and the encoding. No torch type, no ownership.
//
// Tokens are [batch, seq]; the position runs along seq. All strides are in elements.
#pragma once

#include <cstdint>

#include "encoding.h"

namespace posenc {

enum class Dtype : int64_t { float32, float64, bfloat16, float16 };
inline int64_t element_size(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

struct TokenStrides {
  int64_t batch = 0, seq = 0;
  POSENC_HD int64_t at(int64_t b, int64_t t) const { return b * batch + t * seq; }
};

struct Tokens {
  int64_t batch = 1, seq = 1;
  TokenStrides order;  // from [b, t] to the token's number in memory: {seq, 1} or, sequence-first, {1, batch}
  POSENC_HD int64_t count() const { return batch * seq; }
  POSENC_HD bool sequence_first() const { return batch > 1 && order.batch == 1 && seq > 1; }
};

// An int32 or int64 tensor of token ids or positions.
struct Integers {
  const void* data = nullptr;
  bool is_int64 = true;
  POSENC_HD int64_t operator[](int64_t index) const {
    return is_int64 ? static_cast<const int64_t*>(data)[index] : static_cast<const int32_t*>(data)[index];
  }
};

// A float32 or float64 tensor of positions.
struct Floats {
  const void* data = nullptr;
  bool is_float64 = true;
  POSENC_HD double operator[](int64_t index) const {
    return is_float64 ? static_cast<const double*>(data)[index] : static_cast<const float*>(data)[index];
  }
};

// position = offset + (running ? t : 0) + given[b, t], where no `given` reads as 0.
struct Positions {
  int64_t offset = 0;
  bool running = true;
  Integers given;
  Floats floats;  // in place of `given`
  TokenStrides strides;
  // Whether all rows of the batch have the same positions: then one encoding serves them all.
  POSENC_HD bool shared() const { return strides.batch == 0; }
};

// A table of encodings in place of sinusoids: position p has row p. Its columns are contiguous.
struct PositionTable {
  const void* data = nullptr;  // of the dtype of the call; null: none
  int64_t rows = 0;            // positions lie in [0, rows)
  int64_t row_stride = 0;
};

struct Encoding {
  Columns columns;  // of sinusoids; not `encoded` where there is a table
  PositionTable table;
  Precision precision = Precision::exact;
  Frequencies frequencies;
  double scale = 1;
  // On a GPU one number more to multiply it by, of the type that sums have; null: none.
  const void* scale_on_device = nullptr;
};

// What a token of padding_idx is: the same as others, its row alone, its encoding alone, or zeros.
enum class AtPadding : int64_t { embed = 0, no_encoding = 1, no_embedding = 2, zeros = 3 };
constexpr int64_t kAtPaddings = 4;

// See dropout.h.
struct Dropout {
  const int64_t* seed = nullptr;  // in memory of the backend; null: nothing is dropped
  uint32_t threshold = 0;         // of 2^16
  double factor = 1;              // of the elements that are kept
  int64_t first_column = 0;       // of the whole row, where this is a shard
};

// The base term: a row of a table, a row of activations, or nothing.
enum class Source { gathered, dense, none };

struct ForwardParams {
  Tokens tokens;
  Encoding encoding;
  Positions positions;
  Dtype dtype = Dtype::float32;
  Source source = Source::none;
  const void* base = nullptr;  // gathered: the table; dense: the activations
  Integers ids;                // gathered: one per token, in the order of the tokens
  int64_t rows = 0;            // gathered: of the table; ids lie in [0, rows)
  // gathered: the rows that `base` holds. Of other ids the output is -0: shards add up to the whole table's bits.
  int64_t first_row = 0, end_row = INT64_MAX;
  int64_t row_stride = 0;     // gathered: from one row of the table to the next
  TokenStrides base_strides;  // dense
  int64_t column_stride = 1;  // of the base term
  void* out = nullptr;
  TokenStrides out_strides;  // its columns are contiguous
  double token_scale = 1.0;
  int64_t padding_idx = -1;  // gathered; negative: none
  AtPadding at_padding = AtPadding::embed;
  Dropout dropout;

  // Whether a call asks for more than scale * base + the encoding of an integer position.
  bool general() const {
    return dropout.seed != nullptr || at_padding != AtPadding::embed || encoding.scale != 1 ||
           encoding.scale_on_device != nullptr || positions.floats.data != nullptr || encoding.frequencies.given() ||
           encoding.table.data != nullptr;
  }
};

// The tokens of a weight gradient. Tokens of padding_idx (negative: none) have no part in it.
struct GradientTokens {
  Integers ids;  // contiguous
  int64_t count = 0;
  int64_t rows = 0;  // of the table: ids lie in [0, rows)
  int64_t padding_idx = -1;
};

// Tokens sorted by id, ties in token order: segment s holds tokens order[start[s]] .. order[start[s + 1] - 1], all with
// one id. Tokens of padding_idx are left out.
struct Segments {
  int64_t count = 0;
  const int64_t* order = nullptr;
  const int64_t* start = nullptr;  // count + 1 entries
  const int64_t* row = nullptr;    // of out that the sum is written to, ascending: the id, or s for a sparse gradient
};

struct BackwardParams {
  Segments segments;
  Dtype dtype = Dtype::float32;
  const void* grad = nullptr;
  int64_t token_stride = 0;  // of grad
  int64_t column_stride = 1;
  int64_t width = 0;  // at least 1
  int64_t rows = 0;   // of out; rows without a segment are set to zero
  bool scale_by_frequency = false;
  void* out = nullptr;  // contiguous
  double token_scale = 1.0;
  Dropout dropout;  // of grad, whose tokens are numbered in their order
};

// The order of a sum is part of its result, on every backend: the tokens of a segment are added in token order in
// chunks of this many, and the sums of the chunks (partials) are added in order.
constexpr int64_t kSumChunk = 64;

// Runs body(begin, end, context) over disjoint parts of [begin, end), perhaps in parallel; body must not throw. Not 0:
// it failed. Torch's own torch_parallel_for is one.
using ParallelBody = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);

}  // namespace posenc
