// Shapes of launches. No value depends on them.
//
// A grid is as many blocks as the device holds at a time, or a few times that, and then its threads loop. How many it
// holds is asked of the CUDA runtime for each kernel (Occupancy in backend.h).
#pragma once

#include <algorithm>
#include <cstdint>

namespace posenc::cuda {

constexpr int64_t kMostBlocksYZ = 65535, kMostThreadsZ = 64;  // of the hardware
// A grid is so many times what the device holds, at most.
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

// Blocks along two axes, `x` inside of `z`, for x_count * z_count steps of a block.
struct Blocks {
  int64_t x = 1, z = 1;
};

// How long such a grid takes, in steps: the waves that its blocks come in, times the steps of the busiest one.
inline int64_t steps_of(const Blocks& blocks, int64_t x_count, int64_t z_count, int64_t resident) {
  return divide_up(blocks.x * blocks.z, resident) * divide_up(x_count, blocks.x) * divide_up(z_count, blocks.z);
}

// A grid on a device that holds `resident` blocks at a time. One block for each step, if there is room; else the grid
// that takes the fewest steps, and among equal ones that with the fewest blocks along z. Where there is work enough, a
// block has `together` steps along z at the least.
inline Blocks balanced(int64_t x_count, int64_t z_count, int64_t resident, int64_t together = 1) {
  resident = std::max<int64_t>(resident, 1);
  x_count = std::max<int64_t>(x_count, 1), z_count = std::max<int64_t>(z_count, 1);
  if (x_count * z_count < together * resident) together = 1;
  const int64_t most_z = std::clamp<int64_t>(z_count / together, 1, kMostBlocksYZ);
  if (x_count * most_z <= resident) return {x_count, most_z};
  // What it would take without rounding. Near enough is good enough.
  const double least = static_cast<double>(x_count) * static_cast<double>(z_count) / static_cast<double>(resident);
  Blocks best;
  int64_t best_steps = INT64_MAX;
  for (int64_t waves = 1; waves <= kFills; ++waves) {
    const int64_t room = waves * resident;
    int64_t z = 1;
    for (;;) {
      const Blocks blocks{std::min(x_count, room / z), z};
      const int64_t steps = steps_of(blocks, x_count, z_count, resident);
      if (steps < best_steps) best = blocks, best_steps = steps;
      if (z >= most_z || z >= room) break;
      z = std::min({z < 16 ? z + 1 : z + z / 4, most_z, room});
    }
    if (static_cast<double>(best_steps) <= 1.05 * least) break;
  }
  return best;
}

// ---- the forward

constexpr int kForwardThreads = 256;

// Threads x lie along the columns, y along seq, z along the batch.
struct ForwardShape {
  int64_t x = 1, y = 1, z = 1;
  int64_t blocks_x = 1, blocks_y = 1, blocks_z = 1;
  int64_t steps = 1;  // tokens of the busiest thread
};

// `together`: rows of the batch that a thread should have, since it shares something among them.
inline ForwardShape forward_shape(int64_t units, int64_t seq, int64_t batch, int64_t resident, int64_t together) {
  ForwardShape shape;
  shape.x = threads_along(units, kForwardThreads);
  shape.y = std::min(kForwardThreads / shape.x, power_of_two_from(seq));
  shape.z = std::min({kForwardThreads / (shape.x * shape.y), power_of_two_from(batch), kMostThreadsZ});
  shape.blocks_y = std::min(divide_up(units, shape.x), kMostBlocksYZ);
  const int64_t along_seq = divide_up(seq, shape.y), along_batch = divide_up(batch, shape.z);
  const Blocks blocks = balanced(along_seq, along_batch, resident / shape.blocks_y, together);
  shape.blocks_x = blocks.x, shape.blocks_z = blocks.z;
  shape.steps = divide_up(along_seq, blocks.x) * divide_up(along_batch, blocks.z);
  return shape;
}

}  // namespace posenc::cuda
