// The element types of tables and outputs: how they become numbers to compute with, and how 16 bytes of them are read
// and written at once.
#pragma once

#include "../sinusoid.h"
#include "platform.cuh"

namespace posenc::cuda {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

template <class T>
struct Element;

template <>
struct Element<float> {
  using Real = float;
  static __device__ __forceinline__ float get(float value) { return value; }
  static __device__ __forceinline__ float put(float value) { return value; }
};

template <>
struct Element<double> {
  using Real = double;
  static __device__ __forceinline__ double get(double value) { return value; }
  static __device__ __forceinline__ double put(double value) { return value; }
};

template <>
struct Element<BFloat16> {
  using Real = float;
  static __device__ __forceinline__ float get(BFloat16 value) { return __bfloat162float(value); }
  static __device__ __forceinline__ BFloat16 put(float value) { return __float2bfloat16_rn(value); }
  static __device__ __forceinline__ void get_pair(uint32_t bits, float& low, float& high) {
    low = __uint_as_float(bits << 16);
    high = __uint_as_float(bits & 0xFFFF0000u);
  }
  // What arithmetic on the device returned: a NaN is then 0x7FFFFFFF, which rounding must not carry into the sign.
  static __device__ __forceinline__ uint32_t put_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    // No instruction for it before 8.0, and the library's way looks at more than can happen here.
    return __byte_perm(rounded(low), rounded(high), 0x7632);
#else
    return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
#endif
  }

 private:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  // Rounded to nearest even, in the upper half: 0x7FFF is added, or 0x8000 if the last bit that stays is 1. Two
  // instructions: that bit is put among the bytes of a constant, and their sum, 128 * 0xFF + 1 * bit + 1 * 0x7F, is
  // added to the number.
  static __device__ __forceinline__ uint32_t rounded(float value) {
    const int32_t given = __float_as_int(value);
    const uint32_t bits = static_cast<uint32_t>(given < 0x7FFF0000 ? given : 0x7FFF0000);
    return __dp4a((bits & 0x10000u) | in_register(0xFF007F00u), 0x80010100u, bits);
  }

  // A constant that the compiler must take from a register, by not knowing that no thread has so high a number: two in
  // one instruction it would split in two.
  static __device__ __forceinline__ uint32_t in_register(uint32_t constant) {
    uint32_t thread;
    asm("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return constant - (thread >> 31);
  }
#endif
};

template <>
struct Element<Float16> {
  using Real = float;
  static __device__ __forceinline__ float get(Float16 value) { return __half2float(value); }
  static __device__ __forceinline__ Float16 put(float value) { return __float2half_rn(value); }
  static __device__ __forceinline__ void get_pair(uint32_t bits, float& low, float& high) {
    const float2 pair = __half22float2(bit_cast<__half2>(bits));
    low = pair.x;
    high = pair.y;
  }
  static __device__ __forceinline__ uint32_t put_pair(float low, float high) {
    return bit_cast<uint32_t>(__floats2half2_rn(low, high));
  }
};

// Elements in one 16-byte access.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ void unpack(const uint4& raw, typename Element<T>::Real (&values)[kVector<T>]) {
  if constexpr (sizeof(T) == 2) {
    Element<T>::get_pair(raw.x, values[0], values[1]);
    Element<T>::get_pair(raw.y, values[2], values[3]);
    Element<T>::get_pair(raw.z, values[4], values[5]);
    Element<T>::get_pair(raw.w, values[6], values[7]);
  } else if constexpr (sizeof(T) == 4) {
    values[0] = __uint_as_float(raw.x), values[1] = __uint_as_float(raw.y);
    values[2] = __uint_as_float(raw.z), values[3] = __uint_as_float(raw.w);
  } else {
    values[0] = bit_cast<double>(static_cast<uint64_t>(raw.y) << 32 | raw.x);
    values[1] = bit_cast<double>(static_cast<uint64_t>(raw.w) << 32 | raw.z);
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const typename Element<T>::Real (&values)[kVector<T>]) {
  if constexpr (sizeof(T) == 2) {
    return make_uint4(Element<T>::put_pair(values[0], values[1]), Element<T>::put_pair(values[2], values[3]),
                      Element<T>::put_pair(values[4], values[5]), Element<T>::put_pair(values[6], values[7]));
  } else if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                      __float_as_uint(values[3]));
  } else {
    const uint64_t low = bit_cast<uint64_t>(values[0]), high = bit_cast<uint64_t>(values[1]);
    return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                      static_cast<uint32_t>(high >> 32));
  }
}

// Through the read-only path where nothing writes to the tensor while the kernel runs.
template <bool read_only>
__device__ __forceinline__ uint4 load_vector(const void* from) {
  if constexpr (read_only) return __ldg(static_cast<const uint4*>(from));
  return load_16_bytes(from);
}

template <class T>
__device__ __forceinline__ void store_vector(void* to, const typename Element<T>::Real (&values)[kVector<T>]) {
  store_16_bytes(to, pack<T>(values));
}

// Sums on their way between kernels.
template <class Real, int count>
__device__ __forceinline__ void load_reals(const Real* from, Real (&values)[count]) {
  if constexpr (count * sizeof(Real) % 16 == 0) {
#pragma unroll
    for (int first = 0; first < count; first += kVector<Real>) {
      Real part[kVector<Real>];
      unpack<Real>(load_16_bytes(from + first), part);
#pragma unroll
      for (int i = 0; i < kVector<Real>; ++i) values[first + i] = part[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = from[i];
  }
}

template <class Real, int count>
__device__ __forceinline__ void store_reals(Real* to, const Real (&values)[count]) {
  if constexpr (count * sizeof(Real) % 16 == 0) {
#pragma unroll
    for (int first = 0; first < count; first += kVector<Real>) {
      Real part[kVector<Real>];
#pragma unroll
      for (int i = 0; i < kVector<Real>; ++i) part[i] = values[first + i];
      store_vector<Real>(to + first, part);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = values[i];
  }
}

// An int32 or int64 as its two halves.
struct Integer64 {
  uint32_t low, high;
  __device__ __forceinline__ int64_t value() const {
    return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
  }
};

__device__ __forceinline__ Integer64 halves_of(int64_t value) {
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32)};
}

// value + by; wraps, never undefined.
__device__ __forceinline__ Integer64 moved(Integer64 value, int64_t by) {
  return halves_of(static_cast<int64_t>(static_cast<uint64_t>(value.value()) + static_cast<uint64_t>(by)));
}

__device__ __forceinline__ Integer64 load_integer(const void* from, bool wide) {
  const uint32_t* words = static_cast<const uint32_t*>(from);
  const uint32_t low = __ldg(words);
  return {low, wide ? __ldg(words + 1) : static_cast<uint32_t>(static_cast<int32_t>(low) >> 31)};
}

}  // namespace posenc::cuda
