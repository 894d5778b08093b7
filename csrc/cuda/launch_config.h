// Shapes of launches. No value depends on them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace posenc::cuda {

constexpr int64_t kMostBlocksYZ = 65535, kMostThreadsZ = 64;  // of the hardware
// A grid has threads to fill the device so many times at most; then they loop.
constexpr int64_t kFills = 4;

// Whether 16 bytes can be loaded and stored at once.
inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t power_of_two_from(int64_t count) {
  int64_t power = 1;
  while (power < count) power *= 2;
  return power;
}

// Threads along the columns of a row, each with one of `units`: a power of two up to `most`, at least a warp where
// there is work for it, that leaves the fewest threads idle.
inline int64_t threads_along(int64_t units, int64_t most) {
  int64_t best = std::min(most, power_of_two_from(units));
  for (int64_t threads = best / 2; threads >= 32; threads /= 2)
    if (divide_up(units, threads) * threads < divide_up(units, best) * best) best = threads;
  return best;
}

// Blocks for `count` items, `per_block` to each; no more than `most`.
inline int64_t blocks_for(int64_t count, int64_t per_block, int64_t most) {
  return std::clamp<int64_t>(most, 1, std::max<int64_t>(divide_up(count, per_block), 1));
}

}  // namespace posenc::cuda
