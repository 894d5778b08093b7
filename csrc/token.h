// A token's row, position and scale. One definition for CPU and CUDA.
#pragma once

#include <cmath>

#include "params.h"
#include "sinusoid.h"

namespace posenc {
inline namespace POSENC_ISA {

// Sums wrap at 64 bits, so overflow is defined. Only if `general` it knows of positions that are no integers.
template <bool general = false>
POSENC_HD Position position_of(const ForwardParams& params, int64_t b, int64_t t) {
  const Positions& positions = params.positions;
  Position position;
  uint64_t whole = static_cast<uint64_t>(positions.offset);
  if (positions.running) whole += static_cast<uint64_t>(t);
  if (positions.given.data != nullptr) {
    whole += static_cast<uint64_t>(positions.given[positions.strides.at(b, t)]);
  } else if (general && positions.floats.data != nullptr) {
    position = fixed_point(positions.floats[positions.strides.at(b, t)]);
    if (!position.exists()) return position;
    whole += static_cast<uint64_t>(position.whole);
  }
  position.whole = static_cast<int64_t>(whole);
  return position;
}

// Whether a table of positions, if there is one, knows this one.
POSENC_HD bool has_row(const PositionTable& table, int64_t position) {
  return table.data == nullptr || static_cast<uint64_t>(position) < static_cast<uint64_t>(table.rows);
}

template <class acc_t>
struct Token {
  int64_t base = 0;  // offset of its base term from params.base
  int64_t out = 0;   // offset of its output from params.out
  Position position;
  int64_t number = 0;  // in memory
  acc_t scale = 1;     // of the base term
  // An id out of range reads row 0 with a scale of NaN, a position without a row in a table of positions reads nothing
  // and is NaN. On the CPU both are checked before; an empty table is refused.
  bool in_range = true;
  // Nothing is read: every element of the output is `scale`.
  bool constant = false;
  // Whether it has a base term, and whether an encoding is added: see AtPadding.
  bool embedded = true, encoded = true;
};

POSENC_HD int64_t id_of(const ForwardParams& params, int64_t b, int64_t t) {
  return params.ids[params.tokens.order.at(b, t)];
}

// `given_id`: of a gathered token. Only if `general` it has its number and knows of padding, fractions and a table.
template <Source source, class acc_t, bool general = false>
POSENC_HD Token<acc_t> token_of(const ForwardParams& params, int64_t b, int64_t t, int64_t given_id) {
  Token<acc_t> token;
  token.out = params.out_strides.at(b, t);
  token.position = position_of<general>(params, b, t);
  if constexpr (general) token.number = params.tokens.order.at(b, t);
  if constexpr (source == Source::dense) {
    token.base = params.base_strides.at(b, t);
    token.scale = static_cast<acc_t>(params.token_scale);
  }
  if constexpr (source == Source::gathered) {
    const uint64_t id = static_cast<uint64_t>(given_id);
    const uint64_t first = static_cast<uint64_t>(params.first_row), end = static_cast<uint64_t>(params.end_row);
    token.in_range = id < static_cast<uint64_t>(params.rows);
    token.constant = token.in_range && id - first >= end - first;
    const bool here = token.in_range && !token.constant;
    token.base = here ? static_cast<int64_t>(id - first) * params.row_stride : 0;
    // x + -0 is x, also where x is -0.
    token.scale = static_cast<acc_t>(here ? params.token_scale : token.constant ? -0.0 : NAN);
    if (general && here && id == static_cast<uint64_t>(params.padding_idx)) {
      token.encoded = params.at_padding != AtPadding::no_encoding;
      token.embedded = params.at_padding != AtPadding::no_embedding;
      const bool nothing = !token.embedded && !params.encoding.columns.encoded && params.encoding.table.data == nullptr;
      if (params.at_padding == AtPadding::zeros || nothing) token.constant = true, token.scale = 0;
    }
  }
  if constexpr (general && source != Source::none)
    if (!has_row(params.encoding.table, token.position.whole))
      token.in_range = false, token.constant = true, token.scale = static_cast<acc_t>(NAN);
  return token;
}

template <Source source, class acc_t, bool general = false>
POSENC_HD Token<acc_t> token_of(const ForwardParams& params, int64_t b, int64_t t) {
  return token_of<source, acc_t, general>(params, b, t, source == Source::gathered ? id_of(params, b, t) : 0);
}

}  // namespace POSENC_ISA
}  // namespace posenc
