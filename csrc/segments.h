// Groups the tokens of a batch by id: a stable radix sort on as many bits as the table's size needs.
#pragma once

#include <vector>

#include "params.h"

namespace posenc {

struct SortedRuns {
  std::vector<int64_t> order, start, row;
  Runs view() const { return {static_cast<int64_t>(row.size()), order.data(), start.data(), row.data()}; }
};

SortedRuns sort_into_runs(const GradientTokens& tokens);

}  // namespace posenc
