// The element types of tables and outputs: how they become numbers to compute with, and how 16 bytes of them are loaded
// and stored at once.
#pragma once

#include <tuple>
#include <type_traits>

#include "../params.h"
#include "../sinusoid.h"
#include "platform.cuh"

namespace posenc::cuda {

// In the order of Dtype.
using ElementTypes = std::tuple<float, double, __nv_bfloat16, __half>;
template <Dtype dtype>
using ElementOf = std::tuple_element_t<static_cast<size_t>(dtype), ElementTypes>;

// Calls body with an element of that type.
template <class Body>
void with_element(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::float32: return body(float{});
    case Dtype::float64: return body(double{});
    case Dtype::bfloat16: return body(__nv_bfloat16{});
    case Dtype::float16: return body(__half{});
  }
}

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

__device__ __forceinline__ void store_bits(void* to, const uint4& bits) {
#if defined(__CUDA_ARCH__)
  // In assembler, because the compiler splits the assignment of a uint4.
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
#else
  *static_cast<uint4*>(to) = bits;
#endif
}

template <class T>
__device__ __forceinline__ void store_vector(T* to, const acc_of<T> (&values)[kVector<T>]) {
  Vector<T> vector;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) vector.element[i] = from_acc<T>(values[i]);
  store_bits(to, bit_cast<uint4>(vector));
}

}  // namespace posenc::cuda
