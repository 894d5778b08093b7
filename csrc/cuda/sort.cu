#include "sort.h"

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "platform.cuh"

namespace posenc::cuda {
namespace {

// CUB says in `bytes` what it needs where `temporary` is null. So a size and its use are the same call.
cudaError_t sort(const SortShape& shape, void* temporary, size_t& bytes, const uint32_t* keys, uint32_t* sorted_keys,
                 const int32_t* values, int32_t* sorted_values, void* stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, sorted_keys, values, sorted_values,
                                         static_cast<int>(shape.count), 0, shape.bits,
                                         static_cast<cudaStream_t>(stream));
}

cudaError_t scan(const SortShape& shape, void* temporary, size_t& bytes, int32_t* values, void* stream) {
  return cub::DeviceScan::InclusiveSum(temporary, bytes, values, values, static_cast<int>(shape.count),
                                       static_cast<cudaStream_t>(stream));
}

}  // namespace

size_t sort_bytes(const SortShape& shape) {
  size_t of_sort = 0, of_scan = 0;
  check(sort(shape, nullptr, of_sort, nullptr, nullptr, nullptr, nullptr, nullptr), "sizing a sort");
  check(scan(shape, nullptr, of_scan, nullptr, nullptr), "sizing a running sum");
  return std::max(of_sort, of_scan);
}

void sort_pairs(const SortShape& shape, void* temporary, size_t bytes, const uint32_t* keys, uint32_t* sorted_keys,
                const int32_t* values, int32_t* sorted_values, void* stream) {
  check(sort(shape, temporary, bytes, keys, sorted_keys, values, sorted_values, stream), "sorting the ids");
}

void running_sum(const SortShape& shape, void* temporary, size_t bytes, int32_t* values, void* stream) {
  check(scan(shape, temporary, bytes, values, stream), "numbering the segments");
}

}  // namespace posenc::cuda
