// What a kernel file needs of its compiler, and errors of the CUDA runtime as exceptions. nvcc builds it for a GPU. The
// tests also build it with g++, where tests/cuda_on_cpu/cuda_shim.h stands in for the device.
#pragma once

#include <stdexcept>
#include <string>

#if defined(POSENC_CUDA_ON_CPU)
#include "cuda_shim.h"  // brings POSENC_LAUNCH and POSENC_SHARED
#else
#include <cuda_runtime.h>
#define POSENC_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define POSENC_SHARED(T, name, count) __shared__ T name[count]
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace posenc::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // raised here; the runtime would report it again after the next launch
  throw std::runtime_error(std::string("posenc_ext: ") + what + " failed: " + cudaGetErrorString(error));
}

}  // namespace posenc::cuda
