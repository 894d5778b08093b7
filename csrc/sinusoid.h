// Angle -> (sin, cos): the one home of the mathematics, compiled for every CPU instruction set and for CUDA.
//
// Angles are held as unsigned fixed-point *turns*: a 32-bit phase is the fraction of a full turn times 2^32, so
// reduction modulo 2*pi is integer overflow, exact and free of branches. Two kinds of angles are reduced:
//   exact      phase = |p| * w / 2pi, with w / 2pi kept to 96 (fp32 results) or 128 bits (fp64 results)
//   reference  the fp32 product fl32(|p|) * fl32(w), the angle that fp32 tables are built from
// Positions enter by magnitude; the caller flips the sine of a negative one, so sin(-p) = -sin(p) holds exactly. Those
// that are no integers are held in fixed point too, with 64 bits of fraction.
//
// Results must not depend on the instruction set: every fused multiply-add is written out (`fused`), and everything
// else is built with contraction off.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "encoding.h"

namespace posenc {
inline namespace POSENC_ISA {

template <class To, class From>
POSENC_HD To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

POSENC_HD uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
#endif
}

POSENC_HD uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// a * b + c with one rounding. Without the instruction the exact product is formed in double, the sum is rounded to
// odd (which survives the second rounding to float unharmed), and the result is the same to the last bit.
POSENC_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(POSENC_HAVE_FMA) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b;
  const double sum = product + c;
  const double c_part = sum - product;
  const double error = (product - (sum - c_part)) + (c - c_part);
  const uint64_t bits = bit_cast<uint64_t>(sum);
  const uint64_t to_odd =
      (error != 0.0 && (bits & 1) == 0) ? ((error > 0.0) == (sum > 0.0) ? uint64_t{1} : ~uint64_t{0}) : 0;
  return static_cast<float>(bit_cast<double>(bits + to_odd));
#endif
}

template <class acc_t>
struct SinCos {
  acc_t sin, cos;
};

// What follows is written once for a single value and for a vector of them (cpu/vector.inl): Uint is uint32_t or a
// vector of uint32_t, Lane<Uint> names its partners, and operators work on both.
template <class Uint>
struct Lane;

template <>
struct Lane<uint32_t> {
  using Float = float;
  POSENC_HD static float fused(float a, float b, float c) { return posenc::fused(a, b, c); }
  POSENC_HD static uint32_t high_product(uint32_t a, uint32_t b) { return posenc::high_product(a, b); }
  POSENC_HD static float splat(float value) { return value; }
  POSENC_HD static float signed_to_float(uint32_t value) { return static_cast<float>(static_cast<int32_t>(value)); }
  // x, and -x where the top bit of `bits` is set.
  POSENC_HD static float flipped(float x, uint32_t bits) {
    return bit_cast<float>(bit_cast<uint32_t>(x) ^ (bits & 0x80000000u));
  }
  // (sin, cos), a quarter turn on where bit 30 is set.
  POSENC_HD static SinCos<float> turned(float sin, float cos, uint32_t bits) {
    if ((bits & 0x40000000u) != 0u) return {cos, -sin};
    return {sin, cos};
  }
};

// sin and cos of x + (pi/2) * quarter, |x| <= pi/4, where quarter is in the top two bits of `quarters` (the rest is not
// looked at). Polynomials: docs/sinusoid_fit.py.
template <class Uint>
POSENC_HD SinCos<typename Lane<Uint>::Float> sincos_of_rest(typename Lane<Uint>::Float x, Uint quarters) {
  using L = Lane<Uint>;
  using Float = typename L::Float;
  const Float z = x * x;
  x = L::flipped(x, quarters);  // half a turn changes the signs of both
  Float s = L::fused(L::splat(-1.94961147e-4f), z, L::splat(8.33198335e-3f));
  s = L::fused(s, z, L::splat(-1.66666508e-1f));
  s = L::fused(s * z, x, x);
  Float c = L::fused(L::splat(2.44306702e-5f), z, L::splat(-1.38873013e-3f));
  c = L::fused(c, z, L::splat(4.16666456e-2f));
  c = L::fused(c, z, L::splat(-0.5f));
  c = L::fused(c, z, L::splat(1.0f));
  return L::turned(s, L::flipped(c, quarters), quarters);
}

// sin and cos of 2pi * phase / 2^32, error below 1e-7.
template <class Uint>
POSENC_HD SinCos<typename Lane<Uint>::Float> sincos_of_phase32(Uint phase) {
  const Uint quarters = phase + 0x20000000u;  // rounded to the nearest quarter turn
  const Uint rest = phase << 2;               // from there, signed, in 2^-34 of a turn
  return sincos_of_rest<Uint>(Lane<Uint>::signed_to_float(rest) * 3.6572951981678992e-10f, quarters);  // 2pi / 2^34
}

// The same in fp64 with a 64-bit phase; plain multiplies and adds, since a fused one could not be had everywhere.
POSENC_HD SinCos<double> sincos_of_phase64(uint64_t phase) {
  const uint64_t nearest = phase + 0x2000000000000000u;
  const int64_t rest = static_cast<int64_t>(phase << 2);
  const double x = static_cast<double>(rest) * 8.51530395021638648e-20;  // 2pi / 2^66
  const double z = x * x;
  double s = 1.5887949835002489e-10;
  s = s * z + -2.5050589779482293e-8;
  s = s * z + 2.755731247986179e-6;
  s = s * z + -1.9841269825743649e-4;
  s = s * z + 8.3333333333162184e-3;
  s = s * z + -1.6666666666666599e-1;
  s = (s * z) * x + x;
  double c = -1.1360009412044067e-11;
  c = c * z + 2.0875729736034496e-9;
  c = c * z + -2.755731440107013e-7;
  c = c * z + 2.4801587289671594e-5;
  c = c * z + -1.3888888888874474e-3;
  c = c * z + 4.1666666666666602e-2;
  c = c * z + -0.5;
  c = c * z + 1.0;
  const bool odd_quarter = (nearest & 0x4000000000000000u) != 0;
  const uint64_t sin_sign = nearest & 0x8000000000000000u;
  const uint64_t cos_sign = (nearest + 0x4000000000000000u) & 0x8000000000000000u;
  const uint64_t sin_bits = bit_cast<uint64_t>(odd_quarter ? c : s) ^ sin_sign;
  const uint64_t cos_bits = bit_cast<uint64_t>(odd_quarter ? s : c) ^ cos_sign;
  return {bit_cast<double>(sin_bits), bit_cast<double>(cos_bits)};
}

// Top 32 bits of the fraction of n * 0.[high][low], off by less than 2 units.
template <class Uint>
POSENC_HD Uint phase_of_product(Uint n, Uint high, Uint low) {
  return n * high + Lane<Uint>::high_product(n, low);
}

// exact, for pair k: p = p1 * 2^32 + p0, and a factor 2^32 moves the fraction of w / 2pi by one word.
POSENC_HD uint32_t exact_phase32(const Frequencies& f, uint64_t p, int64_t k) {
  const uint32_t p0 = static_cast<uint32_t>(p), p1 = static_cast<uint32_t>(p >> 32);
  return phase_of_product(p0, f.turns[0][k], f.turns[1][k]) + phase_of_product(p1, f.turns[1][k], f.turns[2][k]);
}

POSENC_HD uint64_t exact_phase64(const Frequencies& f, uint64_t p, int64_t k) {
  const uint64_t high = (static_cast<uint64_t>(f.turns[0][k]) << 32) | f.turns[1][k];
  const uint64_t low = (static_cast<uint64_t>(f.turns[2][k]) << 32) | f.turns[3][k];
  return p * high + high_product(p, low);
}

// What the fraction of a position adds to the phase: of turns / 2^32 a turn and, if frequencies are given, of whole
// turns.
template <class Uint>
POSENC_HD Uint phase_of_fraction(Uint high, Uint turns) {
  return Lane<Uint>::high_product(high, turns);
}
template <class Uint>
POSENC_HD Uint phase_of_fraction(Uint high, Uint low, Uint turns, Uint whole_turns) {
  return phase_of_fraction(high, turns) + high * whole_turns + Lane<Uint>::high_product(low, whole_turns);
}

POSENC_HD uint32_t fraction_phase32(const Frequencies& f, uint64_t fraction, int64_t k) {
  const uint32_t high = static_cast<uint32_t>(fraction >> 32), low = static_cast<uint32_t>(fraction);
  return f.given() ? phase_of_fraction(high, low, f.turns[0][k], f.whole_turns[k])
                   : phase_of_fraction(high, f.turns[0][k]);
}

POSENC_HD uint64_t fraction_phase64(const Frequencies& f, uint64_t fraction, int64_t k) {
  const uint64_t phase =
      high_product(fraction, static_cast<uint64_t>(f.turns[0][k]) << 32 | static_cast<uint64_t>(f.turns[1][k]));
  return f.given() ? phase + fraction * f.whole_turns[k] : phase;
}

// The fraction of 1 / 2pi, 128 bits of it.
constexpr uint64_t kInverseTwoPiHigh = 0x28BE60DB9391054Au, kInverseTwoPiLow = 0x7F09D5F47D4D3770u;

// reference, for an fp32 angle in [0, kShortAngle), the way of Cody and Waite: the nearest number of quarter turns is
// found by adding 1.5 * 2^23, where floats are integers and the low bits of the sum are the number, and is taken off
// times pi/2 in two parts. The first step is exact, what the two parts lack of pi/2 is below 2^-31 here, so x is
// rounded once.
constexpr float kShortAngle = 262144.0f;  // 2^18

template <class Uint>
POSENC_HD SinCos<typename Lane<Uint>::Float> sincos_of_short_angle(typename Lane<Uint>::Float angle) {
  using L = Lane<Uint>;
  using Float = typename L::Float;
  const Float whole = L::fused(angle, L::splat(6.36619747e-1f), L::splat(12582912.0f));  // 2 / pi
  const Float quarter_turns = whole - 12582912.0f;
  Float x = L::fused(quarter_turns, L::splat(-0x1.921fb6p+0f), angle);
  x = L::fused(quarter_turns, L::splat(0x1.777a5cp-25f), x);
  return sincos_of_rest<Uint>(x, bit_cast<Uint>(whole) << 30);
}

// The 64 bits of 1 / 2pi that follow its first `skip` fractional bits, skip in [0, 63].
POSENC_HD uint64_t inverse_two_pi_window(uint32_t skip) {
  return skip == 0 ? kInverseTwoPiHigh : (kInverseTwoPiHigh << skip) | (kInverseTwoPiLow >> (64 - skip));
}

// reference, for an fp32 angle in [kShortAngle, 2^87): its significand m (24 bits) times 1 / 2pi. Below 2^24 that is
// taken with 32 bits behind the point, and a shift leaves the phase in the low word. From 2^24 on, the leading bits of
// 1 / 2pi only make whole turns.
POSENC_HD uint32_t wide_angle_phase32(float angle) {
  const uint32_t bits = bit_cast<uint32_t>(angle), exponent = bits >> 23;
  const uint32_t m = (bits & 0x7FFFFFu) | 0x800000u;
  if (exponent <= 150u) {
    const uint64_t turns = m * (kInverseTwoPiHigh >> 32) + high_product(m, static_cast<uint32_t>(kInverseTwoPiHigh));
    return static_cast<uint32_t>(turns >> (150u - exponent));
  }
  const uint64_t window = inverse_two_pi_window(exponent - 150u);
  return phase_of_product(m, static_cast<uint32_t>(window >> 32), static_cast<uint32_t>(window));
}

// reference, for any fp32 angle below 2^87; which way is taken depends on the angle alone.
POSENC_HD SinCos<float> sincos_of_angle(float angle) {
  return angle < kShortAngle ? sincos_of_short_angle<uint32_t>(angle) : sincos_of_phase32(wide_angle_phase32(angle));
}

// reference, for results in fp64: the same fp32 angle, to 64 bits.
POSENC_HD uint64_t wide_angle_phase64(float angle) {
  const uint32_t bits = bit_cast<uint32_t>(angle);
  const uint64_t m = (bits & 0x7FFFFFu) | 0x800000u;
  if ((bits >> 23) > 150u) {
    const uint32_t skip = (bits >> 23) - 150u;
    return m * inverse_two_pi_window(skip) + high_product(m, kInverseTwoPiLow << skip);
  }
  const uint32_t shift = 150u - (bits >> 23);
  // The low 64 bits of floor(m / 2pi * 2^64), and the bits above them.
  const uint64_t fraction = m * kInverseTwoPiHigh + high_product(m, kInverseTwoPiLow);
  const uint64_t whole = high_product(m, kInverseTwoPiHigh) + (fraction < m * kInverseTwoPiHigh);
  if (shift == 0) return fraction;
  if (shift < 64) return (fraction >> shift) | (whole << (64 - shift));
  return shift < 128 ? whole >> (shift - 64) : 0;
}

// ---- positions

// The number whole + fraction / 2^64.
struct Position {
  int64_t whole = 0;
  uint64_t fraction = 0;

  // Not of a number that is not finite or that no int64 holds. It reads as the smallest, and its encoding is NaN.
  POSENC_HD bool exists() const { return whole != INT64_MIN || fraction != ~uint64_t{0}; }
};

// The same without its sign.
struct Magnitude {
  uint64_t whole = 0, fraction = 0;

  // Rounded once, unless it has both a fraction and more than 53 bits.
  POSENC_HD explicit operator float() const {
    if (fraction == 0) return static_cast<float>(whole);
    return static_cast<float>(static_cast<double>(whole) + static_cast<double>(fraction) * 0x1p-64);
  }
};

// sin(-p) = -sin(p), cos(-p) = cos(p).
POSENC_HD Magnitude magnitude(const Position& p) {
  const uint64_t whole = static_cast<uint64_t>(p.whole);
  if (p.whole >= 0) return {whole, p.fraction};
  return {p.fraction == 0 ? uint64_t{0} - whole : ~whole, uint64_t{0} - p.fraction};
}

// What is smaller than 2^-64 is cut off.
POSENC_HD Position fixed_point(double p) {
  const double size = p < 0 ? -p : p;
  if (!(size < 0x1p63)) return {INT64_MIN, ~uint64_t{0}};
  const int64_t whole = static_cast<int64_t>(size);
  const uint64_t fraction = static_cast<uint64_t>((size - static_cast<double>(whole)) * 0x1p64);
  if (p >= 0) return {whole, fraction};
  return {fraction == 0 ? -whole : ~whole, uint64_t{0} - fraction};
}

// ---- the encoding of any position, without a shortcut

// Angles of frequencies that are given may be too large for what is kept of 1 / 2pi.
constexpr float kMostAngle = 0x1p87f;

POSENC_HD SinCos<float> sincos_of_any_angle(float angle, float) {
  return angle < kMostAngle ? sincos_of_angle(angle) : SinCos<float>{NAN, NAN};
}
POSENC_HD SinCos<double> sincos_of_any_angle(float angle, double) {
  return angle < kMostAngle ? sincos_of_phase64(wide_angle_phase64(angle)) : SinCos<double>{NAN, NAN};
}

template <bool general>
POSENC_HD SinCos<float> exact_pair(const Frequencies& f, const Magnitude& p, int64_t k, float) {
  uint32_t phase = exact_phase32(f, p.whole, k);
  if (general && p.fraction != 0) phase += fraction_phase32(f, p.fraction, k);
  return sincos_of_phase32(phase);
}
template <bool general>
POSENC_HD SinCos<double> exact_pair(const Frequencies& f, const Magnitude& p, int64_t k, double) {
  uint64_t phase = exact_phase64(f, p.whole, k);
  if (general && p.fraction != 0) phase += fraction_phase64(f, p.fraction, k);
  return sincos_of_phase64(phase);
}

// Sine and cosine of pair k at a position that exists. Only if `general` it may have a fraction, and frequencies may be
// given.
template <class acc_t, bool general = false>
POSENC_HD SinCos<acc_t> encoding_of_pair(const Frequencies& f, Precision precision, const Position& position,
                                         int64_t k) {
  const Magnitude p = magnitude(position);
  SinCos<acc_t> pair;
  bool negative = position.whole < 0;
  if (precision == Precision::reference) {
    float angle = (general ? static_cast<float>(p) : static_cast<float>(p.whole)) * f.angular[k];
    if (general && (bit_cast<uint32_t>(angle) >> 31) != 0) angle = -angle, negative = !negative;
    if constexpr (general) pair = sincos_of_any_angle(angle, acc_t{});
    else if constexpr (sizeof(acc_t) == 4) pair = sincos_of_angle(angle);
    else pair = sincos_of_phase64(wide_angle_phase64(angle));
  } else {
    pair = exact_pair<general>(f, p, k, acc_t{});
    if (general && f.given()) {
      pair = {pair.sin + f.angular[k], pair.cos + f.angular[k]};
      negative ^= (bit_cast<uint32_t>(f.angular[k]) >> 31) != 0;
    }
  }
  if (negative) pair.sin = -pair.sin;
  return pair;
}

}  // namespace POSENC_ISA
}  // namespace posenc
