// How work is split over threads, and when stores bypass the cache.
#pragma once

#include <stdexcept>

#include "kernels/kernels.h"

namespace posenc::cpu {

const Kernels& active_kernels();

[[noreturn]] inline void throw_parallel_error() {
  throw std::runtime_error("posenc_ext: torch could not run a loop over its threads");
}

// Elements one thread should have at the least; torch uses the same for its elementwise loops.
constexpr int64_t kGrainElements = 32768;

// Outputs of this size and more bypass the cache. They would have left it before somebody reads them, and a plain store
// would first read each line from memory.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

}  // namespace posenc::cpu
