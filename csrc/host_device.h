// Functions that CPU and CUDA kernels share, and those that a library exports.
#pragma once

// What the library of the ops offers to the Python module, which links to it. Everything else is hidden.
#define POSENC_API __attribute__((visibility("default")))

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
