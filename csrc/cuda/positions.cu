#include "positions.cuh"

#include <type_traits>

#include "backend.h"
#include "launch_config.h"

namespace posenc::cuda {
namespace {

template <template <class> class Row, class Params>
void count_rows(const Params& params, const Launch& launch) {
  const Tokens& tokens = params.rows.tokens;
  if (tokens.count() == 0) return;
  with_element_of(params, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    const auto kernel = scan_rows<Row<T>>;
    const int64_t blocks = balanced(tokens.batch, 1, launch.resident_blocks(kernel, kScanThreads)).x;
    POSENC_LAUNCH(kernel, blocks, kScanThreads, launch.stream, params);
  });
}

}  // namespace

void count_real_tokens(const PaddingParams& params, const Launch& launch) { count_rows<PaddingRow>(params, launch); }

void count_in_sequences(const SequenceIdParams& params, const Launch& launch) {
  count_rows<SequenceIdRow>(params, launch);
}

void count_in_sequences(const SequenceStartParams& params, const Launch& launch) {
  if (params.total == 0) return;
  const int64_t resident = launch.resident_blocks(find_sequences, kScanThreads);
  const int64_t blocks = balanced(divide_up(params.total, kScanThreads), 1, resident).x;
  POSENC_LAUNCH(find_sequences, blocks, kScanThreads, launch.stream, params);
}

}  // namespace posenc::cuda
