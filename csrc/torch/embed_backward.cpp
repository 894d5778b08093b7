// The weight gradient of embed, dense and sparse.

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <new>
#include <numeric>
#include <tuple>

#include "../segments.h"
#include "cuda_call.h"
#include "tensors.h"

namespace posenc {
namespace {

// The arguments of a call, under their names in the schemas.
struct GradientArgs {
  const char* op;
  int64_t num_weights;
  double token_scale;
  int64_t padding_idx;
  bool scale_grad_by_freq;
  // What only the general ops take.
  double dropout_p = 0;
  const Tensor* seed = nullptr;
  int64_t first_column = 0, d_model = -1;
};

// A checked call, and what its pointers need alive.
struct GradientCall {
  BackwardParams params;
  GradientTokens tokens;
  Tensor grad, input;  // as the kernels read them

  GradientCall(Tensor grad_given, Tensor input_given, const GradientArgs& args)
      : grad(std::move(grad_given)), input(std::move(input_given)) {
    const char* op = args.op;
    const int64_t num_weights = args.num_weights, padding_idx = args.padding_idx;
    check_defined(grad, op, "grad");
    check_defined(input, op, "input");
    params.dtype = dtype_of(grad.scalar_type(), op, "grad");
    POSENC_CHECK(num_weights >= 0, op, "num_weights must not be negative, got ", num_weights);
    POSENC_CHECK(padding_idx < num_weights || padding_idx < 0, op, "padding_idx must be below num_weights (",
                 num_weights, "), got ", padding_idx);
    check_same_device(input, "input", grad, "grad", op);
    const auto sizes = grad.sizes(), token_sizes = input.sizes();
    POSENC_CHECK(sizes.size() == token_sizes.size() + 1 && equal({sizes.data(), token_sizes.size()}, token_sizes), op,
                 "grad must have the shape of input ", text(token_sizes), " and one axis more, got ", text(sizes));
    check_storage(grad, op, "grad");
    params.width = sizes[sizes.size() - 1];
    check_width(params.width, op);
    check_part(op, "first_column", args.first_column, params.width, "d_model",
               args.d_model < 0 ? params.width : args.d_model);
    params.dropout = dropout_of(args.dropout_p, args.seed, grad, "grad", op);
    params.dropout.first_column = args.first_column;
    tokens = {checked_ids(input, num_weights, op), input.numel(), num_weights, padding_idx};
    if (!input.is_cpu()) {
      POSENC_CHECK(tokens.count <= cuda::kMostGradientTokens, op, "input must have at most ", cuda::kMostGradientTokens,
                   " ids on CUDA, got ", tokens.count);
      POSENC_CHECK(num_weights <= cuda::kMostGradientRows, op, "num_weights must be at most ", cuda::kMostGradientRows,
                   " on CUDA, got ", num_weights);
    }
    auto stride = merged_stride(grad, 0, token_sizes.size());
    // Bits are drawn for many columns at once, where those are contiguous.
    if (!stride || (params.dropout.seed != nullptr && column_stride(grad) != 1)) {
      grad = contiguous_copy(grad);
      stride = params.width;
    }
    params.grad = grad.const_data_ptr();
    params.token_stride = *stride;
    params.column_stride = column_stride(grad);
    params.scale_by_frequency = args.scale_grad_by_freq;
    params.token_scale = args.token_scale;
  }

  // The gradient's rows, to be written.
  Tensor new_rows(int64_t rows) {
    Tensor out = empty({rows, params.width}, grad.scalar_type(), grad);
    params.rows = rows;
    params.out = out.mutable_data_ptr();
    return out;
  }
};

// The host sorts in memory that is not torch's. Where there is too little of it, torch is asked for as much, so that
// its own error is raised.
SortedSegments sorted(const GradientTokens& tokens, const Tensor& like) {
  try {
    return sort_into_segments(tokens);
  } catch (const std::bad_alloc&) {
    empty({tokens.count, 5}, ScalarType::Long, like);
    throw;
  }
}

Tensor dense_gradient(const Tensor& grad, const Tensor& input, const GradientArgs& args) {
  GradientCall prepared(grad, input, args);
  Tensor out = prepared.new_rows(args.num_weights);
  if (grad.is_cpu()) {
    const SortedSegments segments = sorted(prepared.tokens, grad);
    prepared.params.segments = segments.view();
    cpu::backward(prepared.params, torch_parallel_for);
    return out;
  }
  CudaCall call(cuda::Op::embed_backward, grad);
  cuda::GradientScratch scratch(prepared.tokens, prepared.params, false);
  scratch.place(call.scratch(scratch.bytes));
  cuda::backward(prepared.tokens, prepared.params, scratch, call->launch());
  call->finish();
  return out;
}

// The size of the result is known once the ids are sorted. On a GPU that means to wait for the device.
std::tuple<Tensor, Tensor> sparse_gradient(const Tensor& grad, const Tensor& input, const GradientArgs& args) {
  GradientCall prepared(grad, input, args);
  const auto new_result = [&](int64_t count) {
    return std::tuple(empty({count}, ScalarType::Long, grad), prepared.new_rows(count));
  };
  const auto rows_of = [](std::tuple<Tensor, Tensor>& result) {
    return static_cast<int64_t*>(std::get<0>(result).mutable_data_ptr());
  };
  if (grad.is_cpu()) {
    SortedSegments segments = sorted(prepared.tokens, grad);
    auto result = new_result(static_cast<int64_t>(segments.row.size()));
    std::copy(segments.row.begin(), segments.row.end(), rows_of(result));
    std::iota(segments.row.begin(), segments.row.end(), 0);  // segment s is row s of the values
    prepared.params.segments = segments.view();
    cpu::backward(prepared.params, torch_parallel_for);
    return result;
  }
  if (prepared.tokens.count == 0) return new_result(0);
  CudaCall call(cuda::Op::embed_backward_sparse, grad);
  cuda::GradientScratch scratch(prepared.tokens, prepared.params, true);
  scratch.place(call.scratch(scratch.bytes));
  cuda::number_segments(prepared.tokens, scratch, call->launch());
  auto result = new_result(call->read(scratch.segment_counts + prepared.tokens.count - 1));
  cuda::backward_of_segments(prepared.tokens, prepared.params, scratch, rows_of(result), call->launch());
  call->finish();
  return result;
}

Tensor embed_backward(Tensor grad, Tensor input, int64_t num_weights, double token_scale, int64_t padding_idx,
                      bool scale_grad_by_freq) {
  return dense_gradient(grad, input, {"embed_backward", num_weights, token_scale, padding_idx, scale_grad_by_freq});
}

std::tuple<Tensor, Tensor> embed_backward_sparse(Tensor grad, Tensor input, int64_t num_weights, double token_scale,
                                                 int64_t padding_idx, bool scale_grad_by_freq) {
  return sparse_gradient(grad, input,
                         {"embed_backward_sparse", num_weights, token_scale, padding_idx, scale_grad_by_freq});
}

Tensor embed_general_backward(Tensor grad, Tensor input, int64_t num_weights, double token_scale, int64_t padding_idx,
                              bool scale_grad_by_freq, std::optional<Tensor> seed, double dropout_p,
                              int64_t first_column, int64_t d_model) {
  return dense_gradient(grad, input,
                        {"embed_general_backward", num_weights, token_scale, padding_idx, scale_grad_by_freq, dropout_p,
                         seed ? &*seed : nullptr, first_column, d_model});
}

std::tuple<Tensor, Tensor> embed_general_backward_sparse(Tensor grad, Tensor input, int64_t num_weights,
                                                         double token_scale, int64_t padding_idx,
                                                         bool scale_grad_by_freq, std::optional<Tensor> seed,
                                                         double dropout_p, int64_t first_column, int64_t d_model) {
  return sparse_gradient(grad, input,
                         {"embed_general_backward_sparse", num_weights, token_scale, padding_idx, scale_grad_by_freq,
                          dropout_p, seed ? &*seed : nullptr, first_column, d_model});
}

// The same functions for both: they look at where the tensors are.
template <class Library>
void register_kernels(Library& m) {
  m.impl("embed_backward", TORCH_BOX(&embed_backward));
  m.impl("_embed_bwd", TORCH_BOX(&embed_backward));
  m.impl("embed_backward_sparse", TORCH_BOX(&embed_backward_sparse));
  m.impl("_embed_bwd_sparse", TORCH_BOX(&embed_backward_sparse));
  m.impl("embed_general_backward", TORCH_BOX(&embed_general_backward));
  m.impl("embed_general_backward_sparse", TORCH_BOX(&embed_general_backward_sparse));
}

STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace posenc
