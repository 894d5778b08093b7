// What an encoding is made of: frequencies, and which column holds which sine or cosine.
//
// Columns come in pairs. Pair k has one frequency w_k, a sine and a cosine. An odd width leaves one column over; the
// odd-width rule says what it holds. `kPrecisions` and the like count the values of an enum, for the check of flags.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "host_device.h"

namespace posenc {

// exact: angles in fixed point, from 128 bits of w / 2pi. reference: angles as fp32 tables compute them.
enum class Precision : int64_t { exact = 0, reference = 1 };
constexpr int64_t kPrecisions = 2;

// With D the frequency_width: d: w_k = base^(-2k/D); half: w_k = base^(-k / max(floor(D/2), 1)), which is d at even
// widths; half_minus_1: w_k = base^(-k / max(floor(D/2) - 1, 1)).
enum class Divisor : int64_t { d = 0, half_minus_1 = 1, half = 2 };
constexpr int64_t kDivisors = 3;

enum class OddRule : int64_t {
  sine = 0,      // the last column is one more sine, of the next frequency
  zero = 1,      // the last column is zero
  round_up = 2,  // one more sine, and all frequencies are those of the next even width
};
constexpr int64_t kOddRules = 3;

// Of one row. The frequencies of more columns would take seconds to compute.
constexpr int64_t kMostColumns = int64_t{1} << 24;

// The width D that the frequencies are computed for.
inline int64_t frequency_width(OddRule odd, int64_t width) {
  return odd == OddRule::round_up ? width + width % 2 : width;
}

// A layout is one entry of kLayouts: the distance from one sine to the next, and whether cosines come first. Its index
// is its code in posenc_ext/conventions.py.
struct Layout {
  int64_t step;
  bool cosine_first;
};
constexpr Layout kLayouts[] = {
    {2, false},  // interleaved: sin, cos, sin, cos, ...
    {1, false},  // sin_cos: all sines, then all cosines
    {1, true},   // cos_sin: all cosines, then all sines
};
constexpr int64_t kLayoutCount = std::size(kLayouts);

// The column map of one width. sine_column and cosine_column say where pair k is; a column that holds neither is zero.
// Of whole rows sines >= cosines; a block of columns may hold cosines alone.
struct Columns {
  int64_t width = 0;
  bool encoded = false;            // false: nothing is added, not even a zero
  int64_t sines = 0, cosines = 0;  // columns that hold one
  int64_t sine_start = 0, cosine_start = 0, step = 1;

  POSENC_HD int64_t pairs() const { return sines > cosines ? sines : cosines; }
  POSENC_HD bool has_zero_column() const { return encoded && sines + cosines < width; }
  POSENC_HD bool cosine_first() const { return cosine_start < sine_start; }
  // Interleaved with cosines first, the lone sine of an odd width would lie past the end: it takes the last column.
  POSENC_HD int64_t sine_column(int64_t k) const {
    const int64_t column = sine_start + k * step;
    return column < width ? column : width - 1;
  }
  POSENC_HD int64_t cosine_column(int64_t k) const { return cosine_start + k * step; }
};

inline Columns columns_of(const Layout& layout, OddRule odd, int64_t width) {
  Columns columns;
  columns.width = width;
  columns.encoded = true;
  columns.cosines = width / 2;
  columns.sines = odd == OddRule::zero ? width / 2 : width - width / 2;
  columns.step = layout.step;
  const int64_t second = layout.step == 2 ? 1 : layout.cosine_first ? columns.cosines : columns.sines;
  (layout.cosine_first ? columns.sine_start : columns.cosine_start) = second;
  return columns;
}

// Columns first .. first + columns.width - 1 of a slice of a row. Their pair 0 is pair first_pair of the whole row.
struct ColumnBlock {
  int64_t first = 0, first_pair = 0;
  Columns columns;
};

// Calls body(block) for the blocks that columns [first, first + width) of a row consist of.
template <class Body>
void visit_column_blocks(const Columns& whole, int64_t first, int64_t width, const Body& body) {
  if (width == whole.width || !whole.encoded) {
    ColumnBlock block{0, 0, whole};
    block.columns.width = width;
    return body(block);
  }
  const int64_t last = first + width;
  // What is asked for of columns [begin, end), which hold pairs from first_pair on, or sines alone, or cosines alone.
  const auto visit = [&](int64_t begin, int64_t end, int64_t first_pair, bool sines, bool cosines) {
    const int64_t step = sines && cosines ? 2 : 1, from = std::max(first, begin), to = std::min(last, end);
    if (from >= to) return;
    Columns columns;
    columns.width = to - from;
    columns.encoded = true;
    columns.step = step;
    if (sines) columns.sines = columns.width / step;
    if (cosines) columns.cosines = columns.width / step;
    if (step == 2) (whole.cosine_first() ? columns.sine_start : columns.cosine_start) = 1;
    body(ColumnBlock{from - first, first_pair + (from - begin) / step, columns});
  };
  if (whole.step == 2) {
    const int64_t paired = 2 * whole.cosines, begin = std::min(first + first % 2, paired);
    const int64_t end = std::max(begin, std::min(last - last % 2, paired));
    const bool cosine_first = whole.cosine_first();
    visit(begin - first % 2, begin, begin / 2 - 1, cosine_first, !cosine_first);  // the second half of a pair
    visit(begin, end, begin / 2, true, true);
    visit(end, paired, end / 2, !cosine_first, cosine_first);  // the first half of one
    visit(paired, paired + whole.sines - whole.cosines, whole.cosines, true, false);
  } else {
    visit(whole.sine_start, whole.sine_start + whole.sines, 0, true, false);
    visit(whole.cosine_start, whole.cosine_start + whole.cosines, 0, false, true);
  }
  visit(whole.sines + whole.cosines, whole.width, 0, false, false);
}

// The frequencies of one width, in both precisions, in memory of the backend. Each array is padded (kFrequencyPadding),
// so that whole vectors can be loaded past the last pair.
struct Frequencies {
  const uint32_t* turns[4] = {};   // exact: the fraction of w / 2pi, most significant word first
  const float* angular = nullptr;  // reference: w as an fp32 table builder forms it

  // Of frequencies that a caller gives (given_frequencies.h). Those of a spec are at most 1.
  // exact: whole turns of w / 2pi, modulo 2^32. Then turns are of |w|, and angular is 0 with the sign of w, or NaN
  // where there is no encoding.
  const uint32_t* whole_turns = nullptr;
  float largest = 1;  // no magnitude is above it; on a GPU not known for those that are given

  POSENC_HD bool given() const { return whole_turns != nullptr; }

  Frequencies from(int64_t pair) const {
    Frequencies result = *this;
    for (const uint32_t*& words : result.turns) words += pair;
    result.angular += pair;
    if (given()) result.whole_turns += pair;
    return result;
  }
};

}  // namespace posenc
