// The forward kernels of one element type, POSENC_DTYPE: setup.py compiles this file once for each, at the same time.
#include "forward.cuh"
#include "launch_config.h"

namespace posenc::cuda {
namespace {

using Kernel = void (*)(ForwardParams, ForwardLaunch);

template <class T, Source source, Arrangement arrangement>
Kernel vector_kernel(const KernelVariant& variant) {
  if constexpr (source != Source::none && !std::is_same_v<T, double>)
    if (variant.in_flight)
      return *variant.in_flight == Inner::seq ? forward_tokens<T, source, arrangement, Inner::seq>
                                              : forward_tokens<T, source, arrangement, Inner::batch>;
  const Mode mode = variant.mode;
  if constexpr (arrangement != Arrangement::none) {
    if constexpr (!std::is_same_v<T, double>)
      if (mode == Mode::per_token_reference) return forward_vectors<T, source, arrangement, Mode::per_token_reference>;
    if (mode == Mode::per_token_exact) return forward_vectors<T, source, arrangement, Mode::per_token_exact>;
  }
  return forward_vectors<T, source, arrangement, Mode::shared>;
}

template <class T, Source source>
Kernel general_kernel(Arrangement arrangement) {
  if (arrangement == Arrangement::interleaved) return forward_general<T, source, Arrangement::interleaved>;
  if (arrangement == Arrangement::halves) return forward_general<T, source, Arrangement::halves>;
  if constexpr (source != Source::none) return forward_general<T, source, Arrangement::none>;
  return nullptr;
}

template <class T, Source source>
Kernel kernel_of(const KernelVariant& variant) {
  if (!variant.vectors) return variant.general ? forward_columns<T, source, true> : forward_columns<T, source, false>;
  if (variant.general) return general_kernel<T, source>(variant.arrangement);
  if (variant.arrangement == Arrangement::interleaved)
    return vector_kernel<T, source, Arrangement::interleaved>(variant);
  if (variant.arrangement == Arrangement::halves) return vector_kernel<T, source, Arrangement::halves>(variant);
  if constexpr (source == Source::gathered) return vector_kernel<T, source, Arrangement::none>(variant);
  return nullptr;
}

}  // namespace

template <class T>
void launch_forward(const ForwardParams& params, const KernelVariant& variant, const Launch& launch) {
  const Columns& columns = params.encoding.columns;
  ForwardLaunch call;
  call.errors = launch.errors;
  if (variant.vectors) call.units = columns.width / kVector<T> / (variant.arrangement == Arrangement::halves ? 2 : 1);
  else call.units = columns.encoded ? columns.pairs() + columns.has_zero_column() : columns.width;

  const Kernel kernel = params.source == Source::gathered ? kernel_of<T, Source::gathered>(variant)
                        : params.source == Source::dense  ? kernel_of<T, Source::dense>(variant)
                                                          : kernel_of<T, Source::none>(variant);
  // What shares its encodings, or has rows of the batch in flight.
  const int64_t together =
      variant.vectors && variant.mode == Mode::shared && params.tokens.batch >= kRowsTogether ? kRowsTogether : 1;
  const ForwardShape shape = forward_shape(call.units, params.tokens.seq, params.tokens.batch,
                                           launch.resident_blocks(kernel, kForwardThreads), together);
  const dim3 block(shape.x, shape.y, shape.z), grid(shape.blocks_x, shape.blocks_y, shape.blocks_z);
  POSENC_LAUNCH(kernel, grid, block, launch.stream, params, call);
}

template void launch_forward<ElementOf<Dtype::POSENC_DTYPE>>(const ForwardParams&, const KernelVariant&, const Launch&);

}  // namespace posenc::cuda
