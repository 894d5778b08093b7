// What csrc/cuda/sort.cu does with CUB, which the shim cannot run: for the host.
#include <algorithm>
#include <numeric>
#include <vector>

#include "cuda/sort.h"

namespace posenc::cuda {

size_t sort_bytes(int64_t, int) { return 1; }

void sort_pairs(void*, size_t, const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t count, int bits, void*) {
  const auto key = [=](int64_t i) { return bits < 32 ? keys[i] & ((uint32_t{1} << bits) - 1) : keys[i]; };
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
  for (int64_t i = 0; i < count; ++i) {
    sorted_keys[i] = keys[order[i]];
    sorted_values[i] = values[order[i]];
  }
}

void running_sum(void*, size_t, int32_t* values, int64_t count, void*) {
  std::partial_sum(values, values + count, values);
}

}  // namespace posenc::cuda
