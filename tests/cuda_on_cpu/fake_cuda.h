// A CUDA runtime without a device. fake_cuda.cpp defines the runtime's functions that csrc/cuda calls, under their own
// names, and cuda_shim.h queues its kernels here.
//
// Work on a stream is done when somebody waits for that stream, and not before: whoever reads a result too early, or
// queues work on another stream, finds garbage. Handles, the current device and what a stream capture allows are
// checked as the CUDA documentation has them, in its strictest reading. Such mistakes are errors, as they are there.
// What the documentation calls undefined stops the program with a message that begins with "fake_cuda:".
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace fake_cuda {

[[noreturn]] void fail(const std::string& what);

// ---- the machine; to be set before the first call

struct Machine {
  int devices = 2;
  int processors = 4;             // of device 0; each device has one more than the one before
  int threads = 1024;             // of any kernel that a processor holds at a time
  int driver_version = 13000;     // older than the runtime: every call fails
  bool works_at_once = false;     // work is done as soon as it is queued
  bool knows_all_memory = false;  // work touches no memory but this runtime's: see allocate
};
inline Machine machine;

// ---- time

// Everything that is queued gets done, though nobody waits for it.
void let_time_pass();
// Whether nothing is queued on any stream.
bool idle();

// ---- calls

// Names of the functions that were called, by any thread. Launches are "cudaLaunchKernel".
const std::vector<std::string>& calls();
// How many of them wait for work, or are known to.
int64_t waits();
// The call that comes after `count` others fails; with `for_ever`, so do all that follow.
void fail_call(int64_t count, cudaError_t error, bool for_ever = false);
const std::string& failed_call();

// Devices that have a context: the first call that needs one makes it.
std::set<int> contexts();
int current_device();
// Torch has a runtime of its own, and a current device there: -1 where it has none in this thread. Work for another
// device stops the program.
inline thread_local int device_of_torch = -1;

// ---- kernels

struct LaunchRecord {
  std::string kernel;
  dim3 grid, block;
  int device = 0;
  void* stream = nullptr;
  int64_t threads() const { return int64_t{1} * grid.x * grid.y * grid.z * block.x * block.y * block.z; }
};
const std::vector<LaunchRecord>& launches();
// Called for POSENC_LAUNCH. Errors are left for cudaGetLastError.
void launch(const char* kernel, const dim3& grid, const dim3& block, void* stream, std::function<void()> run);
// Calls of a library, CUB or torch: one that may fail, one that asks for the current device, one that queues work.
cudaError_t count(const char* what);
cudaError_t ask(const char* what);
cudaError_t enqueue(const char* what, int device, void* stream, std::function<void()> work);

// Of a large grid, a check may run only some blocks.
inline bool (*runs_block)(const uint3& index, const dim3& grid) = nullptr;

// ---- memory of devices

// Memory as torch's allocator hands it out, filled with garbage. `release` gives it back in the order of its stream.
// Exclusive memory is used by work of that stream alone.
void* allocate(size_t bytes, int device, void* stream, bool exclusive);
void release(void* memory);
// Bytes that were allocated and not released, of one device.
size_t allocated(int device);
// Somebody reads or writes memory of a device: stops the program unless it is work that may.
bool in_device_memory(uintptr_t address);
void overwrite(void* memory, size_t bytes);
bool at_work();  // whether this thread does the work of a stream just now
void check_access(uintptr_t address, size_t bytes);

// ---- captured graphs

// What cudaStreamEndCapture gave, once more.
void replay(cudaGraph_t graph, void* stream);

}  // namespace fake_cuda
