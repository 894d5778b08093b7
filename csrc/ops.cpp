// The custom ops: schemas, argument checks, allocation and choice of backend. Only this file and the two headers of its
// own, tensors.h and cuda_call.h, know torch, and only through its stable ABI, so that one build loads in every torch
// from 2.10 on.
//
// Nothing is written to any tensor before all checks have passed.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>

#include "checks.h"
#include "cpu/backend.h"
#include "cuda_call.h"
#include "frequency.h"
#include "params.h"
#include "segments.h"
#include "tensors.h"

namespace posenc {
namespace {

void torch_pool(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context) {
  torch_parallel_for(begin, end, grain, body, context);
}

// ---- the recipe
// ------------------------------------------------------------------------------------------------------

// What a call says about its encoding beyond the base: one int, since every further scalar costs a boxed call a tenth
// of a microsecond. Two bits a field, in the order below, then one bit; posenc_ext/conventions.py writes them.
struct Recipe {
  double base = 0;
  Divisor divisor = Divisor::d;
  LayoutKind layout = LayoutKind::interleaved;
  OddRule odd = OddRule::sine;
  Precision precision = Precision::exact;
  bool batch_first = true;

  Recipe(double base_value, int64_t flags, const char* op) : base(base_value) {
    const auto field = [&](int place) { return (flags >> (2 * place)) & 3; };
    POSENC_CHECK(flags >= 0 && flags < 512 && field(0) <= 1 && field(2) <= 2 && field(3) <= 1, op,
                 "flags must be those of a Convention, got ", flags);
    POSENC_CHECK(std::isfinite(base) && base >= 1.0, op, "base must be finite and at least 1, got ", base);
    divisor = static_cast<Divisor>(field(0));
    layout = static_cast<LayoutKind>(field(1));
    odd = static_cast<OddRule>(field(2));
    precision = static_cast<Precision>(field(3));
    batch_first = (flags >> 8) == 0;
  }
};

// Fills waves.layout and precision; the table that is returned holds the frequencies.
std::shared_ptr<const FrequencyTable> set_recipe(Waves& waves, const Recipe& recipe, int64_t width, const char* op) {
  POSENC_CHECK(width >= 1, op, "the width (d_model) must be positive, got ", width);
  waves.layout = Layout::make(recipe.layout, recipe.odd, width);
  waves.precision = recipe.precision;
  const int64_t frequency_width = recipe.odd == OddRule::round_up ? width + width % 2 : width;
  return frequencies(recipe.base, recipe.divisor, frequency_width, waves.layout.pairs());
}

// Positions: a tensor with the shape of the token axes (expanded views welcome), or none for the running index.
// Returns the tensor that params point into.
std::optional<Tensor> set_positions(Waves& waves, const std::optional<Tensor>& positions, int64_t offset,
                                    IntHeaderOnlyArrayRef token_sizes, bool batch_first, const Grid& grid,
                                    const Tensor& like, const char* like_name, const char* op) {
  waves.offset = offset;
  if (!positions) {
    int64_t last = 0;
    POSENC_CHECK(!__builtin_add_overflow(offset, std::max<int64_t>(grid.seq - 1, 0), &last), op, "offset ", offset,
                 " + length ", grid.seq, " exceeds the int64 range");
    return std::nullopt;
  }
  waves.positions = integers_of(*positions, op, "positions");
  check_same_device(*positions, "positions", like, like_name, op);
  const auto sizes = positions->sizes();
  POSENC_CHECK(sizes.size() == token_sizes.size() && std::equal(sizes.begin(), sizes.end(), token_sizes.begin()), op,
               "positions must have the shape of the tokens ", text(token_sizes), ", got ", text(sizes));
  Tensor used = *positions;
  auto strides = grid_strides(used, sizes.size(), batch_first);
  if (!strides) {
    used = torch::stable::contiguous(used);
    strides = grid_strides(used, sizes.size(), batch_first);
    waves.positions.data = used.const_data_ptr();
  }
  waves.position_strides = *strides;
  return used;
}

// ---- out=
// ------------------------------------------------------------------------------------------------------------

void set_new_out(ForwardParams& params, Tensor& out, size_t token_dims, bool batch_first) {
  params.out = out.mutable_data_ptr();
  params.out_strides = *grid_strides(out, token_dims, batch_first);
}

void set_given_out(ForwardParams& params, const Tensor& out, const std::vector<int64_t>& sizes, ScalarType type,
                   bool batch_first, const Tensor& like, const char* like_name, const char* op) {
  const IntHeaderOnlyArrayRef required(sizes.data(), sizes.size());
  const auto got = out.sizes(), strides = out.strides();
  POSENC_CHECK(out.scalar_type() == type, op, "out must have dtype ", text(type), ", got ", text(out.scalar_type()));
  check_same_device(out, "out", like, like_name, op);
  POSENC_CHECK(got.size() == required.size() && std::equal(got.begin(), got.end(), required.begin()), op,
               "out must have shape ", text(required), ", got ", text(got));
  const size_t token_dims = sizes.size() - 1;
  POSENC_CHECK(got[token_dims] == 1 || strides[token_dims] == 1, op,
               "out must have contiguous columns (stride 1 in its last axis), got strides ", text(strides));
  POSENC_CHECK(!overlaps_itself(out), op, "out must not overlap itself, got shape ", text(got), " with strides ",
               text(strides));
  const auto merged = grid_strides(out, token_dims, batch_first);
  POSENC_CHECK(merged, op, "the batch axes of out must be walkable with one stride, got shape ", text(got),
               " with strides ", text(strides));
  params.out = out.mutable_data_ptr();
  params.out_strides = *merged;
}

// On the device of `like`, with the frequencies of `table`.
void run_forward(ForwardParams& params, const std::shared_ptr<const FrequencyTable>& table, const Tensor& like,
                 cuda::Op op) {
  if (params.grid.tokens() == 0) return;
  if (like.is_cpu()) {
    params.waves.frequencies = table->view();
    return cpu::forward(params, torch_pool);
  }
  const CudaCall call(op, like);
  params.waves.frequencies = call->frequencies(table);
  cuda::forward(params, call->launch());
  call->finish();
}

// ---- ids
// -------------------------------------------------------------------------------------------------------------

[[noreturn]] void throw_bad_id(const Integers& ids, int64_t place, IntHeaderOnlyArrayRef sizes, int64_t rows,
                               const char* op) {
  std::string index;
  int64_t rest = place;
  for (size_t i = sizes.size(); i-- > 0;) {
    index = std::to_string(rest % sizes[i]) + (index.empty() ? "" : ", ") + index;
    rest /= sizes[i];
  }
  throw std::out_of_range(
      message(op, "input must hold ids in [0, ", rows, "), got ", ids[place], " at input[", index, "]"));
}

// The ids as one contiguous run over the grid; `held` keeps a copy alive where one was needed. On a GPU their range is
// checked by the kernels, since to look at them here would be to wait for the device; but an empty table has no good
// id.
Integers checked_ids(const Tensor& input, int64_t rows, Tensor& held, const char* op) {
  integers_of(input, op, "input");
  held = input.is_contiguous() ? input : torch::stable::contiguous(input);
  const Integers ids = integers_of(held, op, "input");
  if (!input.is_cpu()) {
    if (rows == 0 && input.numel() > 0)
      throw std::out_of_range(message(op, "input must hold ids in [0, 0), got ", input.numel(), " ids"));
    return ids;
  }
  const int64_t bad = cpu::find_bad_id(ids, held.numel(), rows);
  if (bad >= 0) throw_bad_id(ids, bad, input.sizes(), rows, op);
  return ids;
}

// ---- embed
// -----------------------------------------------------------------------------------------------------------

// A checked call, and what its pointers need alive.
struct PreparedEmbed {
  ForwardParams params;
  std::shared_ptr<const FrequencyTable> table;
  std::optional<Tensor> positions;
  Tensor ids;
  std::vector<int64_t> sizes;  // of the output
};

PreparedEmbed prepare_embed(const Tensor& weight, const Tensor& input, const std::optional<Tensor>& positions,
                            int64_t offset, const Recipe& recipe, const Tensor* out, const char* op) {
  PreparedEmbed call{{}, nullptr, std::nullopt, input, {}};
  ForwardParams& params = call.params;
  params.dtype = dtype_of(weight.scalar_type(), op, "weight");
  params.source = Source::gathered;
  POSENC_CHECK(weight.dim() == 2, op, "weight must have 2 dimensions [vocab_size, d_model], got shape ",
               text(weight.sizes()));
  check_same_device(input, "input", weight, "weight", op);
  const int64_t rows = weight.size(0), width = weight.size(1);
  call.table = set_recipe(params.waves, recipe, width, op);
  params.grid = grid_of(input.sizes(), recipe.batch_first);
  call.positions = set_positions(params.waves, positions, offset, input.sizes(), recipe.batch_first, params.grid,
                                 weight, "weight", op);
  params.base = weight.const_data_ptr();
  params.row_stride = weight.stride(0);
  params.column_stride = width == 1 ? 1 : weight.stride(1);
  call.sizes = with_width(input.sizes(), width);
  if (out != nullptr) {
    set_given_out(params, *out, call.sizes, weight.scalar_type(), recipe.batch_first, weight, "weight", op);
    check_disjoint(*out, weight, "weight", op);
    check_disjoint(*out, input, "input", op);
    if (positions) check_disjoint(*out, *positions, "positions", op);
  }
  params.rows = rows;
  params.ids = checked_ids(input, rows, call.ids, op);
  return call;
}

Tensor embed_into(const Tensor& weight, const Tensor& input, const std::optional<Tensor>& positions, int64_t offset,
                  double token_scale, const Recipe& recipe, const Tensor* out, const char* op) {
  PreparedEmbed call = prepare_embed(weight, input, positions, offset, recipe, out, op);
  call.params.token_scale = token_scale;
  Tensor result = out != nullptr ? *out : empty(call.sizes, weight.scalar_type(), weight);
  if (out == nullptr) set_new_out(call.params, result, input.dim(), recipe.batch_first);
  run_forward(call.params, call.table, weight, cuda::Op::embed);
  return result;
}

Tensor embed_fwd(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double token_scale,
                 double base, int64_t flags) {
  return embed_into(weight, input, positions, offset, token_scale, {base, flags, "embed"}, nullptr, "embed");
}

Tensor embed(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double token_scale,
             double base, int64_t flags, int64_t padding_idx, bool scale_grad_by_freq, bool sparse) {
  (void)padding_idx, (void)scale_grad_by_freq, (void)sparse;  // they shape the gradient only
  return embed_into(weight, input, positions, offset, token_scale, {base, flags, "embed"}, nullptr, "embed");
}

void embed_out(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double token_scale,
               double base, int64_t flags, Tensor out) {
  embed_into(weight, input, positions, offset, token_scale, {base, flags, "embed"}, &out, "embed");
}

// All the checks of embed_out (or of embed) and nothing else, for callers that must write somewhere before it. On a GPU
// it waits for the ids to be looked at.
void check_embed(Tensor weight, Tensor input, std::optional<Tensor> positions, int64_t offset, double base,
                 int64_t flags, std::optional<Tensor> out) {
  const PreparedEmbed prepared =
      prepare_embed(weight, input, positions, offset, {base, flags, "embed"}, out ? &*out : nullptr, "embed");
  if (weight.is_cpu()) return;
  const CudaCall call(cuda::Op::check, weight);
  cuda::check_ids(prepared.params.ids, input.numel(), prepared.params.rows, call->launch());
  call->finish_and_wait();
}

// ---- the weight gradient
// ---------------------------------------------------------------------------------------------

// One stride from token to token over all leading axes of grad, or nothing.
std::optional<int64_t> token_stride(const Tensor& grad) {
  return merged_stride(grad.sizes(), grad.strides(), 0, static_cast<size_t>(grad.dim()) - 1);
}

// A checked call, and what its pointers need alive.
struct PreparedGradient {
  BackwardParams params;
  GradientTokens tokens;
  Tensor grad, ids;  // as the kernels read them
};

PreparedGradient prepare_gradient(const Tensor& grad, const Tensor& input, int64_t num_weights, double token_scale,
                                  int64_t padding_idx, bool scale_grad_by_freq, const char* op) {
  PreparedGradient result{{}, {}, grad, input};
  BackwardParams& params = result.params;
  params.dtype = dtype_of(grad.scalar_type(), op, "grad");
  POSENC_CHECK(num_weights >= 0, op, "num_weights must not be negative, got ", num_weights);
  POSENC_CHECK(padding_idx < num_weights || padding_idx < 0, op, "padding_idx must be below num_weights (", num_weights,
               "), got ", padding_idx);
  integers_of(input, op, "input");
  check_same_device(input, "input", grad, "grad", op);
  const auto sizes = grad.sizes(), token_sizes = input.sizes();
  POSENC_CHECK(
      sizes.size() == token_sizes.size() + 1 && std::equal(token_sizes.begin(), token_sizes.end(), sizes.begin()), op,
      "grad must have the shape of input ", text(token_sizes), " and one axis more, got ", text(sizes));
  params.width = sizes[sizes.size() - 1];
  POSENC_CHECK(params.width >= 1, op, "the width (last axis) of grad must be positive, got ", params.width);
  result.tokens.ids = checked_ids(input, num_weights, result.ids, op);
  result.tokens.count = input.numel();
  result.tokens.rows = num_weights;
  result.tokens.padding_idx = padding_idx;
  auto stride = token_stride(grad);
  if (!stride) {
    result.grad = torch::stable::contiguous(grad);
    stride = params.width;
  }
  params.grad = result.grad.const_data_ptr();
  params.token_stride = *stride;
  params.column_stride = params.width == 1 ? 1 : result.grad.stride(result.grad.dim() - 1);
  params.scale_by_frequency = scale_grad_by_freq;
  params.token_scale = token_scale;
  if (!input.is_cpu()) {
    POSENC_CHECK(input.numel() <= cuda::kMostGradientTokens, op, "input must have at most ", cuda::kMostGradientTokens,
                 " ids on CUDA, got ", input.numel());
    POSENC_CHECK(num_weights <= cuda::kMostGradientRows, op, "num_weights must be at most ", cuda::kMostGradientRows,
                 " on CUDA, got ", num_weights);
  }
  return result;
}

Tensor embed_backward(Tensor grad, Tensor input, int64_t num_weights, double token_scale, int64_t padding_idx,
                      bool scale_grad_by_freq) {
  PreparedGradient prepared =
      prepare_gradient(grad, input, num_weights, token_scale, padding_idx, scale_grad_by_freq, "embed_backward");
  BackwardParams& params = prepared.params;
  Tensor out = empty({num_weights, params.width}, grad.scalar_type(), grad);
  params.rows = num_weights;
  params.out = out.mutable_data_ptr();
  if (grad.is_cpu()) {
    const SortedRuns runs = sort_into_runs(prepared.tokens);
    params.runs = runs.view();
    cpu::backward(params, torch_pool);
  } else {
    CudaCall call(cuda::Op::embed_backward, grad);
    cuda::GradientScratch scratch(prepared.tokens, params, false);
    scratch.place(call.scratch(scratch.bytes));
    cuda::backward(prepared.tokens, params, scratch, call->launch());
    call->finish();
  }
  return out;
}

// The size of the result is known once the ids are sorted; on a GPU that means to wait for the device.
std::tuple<Tensor, Tensor> embed_backward_sparse(Tensor grad, Tensor input, int64_t num_weights, double token_scale,
                                                 int64_t padding_idx, bool scale_grad_by_freq) {
  PreparedGradient prepared =
      prepare_gradient(grad, input, num_weights, token_scale, padding_idx, scale_grad_by_freq, "embed_backward_sparse");
  BackwardParams& params = prepared.params;
  const auto make = [&](int64_t count) {
    std::tuple<Tensor, Tensor> made{empty({count}, ScalarType::Long, grad),
                                    empty({count, params.width}, grad.scalar_type(), grad)};
    params.rows = count;
    params.out = std::get<1>(made).mutable_data_ptr();
    return made;
  };
  if (grad.is_cpu()) {
    SortedRuns runs = sort_into_runs(prepared.tokens);
    auto result = make(static_cast<int64_t>(runs.row.size()));
    std::copy(runs.row.begin(), runs.row.end(), static_cast<int64_t*>(std::get<0>(result).mutable_data_ptr()));
    std::iota(runs.row.begin(), runs.row.end(), 0);  // run r is row r of the values
    params.runs = runs.view();
    cpu::backward(params, torch_pool);
    return result;
  }
  if (prepared.tokens.count == 0) return make(0);
  CudaCall call(cuda::Op::embed_backward_sparse, grad);
  cuda::GradientScratch scratch(prepared.tokens, params, true);
  scratch.place(call.scratch(scratch.bytes));
  cuda::number_runs(prepared.tokens, scratch, call->launch());
  auto result = make(call->read(scratch.head_counts + prepared.tokens.count - 1));
  cuda::backward_of_runs(prepared.tokens, params, scratch,
                         static_cast<int64_t*>(std::get<0>(result).mutable_data_ptr()), call->launch());
  call->finish();
  return result;
}

// ---- x + PE
// ----------------------------------------------------------------------------------------------------------

Tensor add_into(const Tensor& x, const std::optional<Tensor>& positions, int64_t offset, const Recipe& recipe,
                const Tensor* out, const char* op) {
  const bool batch_first = recipe.batch_first;
  ForwardParams params;
  params.dtype = dtype_of(x.scalar_type(), op, "x");
  params.source = Source::dense;
  POSENC_CHECK(x.dim() >= 1, op, "x must have at least 1 dimension [..., d_model], got a scalar");
  const auto sizes = x.sizes();
  const size_t token_dims = sizes.size() - 1;
  const IntHeaderOnlyArrayRef token_sizes(sizes.data(), token_dims);
  const int64_t width = sizes[token_dims];
  const auto table = set_recipe(params.waves, recipe, width, op);
  params.grid = grid_of(token_sizes, batch_first);
  const auto held_positions =
      set_positions(params.waves, positions, offset, token_sizes, batch_first, params.grid, x, "x", op);
  if (out != nullptr) {
    set_given_out(params, *out, {sizes.begin(), sizes.end()}, x.scalar_type(), batch_first, x, "x", op);
    const auto strides = x.strides(), out_strides = out->strides();
    const bool in_place =
        x.const_data_ptr() == out->const_data_ptr() && std::equal(strides.begin(), strides.end(), out_strides.begin());
    if (!in_place) check_disjoint(*out, x, "x (unless it is x)", op);
    if (positions) check_disjoint(*out, *positions, "positions", op);
  }
  Tensor base = x;
  auto strides = grid_strides(base, token_dims, batch_first);
  if (!strides) {
    base = torch::stable::contiguous(x);
    strides = grid_strides(base, token_dims, batch_first);
  }
  params.base = base.const_data_ptr();
  params.base_strides = *strides;
  params.column_stride = width == 1 ? 1 : base.stride(base.dim() - 1);
  Tensor result = out != nullptr ? *out : empty({sizes.begin(), sizes.end()}, x.scalar_type(), x);
  if (out == nullptr) set_new_out(params, result, token_dims, batch_first);
  run_forward(params, table, x, cuda::Op::other);
  return result;
}

Tensor add_positional_encoding(Tensor x, std::optional<Tensor> positions, int64_t offset, double base, int64_t flags) {
  return add_into(x, positions, offset, {base, flags, "add_positional_encoding"}, nullptr, "add_positional_encoding");
}

void add_positional_encoding_out(Tensor x, std::optional<Tensor> positions, int64_t offset, double base, int64_t flags,
                                 Tensor out) {
  add_into(x, positions, offset, {base, flags, "add_positional_encoding"}, &out, "add_positional_encoding");
}

// ---- PE alone
// --------------------------------------------------------------------------------------------------------

Tensor encode_into(const Tensor& positions, int64_t d_model, int64_t offset, const Recipe& recipe, ScalarType type,
                   const Tensor* out, const char* op) {
  ForwardParams params;
  params.dtype = dtype_of(type, op, out != nullptr ? "out" : "dtype");
  params.source = Source::none;
  const auto table = set_recipe(params.waves, recipe, d_model, op);
  const auto token_sizes = positions.sizes();
  params.grid = grid_of(token_sizes, true);
  const auto held =
      set_positions(params.waves, positions, offset, token_sizes, true, params.grid, positions, "positions", op);
  const auto sizes = with_width(token_sizes, d_model);
  if (out != nullptr) {
    set_given_out(params, *out, sizes, type, true, positions, "positions", op);
    check_disjoint(*out, positions, "positions", op);
  }
  Tensor result = out != nullptr ? *out : empty(sizes, type, positions);
  if (out == nullptr) set_new_out(params, result, token_sizes.size(), true);
  run_forward(params, table, positions, cuda::Op::other);
  return result;
}

Tensor positional_encoding(Tensor positions, int64_t d_model, int64_t offset, double base, int64_t flags,
                           ScalarType dtype) {
  return encode_into(positions, d_model, offset, {base, flags, "positional_encoding"}, dtype, nullptr,
                     "positional_encoding");
}

void positional_encoding_out(Tensor positions, int64_t d_model, int64_t offset, double base, int64_t flags,
                             Tensor out) {
  encode_into(positions, d_model, offset, {base, flags, "positional_encoding"}, out.scalar_type(), &out,
              "positional_encoding");
}

}  // namespace

// Every op takes the recipe as scalars (base and flags, see Recipe), so a compiled or exported graph holds no table and
// no frequencies; new fields are new bits, and new arguments are appended with defaults.
//   positions   None for the running index, or an integer tensor of the shape of the tokens
//   offset      added to either
// Ops named *_fwd and *_bwd are raw; the public names carry autograd formulas (posenc_ext/ops.py).
STABLE_TORCH_LIBRARY(posenc_ext, m) {
  m.def(
      "embed(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float token_scale, "
      "float base, int flags, int padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor");
  m.def(
      "_embed_fwd(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float token_scale, float base, int "
      "flags) -> Tensor");
  m.def(
      "embed_out(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float token_scale, "
      "float base, int flags, Tensor(a!) out) -> ()");
  m.def(
      "check_embed(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float base, int flags, Tensor? "
      "out=None) "
      "-> ()");
  for (const char* name : {"embed_backward", "_embed_bwd"}) {
    m.def((std::string(name) + "(Tensor grad, Tensor input, SymInt num_weights, float token_scale, int padding_idx, "
                               "bool scale_grad_by_freq) -> Tensor")
              .c_str());
  }
  for (const char* name : {"embed_backward_sparse", "_embed_bwd_sparse"}) {
    m.def((std::string(name) + "(Tensor grad, Tensor input, SymInt num_weights, float token_scale, int padding_idx, "
                               "bool scale_grad_by_freq) -> (Tensor rows, Tensor values)")
              .c_str());
  }
  for (const char* name : {"add_positional_encoding", "_add_positional_encoding_fwd"}) {
    m.def(
        (std::string(name) + "(Tensor x, Tensor? positions, SymInt offset, float base, int flags) -> Tensor").c_str());
  }
  m.def(
      "add_positional_encoding_out(Tensor x, Tensor? positions, SymInt offset, float base, int flags, Tensor(a!) out) "
      "-> ()");
  m.def(
      "positional_encoding(Tensor positions, SymInt d_model, SymInt offset, float base, int flags, ScalarType dtype) "
      "-> Tensor");
  m.def(
      "positional_encoding_out(Tensor positions, SymInt d_model, SymInt offset, float base, int flags, Tensor(a!) out) "
      "-> ()");
}

// The same functions for both: they look at where the tensors are.
template <class Library>
void register_kernels(Library& m) {
  m.impl("embed", TORCH_BOX(&embed));
  m.impl("_embed_fwd", TORCH_BOX(&embed_fwd));
  m.impl("embed_out", TORCH_BOX(&embed_out));
  m.impl("check_embed", TORCH_BOX(&check_embed));
  m.impl("embed_backward", TORCH_BOX(&embed_backward));
  m.impl("_embed_bwd", TORCH_BOX(&embed_backward));
  m.impl("embed_backward_sparse", TORCH_BOX(&embed_backward_sparse));
  m.impl("_embed_bwd_sparse", TORCH_BOX(&embed_backward_sparse));
  m.impl("add_positional_encoding", TORCH_BOX(&add_positional_encoding));
  m.impl("_add_positional_encoding_fwd", TORCH_BOX(&add_positional_encoding));
  m.impl("add_positional_encoding_out", TORCH_BOX(&add_positional_encoding_out));
  m.impl("positional_encoding", TORCH_BOX(&positional_encoding));
  m.impl("positional_encoding_out", TORCH_BOX(&positional_encoding_out));
}

STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CUDA, m) { register_kernels(m); }

}  // namespace posenc
