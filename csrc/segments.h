// Groups the tokens of a batch by id, on the host.
#pragma once

#include <vector>

#include "params.h"

namespace posenc {

struct SortedSegments {
  std::vector<int64_t> order, start, row;
  Segments view() const { return {static_cast<int64_t>(row.size()), order.data(), start.data(), row.data()}; }
};

SortedSegments sort_into_segments(const GradientTokens& tokens);

}  // namespace posenc
