// A call of an op on CUDA tensors: device guard, current stream, scratch memory; what torch adds to cuda/backend.h.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/backend.h"
#include "tensors.h"

namespace posenc {

// The stream torch has current on a device. The function lives in libtorch_cuda, which a CPU-only torch lacks, so it is
// looked up when there is a CUDA tensor, and then it is there.
inline void* current_cuda_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Getter>(found);
  }();
  if (getter == nullptr)
    throw std::runtime_error("posenc_ext: this torch does not offer aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

// Opened before anything else is done on the device of `tensor`.
class CudaCall {
 public:
  CudaCall(cuda::Op op, const Tensor& tensor)
      : like_(tensor),
        guard_(tensor.get_device_index()),
        call_(op, tensor.get_device_index(), current_cuda_stream(tensor.get_device_index())) {}

  const cuda::Call& operator*() const { return call_; }
  const cuda::Call* operator->() const { return &call_; }

  Frequencies frequencies(const FrequencyTable& table) {
    return call_.frequencies(table, [this](int64_t bytes) { return scratch(bytes); });
  }

  // Freed when this ends; the allocator gives it to later work on the same stream only.
  void* scratch(int64_t bytes) {
    scratch_ = empty({bytes}, ScalarType::Byte, like_);
    return scratch_->mutable_data_ptr();
  }

 private:
  Tensor like_;
  torch::stable::accelerator::DeviceGuard guard_;
  cuda::Call call_;
  std::optional<Tensor> scratch_;
};

}  // namespace posenc
