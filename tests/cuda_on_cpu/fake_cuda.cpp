#include "fake_cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace fake_cuda {
namespace {

struct Stream;

// A place in the queue of a stream.
struct Event {
  Stream* stream = nullptr;
  uint64_t place = 0;
};

struct Task {
  std::function<void()> work;
  Event after = {};                // of another stream
  bool gives_memory_back = false;  // which nobody waits for
};

struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool valid = true;
  std::vector<std::function<void()>> work = {};
};

struct Stream {
  int device = 0;
  bool blocking = false;  // it and the null stream wait for each other
  std::deque<Task> queue = {};
  uint64_t queued = 0, done = 0;
  std::unique_ptr<Capture> capture = {};
};

struct Allocation {
  size_t bytes;
  int device;
  Stream* owner;   // it is given back in the order of this stream
  bool exclusive;  // only work of the owner may use it, unless it is never given back
  bool alive = true;
  bool elsewhere = false;        // another stream has used it
  bool to_be_forgotten = false;  // it has been given back, and work on its stream may still use it
  bool of_host = false;          // the device's view of pinned memory
};

// Addresses are never used twice, so that an old pointer is always recognised.
constexpr uintptr_t kArena = uintptr_t{1} << 44;
constexpr size_t kArenaBytes = size_t{1} << 36, kPage = 4096;

std::recursive_mutex mutex;  // of all that follows
pid_t process = 0;           // that made the first call
std::map<Stream*, std::unique_ptr<Stream>> streams;
std::vector<std::unique_ptr<Stream>> destroyed;
std::map<int, Stream*> null_streams;
std::map<Event*, std::unique_ptr<Event>> events;
std::map<cudaGraph_t, std::vector<std::function<void()>>> graphs;
std::map<uintptr_t, Allocation> allocations;
std::map<void*, std::pair<uintptr_t, size_t>> pinned;  // from the host's view to the device's
uintptr_t arena_end = 0;
std::vector<std::string> call_names;
std::vector<LaunchRecord> launch_records;
std::set<int> devices_with_context;
int64_t wait_count = 0;
int64_t calls_before_failure = -1;
cudaError_t failure = cudaSuccess;
bool fails_for_ever = false;
std::string failed;

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
thread_local Stream* running = nullptr;  // whose work this thread does just now

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// It changes a variable of the thread, and does not count as a call.
constexpr const char* kCannotFail = "cudaThreadExchangeStreamCaptureMode";

// Every call begins here.
cudaError_t enter(const char* name) {
  if (name != kCannotFail) call_names.emplace_back(name);
  if (machine.driver_version < CUDART_VERSION / 1000 * 1000) return result(cudaErrorInsufficientDriver);
  if (name == kCannotFail || calls_before_failure < 0 || calls_before_failure-- > 0) return cudaSuccess;
  if (fails_for_ever) calls_before_failure = 0;
  failed = name;
  return result(failure);
}

// In a process that was forked from one that had used CUDA, nothing works. That is seen before the lock, which another
// thread may have held.
#define FAKE_CUDA_CALL(name)                                            \
  if (process == 0) process = getpid();                                 \
  if (process != getpid()) return result(cudaErrorInitializationError); \
  const std::lock_guard<std::recursive_mutex> lock(mutex);              \
  if (const cudaError_t error = enter(name); error != cudaSuccess) return error

// The current device, which is about to be used.
int here() {
  devices_with_context.insert(device_of_thread);
  return device_of_thread;
}

Stream* null_stream(int device) {
  Stream*& stream = null_streams[device];
  if (!stream) {
    auto made = std::make_unique<Stream>(Stream{device, true});
    stream = made.get();
    streams.emplace(stream, std::move(made));
  }
  return stream;
}

// Null if there is no such stream.
Stream* find(void* handle, int device = device_of_thread) {
  if (handle == nullptr || handle == cudaStreamLegacy) return null_stream(device);
  const auto found = streams.find(static_cast<Stream*>(handle));
  return found == streams.end() ? nullptr : found->first;
}

bool is_null(const Stream* stream) {
  return std::any_of(null_streams.begin(), null_streams.end(), [&](auto& entry) { return entry.second == stream; });
}

// Whether the legacy stream cannot be used, since a blocking stream of its device is under capture.
bool is_beside_a_capture(const Stream* null_stream) {
  return is_null(null_stream) && std::any_of(streams.begin(), streams.end(), [&](const auto& entry) {
           return entry.first->capture && entry.first->blocking && entry.first->device == null_stream->device;
         });
}

// ---- doing work

void drain(Stream* stream, uint64_t until = UINT64_MAX) {
  while (stream->done < std::min(until, stream->queued)) {
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    ++stream->done;
    if (task.after.stream) drain(task.after.stream, task.after.place);
    Stream* const before = std::exchange(running, stream);
    if (task.work) task.work();
    running = before;
  }
}

void push(Stream* stream, Task task) {
  // The null stream comes after all work of blocking streams, and they after its work.
  if (stream->blocking)
    for (const auto& [other, owned] : streams)
      if (other != stream && other->blocking && other->device == stream->device && (is_null(stream) || is_null(other)))
        stream->queue.push_back({{}, {other, other->queued}}), ++stream->queued;
  stream->queue.push_back(std::move(task));
  ++stream->queued;
  if (machine.works_at_once) drain(stream);
}

// ---- captures

cudaError_t invalidate(const std::function<bool(const Stream&)>& concerned) {
  bool any = false;
  for (const auto& [stream, owned] : streams)
    if (stream->capture && concerned(*stream)) any = true, stream->capture->valid = false;
  return any ? result(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// Of a call that must not be made beside a capture, unless the mode of the thread is relaxed.
cudaError_t unsafe() {
  const auto me = std::this_thread::get_id();
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  return invalidate([&](const Stream& stream) {
    const Capture& capture = *stream.capture;
    if (capture.thread == me) return capture.mode != cudaStreamCaptureModeRelaxed;
    return mode_of_thread == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
  });
}

cudaError_t add(int device, void* handle, std::function<void()> work) {
  Stream* const stream = find(handle, device);
  if (!stream || stream->device != device) return result(cudaErrorInvalidResourceHandle);
  if (device_of_torch >= 0 && device_of_torch != stream->device)
    fail("work on a device that torch does not have current");
  if (is_null(stream)) {
    const auto concerned = [&](const Stream& other) { return other.blocking && other.device == stream->device; };
    if (invalidate(concerned) != cudaSuccess) return result(cudaErrorStreamCaptureImplicit);
  }
  if (!stream->capture) push(stream, {std::move(work)});
  else if (stream->capture->valid) stream->capture->work.push_back(std::move(work));
  else return result(cudaErrorStreamCaptureInvalidated);
  return cudaSuccess;
}

// ---- memory

uintptr_t arena(size_t bytes) {
  if (arena_end == 0) {
    void* const memory = mmap(reinterpret_cast<void*>(kArena), kArenaBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory != reinterpret_cast<void*>(kArena)) fail("no address space");
    arena_end = kArena;
  }
  const uintptr_t address = arena_end;
  arena_end += (bytes / kPage + 2) * kPage;  // with a gap
  if (arena_end > kArena + kArenaBytes) fail("out of address space");
  return address;
}

void fill_with_garbage(uintptr_t address, size_t bytes) { std::memset(reinterpret_cast<void*>(address), 0xCD, bytes); }

Allocation* allocation_of(uintptr_t address) {
  const auto after = allocations.upper_bound(address);
  return after == allocations.begin() ? nullptr : &std::prev(after)->second;
}

uintptr_t make_allocation(size_t bytes, int device, Stream* owner, bool exclusive) {
  const uintptr_t address = arena(bytes);
  allocations.emplace(address, Allocation{bytes, device, owner, exclusive});
  fill_with_garbage(address, bytes);
  return address;
}

// Of work that is being done.
void check_device_memory(uintptr_t address, size_t bytes) {
  const auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) fail("access to no memory");
  auto& [begin, allocation] = *std::prev(after);
  if (address + bytes > begin + allocation.bytes)
    fail("access " + std::to_string(address + bytes - begin - allocation.bytes) + " bytes past the end of memory of " +
         std::to_string(allocation.bytes) + " bytes");
  if (!allocation.alive) fail("access to memory that was given back");
  if (!allocation.of_host && allocation.device != running->device) fail("access to memory of another device");
  if (allocation.exclusive && allocation.owner != running) {
    allocation.elsewhere = true;
    if (allocation.to_be_forgotten) fail("memory allocated for one stream is used on another");
  }
}

void check_range(const void* memory, size_t bytes, bool device) {
  if (!machine.knows_all_memory || bytes == 0) return;
  if (device != in_device_memory(reinterpret_cast<uintptr_t>(memory)))
    fail(device ? "a copy from or to the host's memory takes it for the device's"
                : "a copy from or to the device's memory takes it for the host's");
  if (device) check_device_memory(reinterpret_cast<uintptr_t>(memory), bytes);
}

bool is_pinned(const void* memory) {
  const auto after = pinned.upper_bound(const_cast<void*>(memory));
  return after != pinned.begin() && static_cast<const char*>(memory) <
                                        static_cast<char*>(std::prev(after)->first) + std::prev(after)->second.second;
}

void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  check_range(to, bytes, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
  check_range(from, bytes, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
  std::memmove(to, from, bytes);
}

}  // namespace

void fail(const std::string& what) {
  std::fprintf(stderr, "fake_cuda: %s\n", what.c_str());
  std::abort();
}

void let_time_pass() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  for (const auto& [stream, owned] : streams) drain(stream);
}

bool idle() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  for (const auto& [stream, owned] : streams)
    for (const Task& task : stream->queue)
      if (task.work && !task.gives_memory_back) return false;
  return true;
}

const std::vector<std::string>& calls() { return call_names; }
int64_t waits() { return wait_count; }
const std::string& failed_call() { return failed; }
std::set<int> contexts() { return devices_with_context; }
int current_device() { return device_of_thread; }
const std::vector<LaunchRecord>& launches() { return launch_records; }

void fail_call(int64_t count, cudaError_t error, bool for_ever) {
  calls_before_failure = count;
  failure = error;
  fails_for_ever = for_ever;
}

cudaError_t count(const char* what) {
  const cudaError_t before = last_error;  // of torch's own runtime, nothing is seen here
  const cudaError_t error = [&] {
    FAKE_CUDA_CALL(what);
    return cudaSuccess;
  }();
  last_error = before;
  return error;
}

cudaError_t ask(const char* what) {
  FAKE_CUDA_CALL(what);
  return here(), cudaSuccess;
}

cudaError_t enqueue(const char* what, int device, void* stream, std::function<void()> work) {
  FAKE_CUDA_CALL(what);
  return add(device, stream, std::move(work));
}

void launch(const char* kernel, const dim3& grid, const dim3& block, void* stream, std::function<void()> run) {
  if (enqueue("cudaLaunchKernel", here(), stream, std::move(run)) == cudaSuccess)
    launch_records.push_back({kernel, grid, block, device_of_thread, stream});
}

void* allocate(size_t bytes, int device, void* handle, bool exclusive) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* const stream = find(handle, device);
  if (!stream || stream->device != device) fail("memory of one device is allocated for a stream of another");
  const uintptr_t address = make_allocation(bytes, device, stream, exclusive);
  // A graph has its memory anew each time.
  if (stream->capture)
    stream->capture->work.push_back([=] {
      allocation_of(address)->alive = true;  // what the graph's work does to it comes before it is forgotten again
      fill_with_garbage(address, bytes);
    });
  return reinterpret_cast<void*>(address);
}

void release(void* memory) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  Allocation* const allocation = allocation_of(reinterpret_cast<uintptr_t>(memory));
  if (allocation->exclusive && allocation->elsewhere) fail("memory allocated for one stream was used on another");
  allocation->to_be_forgotten = true;
  const auto forget = [=] { allocation->alive = false; };
  if (!allocation->owner) forget();
  else if (allocation->owner->capture) allocation->owner->capture->work.push_back(forget);
  else push(allocation->owner, {forget, {}, true});
}

size_t allocated(int device) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  size_t bytes = 0;
  for (const auto& [address, allocation] : allocations)
    if (allocation.alive && !allocation.of_host && allocation.device == device) bytes += allocation.bytes;
  return bytes;
}

bool in_device_memory(uintptr_t address) { return address - kArena < kArenaBytes; }

void overwrite(void* memory, size_t bytes) {
  check_range(memory, bytes, true);
  std::memset(memory, 0x5A, bytes);
}

bool at_work() { return running != nullptr; }

void check_access(uintptr_t address, size_t bytes) {
  if (!running) fail("the host accesses memory of a device");
  check_device_memory(address, bytes);
}

void replay(cudaGraph_t graph, void* handle) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  for (const auto& work : graphs.at(graph)) push(find(handle), {work});
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

// ---- errors, versions, devices

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return "another error";
  }
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = machine.driver_version, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  FAKE_CUDA_CALL("cudaGetDeviceCount");
  return *count = machine.devices, cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  FAKE_CUDA_CALL("cudaGetDevice");
  return *device = here(), cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  FAKE_CUDA_CALL("cudaSetDevice");
  if (device < 0 || device >= machine.devices) return result(cudaErrorInvalidDevice);
  device_of_thread = device;
  return here(), cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  FAKE_CUDA_CALL("cudaDeviceGetAttribute");
  if (device < 0 || device >= machine.devices) return result(cudaErrorInvalidDevice);
  if (attribute != cudaDevAttrMultiProcessorCount) fail("an attribute of a device that is not modelled");
  return *value = machine.processors + device, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared) {
  FAKE_CUDA_CALL("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (kernel == nullptr || threads <= 0 || shared != 0) return result(cudaErrorInvalidValue);
  here();
  return *blocks = machine.threads / threads, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  FAKE_CUDA_CALL("cudaDeviceSynchronize");
  ++wait_count;
  const int device = here();
  const cudaError_t error = invalidate([&](const Stream& stream) { return stream.device == device; });
  if (error != cudaSuccess) return error;
  for (const auto& [stream, owned] : streams)
    if (stream->device == device) drain(stream);
  return cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  FAKE_CUDA_CALL("cudaMalloc");
  if (const cudaError_t error = unsafe(); error != cudaSuccess) return error;
  return *memory = reinterpret_cast<void*>(make_allocation(bytes, here(), nullptr, false)), cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  FAKE_CUDA_CALL("cudaFree");
  if (memory == nullptr) return cudaSuccess;
  if (const cudaError_t error = unsafe(); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  if (!allocations.count(reinterpret_cast<uintptr_t>(memory))) return result(cudaErrorInvalidValue);
  return release(memory), cudaSuccess;
}
// The host and the device see it at different addresses, so that one cannot be taken for the other.
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  FAKE_CUDA_CALL("cudaHostAlloc");
  if (const cudaError_t error = unsafe(); error != cudaSuccess) return error;
  const uintptr_t address = arena(bytes);
  const int file = memfd_create("pinned", 0);
  const size_t whole = (bytes / kPage + 1) * kPage;
  if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) fail("no memory");
  *memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  mmap(reinterpret_cast<void*>(address), whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  close(file);
  allocations.emplace(address, Allocation{bytes, here(), nullptr, false, (flags & cudaHostAllocMapped) != 0, true});
  pinned.emplace(*memory, std::pair{address, whole});
  fill_with_garbage(address, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  FAKE_CUDA_CALL("cudaFreeHost");
  if (const cudaError_t error = unsafe(); error != cudaSuccess) return error;
  const auto found = pinned.find(memory);
  if (found == pinned.end()) return result(cudaErrorInvalidValue);
  allocation_of(found->second.first)->alive = false;
  munmap(memory, found->second.second);
  pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** view, void* memory, unsigned) {
  FAKE_CUDA_CALL("cudaHostGetDevicePointer");
  const auto found = pinned.find(memory);
  if (found == pinned.end()) return result(cudaErrorInvalidValue);
  return *view = reinterpret_cast<void*>(found->second.first), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  FAKE_CUDA_CALL("cudaMemsetAsync");
  return add(here(), stream, [=] {
    check_range(to, bytes, true);
    std::memset(to, value, bytes);
  });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  FAKE_CUDA_CALL("cudaMemcpyAsync");
  const Stream* const known = find(stream);
  if (kind != cudaMemcpyHostToDevice || is_pinned(from) || (known && known->capture))
    return add(here(), stream, [=] { copy(to, from, bytes, kind); });
  // Memory that is not pinned has been read when this returns.
  check_range(from, bytes, false);
  const auto* const first = static_cast<const char*>(from);
  return add(here(), stream,
             [=, read = std::vector<char>(first, first + bytes)] { copy(to, read.data(), bytes, kind); });
}

// ---- streams and events

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  FAKE_CUDA_CALL("cudaStreamCreateWithFlags");
  auto stream = std::make_unique<Stream>(Stream{here(), flags != cudaStreamNonBlocking});
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  streams.emplace(stream.get(), std::move(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  FAKE_CUDA_CALL("cudaStreamDestroy");
  Stream* const stream = find(handle);
  if (!stream || is_null(stream)) return result(cudaErrorInvalidResourceHandle);
  drain(stream);
  for (const auto& [handle, event] : events)
    if (event->stream == stream) *event = {};
  for (const auto& [other, owned] : streams)
    for (Task& task : other->queue)
      if (task.after.stream == stream) task.after = {};
  for (auto& [address, allocation] : allocations)
    if (allocation.owner == stream) allocation.owner = nullptr;
  // Kept, so that its address means no other stream.
  destroyed.push_back(std::move(streams.find(stream)->second));
  streams.erase(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  FAKE_CUDA_CALL("cudaStreamSynchronize");
  ++wait_count;
  Stream* const stream = find(handle);
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  if (stream->capture) return invalidate([&](const Stream& other) { return &other == stream; });
  if (is_beside_a_capture(stream))
    return invalidate([&](const Stream& other) { return other.blocking && other.device == stream->device; });
  if (const cudaError_t error = unsafe(); error != cudaSuccess) return error;
  return drain(stream), cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  FAKE_CUDA_CALL("cudaEventCreateWithFlags");
  auto event = std::make_unique<Event>();
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  events.emplace(event.get(), std::move(event));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  FAKE_CUDA_CALL("cudaEventDestroy");
  return events.erase(reinterpret_cast<Event*>(event)) ? cudaSuccess : result(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  FAKE_CUDA_CALL("cudaEventRecord");
  Stream* const stream = find(handle);
  const auto found = events.find(reinterpret_cast<Event*>(event));
  if (!stream || found == events.end()) return result(cudaErrorInvalidResourceHandle);
  if (stream->capture) fail("events in a capture are not modelled");
  *found->second = {stream, stream->queued};
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_CUDA_CALL("cudaEventSynchronize");
  ++wait_count;
  const auto found = events.find(reinterpret_cast<Event*>(event));
  if (found == events.end()) return result(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = unsafe(); error != cudaSuccess) return error;
  if (found->second->stream) drain(found->second->stream, found->second->place);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  FAKE_CUDA_CALL("cudaStreamWaitEvent");
  Stream* const stream = find(handle);
  const auto found = events.find(reinterpret_cast<Event*>(event));
  if (!stream || found == events.end()) return result(cudaErrorInvalidResourceHandle);
  if (flags == cudaEventWaitExternal) {
    if (!stream->capture) return result(cudaErrorInvalidValue);
    // Each run of the graph waits for the last time that the event was recorded.
    stream->capture->work.push_back([event = found->first] {
      const auto [other, place] = *event;
      if (other) drain(other, place);
    });
    return cudaSuccess;
  }
  if (stream->capture) fail("events of a capture are not modelled");
  return push(stream, {{}, *found->second}), cudaSuccess;
}

// ---- captures

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  FAKE_CUDA_CALL("cudaStreamBeginCapture");
  Stream* const stream = find(handle);
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  if (is_null(stream) || stream->capture) return result(cudaErrorStreamCaptureUnsupported);
  stream->capture = std::make_unique<Capture>(Capture{mode, std::this_thread::get_id()});
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  FAKE_CUDA_CALL("cudaStreamEndCapture");
  Stream* const stream = find(handle);
  if (!stream || !stream->capture) return result(cudaErrorInvalidValue);
  const std::unique_ptr<Capture> capture = std::move(stream->capture);
  if (!capture->valid) return result(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(graphs.size() + 1);
  graphs.emplace(*graph, std::move(capture->work));
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  FAKE_CUDA_CALL("cudaStreamIsCapturing");
  Stream* const stream = find(handle);
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  if (is_beside_a_capture(stream)) return result(cudaErrorStreamCaptureImplicit);  // which leaves the capture alone
  *status = !stream->capture         ? cudaStreamCaptureStatusNone
            : stream->capture->valid ? cudaStreamCaptureStatusActive
                                     : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  // Nothing can go wrong here, so no failure is asked for.
  const int64_t before = std::exchange(calls_before_failure, -1);
  FAKE_CUDA_CALL(kCannotFail);
  calls_before_failure = before;
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

}  // extern "C"
