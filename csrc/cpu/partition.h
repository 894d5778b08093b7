// How work is split over threads, and when stores bypass the cache.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"

namespace posenc::cpu {

const Kernels& active_kernels();

template <class Body>
void run_parallel(ParallelFor parallel_for, int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (begin >= end) return;
  const ParallelBody call = [](int64_t b, int64_t e, void* context) { (*static_cast<const Body*>(context))(b, e); };
  parallel_for(begin, end, std::max<int64_t>(grain, 1), call, const_cast<void*>(static_cast<const void*>(&body)));
}

// Elements one thread should have at the least; torch uses the same for its elementwise loops.
constexpr int64_t kGrainElements = 32768;

// Outputs of this size and more bypass the cache. They would have left it before somebody reads them, and a plain store
// would first read each line from memory.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

}  // namespace posenc::cpu
