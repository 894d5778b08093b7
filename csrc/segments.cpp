#include "segments.h"

#include <algorithm>
#include <array>
#include <utility>

namespace posenc {
namespace {

struct Entry {
  uint64_t id;
  int64_t token;
};

constexpr int kDigitBits = 8;
constexpr int kBuckets = 1 << kDigitBits;

// A radix sort, least significant digit first, over the digits of the largest id. It is stable, so the tokens of an id
// stay in token order, the order of their sum.
void radix_sort(std::vector<Entry>& entries, uint64_t largest_id) {
  std::vector<Entry> other(entries.size());
  for (int shift = 0; shift < 64 && (largest_id >> shift) != 0; shift += kDigitBits) {
    std::array<size_t, kBuckets> next{};
    for (const Entry& entry : entries) ++next[(entry.id >> shift) & (kBuckets - 1)];
    size_t at = 0;
    // Counts become the start of each bucket.
    for (size_t& bucket : next) at += std::exchange(bucket, at);
    for (const Entry& entry : entries) other[next[(entry.id >> shift) & (kBuckets - 1)]++] = entry;
    entries.swap(other);
  }
}

}  // namespace

SortedSegments sort_into_segments(const GradientTokens& tokens) {
  std::vector<Entry> entries;
  entries.reserve(tokens.count);
  for (int64_t token = 0; token < tokens.count; ++token) {
    const int64_t id = tokens.ids[token];
    if (id != tokens.padding_idx) entries.push_back({static_cast<uint64_t>(id), token});
  }
  radix_sort(entries, tokens.rows > 0 ? tokens.rows - 1 : 0);

  SortedSegments segments;
  segments.order.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i == 0 || entries[i].id != entries[i - 1].id) {
      segments.start.push_back(i);
      segments.row.push_back(entries[i].id);
    }
    segments.order.push_back(entries[i].token);
  }
  segments.start.push_back(entries.size());
  return segments;
}

}  // namespace posenc
