#include "device.cuh"

#include <cstring>
#include <map>
#include <new>

#include "check_ids.h"

namespace posenc::cuda {
namespace {

std::mutex& devices_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::map<int, std::unique_ptr<Device>>& devices() {
  static auto* map = new std::map<int, std::unique_ptr<Device>>;  // never destroyed: the driver may be gone first
  return *map;
}

}  // namespace

Device& Device::get(int index) {
  const std::lock_guard<std::mutex> lock(devices_mutex());
  std::unique_ptr<Device>& device = devices()[index];
  if (!device) device.reset(new Device(index));
  return *device;
}

std::vector<Device*> Device::all() {
  const std::lock_guard<std::mutex> lock(devices_mutex());
  std::vector<Device*> result;
  for (const auto& entry : devices())
    if (entry.second) result.push_back(entry.second.get());
  return result;
}

Device::Device(int index) : index_(index) {
  const OutsideCapture outside;
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index), "reading the device's size");
  // At 64 registers a thread, what the kernels take.
  resident_threads_ = int64_t{processors} * 1024;
  check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "creating a stream");
  errors_ = std::make_unique<ErrorRecord>(copies_);
  checks_ = std::make_unique<ErrorRecord>(copies_);
}

ErrorRecord::ErrorRecord(cudaStream_t stream) : stream_(stream) {
  const OutsideCapture outside;
  check(cudaMalloc(&bad_id_, sizeof(BadId)), "allocating device memory");
  check(cudaMemsetAsync(bad_id_, 0, sizeof(BadId), stream), "clearing device memory");
  check(cudaStreamSynchronize(stream), "clearing device memory");
  void* mapped = nullptr;
  check(cudaHostAlloc(&mapped, sizeof(Mapped), cudaHostAllocMapped), "allocating mapped memory");
  mapped_ = new (mapped) Mapped;
  check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped_on_device_), mapped, 0), "mapping memory");
}

BadId ErrorRecord::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OutsideCapture outside;
  take_bad_id(bad_id_, &mapped_on_device_->found, &mapped_on_device_->taken, stream_);
  check(cudaGetLastError(), "launching the reading of a bad id");
  check(cudaStreamSynchronize(stream_), "reading a bad id");
  return mapped_->taken;
}

Frequencies Device::frequencies(const std::shared_ptr<const FrequencyTable>& table) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = uploads_.find(table.get());
  if (found != uploads_.end()) return found->second.view;

  constexpr int64_t kArrays = 5;
  const int64_t stride = (table->pairs + kFrequencyPadding + 3) / 4 * 4;  // of words, so that every array is aligned
  std::vector<uint32_t> words(kArrays * stride, 0);
  for (int64_t i = 0; i < 4; ++i) std::copy(table->turns[i].begin(), table->turns[i].end(), words.begin() + i * stride);
  std::memcpy(words.data() + 4 * stride, table->angular.data(), table->angular.size() * sizeof(float));

  const OutsideCapture outside;
  uint32_t* memory = nullptr;
  const size_t bytes = words.size() * sizeof(uint32_t);
  check(cudaMalloc(&memory, bytes), "allocating device memory");
  check(cudaMemcpyAsync(memory, words.data(), bytes, cudaMemcpyHostToDevice, copies_), "uploading frequencies");
  check(cudaStreamSynchronize(copies_), "uploading frequencies");
  Frequencies view;
  view.pairs = table->pairs;
  for (int64_t i = 0; i < 4; ++i) view.turns[i] = memory + i * stride;
  view.angular = reinterpret_cast<const float*>(memory + 4 * stride);
  uploads_.emplace(table.get(), Upload{table, view});
  return view;
}

}  // namespace posenc::cuda
