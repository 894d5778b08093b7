#include "device.cuh"

#include <cstring>
#include <map>

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
  check(cudaMalloc(&bad_id_, sizeof(BadId)), "allocating device memory");
  check(cudaMemsetAsync(bad_id_, 0, sizeof(BadId), copies_), "clearing device memory");
  check(cudaStreamSynchronize(copies_), "clearing device memory");
  check(cudaHostAlloc(&found_, sizeof(uint32_t), cudaHostAllocMapped), "allocating mapped memory");
  *found_ = 0;
  check(cudaHostGetDevicePointer(&found_on_device_, found_, 0), "mapping memory");
}

BadId Device::take_bad_id() {
  const OutsideCapture outside;
  BadId result;
  check(cudaMemcpyAsync(&result, bad_id_, sizeof(BadId), cudaMemcpyDeviceToHost, copies_), "reading a bad id");
  check(cudaMemsetAsync(bad_id_, 0, sizeof(BadId), copies_), "clearing a bad id");
  check(cudaStreamSynchronize(copies_), "reading a bad id");
  *const_cast<volatile uint32_t*>(found_) = 0;
  return result;
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
