// Errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace posenc::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here; the runtime would tell it again after the next launch
  throw std::runtime_error(std::string("posenc_ext: ") + what + " failed: " + cudaGetErrorString(error));
}

}  // namespace posenc::cuda
