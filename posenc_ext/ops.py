"""The custom ops from Python: how each is called, differentiated, traced and faked.

Every op exists twice in C++ (csrc/ops.cpp). The raw one (`_embed_fwd`, ...) has no autograd formula: an eager call that
needs no gradient goes straight to it, and one that does goes through a `torch.autograd.Function` around it, since a
formula registered on the op costs several microseconds even when nothing is differentiated. The public one
(`torch.ops.posenc_ext.embed`, ...) carries the formula: traced programs hold it, so exported ones stay
differentiable, and so do direct callers.

Under functorch transforms (`torch.func`) and forward-mode AD the same values are composed from PyTorch's own ops, which
have all those rules; slower, bit-equal. That choice is made here: a direct call of `torch.ops.posenc_ext.*` under
forward mode drops the tangent, as every custom op does, and must go through `posenc_ext.functional` instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

try:
    from posenc_ext import _C  # noqa: F401  (importing it registers the ops)
except ImportError as error:
    _folder = Path(__file__).parent
    if not any(_folder.glob("_C*.so")):
        raise ImportError(
            f"posenc_ext: {_folder} holds the sources and no compiled half (posenc_ext._C). Python finds them first "
            "where it is started in a checkout: start it elsewhere to use the installed package, or build in place "
            "with `python setup.py build_ext --inplace`"
        ) from error
    raise ImportError(
        f"posenc_ext: the compiled half posenc_ext._C cannot be loaded under torch {torch.__version__}: {error}. "
        "Install it anew with `pip install .`"
    ) from error
from posenc_ext.conventions import NO_WAVES, SEQUENCE_FIRST, Recipe

_ops = torch.ops.posenc_ext
_Op = Callable[..., Tensor]
_Pair = Callable[..., tuple[Tensor, Tensor]]
_embed: _Op = _ops.embed.default
_embed_fwd: _Op = _ops._embed_fwd.default
_embed_backward: _Op = _ops.embed_backward.default
_embed_bwd: _Op = _ops._embed_bwd.default
_embed_backward_sparse: _Pair = _ops.embed_backward_sparse.default
_embed_bwd_sparse: _Pair = _ops._embed_bwd_sparse.default
_add: _Op = _ops.add_positional_encoding.default
_add_fwd: _Op = _ops._add_positional_encoding_fwd.default
_encode: _Op = _ops.positional_encoding.default
check_embed: Callable[..., None] = _ops.check_embed.default
torch.fx.node.has_side_effect(check_embed)  # it returns nothing, and must be kept in a traced graph

_transforms_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling


_INT64 = 2**63


def _needs_composition() -> bool:
    return _transforms_active() or forward_ad._current_level >= 0


def check_offset(op: str, offset: int) -> None:
    """Refuse what the op's int64 argument cannot hold; the dispatcher's own message names neither."""
    if not -_INT64 <= offset < _INT64:
        raise ValueError(f"posenc_ext::{op}: offset {offset} exceeds the int64 range")


# ---- embed -----------------------------------------------------------------------------------------------------------


def embed(
    weight: Tensor,
    input: Tensor,
    positions: Tensor | None,
    offset: int,
    token_scale: float,
    recipe: Recipe,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Tensor:
    """token_scale * weight[input] + waves(positions + offset), differentiable in weight.

    `padding_idx` is -1 for none; `positions`, where given, has the shape of `input`.
    """
    if _is_compiling() and not _needs_composition():
        if sparse:
            raise NotImplementedError(
                "posenc_ext::embed: sparse=True cannot be traced (torch.compile and export have no sparse gradients)"
            )
        return _embed(weight, input, positions, offset, token_scale, *recipe, padding_idx, scale_grad_by_freq, sparse)
    check_offset("embed", offset)
    if _needs_composition():
        return _composed_embed(
            weight, input, positions, offset, token_scale, recipe, padding_idx, scale_grad_by_freq, sparse
        )
    if weight.requires_grad and torch.is_grad_enabled():
        return _apply_embed(
            weight, input, positions, offset, token_scale, recipe, padding_idx, scale_grad_by_freq, sparse
        )
    return _embed_fwd(weight, input, positions, offset, token_scale, *recipe)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, input: Tensor, *args: Any) -> Tensor:
        positions, offset, token_scale, recipe, padding_idx, scale_grad_by_freq, sparse = args
        ctx.save_for_backward(input)
        ctx.gradient = (weight.shape[0], token_scale, padding_idx, scale_grad_by_freq, sparse)
        ctx.leaf = weakref.ref(weight) if sparse and weight.is_leaf else None
        return _embed_fwd(weight, input, positions, offset, token_scale, *recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        gradient = _weight_gradient(grad, input, *ctx.gradient)
        if ctx.leaf is not None:
            _keep_coalesced(ctx.leaf, gradient)
        return (gradient, *(None,) * 8)


def _keep_coalesced(leaf: Callable[[], Tensor | None], gradient: Tensor) -> None:
    """See that `leaf.grad`, if it becomes this gradient and nothing else, is known to be coalesced.

    When autograd stores a sparse gradient it makes a tensor of the same indices and values and forgets that, and an
    optimiser would sort and sum them once more.
    """
    values = gradient._values()

    def at_end_of_backward() -> None:
        tensor = leaf()
        stored = None if tensor is None else tensor.grad
        if stored is not None and stored.is_sparse and stored._values().data_ptr() == values.data_ptr():
            stored._coalesced_(True)

    torch.autograd.Variable._execution_engine.queue_callback(at_end_of_backward)


_apply_embed: _Op = _Embed.apply


def _weight_gradient(
    grad: Tensor,
    input: Tensor,
    num_weights: int,
    token_scale: float,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Tensor:
    # With create_graph the op that has a formula of its own is taken, so that the double backward is right.
    recorded = torch.is_grad_enabled() and grad.requires_grad
    arguments = (grad, input, num_weights, token_scale, padding_idx, scale_grad_by_freq)
    if _needs_composition():  # forward mode over the backward pass
        return _composed_weight_gradient(*arguments, sparse)
    if not sparse:
        return _embed_backward(*arguments) if recorded or _is_compiling() else _embed_bwd(*arguments)
    rows, values = _embed_backward_sparse(*arguments) if recorded else _embed_bwd_sparse(*arguments)
    # The rows come sorted and unique, so the gradient is born coalesced.
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, (num_weights, values.shape[1]), is_coalesced=True, check_invariants=False
    )


def _composed_weight_gradient(
    grad: Tensor,
    input: Tensor,
    num_weights: int,
    token_scale: float,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Tensor:
    if sparse:
        raise NotImplementedError(
            "posenc_ext::embed_backward_sparse: forward mode and torch.func have no sparse gradients"
        )
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    result: Tensor = torch.ops.aten.embedding_dense_backward(
        grad.to(wide) * token_scale, input, num_weights, padding_idx, scale_grad_by_freq
    )
    return result.to(grad.dtype)


def _composed_embed(
    weight: Tensor,
    input: Tensor,
    positions: Tensor | None,
    offset: int,
    token_scale: float,
    recipe: Recipe,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Tensor:
    rows = torch.nn.functional.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    if padding_idx >= 0:
        # By detaching, not by embedding's own option: forward mode does not know that one.
        rows = torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scaled = rows.to(wide) * token_scale
    if recipe != NO_WAVES:
        scaled = scaled + _composed_waves(input.shape, weight.shape[1], positions, offset, recipe, wide, weight.device)
    return scaled.to(weight.dtype)


def _composed_waves(
    token_shape: torch.Size,
    d_model: int,
    positions: Tensor | None,
    offset: int,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The encoding of a batch of tokens, broadcastable to it."""
    batch_first = not recipe[1] & SEQUENCE_FIRST
    if positions is None:
        rank = len(token_shape)
        length = 1 if rank == 0 else token_shape[-1 if batch_first else 0]
        positions = torch.arange(length, device=device)
        positions = positions.reshape([length] + [1] * (0 if batch_first else rank - 1)) if rank else positions[0]
    return _encode(positions, d_model, offset, *recipe, dtype)


# ---- x + PE ----------------------------------------------------------------------------------------------------------


def add_positional_encoding(x: Tensor, positions: Tensor | None, offset: int, recipe: Recipe) -> Tensor:
    """X + waves(positions + offset), differentiable in x."""
    if _is_compiling() and not _needs_composition():
        return _add(x, positions, offset, *recipe)
    check_offset("add_positional_encoding", offset)
    if _needs_composition():
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        waves = _composed_waves(x.shape[:-1], x.shape[-1], positions, offset, recipe, wide, x.device)
        return (x.to(wide) + waves).to(x.dtype)
    if x.requires_grad and torch.is_grad_enabled():
        return _apply_add(x, positions, offset, recipe)
    return _add_fwd(x, positions, offset, *recipe)


class _AddPositionalEncoding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor | None, offset: int, recipe: Recipe) -> Tensor:
        return _add_fwd(x, positions, offset, *recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


_apply_add: _Op = _AddPositionalEncoding.apply


# ---- PE alone --------------------------------------------------------------------------------------------------------


def positional_encoding(positions: Tensor, d_model: int, offset: int, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """waves(positions + offset), [*positions.shape, d_model]; positions are integers, so nothing is differentiable."""
    return _encode(positions, d_model, offset, *recipe, dtype)


# ---- formulas of the public ops --------------------------------------------------------------------------------------


def _embed_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, input, _, _, token_scale = inputs[:5]
    padding_idx, scale_grad_by_freq, sparse = inputs[-3:]
    ctx.save_for_backward(input)
    ctx.gradient = (weight.shape[0], token_scale, padding_idx, scale_grad_by_freq, sparse)


def _embed_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (input,) = ctx.saved_tensors
    return (_weight_gradient(grad, input, *ctx.gradient), *(None,) * 9)


torch.library.register_autograd("posenc_ext::embed", _embed_formula, setup_context=_embed_setup)


# The weight gradient is linear in the output gradient, and its transpose is the lookup without waves: what arrives for
# row r goes to every token of r, times the scale and the same divisors.
def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, input, _, token_scale, padding_idx, scale_grad_by_freq = inputs
    ctx.save_for_backward(input, *(output[:1] if isinstance(output, tuple) else ()))
    ctx.gradient = (token_scale, padding_idx, scale_grad_by_freq)


def _transposed(grad_rows: Tensor, tokens: Tensor, input: Tensor, gradient: tuple[float, int, bool]) -> Tensor:
    """Row tokens[i] of grad_rows for each token, scaled as the weight gradient is; zero at padding."""
    token_scale, padding_idx, scale_grad_by_freq = gradient
    result = torch.nn.functional.embedding(tokens, grad_rows) * token_scale
    if scale_grad_by_freq:
        _, place, counts = torch.unique(input, return_inverse=True, return_counts=True)
        result = result / counts[place].unsqueeze(-1)
    if padding_idx >= 0:
        result = result.masked_fill((input == padding_idx).unsqueeze(-1), 0)
    return result


def _backward_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (input,) = ctx.saved_tensors
    return (_transposed(grad, input, input, ctx.gradient), *(None,) * 5)


def _backward_sparse_formula(ctx: Any, _: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
    input, rows = ctx.saved_tensors
    # Padding tokens have no row and are zeroed; the row appended is for those that would come after the last.
    place = torch.searchsorted(rows, input.to(rows.dtype))
    padded = torch.cat([grad_values, grad_values.new_zeros((1, grad_values.shape[1]))])
    return (_transposed(padded, place, input, ctx.gradient), *(None,) * 5)


torch.library.register_autograd("posenc_ext::embed_backward", _backward_formula, setup_context=_backward_setup)
torch.library.register_autograd(
    "posenc_ext::embed_backward_sparse", _backward_sparse_formula, setup_context=_backward_setup
)
torch.library.register_autograd(
    "posenc_ext::add_positional_encoding",
    lambda ctx, grad: (grad, *(None,) * 4),
    setup_context=lambda ctx, inputs, output: None,
)


# ---- fake kernels: shapes, dtypes and devices for tracing ------------------------------------------------------------


def _require(condition: bool, op: str, text: str) -> None:
    if not condition:
        raise ValueError(f"posenc_ext::{op}: {text}")


def _check_integers(op: str, argument: str, tensor: Tensor) -> None:
    good = tensor.dtype in (torch.int64, torch.int32)
    _require(good, op, f"{argument} must have dtype int64 or int32, got {tensor.dtype}")


def _check_device(op: str, argument: str, tensor: Tensor | None, other: Tensor, name: str) -> None:
    if tensor is not None and tensor.device != other.device:
        raise ValueError(
            f"posenc_ext::{op}: {argument} must be on the device of {name} ({other.device}), got {tensor.device}"
        )


def _check_floating(op: str, argument: str, dtype: torch.dtype) -> None:
    good = dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    _require(good, op, f"{argument} must have dtype float32, float64, bfloat16 or float16, got {dtype}")


def _check_width(op: str, width: int) -> None:
    _require(width >= 1, op, f"the width (d_model) must be positive, got {width}")


def _check_positions(op: str, positions: Tensor | None, token_shape: torch.Size) -> None:
    if positions is None:
        return
    _check_integers(op, "positions", positions)
    good = positions.shape == token_shape
    _require(
        good,
        op,
        f"positions must have the shape of the tokens {list(token_shape)}, got {list(positions.shape)}",
    )


def _check_out(op: str, out: Tensor, expected: Tensor, name: str) -> None:
    _check_device(op, "out", out, expected, name)
    _require(out.dtype == expected.dtype, op, f"out must have dtype {expected.dtype}, got {out.dtype}")
    good = out.shape == expected.shape
    _require(good, op, f"out must have shape {list(expected.shape)}, got {list(out.shape)}")


def _fake_embed(weight: Tensor, input: Tensor, positions: Tensor | None, *_: Any) -> Tensor:
    op = "embed"
    _check_floating(op, "weight", weight.dtype)
    _require(weight.dim() == 2, op, f"weight must have 2 dimensions [vocab_size, d_model], got {list(weight.shape)}")
    _check_width(op, weight.shape[1])
    _check_integers(op, "input", input)
    _check_device(op, "input", input, weight, "weight")
    _check_positions(op, positions, input.shape)
    _check_device(op, "positions", positions, weight, "weight")
    return weight.new_empty((*input.shape, weight.shape[1]))


def _fake_embed_out(weight: Tensor, input: Tensor, positions: Tensor | None, *args: Any) -> None:
    _check_out("embed", args[-1], _fake_embed(weight, input, positions), "weight")


def _check_gradient(op: str, grad: Tensor, input: Tensor) -> None:
    _check_floating(op, "grad", grad.dtype)
    _check_integers(op, "input", input)
    _check_device(op, "input", input, grad, "grad")
    good = grad.dim() == input.dim() + 1 and grad.shape[:-1] == input.shape
    _require(
        good,
        op,
        f"grad must have the shape of input {list(input.shape)} and one axis more, got {list(grad.shape)}",
    )


def _fake_embed_backward(grad: Tensor, input: Tensor, num_weights: int, *_: Any) -> Tensor:
    _check_gradient("embed_backward", grad, input)
    return grad.new_empty((num_weights, grad.shape[-1]))


def _fake_embed_backward_sparse(grad: Tensor, input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    _check_gradient("embed_backward_sparse", grad, input)
    count = torch.library.get_ctx().new_dynamic_size()
    return grad.new_empty((count,), dtype=torch.int64), grad.new_empty((count, grad.shape[-1]))


def _fake_add(x: Tensor, positions: Tensor | None, *_: Any) -> Tensor:
    op = "add_positional_encoding"
    _check_floating(op, "x", x.dtype)
    _require(x.dim() >= 1, op, "x must have at least 1 dimension [..., d_model], got a scalar")
    _check_width(op, x.shape[-1])
    _check_positions(op, positions, x.shape[:-1])
    _check_device(op, "positions", positions, x, "x")
    return x.new_empty(x.shape)


def _fake_add_out(x: Tensor, positions: Tensor | None, *args: Any) -> None:
    _check_out("add_positional_encoding", args[-1], _fake_add(x, positions), "x")


def _fake_encode(positions: Tensor, d_model: int, *args: Any) -> Tensor:
    op = "positional_encoding"
    _check_integers(op, "positions", positions)
    _check_floating(op, "dtype", args[-1])
    _check_width(op, d_model)
    return positions.new_empty((*positions.shape, d_model), dtype=args[-1])


def _fake_encode_out(positions: Tensor, d_model: int, *args: Any) -> None:
    _check_out("positional_encoding", args[-1], _fake_encode(positions, d_model, args[-1].dtype), "positions")


def _fake_check_embed(
    weight: Tensor, input: Tensor, positions: Tensor | None, *args: Any, out: Tensor | None = None
) -> None:
    expected = _fake_embed(weight, input, positions)
    if (given := args[3] if len(args) > 3 else out) is not None:
        _check_out("embed", given, expected, "weight")


_FAKES: dict[str, Callable[..., Any]] = {
    "embed": _fake_embed,
    "_embed_fwd": _fake_embed,
    "embed_backward": _fake_embed_backward,
    "_embed_bwd": _fake_embed_backward,
    "embed_backward_sparse": _fake_embed_backward_sparse,
    "_embed_bwd_sparse": _fake_embed_backward_sparse,
    "add_positional_encoding": _fake_add,
    "_add_positional_encoding_fwd": _fake_add,
    "positional_encoding": _fake_encode,
    "embed_out": _fake_embed_out,
    "add_positional_encoding_out": _fake_add_out,
    "positional_encoding_out": _fake_encode_out,
    "check_embed": _fake_check_embed,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"posenc_ext::{_name}", _fake)
