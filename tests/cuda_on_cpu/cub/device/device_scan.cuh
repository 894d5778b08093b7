// See device_radix_sort.cuh.
#pragma once

#include "device_radix_sort.cuh"

namespace cub {

struct DeviceScan {
  // More than a sort needs of a few items, and less than it needs of many.
  template <class Value>
  static cudaError_t InclusiveSum(void* temporary, size_t& bytes, const Value* values, Value* sums, int count,
                                  cudaStream_t stream = nullptr) {
    if (count < 0) return cudaErrorInvalidValue;
    const size_t needed = 2900 + static_cast<size_t>(count);
    return run("cub::DeviceScan::InclusiveSum", temporary, bytes, needed, stream, [=] {
      Value sum = 0;
      for (int i = 0; i < count; ++i) sums[i] = sum += values[i];
    });
  }
};

}  // namespace cub
