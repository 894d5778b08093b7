// What becomes of one element, or of a vector of them: out = scale * base + encoding. Said once, for CPU and CUDA.
//
// A multiply and an add, never fused: the fp32 result equals eager PyTorch's to the bit.
#pragma once

#include "params.h"

namespace posenc {
inline namespace POSENC_ISA {

// Where there is no encoding nothing is added, not even a zero: -0 stays -0.
template <Source source, bool encoded, class value_t, class acc_t>
POSENC_HD value_t epilogue(value_t base, value_t encoding, acc_t scale) {
  if constexpr (source == Source::none) return encoding;
  if constexpr (source == Source::gathered) base = base * scale;
  if constexpr (encoded) base = base + encoding;
  return base;
}

}  // namespace POSENC_ISA
}  // namespace posenc
