// The weight gradient, dense and by segments.
#include <algorithm>
#include <functional>
#include <map>

#include "checks.h"
#include "fake_cuda.h"

// There if this program was linked with ASan.
extern "C" {
void __attribute__((weak)) __asan_poison_memory_region(const volatile void* begin, size_t bytes);
void __attribute__((weak)) __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
}

namespace checks {
namespace {

using namespace posenc;

struct BackwardCase {
  Dtype dtype = Dtype::float32;
  std::string pattern = "uniform";
  int64_t tokens = 50, rows = 12, width = 16;
  int64_t padding_idx = -1;
  bool scale_by_frequency = false;
  bool int64_ids = true;
  int64_t grad_shift = 0, grad_gap = 0, column_stride = 1, out_shift = 0;
  bool expanded_tokens = false;  // stride 0
  int64_t out_of_range = 0;      // at most so many ids
  int64_t resident_threads = 4096;
  uint64_t seed = 1;
  double dropout_p = 0;
  int64_t first_column = 0;

  std::string text() const;
};

std::string BackwardCase::text() const {
  const std::pair<const char*, int64_t> numbers[] = {{"tokens", tokens},
                                                     {"rows", rows},
                                                     {"width", width},
                                                     {"padding", padding_idx},
                                                     {"by frequency", scale_by_frequency},
                                                     {"int64 ids", int64_ids},
                                                     {"grad shift", grad_shift},
                                                     {"grad gap", grad_gap},
                                                     {"column stride", column_stride},
                                                     {"out shift", out_shift},
                                                     {"expanded", expanded_tokens},
                                                     {"out of range", out_of_range},
                                                     {"resident", resident_threads},
                                                     {"dropped in 1000", static_cast<int64_t>(dropout_p * 1000)},
                                                     {"first column", first_column},
                                                     {"seed", static_cast<int64_t>(seed)}};
  return std::string(name_of(dtype)) + " " + pattern + text_of(numbers);
}

// ---- ids

std::vector<int64_t> uniform_ids(const BackwardCase& what, Random& random) {
  std::vector<int64_t> ids(what.tokens);
  for (int64_t& id : ids) id = random.below(what.rows);
  return ids;
}

std::vector<int64_t> one_hot_ids(const BackwardCase& what, Random&) {
  return std::vector<int64_t>(what.tokens, what.rows - 1);
}

std::vector<int64_t> half_hot_ids(const BackwardCase& what, Random& random) {
  std::vector<int64_t> ids = uniform_ids(what, random);
  for (int64_t& id : ids)
    if (random.below(2) == 0) id = what.rows / 2;
  return ids;
}

// Segments of lengths around one, two and three chunks, in scattered order.
std::vector<int64_t> chunk_ids(const BackwardCase& what, Random& random) {
  const int64_t lengths[] = {63, 64, 65, 1, 127, 128, 129, 2, 191, 193, 3, 64};
  std::vector<int64_t> ids;
  for (int64_t row = 0; static_cast<int64_t>(ids.size()) < what.tokens; ++row)
    ids.insert(ids.end(), lengths[row % 12], row % what.rows);
  ids.resize(what.tokens);
  for (int64_t i = what.tokens - 1; i > 0; --i) std::swap(ids[i], ids[random.below(i + 1)]);
  return ids;
}

std::vector<int64_t> distinct_ids(const BackwardCase& what, Random&) {
  std::vector<int64_t> ids(what.tokens);
  for (int64_t i = 0; i < what.tokens; ++i) ids[i] = (i * 7) % what.rows;
  return ids;
}

using Pattern = std::vector<int64_t> (*)(const BackwardCase&, Random&);
const std::map<std::string, Pattern> kPatterns = {{"uniform", uniform_ids},
                                                  {"one hot", one_hot_ids},
                                                  {"half hot", half_hot_ids},
                                                  {"chunks", chunk_ids},
                                                  {"distinct", distinct_ids}};

// ---- one call

class BackwardTensors {
 public:
  explicit BackwardTensors(const BackwardCase& what)
      : case_(what),
        random_(what.seed),
        ids_(some_ids()),
        ids_tensor_(ids_, what.int64_ids),
        grad_(what.dtype, extent()) {
    grad_.fill(random_);
    tokens.ids = ids_tensor_.view();
    tokens.count = what.tokens;
    tokens.rows = what.rows;
    tokens.padding_idx = what.padding_idx;
    params.dtype = what.dtype;
    params.grad = grad_.at(what.grad_shift);
    params.token_stride = token_stride();
    params.column_stride = what.column_stride;
    params.width = what.width;
    params.rows = what.rows;
    params.scale_by_frequency = what.scale_by_frequency;
    params.token_scale = 5.656854249492381;
    if (what.dropout_p > 0) {
      seed_[0] = static_cast<int64_t>(0x0123456789ABCDEF * what.seed);
      const uint32_t threshold = static_cast<uint32_t>(what.dropout_p * 65536);
      params.dropout = {seed_.data(), threshold, 65536 / (65536.0 - threshold), what.first_column};
    }
    find_segments();
  }

  Elements new_out(int64_t rows) const { return Elements(case_.dtype, case_.out_shift + rows * case_.width); }
  int64_t segments() const { return static_cast<int64_t>(segment_rows.size()); }
  Segments reference(const std::vector<int64_t>& rows) const {
    return {segments(), order_.data(), start_.data(), rows.data()};
  }
  int64_t begin(int64_t segment) const { return start_[segment]; }
  int64_t length(int64_t segment) const { return start_[segment + 1] - start_[segment]; }
  int64_t first_out_of_range() const { return first_out_of_range_; }
  int64_t id(int64_t place) const { return ids_[place]; }

  GradientTokens tokens;
  BackwardParams params;
  std::vector<int64_t> segment_rows;

 private:
  int64_t token_stride() const {
    return case_.expanded_tokens ? 0 : (case_.width - 1) * case_.column_stride + 1 + case_.grad_gap;
  }
  int64_t extent() const {
    if (case_.tokens == 0) return case_.grad_shift;
    return case_.grad_shift + (case_.tokens - 1) * token_stride() + (case_.width - 1) * case_.column_stride + 1;
  }

  std::vector<int64_t> some_ids() {
    std::vector<int64_t> ids = kPatterns.at(case_.pattern)(case_, random_);
    const int64_t outside[] = {-1, case_.rows, INT32_MIN, INT32_MAX, (int64_t{1} << 32) + 2, INT64_MIN};
    for (int64_t i = 0; i < case_.out_of_range; ++i)
      ids[random_.below(case_.tokens)] = outside[random_.below(case_.int64_ids ? 6 : 4)];
    return ids;
  }

  bool in_range(int64_t id) const { return id >= 0 && id < case_.rows; }

  void find_segments() {
    for (int64_t token = 0; token < case_.tokens; ++token) {
      if (!in_range(ids_[token]) && first_out_of_range_ < 0) first_out_of_range_ = token;
      if (in_range(ids_[token]) && ids_[token] != case_.padding_idx) order_.push_back(token);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return ids_[a] < ids_[b]; });
    for (size_t i = 0; i < order_.size(); ++i) {
      if (i != 0 && ids_[order_[i]] == ids_[order_[i - 1]]) continue;
      start_.push_back(static_cast<int64_t>(i));
      segment_rows.push_back(ids_[order_[i]]);
    }
    start_.push_back(static_cast<int64_t>(order_.size()));
  }

  const BackwardCase case_;
  Random random_;
  std::vector<int64_t> ids_;
  IntegerTensor ids_tensor_;
  Elements grad_;
  Buffer<int64_t> seed_{1};
  std::vector<int64_t> order_, start_;
  int64_t first_out_of_range_ = -1;
};

// The scratch memory of a call. What lies between its parts is out of bounds, but between `begin` and `end`, which are
// cleared together.
class Scratch {
 public:
  Scratch(const BackwardTensors& tensors, bool sparse)
      : layout(tensors.tokens, tensors.params, sparse),
        partial_bytes_(tensors.params.width * (tensors.params.dtype == Dtype::float64 ? 8 : 4)),
        memory_(std::aligned_alloc(kAlignment, std::max(layout.bytes, kAlignment))) {
    // What is not cleared has other values each time, as counts and as places.
    static int made = 0;
    static constexpr int kFills[] = {0xFF, 0x01, 0x7F};
    fill_ = kFills[made++ % 3];
    std::memset(memory_, fill_, layout.bytes);
    layout.place(memory_);
    for (const auto& [begin, end] : gaps(parts(tensors, sparse)))
      if (__asan_poison_memory_region) __asan_poison_memory_region(begin, end - begin);
  }
  ~Scratch() {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(memory_, layout.bytes);
    std::free(memory_);
  }
  Scratch(const Scratch&) = delete;

  // Whether a partial sum was written.
  bool has_partial(int64_t number) const {
    const auto* const bytes = static_cast<const unsigned char*>(layout.partials) + number * partial_bytes_;
    return std::any_of(bytes, bytes + partial_bytes_, [&](unsigned char byte) { return byte != fill_; });
  }

  cuda::GradientScratch layout;

 private:
  using Part = std::pair<const char*, const char*>;  // begin, end
  static constexpr int64_t kAlignment = 256;         // of what torch allocates, and more

  std::vector<Part> parts(const BackwardTensors& tensors, bool sparse) const {
    const int64_t count = tensors.tokens.count, segments = sparse ? count : tensors.tokens.rows;
    std::vector<Part> result;
    const auto add = [&](const void* first, const void* last, int64_t bytes) {
      if (bytes > 0) result.emplace_back(static_cast<const char*>(first), static_cast<const char*>(last) + bytes);
    };
    for (const void* part : {static_cast<const void*>(layout.keys), static_cast<const void*>(layout.sorted_keys),
                             static_cast<const void*>(layout.tokens), static_cast<const void*>(layout.order)})
      add(part, part, 4 * count);
    add(layout.begin, layout.end, 4 * segments);
    if (sparse) add(layout.segment_counts, layout.segment_counts, 4 * count);
    add(layout.partials, layout.partials, (count / kSumChunk + 1) * partial_bytes_);
    add(layout.temporary, layout.temporary, static_cast<int64_t>(layout.temporary_bytes));
    return result;
  }

  // Also checks that the parts are aligned, in bounds and apart.
  std::vector<Part> gaps(std::vector<Part> parts) const {
    const char* const end = static_cast<const char*>(memory_) + layout.bytes;
    parts.emplace_back(end, end);
    std::sort(parts.begin(), parts.end());
    bool apart = parts[0].first == memory_;
    std::vector<Part> result;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      apart &= parts[i].second <= parts[i + 1].first && reinterpret_cast<uintptr_t>(parts[i].first) % 16 == 0;
      result.emplace_back(parts[i].second, parts[i + 1].first);
    }
    expect(apart, "the parts of the scratch memory are aligned and apart");
    return apart ? result : std::vector<Part>{};
  }

  int64_t partial_bytes_;
  int fill_ = 0;
  void* memory_;
};

// Sums of chunks are kept where a segment reads them, and nowhere else.
void expect_partials(const BackwardCase& what, const BackwardTensors& tensors, const Scratch& scratch) {
  std::vector<bool> read(what.tokens / kSumChunk + 1);
  for (int64_t s = 0; s < tensors.segments(); ++s)
    for (int64_t chunk = 1; chunk * kSumChunk < tensors.length(s); ++chunk)
      read[tensors.begin(s) / kSumChunk + chunk] = true;
  for (size_t n = 0; n < read.size(); ++n)
    expect(scratch.has_partial(static_cast<int64_t>(n)) == read[n], what.text() + ": partial " + std::to_string(n));
}

void expect_record(const BackwardCase& what, const BackwardTensors& tensors, const Device& device) {
  const int64_t first = tensors.first_out_of_range();
  expect(first < 0 ? device.recorded_nothing() : device.recorded(first, tensors.id(first), what.rows),
         what.text() + ": the record of out-of-range ids");
}

void check_dense(const BackwardCase& what) {
  BackwardTensors tensors(what);
  Elements expected = tensors.new_out(what.rows), got = tensors.new_out(what.rows);
  BackwardParams params = tensors.params;
  params.segments = tensors.reference(tensors.segment_rows);
  params.out = expected.at(what.out_shift);
  cpu::backward(params, run_serially);
  params.segments = {};
  params.out = got.at(what.out_shift);
  const Scratch scratch(tensors, false);
  const Device device(what.resident_threads, 9);
  cuda::backward(tensors.tokens, params, scratch.layout, device.launch);
  device.wait();
  const int64_t at = expected.first_difference(got);
  expect(at < 0, what.text() + ", dense: element " + std::to_string(at) + " differs");
  expect_partials(what, tensors, scratch);
  expect_record(what, tensors, device);
}

void check_sparse(const BackwardCase& what) {
  BackwardTensors tensors(what);
  const int64_t segments = tensors.segments();
  std::vector<int64_t> numbers(segments);
  for (int64_t i = 0; i < segments; ++i) numbers[i] = i;
  Elements expected = tensors.new_out(segments), got = tensors.new_out(segments);
  BackwardParams params = tensors.params;
  params.rows = segments;
  params.segments = tensors.reference(numbers);
  params.out = expected.at(what.out_shift);
  cpu::backward(params, run_serially);
  params.segments = {};
  params.out = got.at(what.out_shift);
  const Scratch scratch(tensors, true);
  const Device device(what.resident_threads, 9);
  cuda::number_segments(tensors.tokens, scratch.layout, device.launch);
  device.wait();
  const int64_t counted = what.tokens == 0 ? 0 : scratch.layout.segment_counts[what.tokens - 1];
  expect(counted == segments, what.text() + ", sparse: number of segments " + std::to_string(counted));
  if (counted != segments) return;
  Buffer<int64_t> rows(segments);
  cuda::backward_of_segments(tensors.tokens, params, scratch.layout, rows.data(), device.launch);
  device.wait();
  expect(std::equal(rows.data(), rows.data() + segments, tensors.segment_rows.begin()), what.text() + ", sparse: rows");
  const int64_t at = expected.first_difference(got);
  expect(at < 0, what.text() + ", sparse: element " + std::to_string(at) + " differs");
  expect_partials(what, tensors, scratch);
  expect_record(what, tensors, device);
}

void check_both(const BackwardCase& what) {
  check_dense(what);
  check_sparse(what);
}

// ---- groups

void check_patterns(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const auto& [pattern, make] : kPatterns)
      for (const int64_t tokens : {1, 2, 63, 64, 65, 66, 128, 129, 130, 300, 320, 576, 700})
        for (const int64_t width : {16, 5}) {
          if (options.few && (tokens > 130 || width == 5)) continue;
          BackwardCase what{dtype, pattern, tokens};
          what.width = width;
          what.rows = tokens % 2 == 0 ? 12 : 40;
          what.scale_by_frequency = tokens % 3 == 0;
          what.padding_idx = tokens % 4 == 1 ? what.rows / 2 : -1;
          what.resident_threads = tokens % 5 == 0 ? 1 : 2048;
          check_both(what);
        }
}

// Segments of one token and longer ones at every place among the heads in flight, in rounds that end short; one id for
// so many tokens that its partials come in rounds, whole and short.
void check_heads_in_flight(const Options& options) {
  for (const Dtype dtype : dtypes(options)) {
    for (int64_t tokens = 1; tokens <= (options.few ? 9 : 24); ++tokens)
      for (const int64_t rows : {2, 5, 9, 1000}) {
        BackwardCase what{dtype, "uniform", tokens};
        what.rows = rows;
        what.width = 16;
        what.scale_by_frequency = tokens % 2 == 0;
        what.resident_threads = tokens % 3 == 0 ? 1 : 4096;
        what.seed = static_cast<uint64_t>(tokens * 31 + rows);
        check_both(what);
      }
    if (options.few) continue;
    for (const int64_t tokens :
         {8 * 64, 8 * 64 + 1, 9 * 64, 9 * 64 + 1, 10 * 64 + 63, 17 * 64, 17 * 64 + 1, 40 * 64 + 5})
      for (const int64_t width : {16, 3}) {
        BackwardCase what{dtype, "one hot", tokens};
        what.width = width;
        check_both(what);
        what.pattern = "half hot";
        check_both(what);
      }
  }
}

void check_views(const Options& options) {
  for (const Dtype dtype : dtypes(options)) {
    const int64_t vector = 16 / element_size(dtype);
    BackwardCase plain{dtype, "chunks", 200};
    plain.width = 16;
    const auto check_with = [&](const auto& change) {
      BackwardCase what = plain;
      change(what);
      check_both(what);
    };
    check_with([](BackwardCase& c) { c.grad_shift = 1; });
    check_with([](BackwardCase& c) { c.out_shift = 1; });
    check_with([](BackwardCase& c) { c.grad_gap = 1; });
    check_with([&](BackwardCase& c) { c.grad_gap = vector, c.grad_shift = vector, c.out_shift = vector; });
    check_with([](BackwardCase& c) { c.column_stride = 2; });
    check_with([](BackwardCase& c) { c.column_stride = 0; });
    check_with([](BackwardCase& c) { c.expanded_tokens = true; });
    check_with([](BackwardCase& c) { c.expanded_tokens = true, c.column_stride = 0; });
    check_with([](BackwardCase& c) { c.expanded_tokens = true, c.width = 7; });
    check_with([](BackwardCase& c) { c.int64_ids = false; });
  }
}

void check_widths(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const int64_t width : {1, 2, 3, 8, 24, 31, 32, 40, 130, 300, 1040, 2080}) {
      if (options.few && width > 40) continue;
      BackwardCase what{dtype, "half hot", 140};
      what.width = width;
      what.rows = 5;
      what.resident_threads = width % 3 == 0 ? 600 : 4096;
      check_both(what);
    }
}

// Several blocks of rows and of chunks, of which TSan sees whether they keep to their own.
void check_several_blocks(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const bool one_hot : {false, true})
      for (const int64_t width : {33, 72}) {
        BackwardCase what{dtype, one_hot ? "one hot" : "uniform", 2700};
        what.rows = 20;
        what.width = width;
        what.grad_shift = 1;
        check_both(what);
      }
}

// Rows and tokens that fill the grid exactly, one less, one more, where it is capped.
void check_grid_strides(const Options& options) {
  for (const int64_t rows : {1, 127, 128, 129, 255, 256, 257, 513}) {
    if (options.few && rows > 129) continue;
    for (const std::string pattern : {"uniform", "distinct"})
      for (const int64_t resident : {1, 300}) {
        BackwardCase what{Dtype::bfloat16, pattern, rows};
        what.rows = rows;
        what.width = 8;
        what.resident_threads = resident;
        check_both(what);
      }
  }
  if (options.few) return;
  BackwardCase many_rounds{Dtype::float32, "uniform", 3000};
  many_rounds.rows = 1500;
  many_rounds.width = 4;
  many_rounds.resident_threads = 1;
  check_both(many_rounds);
  many_rounds.int64_ids = false;
  check_both(many_rounds);
}

// Vectors and single columns, shards that begin anywhere, segments of several chunks and single tokens.
void check_dropout(const Options& options) {
  for (const Dtype dtype : dtypes(options))
    for (const std::string pattern : {"uniform", "chunks", "distinct"})
      for (const int64_t width : {16, 24, 5})
        for (const int64_t first_column : {0, 8, 3}) {
          BackwardCase what{dtype, pattern, options.few ? 130 : 300};
          what.width = width;
          what.rows = pattern == "distinct" ? 311 : 7;
          what.dropout_p = width == 24 ? 0.9 : 0.3;
          what.first_column = first_column;
          what.scale_by_frequency = width == 24;
          what.padding_idx = width == 5 ? 3 : -1;
          what.resident_threads = first_column == 8 ? 1 : 2048;
          check_both(what);
          what.column_stride = 2;
          check_both(what);
        }
}

void check_out_of_range(const Options& options) {
  Random random(31);
  for (const Dtype dtype : dtypes(options))
    for (const auto& [pattern, make] : kPatterns)
      for (const bool is_int64 : {true, false}) {
        BackwardCase what{dtype, pattern, 150};
        what.int64_ids = is_int64;
        what.out_of_range = 1 + random.below(5);
        what.padding_idx = random.below(3) - 1;
        what.seed = random.bits();
        check_both(what);
      }
  BackwardCase all_outside;
  all_outside.tokens = 4;
  all_outside.out_of_range = 200;
  check_both(all_outside);
}

void check_small_calls(const Options& options) {
  for (const Dtype dtype : dtypes(options)) {
    BackwardCase empty{dtype};
    empty.tokens = 0;
    check_both(empty);
    BackwardCase all_padding{dtype, "one hot", 100};
    all_padding.padding_idx = all_padding.rows - 1;
    check_both(all_padding);
    BackwardCase one_row{dtype, "uniform", 70, 1};
    check_both(one_row);
    BackwardCase one_token{dtype, "uniform", 1, 1, 1};
    check_both(one_token);
  }
}

void check_mixtures(const Options& options) {
  Random random(99);
  for (int i = 0; i < (options.few ? 15 : 150); ++i) {
    const auto one_in = [&](int64_t n) { return random.below(n) == 0; };
    auto pattern = kPatterns.begin();
    std::advance(pattern, random.below(static_cast<int64_t>(kPatterns.size())));
    BackwardCase what{dtypes(options)[random.below(options.two_types ? 2 : 4)], pattern->first,
                      1 + random.below(options.few ? 140 : 500)};
    what.rows = 1 + random.below(one_in(3) ? 200 : 9);
    what.width = one_in(2) ? 8 * (1 + random.below(6)) : 1 + random.below(50);
    what.padding_idx = one_in(3) ? random.below(what.rows) : -1;
    what.scale_by_frequency = one_in(3);
    what.int64_ids = one_in(2);
    if (one_in(5)) what.grad_shift = 1 + random.below(8);
    if (one_in(5)) what.out_shift = 1 + random.below(8);
    if (one_in(4)) what.grad_gap = random.below(17);
    if (one_in(8)) what.column_stride = random.below(3);
    if (one_in(8)) what.expanded_tokens = true;
    if (one_in(6)) what.out_of_range = 1 + random.below(4);
    if (one_in(4)) what.dropout_p = 0.1, what.first_column = random.below(3) * 8;
    what.resident_threads = int64_t{1} << random.below(14);
    what.seed = random.bits();
    check_both(what);
  }
}

// The rows of a gradient lie far apart, and so do those of the result: of its many zero rows only the last are written.
void check_far_apart() {
  const int64_t width = 8192, rows = (int64_t{1} << 31) / width + 2, tokens = 3, apart = (int64_t{1} << 31) + 16;
  const SparseMemory grad((tokens - 1) * apart * 4 + width * 4), out(rows * width * 4);
  const std::vector<int64_t> ids = {rows - 1, 0, rows - 1};
  Random random(5);
  std::vector<float> expected(width);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t c = 0; c < width; ++c) {
      const float value = static_cast<float>(random.normal());
      reinterpret_cast<float*>(grad.data())[token * apart + c] = value;
      if (ids[token] == rows - 1) expected[c] = token == 0 ? value : (expected[c] + value) * 3;
    }
  const IntegerTensor tensor(ids, true);
  const GradientTokens given{tensor.view(), tokens, rows, -1};
  BackwardParams params;
  params.dtype = Dtype::float32;
  params.grad = grad.data();
  params.token_stride = apart;
  params.column_stride = 1;
  params.width = width;
  params.rows = rows;
  params.out = out.data();
  params.token_scale = 3;
  cuda::GradientScratch scratch(given, params, false);
  Buffer<char> memory(scratch.bytes + 256);
  scratch.place(memory.data() + 256 - reinterpret_cast<uintptr_t>(memory.data()) % 256);
  // As many blocks as there are rows.
  fake_cuda::runs_block = [](const uint3& index, const dim3& grid) { return grid.x < 1000 || index.x + 3 > grid.x; };
  const Device device(rows * width, 9);
  cuda::backward(given, params, scratch, device.launch);
  device.wait();
  fake_cuda::runs_block = nullptr;
  expect(std::memcmp(out.data() + (rows - 1) * width * 4, expected.data(), width * 4) == 0, "the last row");
}

}  // namespace

void check_backward(const Options& options) {
  if (begin_group(options, "backward: patterns")) check_patterns(options);
  if (begin_group(options, "backward: heads in flight")) check_heads_in_flight(options);
  if (begin_group(options, "backward: views")) check_views(options);
  if (begin_group(options, "backward: widths")) check_widths(options);
  if (begin_group(options, "backward: several blocks")) check_several_blocks(options);
  if (begin_group(options, "backward: grid strides")) check_grid_strides(options);
  if (begin_group(options, "backward: dropout")) check_dropout(options);
  if (begin_group(options, "backward: out of range")) check_out_of_range(options);
  if (begin_group(options, "backward: small calls")) check_small_calls(options);
  if (begin_group(options, "backward: mixtures")) check_mixtures(options);
  if (!options.few && begin_group(options, "backward: far apart")) check_far_apart();
}

}  // namespace checks
