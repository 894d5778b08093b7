// Torch tensors as the kernels need to know them: element types, axes and strides, overlaps, new ones.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "params.h"

namespace posenc {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- describing tensors
// ----------------------------------------------------------------------------------------------

inline std::string text(IntHeaderOnlyArrayRef sizes) {
  std::string result = "[";
  for (size_t i = 0; i < sizes.size(); ++i) result += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return result + "]";
}

inline const char* text(ScalarType type) { return torch::headeronly::toString(type); }

inline Dtype dtype_of(ScalarType type, const char* op, const char* argument) {
  switch (type) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::Double: return Dtype::float64;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half: return Dtype::float16;
    default: break;
  }
  throw std::invalid_argument(
      message(op, argument, " must have dtype float32, float64, bfloat16 or float16, got ", text(type)));
}

inline Integers integers_of(const Tensor& tensor, const char* op, const char* argument) {
  const ScalarType type = tensor.scalar_type();
  POSENC_CHECK(type == ScalarType::Long || type == ScalarType::Int, op, argument,
               " must have dtype int64 or int32, got ", text(type));
  return {tensor.const_data_ptr(), type == ScalarType::Long};
}

inline std::string device_text(const Tensor& tensor) {
  int32_t type = 0;
  aoti_torch_get_device_type(tensor.get(), &type);
  const std::string name = type == aoti_torch_device_type_cpu()    ? "cpu"
                           : type == aoti_torch_device_type_cuda() ? "cuda"
                                                                   : "device type " + std::to_string(type);
  return tensor.is_cpu() ? name : name + ":" + std::to_string(tensor.get_device_index());
}

inline void check_same_device(const Tensor& tensor, const char* argument, const Tensor& other, const char* other_name,
                              const char* op) {
  if (tensor.is_cpu() && other.is_cpu()) return;
  POSENC_CHECK(device_text(tensor) == device_text(other), op, argument, " must be on the device of ", other_name, " (",
               device_text(other), "), got ", device_text(tensor));
}

// [first byte, last byte] that a tensor can reach.
inline std::pair<const char*, const char*> reach(const Tensor& tensor) {
  const char* first = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  return {first, first + (last + 1) * static_cast<int64_t>(tensor.element_size()) - 1};
}

// Whether two of its elements may share memory: sorted by stride, each axis must step over all that lies within.
inline bool overlaps_itself(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride, size
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] > 1) axes.emplace_back(strides[i], sizes[i]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t reached = 0;
  for (const auto& [stride, size] : axes) {
    if (stride <= reached) return true;
    reached += stride * (size - 1);
  }
  return false;
}

inline void check_disjoint(const Tensor& out, const Tensor& input, const char* argument, const char* op) {
  if (out.numel() == 0 || input.numel() == 0) return;
  const auto a = reach(out), b = reach(input);
  POSENC_CHECK(a.second < b.first || b.second < a.first, op, "out must not share memory with ", argument);
}

// ---- the token grid
// --------------------------------------------------------------------------------------------------

// Token axes `sizes` as a grid: the position runs along the last axis (batch_first) or the first one.
inline Grid grid_of(IntHeaderOnlyArrayRef sizes, bool batch_first) {
  if (sizes.size() == 0) return {};
  const size_t axis = batch_first ? sizes.size() - 1 : 0;
  Grid grid;
  grid.seq = sizes[axis];
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i < axis) grid.outer *= sizes[i];
    if (i > axis) grid.inner *= sizes[i];
  }
  return grid;
}

// One stride for the axes [first, last), if they can be walked as one.
inline std::optional<int64_t> merged_stride(IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides, size_t first,
                                            size_t last) {
  std::optional<int64_t> stride;
  int64_t expected = 0;
  for (size_t i = last; i-- > first;) {
    if (sizes[i] == 0) return 0;  // nowhere to walk
    if (sizes[i] == 1) continue;
    if (!stride) stride = strides[i];
    else if (strides[i] != expected) return std::nullopt;
    expected = strides[i] * sizes[i];
  }
  return stride.value_or(0);
}

// The strides of a tensor whose leading `token_dims` axes are the token axes, or nothing if it must be copied first.
inline std::optional<GridStrides> grid_strides(const Tensor& tensor, size_t token_dims, bool batch_first) {
  if (token_dims == 0) return GridStrides{};
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const size_t axis = batch_first ? token_dims - 1 : 0;
  const auto outer = merged_stride(sizes, strides, 0, axis);
  const auto inner = merged_stride(sizes, strides, axis + 1, token_dims);
  if (!outer || !inner) return std::nullopt;
  return GridStrides{*outer, sizes[axis] == 1 ? 0 : strides[axis], *inner};
}

// ---- allocation
// ------------------------------------------------------------------------------------------------------

// The C shim: a few hundred nanoseconds less than new_empty, which goes through the dispatcher.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t device_type = 0, device_index = 0;
  aoti_torch_get_device_type(like.get(), &device_type);
  aoti_torch_get_device_index(like.get(), &device_index);
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, device_type, device_index, &handle));
  return Tensor(handle);
}

inline std::vector<int64_t> with_width(IntHeaderOnlyArrayRef token_sizes, int64_t width) {
  std::vector<int64_t> sizes(token_sizes.begin(), token_sizes.end());
  sizes.push_back(width);
  return sizes;
}

}  // namespace posenc
