// Code that was compiled with -fsanitize=kernel-address calls these functions at every access to memory.
#include "cuda_shim.h"

extern "C" char __executable_start, _end;

namespace {

bool within(uintptr_t address, const void* begin, size_t bytes) {
  return address - reinterpret_cast<uintptr_t>(begin) < bytes;
}

// What a kernel may use besides memory of the device: its stack, its arguments, and the program itself, where constants
// and the shim's variables lie.
bool own(uintptr_t address) {
  using namespace cuda_on_cpu;
  return within(address, current->fiber.stack, current->fiber.stack_bytes) ||
         within(address, active.call, active.call_bytes) || within(address, pool, kMaxBlockThreads * sizeof(Thread)) ||
         within(address, &__executable_start, &_end - &__executable_start);
}

void check(uintptr_t address, size_t bytes) {
  static thread_local bool checking = false;  // what this itself calls may come here too
  if (checking) return;
  checking = true;
  const bool in_kernel = fake_cuda::at_work() && cuda_on_cpu::current != nullptr;
  if (fake_cuda::in_device_memory(address)) fake_cuda::check_access(address, bytes);
  else if (in_kernel && !own(address)) fake_cuda::fail("a kernel accesses memory of the host");
  checking = false;
  if (in_kernel && fake_cuda::in_device_memory(address)) cuda_on_cpu::let_others_run();
}

}  // namespace

extern "C" {

#define CHECKS_OF(bytes)                                                          \
  void __asan_load##bytes##_noabort(uintptr_t address) { check(address, bytes); } \
  void __asan_store##bytes##_noabort(uintptr_t address) { check(address, bytes); }
CHECKS_OF(1)
CHECKS_OF(2)
CHECKS_OF(4)
CHECKS_OF(8)
CHECKS_OF(16)
void __asan_loadN_noabort(uintptr_t address, size_t bytes) { check(address, bytes); }
void __asan_storeN_noabort(uintptr_t address, size_t bytes) { check(address, bytes); }
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char*) {}
void __asan_after_dynamic_init() {}
}
