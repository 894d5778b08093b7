// Frequencies that a caller gives as numbers, in radians for each position, turned into what the kernels read.
#pragma once

#include "sinusoid.h"

namespace posenc {

struct GivenFrequencies {
  const void* data = nullptr;  // contiguous
  bool is_float64 = false;
  int64_t pairs = 0;
  Precision precision = Precision::exact;

  POSENC_HD double operator[](int64_t k) const {
    return is_float64 ? static_cast<const double*>(data)[k] : static_cast<const float*>(data)[k];
  }
};

// Where they are written: an array of words for each part of Frequencies, each aligned for vectors.
struct FrequencyMemory {
  uint32_t* words = nullptr;
  int64_t stride = 0;
  static constexpr int64_t kArrays = 6;

  // Whole vectors are read past the last pair.
  POSENC_HD static int64_t stride_of(int64_t pairs) { return (pairs + 31) / 16 * 16; }
  static int64_t bytes(int64_t pairs) { return kArrays * stride_of(pairs) * static_cast<int64_t>(sizeof(uint32_t)); }
  POSENC_HD FrequencyMemory(void* memory, int64_t pairs)
      : words(static_cast<uint32_t*>(memory)), stride(stride_of(pairs)) {}

  Frequencies view() const {
    Frequencies result;
    for (int i = 0; i < 4; ++i) result.turns[i] = words + i * stride;
    result.whole_turns = words + 4 * stride;
    result.angular = reinterpret_cast<const float*>(words + 5 * stride);
    return result;
  }
};

inline namespace POSENC_ISA {

// |w| / 2pi: whole turns modulo 2^32, and 128 bits of fraction, right to the last bit but one for |w| < 2^62.
struct Turns {
  uint32_t whole = 0;
  uint64_t fraction[2] = {};
};

// The largest magnitude that has all bits of a position's phase.
constexpr double kMostFrequency = 0x1p62;

POSENC_HD Turns turns_of(double w) {
  constexpr uint64_t kInverseTwoPi[3] = {kInverseTwoPiHigh, kInverseTwoPiLow, 0x36D8A5664F10E410u};
  const uint64_t bits = bit_cast<uint64_t>(w);
  const int exponent = static_cast<int>(bits >> 52 & 0x7FF);
  const uint64_t m = (bits & 0xFFFFFFFFFFFFFu) | (exponent == 0 ? 0 : uint64_t{1} << 52);
  // |w| = m * 2^shift. m / 2pi in 64 bits before the point and 192 behind it.
  const int shift = (exponent == 0 ? 1 : exponent) - 1075;
  uint64_t product[4] = {};
  for (int i = 2; i >= 0; --i) {
    const uint64_t low = m * kInverseTwoPi[i];
    product[i + 1] += low;
    product[i] = high_product(m, kInverseTwoPi[i]) + (product[i + 1] < low);
  }
  // The 64 bits that begin `skip` bits behind the first one.
  const auto limb = [&](int i) {  // without an index that is known at run time only, for which a GPU takes memory
    return i == 0 ? product[0] : i == 1 ? product[1] : i == 2 ? product[2] : i == 3 ? product[3] : 0;
  };
  const auto word = [&](int skip) {
    const int i = skip >> 6, rest = skip & 63;
    return rest == 0 ? limb(i) : limb(i) << rest | limb(i + 1) >> (64 - rest);
  };
  Turns turns;
  turns.whole = static_cast<uint32_t>(word(shift));
  turns.fraction[0] = word(shift + 64);
  turns.fraction[1] = word(shift + 128);
  return turns;
}

// Writes the k-th one; behind the last pair, zeros.
POSENC_HD void convert_frequency(const GivenFrequencies& given, int64_t k, const FrequencyMemory& to) {
  const double w = k < given.pairs ? given[k] : 0;
  const bool usable = (w < 0 ? -w : w) <= kMostFrequency;
  const Turns turns = turns_of(usable ? w : 0);
  to.words[k] = static_cast<uint32_t>(turns.fraction[0] >> 32);
  to.words[to.stride + k] = static_cast<uint32_t>(turns.fraction[0]);
  to.words[2 * to.stride + k] = static_cast<uint32_t>(turns.fraction[1] >> 32);
  to.words[3 * to.stride + k] = static_cast<uint32_t>(turns.fraction[1]);
  to.words[4 * to.stride + k] = turns.whole;
  // exact: 0 with the sign of w, or NaN where there are no turns.
  const float zero = w < 0 ? -0.0f : 0.0f;
  const float angular = given.precision == Precision::reference ? static_cast<float>(w) : usable ? zero : NAN;
  to.words[5 * to.stride + k] = bit_cast<uint32_t>(angular);
}

}  // namespace POSENC_ISA
}  // namespace posenc
