// Positions that are counted.
#include <algorithm>

#include "checks.h"

namespace checks {
namespace {

using namespace posenc;

// Integers of any type in a buffer of exactly the bytes that strides reach.
class Counted {
 public:
  Counted(IntegerType type, int64_t batch, int64_t seq, bool sequence_first, int64_t gap) : bytes_(0) {
    rows.type = type;
    rows.tokens.batch = batch;
    rows.tokens.seq = seq;
    rows.tokens.order = sequence_first ? TokenStrides{1, batch} : TokenStrides{seq, 1};
    rows.strides = {rows.tokens.order.batch * gap, rows.tokens.order.seq * gap};
    const int64_t size = type == IntegerType::int64 ? 8 : type == IntegerType::int32 ? 4 : 1;
    bytes_ = Buffer<unsigned char>(size * (rows.tokens.count() == 0 ? 0 : (rows.tokens.count() - 1) * gap + 1));
    rows.data = bytes_.data();
  }

  void set(int64_t b, int64_t t, int64_t value) {
    const int64_t at = rows.strides.at(b, t);
    if (rows.type == IntegerType::int64) reinterpret_cast<int64_t*>(bytes_.data())[at] = value;
    else if (rows.type == IntegerType::int32)
      reinterpret_cast<int32_t*>(bytes_.data())[at] = static_cast<int32_t>(value);
    else bytes_[at] = static_cast<unsigned char>(value);
  }

  CountedRows rows;

 private:
  Buffer<unsigned char> bytes_;
};

int64_t differences(const Buffer<int64_t>& a, const Buffer<int64_t>& b) {
  int64_t count = 0;
  for (int64_t i = 0; i < a.size(); ++i) count += a[i] != b[i];
  return count;
}

struct Shape {
  int64_t batch, seq;
  bool sequence_first;
  int64_t gap;
};

// Lengths around a thread's tokens, a tile and several of them; more rows than blocks.
std::vector<Shape> shapes(const Options& options) {
  std::vector<Shape> found = {{1, 1, false, 1}, {3, 7, false, 1}, {2, 9, true, 2}, {9, 8, false, 3}, {2, 300, true, 1}};
  if (!options.few)
    found.insert(found.end(), {{2, 2047, false, 1}, {3, 2048, false, 1}, {2, 2049, true, 1}, {1, 6200, false, 2}});
  return found;
}

void check_padding(const Options& options) {
  Random random(7);
  const cuda::Launch launch{nullptr, 2 * 256, {}};
  for (const Shape& shape : shapes(options)) {
    for (const IntegerType type : {IntegerType::int64, IntegerType::int32, IntegerType::boolean}) {
      for (int64_t kind = 0; kind < 6; ++kind) {
        Counted ids(type, shape.batch, shape.seq, shape.sequence_first, shape.gap);
        const bool real = kind == 4, pads = kind == 5;
        for (int64_t b = 0; b < shape.batch; ++b)
          for (int64_t t = 0; t < shape.seq; ++t) ids.set(b, t, real ? 0 : pads ? 1 : random.below(2));
        std::vector<int64_t> offsets(shape.batch);
        for (int64_t& offset : offsets) offset = random.below(1000) - 500;
        const IntegerTensor offsets_tensor(offsets, kind % 2 == 0);
        PaddingParams params;
        params.rows = ids.rows;
        params.padding_value = 1;
        params.start = kind == 3 ? INT64_MAX : 2;
        if (kind != 1) params.offsets = offsets_tensor.view();
        params.offset_stride = kind == 2 ? 0 : 1;
        params.count_on = kind % 2 == 1;
        params.padding_position = -3;
        Buffer<int64_t> want(shape.batch * shape.seq), got(shape.batch * shape.seq);
        params.rows.out = want.data();
        cpu::count_real_tokens(params, run_serially);
        params.rows.out = got.data();
        cuda::count_real_tokens(params, launch);
        expect(differences(want, got) == 0,
               text_of(std::vector<std::pair<const char*, int64_t>>{{"batch", shape.batch},
                                                                    {"length", shape.seq},
                                                                    {"sequence first", shape.sequence_first},
                                                                    {"type", static_cast<int64_t>(type)},
                                                                    {"kind", kind}}));
      }
    }
  }
}

void check_sequence_ids(const Options& options) {
  Random random(8);
  const cuda::Launch launch{nullptr, 2 * 256, {}};
  for (const Shape& shape : shapes(options)) {
    for (const IntegerType type : {IntegerType::int64, IntegerType::int32}) {
      for (const int64_t rarity : {1, 2, 50, 100000}) {
        Counted ids(type, shape.batch, shape.seq, shape.sequence_first, shape.gap);
        int64_t id = 0;
        for (int64_t b = 0; b < shape.batch; ++b)
          for (int64_t t = 0; t < shape.seq; ++t)
            ids.set(b, t, id += random.below(rarity) == 0 ? 1 - 2 * random.below(2) : 0);
        SequenceIdParams params;
        params.rows = ids.rows;
        params.start = 5;
        Buffer<int64_t> want(shape.batch * shape.seq), got(shape.batch * shape.seq);
        params.rows.out = want.data();
        cpu::count_in_sequences(params, run_serially);
        params.rows.out = got.data();
        cuda::count_in_sequences(params, launch);
        expect(differences(want, got) == 0,
               text_of(std::vector<std::pair<const char*, int64_t>>{{"batch", shape.batch},
                                                                    {"length", shape.seq},
                                                                    {"sequence first", shape.sequence_first},
                                                                    {"rarity", rarity}}));
      }
    }
  }
}

void check_sequence_starts(const Options&) {
  Random random(9);
  const cuda::Launch launch{nullptr, 2 * 256, {}};
  for (const int64_t sequences : {0, 1, 2, 7, 100}) {
    for (const int64_t longest : {1, 4, 60}) {
      for (const bool is_int64 : {false, true}) {
        std::vector<int64_t> starts = {0};
        for (int64_t i = 0; i < sequences; ++i) starts.push_back(starts.back() + random.below(longest + 1));
        const IntegerTensor tensor(starts, is_int64);
        SequenceStartParams params;
        params.starts = tensor.view();
        params.count = sequences + 1;
        params.total = starts.back() + random.below(3);
        params.start = 1;
        Buffer<int64_t> want(params.total), got(params.total);
        params.out = want.data();
        cpu::count_in_sequences(params, run_serially);
        params.out = got.data();
        cuda::count_in_sequences(params, launch);
        expect(differences(want, got) == 0,
               text_of(std::vector<std::pair<const char*, int64_t>>{
                   {"sequences", sequences}, {"longest", longest}, {"total", params.total}}));
      }
    }
  }
}

}  // namespace

void check_counted_positions(const Options& options) {
  if (begin_group(options, "positions: padding")) check_padding(options);
  if (begin_group(options, "positions: sequence ids")) check_sequence_ids(options);
  if (begin_group(options, "positions: sequence starts")) check_sequence_starts(options);
}

}  // namespace checks
