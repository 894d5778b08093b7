#include "sort.h"

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "platform.cuh"

namespace posenc::cuda {

size_t sort_bytes(int64_t count, int bits) {
  size_t sort = 0, scan = 0;
  uint32_t* keys = nullptr;
  int32_t* values = nullptr;
  const int items = static_cast<int>(count);
  check(cub::DeviceRadixSort::SortPairs(nullptr, sort, keys, keys, values, values, items, 0, bits), "sizing a sort");
  check(cub::DeviceScan::InclusiveSum(nullptr, scan, values, values, items), "sizing a running sum");
  return std::max(sort, scan);
}

void sort_pairs(void* temporary, size_t bytes, const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t count, int bits, void* stream) {
  check(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, sorted_keys, values, sorted_values,
                                        static_cast<int>(count), 0, bits, static_cast<cudaStream_t>(stream)),
        "sorting the ids");
}

void running_sum(void* temporary, size_t bytes, int32_t* values, int64_t count, void* stream) {
  check(cub::DeviceScan::InclusiveSum(temporary, bytes, values, values, static_cast<int>(count),
                                      static_cast<cudaStream_t>(stream)),
        "numbering the segments");
}

}  // namespace posenc::cuda
