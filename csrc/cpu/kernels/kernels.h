// The table of kernels that every instruction set fills from the one source kernels.inl.
#pragma once

#include "../../params.h"

namespace posenc::cpu {

struct ForwardCall {
  const ForwardParams& params;
  bool stream;  // stores bypass the cache
};

struct Kernels {
  // Tokens [begin, end) of a ForwardCall: in memory order, unless stores bypass the cache; then in that of TokenLoop.
  ParallelBody forward;
  // The row of out that belongs to one segment: its sum, for the columns [first_column, last_column).
  void (*sum_segment)(const BackwardParams& params, bool stream, int64_t segment, int64_t first_column,
                      int64_t last_column);
  void (*fill_zero)(void* begin, int64_t bytes, bool stream);
  // After streaming stores, before another thread may read what they wrote.
  void (*end_stream)();
};

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_x86_64_v3;
extern const Kernels kernels_x86_64_v4;
extern const Kernels kernels_x86_64_v4_bf16;
#endif

}  // namespace posenc::cpu
