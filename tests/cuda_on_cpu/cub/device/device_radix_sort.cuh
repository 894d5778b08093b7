// Stands in for CUB, which needs a device: the same calls, in two steps as there. They are checked and queued.
#pragma once

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "fake_cuda.h"

namespace cub {

// Sizes the temporary memory where there is none yet; else queues the work, which overwrites all of it.
template <class Work>
cudaError_t run(const char* what, void* temporary, size_t& bytes, size_t needed, cudaStream_t stream,
                const Work& work) {
  if (temporary == nullptr) {
    bytes = needed;
    return fake_cuda::ask(what);
  }
  if (bytes < needed) return cudaErrorInvalidValue;
  return fake_cuda::enqueue(what, fake_cuda::current_device(), stream, [=] {
    fake_cuda::overwrite(temporary, needed);
    work();
  });
}

struct DeviceRadixSort {
  // As in CUB, the size depends on how many passes the bits take.
  template <class Key, class Value>
  static cudaError_t SortPairs(void* temporary, size_t& bytes, const Key* keys, Key* sorted_keys, const Value* values,
                               Value* sorted_values, int count, int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                               cudaStream_t stream = nullptr) {
    static_assert(std::is_same_v<Key, uint32_t>);
    if (count < 0 || begin_bit < 0 || end_bit <= begin_bit || end_bit > 32) return cudaErrorInvalidValue;
    const size_t needed = 8 * static_cast<size_t>(count) + 300 * ((end_bit - begin_bit + 7) / 8);
    return run("cub::DeviceRadixSort::SortPairs", temporary, bytes, needed, stream, [=] {
      const auto digit = [=](int i) {
        return static_cast<uint32_t>((uint64_t{keys[i]} & ((uint64_t{1} << end_bit) - 1)) >> begin_bit);
      };
      std::vector<int> order(count);
      std::vector<uint32_t> digits(count);
      std::iota(order.begin(), order.end(), 0);
      for (int i = 0; i < count; ++i) digits[i] = digit(i);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return digits[a] < digits[b]; });
      for (int i = 0; i < count; ++i) {
        sorted_keys[i] = keys[order[i]];
        sorted_values[i] = values[order[i]];
      }
    });
  }
};

}  // namespace cub
