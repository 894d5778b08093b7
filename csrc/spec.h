// The spec of an encoding as it travels through the ops: a base and one integer of flags, since every further scalar
// costs a call through the dispatcher a tenth of a microsecond. posenc_ext/conventions.py writes the flags.
//
//   bits 0-3 divisor, 4-7 layout, 8-11 odd-width rule, 12-15 precision, 16 no encoding, 17 sequence-first, 18
//   positions are offsets: the running index is added to them, 20 always set
//
// Numbers without bit 20 come from programs exported by version 0.1: two bits a field, layout 3 for no encoding, bit 8
// for sequence-first.
#pragma once

#include <cmath>

#include "encoding.h"
#include "errors.h"

namespace posenc {

struct Spec {
  double base = 0;
  Divisor divisor = Divisor::d;
  Layout layout = kLayouts[0];
  OddRule odd = OddRule::sine;
  Precision precision = Precision::exact;
  bool encoded = true;
  bool sequence_first = false;
  bool positions_are_offsets = false;

  Spec(double base_value, int64_t flags, const char* op) : base(base_value) {
    constexpr int64_t kNone = 1 << 16, kSequenceFirst = 1 << 17, kOffsets = 1 << 18, kVersion = 1 << 20;
    int64_t bits = flags;
    if (flags >= 0 && flags < 512) {
      const int64_t layout_0_1 = (flags >> 2) & 3;
      // 0.1 had two divisors.
      bits = kVersion | (flags & 2 ? 15 : flags & 1) | (layout_0_1 == 3 ? kNone : layout_0_1 << 4) |
             (flags >> 4 & 3) << 8 | (flags >> 6 & 3) << 12 | (flags & 256 ? kSequenceFirst : 0);
    }
    const auto field = [&](int place) { return (bits >> (4 * place)) & 15; };
    constexpr int64_t kKnown = 0xFFFF | kNone | kSequenceFirst | kOffsets | kVersion;
    POSENC_CHECK((bits & kVersion) && (bits & ~kKnown) == 0 && field(0) < kDivisors && field(1) < kLayoutCount &&
                     field(2) < kOddRules && field(3) < kPrecisions,
                 op, "flags must be those of a Convention, got ", flags);
    POSENC_CHECK(std::isfinite(base) && base >= 1.0, op, "base must be finite and at least 1, got ", base);
    divisor = static_cast<Divisor>(field(0));
    layout = kLayouts[field(1)];
    odd = static_cast<OddRule>(field(2));
    precision = static_cast<Precision>(field(3));
    encoded = !(bits & kNone);
    sequence_first = bits & kSequenceFirst;
    positions_are_offsets = bits & kOffsets;
  }

  Columns columns(int64_t width) const {
    if (encoded) return columns_of(layout, odd, width);
    Columns columns;
    columns.width = width;
    return columns;
  }
};

}  // namespace posenc
