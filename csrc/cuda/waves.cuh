// The waves of one position for the columns a thread owns: frequencies in registers, sin and cos from sinusoid.h.
#pragma once

#include "../params.h"
#include "../sinusoid.h"
#include "element.cuh"
#include "platform.cuh"

namespace posenc::cuda {

// Which pairs of an encoding, and how they are made; device pointers.
struct WaveArgs {
  Precision precision = Precision::exact;
  Frequencies frequencies;
};

// Positions enter by magnitude: sin(-p) = -sin(p), cos(-p) = cos(p).
__device__ __forceinline__ uint64_t magnitude(int64_t position) {
  return position < 0 ? uint64_t{0} - static_cast<uint64_t>(position) : static_cast<uint64_t>(position);
}

__device__ __forceinline__ uint32_t magnitude(int32_t position) {
  return position < 0 ? 0u - static_cast<uint32_t>(position) : static_cast<uint32_t>(position);
}

template <int count>
__device__ __forceinline__ void load_words(const uint32_t* from, uint32_t (&words)[count]) {
  if constexpr (count % 4 == 0) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(from + i));
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else if constexpr (count % 2 == 0) {
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from + i));
      words[i] = two.x, words[i + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) words[i] = __ldg(from + i);
  }
}

// Frequencies of the pairs first .. first + pairs - 1. Wide loads ask `first` to be a multiple of `pairs` (or of 4);
// tables are padded, so reading past the last pair is fine.
//
// exact: the two leading words of w / 2pi, all that a position below 2^32 needs; reference: the bits of w.
template <int pairs>
struct Frequency {
  uint32_t high[pairs], low[pairs];

  __device__ __forceinline__ void load(const WaveArgs& waves, int64_t first) {
    if (waves.precision == Precision::exact) {
      load_words(waves.frequencies.turns[0] + first, high);
      load_words(waves.frequencies.turns[1] + first, low);
    } else {
      load_words(reinterpret_cast<const uint32_t*>(waves.frequencies.angular) + first, high);
    }
  }
};

// 0 for a position whose waves near_waves can make: one that fits in 32 bits with its sign, and for reference one
// whose angles are all short (no frequency is above 1, so no angle above the position).
template <Precision precision>
__device__ __forceinline__ uint32_t beyond_near(Integer64 position) {
  const int32_t low = static_cast<int32_t>(position.low);
  const uint32_t beyond = position.high ^ static_cast<uint32_t>(low >> 31);  // 0 if the sign is all it holds
  if constexpr (precision == Precision::exact) return beyond;
  return beyond | magnitude(low) / static_cast<uint32_t>(kShortAngle);
}

template <Precision precision, int pairs>
__device__ __forceinline__ void near_waves(int32_t position, const Frequency<pairs>& frequency, float (&sines)[pairs],
                                           float (&cosines)[pairs]) {
  const uint32_t p = magnitude(position);
#pragma unroll
  for (int i = 0; i < pairs; ++i) {
    SinCos<float> wave;
    if constexpr (precision == Precision::exact) {
      wave = sincos_of_phase32(phase_of_product(p, frequency.high[i], frequency.low[i]));
    } else {
      wave = sincos_of_short_angle<uint32_t>(static_cast<float>(p) * __uint_as_float(frequency.high[i]));
    }
    sines[i] = __uint_as_float(__float_as_uint(wave.sin) ^ (static_cast<uint32_t>(position) & 0x80000000u));
    cosines[i] = wave.cos;
  }
}

// Any position, any precision: the formulas without a shortcut, frequencies from memory.
__device__ __forceinline__ void wave_of_pair(const Frequencies& table, Precision precision, int64_t position,
                                             int64_t pair, float& sine, float& cosine) {
  const uint64_t p = magnitude(position);
  SinCos<float> wave;
  if (precision == Precision::reference) {
    wave = sincos_of_angle(static_cast<float>(p) * __ldg(table.angular + pair));
  } else {
    wave = sincos_of_phase32(exact_phase32(static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32),
                                           __ldg(table.turns[0] + pair), __ldg(table.turns[1] + pair),
                                           __ldg(table.turns[2] + pair)));
  }
  sine = position < 0 ? -wave.sin : wave.sin;
  cosine = wave.cos;
}

__device__ __forceinline__ void wave_of_pair(const Frequencies& table, Precision precision, int64_t position,
                                             int64_t pair, double& sine, double& cosine) {
  const uint64_t p = magnitude(position);
  uint64_t phase;
  if (precision == Precision::reference) {
    phase = wide_angle_phase64(static_cast<float>(p) * __ldg(table.angular + pair));
  } else {
    phase = exact_phase64(p, {{__ldg(table.turns[0] + pair), __ldg(table.turns[1] + pair), __ldg(table.turns[2] + pair),
                               __ldg(table.turns[3] + pair)}});
  }
  const SinCos<double> wave = sincos_of_phase64(phase);
  sine = position < 0 ? -wave.sin : wave.sin;
  cosine = wave.cos;
}

}  // namespace posenc::cuda
