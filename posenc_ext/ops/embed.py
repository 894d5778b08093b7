"""token_scale * weight[input] + encoding: the eager entry and the formulas of the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from posenc_ext.ops import compose, elements, shard
from posenc_ext.ops.call import (
    EmbedArguments,
    EmbedCall,
    GradientCall,
    by_name,
    check_offset,
)
from posenc_ext.ops.compose import transforms_active
from posenc_ext.ops.tracing import (
    PLAIN,
    decomposed,
    dispatch_modes,
    dynamo_compiling,
    jit_tracing,
)
from posenc_ext.plain import is_dtensor

_ops = torch.ops.posenc_ext
_embed = _ops.embed.default
_embed_fwd = _ops._embed_fwd.default
_embed_now = _embed_fwd._op  # without the Python function of an OpOverload: half a microsecond less
_FORWARD = len(_embed_fwd._schema.arguments)  # it takes the first ones of a call; the others shape the gradient
_is_compiling = torch.compiler.is_compiling
_is_exporting = torch.compiler.is_exporting
_grad_enabled = torch.is_grad_enabled
_NOTHING: Mapping[str, Any] = {}


def run(call: EmbedArguments, general: dict[str, Any] | None = None) -> Tensor:
    """The layer, differentiable in weight; `general`: arguments that only the op `embed_general` takes."""
    weight, input, positions, offset, token_scale, base, flags, _, _, _ = call
    if (
        dynamo_compiling()
        or dispatch_modes()
        or jit_tracing()
        or type(weight) not in PLAIN
        or type(input) is not Tensor
        or (positions is not None and type(positions) is not Tensor)
    ):
        # Without EmbedCall's own __new__, which a compiled program would guard.
        return _run_traced(tuple.__new__(EmbedCall, call), general)
    if transforms_active() or forward_ad._current_level >= 0:  # compose.needed(), without a call
        return compose.embed(EmbedCall(*call), **(general or {}))
    if general is not None:
        return _run_general(EmbedCall(*call), general)
    if _grad_enabled() and weight.requires_grad:
        return _apply(*call)
    result: Tensor = _embed_now(weight, input, positions, offset, token_scale, base, flags)
    return result


def _run_traced(call: EmbedCall, general: dict[str, Any] | None) -> Tensor:
    """The same where the call is recorded, or its tensors are no plain ones."""
    if is_dtensor(call.weight) or is_dtensor(call.input):
        return shard.embed(run, call, general or {})
    transformed = transforms_active() or forward_ad._current_level >= 0
    differentiable = _grad_enabled() and call.weight.requires_grad
    result: Tensor
    if dynamo_compiling() and not (transformed or differentiable or general) and not _is_exporting():
        # The formula costs a compiled call several microseconds as well, and this program is kept for no other use.
        result = _embed_fwd(*call[:7])  # _FORWARD as a number: one thing less to guard
        return result
    if not _is_compiling():  # which checks it by itself, and may have a symbol here
        check_offset("embed", call.offset)
    if transformed:
        return compose.embed(call, **(general or {}))
    if call.sparse and _is_compiling() and not torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "posenc_ext::embed: sparse=True cannot be traced (torch.compile and export have no sparse gradients)"
        )
    result = decomposed(_embed)(*call) if general is None else _run_general(call, general)
    return result


def _run_general(call: EmbedCall, general: dict[str, Any]) -> Tensor:
    named = dict(zip(EmbedCall._fields[3:], call[3:], strict=True))  # its tensors are positional
    result: Tensor = decomposed(_ops.embed_general.default)(*call[:3], **named, **general)
    return result


def _save(ctx: Any, call: EmbedCall) -> None:
    ctx.gradient_options = (call.weight.shape[0], call.token_scale, call.padding_idx, call.scale_grad_by_freq)
    ctx.sparse = call.sparse


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        weight, input, _, _, token_scale, _, _, padding_idx, scale_grad_by_freq, sparse = args
        ctx.save_for_backward(input)
        ctx.gradient_options = (weight.shape[0], token_scale, padding_idx, scale_grad_by_freq)
        ctx.sparse = sparse
        ctx.leaf = weakref.ref(weight) if sparse and weight.is_leaf else None
        return _embed_now(*args[:_FORWARD])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _weight_gradient(ctx, grad, *ctx.saved_tensors)
        if ctx.leaf is not None:
            _keep_coalesced(ctx.leaf, gradient)
        return (gradient, *(None,) * (len(EmbedCall._fields) - 1))


_apply: Callable[..., Tensor] = _Embed.apply


def _keep_coalesced(leaf: Callable[[], Tensor | None], gradient: Tensor) -> None:
    """See that `leaf.grad`, if it becomes this gradient and nothing else, is known to be coalesced.

    Autograd stores a sparse gradient as a new tensor of the same indices and values, which is not marked coalesced. An
    optimiser would then sort and sum once more. It is marked as soon as it is stored: once the hooks of autograd's node
    have seen it, another thread may be at work on it (DistributedDataParallel).
    """
    rows, values = gradient._indices(), gradient._values()
    version = rows._version

    def mark(tensor: Tensor) -> None:
        stored = tensor.grad
        if stored is None or not stored.is_sparse or rows._version != version:
            return
        # A hook may have put something else in its place, or written to it.
        pairs = ((stored._indices(), rows), (stored._values(), values))
        if all(new.data_ptr() == old.data_ptr() for new, old in pairs):
            stored._coalesced_(True)

    tensor = leaf()
    if tensor is not None and tensor.requires_grad:
        hook = tensor.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
        torch.autograd.Variable._execution_engine.queue_callback(hook.remove)


def _weight_gradient(ctx: Any, grad: Tensor, input: Tensor, dropout: Mapping[str, Any] = _NOTHING) -> Tensor:
    return _gradient(GradientCall(grad, input, *ctx.gradient_options), ctx.sparse, dropout)


def _gradient_of_shard(ctx: Any, grad: Tensor, input: Tensor, dropout: Mapping[str, Any] = _NOTHING) -> Tensor:
    """That of the rows from ctx.first_row on. Tokens of other rows add to one row more, which is cut off."""
    rows, token_scale, padding_idx, scale_grad_by_freq = ctx.gradient_options
    if grad.shape[-1] == 0:
        return grad.new_zeros((rows, 0))
    row = input.long() - ctx.first_row
    left_out = (row < 0) | (row >= rows) | (input == padding_idx)
    call = GradientCall(grad, row.masked_fill(left_out, rows), rows + 1, token_scale, rows, scale_grad_by_freq)
    return _gradient(call, False, dropout)[:rows]


def _gradient(call: GradientCall, sparse: bool, dropout: Mapping[str, Any]) -> Tensor:
    """`dropout`: its arguments, where the gradient is to be dropped first."""
    found = elements.gradient_of_rows(call, dropout, sparse)
    if isinstance(found, Tensor):
        return found
    rows, values = found
    # The rows come sorted and unique, so the gradient is born coalesced.
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, (call.num_weights, values.shape[1]), is_coalesced=True, check_invariants=False
    )


def refuse_trained_positions(op: Any, positions: Tensor | None) -> None:
    """The ops without keywords have no gradient to positions; the functional forms call those that have."""
    if positions is not None and positions.requires_grad:
        raise ValueError(
            f"{op.name()}: positions must not require a gradient, which the op with keywords gives (embed_general, "
            f"add_general); got positions of dtype {positions.dtype} that do"
        )


# ---- formulas of the public ops --------------------------------------------------------------------------------------


def _register_embed(op: Any) -> None:
    def setup(
        ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        given = by_name(op, inputs, keyword_only_inputs or {})
        given["rows"] = given["weight"].shape[0]
        _save(ctx, EmbedCall(**{name: given[name] for name in EmbedCall._fields}))
        if "seed" in given:
            elements.save(ctx, given, given["input"])
        else:
            refuse_trained_positions(op, given["positions"])
            ctx.save_for_backward(given["input"])
        ctx.first_row = given.get("first_row", 0)
        whole = given.get("total_rows", -1) < 0 and given.get("d_model", -1) < 0
        ctx.weight_gradient = _weight_gradient if whole else _gradient_of_shard

    def formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if op is _embed:
            return elements.in_order(op, {"weight": ctx.weight_gradient(ctx, grad, *ctx.saved_tensors)})
        input, dropout, found = elements.gradients(ctx, grad)
        of_weight = ctx.weight_gradient(ctx, grad, input, dropout) if ctx.needs_input_grad[0] else None
        return elements.in_order(op, {"weight": of_weight, **found})

    torch.library.register_autograd(op.name(), formula, setup_context=setup)


_register_embed(_embed)
_register_embed(_ops.embed_general.default)


# The weight gradient is linear in the output gradient. Its transpose is the lookup without an encoding: each token of
# id r gets row r of what arrives, scaled alike, and dropped alike.
def _register_gradient(op: Any) -> None:
    fields, names = len(GradientCall._fields), [argument.name for argument in op._schema.arguments]

    def setup(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        call, more = GradientCall(*inputs[:fields]), inputs[fields:]
        ctx.dropout = {**dict(zip(names[fields:], more, strict=False)), **(keyword_only_inputs or {})}
        seed = ctx.dropout.pop("seed", None)
        ctx.save_for_backward(call.input, seed, *(output[:1] if isinstance(output, tuple) else ()))
        ctx.options = (call.token_scale, call.padding_idx, call.scale_grad_by_freq)
        ctx.rest = (None,) * (len(inputs) - 1)

    def formula(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, seed, *rows = ctx.saved_tensors
        (grad,), place = grads[-1:], input
        if rows:
            # Padding tokens find no row, or a wrong one, and are zeroed. The row appended keeps places past the last
            # one valid.
            place = torch.searchsorted(rows[0], input.to(rows[0].dtype))
            grad = torch.cat([grad, grad.new_zeros((1, grad.shape[1]))])
        result = _transposed(grad, place, input, *ctx.options)
        return (result if seed is None else compose.dropped(result, seed, **ctx.dropout), *ctx.rest)

    torch.library.register_autograd(op.name(), formula, setup_context=setup)


def _transposed(
    grad_rows: Tensor,
    row_of_token: Tensor,
    input: Tensor,
    token_scale: float,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Row row_of_token[i] of grad_rows for each token, scaled as the weight gradient is; zero at padding."""
    result = torch.nn.functional.embedding(row_of_token, grad_rows) * token_scale
    if scale_grad_by_freq:
        _, place, counts = torch.unique(input, return_inverse=True, return_counts=True)
        result = result / counts[place].unsqueeze(-1)
    if padding_idx >= 0:
        result = result.masked_fill((input == padding_idx).unsqueeze(-1), 0)
    return result


for _name in ("embed_backward", "embed_backward_sparse", "embed_general_backward", "embed_general_backward_sparse"):
    _register_gradient(getattr(_ops, _name).default)
