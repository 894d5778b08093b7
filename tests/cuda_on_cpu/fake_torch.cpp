#include "fake_torch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "fake_cuda.h"

namespace {

struct Storage {
  void* data = nullptr;
  const size_t bytes;
  const int device;
  Storage(size_t size, int on, bool exclusive) : bytes(size), device(on) {
    if (bytes == 0) return;
    if (on == fake_torch::kCpu) data = std::memset(std::malloc(bytes), 0xFF, bytes);
    else data = fake_cuda::allocate(bytes, on, fake_torch::stream(on), exclusive);
  }
  ~Storage() {
    if (device == fake_torch::kCpu) std::free(data);
    else if (data != nullptr) fake_cuda::release(data);
  }
  Storage(const Storage&) = delete;
};

}  // namespace

struct AtenTensorOpaque {
  std::shared_ptr<Storage> storage;
  std::vector<int64_t> sizes, strides;
  int32_t type;

  int64_t count() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }
  bool contiguous() const {
    int64_t expected = 1;
    for (size_t i = sizes.size(); i-- > 0; expected *= sizes[i])
      if (sizes[i] != 1 && strides[i] != expected) return false;
    return true;
  }
};

namespace fake_torch {
namespace {

thread_local int current_device = 0;
struct Current {
  void* stream = nullptr;
  bool of_others = false;
};
thread_local std::map<int, Current> current_streams;

struct Op {
  size_t arguments = 0, outputs = 0;
  std::map<std::string, void (*)(StableIValue*, uint64_t, uint64_t)> kernels;  // by dispatch key
};

std::map<std::string, Op>& ops() {
  static std::map<std::string, Op> all;
  return all;
}

// Of a list in brackets; the * that makes the rest keyword-only is none.
size_t entries(const std::string& list) {
  if (list.find_first_not_of("() ") == std::string::npos) return 0;
  const size_t commas = static_cast<size_t>(std::count(list.begin(), list.end(), ','));
  return commas + 1 - (list.find(" *,") != std::string::npos);
}

int64_t bytes_of(int32_t type) {
  if (type == aoti_torch_dtype_float64() || type == aoti_torch_dtype_int64()) return 8;
  if (type == aoti_torch_dtype_float32() || type == aoti_torch_dtype_int32()) return 4;
  return type == aoti_torch_dtype_uint8() ? 1 : 2;
}

AtenTensorHandle new_tensor(const std::vector<int64_t>& sizes, int32_t type, int device, bool exclusive) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  auto tensor = std::make_unique<AtenTensorOpaque>(AtenTensorOpaque{nullptr, sizes, strides, type});
  tensor->storage = std::make_shared<Storage>(tensor->count() * bytes_of(type), device, exclusive);
  return tensor.release();
}

// Elements of a view, in order. Returns where the next one goes.
char* copy(char* to, const char* from, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
           int64_t bytes, size_t axis = 0) {
  if (axis == sizes.size()) return static_cast<char*>(std::memcpy(to, from, bytes)) + bytes;
  for (int64_t i = 0; i < sizes[axis]; ++i)
    to = copy(to, from + i * strides[axis] * bytes, sizes, strides, bytes, axis + 1);
  return to;
}

// aten::copy_, into what is contiguous.
AOTITorchError copy_to(const AtenTensorOpaque& result, const AtenTensorOpaque& from) {
  const int on = from.storage->device;
  if (on != result.storage->device || result.sizes != from.sizes || result.type != from.type || !result.contiguous())
    fake_cuda::fail("a copy that is not modelled");
  // The work keeps no reference: memory that is released is for later work.
  const auto work = [to = static_cast<char*>(result.storage->data), data = static_cast<char*>(from.storage->data),
                     sizes = from.sizes, strides = from.strides,
                     bytes = bytes_of(from.type)] { copy(to, data, sizes, strides, bytes); };
  if (on == kCpu) return work(), AOTI_TORCH_SUCCESS;
  const int before = std::exchange(fake_cuda::device_of_torch, on);  // torch sees to that itself
  const cudaError_t error = fake_cuda::enqueue("torch::copy_", on, stream(on), work);
  fake_cuda::device_of_torch = before;
  if (error == cudaSuccess) return AOTI_TORCH_SUCCESS;
  return cudaGetLastError(), AOTI_TORCH_FAILURE;  // it was an error of torch's runtime
}

}  // namespace

void set_device(int device) { current_device = fake_cuda::device_of_torch = device; }
int device() { return current_device; }
void set_stream(int device, void* stream, bool of_others) { current_streams[device] = {stream, of_others}; }
void* stream(int device) { return current_streams[device].stream; }

Tensor make(const std::vector<int64_t>& sizes, ScalarType type, int device) {
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  return Tensor(new_tensor(sizes, code, device, false));
}

Tensor to(const Tensor& tensor, int device) {
  const AtenTensorOpaque& from = *tensor.get();
  const AtenTensorHandle result = new_tensor(from.sizes, from.type, device, false);
  copy(static_cast<char*>(result->storage->data), static_cast<const char*>(from.storage->data), from.sizes,
       from.strides, bytes_of(from.type));
  return Tensor(result);
}

Tensor transposed(const Tensor& tensor) {
  auto view = std::make_unique<AtenTensorOpaque>(*tensor.get());
  std::swap(view->sizes[0], view->sizes[1]);
  std::swap(view->strides[0], view->strides[1]);
  return Tensor(view.release());
}

std::vector<StableIValue> call(const std::string& name, const Tensor& first, std::vector<StableIValue> arguments) {
  const Op& op = ops().at(name);
  if (arguments.size() != op.arguments)
    throw std::logic_error(name + " takes " + std::to_string(op.arguments) + " arguments");
  arguments.resize(std::max(op.arguments, op.outputs));
  op.kernels.at(first.is_cpu() ? "CPU" : "CUDA")(arguments.data(), op.arguments, op.outputs);
  return arguments;
}

}  // namespace fake_torch

using namespace fake_torch;

extern "C" {

// ---- tensors

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* result) {
  return *result = new AtenTensorOpaque(*tensor), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* result) {
  return *result = new AtenTensorOpaque{nullptr, {}, {}, 0}, AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) { return delete tensor, AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_empty_strided(int64_t axes, const int64_t* sizes, const int64_t* strides, int32_t type,
                                        int32_t device_type, int32_t device, AtenTensorHandle* result) {
  const int on = device_type == aoti_torch_device_type_cpu() ? kCpu : device;
  if (on != kCpu && fake_cuda::count("torch::empty_strided") != cudaSuccess) return AOTI_TORCH_FAILURE;
  double bytes = static_cast<double>(bytes_of(type));
  for (int64_t i = 0; i < axes; ++i) bytes *= static_cast<double>(sizes[i]);
  if (bytes < 0 || bytes > 1e9) return AOTI_TORCH_FAILURE;  // out of memory
  *result = new_tensor({sizes, sizes + axes}, type, on, true);
  return (*result)->strides.assign(strides, strides + axes), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* axes) {
  return *axes = static_cast<int64_t>(tensor->sizes.size()), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* count) {
  return *count = tensor->count(), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes) {
  return *sizes = tensor->sizes.data(), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides) {
  return *strides = tensor->strides.data(), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_size(AtenTensorHandle tensor, int64_t axis, int64_t* size) {
  return *size = tensor->sizes.at(axis), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle tensor, int64_t axis, int64_t* stride) {
  return *stride = tensor->strides.at(axis), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* type) {
  return *type = tensor->type, AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* contiguous) {
  return *contiguous = tensor->contiguous(), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_is_defined(AtenTensorHandle tensor, bool* defined) {
  return *defined = tensor->storage != nullptr, AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle tensor, int64_t* bytes) {
  return *bytes = static_cast<int64_t>(tensor->storage->bytes), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle, int64_t* offset) {
  return *offset = 0, AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type) {
  const bool on_cpu = tensor->storage->device == kCpu;
  return *type = on_cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* device) {
  return *device = tensor->storage->device, AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data) {
  return *data = tensor->storage->data, AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data) {
  return *data = tensor->storage->data, AOTI_TORCH_SUCCESS;
}

// ---- devices and streams

AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  *guard = reinterpret_cast<DeviceGuardHandle>(new int(current_device));
  return set_device(device), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  const std::unique_ptr<int> before(reinterpret_cast<int*>(guard));
  return set_device(*before), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  return *stream = fake_torch::stream(device), AOTI_TORCH_SUCCESS;
}

struct StreamGuard {
  int device, device_before;
  fake_torch::Current before;
};
AOTITorchError aoti_torch_create_cuda_stream_guard(void* stream, int32_t device, void** guard) {
  *guard = new StreamGuard{device, current_device, current_streams[device]};
  return set_device(device), set_stream(device, stream, true), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_cuda_stream_guard(void* handle) {
  const std::unique_ptr<StreamGuard> guard(static_cast<StreamGuard*>(handle));
  current_streams[guard->device] = guard->before;
  return set_device(guard->device_before), AOTI_TORCH_SUCCESS;
}
// The handle is the number.
AOTITorchError aoti_torch_get_current_stream(int32_t device, StreamHandle* stream) {
  const fake_torch::Current& current = current_streams[device];
  const auto number = reinterpret_cast<uintptr_t>(current.stream);
  *stream = reinterpret_cast<StreamHandle>(number == 0 || current.of_others ? number : number | 1);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_stream_id(StreamHandle stream, int64_t* number) {
  return *number = static_cast<int64_t>(reinterpret_cast<uintptr_t>(stream)), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_stream(StreamHandle) { return AOTI_TORCH_SUCCESS; }

// ---- the dispatcher

AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  if (std::strcmp(name, "aten::copy_") != 0) fake_cuda::fail(std::string("torch has no op ") + name + " here");
  const Tensor result = torch::stable::detail::to<Tensor>(stack[0]), from = torch::stable::detail::to<Tensor>(stack[1]);
  const AOTITorchError error = copy_to(*result.get(), *from.get());
  return stack[0] = torch::stable::detail::from(result), error;
}
AOTITorchError aoti_torch_library_init_def(const char*, const char*, uint32_t, TorchLibraryHandle* library) {
  return *library = nullptr, AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_library_init_fragment(const char*, const char*, uint32_t, TorchLibraryHandle* library) {
  return *library = nullptr, AOTI_TORCH_SUCCESS;
}
// The handle is the dispatch key.
AOTITorchError aoti_torch_library_init_impl(const char*, const char* key, const char*, uint32_t,
                                            TorchLibraryHandle* library) {
  return *library = reinterpret_cast<TorchLibraryHandle>(const_cast<char*>(key)), AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char* text) {
  const std::string schema = text;
  const size_t arguments = schema.find('('), arrow = schema.rfind(" -> ");
  Op& op = ops()[schema.substr(0, arguments)];
  op.arguments = entries(schema.substr(arguments, arrow - arguments));
  op.outputs = entries(schema.substr(arrow + 4));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  return ops()[name].kernels[reinterpret_cast<const char*>(library)] = kernel, AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body, void* context) {
  return body(begin, end, context), AOTI_TORCH_SUCCESS;
}

// ---- numbers that stand for types

uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }
int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }
size_t aoti_torch_dtype_element_size(int32_t type) { return bytes_of(type); }

#define TYPE(name, number) \
  int32_t aoti_torch_dtype_##name() { return number; }
TYPE(uint8, 0)
TYPE(int8, 1)
TYPE(int16, 2)
TYPE(int32, 3)
TYPE(int64, 4)
TYPE(float16, 5)
TYPE(float32, 6)
TYPE(float64, 7)
TYPE(complex32, 8)
TYPE(complex64, 9)
TYPE(complex128, 10)
TYPE(bool, 11)
TYPE(bfloat16, 15)
TYPE(float8_e5m2, 23)
TYPE(float8_e4m3fn, 24)
TYPE(float8_e5m2fnuz, 25)
TYPE(float8_e4m3fnuz, 26)
TYPE(uint16, 27)
TYPE(uint32, 28)
TYPE(uint64, 29)

#define MEMORY_FORMAT(name, number) \
  int32_t aoti_torch_memory_format_##name() { return number; }
MEMORY_FORMAT(contiguous_format, 0)
MEMORY_FORMAT(preserve_format, 1)
MEMORY_FORMAT(channels_last, 2)
MEMORY_FORMAT(channels_last_3d, 3)
}
