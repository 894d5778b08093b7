// The half of translated PTX that sees memory and other threads, on cuda_shim.h.
#include "ptx_runtime.h"

#include "cuda/platform.cuh"

namespace ptx {
namespace {

Index index_of(const uint3& index) { return {index.x, index.y, index.z}; }
Index index_of(const dim3& index) { return {index.x, index.y, index.z}; }

template <size_t bytes>
struct alignas(bytes) Access {
  unsigned char value[bytes];
};

template <size_t bytes>
Access<bytes>* access(uint64_t address) {
  if (address % bytes != 0) cuda_on_cpu::fail("misaligned access");
  return reinterpret_cast<Access<bytes>*>(address);
}

template <class T>
T* atomic_pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

uint16_t bits_of(__half value) { return __half_as_ushort(value); }
uint16_t bits_of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

}  // namespace

Index thread_index() { return index_of(threadIdx); }
Index block_size() { return index_of(blockDim); }
Index block_index() { return index_of(blockIdx); }
Index grid_size() { return index_of(gridDim); }

void fail(const char* what, int line) { cuda_on_cpu::fail(what, line); }

void check_block_size(uint32_t most) {
  if (cuda_on_cpu::active.threads() > most) cuda_on_cpu::fail("a block larger than __launch_bounds__ allows");
}

template <class T>
T load(uint64_t address) {
  return cuda_on_cpu::reinterpret<T>(*access<sizeof(T)>(address));
}

template <class T>
void store(uint64_t address, T value) {
  *access<sizeof(T)>(address) = cuda_on_cpu::reinterpret<Access<sizeof(T)>>(value);
}

template <class T, size_t count>
void load_vector(uint64_t address, T (&values)[count]) {
  const Access<sizeof(values)> loaded = *access<sizeof(values)>(address);
  std::memcpy(values, &loaded, sizeof(values));
}

template <class T, size_t count>
void store_vector(uint64_t address, const T (&values)[count]) {
  Access<sizeof(values)> stored;
  std::memcpy(&stored, values, sizeof(values));
  *access<sizeof(values)>(address) = stored;
}

template <class T>
T atomic_add(uint64_t address, T value) {
  return atomicAdd(atomic_pointer<T>(address), value);
}
template <class T>
T atomic_minimum(uint64_t address, T value) {
  return atomicMin(atomic_pointer<T>(address), value);
}
template <class T>
T atomic_maximum(uint64_t address, T value) {
  return atomicMax(atomic_pointer<T>(address), value);
}
template <class T>
T atomic_exchange(uint64_t address, T value) {
  return atomicExch(atomic_pointer<T>(address), value);
}
template <class T>
T atomic_bit_and(uint64_t address, T value) {
  return cuda_on_cpu::atomic(atomic_pointer<T>(address), [=](T old) { return old & value; });
}
template <class T>
T atomic_bit_or(uint64_t address, T value) {
  return cuda_on_cpu::atomic(atomic_pointer<T>(address), [=](T old) { return old | value; });
}
template <class T>
T atomic_compare_and_swap(uint64_t address, T expected, T value) {
  return atomicCAS(atomic_pointer<T>(address), expected, value);
}

void fence() { cuda_on_cpu::fence(); }
void barrier(int line) { cuda_on_cpu::barrier(line); }
uint32_t active_mask(int line) { return cuda_on_cpu::active_mask(line); }
uint32_t shuffle(uint32_t mask, uint32_t word, uint32_t lane, uint32_t clamp, int line) {
  if (clamp != 31) fail("only shuffles within the whole warp are modelled", line);
  return static_cast<uint32_t>(cuda_on_cpu::shuffle(mask, word, lane, line));
}

float from_f16(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
float from_bf16(uint16_t bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); }
uint16_t to_f16(float value) { return bits_of(__float2half_rn(value)); }
uint16_t to_bf16(float value) { return bits_of(__float2bfloat16_rn(value)); }
uint32_t to_f16x2(float high, float low) { return uint32_t{to_f16(high)} << 16 | to_f16(low); }
uint32_t to_bf16x2(float high, float low) { return uint32_t{to_bf16(high)} << 16 | to_bf16(low); }

uint64_t shared_window(const SharedArray* arrays, size_t count) {
  const SharedArray& last = arrays[count - 1];
  char* const window = static_cast<char*>(cuda_on_cpu::shared_array(arrays, last.offset + last.bytes));
#if defined(__SANITIZE_ADDRESS__)
  for (size_t i = 0; i + 1 < count; ++i) {
    const uint32_t end = arrays[i].offset + arrays[i].bytes;
    ASAN_POISON_MEMORY_REGION(window + end, arrays[i + 1].offset - end);
  }
#endif
  return reinterpret_cast<uint64_t>(window);
}

LocalArray::LocalArray(size_t bytes, size_t alignment)
    : address_(reinterpret_cast<uint64_t>(cuda_on_cpu::fresh_memory(bytes))) {
  if (address_ % alignment != 0) cuda_on_cpu::fail("local memory is not aligned");
}

LocalArray::~LocalArray() {
  const cuda_on_cpu::ForgetHistory forget;
  std::free(reinterpret_cast<void*>(address_));
}

// ---- the types that PTX has

#define POSENC_INSTANTIATE_MEMORY(T)                         \
  template T load<T>(uint64_t);                              \
  template void store<T>(uint64_t, T);                       \
  template void load_vector<T, 2>(uint64_t, T(&)[2]);        \
  template void load_vector<T, 4>(uint64_t, T(&)[4]);        \
  template void store_vector<T, 2>(uint64_t, const T(&)[2]); \
  template void store_vector<T, 4>(uint64_t, const T(&)[4]);

POSENC_INSTANTIATE_MEMORY(uint8_t)
POSENC_INSTANTIATE_MEMORY(int8_t)
POSENC_INSTANTIATE_MEMORY(uint16_t)
POSENC_INSTANTIATE_MEMORY(int16_t)
POSENC_INSTANTIATE_MEMORY(uint32_t)
POSENC_INSTANTIATE_MEMORY(int32_t)
POSENC_INSTANTIATE_MEMORY(uint64_t)
POSENC_INSTANTIATE_MEMORY(int64_t)
POSENC_INSTANTIATE_MEMORY(float)
POSENC_INSTANTIATE_MEMORY(double)

#define POSENC_INSTANTIATE_ATOMICS(T)         \
  template T atomic_add<T>(uint64_t, T);      \
  template T atomic_minimum<T>(uint64_t, T);  \
  template T atomic_maximum<T>(uint64_t, T);  \
  template T atomic_exchange<T>(uint64_t, T); \
  template T atomic_compare_and_swap<T>(uint64_t, T, T);

POSENC_INSTANTIATE_ATOMICS(uint32_t)
POSENC_INSTANTIATE_ATOMICS(int32_t)
POSENC_INSTANTIATE_ATOMICS(uint64_t)
POSENC_INSTANTIATE_ATOMICS(int64_t)
POSENC_INSTANTIATE_ATOMICS(float)
POSENC_INSTANTIATE_ATOMICS(double)

template uint32_t atomic_bit_and<uint32_t>(uint64_t, uint32_t);
template uint64_t atomic_bit_and<uint64_t>(uint64_t, uint64_t);
template uint32_t atomic_bit_or<uint32_t>(uint64_t, uint32_t);
template uint64_t atomic_bit_or<uint64_t>(uint64_t, uint64_t);

}  // namespace ptx
