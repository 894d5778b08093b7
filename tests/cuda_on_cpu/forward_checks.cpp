// The forward pass and the bounds check.
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>

#include "checks.h"
#include "cpu/dispatch.h"
#include "fake_cuda.h"
#include "frequency.h"

namespace checks {
namespace {

using namespace posenc;

// The layouts of the project, one that only the kernels know (interleaved, cosines first), and no encoding.
constexpr int64_t kCosineFirst = kLayoutCount, kNoEncoding = kLayoutCount + 1, kTestLayouts = kLayoutCount + 2;
constexpr int64_t kInterleaved = 0, kCosSin = 2;

Columns columns_of_case(int64_t layout, OddRule odd, int64_t width) {
  Columns columns;
  columns.width = width;
  if (layout == kNoEncoding) return columns;
  return columns_of(layout == kCosineFirst ? Layout{2, true} : kLayouts[layout], odd, width);
}

enum class Given { nothing, for_seq, for_tokens, for_rows };  // for_rows: added to the running index

enum class Number { integer, float32, float64 };

constexpr int64_t kWholeTable = INT64_MAX;

// One call, in the terms of its tensors.
struct ForwardCase {
  Dtype dtype = Dtype::float32;
  Source source = Source::gathered;
  int64_t layout = kInterleaved;
  OddRule odd = OddRule::sine;
  Divisor divisor = Divisor::d;
  Precision precision = Precision::exact;
  int64_t batch = 3, seq = 5, width = 16;
  bool sequence_first = false;
  Given given = Given::nothing;
  int64_t offset = 0;
  bool far_positions = true;  // some, among near ones
  bool int64_ids = true, int64_positions = true;
  Number positions = Number::integer;    // floating ones have fractions
  Number frequencies = Number::integer;  // those of a spec, or given ones
  int64_t rows = 11;
  int64_t first_row = 0, end_row = kWholeTable;  // those of a shard
  int64_t base_shift = 0, out_shift = 0;         // first element of the view
  int64_t base_gap = 0, out_gap = 0;             // elements between rows
  int64_t column_stride = 1;
  bool expanded_base = false;  // dense: one row for the whole batch
  bool any_base = false;       // base terms of any bits
  double token_scale = 22.62741699796952;
  AtPadding at_padding = AtPadding::embed;
  double encoding_scale = 1, scale_on_device = 1;
  uint32_t dropout_threshold = 0;
  int64_t dropout_column = 0;                              // the first one
  int64_t table_rows = 0, table_shift = 0, table_gap = 0;  // of a table of positions; no rows: none
  int64_t resident_threads = 4096;
  uint64_t seed = 1;

  int64_t tokens() const { return batch * seq; }
  bool is_shard() const { return end_row != kWholeTable; }
  std::string text() const;
};

std::string ForwardCase::text() const {
  const char* const sources[] = {"gathered", "dense", "none"};
  const std::pair<const char*, int64_t> numbers[] = {
      {"layout", layout},
      {"odd rule", static_cast<int64_t>(odd)},
      {"precision", static_cast<int64_t>(precision)},
      {"batch", batch},
      {"seq", seq},
      {"width", width},
      {"sequence first", sequence_first},
      {"given", static_cast<int64_t>(given)},
      {"offset", offset},
      {"int64 ids", int64_ids},
      {"int64 positions", int64_positions},
      {"number of positions", static_cast<int64_t>(positions)},
      {"number of frequencies", static_cast<int64_t>(frequencies)},
      {"base shift", base_shift},
      {"out shift", out_shift},
      {"base gap", base_gap},
      {"out gap", out_gap},
      {"first row", first_row},
      {"end row", end_row},
      {"column stride", column_stride},
      {"expanded base", expanded_base},
      {"any base", any_base},
      {"resident", resident_threads},
      {"at padding", static_cast<int64_t>(at_padding)},
      {"encoding scale in hundredths", static_cast<int64_t>(encoding_scale * 100)},
      {"on the device", static_cast<int64_t>(scale_on_device * 100)},
      {"dropout threshold", dropout_threshold},
      {"dropout column", dropout_column},
      {"rows of positions", table_rows},
      {"table shift", table_shift},
      {"table gap", table_gap},
      {"token scale in hundredths", static_cast<int64_t>(token_scale * 100)},
      {"seed", static_cast<int64_t>(seed)}};
  return std::string(name_of(dtype)) + " " + sources[static_cast<int>(source)] + text_of(numbers);
}

// Near positions, and those where one way of making an encoding gives way to another.
int64_t some_position(Random& random, bool is_int64, bool far) {
  const int64_t edges[] = {int64_t{1} << 18, int64_t{1} << 24, int64_t{1} << 31,
                           int64_t{1} << 32, int64_t{1} << 40, int64_t{1} << 62};
  int64_t position = random.below(5000);
  if (far && random.below(2) == 0) position = edges[random.below(is_int64 ? 6 : 2)] + random.below(9) - 4;
  if (far && random.below(40) == 0) position = is_int64 ? INT64_MAX : INT32_MAX;
  if (random.below(3) == 0) position = -position - random.below(2);
  return position;
}

// The tensors of a case, and the parameters that describe them but for `out`.
class ForwardTensors {
 public:
  explicit ForwardTensors(const ForwardCase& what)
      : case_(what),
        random_(what.seed),
        base_(what.dtype, what.base_shift + base_rows() * base_row() - (base_rows() > 0 ? what.base_gap : 0)),
        ids_(some_ids(), what.int64_ids),
        positions_(some_positions(), what.int64_positions),
        table_(what.dtype,
               what.table_rows > 0 ? what.table_shift + what.table_rows * table_row() - what.table_gap : 0) {
    if (what.any_base) base_.fill_with_any(random_);
    else base_.fill(random_);
    table_.fill(random_);
    set_encoding();
    params.tokens = {what.batch, what.seq, order(1)};
    params.dtype = what.dtype;
    params.source = what.source;
    params.token_scale = what.token_scale;
    if (what.source != Source::none) params.base = base_.at(what.base_shift);
    params.column_stride = what.column_stride;
    if (what.source == Source::gathered) {
      params.ids = ids_.view();
      params.rows = what.rows;
      if (what.is_shard()) params.first_row = what.first_row, params.end_row = what.end_row;
      params.row_stride = base_row();
    }
    if (what.source == Source::dense) params.base_strides = view_strides(base_row());
    if (what.expanded_base) params.base_strides = {0, base_row()};
    params.out_strides = view_strides(out_row());
    params.encoding.scale = what.encoding_scale;
    params.at_padding = what.at_padding;
    if (what.at_padding != AtPadding::embed) params.padding_idx = what.rows / 2;
    params.dropout.first_column = what.dropout_column;
    if (what.dropout_threshold == 0) return;
    *seed_.data() = static_cast<int64_t>(random_.bits());
    params.dropout.seed = seed_.data();
    params.dropout.threshold = what.dropout_threshold;
    params.dropout.factor = 65536.0 / (65536.0 - what.dropout_threshold);
  }

  Elements new_out() const {
    const int64_t count = case_.out_shift + case_.tokens() * out_row() - (case_.tokens() > 0 ? case_.out_gap : 0);
    return Elements(case_.dtype, count);
  }
  void set_ids(const std::vector<int64_t>& ids) {
    ids_ = IntegerTensor(ids, case_.int64_ids);
    params.ids = ids_.view();
  }
  void set_positions(const std::vector<int64_t>& positions) {
    positions_ = IntegerTensor(positions, case_.int64_positions);
    params.positions.given = positions_.view();
  }
  // The CPU's params have the whole factor of the encoding.
  ForwardParams on_device() {
    ForwardParams result = params;
    if (case_.scale_on_device == 1) return result;
    *float_scale_.data() = static_cast<float>(case_.scale_on_device);
    *double_scale_.data() = case_.scale_on_device;
    const void* number = double_scale_.data();
    if (case_.dtype != Dtype::float64) number = float_scale_.data();
    result.encoding.scale_on_device = number;
    return result;
  }
  // Of both signs and every size, or none where the case takes those of its spec.
  std::optional<GivenFrequencies> given_frequencies() {
    const int64_t pairs = params.encoding.columns.pairs();
    if (case_.frequencies == Number::integer || pairs == 0) return std::nullopt;
    float32_frequencies_ = Buffer<float>(pairs), float64_frequencies_ = Buffer<double>(pairs);
    for (int64_t k = 0; k < pairs; ++k) {
      double w = static_cast<double>(random_.below(1 << 20) - (1 << 19)) / (int64_t{1} << random_.below(40));
      if (random_.below(20) == 0) w = random_.below(2) == 0 ? 0 : NAN;
      if (random_.below(20) == 0) w *= 1e19;
      float32_frequencies_.data()[k] = static_cast<float>(w);
      float64_frequencies_.data()[k] = w;
    }
    const bool wide = case_.frequencies == Number::float64;
    const void* data = float64_frequencies_.data();
    if (!wide) data = float32_frequencies_.data();
    return GivenFrequencies{data, wide, pairs, case_.precision};
  }
  double whole_scale() const {
    const double number = case_.dtype == Dtype::float64
                              ? case_.scale_on_device
                              : static_cast<double>(static_cast<float>(case_.scale_on_device));
    return case_.encoding_scale * number;
  }
  int64_t out_row() const { return case_.width + case_.out_gap; }

  ForwardParams params;

 private:
  // Without the gap after the last column: views must not own it.
  int64_t base_row() const { return (case_.width - 1) * case_.column_stride + 1 + case_.base_gap; }
  int64_t table_row() const { return case_.width + case_.table_gap; }
  int64_t base_rows() const {
    if (case_.source == Source::none) return 0;
    // One row at the least: kernels may read it before they know that the id has none.
    if (case_.source == Source::gathered && case_.is_shard())
      return std::max<int64_t>(case_.end_row - case_.first_row, 1);
    return case_.source == Source::gathered ? case_.rows : case_.expanded_base ? case_.seq : case_.tokens();
  }

  TokenStrides order(int64_t row) const {
    return case_.sequence_first ? TokenStrides{row, case_.batch * row} : TokenStrides{case_.seq * row, row};
  }
  // The stride of an axis with one entry means nothing.
  TokenStrides view_strides(int64_t row) const {
    TokenStrides strides = order(row);
    if (case_.batch == 1) strides.batch = 12345;
    if (case_.seq == 1) strides.seq = 12345;
    return strides;
  }

  std::vector<int64_t> some_ids() {
    std::vector<int64_t> ids(case_.source == Source::gathered ? case_.tokens() : 0);
    for (int64_t& id : ids) id = random_.below(case_.rows);
    if (!ids.empty()) ids[0] = case_.rows - 1, ids[ids.size() / 2] = 0;  // the last row: past it, ASan sees
    return ids;
  }

  int64_t position_count() const {
    const int64_t counts[] = {0, case_.seq, case_.tokens(), case_.batch};
    return counts[static_cast<int>(case_.given)];
  }

  // With fractions of every size, and now and then what is no number.
  Floats some_floats(int64_t count) {
    float32_positions_ = Buffer<float>(count), float64_positions_ = Buffer<double>(count);
    const bool wide = case_.positions == Number::float64;
    for (int64_t i = 0; i < count; ++i) {
      const double whole = static_cast<double>(some_position(random_, wide, case_.far_positions));
      double number = whole + static_cast<double>(random_.below(1 << 30)) / (int64_t{1} << 30);
      if (random_.below(5) == 0) number /= static_cast<double>(int64_t{1} << random_.below(60));
      if (case_.far_positions && random_.below(15) == 0) number = random_.below(2) == 0 ? NAN : -INFINITY;
      float32_positions_.data()[i] = static_cast<float>(number);
      float64_positions_.data()[i] = number;
    }
    if (wide) return {float64_positions_.data(), true};
    return {float32_positions_.data(), false};
  }

  std::vector<int64_t> some_positions() {
    const int64_t count = position_count();
    std::vector<int64_t> positions(count);
    for (int64_t& position : positions)
      position = case_.table_rows > 0 ? random_.below(case_.table_rows - case_.seq)
                                      : some_position(random_, case_.int64_positions, case_.far_positions);
    return positions;
  }

  void set_encoding() {
    Encoding& encoding = params.encoding;
    encoding.columns = columns_of_case(case_.layout, case_.odd, case_.width);
    if (case_.table_rows > 0) encoding.table = {table_.at(case_.table_shift), case_.table_rows, table_row()};
    encoding.precision = case_.precision;
    const auto table =
        frequencies(10000.0, case_.divisor, frequency_width(case_.odd, case_.width), encoding.columns.pairs());
    for (int i = 0; i < 4; ++i) encoding.frequencies.turns[i] = copy(table->turns[i], words_[i]);
    encoding.frequencies.angular = copy(table->angular, angular_);
    Positions& positions = params.positions;
    positions.offset = case_.offset;
    positions.running = case_.given == Given::nothing || case_.given == Given::for_rows;
    if (case_.given == Given::nothing) return;
    if (case_.positions == Number::integer) positions.given = positions_.view();
    else positions.floats = some_floats(static_cast<int64_t>(position_count()));
    positions.strides = case_.given == Given::for_seq    ? TokenStrides{0, 1}
                        : case_.given == Given::for_rows ? TokenStrides{1, 0}
                                                         : order(1);
  }

  template <class T>
  static const T* copy(const std::vector<T>& from, Buffer<T>& to) {
    to = Buffer<T>(static_cast<int64_t>(from.size()));
    std::copy(from.begin(), from.end(), to.data());
    return to.data();
  }

  const ForwardCase case_;
  Random random_;
  Elements base_;
  IntegerTensor ids_, positions_;
  Elements table_;
  Buffer<uint32_t> words_[4] = {Buffer<uint32_t>(0), Buffer<uint32_t>(0), Buffer<uint32_t>(0), Buffer<uint32_t>(0)};
  Buffer<float> angular_{0};
  Buffer<float> float32_positions_{0}, float32_frequencies_{0};
  Buffer<double> float64_positions_{0}, float64_frequencies_{0};
  Buffer<int64_t> seed_{1};
  Buffer<float> float_scale_{1};
  Buffer<double> double_scale_{1};
};

void check_case(const ForwardCase& what) {
  ForwardTensors tensors(what);
  Elements expected = tensors.new_out(), got = tensors.new_out();
  ForwardParams params = tensors.params;
  params.out = expected.at(what.out_shift);
  params.encoding.scale = tensors.whole_scale();
  const auto given = tensors.given_frequencies();
  const int64_t words = given ? FrequencyMemory::bytes(given->pairs) / 4 : 0;
  Buffer<uint32_t> of_host(words), of_device(words);
  if (given) params.encoding.frequencies = cpu::convert(*given, of_host.data());
  if (what.tokens() > 0) cpu::forward(params, run_serially);
  params = tensors.on_device();
  params.out = got.at(what.out_shift);
  const Device device(what.resident_threads);
  if (given) params.encoding.frequencies = cuda::convert(*given, of_device.data(), device.launch);
  cuda::forward(params, device.launch);
  device.wait();
  const int64_t at = expected.first_difference(got);
  expect(at < 0, what.text() + ": element " + std::to_string(at) + " differs");
  expect(device.recorded_nothing(), what.text() + ": an error was recorded");
}

// ---- groups

constexpr Source kSources[] = {Source::gathered, Source::dense, Source::none};
constexpr Precision kBothPrecisions[] = {Precision::exact, Precision::reference};
constexpr Given kGiven[] = {Given::nothing, Given::for_seq, Given::for_tokens, Given::for_rows};

OddRule odd_rule(int64_t i) { return static_cast<OddRule>(i % kOddRules); }

// Every kernel: source, layout, precision and kind of position, where whole vectors fit and where they do not; with a
// token for each thread and with many; both widths of integers; all positions far.
void check_kernels(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const Source source : kSources)
      for (int64_t layout = 0; layout < kTestLayouts; ++layout)
        for (const Precision precision : kBothPrecisions)
          for (const Given given : kGiven)
            for (const int64_t width : {32, 35}) {
              ForwardCase what{dtype, source, layout};
              what.precision = precision;
              what.given = given;
              what.width = width;
              what.odd = odd_rule(static_cast<int64_t>(source) + layout);
              what.seed = static_cast<uint64_t>(width + layout);
              check_case(what);
              what.batch = 11, what.seq = 3;
              what.resident_threads = 1;
              what.int64_positions = false;
              check_case(what);
              if (options.few) continue;
              what.int64_ids = false, what.int64_positions = true;
              check_case(what);
              std::swap(what.batch, what.seq);
              what.offset = (int64_t{5} << 33) + 7;
              check_case(what);
            }
}

// Dropout, padding and a scale of the encoding, alone and together.
void check_general(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const Source source : kSources)
      for (int64_t layout = 0; layout < kTestLayouts; ++layout)
        for (const Given given : kGiven)
          for (const int64_t width : {64, 35})
            for (const int64_t part : {0, 1, 2, 3, 4, 5}) {
              if (options.few && part > 2) continue;
              ForwardCase what{dtype, source, layout};
              what.given = given;
              what.width = width;
              what.odd = odd_rule(layout);
              what.precision = kBothPrecisions[part % 2];
              what.seed = static_cast<uint64_t>(part + width);
              if (part % 3 != 1) what.dropout_threshold = part == 5 ? 65535 : 20000;
              if (part == 2) what.dropout_column = width == 35 ? 13 : 8 * 5000;
              if (part == 3) what.dropout_column = 4;
              if (part != 0) what.encoding_scale = 0.3;
              if (part > 2) what.scale_on_device = -1.7;
              if (source == Source::gathered) what.at_padding = static_cast<AtPadding>(part % kAtPaddings);
              if (part == 4) what.batch = 5, what.seq = 9, what.sequence_first = true, what.resident_threads = 1;
              check_case(what);
            }
}

// A table of positions, with all that a general call may have besides, where whole vectors fit and where they do not.
void check_tables(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const Source source : {Source::gathered, Source::dense})
      for (const Given given : kGiven)
        for (const int64_t width : {64, 35, 1040})
          for (const int64_t part : {0, 1, 2, 3, 4, 5, 6, 7}) {
            if (options.few && (part > 1 || width > 64)) continue;
            ForwardCase what{dtype, source, kNoEncoding};
            what.table_rows = 29;
            what.given = given;
            what.width = width;
            what.offset = part % 2 == 0 ? 0 : 3;
            if (given != Given::nothing) what.offset = 0;
            what.seed = static_cast<uint64_t>(part + width);
            what.int64_positions = part != 2;
            if (part % 3 == 1) what.dropout_threshold = 20000;
            if (part > 1) what.encoding_scale = 0.3;
            if (part > 3) what.scale_on_device = -1.7;
            if (part == 3) what.table_shift = 1;
            if (part == 4) what.table_gap = 3;
            if (part == 5) what.table_gap = 16 / element_size(dtype), what.table_shift = what.table_gap;
            if (part == 6) what.batch = 5, what.seq = 9, what.sequence_first = true, what.resident_threads = 1;
            if (part == 7) what.out_shift = 1;
            if (source == Source::gathered) what.at_padding = static_cast<AtPadding>(part % kAtPaddings);
            check_case(what);
          }
}

// Positions that are no integers and frequencies that are given, alone and together.
void check_numbers(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const Source source : kSources)
      for (const int64_t layout : {kInterleaved, kCosSin, kCosineFirst})
        for (const Given given : kGiven)
          for (const int64_t width : {32, 35})
            for (const int64_t part : {0, 1, 2, 3, 4, 5}) {
              if (options.few && (part > 1 || layout == kCosineFirst || given == Given::for_rows)) continue;
              ForwardCase what{dtype, source, layout};
              what.given = given;
              what.width = width;
              what.odd = odd_rule(layout + part);
              what.precision = kBothPrecisions[part % 2];
              what.positions = static_cast<Number>(part % 3);
              what.frequencies = static_cast<Number>((part + 1 + part / 3) % 3);
              what.seed = static_cast<uint64_t>(part + width);
              if (part == 3) what.encoding_scale = -0.4, what.dropout_threshold = 20000;
              if (part > 2) what.far_positions = false;
              if (part == 4) what.batch = 11, what.seq = 2, what.resident_threads = 1, what.offset = 3;
              check_case(what);
            }
}

void check_widths(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (int64_t layout = 0; layout < kTestLayouts; ++layout)
      for (int64_t odd = 0; odd < kOddRules; ++odd)
        for (const int64_t width : {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 24, 31, 40, 48, 63, 66, 127, 130}) {
          ForwardCase what{dtype, Source::gathered, layout, odd_rule(odd)};
          what.width = width;
          what.batch = 2, what.seq = 3;
          what.given = kGiven[width % 4];
          what.divisor = width % 2 == 0 ? Divisor::half_minus_1 : width % 3 == 0 ? Divisor::half : Divisor::d;
          what.precision = kBothPrecisions[width / 2 % 2];
          check_case(what);
        }
}

// More columns than a block has threads, in both kernels.
void check_wide_rows(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (int64_t layout = 0; layout < kTestLayouts; ++layout)
      for (const int64_t width : {1040, 4096 + 16, 777}) {
        if (options.few && (width > 1040 || layout == kNoEncoding)) continue;
        ForwardCase what{dtype, Source::gathered, layout};
        what.width = width;
        what.batch = 2, what.seq = 2;
        what.resident_threads = 512;
        check_case(what);
      }
}

// Batches around the rows in flight, lengths around the threads of a block and of the grid, on devices that hold few
// threads and many; both ways the batch may lie.
void check_shapes(const Options& options) {
  const int64_t sizes[] = {1, 2, 3, 4, 5, 8, 9, 13, 16, 33};
  Random random(7);
  for (const Dtype dtype : dtypes(options))
    for (const int64_t batch : sizes)
      for (const int64_t seq : sizes)
        for (const bool sequence_first : {false, true}) {
          if (options.few && batch * seq > 40) continue;
          ForwardCase what{dtype, kSources[random.below(3)], random.below(kTestLayouts)};
          what.seq = seq;
          what.width = random.below(2) == 0 ? 16 : 23;
          what.given = kGiven[random.below(4)];
          what.precision = kBothPrecisions[random.below(2)];
          const int64_t resident[] = {1, 64, 300, 2048, 1 << 20};
          what.resident_threads = resident[random.below(5)];
          what.seed = random.bits();
          check_case(what);
        }
}

// Positions on a grid that is capped: exactly one round of it, one more, one less.
void check_grid_strides(const Options& options) {
  for (const Source source : kSources)
    for (const Given given : kGiven)
      for (const int64_t width : {16, 19})
        for (const int64_t seq : {127, 128, 129, 255, 256, 257, 512}) {
          if (options.few && seq > 129) continue;
          ForwardCase what{Dtype::bfloat16, source};
          what.given = given;
          what.batch = 2, what.seq = seq, what.width = width;
          what.resident_threads = 1;
          check_case(what);
          what.resident_threads = 130;
          check_case(what);
        }
}

void check_positions(const Options& options) {
  const int64_t offsets[] = {0,
                             -3,
                             (int64_t{1} << 18) - 3,
                             -(int64_t{1} << 18) - 2,
                             (int64_t{1} << 24) - 2,
                             (int64_t{1} << 31) - 3,
                             -(int64_t{1} << 31) - 3,
                             (int64_t{1} << 32) - 3,
                             -(int64_t{1} << 32) - 2,
                             (int64_t{1} << 33) + 1,
                             -(int64_t{1} << 40),
                             (int64_t{1} << 62) + 12345,
                             INT64_MAX - 10,
                             INT64_MIN};
  for (const Dtype dtype : dtypes(options))
    for (const int64_t layout : {kInterleaved, kCosSin})
      for (const Precision precision : kBothPrecisions)
        for (const Given given : kGiven)
          for (const int64_t offset : offsets)
            for (const bool is_int64 : {true, false})
              for (const int64_t width : {32, 21}) {
                if (given == Given::nothing && !is_int64) continue;
                if (options.few && width == 21) continue;
                ForwardCase what{dtype, Source::none, layout};
                what.precision = precision;
                what.given = given;
                what.offset = offset;
                what.int64_positions = is_int64;
                what.far_positions = offset == 0;
                what.batch = 2, what.seq = what.far_positions ? 30 : 7;
                what.width = width;
                what.seed = static_cast<uint64_t>(offset) + 3;
                check_case(what);
              }
}

void check_views(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const Source source : kSources)
      for (const Given given : {Given::nothing, Given::for_tokens}) {
        ForwardCase plain{dtype, source};
        plain.given = given;
        plain.width = 32;
        const int64_t vector = 16 / element_size(dtype);
        const auto check_with = [&](const auto& change) {
          ForwardCase what = plain;
          change(what);
          check_case(what);
        };
        check_with([](ForwardCase& c) { c.base_shift = 1; });
        check_with([](ForwardCase& c) { c.out_shift = 1; });
        check_with([](ForwardCase& c) { c.base_gap = 1; });
        check_with([](ForwardCase& c) { c.out_gap = 3; });
        check_with([&](ForwardCase& c) { c.base_gap = vector, c.out_gap = 2 * vector; });
        check_with([&](ForwardCase& c) { c.base_shift = vector, c.out_shift = vector; });
        check_with([](ForwardCase& c) { c.column_stride = 2; });
        check_with([](ForwardCase& c) { c.column_stride = 2, c.width = 17, c.base_gap = 5; });
        check_with([](ForwardCase& c) { c.sequence_first = true, c.out_gap = 1; });
        check_with([](ForwardCase& c) { c.int64_ids = false, c.rows = 1; });
        check_with([](ForwardCase& c) { c.int64_ids = false, c.int64_positions = false; });
        if (source == Source::dense) check_with([](ForwardCase& c) { c.expanded_base = true; });
        if (source == Source::dense) check_with([](ForwardCase& c) { c.expanded_base = true, c.width = 15; });
      }
}

// Half of all significands times 1.5 lie just between two numbers of 16 bits; numbers that are none, and the largest.
void check_rounding(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const Source source : {Source::gathered, Source::dense})
      for (int64_t layout = 0; layout < kTestLayouts; ++layout)
        for (const int64_t width : {64, 65})
          for (const bool any_base : {false, true}) {
            ForwardCase what{dtype, source, layout};
            what.width = width;
            what.rows = 100;
            what.token_scale = 1.5;
            what.any_base = any_base;
            check_case(what);
          }
}

// A part of the rows: tokens of the others are constant, wherever they stand among the rows in flight.
void check_row_shards(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (int64_t layout = 0; layout < kTestLayouts; ++layout)
      for (const Given given : kGiven)
        for (const int64_t width : {32, 35})
          for (const auto& [first, end] : {std::pair{0, 4}, width == 32 ? std::pair{4, 11} : std::pair{5, 5}}) {
            ForwardCase what{dtype, Source::gathered, layout};
            what.given = given;
            what.width = width;
            what.first_row = first, what.end_row = end;
            what.precision = kBothPrecisions[(width + first) % 2];
            what.batch = 6, what.seq = 4;
            what.resident_threads = end % 2 == 0 ? 64 : 8192;
            what.seed = static_cast<uint64_t>(7 * layout + first);
            check_case(what);
          }
}

// Some columns of wider rows, block by block as csrc/torch does it: frequencies begin at any pair.
void check_column_shards(const Options& options) {
  constexpr std::pair<int64_t, int64_t> kSlices[] = {{0, 32},  {32, 33}, {6, 32}, {8, 48}, {1, 40},
                                                     {33, 31}, {7, 8},   {31, 1}, {0, 63}};  // first column, width
  for (const Dtype dtype : dtypes(options))
    for (const Source source : kSources)
      for (int64_t layout = 0; layout < kTestLayouts; ++layout)
        for (const auto& [first, slice] : kSlices)
          for (const int64_t width : {64, 65}) {
            if ((options.few || width == 65) && first % 8 != 0) continue;
            ForwardCase what{dtype, source, layout, odd_rule(first + layout)};
            what.width = width;
            what.given = kGiven[(first + slice) % 4];
            what.precision = kBothPrecisions[first % 2];
            what.seed = static_cast<uint64_t>(first);
            ForwardTensors tensors(what);
            Elements expected = tensors.new_out(), got = tensors.new_out();
            const Device device(what.resident_threads);
            const int64_t some = std::min(slice, width - first);
            visit_column_blocks(tensors.params.encoding.columns, first, some, [&](const ColumnBlock& block) {
              ForwardParams params = tensors.params;
              params.encoding.columns = block.columns;
              params.encoding.frequencies = params.encoding.frequencies.from(block.first_pair);
              if (source != Source::none)
                params.base = static_cast<const char*>(params.base) + block.first * element_size(dtype);
              params.out = expected.at(block.first);
              cpu::forward(params, run_serially);
              params.out = got.at(block.first);
              cuda::forward(params, device.launch);
              device.wait();
            });
            const int64_t at = expected.first_difference(got);
            expect(at < 0, what.text() + ", columns " + std::to_string(first) + " and on: element " +
                               std::to_string(at) + " differs");
          }
}

void check_small_calls(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const Source source : kSources)
      for (const int64_t width : {1, 8, 32}) {
        for (const auto& [batch, seq] : {std::pair{0, 4}, {4, 0}, {0, 0}, {1, 1}, {1, 3}, {3, 1}}) {
          ForwardCase what{dtype, source};
          what.batch = batch, what.seq = seq, what.width = width;
          what.given = kGiven[(batch + seq) % 4];
          check_case(what);
        }
      }
}

// Any of everything.
void check_mixtures(const Options& options) {
  Random random(2024);
  for (int i = 0; i < (options.few ? 80 : 500); ++i) {
    const auto one_in = [&](int64_t n) { return random.below(n) == 0; };
    ForwardCase what{dtypes(options)[random.below(options.two_types ? 2 : 4)], kSources[random.below(3)],
                     random.below(kTestLayouts), odd_rule(random.below(3))};
    what.divisor = static_cast<Divisor>(random.below(kDivisors));
    what.precision = kBothPrecisions[random.below(2)];
    what.given = kGiven[random.below(4)];
    what.seq = 1 + random.below(one_in(4) ? 40 : 7);
    what.sequence_first = one_in(3);
    what.batch = 1 + random.below(9);
    what.width = one_in(2) ? 16 * (1 + random.below(5)) : 1 + random.below(70);
    what.offset = one_in(2) ? some_position(random, true, true) : 0;
    what.int64_ids = one_in(2), what.int64_positions = one_in(2);
    what.rows = 1 + random.below(20);
    if (one_in(6)) what.base_shift = 1 + random.below(8);
    if (one_in(6)) what.out_shift = 1 + random.below(8);
    if (one_in(4)) what.base_gap = random.below(17);
    if (one_in(4)) what.out_gap = random.below(17);
    if (one_in(9)) what.column_stride = 2 + random.below(2);
    what.any_base = one_in(4);
    if (one_in(3)) what.token_scale = 1.5;
    if (one_in(4)) what.first_row = random.below(what.rows), what.end_row = what.first_row + random.below(9);
    what.resident_threads = int64_t{1} << random.below(14);
    what.seed = random.bits();
    if (options.few && what.tokens() * what.width > 600) continue;
    check_case(what);
  }
}

// ---- out-of-range ids

// Ids of which the low half may look right.
int64_t some_out_of_range(Random& random, int64_t rows, bool is_int64) {
  const int64_t candidates[] = {-1,        rows,     INT32_MAX, INT32_MIN, (int64_t{1} << 32) + 1, -(int64_t{1} << 32),
                                INT64_MIN, INT64_MAX};
  return candidates[random.below(is_int64 ? 8 : 4)];
}

std::vector<int64_t> some_places(Random& random, int64_t tokens) {
  std::vector<int64_t> places(1 + random.below(6));
  for (int64_t& place : places) place = random.below(tokens);
  return places;
}

void check_out_of_range_at(const ForwardCase& what, const std::vector<int64_t>& places) {
  ForwardTensors tensors(what);
  Random random(what.seed + 99);
  std::vector<int64_t> ids(what.tokens());
  for (int64_t& id : ids) id = random.below(what.rows);
  std::vector<int64_t> good = ids;
  for (const int64_t place : places) {
    ids[place] = place == places[0] ? what.rows : some_out_of_range(random, what.rows, what.int64_ids);
    good[place] = 0;
  }
  const int64_t first = *std::min_element(places.begin(), places.end());

  Elements expected = tensors.new_out(), got = tensors.new_out();
  tensors.set_ids(good);
  ForwardParams params = tensors.params;
  params.out = expected.at(what.out_shift);
  cpu::forward(params, run_serially);
  for (const int64_t place : places)  // back to the NaN that is in a new tensor
    std::memset(expected.at(what.out_shift + place * tensors.out_row()), 0xFF, what.width * element_size(what.dtype));

  tensors.set_ids(ids);
  params = tensors.params;
  params.out = got.at(what.out_shift);
  Device device(what.resident_threads, 5);
  cuda::forward(params, device.launch);
  device.wait();
  const int64_t at = expected.first_difference(got);
  expect(at < 0, what.text() + ", ids out of range: element " + std::to_string(at) + " differs");
  expect(device.recorded(first, ids[first], what.rows), what.text() + ": not the first out-of-range id was recorded");
  if (got.count() > 0 && at < 0) {
    bool all_nan = true;
    for (int64_t c = 0; c < what.width; ++c) all_nan &= got.is_nan(what.out_shift + first * tensors.out_row() + c);
    expect(all_nan, what.text() + ": the row of an out-of-range id is NaN");
  }

  // A later call leaves the record alone, an earlier one takes it.
  device.launch.errors.call = 6;
  cuda::forward(params, device.launch);
  device.wait();
  device.launch.errors.call = 5;
  expect(device.recorded(first, ids[first], what.rows), what.text() + ": a later call took the record");
  device.launch.errors.call = 4;
  cuda::forward(params, device.launch);
  device.wait();
  expect(device.recorded(first, ids[first], what.rows), what.text() + ": an earlier call left the record");
}

void check_out_of_range(const Options& options) {
  Random random(5);
  for (const Dtype dtype : dtypes(options))
    for (int64_t layout = 0; layout < kTestLayouts; ++layout)
      for (const Given given : kGiven)
        for (const int64_t width : {16, 9})
          for (const bool is_int64 : {true, false})
            for (const bool sequence_first : {false, true}) {
              if (options.few && (sequence_first || is_int64)) continue;
              ForwardCase what{dtype, Source::gathered, layout};
              what.given = given;
              what.width = width;
              what.int64_ids = is_int64;
              what.precision = kBothPrecisions[random.below(2)];
              what.batch = 6;
              what.sequence_first = sequence_first;
              what.seq = 7;
              what.resident_threads = random.below(2) == 0 ? 64 : 8192;
              what.seed = random.bits();
              if (random.below(2) == 0) what.first_row = 3, what.end_row = 7;
              check_out_of_range_at(what, some_places(random, what.tokens()));
            }
}

// An out-of-range id at every round of a long loop over the batch: each position has one, in a row of its own.
void check_out_of_range_in_loops(const Options& options) {
  constexpr int64_t kRows = 19;
  std::vector<int64_t> diagonal(kRows);
  for (int64_t i = 0; i < kRows; ++i) diagonal[i] = i * kRows + i;
  for (const Dtype dtype : dtypes(options))
    for (int64_t layout = 0; layout < kTestLayouts; ++layout)
      for (const Given given : {Given::nothing, Given::for_tokens})
        for (const Precision precision : kBothPrecisions)
          for (const bool is_int64 : {true, false}) {
            if (options.few && is_int64) continue;
            ForwardCase what{dtype, Source::gathered, layout};
            what.batch = what.seq = kRows;
            what.width = 32 / element_size(dtype);
            what.given = given;
            what.precision = precision;
            what.int64_ids = is_int64;
            what.far_positions = false;
            what.resident_threads = 1;
            what.seed = static_cast<uint64_t>(is_int64);
            check_out_of_range_at(what, diagonal);
          }
}

// One thread with rounds of several tokens: whole ones, the last one short by any number, the next one past the end of
// the ids, which end where their memory does. Along seq, with several rows of the batch one after the other, and along
// the batch. Then the same with an id out of range at each place of a round in turn.
void check_tokens_in_flight(const Options& options) {
  Random random(41);
  for (const Dtype dtype : dtypes(options))
    for (const Source source : {Source::gathered, Source::dense})
      for (int64_t layout = 0; layout < kTestLayouts; ++layout)
        for (const auto& [batch, seq] : {std::pair{1, 1},
                                         {1, 2},
                                         {1, 3},
                                         {1, 4},
                                         {1, 5},
                                         {1, 9},
                                         {1, 4099},
                                         {2, 6},
                                         {3, 7},
                                         {4, 3},
                                         {5, 2},
                                         {6, 2},
                                         {7, 1},
                                         {8, 3},
                                         {13, 2},
                                         {67, 9}})
          for (const bool is_int64 : {true, false}) {
            if (options.few && (batch * seq > 30 || layout == kCosineFirst)) continue;
            if (seq > 4000 && layout != kInterleaved) continue;
            ForwardCase what{dtype, source, layout};
            what.batch = batch, what.seq = seq;
            what.width = 32 / element_size(dtype);
            what.int64_ids = is_int64;
            what.given = is_int64 ? Given::nothing : Given::for_seq;
            what.offset = is_int64 ? -2 : 0;
            what.precision = kBothPrecisions[(batch + seq) % 2];
            what.sequence_first = layout == kCosSin;
            what.resident_threads = 1;
            what.any_base = seq == 9;
            what.out_gap = batch == 5 ? 16 : 0;
            what.seed = random.bits();
            check_case(what);
            if (source == Source::dense || seq > 4000) continue;
            what.first_row = 3, what.end_row = 8;
            check_case(what);
            what.first_row = 0, what.end_row = kWholeTable;
            for (int64_t place = 0; place < std::min<int64_t>(what.tokens(), 9); ++place)
              check_out_of_range_at(what, {place});
            check_out_of_range_at(what, {what.tokens() - 1});
          }
}

// Positions without a row in the table, perhaps of a token whose id is none either: that one is recorded.
void check_positions_out_of_range_at(const ForwardCase& what, const std::vector<int64_t>& places, bool ids_too) {
  ForwardTensors tensors(what);
  Random random(what.seed + 17);
  std::vector<int64_t> ids(what.tokens(), 2), positions(what.tokens()), good(what.tokens());
  for (int64_t& position : good) position = random.below(what.table_rows) - what.offset;
  positions = good;
  for (const int64_t place : places) {
    positions[place] = place == places[0] || what.offset != 0
                           ? what.table_rows - what.offset
                           : some_out_of_range(random, what.table_rows, what.int64_positions);
    if (ids_too) ids[place] = -7;
  }
  const int64_t first = *std::min_element(places.begin(), places.end());

  Elements expected = tensors.new_out(), got = tensors.new_out();
  tensors.set_ids(std::vector<int64_t>(what.tokens(), 2));
  tensors.set_positions(good);
  ForwardParams params = tensors.params;
  params.out = expected.at(0);
  cpu::forward(params, run_serially);
  for (const int64_t place : places)
    std::memset(expected.at(place * tensors.out_row()), 0xFF, what.width * element_size(what.dtype));

  tensors.set_ids(ids);
  tensors.set_positions(positions);
  params = tensors.params;
  params.out = got.at(0);
  const Device device(what.resident_threads, 5);
  cuda::forward(params, device.launch);
  device.wait();
  const int64_t at = expected.first_difference(got);
  expect(at < 0, what.text() + ", positions out of range: element " + std::to_string(at) + " differs");
  const auto recorded = [&](const Device& by) {
    const int64_t position = positions[first] + what.offset;
    return ids_too ? by.recorded(first, -7, what.rows)
                   : by.recorded(first, position, what.table_rows, cuda::IndexOf::positions);
  };
  expect(recorded(device), what.text() + ": not the first position out of range was recorded");
  if (what.source != Source::gathered) return;
  const Device search(what.resident_threads, 5);
  cuda::check_bounds(params, search.launch);
  search.wait();
  expect(recorded(search), what.text() + ": a search for positions out of range");
}

void check_positions_out_of_range(const Options& options) {
  Random random(12);
  for (const Dtype dtype : dtypes(options))
    for (const Source source : {Source::gathered, Source::dense})
      for (const int64_t width : {64, 35})
        for (const int64_t part : {0, 1, 2, 3}) {
          if (options.few && part > 1) continue;
          ForwardCase what{dtype, source, kNoEncoding};
          what.table_rows = 29;
          what.given = Given::for_tokens;
          what.offset = part < 2 ? 0 : 3 - 2 * part;
          what.int64_positions = width == 64;
          what.batch = 6, what.seq = 7;
          what.width = width;
          what.sequence_first = part % 2 == 1;
          what.resident_threads = part < 2 ? 64 : 8192;
          what.seed = random.bits();
          check_positions_out_of_range_at(what, some_places(random, what.tokens()),
                                          source == Source::gathered && part == 3);
        }
}

// The same where a block has threads along the columns alone, so that one thread has every token in turn: each place in
// flight, far positions before near ones.
void check_tokens_of_one_thread(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const int64_t layout : {kInterleaved, kCosSin})
      for (const auto& [batch, seq] : {std::pair{1, 9}, {2, 6}, {9, 1}, {7, 2}})
        for (const Given given : {Given::nothing, Given::for_seq}) {
          if (options.few && batch * seq > 9) continue;
          ForwardCase what{dtype, Source::gathered, layout};
          what.batch = batch, what.seq = seq;
          what.width = (layout == kCosSin ? 8192 : 4096) / element_size(dtype);
          what.given = given;
          what.resident_threads = 1;
          what.seed = static_cast<uint64_t>(seq);
          check_case(what);
          for (int64_t place = 0; place < what.tokens(); ++place) check_out_of_range_at(what, {place});
        }
}

void check_bounds(const Options& options) {
  Random random(11);
  for (const bool is_int64 : {true, false})
    for (const int64_t count : {0, 1, 255, 256, 257, 3000}) {
      if (options.few && count > 257) continue;
      for (const int64_t errors : {0, 1, 3}) {
        std::vector<int64_t> ids(count);
        for (int64_t& id : ids) id = random.below(40);
        int64_t first = count;
        for (int64_t i = 0; i < errors && count > 0; ++i) {
          const int64_t place = random.below(count);
          ids[place] = some_out_of_range(random, 40, is_int64);
          first = std::min(first, place);
        }
        const IntegerTensor tensor(ids, is_int64);
        const Device device(count % 2 == 0 ? 1 : 4096, 3);
        ForwardParams params;
        params.source = Source::gathered;
        params.ids = tensor.view();
        params.rows = 40;
        params.tokens = {1, count, {count, 1}};
        cuda::check_bounds(params, device.launch);
        device.wait();
        expect(first == count ? device.recorded_nothing() : device.recorded(first, ids[first], 40),
               "search among " + std::to_string(count) + " ids");
        // What the host then takes is what was found, once.
        cuda::OutOfRange taken;
        cuda::take_out_of_range(device.launch.errors.record, device.launch.errors.found, &taken, device.launch.stream);
        device.wait();
        const uint64_t key = device.launch.errors.call << cuda::kPlaceBits | static_cast<uint64_t>(first);
        expect(first == count ? taken.key == cuda::kNoKey : taken.key == key && taken.index == ids[first],
               "taking what a search among " + std::to_string(count) + " ids found");
        cuda::take_out_of_range(device.launch.errors.record, device.launch.errors.found, &taken, device.launch.stream);
        device.wait();
        expect(taken.key == cuda::kNoKey && device.recorded_nothing(), "taking it again");
      }
    }
}

// ---- far apart in memory

// The rows that a call reads or writes, one for each token, copied together and back.
void copy_rows(char* far, const std::vector<int64_t>& offsets, Elements& near, int64_t width, int64_t size, bool out) {
  for (size_t i = 0; i < offsets.size(); ++i) {
    void* const row = near.at(static_cast<int64_t>(i) * width);
    std::memcpy(out ? far + offsets[i] : row, out ? row : far + offsets[i], width * size);
  }
}

// Strides beyond 2^31 elements for both tensors, or rows of a table that lie as far apart as `row_bytes` says.
void check_far_case(Dtype dtype, Source source, int64_t width, int64_t row_bytes, bool seq_far) {
  const int64_t size = element_size(dtype), apart = (int64_t{1} << 31) + 16;
  const int64_t batch = 3, seq = 2;
  ForwardCase shape{dtype, source};
  shape.batch = batch, shape.seq = seq, shape.width = width;
  shape.rows = 3;
  ForwardTensors tensors(shape);
  ForwardParams params = tensors.params;
  params.out_strides = seq_far ? TokenStrides{width, apart} : TokenStrides{apart, width};
  params.base_strides = params.out_strides;
  if (source == Source::gathered) params.row_stride = row_bytes / size;

  const SparseMemory base(std::max(apart * size * 3, row_bytes * 3 + width * size)), out(apart * size * 3);
  std::vector<int64_t> places, base_places;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = 0; t < seq; ++t) places.push_back(params.out_strides.at(b, t) * size);
  for (int64_t row = 0; row < 3; ++row) base_places.push_back(row * row_bytes);
  const std::vector<int64_t>& read = source == Source::gathered ? base_places : places;

  Random random(17);
  Elements values(dtype, static_cast<int64_t>(read.size()) * width);
  values.fill(random);
  copy_rows(base.data(), read, values, width, size, true);
  params.base = base.data();
  params.out = out.data();
  Elements expected(dtype, batch * seq * width), got(dtype, batch * seq * width);
  cpu::forward(params, run_serially);
  copy_rows(out.data(), places, expected, width, size, false);
  madvise(out.data(), apart * size * 3, MADV_DONTNEED);
  const Device device(1024);
  cuda::forward(params, device.launch);
  device.wait();
  copy_rows(out.data(), places, got, width, size, false);
  expect(expected.first_difference(got) < 0, std::string(name_of(dtype)) + " width " + std::to_string(width) +
                                                 ", rows " + std::to_string(row_bytes) +
                                                 " bytes apart, tokens far apart");
}

void check_far_apart(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const int64_t width : {32, 33})
      for (const bool seq_far : {false, true}) {
        check_far_case(dtype, Source::dense, width, 0, seq_far);
        for (const int64_t row_bytes : {int64_t{1} << 32, int64_t{9} << 31})
          check_far_case(dtype, Source::gathered, width, row_bytes, seq_far);
      }
}

// More rows of the batch than an axis of the grid has blocks for. The first block of that axis also writes the last
// ones.
void check_long_batches(const Options& options) {
  const int64_t step = 65535 * 64, batch = step + 33, width = 2;
  const int64_t position = 3;
  for (const Dtype dtype : {Dtype::float32, options.two_types ? Dtype::bfloat16 : Dtype::float64}) {
    ForwardCase shape{dtype, Source::none};
    shape.batch = 2, shape.seq = 1, shape.width = width, shape.offset = position;
    ForwardTensors tensors(shape);
    ForwardParams params = tensors.params;
    Elements expected(dtype, 2 * width), got(dtype, batch * width);
    params.out = expected.at(0);
    params.out_strides = {width, width};
    cpu::forward(params, run_serially);
    params.tokens.batch = batch;
    params.out = got.at(0);
    fake_cuda::runs_block = [](const uint3& index, const dim3&) { return index.z == 0; };
    const Device device(int64_t{1} << 30);
    cuda::forward(params, device.launch);
    device.wait();
    fake_cuda::runs_block = nullptr;
    bool right = true;
    const size_t bytes = width * element_size(dtype);
    for (const int64_t row : {int64_t{0}, int64_t{63}, step, batch - 1})
      right &= std::memcmp(got.at(row * width), expected.at(0), bytes) == 0;
    expect(right, std::string(name_of(dtype)) + ", " + std::to_string(batch) + " rows of the batch");
  }
}

}  // namespace

void check_forward(const Options& options) {
  if (begin_group(options, "forward: numbers")) check_numbers(options);
  if (begin_group(options, "forward: kernels")) check_kernels(options);
  if (begin_group(options, "forward: general")) check_general(options);
  if (begin_group(options, "forward: tables")) check_tables(options);
  if (begin_group(options, "forward: widths")) check_widths(options);
  if (begin_group(options, "forward: wide rows")) check_wide_rows(options);
  if (begin_group(options, "forward: shapes")) check_shapes(options);
  if (begin_group(options, "forward: grid strides")) check_grid_strides(options);
  if (begin_group(options, "forward: positions")) check_positions(options);
  if (begin_group(options, "forward: views")) check_views(options);
  if (begin_group(options, "forward: rounding")) check_rounding(options);
  if (begin_group(options, "forward: row shards")) check_row_shards(options);
  if (begin_group(options, "forward: column shards")) check_column_shards(options);
  if (begin_group(options, "forward: small calls")) check_small_calls(options);
  if (begin_group(options, "forward: mixtures")) check_mixtures(options);
  if (begin_group(options, "forward: out of range")) check_out_of_range(options);
  if (begin_group(options, "forward: out of range in loops")) check_out_of_range_in_loops(options);
  if (begin_group(options, "forward: tokens in flight")) check_tokens_in_flight(options);
  if (begin_group(options, "forward: positions out of range")) check_positions_out_of_range(options);
  if (begin_group(options, "forward: tokens of one thread")) check_tokens_of_one_thread(options);
  if (begin_group(options, "bounds check")) check_bounds(options);
  if (!options.few && begin_group(options, "forward: far apart")) check_far_apart(options);
  if (!options.few && begin_group(options, "forward: long batches")) check_long_batches(options);
}

}  // namespace checks
