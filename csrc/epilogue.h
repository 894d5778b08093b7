// What becomes of one element, or of a vector of them. One definition for CPU and CUDA.
//   gathered, dense: scale * base + encoding     none: encoding
//
// The compiler may not fuse the multiply and the add (-ffp-contract=off, --fmad=false): the fp32 result equals eager
// PyTorch's to the bit.
#pragma once

#include "token.h"

namespace posenc {
inline namespace POSENC_ISA {

// Without an encoding nothing is added: base + 0 would turn -0 into +0.
template <Source source, bool encoded, class value_t, class acc_t>
POSENC_HD value_t epilogue(value_t base, value_t encoding, const Token<acc_t>& token) {
  if constexpr (source == Source::none) return encoding;
  base = base * token.scale;
  if constexpr (encoded) base = base + encoding;
  return base;
}

}  // namespace POSENC_ISA
}  // namespace posenc
