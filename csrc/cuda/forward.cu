#include "forward.h"

#include <cstdlib>
#include <cstring>

#include "../dropout.h"
#include "element.cuh"
#include "launch_config.h"

namespace posenc::cuda {
namespace {

// The stride of an axis with one entry means nothing.
bool strides_aligned(const TokenStrides& strides, const ForwardParams& params) {
  const int64_t size = element_size(params.dtype);
  return (params.tokens.batch == 1 || strides.batch * size % 16 == 0) &&
         (params.tokens.seq == 1 || strides.seq * size % 16 == 0);
}

// Those of a block of columns begin anywhere in the table.
bool frequencies_aligned(const Frequencies& frequencies) {
  return aligned(frequencies.turns[0]) && aligned(frequencies.turns[1]) && aligned(frequencies.angular);
}

bool base_is_aligned(const ForwardParams& params) {
  if (params.source == Source::none) return true;
  if (params.column_stride != 1 || !aligned(params.base)) return false;
  return params.source == Source::dense ? strides_aligned(params.base_strides, params)
                                        : params.row_stride * element_size(params.dtype) % 16 == 0;
}

bool table_is_aligned(const ForwardParams& params) {
  const PositionTable& table = params.encoding.table;
  return aligned(table.data) && table.row_stride * element_size(params.dtype) % 16 == 0;
}

// POSENC_EXT_FORWARD=vectors asks for the kernels that have one token or one column of the batch in flight, until a GPU
// has shown which are faster. It is read once.
bool rows_alone() {
  static const bool asked = [] {
    const char* value = std::getenv("POSENC_EXT_FORWARD");
    return value != nullptr && std::strcmp(value, "vectors") == 0;
  }();
  return asked;
}

KernelVariant choose(const ForwardParams& params) {
  const Columns& columns = params.encoding.columns;
  const bool fp64 = params.dtype == Dtype::float64;
  KernelVariant variant;
  variant.general = params.general();
  // Without sinusoids, only the gathered row is worth a kernel of vectors, and what dropout or a table is applied to.
  bool has_kernel = params.source == Source::gathered || (variant.general && params.source == Source::dense);
  if (columns.encoded) {
    has_kernel =
        columns.step <= 2 && columns.sines == columns.cosines && frequencies_aligned(params.encoding.frequencies);
    variant.arrangement = columns.step == 2 ? Arrangement::interleaved : Arrangement::halves;
    if (params.tokens.batch > 1 && !params.positions.shared())
      variant.mode =
          fp64 || params.encoding.precision == Precision::exact ? Mode::per_token_exact : Mode::per_token_reference;
  }
  const int64_t unit_bytes = variant.arrangement == Arrangement::halves ? 32 : 16;
  variant.vectors = has_kernel && columns.width * element_size(params.dtype) % unit_bytes == 0 && aligned(params.out) &&
                    strides_aligned(params.out_strides, params) && base_is_aligned(params) &&
                    table_is_aligned(params) &&
                    (params.dropout.seed == nullptr || params.dropout.first_column % kColumnsPerDraw == 0);
  // It adds up to four steps of a grid to an index of 32 bits.
  constexpr int64_t kLongestAxis = int64_t{1} << 28;
  if (variant.vectors && !variant.general && variant.mode == Mode::shared && params.source != Source::none && !fp64 &&
      params.tokens.seq <= kLongestAxis && params.tokens.batch <= kLongestAxis && !rows_alone())
    variant.in_flight = params.tokens.batch < kRowsTogether ? Inner::seq : Inner::batch;
  return variant;
}

}  // namespace

void forward(const ForwardParams& params, const Launch& launch) {
  if (params.tokens.count() == 0 || params.encoding.columns.width == 0) return;
  const KernelVariant variant = choose(params);
  with_element(params.dtype, [&](auto element) { launch_forward<decltype(element)>(params, variant, launch); });
}

}  // namespace posenc::cuda
