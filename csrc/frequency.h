// The frequencies of a spec, to the bits that each precision needs.
#pragma once

#include <memory>
#include <vector>

#include "encoding.h"

namespace posenc {

// Entries that backends may read past the last pair, so that whole vectors can be loaded.
constexpr int64_t kFrequencyPadding = 16;

struct FrequencyTable {
  int64_t pairs = 0;
  std::vector<uint32_t> turns[4];
  std::vector<float> angular;
  POSENC_API Frequencies view() const;
};

// w_k for k in [0, pairs): base^(-2k / width) or base^(-k / max(width / 2 - 1, 1)); see frequency_width.
// base finite and >= 1, width and pairs up to kMostColumns. Made once for each spec and kept: a few hundred
// microseconds, then a lookup.
POSENC_API std::shared_ptr<const FrequencyTable> frequencies(double base, Divisor divisor, int64_t width,
                                                             int64_t pairs);

}  // namespace posenc
