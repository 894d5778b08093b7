// The weight gradient: its rows partitioned over threads.
#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "partition.h"

namespace posenc::cpu {
namespace {

// The dense gradient seen as a line of work: zero rows cost one each, a row with a segment one and its tokens. Long
// segments are taken out (`hot`) and cut by columns instead, so that one frequent token does not keep one thread busy
// alone.
class RowPlan {
 public:
  RowPlan(const BackwardParams& params, int64_t hot_tokens)
      : segments_(params.segments), rows_(params.rows), cost_(params.segments.count + 1) {
    int64_t tokens = 0;
    for (int64_t r = 0; r < segments_.count; ++r) {
      cost_[r] = segments_.row[r] + tokens;
      const int64_t length = segments_.start[r + 1] - segments_.start[r];
      if (length >= hot_tokens) {
        hot_.push_back(r);
      } else {
        tokens += length;
      }
    }
    cost_[segments_.count] = rows_ + tokens;
  }

  int64_t total() const { return cost_[segments_.count]; }
  const std::vector<int64_t>& hot() const { return hot_; }

  // Calls zero(first_row, last_row) and sum(segment) for what starts in [begin, end) of the line.
  template <class Zero, class Sum>
  void each(int64_t begin, int64_t end, int64_t hot_tokens, const Zero& zero, const Sum& sum) const {
    // The first segment that starts at or after begin; the zero rows before it follow the segment before it.
    int64_t segment = std::lower_bound(cost_.begin(), cost_.end(), begin) - cost_.begin();
    int64_t row = 0, at = 0;
    if (segment > 0) {
      row = segments_.row[segment - 1] + 1;
      at = cost_[segment] - (next_row(segment) - row);
    }
    if (at < begin) row += begin - at, at = begin;
    while (at < end) {
      const int64_t gap_end = std::min(next_row(segment), row + end - at);
      if (gap_end > row) zero(row, gap_end);
      at += gap_end - row;
      row = gap_end;
      if (at >= end || segment == segments_.count) break;
      if (segments_.start[segment + 1] - segments_.start[segment] < hot_tokens) sum(segment);
      ++segment;
      ++row;
      at = cost_[segment] - (next_row(segment) - row);
    }
  }

 private:
  int64_t next_row(int64_t segment) const { return segment < segments_.count ? segments_.row[segment] : rows_; }

  const Segments& segments_;
  int64_t rows_;
  std::vector<int64_t> cost_;  // where segment r starts on the line; the last entry is its end
  std::vector<int64_t> hot_;
};

template <class Body>
void run_parallel(ParallelFor parallel_for, int64_t end, int64_t grain, const Body& body) {
  if (end == 0) return;
  const ParallelBody call = [](int64_t b, int64_t e, void* context) { (*static_cast<const Body*>(context))(b, e); };
  void* context = const_cast<void*>(static_cast<const void*>(&body));
  if (parallel_for(0, end, std::max<int64_t>(grain, 1), call, context) != 0) throw_parallel_error();
}

}  // namespace

void backward(const BackwardParams& params, ParallelFor parallel_for) {
  const Kernels& kernels = active_kernels();
  const int64_t width = params.width;
  const int64_t row_bytes = width * element_size(params.dtype);
  const bool stream = params.rows * row_bytes >= kStreamBytes;
  // A segment is hot if it is long, and more than a small part of all tokens.
  const int64_t tokens = params.segments.start[params.segments.count];
  const int64_t hot_tokens = std::max<int64_t>(2 * kSumChunk, tokens / 32);
  const RowPlan plan(params, hot_tokens);
  char* out = static_cast<char*>(params.out);
  run_parallel(parallel_for, plan.total(), kGrainElements / width, [&](int64_t begin, int64_t end) {
    plan.each(
        begin, end, hot_tokens,
        [&](int64_t first, int64_t last) {
          kernels.fill_zero(out + first * row_bytes, (last - first) * row_bytes, stream);
        },
        [&](int64_t segment) { kernels.sum_segment(params, stream, segment, 0, width); });
    kernels.end_stream();
  });

  constexpr int64_t kColumns = 128;  // of a hot segment, for one thread
  const int64_t slices = (width + kColumns - 1) / kColumns;
  run_parallel(parallel_for, static_cast<int64_t>(plan.hot().size()) * slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t column = i % slices * kColumns;
      kernels.sum_segment(params, false, plan.hot()[i / slices], column, std::min(width, column + kColumns));
    }
  });
}

}  // namespace posenc::cpu
