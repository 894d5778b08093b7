// A stand-in for torch behind its stable C interface: tensors of the CPU and of the devices of fake_cuda.h, an
// allocator that thinks in streams, and a dispatcher, for the ops of csrc/torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace fake_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
constexpr int kCpu = -1;

// Of this thread.
void set_device(int device);
int device();
// What the ops find current on a device. Torch made the stream itself, unless it was handed one of others.
void set_stream(int device, void* stream, bool of_others = false);
void* stream(int device);

// A contiguous tensor with no values yet. One of a device may be used on any stream, unlike those that ops make.
Tensor make(const std::vector<int64_t>& sizes, ScalarType type, int device);
// A copy that is there when this returns, as if the device had been waited for.
Tensor to(const Tensor& tensor, int device);
// Rows and columns exchanged.
Tensor transposed(const Tensor& tensor);

// Calls an op of posenc_ext, registered for where the first tensor is.
std::vector<StableIValue> call(const std::string& op, const Tensor& first, std::vector<StableIValue> arguments);

template <size_t outputs = 1, class... Arguments>
std::array<Tensor, outputs> run(const std::string& op, const Tensor& first, const Arguments&... rest) {
  using torch::stable::detail::from;
  std::vector<StableIValue> results = call(op, first, {from(first), from(rest)...});
  std::array<Tensor, outputs> tensors;
  for (size_t i = 0; i < outputs; ++i) tensors[i] = torch::stable::detail::to<Tensor>(results[i]);
  return tensors;
}

}  // namespace fake_torch
