// What a call with dropout, padding or a scale of the encoding does with each element.
#pragma once

#include "../dropout.h"
#include "../epilogue.h"
#include "platform.cuh"

namespace posenc::cuda {

// Drops some of the elements of a token from `column` on, which is a multiple of their number.
template <int count, class acc_t>
__device__ __forceinline__ void drop_elements(const Dropout& dropout, uint64_t seed, int64_t token, int64_t column,
                                              acc_t (&values)[count]) {
  static_assert(kColumnsPerDraw % count == 0);
  column += dropout.first_column;
  uint32_t draw[1][4] = {{static_cast<uint32_t>(column / kColumnsPerDraw), 0, static_cast<uint32_t>(token),
                          static_cast<uint32_t>(token >> 32)}};
  philox(draw, seed);
  const uint32_t (&word)[4] = draw[0];
  const int first = count == kColumnsPerDraw ? 0 : static_cast<int>(column % kColumnsPerDraw);
  const acc_t factor = static_cast<acc_t>(dropout.factor);
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int half = first + i;
    const uint32_t drawn = half < 4 ? (half < 2 ? word[0] : word[1]) : (half < 6 ? word[2] : word[3]);
    const bool upper = count > 1 ? i % 2 == 1 : half % 2 == 1;
    values[i] = (upper ? drawn >> 16 : drawn & 0xFFFFu) < dropout.threshold ? acc_t{0} : values[i] * factor;
  }
}

// Nothing: most calls.
template <class acc_t>
struct PlainElements {
  static constexpr bool kGeneral = false;

  __device__ __forceinline__ explicit PlainElements(const ForwardParams&) {}

  template <Source source, bool encoded>
  __device__ __forceinline__ acc_t sum(const Token<acc_t>& token, acc_t base, acc_t encoding) const {
    return epilogue<source, encoded>(base, encoding, token);
  }
  template <int count>
  __device__ __forceinline__ void drop(const Token<acc_t>&, int64_t, acc_t (&)[count]) const {}
  __device__ __forceinline__ SinCos<acc_t> scaled(const Position&, const SinCos<acc_t>& pair) const { return pair; }
};

template <class acc_t>
struct GeneralElements {
  static constexpr bool kGeneral = true;

  const Dropout& dropout;
  acc_t scale;  // of the encoding
  uint64_t seed = 0;

  __device__ __forceinline__ explicit GeneralElements(const ForwardParams& params) : dropout(params.dropout) {
    double product = params.encoding.scale;
    if (params.encoding.scale_on_device != nullptr)
      product *= static_cast<double>(*static_cast<const acc_t*>(params.encoding.scale_on_device));
    scale = static_cast<acc_t>(product);
    if (dropout.seed != nullptr) seed = static_cast<uint64_t>(*dropout.seed);
  }

  // Of the encoding of a position.
  __device__ __forceinline__ acc_t factor(const Position& position) const {
    return position.exists() ? scale : static_cast<acc_t>(NAN);
  }
  __device__ __forceinline__ SinCos<acc_t> scaled(const Position& position, const SinCos<acc_t>& pair) const {
    return {pair.sin * factor(position), pair.cos * factor(position)};
  }

  // Of base term and encoding, as far as the token has them.
  template <Source source, bool encoded>
  __device__ __forceinline__ acc_t sum(const Token<acc_t>& token, acc_t base, acc_t encoding) const {
    if (!token.embedded) return encoding;
    return token.encoded ? epilogue<source, encoded>(base, encoding, token)
                         : epilogue<source, false>(base, encoding, token);
  }

  template <int count>
  __device__ __forceinline__ void drop(const Token<acc_t>& token, int64_t column, acc_t (&values)[count]) const {
    if (dropout.seed != nullptr) drop_elements(dropout, seed, token.number, column, values);
  }
};

template <class acc_t, bool general>
using ElementsOf = std::conditional_t<general, GeneralElements<acc_t>, PlainElements<acc_t>>;

}  // namespace posenc::cuda
