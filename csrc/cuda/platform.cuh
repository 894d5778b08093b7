// What a kernel file needs of its compiler. nvcc builds it for a GPU; the tests also build it with g++, where
// cuda_on_cpu/cuda_shim.h stands in for the device (tests/cuda_on_cpu).
#pragma once

#include <cstdint>

#if defined(POSENC_CUDA_ON_CPU)

#include "cuda_shim.h"  // brings POSENC_LAUNCH and POSENC_SHARED

#else

#include <cuda_runtime.h>

#define POSENC_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define POSENC_SHARED(T, name, count) __shared__ T name[count]

#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace posenc::cuda {

// a * b in 64 bits. In assembler, because the compiler widens both factors and then multiplies 64 bits by 64.
__device__ __forceinline__ uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

// One 16-byte access each. In assembler, because the compiler is free to split the assignment of a uint4, and does.
__device__ __forceinline__ void store_16_bytes(void* to, uint4 value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
#else
  *static_cast<uint4*>(to) = value;
#endif
}

__device__ __forceinline__ uint4 load_16_bytes(const void* from) {
#if defined(__CUDA_ARCH__)
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
#else
  return *static_cast<const uint4*>(from);
#endif
}

}  // namespace posenc::cuda
