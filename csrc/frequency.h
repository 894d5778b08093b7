// The frequencies of a recipe, to the precision each mode needs.
#pragma once

#include <memory>
#include <vector>

#include "params.h"

namespace posenc {

// Entries that backends may read past the last pair, so that whole vectors can be loaded.
constexpr int64_t kFrequencyPadding = 16;

struct FrequencyTable {
  int64_t pairs = 0;
  std::vector<uint32_t> turns[4];
  std::vector<float> angular;
  Frequencies view() const;
};

// w_k for k in [0, pairs): base^(-2k / frequency_width) or base^(-k / max(frequency_width / 2 - 1, 1)).
// base >= 1. Made once for each recipe and kept: a few hundred microseconds, then a lookup.
std::shared_ptr<const FrequencyTable> frequencies(double base, Divisor divisor, int64_t frequency_width, int64_t pairs);

}  // namespace posenc
