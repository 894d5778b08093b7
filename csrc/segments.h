// Groups the tokens of a weight gradient by id, for the CPU backend.
#pragma once

#include <vector>

#include "params.h"

namespace posenc {

struct SortedSegments {
  std::vector<int64_t> order, start, row;
  // Valid while this object lives and is not changed.
  Segments view() const { return {static_cast<int64_t>(row.size()), order.data(), start.data(), row.data()}; }
};

// Ids must lie in [0, rows).
SortedSegments sort_into_segments(const GradientTokens& tokens);

}  // namespace posenc
