// The element types of tables and outputs: how they become numbers to compute with, and how 16 bytes of them are loaded
// and stored at once.
#pragma once

#include <type_traits>

#include "../params.h"
#include "../sinusoid.h"
#include "platform.cuh"

namespace posenc::cuda {

template <Dtype dtype>
struct ElementOf;
template <>
struct ElementOf<Dtype::float32> {
  using type = float;
};
template <>
struct ElementOf<Dtype::float64> {
  using type = double;
};
template <>
struct ElementOf<Dtype::bfloat16> {
  using type = __nv_bfloat16;
};
template <>
struct ElementOf<Dtype::float16> {
  using type = __half;
};

// What is computed with.
template <class T>
using acc_of = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float to_acc(float value) { return value; }
__device__ __forceinline__ double to_acc(double value) { return value; }
__device__ __forceinline__ float to_acc(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_acc(__half value) { return __half2float(value); }

template <class T>
__device__ __forceinline__ T from_acc(acc_of<T> value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(value);
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
  else return value;
}

// Elements in one 16-byte access.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T>
struct Vector {
  T element[kVector<T>];
};

// read_only: nothing writes to the tensor while the kernel runs.
template <bool read_only, class T>
__device__ __forceinline__ Vector<T> load_vector(const T* from) {
  const uint4* const bits = reinterpret_cast<const uint4*>(from);
  return bit_cast<Vector<T>>(read_only ? __ldg(bits) : *bits);
}

template <class T>
__device__ __forceinline__ void store_vector(T* to, const acc_of<T> (&values)[kVector<T>]) {
  Vector<T> vector;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) vector.element[i] = from_acc<T>(values[i]);
  const uint4 bits = bit_cast<uint4>(vector);
#if defined(__CUDA_ARCH__)
  // In assembler, because the compiler splits the assignment of a uint4.
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
#else
  *reinterpret_cast<uint4*>(to) = bits;
#endif
}

}  // namespace posenc::cuda
