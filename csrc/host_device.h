// Functions that CPU and CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define POSENC_HD __host__ __device__ __forceinline__
#else
#define POSENC_HD inline __attribute__((always_inline))
#endif

// The CPU kernels are compiled once for each instruction set. Shared functions that do arithmetic live in this inline
// namespace, so that the linker cannot merge an AVX-512 copy into code that must run on an older CPU.
#ifndef POSENC_ISA
#define POSENC_ISA portable
#endif
