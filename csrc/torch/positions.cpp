// The ops that count positions.

#include "../positions.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "cuda_call.h"
#include "tensors.h"

namespace posenc {
namespace {

// The rows of `tensor`, which becomes a copy where its strides need one, and a new tensor for their positions.
Tensor checked_rows(Tensor& tensor, const char* argument, bool batch_first, bool booleans, CountedRows& rows,
                    const char* op) {
  check_defined(tensor, op, argument);
  const ScalarType type = tensor.scalar_type();
  if (booleans && type == ScalarType::Bool) {
    rows.type = IntegerType::boolean;
    check_storage(tensor, op, argument);
  } else {
    POSENC_CHECK(type == ScalarType::Long || type == ScalarType::Int, op, argument, " must have dtype int64",
                 booleans ? ", int32 or bool" : " or int32", ", got ", text(type));
    rows.type = integers_of(tensor, op, argument).is_int64 ? IntegerType::int64 : IntegerType::int32;
  }
  const auto sizes = tensor.sizes();
  POSENC_CHECK(sizes.size() > 0, op, argument, " must have at least 1 dimension, got a scalar");
  rows.tokens = tokens_of(sizes, !batch_first);
  const std::vector<int64_t> shape(sizes.begin(), sizes.end());
  rows.strides = readable_strides(tensor, shape.size(), !batch_first);
  rows.data = tensor.const_data_ptr();
  Tensor result = empty(shape, ScalarType::Long, tensor);
  rows.out = static_cast<int64_t*>(result.mutable_data_ptr());
  return result;
}

template <class Params>
void run(const Tensor& like, const Params& params, void (*on_cpu)(const Params&, ParallelFor),
         void (*on_cuda)(const Params&, const cuda::Launch&)) {
  if (like.is_cpu()) return on_cpu(params, torch_parallel_for);
  CudaCall call(cuda::Op::other, like);
  on_cuda(params, call->launch());
  call->finish();
}

Tensor positions_from_padding(Tensor input, int64_t padding_idx, std::optional<Tensor> offsets, int64_t first_position,
                              std::optional<int64_t> padding_position, bool batch_first) {
  const char* op = "positions_from_padding";
  PaddingParams params;
  const auto sizes_of_batch = [&] {
    const auto sizes = input.sizes();
    return batch_first ? IntHeaderOnlyArrayRef(sizes.data(), sizes.size() - 1)
                       : IntHeaderOnlyArrayRef(sizes.data() + 1, sizes.size() - 1);
  };
  Tensor result = checked_rows(input, "ids_or_mask", batch_first, true, params.rows, op);
  params.padding_value = padding_idx;
  params.start = first_position;
  params.count_on = !padding_position.has_value();
  params.padding_position = padding_position.value_or(0);
  if (offsets) {
    check_defined(*offsets, op, "offset");
    params.offsets = integers_of(*offsets, op, "offset");
    POSENC_CHECK(offsets->dim() == 0 || equal(offsets->sizes(), sizes_of_batch()), op,
                 "offset must be 0-d or hold one number for each row of the batch ", text(sizes_of_batch()),
                 ", got shape ", text(offsets->sizes()));
    if (offsets->dim() == 0 && offsets->is_cpu()) {
      params.start = wrapping_sum(params.start, params.offsets[0]);
      params.offsets = {};
    } else {
      check_same_device(*offsets, "offset", input, "ids_or_mask", op);
      auto stride = merged_stride(*offsets, 0, offsets->dim());
      if (!stride) {
        offsets = contiguous_copy(*offsets);
        params.offsets.data = offsets->const_data_ptr();
        stride = 1;
      }
      params.offset_stride = *stride;
    }
  }
  if (result.numel() > 0) run(input, params, cpu::count_real_tokens, cuda::count_real_tokens);
  return result;
}

Tensor positions_from_sequence_ids(Tensor ids, int64_t first_position, bool batch_first) {
  SequenceIdParams params;
  Tensor result = checked_rows(ids, "ids", batch_first, false, params.rows, "positions_from_sequence_ids");
  params.start = first_position;
  if (result.numel() > 0) run<SequenceIdParams>(ids, params, cpu::count_in_sequences, cuda::count_in_sequences);
  return result;
}

Tensor positions_from_cu_seqlens(Tensor cu_seqlens, int64_t total, int64_t first_position) {
  const char* op = "positions_from_cu_seqlens";
  check_defined(cu_seqlens, op, "cu_seqlens");
  SequenceStartParams params;
  params.starts = integers_of(cu_seqlens, op, "cu_seqlens");
  POSENC_CHECK(cu_seqlens.dim() == 1, op, "cu_seqlens must have 1 dimension, got shape ", text(cu_seqlens.sizes()));
  POSENC_CHECK(total >= 0, op, "total must not be negative, got ", total);
  if (!cu_seqlens.is_contiguous()) {
    cu_seqlens = contiguous_copy(cu_seqlens);
    params.starts.data = cu_seqlens.const_data_ptr();
  }
  params.count = cu_seqlens.numel();
  POSENC_CHECK(params.count >= 1, op, "cu_seqlens must hold a 0 and the end of each sequence, got no numbers");
  params.total = total;
  params.start = first_position;
  if (cu_seqlens.is_cpu()) {  // on a GPU to look at them would be to wait for the device
    POSENC_CHECK(params.starts[0] == 0, op, "cu_seqlens must begin with 0, got ", params.starts[0]);
    for (int64_t i = 1; i < params.count; ++i)
      POSENC_CHECK(params.starts[i - 1] <= params.starts[i], op, "cu_seqlens must not descend, got ",
                   params.starts[i - 1], " and then ", params.starts[i]);
    const int64_t end = params.starts[params.count - 1];
    POSENC_CHECK(end <= total, op, "total must be at least the last of cu_seqlens (", end, "), got ", total);
  }
  Tensor result = empty({total}, ScalarType::Long, cu_seqlens);
  params.out = static_cast<int64_t*>(result.mutable_data_ptr());
  if (total > 0) run<SequenceStartParams>(cu_seqlens, params, cpu::count_in_sequences, cuda::count_in_sequences);
  return result;
}

// The same functions for both: they look at where the tensors are.
template <class Library>
void register_kernels(Library& m) {
  m.impl("positions_from_padding", TORCH_BOX(&positions_from_padding));
  m.impl("positions_from_sequence_ids", TORCH_BOX(&positions_from_sequence_ids));
  m.impl("positions_from_cu_seqlens", TORCH_BOX(&positions_from_cu_seqlens));
}

STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(posenc_ext, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace posenc
