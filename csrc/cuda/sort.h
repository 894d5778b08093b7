// Sorting and scanning on a GPU: CUB behind plain functions, so that only sort.cu compiles it. A stream is a
// cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

namespace posenc::cuda {

// Temporary memory that either of the functions below needs.
size_t sort_bytes(int64_t count, int bits);

// Stable, on the lowest `bits` bits of the keys.
void sort_pairs(void* temporary, size_t bytes, const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t count, int bits, void* stream);

void running_sum(void* temporary, size_t bytes, int32_t* values, int64_t count, void* stream);

}  // namespace posenc::cuda
