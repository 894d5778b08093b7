// A call of an op on CUDA tensors: device guard, current stream, scratch memory; what torch adds to cuda/backend.h.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <memory>
#include <mutex>

#include "../cuda/backend.h"
#include "tensors.h"

namespace posenc {

// A function of libtorch_cuda, which a CPU-only torch lacks. So it is looked up when there is a CUDA tensor, and then
// it is there.
template <class Function>
Function* of_torch_cuda(const char* name) {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = dlsym(library != nullptr ? library : RTLD_DEFAULT, name);
  if (found == nullptr) throw std::runtime_error(std::string("posenc_ext: this torch does not offer ") + name);
  return reinterpret_cast<Function*>(found);
}

// The stream torch has current on a device.
inline void* current_cuda_stream(int32_t device) {
  static const auto getter = of_torch_cuda<AOTITorchError(int32_t, void**)>("aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

// From torch's allocator, which then does not give the memory to other streams. The caller's stream may be under
// capture, and what is allocated for that one is the graph's.
inline void* keep_cuda_memory(int device, void* stream, int64_t bytes) {
  static const auto enter =
      of_torch_cuda<AOTITorchError(void*, int32_t, void**)>("aoti_torch_create_cuda_stream_guard");
  static const auto leave = of_torch_cuda<AOTITorchError(void*)>("aoti_torch_delete_cuda_stream_guard");
  static std::mutex mutex;
  static auto* const kept = new std::vector<Tensor>;  // never destroyed: torch may be gone first
  void* guard = nullptr;
  TORCH_ERROR_CODE_CHECK(enter(stream, device, &guard));
  const std::unique_ptr<void, AOTITorchError (*)(void*)> leaving(guard, leave);
  Tensor memory = empty({bytes}, ScalarType::Byte, aoti_torch_device_type_cuda(), device);
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(memory);
  return memory.mutable_data_ptr();
}

// Torch destroys none of its own streams. The number of a stream that it was handed is the stream's address; other
// numbers are odd, and that of the default stream is 0.
inline bool current_cuda_stream_lasts(int device) {
  const auto number = torch::stable::accelerator::getCurrentStream(device).id();
  return number == 0 || number % 2 != 0;
}

// Opened before anything else is done on the device of `tensor`.
class CudaCall {
 public:
  CudaCall(cuda::Op op, const Tensor& tensor)
      : like_(tensor),
        guard_(tensor.get_device_index()),
        call_(op, tensor.get_device_index(), current_cuda_stream(tensor.get_device_index()), kTorch) {}

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
  static constexpr cuda::Framework kTorch = {&keep_cuda_memory, &current_cuda_stream_lasts};

  Tensor like_;
  torch::stable::accelerator::DeviceGuard guard_;
  cuda::Call call_;
  std::optional<Tensor> scratch_;
};

}  // namespace posenc
