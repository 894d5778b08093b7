// Which column of an encoding holds which wave.
//
// Columns come in pairs: pair k has one frequency w_k, a sine and a cosine. An odd width leaves one column over, and
// the convention's odd-width rule says what it holds.
#pragma once

#include <cstdint>

namespace posenc {

enum class LayoutKind : int64_t {
  interleaved = 0,  // sin, cos, sin, cos, ...
  sin_cos = 1,      // all sines, then all cosines
  cos_sin = 2,      // all cosines, then all sines
  none = 3,         // no wave anywhere: token_scale * base alone
};

enum class OddRule : int64_t {
  sine = 0,      // the last column is one more sine, of the next frequency
  zero = 1,      // the last column is zero
  round_up = 2,  // one more sine, and all frequencies are those of the next even width
};

struct Layout {
  LayoutKind kind = LayoutKind::interleaved;
  int64_t width = 0;
  int64_t sines = 0;    // columns that hold a sine
  int64_t cosines = 0;  // columns that hold a cosine; what is left (0 or 1, or all of none) holds zero

  static Layout make(LayoutKind kind, OddRule odd, int64_t width) {
    if (kind == LayoutKind::none) return {kind, width, 0, 0};
    const int64_t half = width / 2;
    const bool extra_sine = width % 2 == 1 && odd != OddRule::zero;
    return {kind, width, half + (extra_sine ? 1 : 0), half};
  }

  int64_t pairs() const { return sines; }  // sines >= cosines under every rule
  int64_t zero_column() const { return kind == LayoutKind::none || sines + cosines == width ? -1 : width - 1; }
  int64_t sine_start() const { return kind == LayoutKind::cos_sin ? cosines : 0; }
  int64_t cosine_start() const { return kind == LayoutKind::cos_sin ? 0 : sines; }
};

}  // namespace posenc
