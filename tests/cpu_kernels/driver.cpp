// The CPU half without torch: runs a fixed set of cases and prints a line for each, with a hash of the result's bytes.
// Any two builds must print the same, whatever the compiler, the instruction set and the architecture
// (.ci/cpu_kernels).
//
// Usage: driver [INSTRUCTION_SET]    (without: lists those that can run here)
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../csrc/cpu/dispatch.h"
#include "../../csrc/frequency.h"
#include "../../csrc/segments.h"

using namespace posenc;

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float64, Dtype::bfloat16, Dtype::float16};

uint64_t random_bits() {  // splitmix64
  static uint64_t state = 0;
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Numbers of every size up to 2^6, subnormal ones, zeros of both signs; no NaN and no infinity, whose bits
// architectures choose for themselves. Exponents are those of the type: the bits are put together.
std::vector<unsigned char> random_values(Dtype dtype, int64_t count) {
  const int bytes = static_cast<int>(element_size(dtype));
  const int mantissa = dtype == Dtype::float64 ? 52 : dtype == Dtype::float32 ? 23 : dtype == Dtype::bfloat16 ? 7 : 10;
  const uint64_t bias = (uint64_t{1} << (8 * bytes - mantissa - 2)) - 1;
  std::vector<unsigned char> values(count * bytes);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t drawn = random_bits();
    const uint64_t exponent = drawn % 16 == 0 ? 0 : bias + 6 - (drawn >> 4) % (drawn % 16 == 1 ? bias : 12);
    const uint64_t fraction = drawn % 64 == 0 ? 0 : random_bits() >> (64 - mantissa);
    const uint64_t bits = drawn >> 63 << (8 * bytes - 1) | exponent << mantissa | fraction;
    std::memcpy(values.data() + i * bytes, &bits, bytes);
  }
  return values;
}

int32_t in_three_parts(int64_t begin, int64_t end, int64_t, ParallelBody body, void* context) {
  const int64_t a = begin + (end - begin) / 3, b = begin + (end - begin) / 2;
  if (a > begin) body(begin, a, context);
  if (b > a) body(a, b, context);
  if (end > b) body(b, end, context);
  return 0;
}

uint64_t hash(const std::vector<unsigned char>& bytes) {  // FNV-1a
  uint64_t result = 0xCBF29CE484222325u;
  for (const unsigned char byte : bytes) result = (result ^ byte) * 0x100000001B3u;
  return result;
}

// ---- forward

struct ForwardCase {
  Dtype dtype;
  Source source;
  Divisor divisor;
  int layout;  // kLayoutCount: no encoding
  OddRule odd;
  Precision precision;
  int64_t width, batch, seq;
  int64_t offset;
  bool given;  // positions of each token, of both signs and every size up to 2^40
};

void run(const ForwardCase& c) {
  const int64_t tokens = c.batch * c.seq, rows = 23;
  ForwardParams params;
  params.tokens = {c.batch, c.seq, {c.seq, 1}};
  params.encoding.columns.width = c.width;
  if (c.layout < kLayoutCount) params.encoding.columns = columns_of(kLayouts[c.layout], c.odd, c.width);
  params.encoding.precision = c.precision;
  const auto table = frequencies(10000.0, c.divisor, frequency_width(c.odd, c.width), params.encoding.columns.pairs());
  params.encoding.frequencies = table->view();
  params.positions.offset = c.offset;
  std::vector<int64_t> positions(tokens), ids(tokens);
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t position = static_cast<int64_t>(random_bits() >> (24 + i * 7 % 40));
    positions[i] = i % 3 == 0 ? -position : position;
    ids[i] = static_cast<int64_t>(random_bits() % rows);
  }
  if (c.given) {
    params.positions.running = false;
    params.positions.given = {positions.data(), true};
    params.positions.strides = {c.seq, 1};
  }
  params.dtype = c.dtype;
  params.source = c.source;
  const auto base = random_values(c.dtype, (c.source == Source::gathered ? rows : tokens) * c.width);
  params.base = base.data();
  params.ids = {ids.data(), true};
  params.rows = rows;
  params.row_stride = c.width;
  params.base_strides = {c.seq * c.width, c.width};
  std::vector<unsigned char> out(tokens * c.width * element_size(c.dtype));
  params.out = out.data();
  params.out_strides = {c.seq * c.width, c.width};
  params.token_scale = 22.627416997969522;
  cpu::forward(params, in_three_parts);
  std::printf("forward dtype %d source %d divisor %d layout %d odd %d precision %d [%d, %d] x %d, %s %lld: %016llx\n",
              static_cast<int>(c.dtype), static_cast<int>(c.source), static_cast<int>(c.divisor), c.layout,
              static_cast<int>(c.odd), static_cast<int>(c.precision), static_cast<int>(c.batch),
              static_cast<int>(c.seq), static_cast<int>(c.width), c.given ? "positions and" : "offset",
              static_cast<long long>(c.offset), static_cast<unsigned long long>(hash(out)));
}

void run_forward() {
  constexpr int64_t kFar = (int64_t{1} << 40) - 3;
  for (const Dtype dtype : kDtypes)
    for (const Source source : {Source::gathered, Source::dense, Source::none})
      for (const Divisor divisor : {Divisor::d, Divisor::half_minus_1, Divisor::half})
        for (int layout = 0; layout <= kLayoutCount; ++layout)
          for (const OddRule odd : {OddRule::sine, OddRule::zero, OddRule::round_up})
            for (const Precision precision : {Precision::exact, Precision::reference})
              for (const int64_t width : {1, 37, 64}) {
                run({dtype, source, divisor, layout, odd, precision, width, 1, 9, 0, false});
                run({dtype, source, divisor, layout, odd, precision, width, 2, 3, kFar, false});
                run({dtype, source, divisor, layout, odd, precision, width, 3, 4, -7, true});
              }
  // Rows of several tiles, and outputs so large that stores bypass the cache.
  for (const Dtype dtype : kDtypes)
    for (int layout = 0; layout < kLayoutCount; ++layout) {
      run({dtype, Source::gathered, Divisor::d, layout, OddRule::sine, Precision::exact, 2063, 2, 3, 70, false});
      run({dtype, Source::dense, Divisor::d, layout, OddRule::sine, Precision::exact, 512, 1, 4096, 70, false});
    }
}

// ---- backward

void run_backward(Dtype dtype, int64_t width, int64_t count, int64_t rows, bool by_frequency, int64_t column_stride) {
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) id = static_cast<int64_t>(random_bits() % 4 == 0 ? 5 : random_bits() % rows);  // 5 is hot
  const auto grad = random_values(dtype, count * width * column_stride);
  const SortedSegments segments = sort_into_segments({{ids.data(), true}, count, rows, 3});
  std::vector<unsigned char> out(rows * width * element_size(dtype), 0xFF);
  BackwardParams params;
  params.segments = segments.view();
  params.dtype = dtype;
  params.grad = grad.data();
  params.token_stride = width * column_stride;
  params.column_stride = column_stride;
  params.width = width;
  params.rows = rows;
  params.scale_by_frequency = by_frequency;
  params.out = out.data();
  params.token_scale = 22.627416997969522;
  cpu::backward(params, in_three_parts);
  std::printf("backward dtype %d, %d tokens x %d into %d rows, by frequency %d, stride %d: %016llx\n",
              static_cast<int>(dtype), static_cast<int>(count), static_cast<int>(width), static_cast<int>(rows),
              by_frequency, static_cast<int>(column_stride), static_cast<unsigned long long>(hash(out)));
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    for (const auto& isa : cpu::available_isas()) std::printf("%s\n", isa.c_str());
    return 0;
  }
  if (!cpu::force_isa(arguments[1])) {
    std::fprintf(stderr, "%s: no instruction set of this machine and build\n", arguments[1]);
    return 1;
  }
  run_forward();
  for (const Dtype dtype : kDtypes)
    for (const int64_t width : {1, 37, 512})
      for (const int64_t column_stride : {1, 2})
        for (const bool by_frequency : {false, true}) {
          run_backward(dtype, width, 700, 40, by_frequency, column_stride);
          run_backward(dtype, width, 50, 3000, by_frequency, column_stride);
        }
  return 0;
}
