#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../token.h"
#include "partition.h"

#if defined(POSENC_X86_TARGETS)
#include <cpuid.h>
#endif

namespace posenc::cpu {
namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
};

#if defined(POSENC_X86_TARGETS)
// clang 14 has no __builtin_cpu_supports("f16c").
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

// Those that this machine can run, best first.
const std::vector<Isa>& isas() {
  static const std::vector<Isa> list = [] {
    std::vector<Isa> found;
#if defined(POSENC_X86_TARGETS)
    const bool v3 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && has_f16c();
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    if (v4 && __builtin_cpu_supports("avx512bf16")) found.push_back({"x86-64-v4+bf16", &kernels_x86_64_v4_bf16});
    if (v4) found.push_back({"x86-64-v4", &kernels_x86_64_v4});
    if (v3) found.push_back({"x86-64-v3", &kernels_x86_64_v3});
#endif
    found.push_back({"baseline", &kernels_baseline});
    return found;
  }();
  return list;
}

std::atomic<const Isa*>& active() {
  static std::atomic<const Isa*> isa{&isas().front()};
  return isa;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) names.emplace_back(isa.name);
  return names;
}

const char* active_isa() { return active().load(std::memory_order_relaxed)->name; }

bool force_isa(const std::string& name) {
  for (const Isa& isa : isas()) {
    if (name == isa.name) {
      active().store(&isa, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

int64_t find_out_of_range(const Integers& ids, int64_t count, int64_t rows) {
  const auto scan = [&](const auto* data) -> int64_t {
    constexpr int64_t kBlock = 4096;  // without an exit inside, so that the loop vectorises
    for (int64_t block = 0; block < count; block += kBlock) {
      const int64_t end = std::min(count, block + kBlock);
      bool found = false;
      for (int64_t i = block; i < end; ++i)
        found |= static_cast<uint64_t>(static_cast<int64_t>(data[i])) >= static_cast<uint64_t>(rows);
      for (int64_t i = block; found; ++i)
        if (data[i] < 0 || data[i] >= rows) return i;
    }
    return -1;
  };
  return ids.is_int64 ? scan(static_cast<const int64_t*>(ids.data)) : scan(static_cast<const int32_t*>(ids.data));
}

TokenPosition find_position_without_row(const ForwardParams& params) {
  TokenPosition first;
  const Tokens& tokens = params.tokens;
  const int64_t rows = params.positions.shared() ? std::min<int64_t>(tokens.batch, 1) : tokens.batch;
  for (int64_t b = 0; b < rows; ++b) {
    for (int64_t t = 0; t < tokens.seq; ++t) {
      const int64_t position = position_of(params, b, t).whole, number = tokens.order.at(b, t);
      if (has_row(params.encoding.table, position)) continue;
      if (first.number < 0 || number < first.number) first = {number, position};
      break;
    }
  }
  return first;
}

Frequencies convert(const GivenFrequencies& given, void* memory) {
  const FrequencyMemory to(memory, given.pairs);
  for (int64_t k = 0; k < to.stride; ++k) convert_frequency(given, k, to);
  Frequencies result = to.view();
  for (int64_t k = 0; k < given.pairs; ++k)
    result.largest = std::max(result.largest, std::abs(static_cast<float>(given[k])));  // not where it is NaN
  return result;
}

namespace {

// Tokens by blocks of positions, if that repays: if there are half as many positions as tokens at the most, as in a
// batch that is padded on the left, packed sequences, or rows at offsets that are near one another. Else none.
std::vector<GroupedToken> group_by_position(const ForwardParams& params) {
  const Tokens& tokens = params.tokens;
  const Positions& positions = params.positions;
  const int64_t count = tokens.count();
  const bool own = positions.given.data != nullptr || positions.floats.data != nullptr;
  if (!own || !params.encoding.columns.encoded || (positions.shared() && tokens.batch > 1)) return {};
  if (count < 8 || count * params.encoding.columns.width < kGrainElements || count > INT32_MAX) return {};

  // Positions get numbers in the order in which they are met; a hash table finds them again.
  constexpr uint32_t kNone = UINT32_MAX;
  int bits = 3;
  while (int64_t{1} << bits < count) ++bits;
  std::vector<uint32_t> slots(size_t{1} << bits, kNone);
  std::vector<Position> met;
  const auto is = [&](uint32_t n, const Position& p) {
    return met[n].whole == p.whole && met[n].fraction == p.fraction;
  };
  std::vector<GroupedToken> in_memory(count);
  uint32_t n = kNone;
  for (int64_t i = 0, b = 0, t = 0; i < count; ++i) {
    const Position position = position_of<true>(params, b, t);
    ++n;  // most positions follow the last token's
    if (n >= met.size() || !is(n, position)) {
      const uint64_t key = (static_cast<uint64_t>(position.whole) ^ position.fraction * 0xD1342543DE82EF95u);
      uint64_t slot = key * 0x9E3779B97F4A7C15u >> (64 - bits);
      while (slots[slot] != kNone && !is(slots[slot], position)) slot = (slot + 1) & (slots.size() - 1);
      if (slots[slot] == kNone) {
        if (static_cast<int64_t>(met.size()) == count / 2) return {};
        slots[slot] = static_cast<uint32_t>(met.size());
        met.push_back(position);
      }
      n = slots[slot];
    }
    in_memory[i] = {static_cast<uint32_t>(b), static_cast<uint32_t>(t), n};
    if (tokens.sequence_first()) {
      if (++b == tokens.batch) b = 0, ++t;
    } else if (++t == tokens.seq) {
      t = 0, ++b;
    }
  }

  const uint32_t block_size = static_cast<uint32_t>(positions_per_block(params.encoding));
  std::vector<uint32_t> begin(met.size() / block_size + 2);
  for (const GroupedToken& token : in_memory) ++begin[token.position / block_size + 1];
  for (size_t block = 1; block < begin.size(); ++block) begin[block] += begin[block - 1];
  std::vector<GroupedToken> grouped(count + 1);
  for (const GroupedToken& token : in_memory) grouped[begin[token.position / block_size]++] = token;
  return grouped;
}

}  // namespace

const Kernels& active_kernels() { return *active().load(std::memory_order_relaxed)->kernels; }

void forward(const ForwardParams& params, ParallelFor parallel_for) {
  const int64_t width = params.encoding.columns.width, tokens = params.tokens.count();
  if (tokens == 0) return;
  ForwardCall call{params, tokens * width * element_size(params.dtype) >= kStreamBytes};
  const std::vector<GroupedToken> grouped = group_by_position(params);
  if (!grouped.empty()) call.grouped = grouped.data();
  const int64_t grain = std::max<int64_t>(kGrainElements / width, 1);
  if (parallel_for(0, tokens, grain, active_kernels().forward, &call) != 0) throw_parallel_error();
}

}  // namespace posenc::cpu

const char* posenc_ext_active_isa() { return posenc::cpu::active_isa(); }
