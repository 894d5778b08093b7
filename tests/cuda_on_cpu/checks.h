// What the checks of the real kernels share: how a failure is told, element types of the host, the CPU backend as the
// reference, and where a launch runs.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "cpu/dispatch.h"
#include "cuda/backend.h"

namespace checks {

// Which checks to run: a program for TSan must be content with few and small ones.
struct Options {
  bool two_types = false;  // fp32 and bf16 alone
  bool few = false;        // that, and no launch of more than a few blocks
  std::string only;        // of the groups of checks, those whose name begins so
};

void check_forward(const Options& options);
void check_backward(const Options& options);
void check_counted_positions(const Options& options);

// The numbers that describe a case, with their names.
std::string text_of(std::span<const std::pair<const char*, int64_t>> numbers);

// Counts a check, and says what was checked if it failed.
void expect(bool passed, const std::string& what);
int failed_checks();
int64_t run_checks();

// Begins a group of checks; false if it is not wanted.
bool begin_group(const Options& options, const std::string& name);

const char* name_of(posenc::Dtype dtype);

std::vector<posenc::Dtype> dtypes(const Options& options);

// A tensor's memory, exactly as many elements as asked for, all NaN.
class Elements {
 public:
  Elements(posenc::Dtype dtype, int64_t count) : dtype_(dtype), bytes_(count * posenc::element_size(dtype)) {}

  // Numbers of either sign around 1, all finite.
  void fill(Random& random);
  // Any bits: NaN, infinities, subnormal numbers.
  void fill_with_any(Random& random);
  void* at(int64_t element) { return bytes_.data() + element * posenc::element_size(dtype_); }
  int64_t count() const { return bytes_.size() / posenc::element_size(dtype_); }
  bool is_nan(int64_t element) const;
  // The first element that differs, where two NaN are equal; -1 if there is none.
  int64_t first_difference(const Elements& other) const;

 private:
  const unsigned char* byte(int64_t element) const { return bytes_.data() + element * posenc::element_size(dtype_); }

  posenc::Dtype dtype_;
  Buffer<unsigned char> bytes_;
};

// int32 or int64 numbers.
class IntegerTensor {
 public:
  IntegerTensor(const std::vector<int64_t>& values, bool is_int64);
  posenc::Integers view() const;

 private:
  bool is_int64_;
  Buffer<int32_t> int32_values_;
  Buffer<int64_t> int64_values_;
};

int32_t run_serially(int64_t begin, int64_t end, int64_t grain, posenc::ParallelBody body, void* context);

// A launch with its own record of out-of-range ids, on a stream that waits for no other, of a device that holds so many
// threads of any kernel.
struct Device final : posenc::cuda::Occupancy {
  Buffer<posenc::cuda::OutOfRange> record{1};
  Buffer<uint32_t> found{1};
  posenc::cuda::Launch launch;
  int64_t resident_threads;

  explicit Device(int64_t resident, uint64_t call = 1);
  Device(const Device&) = delete;
  int64_t resident_blocks(const void*, int threads) override { return resident_threads / threads; }

  // Nothing has run before, and nothing may be queued on another stream.
  void wait() const;
  // Whether exactly this was recorded.
  bool recorded(int64_t place, int64_t index, int64_t rows,
                posenc::cuda::IndexOf of = posenc::cuda::IndexOf::ids) const;
  bool recorded_nothing() const;
};

}  // namespace checks
