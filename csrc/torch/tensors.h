// Torch tensors as the kernels need to know them: tokens, strides, new tensors.
#pragma once

#include <optional>

#include "checks.h"

namespace posenc {

// Token axes of any number merge into [batch, seq]: seq is the last one or, sequence-first, the first.
inline Tokens tokens_of(IntHeaderOnlyArrayRef sizes, bool sequence_first) {
  Tokens tokens;
  const size_t seq = sequence_first || sizes.size() == 0 ? 0 : sizes.size() - 1;
  for (size_t i = 0; i < sizes.size(); ++i) (i == seq ? tokens.seq : tokens.batch) *= sizes[i];
  tokens.order = sequence_first ? TokenStrides{1, tokens.batch} : TokenStrides{tokens.seq, 1};
  return tokens;
}

// One stride for the axes [first, last), if one stride reaches them all.
inline std::optional<int64_t> merged_stride(const Tensor& tensor, size_t first, size_t last) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::optional<int64_t> stride;
  int64_t expected = 0;
  for (size_t i = last; i-- > first;) {
    if (sizes[i] == 0) return 0;  // no element
    if (sizes[i] == 1) continue;
    if (!stride) stride = strides[i];
    else if (strides[i] != expected) return std::nullopt;
    expected = strides[i] * sizes[i];
  }
  return stride.value_or(0);
}

// The strides of a tensor whose leading `axes` axes are those of the tokens, or nothing if it must be copied first.
inline std::optional<TokenStrides> token_strides(const Tensor& tensor, size_t axes, bool sequence_first) {
  if (axes == 0) return TokenStrides{};
  const size_t seq = sequence_first ? 0 : axes - 1;
  const auto batch = sequence_first ? merged_stride(tensor, 1, axes) : merged_stride(tensor, 0, seq);
  if (!batch) return std::nullopt;
  return TokenStrides{*batch, tensor.size(seq) == 1 ? 0 : tensor.stride(seq)};
}

// The same of a tensor that is only read: it becomes a copy where it must.
inline TokenStrides readable_strides(Tensor& tensor, size_t axes, bool sequence_first) {
  if (const auto strides = token_strides(tensor, axes, sequence_first)) return *strides;
  tensor = contiguous_copy(tensor);
  return *token_strides(tensor, axes, sequence_first);
}

// Of the last axis. A single column has any stride.
inline int64_t column_stride(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) == 1 ? 1 : tensor.stride(last);
}

}  // namespace posenc
