// Runs CUDA kernels on the host: one fiber for each CUDA thread, one block after another, so that a debugger and the
// sanitizers can look at them. Build the kernel's own source with
//
//   g++ -x c++ -std=c++20 -DPOSENC_CUDA_ON_CPU -ffp-contract=off -fno-strict-aliasing -Itests/cuda_on_cpu
//       -isystem <CUDA toolkit>/include
//
// A launch is queued on its stream; fake_cuda.h says when it runs. What is not modelled does not compile, or stops the
// program with a message that begins with "cuda_on_cpu:". README.md lists what each build sees. The environment
// variable CUDA_ON_CPU_SEED shuffles the order of threads and blocks.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

// ---- the language

#include <cuda_runtime.h>

#include "fake_cuda.h"

#undef __host__
#undef __device__
#undef __global__
#undef __shared__
#undef __noinline__  // libstdc++ spells an attribute that way
#undef __launch_bounds__
#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
// Every block must get fresh memory, which a plain variable cannot give; POSENC_SHARED can.
#define __shared__ static_assert(false, "under cuda_shim.h, shared memory is declared with POSENC_SHARED")

#define POSENC_LAUNCH(kernel, grid, block, stream, ...) \
  cuda_on_cpu::launch(                                  \
      #kernel, [=](const auto&... arguments) { (kernel)(arguments...); }, grid, block, stream, __VA_ARGS__)

#define POSENC_SHARED(T, name, count) \
  static char name##_key;             \
  T(&name)[count] = *static_cast<T(*)[count]>(cuda_on_cpu::shared_array(&name##_key, sizeof(T) * (count)))

// ---- what the sanitizers are told

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

// The shim's own code: it runs on behalf of every thread, so its accesses would read as races, and its frames are left
// without returning, so ASan must not mark them.
#define CUDA_ON_CPU_UNSEEN __attribute__((no_sanitize("thread", "address"), noinline))

namespace cuda_on_cpu {

#if defined(__SANITIZE_THREAD__)
constexpr bool kTsan = true;
// TSan tells 8128 threads apart. None may stand for two CUDA threads of one launch, whose race it would miss.
constexpr size_t kMaxLaunchThreads = 7000;

CUDA_ON_CPU_UNSEEN inline void release(void* tag) { __tsan_release(tag); }
CUDA_ON_CPU_UNSEEN inline void acquire(void* tag) { __tsan_acquire(tag); }

// While one lives, allocation and mapping forget the history of the memory instead of counting as a write to it.
struct ForgetHistory {
  CUDA_ON_CPU_UNSEEN ForgetHistory() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  CUDA_ON_CPU_UNSEEN ~ForgetHistory() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};
#else
constexpr bool kTsan = false;
constexpr size_t kMaxLaunchThreads = SIZE_MAX;

inline void release(void*) {}
inline void acquire(void*) {}

struct ForgetHistory {
  ForgetHistory() {}
  ~ForgetHistory() {}
};
#endif

// ---- fibers

struct Fiber {
  ucontext_t context;
  const void* stack = nullptr;  // lowest address
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // ASan's
  void* tsan = nullptr;        // TSan's
};

// Goes on with `to`; returns when somebody switches back to `from`, which never happens if `from` has ended.
CUDA_ON_CPU_UNSEEN inline void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool ended = false) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ended ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  // Without synchronisation: the threads stay concurrent in TSan's eyes, so a race does not depend on the schedule.
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&from.context, &to.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// ---- threads, blocks, the launch

constexpr unsigned kMaxBlockThreads = 1024;
constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kSharedLimit = size_t{48} << 10;  // static shared memory of a block, on every architecture
constexpr unsigned kRememberedAtomics = 8;
constexpr unsigned kSpinLimit = 1u << 20;

enum class State : uint8_t { ready, at_barrier, at_active_mask, at_shuffle, ended };
constexpr unsigned kWarp = 32;

struct Thread {
  Fiber fiber;
  uint3 index = {};
  unsigned rank = 0;  // in the block
  State state = State::ready;
  int line = 0;  // where it waits
  unsigned barriers = 0;
  bool fenced = false;
  void* atomics[kRememberedAtomics];  // addresses of its last atomics
  unsigned atomic_count = 0;
  unsigned failed_swaps = 0;
  unsigned rests = 0;  // turns that it lets pass
  unsigned mask = 0;   // of the threads it goes on with
  unsigned lane = 0;   // whose word it wants
  uint64_t word = 0;
};

struct SharedArray {
  const void* key;
  void* memory;
};

// What lives and dies with one block. On the heap: freeing it makes TSan forget the tags, so that blocks are not
// ordered by each other's barriers.
struct Block {
  std::vector<SharedArray> shared;
  size_t shared_bytes = 0;
  // Two of each in turn: a thread that is let go first may be at the next barrier before the last one has left this.
  char barrier_tags[2];
  char fence_tags[kMaxBlockThreads];
};

struct Launch {
  const char* name = "";
  dim3 grid, block;
  uint3 block_index = {};
  void (*run)(const void* call) = nullptr;
  const void* call = nullptr;  // with its arguments
  size_t call_bytes = 0;
  size_t started = 0;  // threads so far
  unsigned threads() const { return block.x * block.y * block.z; }
};

inline Launch active;
inline Thread* current = nullptr;  // null in the scheduler
inline Block* block_memory = nullptr;
inline Thread* pool = nullptr;
inline Fiber scheduler;
inline void* ignorant = nullptr;  // TSan's thread that nothing runs in
inline char launch_start_tag, launch_end_tag;

[[noreturn]] CUDA_ON_CPU_UNSEEN inline void fail(const char* what, int line = 0) {
  const uint3 thread = current ? current->index : uint3{};
  const uint3 block = active.block_index;
  std::fprintf(stderr, "cuda_on_cpu: %s | kernel %s, block (%u, %u, %u), thread (%u, %u, %u), line %d\n", what,
               active.name, block.x, block.y, block.z, thread.x, thread.y, thread.z, line);
  std::abort();
}

[[noreturn]] CUDA_ON_CPU_UNSEEN inline void fail_for(Thread& thread, const char* what) {
  current = &thread;
  fail(what, thread.line);
}

// Filled with ones: NaN for floats, and far out of range as an index.
CUDA_ON_CPU_UNSEEN inline void* fresh_memory(size_t bytes) {
  const ForgetHistory forget;
  volatile char* memory = static_cast<volatile char*>(std::malloc(bytes));
  for (size_t i = 0; i < bytes; ++i) memory[i] = static_cast<char>(0xFF);
  return const_cast<char*>(memory);
}

// The first thread of a block to come here makes the array; `key` tells the arrays of a kernel apart.
CUDA_ON_CPU_UNSEEN inline void* shared_array(const void* key, size_t bytes) {
  for (const SharedArray& array : block_memory->shared)
    if (array.key == key) return array.memory;
  block_memory->shared_bytes += bytes;
  if (block_memory->shared_bytes > kSharedLimit) fail("more static shared memory than a block has");
  const ForgetHistory forget;
  block_memory->shared.push_back({key, fresh_memory(bytes)});
  return block_memory->shared.back().memory;
}

// ---- what threads wait for

CUDA_ON_CPU_UNSEEN inline void wait(State state, int line) {
  Thread& thread = *current;
  thread.state = state;
  thread.line = line;
  switch_fiber(thread.fiber, scheduler);
}

CUDA_ON_CPU_UNSEEN inline void barrier(int line) {
  char* const tag = &block_memory->barrier_tags[current->barriers++ % 2];
  release(tag);
  wait(State::at_barrier, line);
  acquire(tag);
}

CUDA_ON_CPU_UNSEEN inline uint64_t seed() {
  static const char* const given = std::getenv("CUDA_ON_CPU_SEED");
  static const uint64_t value = given ? std::strtoull(given, nullptr, 10) : 0;
  return value;
}
// splitmix64, and not one of the standard library's, whose code TSan would see in every thread.
struct RandomSource {
  using result_type = uint64_t;
  uint64_t state;
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return UINT64_MAX; }
  CUDA_ON_CPU_UNSEEN uint64_t operator()() {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
};
CUDA_ON_CPU_UNSEEN inline RandomSource& random_source() {
  static RandomSource source{seed()};
  return source;
}

// Where the environment asks for another order, threads take turns at atomics. A few stay away for long, so that others
// get through all they have to do.
CUDA_ON_CPU_UNSEEN inline void let_others_run() {
  if (seed() == 0 || random_source()() % 2 == 0) return;
  if (random_source()() % 8 == 0) current->rests = static_cast<unsigned>(random_source()() % 64);
  wait(State::ready, 0);
}

// A fence orders by way of atomics: what came before the fence of one thread and its next atomic, before what follows
// a fence that another thread runs after its atomic on the same address.
CUDA_ON_CPU_UNSEEN inline void fence() {
  Thread& thread = *current;
  thread.fenced = true;
  release(&block_memory->fence_tags[thread.rank]);
  for (unsigned i = 0; i < std::min(thread.atomic_count, kRememberedAtomics); ++i) acquire(thread.atomics[i]);
}

// What came after the last fence stays unordered, so a thread that knows nothing else hands the rest on. TSan lets a
// thread know what its maker knows, so one that has never run anything makes it.
CUDA_ON_CPU_UNSEEN inline void release_what_was_fenced([[maybe_unused]] void* address) {
#if defined(__SANITIZE_THREAD__)
  void* const me = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(ignorant, __tsan_switch_to_fiber_no_sync);
  void* const helper = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(helper, __tsan_switch_to_fiber_no_sync);
  acquire(&block_memory->fence_tags[current->rank]);
  release(address);
  __tsan_switch_to_fiber(me, __tsan_switch_to_fiber_no_sync);
  __tsan_destroy_fiber(helper);
#endif
}

CUDA_ON_CPU_UNSEEN inline void before_atomic(void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("misaligned atomic");
  let_others_run();
  if (current->fenced) release_what_was_fenced(address);
}

CUDA_ON_CPU_UNSEEN inline void after_atomic(void* address) {
  current->atomics[current->atomic_count++ % kRememberedAtomics] = address;
}

// The threads of a warp that have come to this line, or some of them.
CUDA_ON_CPU_UNSEEN inline unsigned active_mask(int line) {
  wait(State::at_active_mask, line);
  return current->mask;
}

CUDA_ON_CPU_UNSEEN inline uint64_t shuffle(unsigned mask, uint64_t word, unsigned lane, int line) {
  if (!(mask >> (current->rank % kWarp) & 1)) fail("a thread shuffles with others, itself not among them", line);
  if (lane >= kWarp || !(mask >> lane & 1)) fail("a thread asks for the word of one that does not shuffle", line);
  current->mask = mask;
  current->word = word;
  current->lane = lane;
  wait(State::at_shuffle, line);
  return current->word;
}

// Nobody else runs while a thread spins, so it would spin for ever.
CUDA_ON_CPU_UNSEEN inline void count_swap(bool swapped) {
  current->failed_swaps = swapped ? 0 : current->failed_swaps + 1;
  if (current->failed_swaps > kSpinLimit) fail("a thread spins on an atomic");
}

// ---- the scheduler

CUDA_ON_CPU_UNSEEN inline void run_thread() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_bytes);
#endif
  acquire(&launch_start_tag);
  active.run(active.call);
  release(&launch_end_tag);
  current->state = State::ended;
  switch_fiber(current->fiber, scheduler, true);
}

// Stack number `n`, with a guard page below it, and for TSan the logical thread that runs on it. Made once and kept.
// For TSan every CUDA thread of a launch has one of its own, else only those of a block do.
CUDA_ON_CPU_UNSEEN inline Fiber& fiber_parts(size_t n) {
  static std::vector<Fiber> made;
  while (made.size() <= n) {
    char* const memory = static_cast<char*>(mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) fail("no memory for a stack");
    Fiber fiber;
    fiber.stack = memory + kGuardBytes;
    fiber.stack_bytes = kStackBytes;
#if defined(__SANITIZE_THREAD__)
    fiber.tsan = __tsan_create_fiber(0);
#endif
    made.push_back(fiber);
  }
  return made[n];
}

CUDA_ON_CPU_UNSEEN inline void start_thread(Thread& thread, unsigned rank) {
  {
    const ForgetHistory forget;
    thread = Thread{};
  }
  const Fiber& parts = fiber_parts(kTsan ? active.started++ : rank);
  thread.fiber.stack = parts.stack;
  thread.fiber.stack_bytes = parts.stack_bytes;
  thread.fiber.tsan = parts.tsan;
  thread.rank = rank;
  thread.index.x = rank % active.block.x;
  thread.index.y = rank / active.block.x % active.block.y;
  thread.index.z = rank / active.block.x / active.block.y;
  ucontext_t& context = thread.fiber.context;
  getcontext(&context);
  context.uc_stack.ss_sp = const_cast<void*>(parts.stack);
  context.uc_stack.ss_size = parts.stack_bytes;
  context.uc_link = nullptr;
  makecontext(&context, run_thread, 0);
  context.uc_stack.ss_size = 0;  // else ASan's swapcontext marks the whole stack as valid, at every switch
}

CUDA_ON_CPU_UNSEEN inline bool open_barrier(unsigned threads) {
  Thread* waiting = nullptr;
  for (unsigned i = 0; i < threads; ++i) {
    if (pool[i].state == State::at_barrier) waiting = &pool[i];
  }
  if (!waiting) return false;
  for (unsigned i = 0; i < threads; ++i) {
    if (pool[i].state == State::ended) fail_for(*waiting, "a thread waits at __syncthreads that another left out");
    if (pool[i].line != waiting->line) fail_for(*waiting, "threads of a block wait at different __syncthreads");
  }
  for (unsigned i = 0; i < threads; ++i) pool[i].state = State::ready;
  return true;
}

// Mixes where the environment asks for it.
template <class T>
CUDA_ON_CPU_UNSEEN void choose_order(std::vector<T>& order) {
  if (seed() != 0) std::shuffle(order.begin(), order.end(), random_source());
}

// Of each warp, the threads that wait at one line go on together; where another order is asked for, perhaps not all.
CUDA_ON_CPU_UNSEEN inline bool open_active_masks(unsigned threads) {
  bool moved = false;
  for (unsigned i = 0; i < threads; ++i) {
    if (pool[i].state != State::at_active_mask) continue;
    const unsigned first = i / kWarp * kWarp, last = std::min(first + kWarp, threads);
    unsigned mask = 0;
    for (unsigned k = i; k < last; ++k) {
      const bool waits = pool[k].state == State::at_active_mask && pool[k].line == pool[i].line;
      if (waits && (k == i || seed() == 0 || random_source()() % 4 != 0)) mask |= 1u << (k - first);
    }
    for (unsigned k = first; k < last; ++k)
      if (mask >> (k - first) & 1) pool[k].mask = mask, pool[k].state = State::ready;
    moved = true;
  }
  return moved;
}

// All that a mask names must have come.
CUDA_ON_CPU_UNSEEN inline bool open_shuffles(unsigned threads) {
  bool moved = false;
  for (unsigned i = 0; i < threads; ++i) {
    if (pool[i].state != State::at_shuffle) continue;
    Thread* const warp = pool + i / kWarp * kWarp;
    const unsigned mask = pool[i].mask, count = std::min<unsigned>(kWarp, threads - i / kWarp * kWarp);
    bool complete = mask >> (count - 1) >> 1 == 0;
    for (unsigned lane = 0; lane < count; ++lane)
      if (mask >> lane & 1)
        complete &= warp[lane].state == State::at_shuffle && warp[lane].mask == mask && warp[lane].line == pool[i].line;
    if (!complete) continue;
    uint64_t words[kWarp];
    for (unsigned lane = 0; lane < count; ++lane) words[lane] = warp[lane].word;
    for (unsigned lane = 0; lane < count; ++lane)
      if (mask >> lane & 1) warp[lane].word = words[warp[lane].lane], warp[lane].state = State::ready;
    moved = true;
  }
  return moved;
}

CUDA_ON_CPU_UNSEEN inline void run_block(std::vector<unsigned>& order) {
  const unsigned threads = active.threads();
  {
    const ForgetHistory forget;
    block_memory = new Block;
  }
  for (unsigned i = 0; i < threads; ++i) start_thread(pool[i], i);
  for (;;) {
    choose_order(order);
    bool moved = false;
    for (const unsigned rank : order) {
      if (pool[rank].state != State::ready) continue;
      moved = true;
      if (pool[rank].rests != 0) {
        --pool[rank].rests;
        continue;
      }
      current = &pool[rank];
      switch_fiber(scheduler, pool[rank].fiber);
      current = nullptr;
    }
    if (std::all_of(pool, pool + threads, [](const Thread& thread) { return thread.state == State::ended; })) break;
    const bool at_any_time = seed() != 0 && random_source()() % 4 == 0;  // others are still on their way
    if (!moved || at_any_time) moved |= open_active_masks(threads) | open_shuffles(threads);
    if (!moved) moved = open_barrier(threads);
    if (!moved) fail("deadlock: no thread can go on");
  }
  const ForgetHistory forget;
  for (const SharedArray& array : block_memory->shared) std::free(array.memory);
  delete block_memory;
  block_memory = nullptr;
}

// On the thread that launches, while another one may run kernels.
inline void check_limits(const Launch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  const auto check = [&](bool allowed, const char* what) {
    if (allowed) return;
    std::fprintf(stderr, "cuda_on_cpu: %s | kernel %s\n", what, launch.name);
    std::abort();
  };
  check(block.x > 0 && block.y > 0 && block.z > 0 && block.x <= 1024 && block.y <= 1024 && block.z <= 64 &&
            uint64_t{block.x} * block.y * block.z <= kMaxBlockThreads,
        "the block has no threads, or more than a block can have");
  check(grid.x > 0 && grid.y > 0 && grid.z > 0, "the grid has no blocks");
  check(grid.x <= 0x7FFFFFFFu && grid.y <= 65535 && grid.z <= 65535, "the grid has more blocks than an axis can have");
  check(uint64_t{grid.x} * grid.y * grid.z * launch.threads() <= kMaxLaunchThreads,
        "more threads in a launch than TSan can tell apart");
}

CUDA_ON_CPU_UNSEEN inline void run_grid() {
  if (!pool) pool = new Thread[kMaxBlockThreads];
#if defined(__SANITIZE_THREAD__)
  scheduler.tsan = __tsan_get_current_fiber();
  if (!ignorant) ignorant = __tsan_create_fiber(0);
#endif
  const dim3& grid = active.grid;
  std::vector<uint64_t> blocks(uint64_t{grid.x} * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), 0);
  choose_order(blocks);
  std::vector<unsigned> threads(active.threads());
  std::iota(threads.begin(), threads.end(), 0);
  release(&launch_start_tag);
  for (const uint64_t at : blocks) {
    active.block_index.x = static_cast<unsigned>(at % grid.x);
    active.block_index.y = static_cast<unsigned>(at / grid.x % grid.y);
    active.block_index.z = static_cast<unsigned>(at / grid.x / grid.y);
    if (fake_cuda::runs_block == nullptr || fake_cuda::runs_block(active.block_index, grid)) run_block(threads);
  }
  acquire(&launch_end_tag);
}

// The size of a grid or a block: dim3 or an integer, which must not lose bits on its way.
struct Extent {
  dim3 value;
  Extent(const dim3& extent) : value(extent) {}
  template <class Int, class = std::enable_if_t<std::is_integral_v<Int>>>
  Extent(Int x) : value(static_cast<unsigned>(x)) {
    if (x < 0 || static_cast<uint64_t>(x) > UINT32_MAX) fail("the size of a grid or block exceeds 32 bits");
  }
};

// `kernel` is a function object that calls the kernel, so that overloads are chosen by the arguments, as nvcc does it.
// Arguments are copied when the kernel is launched, whenever it runs.
template <class Kernel, class... Arguments>
void launch(const char* name, const Kernel& kernel, const Extent& grid, const Extent& block, void* stream,
            const Arguments&... arguments) {
  static_assert((sizeof(Arguments) + ... + 0) <= 4096, "a kernel takes 4 KB of parameters");
  if (fake_cuda::at_work()) fail("a kernel launches a kernel");
  const auto call = [=] { kernel(arguments...); };
  Launch made;
  made.name = name;
  made.grid = grid.value;
  made.block = block.value;
  made.call_bytes = sizeof(call);
  made.run = [](const void* what) { (*static_cast<decltype(call)*>(what))(); };
  check_limits(made);
  fake_cuda::launch(name, grid.value, block.value, stream, [=] {
    active = made;
    active.call = &call;
    run_grid();
  });
}

template <class To, class From>
inline To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// ---- atomics

template <class T, class Next>
T atomic(T* address, const Next& next) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static_assert(sizeof(T) == sizeof(Bits), "atomics are of 4 or 8 bytes");
  before_atomic(address, sizeof(T));
  Bits* const bits = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    const Bits wanted = reinterpret<Bits>(next(reinterpret<T>(old)));
    if (__atomic_compare_exchange_n(bits, &old, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
  }
  after_atomic(address);
  return reinterpret<T>(old);
}

// To CUDA, volatile accesses are relaxed atomic ones. To TSan too, with --param tsan-distinguish-volatile=1, by which
// g++ calls the functions below beforehand.
template <class T>
void tell_of_volatile_load(void* address) {
  T* const value = static_cast<T*>(address);
  (void)__atomic_load_n(value, __ATOMIC_RELAXED);
  if (current) after_atomic(address);
}
template <class T>
void tell_of_volatile_store(void* address) {
  T* const value = static_cast<T*>(address);
  if (current) before_atomic(address, sizeof(T));
  __atomic_fetch_or(value, 0, __ATOMIC_RELAXED);
}

template <class T>
T shuffle_value(unsigned mask, T value, int lane, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what is shuffled has 4 or 8 bytes");
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return reinterpret<T>(static_cast<Bits>(shuffle(mask, reinterpret<Bits>(value), static_cast<unsigned>(lane), line)));
}

template <class T>
using Same = std::type_identity_t<T>;  // takes part in no deduction

}  // namespace cuda_on_cpu

#if defined(__SANITIZE_THREAD__)
#define CUDA_ON_CPU_CALLED __attribute__((used)) inline  // by code that the compiler adds later
extern "C" {
CUDA_ON_CPU_CALLED void __tsan_volatile_read4(void* address) { cuda_on_cpu::tell_of_volatile_load<uint32_t>(address); }
CUDA_ON_CPU_CALLED void __tsan_volatile_read8(void* address) { cuda_on_cpu::tell_of_volatile_load<uint64_t>(address); }
CUDA_ON_CPU_CALLED void __tsan_volatile_write4(void* address) {
  cuda_on_cpu::tell_of_volatile_store<uint32_t>(address);
}
CUDA_ON_CPU_CALLED void __tsan_volatile_write8(void* address) {
  cuda_on_cpu::tell_of_volatile_store<uint64_t>(address);
}
}
#endif

// ---- what kernels call

#define threadIdx (cuda_on_cpu::current->index)
#define blockIdx (cuda_on_cpu::active.block_index)
#define blockDim (cuda_on_cpu::active.block)
#define gridDim (cuda_on_cpu::active.grid)

// Macros, for the line: threads that wait together must wait at the same place.
#define __syncthreads() cuda_on_cpu::barrier(__LINE__)

#define __activemask() cuda_on_cpu::active_mask(__LINE__)
#define __shfl_sync(mask, value, lane) cuda_on_cpu::shuffle_value(mask, value, lane, __LINE__)

inline void __threadfence() { cuda_on_cpu::fence(); }
inline void __threadfence_block() { cuda_on_cpu::fence(); }
inline void __threadfence_system() { cuda_on_cpu::fence(); }

template <class T>
T atomicAdd(T* address, cuda_on_cpu::Same<T> value) {
  return cuda_on_cpu::atomic(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMin(T* address, cuda_on_cpu::Same<T> value) {
  return cuda_on_cpu::atomic(address, [=](T old) { return std::min(old, value); });
}
template <class T>
T atomicMax(T* address, cuda_on_cpu::Same<T> value) {
  return cuda_on_cpu::atomic(address, [=](T old) { return std::max(old, value); });
}
template <class T>
T atomicExch(T* address, cuda_on_cpu::Same<T> value) {
  return cuda_on_cpu::atomic(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, cuda_on_cpu::Same<T> expected, cuda_on_cpu::Same<T> value) {
  const T old = cuda_on_cpu::atomic(address, [=](T found) { return found == expected ? value : found; });
  cuda_on_cpu::count_swap(old == expected);
  return old;
}

template <class T>
T __ldg(const T* from) {
  return *from;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::reinterpret<float>(bits); }
inline unsigned __float_as_uint(float value) { return cuda_on_cpu::reinterpret<unsigned>(value); }
inline float __int_as_float(int bits) { return cuda_on_cpu::reinterpret<float>(bits); }
inline int __float_as_int(float value) { return cuda_on_cpu::reinterpret<int>(value); }
inline double __longlong_as_double(long long bits) { return cuda_on_cpu::reinterpret<double>(bits); }
inline long long __double_as_longlong(double value) { return cuda_on_cpu::reinterpret<long long>(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
