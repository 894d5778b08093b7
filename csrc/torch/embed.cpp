// The forward ops. A gathered, a dense and no base term share one function, from the arguments to the kernel.

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "../frequency.h"
#include "../spec.h"
#include "cuda_call.h"
#include "tensors.h"

namespace posenc {
namespace {

// The arguments of a call, under their names in the schemas.
struct EmbedArgs {
  const char* op;
  Spec spec;
  const Tensor* positions;
  int64_t offset = 0;
  const Tensor* out = nullptr;
  // A gathered base term.
  const Tensor *weight = nullptr, *input = nullptr;
  double token_scale = 1.0;  // of a dense one too
  // A dense one.
  const Tensor* x = nullptr;
  // Of the whole, where weight or x is a shard of it; negative: it is the whole. Of the encoding alone the width.
  int64_t d_model = -1;
  ScalarType dtype = ScalarType::Float;
  int64_t first_column = 0;
  int64_t first_row = 0, total_rows = -1;  // likewise
  // What only the general ops take.
  int64_t padding_idx = -1, at_padding = 0;
  double encoding_scale = 1;
  const Tensor* encoding_scale_tensor = nullptr;
  const Tensor* frequencies = nullptr;
  double dropout_p = 0;
  const Tensor* seed = nullptr;
  const Tensor* position_table = nullptr;
};

const Tensor* given(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// `out` must be what a kernel can write as it is.
void check_out(const Tensor& out, const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like,
               const char* like_name, const char* op) {
  const IntHeaderOnlyArrayRef required(sizes.data(), sizes.size());
  const auto got = out.sizes(), strides = out.strides();
  POSENC_CHECK(out.scalar_type() == type, op, "out must have dtype ", text(type), ", got ", text(out.scalar_type()));
  check_same_device(out, "out", like, like_name, op);
  POSENC_CHECK(equal(got, required), op, "out must have shape ", text(required), ", got ", text(got));
  POSENC_CHECK(column_stride(out) == 1, op,
               "out must have contiguous columns (stride 1 in its last axis), got strides ", text(strides));
  check_storage(out, op, "out");
  POSENC_CHECK(!overlaps_itself(out), op, "out must not overlap itself, got shape ", text(got), " with strides ",
               text(strides));
}

// What is done at padding and by dropout, checked.
void set_general(ForwardParams& params, const EmbedArgs& args, const Tensor& like, const char* like_name) {
  const char* op = args.op;
  POSENC_CHECK(args.at_padding >= 0 && args.at_padding < kAtPaddings, op, "at_padding must lie in [0, ", kAtPaddings,
               "), got ", args.at_padding);
  params.at_padding = static_cast<AtPadding>(args.at_padding);
  if (params.at_padding != AtPadding::embed) params.padding_idx = args.padding_idx;
  params.encoding.scale = args.encoding_scale;
  if (args.encoding_scale_tensor != nullptr) {
    const Tensor& scale = *args.encoding_scale_tensor;
    check_number(scale, "encoding_scale_tensor", like, like_name, op);
    const bool fp64 = params.dtype == Dtype::float64;
    POSENC_CHECK(scale.scalar_type() == (fp64 ? ScalarType::Double : ScalarType::Float), op,
                 "encoding_scale_tensor must have dtype ", fp64 ? "float64" : "float32", ", got ",
                 text(scale.scalar_type()));
    const void* number = scale.const_data_ptr();
    if (!like.is_cpu()) params.encoding.scale_on_device = number;
    else params.encoding.scale *= fp64 ? *static_cast<const double*>(number) : *static_cast<const float*>(number);
  }
  params.dropout = dropout_of(args.dropout_p, args.seed, like, like_name, op);
}

// The table, whose columns are then contiguous.
Tensor set_position_table(ForwardParams& params, const EmbedArgs& args, const Tensor& like, const char* like_name,
                          int64_t width) {
  const char* op = args.op;
  Tensor table = *args.position_table;
  check_defined(table, op, "position_table");
  POSENC_CHECK(!args.spec.encoded, op, "flags must say that there are no sinusoids where position_table is given");
  POSENC_CHECK(table.scalar_type() == like.scalar_type(), op, "position_table must have the dtype of ", like_name, " (",
               text(like.scalar_type()), "), got ", text(table.scalar_type()));
  check_same_device(table, "position_table", like, like_name, op);
  POSENC_CHECK(table.dim() == 2 && table.size(1) == width, op, "position_table must have shape [max_len, ", width,
               "], got ", text(table.sizes()));
  check_storage(table, op, "position_table");
  POSENC_CHECK(!args.positions || is_integer(*args.positions), op,
               "positions must have dtype int64 or int32 where position_table is given, got ",
               text(args.positions->scalar_type()));
  // A sum of offset, index and position that wraps at 64 bits then never gets to a row.
  constexpr int64_t kFar = int64_t{1} << 62;
  POSENC_CHECK(-kFar < args.offset && args.offset < kFar, op,
               "offset must lie between -2**62 and 2**62 where position_table is given, got ", args.offset);
  if (column_stride(table) != 1) table = contiguous_copy(table);
  params.encoding.table = {table.const_data_ptr(), table.size(0), table.stride(0)};
  return table;
}

// On a GPU the kernels check the range. A table without rows may have no memory, so it is refused here.
void check_positions_in_table(const ForwardParams& params, IntHeaderOnlyArrayRef token_sizes, bool on_cpu,
                              const char* op) {
  const int64_t rows = params.encoding.table.rows, count = params.tokens.count();
  if (count == 0) return;
  const auto refuse = [&](const auto&... got) {
    throw std::out_of_range(
        message(op, "positions must lie in [0, ", rows, "), the rows of position_table, got ", got...));
  };
  if (rows == 0) refuse(count, " positions");
  if (!on_cpu) return;
  const cpu::TokenPosition found = cpu::find_position_without_row(params);
  if (found.number >= 0) refuse(found.position, " at token", index_text(token_sizes, found.number));
}

// The frequencies of a call that gives them, checked. `given` becomes a copy where it is not contiguous.
GivenFrequencies frequencies_of(Tensor& given, const Columns& columns, Precision precision, const Tensor& like,
                                const char* like_name, const char* op) {
  check_defined(given, op, "frequencies");
  check_same_device(given, "frequencies", like, like_name, op);
  POSENC_CHECK(is_float(given), op, "frequencies must have dtype float32 or float64, got ", text(given.scalar_type()));
  POSENC_CHECK(columns.encoded, op, "frequencies need an encoding, got flags without one");
  const int64_t pairs = columns.pairs();
  POSENC_CHECK(given.dim() == 1 && given.size(0) == pairs, op, "frequencies must have shape [", pairs,
               "], one for each pair of columns, got ", text(given.sizes()));
  check_storage(given, op, "frequencies");
  if (!given.is_contiguous()) given = contiguous_copy(given);
  return {given.const_data_ptr(), given.scalar_type() == ScalarType::Double, pairs, precision};
}

// Checks everything before anything is written. Returns `out` or a new tensor; nothing where it only checks.
std::optional<Tensor> run(const EmbedArgs& args, bool only_check = false) {
  const char* op = args.op;
  const bool sequence_first = args.spec.sequence_first;
  ForwardParams params;
  params.source = args.weight ? Source::gathered : args.x ? Source::dense : Source::none;
  params.token_scale = args.token_scale;

  // What has the device, the dtype and the width of the output.
  const Tensor& like = args.weight ? *args.weight : args.x ? *args.x : *args.positions;
  const char* like_name = args.weight ? "weight" : args.x ? "x" : "positions";
  check_defined(like, op, like_name);
  if (args.input) check_defined(*args.input, op, "input");
  if (args.out) check_defined(*args.out, op, "out");
  const ScalarType type = params.source == Source::none ? args.dtype : like.scalar_type();
  params.dtype = dtype_of(type, op, params.source != Source::none ? like_name : args.out ? "out" : "dtype");
  int64_t width = args.d_model;
  auto token_sizes = like.sizes();
  if (args.weight) {
    POSENC_CHECK(like.dim() == 2, op, "weight must have 2 dimensions [vocab_size, d_model], got shape ",
                 text(token_sizes));
    check_same_device(*args.input, "input", like, like_name, op);
    width = token_sizes[1];
    token_sizes = args.input->sizes();
  } else if (args.x) {
    POSENC_CHECK(like.dim() >= 1, op, "x must have at least 1 dimension [..., d_model], got a scalar");
    width = token_sizes[token_sizes.size() - 1];
    token_sizes = {token_sizes.data(), token_sizes.size() - 1};
  }
  const int64_t d_model = args.d_model < 0 ? width : args.d_model;
  check_width(d_model, op);
  check_part(op, "first_column", args.first_column, width, "d_model", d_model);
  if (params.source != Source::none) check_storage(like, op, like_name);
  const size_t axes = token_sizes.size();
  params.tokens = tokens_of(token_sizes, sequence_first);

  const Columns columns = args.spec.columns(d_model);
  params.encoding.precision = args.spec.precision;
  set_general(params, args, like, like_name);
  std::optional<Tensor> own_frequencies;
  GivenFrequencies given_frequencies;
  std::shared_ptr<const FrequencyTable> table;
  if (args.frequencies) {
    own_frequencies = *args.frequencies;
    given_frequencies = frequencies_of(*own_frequencies, columns, params.encoding.precision, like, like_name, op);
  } else {
    table = frequencies(args.spec.base, args.spec.divisor, frequency_width(args.spec.odd, d_model), columns.pairs());
  }

  std::optional<Tensor> positions;
  params.positions.offset = args.offset;
  params.positions.running = !args.positions || args.spec.positions_are_offsets;
  if (args.positions) {
    positions = *args.positions;
    const bool floating = is_float(*positions);
    POSENC_CHECK(floating || is_integer(*positions), op,
                 "positions must have dtype int64, int32, float32 or float64, got ", text(positions->scalar_type()));
    check_storage(*positions, op, "positions");
    check_same_device(*positions, "positions", like, like_name, op);
    POSENC_CHECK(equal(positions->sizes(), token_sizes), op, "positions must have the shape of the tokens ",
                 text(token_sizes), ", got ", text(positions->sizes()));
    params.positions.strides = readable_strides(*positions, axes, sequence_first);
    const void* const data = positions->const_data_ptr();
    if (floating) params.positions.floats = {data, positions->scalar_type() == ScalarType::Double};
    else params.positions.given = {data, positions->scalar_type() == ScalarType::Long};
  } else {
    int64_t last = 0;
    POSENC_CHECK(!__builtin_add_overflow(args.offset, std::max<int64_t>(params.tokens.seq - 1, 0), &last), op,
                 "offset ", args.offset, " + length ", params.tokens.seq, " exceeds the int64 range");
  }

  std::optional<Tensor> position_table;
  if (args.position_table) {
    position_table = set_position_table(params, args, like, like_name, width);
    check_positions_in_table(params, token_sizes, like.is_cpu(), op);
  }

  std::vector<int64_t> sizes;
  sizes.reserve(axes + 1);
  sizes.assign(token_sizes.begin(), token_sizes.end());
  sizes.push_back(width);
  if (args.out) {
    check_out(*args.out, sizes, type, like, like_name, op);
    POSENC_CHECK(token_strides(*args.out, axes, sequence_first), op,
                 "the batch axes of out must be reachable with one stride, got shape ", text(args.out->sizes()),
                 " with strides ", text(args.out->strides()));
    const bool in_place =
        args.x && like.const_data_ptr() == args.out->const_data_ptr() && equal(like.strides(), args.out->strides());
    if (!in_place) check_disjoint(*args.out, like, args.x ? "x (unless it is x)" : like_name, op);
    if (args.input) check_disjoint(*args.out, *args.input, "input", op);
    if (args.positions) check_disjoint(*args.out, *args.positions, "positions", op);
    if (args.position_table) check_disjoint(*args.out, *args.position_table, "position_table", op);
    if (args.seed) check_disjoint(*args.out, *args.seed, "seed", op);
    if (args.encoding_scale_tensor) check_disjoint(*args.out, *args.encoding_scale_tensor, "encoding_scale_tensor", op);
    if (args.frequencies) check_disjoint(*args.out, *args.frequencies, "frequencies", op);
  }

  Tensor base = like;
  // Kernels may read a row before they know that the id has none.
  if (args.weight && like.size(0) == 0) base = empty({1, width}, type, like);
  if (args.x) params.base_strides = readable_strides(base, axes, sequence_first);
  if (params.source != Source::none) {
    params.base = base.const_data_ptr();
    params.column_stride = column_stride(base);
  }
  std::optional<Tensor> input;
  if (args.weight) {
    const int64_t rows = like.size(0);
    params.rows = args.total_rows < 0 ? rows : args.total_rows;
    check_part(op, "first_row", args.first_row, rows, "total_rows", params.rows);
    params.first_row = args.first_row;
    params.end_row = args.first_row + rows;
    params.row_stride = base.stride(0);
    input = *args.input;
    params.ids = checked_ids(*input, params.rows, op);
    POSENC_CHECK(params.at_padding == AtPadding::embed || (args.padding_idx >= 0 && args.padding_idx < params.rows), op,
                 "at_padding needs a padding_idx in [0, ", params.rows, "), got ", args.padding_idx);
  }
  if (only_check) {
    if (like.is_cpu()) return std::nullopt;
    const CudaCall call(cuda::Op::check, like);
    cuda::check_bounds(params, call->launch());
    call->finish_and_wait();
    return std::nullopt;
  }

  Tensor result = args.out ? *args.out : empty(sizes, type, like);
  if (result.numel() == 0) return result;
  params.out_strides = *token_strides(result, axes, sequence_first);
  const auto write_blocks = [&](const Frequencies& all, const auto& write) {
    const int64_t size = element_size(params.dtype);
    const char* const from = static_cast<const char*>(params.base);
    char* const to = static_cast<char*>(result.mutable_data_ptr());
    visit_column_blocks(columns, args.first_column, width, [&](const ColumnBlock& block) {
      params.encoding.columns = block.columns;
      params.encoding.frequencies = all.from(block.first_pair);
      params.dropout.first_column = args.first_column + block.first;
      if (from != nullptr) params.base = from + block.first * params.column_stride * size;
      params.out = to + block.first * size;
      write();
    });
  };
  if (like.is_cpu()) {
    std::vector<char> memory(table ? 0 : FrequencyMemory::bytes(given_frequencies.pairs));
    write_blocks(table ? table->view() : cpu::convert(given_frequencies, memory.data()),
                 [&] { cpu::forward(params, torch_parallel_for); });
    return result;
  }
  CudaCall call(args.weight ? cuda::Op::embed : args.position_table ? cuda::Op::add : cuda::Op::other, like);
  write_blocks(table ? call.frequencies(*table)
                     : cuda::convert(given_frequencies, call.scratch(FrequencyMemory::bytes(given_frequencies.pairs)),
                                     call->launch()),
               [&] { cuda::forward(params, call->launch()); });
  call->finish();
  return result;
}

Tensor embed_fwd(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double token_scale,
                 double base, int64_t flags) {
  return *run({"embed", {base, flags, "embed"}, given(positions), offset, nullptr, &weight, &input, token_scale});
}

// The last three shape the gradient only.
Tensor embed(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double token_scale,
             double base, int64_t flags, int64_t, bool, bool) {
  return *run({"embed", {base, flags, "embed"}, given(positions), offset, nullptr, &weight, &input, token_scale});
}

void embed_out(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double token_scale,
               double base, int64_t flags, Tensor out) {
  run({"embed", {base, flags, "embed"}, given(positions), offset, &out, &weight, &input, token_scale});
}

// All the checks of embed_out (or of embed), for callers that must write somewhere before it. On a GPU it waits until
// the ids have been looked at.
void check_embed(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double base,
                 int64_t flags, std::optional<Tensor> out, std::optional<Tensor> frequencies,
                 std::optional<Tensor> position_table) {
  EmbedArgs args{"embed", {base, flags, "embed"}, given(positions), offset, given(out), &weight, &input};
  args.frequencies = given(frequencies);
  args.position_table = given(position_table);
  run(args, true);
}

EmbedArgs general_args(const Tensor& weight, const Tensor& input, const std::optional<Tensor>& positions,
                       const std::optional<Tensor>& frequencies, const std::optional<Tensor>& position_table,
                       const std::optional<Tensor>& seed, const std::optional<Tensor>& encoding_scale_tensor,
                       int64_t offset, double token_scale, double base, int64_t flags, int64_t padding_idx, bool sparse,
                       double encoding_scale, int64_t at_padding, double dropout_p, int64_t first_row,
                       int64_t total_rows, int64_t first_column, int64_t d_model) {
  const char* op = "embed_general";
  POSENC_CHECK(!sparse || total_rows < 0, op, "sparse is not supported for a shard (total_rows ", total_rows, ")");
  return {.op = op,
          .spec = {base, flags, op},
          .positions = given(positions),
          .offset = offset,
          .weight = &weight,
          .input = &input,
          .token_scale = token_scale,
          .d_model = d_model,
          .first_column = first_column,
          .first_row = first_row,
          .total_rows = total_rows,
          .padding_idx = padding_idx,
          .at_padding = at_padding,
          .encoding_scale = encoding_scale,
          .encoding_scale_tensor = given(encoding_scale_tensor),
          .frequencies = given(frequencies),
          .dropout_p = dropout_p,
          .seed = given(seed),
          .position_table = given(position_table)};
}

Tensor embed_general(Tensor weight, Tensor input, std::optional<Tensor> positions, std::optional<Tensor> frequencies,
                     std::optional<Tensor> position_table, std::optional<Tensor> seed,
                     std::optional<Tensor> encoding_scale_tensor, int64_t offset, double token_scale, double base,
                     int64_t flags, int64_t padding_idx, bool, bool sparse, double encoding_scale, int64_t at_padding,
                     double dropout_p, int64_t first_row, int64_t total_rows, int64_t first_column, int64_t d_model) {
  return *run(general_args(weight, input, positions, frequencies, position_table, seed, encoding_scale_tensor, offset,
                           token_scale, base, flags, padding_idx, sparse, encoding_scale, at_padding, dropout_p,
                           first_row, total_rows, first_column, d_model));
}

void embed_general_out(Tensor weight, Tensor input, std::optional<Tensor> positions, std::optional<Tensor> frequencies,
                       std::optional<Tensor> position_table, std::optional<Tensor> seed,
                       std::optional<Tensor> encoding_scale_tensor, int64_t offset, double token_scale, double base,
                       int64_t flags, int64_t padding_idx, double encoding_scale, int64_t at_padding, double dropout_p,
                       Tensor out) {
  EmbedArgs args =
      general_args(weight, input, positions, frequencies, position_table, seed, encoding_scale_tensor, offset,
                   token_scale, base, flags, padding_idx, false, encoding_scale, at_padding, dropout_p, 0, -1, 0, -1);
  args.out = &out;
  run(args);
}

Tensor add_positional_encoding(Tensor x, std::optional<Tensor> positions, int64_t offset, double base, int64_t flags) {
  const char* op = "add_positional_encoding";
  return *run({.op = op, .spec = {base, flags, op}, .positions = given(positions), .offset = offset, .x = &x});
}

void add_positional_encoding_out(Tensor x, std::optional<Tensor> positions, int64_t offset, double base, int64_t flags,
                                 Tensor out) {
  const char* op = "add_positional_encoding";
  run({.op = op, .spec = {base, flags, op}, .positions = given(positions), .offset = offset, .out = &out, .x = &x});
}

EmbedArgs add_args(const Tensor& x, const std::optional<Tensor>& positions, const std::optional<Tensor>& seed,
                   const std::optional<Tensor>& encoding_scale_tensor, const std::optional<Tensor>& frequencies,
                   const std::optional<Tensor>& position_table, int64_t offset, double base, int64_t flags,
                   double token_scale, int64_t first_column, int64_t d_model, double encoding_scale, double dropout_p) {
  const char* op = "add_general";
  return {.op = op,
          .spec = {base, flags, op},
          .positions = given(positions),
          .offset = offset,
          .token_scale = token_scale,
          .x = &x,
          .d_model = d_model,
          .first_column = first_column,
          .encoding_scale = encoding_scale,
          .encoding_scale_tensor = given(encoding_scale_tensor),
          .frequencies = given(frequencies),
          .dropout_p = dropout_p,
          .seed = given(seed),
          .position_table = given(position_table)};
}

Tensor add_general(Tensor x, std::optional<Tensor> positions, std::optional<Tensor> seed,
                   std::optional<Tensor> encoding_scale_tensor, std::optional<Tensor> frequencies,
                   std::optional<Tensor> position_table, int64_t offset, double base, int64_t flags, double token_scale,
                   int64_t first_column, int64_t d_model, double encoding_scale, double dropout_p) {
  return *run(add_args(x, positions, seed, encoding_scale_tensor, frequencies, position_table, offset, base, flags,
                       token_scale, first_column, d_model, encoding_scale, dropout_p));
}

void add_general_out(Tensor x, std::optional<Tensor> positions, std::optional<Tensor> seed,
                     std::optional<Tensor> encoding_scale_tensor, std::optional<Tensor> frequencies,
                     std::optional<Tensor> position_table, int64_t offset, double base, int64_t flags,
                     double token_scale, int64_t first_column, int64_t d_model, double encoding_scale, double dropout_p,
                     Tensor out) {
  EmbedArgs args = add_args(x, positions, seed, encoding_scale_tensor, frequencies, position_table, offset, base, flags,
                            token_scale, first_column, d_model, encoding_scale, dropout_p);
  args.out = &out;
  run(args);
}

Tensor encode(const Tensor& positions, int64_t d_model, int64_t offset, double base, int64_t flags, ScalarType dtype,
              const Tensor* out, const Tensor* frequencies = nullptr) {
  EmbedArgs args{"positional_encoding", {base, flags, "positional_encoding"}, &positions, offset, out};
  args.d_model = d_model;
  args.dtype = dtype;
  args.frequencies = frequencies;
  return *run(args);
}

Tensor encode_general(Tensor positions, std::optional<Tensor> frequencies, int64_t d_model, int64_t offset, double base,
                      int64_t flags, int64_t dtype) {
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Double, ScalarType::BFloat16, ScalarType::Half};
  POSENC_CHECK(dtype >= 0 && dtype < 4, "positional_encoding", "dtype must lie in [0, 4), got ", dtype);
  return encode(positions, d_model, offset, base, flags, kTypes[dtype], nullptr, given(frequencies));
}

void encode_general_out(Tensor positions, std::optional<Tensor> frequencies, int64_t d_model, int64_t offset,
                        double base, int64_t flags, Tensor out) {
  check_defined(out, "positional_encoding", "out");
  encode(positions, d_model, offset, base, flags, out.scalar_type(), &out, given(frequencies));
}

Tensor positional_encoding(Tensor positions, int64_t d_model, int64_t offset, double base, int64_t flags,
                           ScalarType dtype) {
  return encode(positions, d_model, offset, base, flags, dtype, nullptr);
}

void positional_encoding_out(Tensor positions, int64_t d_model, int64_t offset, double base, int64_t flags,
                             Tensor out) {
  check_defined(out, "positional_encoding", "out");
  encode(positions, d_model, offset, base, flags, out.scalar_type(), &out);
}

// The same functions for both: they look at where the tensors are.
template <class Library>
void register_kernels(Library& m) {
  m.impl("embed", TORCH_BOX(&embed));
  m.impl("_embed_fwd", TORCH_BOX(&embed_fwd));
  m.impl("embed_out", TORCH_BOX(&embed_out));
  m.impl("check_embed", TORCH_BOX(&check_embed));
  m.impl("embed_general", TORCH_BOX(&embed_general));
  m.impl("embed_general_out", TORCH_BOX(&embed_general_out));
  m.impl("add_positional_encoding", TORCH_BOX(&add_positional_encoding));
  m.impl("_add_positional_encoding_fwd", TORCH_BOX(&add_positional_encoding));
  m.impl("add_positional_encoding_out", TORCH_BOX(&add_positional_encoding_out));
  m.impl("add_general", TORCH_BOX(&add_general));
  m.impl("add_general_out", TORCH_BOX(&add_general_out));
  m.impl("positional_encoding", TORCH_BOX(&positional_encoding));
  m.impl("positional_encoding_out", TORCH_BOX(&positional_encoding_out));
  m.impl("positional_encoding_general", TORCH_BOX(&encode_general));
  m.impl("positional_encoding_general_out", TORCH_BOX(&encode_general_out));
}

STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace posenc
