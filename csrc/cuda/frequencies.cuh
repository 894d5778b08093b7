// Frequencies that a caller gives, in memory of the device.
#pragma once

#include "../given_frequencies.h"
#include "platform.cuh"

namespace posenc::cuda {

constexpr int kFrequencyThreads = 128;

__global__ void convert_frequencies(const GivenFrequencies given, void* memory);

#if !defined(POSENC_KERNELS_FROM_PTX)

__global__ void __launch_bounds__(kFrequencyThreads) convert_frequencies(const GivenFrequencies given, void* memory) {
  const FrequencyMemory to(memory, given.pairs);
  for (int64_t k = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; k < to.stride; k += int64_t{gridDim.x} * blockDim.x)
    convert_frequency(given, k, to);
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
