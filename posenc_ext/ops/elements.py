"""What only the general ops take: the scale of the encoding, a table of positions, dropout. Arguments and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import AT_PADDING, NO_ENCODING, SEQUENCE_FIRST, Spec
from posenc_ext.ops import compose
from posenc_ext.ops.call import GradientCall
from posenc_ext.ops.tracing import is_traced

_ops = torch.ops.posenc_ext


def arguments(
    op: str, like: Tensor, encoding_scale: float | Tensor, dropout_p: float, position_table: Tensor | None = None
) -> dict[str, Any] | None:
    """Those of the general ops that differ from the defaults; None for none.

    Args:
        op: for messages.
        like: what has the device and the dtype of the result.
        encoding_scale, dropout_p, position_table: as in `functional.embed`.
    """
    result: dict[str, Any] = {} if position_table is None else {"position_table": position_table}
    if isinstance(encoding_scale, Tensor):
        # To the type that sums have: a scale in bfloat16 would be rounded twice.
        result["encoding_scale_tensor"] = encoding_scale.to(compose._wide(like.dtype))
    elif encoding_scale != 1:
        result["encoding_scale"] = float(encoding_scale)
    if dropout_p:
        if not 0 <= dropout_p <= 1:
            raise ValueError(f"posenc_ext::{op}: dropout_p must lie in [0, 1], got {dropout_p}")
        # From torch's generator of that device, so all that repeats its numbers repeats ours.
        result["seed"] = torch.randint(0, 2**62, (), device=like.device)
        result["dropout_p"] = float(dropout_p)
    return result or None


def save(ctx: Any, given: Mapping[str, Any], input: Tensor | None = None) -> None:
    """Keep what the gradients take of the arguments of a general op, under their names."""
    scale, table = given["encoding_scale_tensor"], given["position_table"]
    ctx.scale_is_trained = scale is not None and scale.requires_grad
    ctx.table_rows = table.shape[0] if table is not None and table.requires_grad else None
    ctx.weight_rows = given["weight"].shape[0] if "weight" in given else 0
    of_encoding = (given["positions"], scale) if ctx.scale_is_trained or ctx.table_rows is not None else (None, None)
    # The encoding is made again, and only where the scale is trained.
    ctx.save_for_backward(input, given["seed"], *of_encoding, table if ctx.scale_is_trained else None)
    ctx.elements = {name: value for name, value in given.items() if not isinstance(value, Tensor)}


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The gradient of the sum that dropout was applied to, the saved input, and other gradients by their names."""
    input, seed, positions, scale, table = ctx.saved_tensors  # once: checkpoints make them again at each look
    given, found = ctx.elements, {}
    if seed is not None:
        # The same elements are dropped. Tokens are numbered in the order of memory.
        flags = NO_ENCODING.flags | given["flags"] & SEQUENCE_FIRST
        part = {name: given[name] for name in ("dropout_p", "first_column", "d_model")}
        grad = _ops.add_general(grad, seed=seed, flags=flags, **part)
    if ctx.scale_is_trained or ctx.table_rows is not None:
        without = _without_encoding(ctx, input)
        if ctx.scale_is_trained:
            found["encoding_scale_tensor"] = _scale_gradient(grad, positions, scale, table, given, without)
        if ctx.table_rows is not None:
            found["position_table"] = _table_gradient(grad, positions, scale, ctx.table_rows, given, without)
    return grad, input, found


def in_order(op: Any, found: Mapping[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of the positional arguments of `op`, by their names, as autograd wants them."""
    return tuple(found.get(argument.name) for argument in op._schema.arguments if not argument.kwarg_only)


def dense_gradient(call: GradientCall) -> Tensor:
    """The sum over the tokens of each row, differentiably where that is asked for."""
    if compose.needed():  # forward mode over the backward pass
        return compose.weight_gradient(call, sparse=False)
    # Under create_graph the gradient must be differentiable, so the public op is called, which has a formula.
    recorded = (torch.is_grad_enabled() and call.grad.requires_grad) or is_traced(call.grad)
    result: Tensor = (_ops.embed_backward if recorded else _ops._embed_bwd).default(*call)
    return result


def _without_encoding(ctx: Any, input: Tensor | None) -> Tensor | None:
    """Which tokens have no encoding here: pads, and those whose rows another shard has."""
    given, result = ctx.elements, None
    if given.get("at_padding", 0) in (AT_PADDING["no_encoding"], AT_PADDING["zeros"]):
        result = input == given["padding_idx"]
    if given.get("total_rows", -1) >= 0:
        row = input - given["first_row"]
        elsewhere = (row < 0) | (row >= ctx.weight_rows)
        result = elsewhere if result is None else result | elsewhere
    return result


def _scale_gradient(
    grad: Tensor,
    positions: Tensor | None,
    scale: Tensor,
    table: Tensor | None,
    given: Mapping[str, Any],
    without: Tensor | None,
) -> Tensor:
    part = given["first_column"], given["d_model"]
    spec = Spec(given["base"], given["flags"])
    encoding = compose.columns_of_encoding(grad, positions, given["offset"], spec, scale.dtype, *part, table)
    product = grad.to(scale.dtype) * encoding
    if without is not None:
        product = product.masked_fill(without.unsqueeze(-1), 0)
    gradient: Tensor = product.sum() * given["encoding_scale"]
    return gradient.reshape(scale.shape)


def _table_gradient(
    grad: Tensor,
    positions: Tensor | None,
    scale: Tensor | None,
    rows: int,
    given: Mapping[str, Any],
    without: Tensor | None,
) -> Tensor:
    tokens = grad.shape[:-1]
    row = compose.positions_in_table(tokens, positions, given["offset"], given["flags"], grad.device).expand(tokens)
    number, dtype = given["encoding_scale"], grad.dtype
    if scale is not None:
        grad = grad.to(scale.dtype)  # so that it is rounded once, at the end
    if without is None:
        gradient = dense_gradient(GradientCall(grad, row, rows, number, -1, False))
    else:
        # They add to one row more, which is cut off.
        row = row.masked_fill(without, rows)
        gradient = dense_gradient(GradientCall(grad, row, rows + 1, number, rows, False))[:rows]
    return gradient if scale is None else (gradient * scale.reshape(())).to(dtype)
