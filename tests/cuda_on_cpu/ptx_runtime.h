// What translated PTX is made of (ptx_to_cpp.py). Memory accesses and everything that concerns other threads are calls
// into ptx_runtime.cpp: that one file is built with a sanitizer or without, and the translated code serves for both.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace ptx {

using int128_t = __int128;
using uint128_t = unsigned __int128;

// ---- ptx_runtime.cpp

struct Index {
  uint32_t x, y, z;
};

Index thread_index();
Index block_size();
Index block_index();
Index grid_size();

[[noreturn]] void fail(const char* what, int line);
void check_block_size(uint32_t most);

// At natural alignment, that of the whole vector included; anything else stops the program in every build.
template <class T>
T load(uint64_t address);
template <class T>
void store(uint64_t address, T value);
template <class T, size_t count>
void load_vector(uint64_t address, T (&values)[count]);
template <class T, size_t count>
void store_vector(uint64_t address, const T (&values)[count]);

template <class T>
T atomic_add(uint64_t address, T value);
template <class T>
T atomic_minimum(uint64_t address, T value);
template <class T>
T atomic_maximum(uint64_t address, T value);
template <class T>
T atomic_exchange(uint64_t address, T value);
template <class T>
T atomic_bit_and(uint64_t address, T value);
template <class T>
T atomic_bit_or(uint64_t address, T value);
template <class T>
T atomic_compare_and_swap(uint64_t address, T expected, T value);

void fence();
void barrier(int line);
uint32_t active_mask(int line);
uint32_t shuffle(uint32_t mask, uint32_t word, uint32_t lane, uint32_t clamp, int line);
float from_f16(uint16_t bits);
float from_bf16(uint16_t bits);
uint16_t to_f16(float value);
uint16_t to_bf16(float value);
uint32_t to_f16x2(float high, float low);
uint32_t to_bf16x2(float high, float low);

// An array of a kernel in the shared memory of its block.
struct SharedArray {
  uint32_t offset, bytes;
};

// Where shared address 0 lies; `arrays` tells the kernels apart, and what lies between arrays is out of bounds.
uint64_t shared_window(const SharedArray* arrays, size_t count);

// Local memory of one thread, on the heap, where ASan knows its bounds.
class LocalArray {
 public:
  LocalArray(size_t bytes, size_t alignment);
  ~LocalArray();
  LocalArray(const LocalArray&) = delete;
  LocalArray& operator=(const LocalArray&) = delete;
  uint64_t address() const { return address_; }

 private:
  uint64_t address_;
};

// ---- parameters

// A struct that is passed by value, in memory.
template <size_t size, size_t alignment>
struct alignas(alignment) Struct {
  unsigned char bytes[size];
};

template <class T>
uint64_t address_of(const T& parameter) {
  return reinterpret_cast<uint64_t>(&parameter);
}

// ---- what C++ has no operator for

// Shifts by the width and more leave nothing but the sign.
template <class T>
T shift_left(T value, uint32_t by) {
  return by < sizeof(T) * 8 ? static_cast<T>(value << by) : T{0};
}
template <class T>
T shift_right(T value, uint32_t by) {
  return static_cast<T>(value >> (by < sizeof(T) * 8 ? by : sizeof(T) * 8 - 1) >> (by < sizeof(T) * 8 ? 0 : 1));
}

inline uint32_t wrap_shift(uint32_t by) { return by & 31; }
inline uint32_t clamp_shift(uint32_t by) { return by < 32 ? by : 32; }
inline uint32_t funnel_left(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) << by >> 32);
}
inline uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> by);
}

// `count` ones from bit `at` on.
template <class T>
T bit_mask(uint32_t at, uint32_t count) {
  const T ones = count < sizeof(T) * 8 ? static_cast<T>((T{1} << count) - 1) : static_cast<T>(~T{0});
  return shift_left(ones, at);
}
template <class T>
T extract_bits(T value, uint32_t at, uint32_t count) {
  return shift_right(value, at & 255) & bit_mask<T>(0, count & 255);
}
template <class T>
T insert_bits(T bits, T into, uint32_t at, uint32_t count) {
  const T mask = bit_mask<T>(at & 255, count & 255);
  return (into & ~mask) | (shift_left(bits, at & 255) & mask);
}

inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> (4 * i) & 15;
    const uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (choice & 7))) & 0xFF;
    const bool copies_sign = (choice & 8) != 0;
    result |= (copies_sign ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
  }
  return result;
}

// What arithmetic returns: of NaN always the same one, where a CPU keeps bits of what it was given.
inline float result(float value) { return value == value ? value : __builtin_bit_cast(float, 0x7FFFFFFFu); }
inline double result(double value) { return value; }

inline uint32_t count_ones(uint64_t value) { return static_cast<uint32_t>(__builtin_popcountll(value)); }
template <class T>
uint32_t leading_zeros(T value) {
  return value == 0 ? sizeof(T) * 8 : static_cast<uint32_t>(__builtin_clzll(value)) - (64 - sizeof(T) * 8);
}

inline uint32_t reversed(uint32_t value) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= (value >> i & 1) << (31 - i);
  return result;
}
// How far the highest bit is from the top; of no bit, all ones.
inline uint32_t shift_to_top(uint32_t value) { return value == 0 ? ~uint32_t{0} : leading_zeros(value); }

template <class T>
T magnitude(T value) {
  using U = std::make_unsigned_t<T>;
  return value < 0 ? static_cast<T>(U{0} - static_cast<U>(value)) : value;
}

template <class T>
T minimum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
  return b < a ? b : a;
}
template <class T>
T maximum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a < b ? b : a;
}

// The device does not trap here, but what it returns is not defined.
template <class T>
void check_division(T a, T b) {
  if (b == 0) fail("division by zero", 0);
  if (std::is_signed_v<T> && b == static_cast<T>(-1) && a == std::numeric_limits<T>::min())
    fail("division overflows", 0);
}
template <class T>
T divide(T a, T b) {
  check_division(a, b);
  return static_cast<T>(a / b);
}
template <class T>
T remainder(T a, T b) {
  check_division(a, b);
  return static_cast<T>(a % b);
}

inline float nearbyint_of(float x) { return std::nearbyint(x); }
inline float trunc_of(float x) { return std::trunc(x); }
inline float floor_of(float x) { return std::floor(x); }
inline float ceil_of(float x) { return std::ceil(x); }
inline double nearbyint_of(double x) { return std::nearbyint(x); }
inline double trunc_of(double x) { return std::trunc(x); }
inline double floor_of(double x) { return std::floor(x); }
inline double ceil_of(double x) { return std::ceil(x); }

// A whole number, or too large for the type: then the nearest number it has. NaN is 0 in 32 bits, and the highest bit
// alone where 64 bits are on either side.
template <class T, class Number>
T to_integer(Number whole) {
  static_assert(sizeof(T) >= 4, "conversions to less than 32 bits are not modelled");
  if (std::isnan(whole))
    return sizeof(T) == 8 || sizeof(Number) == 8 ? static_cast<T>(uint64_t{1} << (sizeof(T) * 8 - 1)) : T{0};
  const Number limit = std::ldexp(Number{1}, std::numeric_limits<T>::digits);
  if (whole >= limit) return std::numeric_limits<T>::max();
  if (whole < (std::is_signed_v<T> ? -limit : Number{0})) return std::numeric_limits<T>::min();
  return static_cast<T>(whole);
}

}  // namespace ptx
