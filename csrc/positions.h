// Positions that are counted: of the real tokens of padded rows, of the sequences in packed ones. One definition for
// CPU and CUDA. Integers only, so nothing depends on the order of the work. Sums wrap at 64 bits.
#pragma once

#include "params.h"

namespace posenc {

enum class IntegerType { int64, int32, boolean };

// The rows that are counted along.
struct CountedRows {
  const void* data = nullptr;
  IntegerType type = IntegerType::int64;
  Tokens tokens;         // tokens.order is that of `out`
  TokenStrides strides;  // of data
  int64_t* out = nullptr;
};

struct PaddingParams {
  static constexpr bool kBooleans = true;  // whether rows may hold them
  CountedRows rows;
  int64_t padding_value = 0;  // what equals it is a pad
  int64_t start = 0;          // position of a row's first real token, without its offset
  Integers offsets;           // one for each row, or null
  int64_t offset_stride = 0;
  // A pad has the position of the real token before it (of the first ones: one less than the first real token's), or
  // `padding_position`.
  bool count_on = false;
  int64_t padding_position = 0;
};

struct SequenceIdParams {
  static constexpr bool kBooleans = false;
  CountedRows rows;
  int64_t start = 0;  // position of the first token of each sequence
};

// Sequence s is tokens starts[s] .. starts[s + 1] - 1. Tokens after the last entry count from there.
struct SequenceStartParams {
  Integers starts;
  int64_t count = 0;
  int64_t total = 0;
  int64_t start = 0;
  int64_t* out = nullptr;
};

// T is int64_t, int32_t or, for booleans, uint8_t.
template <class T>
POSENC_HD int64_t number_of(T value) {
  if constexpr (sizeof(T) == 1) return value != 0;
  else return value;
}

POSENC_HD int64_t wrapping_sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

// A row as a scan: each token has a term, the terms up to it are joined, and its position follows from them.

// Terms are 1 for real tokens, joined by adding.
template <class T>
struct PaddingRow {
  using Params = PaddingParams;
  static constexpr bool kCounts = true;
  const T* data;
  int64_t stride, padding_value, before, padding_position;
  bool count_on;

  POSENC_HD PaddingRow(const Params& params, int64_t b)
      : data(static_cast<const T*>(params.rows.data) + b * params.rows.strides.batch),
        stride(params.rows.strides.seq),
        padding_value(params.padding_value),
        before(wrapping_sum(params.start, -1)),
        padding_position(params.padding_position),
        count_on(params.count_on) {
    if (params.offsets.data != nullptr) before = wrapping_sum(before, params.offsets[b * params.offset_stride]);
  }
  POSENC_HD static int64_t join(int64_t a, int64_t b) { return a + b; }
  POSENC_HD int64_t term(int64_t t) const { return number_of(data[t * stride]) != padding_value; }
  POSENC_HD int64_t position(int64_t, int64_t term, int64_t joined) const {
    return term != 0 || count_on ? wrapping_sum(before, joined) : padding_position;
  }
};

// Terms are the indices of tokens that begin a sequence, and 0; joined by taking the larger one.
template <class T>
struct SequenceIdRow {
  using Params = SequenceIdParams;
  static constexpr bool kCounts = false;
  const T* data;
  int64_t stride, start;

  POSENC_HD SequenceIdRow(const Params& params, int64_t b)
      : data(static_cast<const T*>(params.rows.data) + b * params.rows.strides.batch),
        stride(params.rows.strides.seq),
        start(params.start) {}
  POSENC_HD static int64_t join(int64_t a, int64_t b) { return a > b ? a : b; }
  POSENC_HD int64_t term(int64_t t) const { return t > 0 && data[t * stride] != data[(t - 1) * stride] ? t : 0; }
  POSENC_HD int64_t position(int64_t t, int64_t, int64_t joined) const { return wrapping_sum(start, t - joined); }
};

// How many entries of `starts` lie at or before this token; entries that do not ascend give some number of them.
POSENC_HD int64_t sequences_begun(const SequenceStartParams& params, int64_t token) {
  int64_t low = 0, high = params.count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (params.starts[middle] <= token) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Calls f with a null pointer to an element of rows.data.
template <class Params, class F>
void with_element_of(const Params& params, F&& f) {
  if constexpr (Params::kBooleans)
    if (params.rows.type == IntegerType::boolean) return f(static_cast<const uint8_t*>(nullptr));
  if (params.rows.type == IntegerType::int64) return f(static_cast<const int64_t*>(nullptr));
  return f(static_cast<const int32_t*>(nullptr));
}

}  // namespace posenc
