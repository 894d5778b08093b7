// Checks of the arguments that are tensors. A message names op, argument, requirement and the value it got.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "../cpu/dispatch.h"
#include "../params.h"
#include "allocate.h"

namespace posenc {

inline bool equal(IntHeaderOnlyArrayRef a, IntHeaderOnlyArrayRef b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// The dispatcher takes None for a tensor and hands on one that is none.
inline void check_defined(const Tensor& tensor, const char* op, const char* argument) {
  POSENC_CHECK(tensor.defined(), op, argument, " must be a tensor, got None");
}

inline void check_width(int64_t width, const char* op) {
  POSENC_CHECK(width >= 1, op, "the width (d_model) must be positive, got ", width);
  POSENC_CHECK(width <= kMostColumns, op, "the width (d_model) must be at most ", kMostColumns, ", got ", width);
}

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

// Bytes from the first element of a tensor to the end of the last one.
inline int64_t bytes_reached(const Tensor& tensor) {
  int64_t last = 0;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

// A storage can be freed or cut under a tensor, as sharding does between uses; the tensor does not know.
inline void check_storage(const Tensor& tensor, const char* op, const char* argument) {
  const int64_t bytes = bytes_reached(tensor);
  if (bytes == 0) return;
  const int64_t needed = bytes + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  int64_t held = 0;
  aoti_torch_get_storage_size(tensor.get(), &held);  // 0 where there is no storage
  POSENC_CHECK(needed <= held, op, argument, " must have its memory: shape ", text(tensor.sizes()),
               " needs a storage of ", needed, " bytes, got ", held);
}

inline bool is_integer(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Long || tensor.scalar_type() == ScalarType::Int;
}
inline bool is_float(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::Double;
}

inline Integers integers_of(const Tensor& tensor, const char* op, const char* argument) {
  POSENC_CHECK(is_integer(tensor), op, argument, " must have dtype int64 or int32, got ", text(tensor.scalar_type()));
  check_storage(tensor, op, argument);
  return {tensor.const_data_ptr(), tensor.scalar_type() == ScalarType::Long};
}

inline void check_same_device(const Tensor& tensor, const char* argument, const Tensor& other, const char* other_name,
                              const char* op) {
  if (tensor.is_cpu() && other.is_cpu()) return;
  POSENC_CHECK(device_text(tensor) == device_text(other), op, argument, " must be on the device of ", other_name, " (",
               device_text(other), "), got ", device_text(tensor));
}

// The index of an element that has this number in memory.
inline std::string index_text(IntHeaderOnlyArrayRef sizes, int64_t number) {
  std::vector<int64_t> index(sizes.size());
  for (size_t i = sizes.size(); i-- > 0; number /= sizes[i]) index[i] = number % sizes[i];
  return text(IntHeaderOnlyArrayRef(index.data(), index.size()));
}

// Token ids, contiguous; `input` becomes a copy where it was not. On a GPU the kernels check the range, since to look
// at ids here would be to wait for the device. An empty table has no id in range, so it is refused here.
inline Integers checked_ids(Tensor& input, int64_t rows, const char* op) {
  Integers ids = integers_of(input, op, "input");
  if (!input.is_contiguous()) {
    input = contiguous_copy(input);
    ids.data = input.const_data_ptr();
  }
  if (!input.is_cpu()) {
    if (rows == 0 && input.numel() > 0)
      throw std::out_of_range(message(op, "input must hold ids in [0, 0), got ", input.numel(), " ids"));
    return ids;
  }
  const int64_t place = cpu::find_out_of_range(ids, input.numel(), rows);
  if (place < 0) return ids;
  throw std::out_of_range(message(op, "input must hold ids in [0, ", rows, "), got ", ids[place], " at input",
                                  index_text(input.sizes(), place)));
}

// A shard of `size` rows or columns of a whole.
inline void check_part(const char* op, const char* first_name, int64_t first, int64_t size, const char* whole_name,
                       int64_t whole) {
  POSENC_CHECK(size <= whole, op, whole_name, " must be at least the ", size, " of this shard, got ", whole);
  POSENC_CHECK(first >= 0 && first <= whole - size, op, first_name, " must lie in [0, ", whole - size, "], got ",
               first);
}

// A tensor of one number that the kernels read.
inline void check_number(const Tensor& tensor, const char* name, const Tensor& like, const char* like_name,
                         const char* op) {
  check_defined(tensor, op, name);
  check_same_device(tensor, name, like, like_name, op);
  check_storage(tensor, op, name);
  POSENC_CHECK(tensor.numel() == 1, op, name, " must hold one number, got shape ", text(tensor.sizes()));
}

// What the arguments dropout_p and seed say. The column where a shard begins is left to the caller.
inline Dropout dropout_of(double p, const Tensor* seed, const Tensor& like, const char* like_name, const char* op) {
  Dropout dropout;
  POSENC_CHECK(p >= 0 && p <= 1, op, "dropout_p must lie in [0, 1], got ", p);
  POSENC_CHECK((seed != nullptr) == (p > 0), op, "seed must be given with dropout_p, got dropout_p ", p,
               seed ? " and a seed" : " and no seed");
  if (seed == nullptr) return dropout;
  check_number(*seed, "seed", like, like_name, op);
  POSENC_CHECK(seed->scalar_type() == ScalarType::Long, op, "seed must have dtype int64, got ",
               text(seed->scalar_type()));
  dropout.threshold = static_cast<uint32_t>(std::lround(p * 65536));
  if (dropout.threshold == 0) return dropout;
  dropout.seed = static_cast<const int64_t*>(seed->const_data_ptr());
  const double kept = 65536.0 - dropout.threshold;
  dropout.factor = kept == 0 ? 0 : 65536 / kept;
  return dropout;
}

// The first byte that a tensor can reach, and the last.
inline std::pair<const char*, const char*> reach(const Tensor& tensor) {
  const char* first = static_cast<const char*>(tensor.const_data_ptr());
  return {first, first + bytes_reached(tensor) - 1};
}

inline void check_disjoint(const Tensor& out, const Tensor& input, const char* argument, const char* op) {
  if (out.numel() == 0 || input.numel() == 0) return;
  const auto a = reach(out), b = reach(input);
  POSENC_CHECK(a.second < b.first || b.second < a.first, op, "out must not share memory with ", argument);
}

// Whether two elements of a tensor may share memory. Sorted by stride, each axis must step over all that lies within.
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

}  // namespace posenc
