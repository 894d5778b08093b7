// The frequencies of a spec, to the bits that each precision needs.
#pragma once

#include <memory>
#include <tuple>
#include <vector>

#include "encoding.h"

namespace posenc {

// Entries that backends may read past the last pair, so that whole vectors can be loaded.
constexpr int64_t kFrequencyPadding = 16;

using FrequencyKey = std::tuple<double, Divisor, int64_t, int64_t>;  // base, divisor, width, pairs

struct FrequencyTable {
  FrequencyKey key;
  std::vector<uint32_t> turns[4];
  std::vector<float> angular;
  POSENC_API Frequencies view() const;
  int64_t bytes() const { return 5 * static_cast<int64_t>(sizeof(float) * angular.size()); }
};

// Memory for the tables used last. There is always room for one.
constexpr int64_t kKeptTableBytes = int64_t{8} << 20;

// w_k for k in [0, pairs): base^(-2k / width) or base^(-k / max(width / 2 - 1, 1)); see frequency_width.
// base is finite and at least 1, width and pairs are at most kMostColumns. A table takes a few hundred microseconds, or
// a lookup while it is kept.
POSENC_API std::shared_ptr<const FrequencyTable> frequencies(double base, Divisor divisor, int64_t width,
                                                             int64_t pairs);

}  // namespace posenc
