// The table of kernels that every instruction set fills from the one source kernels.inl.
#pragma once

#include "../../params.h"

namespace posenc::cpu {

// A thread's tiles of encodings: 16 KB in fp32. They hold whole rows of several positions, so that consecutive rows of
// out are written before the next batch row.
constexpr int64_t kTiles = 8, kTilePairs = 256;

inline int64_t tiles_per_row(const Encoding& encoding) {
  const int64_t pairs = encoding.table.data != nullptr ? (encoding.columns.width + 1) / 2 : encoding.columns.pairs();
  return pairs <= kTilePairs ? 1 : (pairs + kTilePairs - 1) / kTilePairs;
}
// How many positions' tiles are kept together: all tiles of a row or, of the widest rows, kTiles of them at a time.
inline int64_t positions_per_block(const Encoding& encoding) {
  const int64_t tiles = tiles_per_row(encoding);
  return tiles < kTiles ? kTiles / tiles : 1;
}

// A token of a call in which tokens have positions of their own, many of them alike.
struct GroupedToken {
  uint32_t b, t;
  uint32_t position;  // a number for its position
};

struct ForwardCall {
  const ForwardParams& params;
  bool stream;                            // stores bypass the cache
  const GroupedToken* grouped = nullptr;  // all tokens, by blocks of their positions' numbers, and one that is not used
};

struct Kernels {
  // Tokens [begin, end) of a ForwardCall: of those that are grouped, or in memory order, unless stores bypass the
  // cache; then in that of TokenLoop.
  ParallelBody forward;
  // The row of out that belongs to one segment: its sum, for the columns [first_column, last_column).
  void (*sum_segment)(const BackwardParams& params, bool stream, int64_t segment, int64_t first_column,
                      int64_t last_column);
  void (*fill_zero)(void* begin, int64_t bytes, bool stream);
  // After streaming stores, before another thread may read what they wrote.
  void (*end_stream)();
};

extern const Kernels kernels_baseline;
// Where the results matter and not the speed, the baseline alone is compiled.
#if defined(__x86_64__) && !defined(POSENC_BASELINE_ONLY)
#define POSENC_X86_TARGETS 1
extern const Kernels kernels_x86_64_v3;
extern const Kernels kernels_x86_64_v4;
extern const Kernels kernels_x86_64_v4_bf16;
#endif

}  // namespace posenc::cpu
