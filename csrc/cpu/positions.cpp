#include "../positions.h"

#include <algorithm>
#include <type_traits>

#include "dispatch.h"
#include "partition.h"

namespace posenc::cpu {
namespace {

// A row whose tokens lie side by side, here and in `out`. Real tokens mostly do too, and are then not counted one by
// one.
template <class T>
void write_contiguous_row(const PaddingRow<T>& row, int64_t seq, int64_t* out) {
  constexpr int64_t kBlock = 8;
  int64_t joined = 0, t = 0;
  const auto write = [&](int64_t end) {
    for (; t < end; ++t) {
      const int64_t term = row.term(t);
      joined += term;
      out[t] = row.position(t, term, joined);
    }
  };
  while (t + kBlock <= seq) {
    bool pads = false;
    for (int64_t i = 0; i < kBlock; ++i) pads |= row.term(t + i) == 0;
    if (pads) {
      write(t + kBlock);
      continue;
    }
    const int64_t position = row.position(t, 1, joined + 1);
    for (int64_t i = 0; i < kBlock; ++i) out[t + i] = wrapping_sum(position, i);
    joined += kBlock;
    t += kBlock;
  }
  write(seq);
}

template <class Row>
void write_rows(int64_t begin, int64_t end, void* context) {
  const auto& params = *static_cast<const typename Row::Params*>(context);
  const Tokens& tokens = params.rows.tokens;
  const int64_t seq = tokens.seq, step = tokens.order.seq;
  for (int64_t b = begin; b < end; ++b) {
    const Row row(params, b);
    int64_t* const out = params.rows.out + b * tokens.order.batch;
    if constexpr (Row::kCounts) {
      if (params.rows.strides.seq == 1 && step == 1) {
        PaddingRow contiguous = row;
        contiguous.stride = 1;
        write_contiguous_row(contiguous, seq, out);
        continue;
      }
    }
    int64_t joined = 0;
    for (int64_t t = 0; t < seq; ++t) {
      const int64_t term = row.term(t);
      joined = Row::join(joined, term);
      out[t * step] = row.position(t, term, joined);
    }
  }
}

template <template <class> class Row, class Params>
void count_rows(const Params& params, ParallelFor parallel_for) {
  const Tokens& tokens = params.rows.tokens;
  if (tokens.count() == 0) return;
  const int64_t grain = std::max<int64_t>(kGrainElements / tokens.seq, 1);
  with_element_of(params, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    if (parallel_for(0, tokens.batch, grain, write_rows<Row<T>>, const_cast<Params*>(&params)) != 0)
      throw_parallel_error();
  });
}

void write_sequences(int64_t begin, int64_t end, void* context) {
  const auto& params = *static_cast<const SequenceStartParams*>(context);
  int64_t begun = sequences_begun(params, begin);
  for (int64_t token = begin; token < end; ++begun) {
    const int64_t stop = begun < params.count ? std::min(params.starts[begun], end) : end;
    int64_t position = wrapping_sum(params.start, token - (begun > 0 ? params.starts[begun - 1] : 0));
    for (; token < stop; ++token, position = wrapping_sum(position, 1)) params.out[token] = position;
  }
}

}  // namespace

void count_real_tokens(const PaddingParams& params, ParallelFor parallel_for) {
  count_rows<PaddingRow>(params, parallel_for);
}

void count_in_sequences(const SequenceIdParams& params, ParallelFor parallel_for) {
  count_rows<SequenceIdRow>(params, parallel_for);
}

void count_in_sequences(const SequenceStartParams& params, ParallelFor parallel_for) {
  if (params.total == 0) return;
  if (parallel_for(0, params.total, kGrainElements, write_sequences, const_cast<SequenceStartParams*>(&params)) != 0)
    throw_parallel_error();
}

}  // namespace posenc::cpu
