// Sorting and scanning on a GPU: CUB behind plain functions, so that only sort.cu compiles it. A stream is a
// cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

namespace posenc::cuda {

// All that the size of the temporary memory depends on.
struct SortShape {
  int64_t count = 0;
  int bits = 1;  // of the keys, the lowest, that are looked at
};

// Temporary memory that either of the functions below needs.
size_t sort_bytes(const SortShape& shape);

// Stable.
void sort_pairs(const SortShape& shape, void* temporary, size_t bytes, const uint32_t* keys, uint32_t* sorted_keys,
                const int32_t* values, int32_t* sorted_values, void* stream);

void running_sum(const SortShape& shape, void* temporary, size_t bytes, int32_t* values, void* stream);

}  // namespace posenc::cuda
