#include "backend.h"

#include <algorithm>
#include <atomic>

#include "kernels.h"

namespace posenc::cpu {
namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool runs_here;
};

const std::vector<Isa>& isas() {
#if defined(__x86_64__)
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("f16c");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
#endif
  static const std::vector<Isa> list = {
#if defined(__x86_64__)
      {"x86-64-v4+bf16", &kernels_x86_64_v4_bf16, v4 && __builtin_cpu_supports("avx512bf16")},
      {"x86-64-v4", &kernels_x86_64_v4, v4},
      {"x86-64-v3", &kernels_x86_64_v3, v3},
#endif
      {"baseline", &kernels_baseline, true},
  };
  return list;
}

const Isa& best_isa() {
  return *std::find_if(isas().begin(), isas().end(), [](const Isa& isa) { return isa.runs_here; });
}

std::atomic<const Isa*>& active() {
  static std::atomic<const Isa*> isa{&best_isa()};
  return isa;
}

template <class Body>
void run_parallel(ParallelFor parallel_for, int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (begin >= end) return;
  const ParallelBody call = [](int64_t b, int64_t e, void* context) { (*static_cast<const Body*>(context))(b, e); };
  parallel_for(begin, end, std::max<int64_t>(grain, 1), call, const_cast<void*>(static_cast<const void*>(&body)));
}

// Elements one thread should have at the least; torch uses the same for its elementwise loops.
constexpr int64_t kGrainElements = 32768;

// Outputs of this size and more bypass the cache: they would not be there any more when somebody reads them, and a
// plain store would first read each line from memory.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

// The dense gradient seen as a line of work: zero rows cost one each, a row with a run one and its tokens. Long runs
// are taken out (`hot`) and cut by columns instead, so that one frequent token does not keep one thread busy alone.
class RowPlan {
 public:
  RowPlan(const BackwardParams& params, int64_t hot_tokens)
      : runs_(params.runs), rows_(params.rows), cost_(params.runs.count + 1) {
    int64_t tokens = 0;
    for (int64_t r = 0; r < runs_.count; ++r) {
      cost_[r] = runs_.row[r] + tokens;
      const int64_t length = runs_.start[r + 1] - runs_.start[r];
      if (length >= hot_tokens) {
        hot_.push_back(r);
      } else {
        tokens += length;
      }
    }
    cost_[runs_.count] = rows_ + tokens;
  }

  int64_t total() const { return cost_[runs_.count]; }
  const std::vector<int64_t>& hot() const { return hot_; }

  // Calls zero(first_row, last_row) and sum(run) for what starts in [begin, end) of the line.
  template <class Zero, class Sum>
  void walk(int64_t begin, int64_t end, int64_t hot_tokens, const Zero& zero, const Sum& sum) const {
    // The first run that starts at or after begin; the zero rows before it follow the run before it.
    int64_t run = std::lower_bound(cost_.begin(), cost_.end(), begin) - cost_.begin();
    int64_t row = 0, at = 0;
    if (run > 0) {
      row = runs_.row[run - 1] + 1;
      at = cost_[run] - (next_row(run) - row);
    }
    if (at < begin) row += begin - at, at = begin;
    while (at < end) {
      const int64_t gap_end = std::min(next_row(run), row + end - at);
      if (gap_end > row) zero(row, gap_end);
      at += gap_end - row;
      row = gap_end;
      if (at >= end || run == runs_.count) break;
      if (runs_.start[run + 1] - runs_.start[run] < hot_tokens) sum(run);
      ++run;
      ++row;
      at = cost_[run] - (next_row(run) - row);
    }
  }

 private:
  int64_t next_row(int64_t run) const { return run < runs_.count ? runs_.row[run] : rows_; }

  const Runs& runs_;
  int64_t rows_;
  std::vector<int64_t> cost_;  // where run r starts on the line; the last entry is its end
  std::vector<int64_t> hot_;
};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas())
    if (isa.runs_here) names.emplace_back(isa.name);
  return names;
}

std::string active_isa() { return active().load(std::memory_order_relaxed)->name; }

bool force_isa(const std::string& name) {
  for (const Isa& isa : isas()) {
    if (isa.runs_here && name == isa.name) {
      active().store(&isa, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

int64_t find_bad_id(const Integers& ids, int64_t count, int64_t rows) {
  const auto scan = [&](const auto* data) -> int64_t {
    constexpr int64_t kBlock = 4096;  // without an exit inside, so that the loop vectorises
    for (int64_t block = 0; block < count; block += kBlock) {
      const int64_t end = std::min(count, block + kBlock);
      bool bad = false;
      for (int64_t i = block; i < end; ++i)
        bad |= static_cast<uint64_t>(static_cast<int64_t>(data[i])) >= static_cast<uint64_t>(rows);
      for (int64_t i = block; bad; ++i)
        if (data[i] < 0 || data[i] >= rows) return i;
    }
    return -1;
  };
  return ids.wide ? scan(static_cast<const int64_t*>(ids.data)) : scan(static_cast<const int32_t*>(ids.data));
}

void forward(const ForwardParams& params, ParallelFor parallel_for) {
  const Kernels& kernels = *active().load(std::memory_order_relaxed)->kernels;
  const int64_t width = params.waves.layout.width;
  const int64_t tokens = params.grid.tokens();
  const bool stream = tokens * width * element_size(params.dtype) >= kStreamBytes;
  run_parallel(parallel_for, 0, tokens, kGrainElements / std::max<int64_t>(width, 1),
               [&](int64_t begin, int64_t end) { kernels.forward(params, stream, begin, end); });
}

void backward(const BackwardParams& params, ParallelFor parallel_for) {
  const Kernels& kernels = *active().load(std::memory_order_relaxed)->kernels;
  const int64_t width = params.width;
  const int64_t row_bytes = width * element_size(params.dtype);
  const bool stream = params.rows * row_bytes >= kStreamBytes;
  // A run is hot if it is long, and more than a small part of all tokens.
  const int64_t tokens = params.runs.start[params.runs.count];
  const int64_t hot_tokens = std::max<int64_t>(2 * kSumPiece, tokens / 32);
  const RowPlan plan(params, hot_tokens);
  char* out = static_cast<char*>(params.out);
  run_parallel(parallel_for, 0, plan.total(), kGrainElements / std::max<int64_t>(width, 1),
               [&](int64_t begin, int64_t end) {
                 plan.walk(
                     begin, end, hot_tokens,
                     [&](int64_t first, int64_t last) {
                       kernels.fill_zero(out + first * row_bytes, (last - first) * row_bytes, stream);
                     },
                     [&](int64_t run) { kernels.sum_run(params, stream, run, 0, width); });
                 kernels.end_stream();
               });

  constexpr int64_t kColumns = 128;  // of a hot run, for one thread
  const int64_t slices = (width + kColumns - 1) / kColumns;
  run_parallel(parallel_for, 0, static_cast<int64_t>(plan.hot().size()) * slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t column = i % slices * kColumns;
      kernels.sum_run(params, false, plan.hot()[i / slices], column, std::min(width, column + kColumns));
    }
  });
}

}  // namespace posenc::cpu
