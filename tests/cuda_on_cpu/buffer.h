// What the check programs share: memory of exactly the size asked for, so that ASan sees one element too far, and
// reproducible random numbers.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

// Filled with ones: NaN for every float type.
template <class T>
class Buffer {
 public:
  static_assert(std::is_trivially_copyable_v<T>);

  explicit Buffer(int64_t count) : count_(count), data_(static_cast<T*>(std::malloc(count * sizeof(T)))) {
    if (count > 0) std::memset(static_cast<void*>(data_), 0xFF, count * sizeof(T));
  }
  Buffer(Buffer&& other) : count_(std::exchange(other.count_, 0)), data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&& other) {
    std::swap(count_, other.count_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() { std::free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  int64_t count_;
  T* data_;
};

// Address space of which only what is touched costs memory.
class SparseMemory {
 public:
  explicit SparseMemory(int64_t bytes)
      : bytes_(bytes),
        data_(static_cast<char*>(
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (data_ == MAP_FAILED) throw std::runtime_error("no address space");
  }
  ~SparseMemory() { munmap(data_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  char* data() const { return data_; }

 private:
  int64_t bytes_;
  char* data_;
};

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(limit)); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal() {  // near enough: a sum of uniform numbers
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};
