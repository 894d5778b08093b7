// Runs the real kernels, whatever they were compiled from, through their launchers, and compares every bit with the CPU
// backend.
//
//   checks [--two-types] [--few] [--stop] [--only GROUP]
#include "checks.h"

#include <cstring>

#include "fake_cuda.h"

namespace checks {
namespace {

bool stop_at_failure = false;
int failures = 0;
int64_t count_of_checks = 0;
std::string group;
int64_t group_checks = 0;

void end_group() {
  if (!group.empty()) std::printf("%-40s %6lld checks\n", group.c_str(), static_cast<long long>(group_checks));
  group_checks = 0;
}

uint16_t to_bfloat16(float value) {  // of finite numbers, by truncation
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

uint16_t to_float16(float value) {  // of numbers in its normal range, by truncation
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | (((bits & 0x7FFFFFFFu) - (112u << 23)) >> 13));
}

}  // namespace

void expect(bool passed, const std::string& what) {
  ++count_of_checks, ++group_checks;
  if (passed) return;
  if (++failures <= 20) std::printf("FAILED %s: %s\n", group.c_str(), what.c_str());
  if (stop_at_failure) std::exit(1);
}

std::string text_of(std::span<const std::pair<const char*, int64_t>> numbers) {
  std::string result;
  for (const auto& [name, value] : numbers) result += std::string(", ") + name + " " + std::to_string(value);
  return result;
}

int failed_checks() { return failures; }
int64_t run_checks() { return count_of_checks; }

bool begin_group(const Options& options, const std::string& name) {
  if (name.compare(0, options.only.size(), options.only) != 0) return false;
  end_group();
  group = name;
  return true;
}

const char* name_of(posenc::Dtype dtype) {
  const char* const names[] = {"fp32", "fp64", "bf16", "fp16"};
  return names[static_cast<int64_t>(dtype)];
}

std::vector<posenc::Dtype> dtypes(const Options& options) {
  using posenc::Dtype;
  if (options.two_types) return {Dtype::float32, Dtype::bfloat16};
  return {Dtype::float32, Dtype::bfloat16, Dtype::float64, Dtype::float16};
}

void Elements::fill(Random& random) {
  for (int64_t i = 0; i < count(); ++i) {
    const double value = (random.uniform() * 2 + 0.25) * (random.bits() & 1 ? 1 : -1);
    const float narrow = static_cast<float>(value);
    const uint16_t half = dtype_ == posenc::Dtype::bfloat16 ? to_bfloat16(narrow) : to_float16(narrow);
    const void* const from = dtype_ == posenc::Dtype::float64   ? static_cast<const void*>(&value)
                             : dtype_ == posenc::Dtype::float32 ? static_cast<const void*>(&narrow)
                                                                : &half;
    std::memcpy(at(i), from, posenc::element_size(dtype_));
  }
}

void Elements::fill_with_any(Random& random) {
  for (int64_t i = 0; i < count(); ++i) {
    const uint64_t bits = random.bits();
    std::memcpy(at(i), &bits, posenc::element_size(dtype_));
  }
}

bool Elements::is_nan(int64_t element) const {
  uint64_t bits = 0;
  std::memcpy(&bits, byte(element), posenc::element_size(dtype_));
  switch (dtype_) {
    case posenc::Dtype::float32: return (bits & 0x7FFFFFFFu) > 0x7F800000u;
    case posenc::Dtype::float64: return (bits & 0x7FFFFFFFFFFFFFFFu) > 0x7FF0000000000000u;
    case posenc::Dtype::bfloat16: return (bits & 0x7FFFu) > 0x7F80u;
    case posenc::Dtype::float16: return (bits & 0x7FFFu) > 0x7C00u;
  }
  return false;
}

int64_t Elements::first_difference(const Elements& other) const {
  for (int64_t i = 0; i < count(); ++i)
    if (std::memcmp(byte(i), other.byte(i), posenc::element_size(dtype_)) != 0 && !(is_nan(i) && other.is_nan(i)))
      return i;
  return -1;
}

IntegerTensor::IntegerTensor(const std::vector<int64_t>& values, bool is_int64)
    : is_int64_(is_int64),
      int32_values_(is_int64 ? 0 : static_cast<int64_t>(values.size())),
      int64_values_(is_int64 ? static_cast<int64_t>(values.size()) : 0) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (is_int64) int64_values_[i] = values[i];
    else int32_values_[i] = static_cast<int32_t>(values[i]);
  }
}

posenc::Integers IntegerTensor::view() const {
  return {is_int64_ ? static_cast<const void*>(int64_values_.data()) : int32_values_.data(), is_int64_};
}

int32_t run_serially(int64_t begin, int64_t end, int64_t, posenc::ParallelBody body, void* context) {
  body(begin, end, context);
  return 0;
}

Device::Device(int64_t resident, uint64_t call) : resident_threads(resident) {
  static const cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
    return made;
  }();
  launch.stream = stream;
  record[0] = {};
  found[0] = 0;
  launch.occupancy = this;
  launch.errors = {record.data(), found.data(), call};
}

void Device::wait() const {
  cudaStreamSynchronize(static_cast<cudaStream_t>(launch.stream));
  expect(fake_cuda::idle(), "nothing is queued on another stream");
}

bool Device::recorded(int64_t place, int64_t index, int64_t rows, posenc::cuda::IndexOf of) const {
  const posenc::cuda::OutOfRange& error = record[0];
  const uint64_t key = launch.errors.call << posenc::cuda::kPlaceBits | static_cast<uint64_t>(place);
  return found[0] == 1 && error.locked == 0 && error.first == key && error.key == key && error.index == index &&
         error.rows == rows && error.of == of;
}

bool Device::recorded_nothing() const {
  const posenc::cuda::OutOfRange& error = record[0];
  return found[0] == 0 && error.first == posenc::cuda::kNoKey && error.key == posenc::cuda::kNoKey && error.locked == 0;
}

}  // namespace checks

int main(int argc, char** argv) {
  checks::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--few") == 0) options.two_types = options.few = true;
    if (std::strcmp(argv[i], "--two-types") == 0) options.two_types = true;
    if (std::strcmp(argv[i], "--stop") == 0) checks::stop_at_failure = true;
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) options.only = argv[++i];
  }
  checks::check_forward(options);
  checks::check_backward(options);
  checks::check_counted_positions(options);
  checks::end_group();
  std::printf("%lld checks, %d failed\n", static_cast<long long>(checks::run_checks()), checks::failed_checks());
  return checks::failed_checks() == 0 && checks::run_checks() > 0 ? 0 : 1;
}
