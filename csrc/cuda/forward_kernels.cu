// The forward kernels of one element type, POSENC_DTYPE: setup.py compiles this file once for each, at the same time.
#include "forward.cuh"
#include "launch_config.h"

namespace posenc::cuda {
namespace {

using Kernel = void (*)(ForwardParams, ForwardLaunch);

template <class T, Source source, Arrangement arrangement>
Kernel vector_kernel(Mode mode) {
  if constexpr (arrangement != Arrangement::none) {
    if constexpr (!std::is_same_v<T, double>)
      if (mode == Mode::per_token_reference) return forward_vectors<T, source, arrangement, Mode::per_token_reference>;
    if (mode == Mode::per_token_exact) return forward_vectors<T, source, arrangement, Mode::per_token_exact>;
  }
  return forward_vectors<T, source, arrangement, Mode::shared>;
}

template <class T, Source source>
Kernel kernel_of(const KernelVariant& variant) {
  if (!variant.vectors) return forward_columns<T, source>;
  if (variant.arrangement == Arrangement::interleaved)
    return vector_kernel<T, source, Arrangement::interleaved>(variant.mode);
  if (variant.arrangement == Arrangement::halves) return vector_kernel<T, source, Arrangement::halves>(variant.mode);
  if constexpr (source == Source::gathered) return vector_kernel<T, source, Arrangement::none>(variant.mode);
  return nullptr;
}

}  // namespace

// Enough threads to fill the device first, then more rows of the batch for each, so that what a thread prepares serves
// more tokens. A decode step (few tokens, one position) gets a row or two a thread, a training batch whole columns.
template <class T>
void launch_forward(const ForwardParams& params, const KernelVariant& variant, const Launch& launch) {
  const Columns& columns = params.encoding.columns;
  ForwardLaunch call;
  call.errors = launch.errors;
  if (variant.vectors) call.units = columns.width / kVector<T> / (variant.arrangement == Arrangement::halves ? 2 : 1);
  else call.units = columns.encoded ? columns.pairs() + columns.has_zero_column() : columns.width;

  const int64_t resident = std::max<int64_t>(launch.resident_threads, 1);
  const int64_t seq = params.tokens.seq, batch = params.tokens.batch;
  int64_t rows_per_thread = std::clamp<int64_t>(divide_up(call.units * seq * batch, resident), 1, batch);
  if (rows_per_thread > 1) rows_per_thread = divide_up(rows_per_thread, 4) * 4;  // all of them in flight
  const int64_t rows = divide_up(batch, rows_per_thread);
  const int64_t x = threads_along(call.units, kForwardThreads);
  const int64_t y = std::min(kForwardThreads / x, power_of_two_from(seq));
  const int64_t z = std::min({kForwardThreads / (x * y), power_of_two_from(rows), kMostThreadsZ});
  const int64_t blocks_y = std::min(divide_up(call.units, x), kMostBlocksYZ);
  const int64_t blocks_z = std::min(divide_up(rows, z), kMostBlocksYZ);
  const int64_t most = kFills * resident / (x * y * z * blocks_y * blocks_z);
  const dim3 block(x, y, z), grid(blocks_for(seq, y, most), blocks_y, blocks_z);
  const Kernel kernel = params.source == Source::gathered ? kernel_of<T, Source::gathered>(variant)
                        : params.source == Source::dense  ? kernel_of<T, Source::dense>(variant)
                                                          : kernel_of<T, Source::none>(variant);
  POSENC_LAUNCH(kernel, grid, block, launch.stream, params, call);
}

template void launch_forward<ElementOf<Dtype::POSENC_DTYPE>>(const ForwardParams&, const KernelVariant&, const Launch&);

}  // namespace posenc::cuda
