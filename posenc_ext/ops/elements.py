"""What only the general ops take: dropout, and what an encoding is made of. Their arguments and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import AT_PADDING, Spec
from posenc_ext.ops import compose, encode
from posenc_ext.ops.call import GradientCall
from posenc_ext.ops.tracing import is_traced

_ops = torch.ops.posenc_ext


def arguments(
    op: str,
    like: Tensor,
    encoding_scale: float | Tensor,
    dropout_p: float,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
    position_table: Tensor | None = None,
) -> dict[str, Any] | None:
    """Those of the general ops that differ from the defaults; None for none.

    Args:
        op: for messages.
        like: what has the device and the dtype of the result.
        encoding_scale, dropout_p, positions, frequencies, position_table: as in `functional.embed`.
    """
    result: dict[str, Any] = {} if position_table is None else {"position_table": position_table}
    if frequencies is not None or (positions is not None and positions.is_floating_point()):
        result["frequencies"] = frequencies  # also None: positions have a gradient there alone
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
    # The encoding is made again, and only where something of it is trained.
    of_encoding = [given[name] for name in _OF_ENCODING]
    ctx.trained = [tensor is not None and tensor.requires_grad for tensor in of_encoding]
    positions, scale, frequencies, table = of_encoding
    ctx.table_rows = 0 if table is None else table.shape[0]
    if not ctx.trained[1]:
        table = None  # whose own gradient takes none of its numbers
    kept = (positions, scale, frequencies, table) if any(ctx.trained) else (None,) * len(of_encoding)
    ctx.save_for_backward(input, given["seed"], *kept)
    ctx.elements = {name: value for name, value in given.items() if not isinstance(value, Tensor)}


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, dict[str, Any], dict[str, Tensor | None]]:
    """The saved input, the arguments of dropout where it took place, and the gradients of the parts of the encoding."""
    input, seed, *of_encoding = ctx.saved_tensors  # once: checkpoints make them again at each look
    given, dropout = ctx.elements, {}
    if seed is not None:
        dropout = {"seed": seed, **{name: given[name] for name in ("dropout_p", "first_column", "d_model")}}
    if not any(ctx.trained):
        return input, dropout, {}
    of_sum = compose.dropped(grad, **dropout) if dropout else grad
    positions, scale, frequencies, table = of_encoding
    *trained, table_trained = ctx.trained
    without, found = _without_encoding(input, given), {}
    if any(trained):
        found = _encoding_gradients(of_sum, without, positions, scale, frequencies, table, trained, given)
    if table_trained:
        found["position_table"] = _table_gradient(of_sum, without, positions, scale, ctx.table_rows, given)
    return input, dropout, found


def in_order(op: Any, found: Mapping[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of the positional arguments of `op`, by their names, as autograd wants them."""
    return tuple(found.get(argument.name) for argument in op._schema.arguments if not argument.kwarg_only)


def gradient_of_rows(call: GradientCall, dropout: Mapping[str, Any], sparse: bool = False) -> Any:
    """The sum over the tokens of each row, differentiably where that is asked for; sparse: the rows and their sums.

    `dropout`: its arguments, where the gradient is to be dropped first.
    """
    grad = call.grad
    if compose.needed():  # forward mode over the backward pass
        of_sum = compose.dropped(grad, **dropout) if dropout else grad
        return compose.weight_gradient(call._replace(grad=of_sum), sparse)
    # Under create_graph the gradient must be differentiable, so the public op is called, which has a formula.
    recorded = (torch.is_grad_enabled() and grad.requires_grad) or is_traced(grad)
    name = "embed_general_backward" if dropout else "embed_backward" if recorded else "_embed_bwd"
    return getattr(_ops, f"{name}_sparse" if sparse else name).default(*call, **dropout)


# The tensors that an encoding is made of.
_OF_ENCODING = ("positions", "encoding_scale_tensor", "frequencies", "position_table")


def _without_encoding(input: Tensor | None, given: Mapping[str, Any]) -> Tensor | None:
    """Which tokens have no encoding here: pads, and those whose rows another shard has."""
    result = None
    if given.get("at_padding", 0) in (AT_PADDING["no_encoding"], AT_PADDING["zeros"]):
        result = input == given["padding_idx"]
    if input is not None and given.get("total_rows", -1) >= 0:
        elsewhere = (input < given["first_row"]) | (input >= given["first_row"] + given["rows"])
        result = elsewhere if result is None else result | elsewhere
    return result


def _table_gradient(
    grad: Tensor,
    without: Tensor | None,
    positions: Tensor | None,
    scale: Tensor | None,
    rows: int,
    given: Mapping[str, Any],
) -> Tensor:
    spec, tokens = Spec(given["base"], given["flags"]), grad.shape[:-1]
    row = compose.rows_of_table(tokens, positions, given["offset"], spec, grad.device).expand(tokens)
    number, dtype = given["encoding_scale"], grad.dtype
    if scale is not None:
        grad = grad.to(scale.dtype)  # so that it is rounded once, at the end
    gradient: Tensor
    if without is None:
        gradient = gradient_of_rows(GradientCall(grad, row, rows, number, -1, False), {})
    else:
        # They add to one row more, which is cut off.
        row = row.masked_fill(without, rows)
        gradient = gradient_of_rows(GradientCall(grad, row, rows + 1, number, rows, False), {})[:rows]
    return gradient if scale is None else (gradient * scale.reshape(())).to(dtype)


def _encoding_gradients(
    grad: Tensor,
    without: Tensor | None,
    positions: Tensor | None,
    scale: Tensor | None,
    frequencies: Tensor | None,
    table: Tensor | None,
    trained: list[bool],
    given: Mapping[str, Any],
) -> dict[str, Tensor | None]:
    positions_trained, scale_trained, frequencies_trained = trained
    first, width, d_model = given["first_column"], grad.shape[-1], given["d_model"]
    spec, whole = Spec(given["base"], given["flags"]), width if d_model < 0 else d_model
    grad = grad.to(compose._wide(grad.dtype)) * given["encoding_scale"]
    if without is not None:
        grad = grad.masked_fill(without.unsqueeze(-1), 0)
    result: dict[str, Tensor | None] = {}
    if scale is not None and scale_trained:
        encoding = compose.columns_of_encoding(
            grad, positions, given["offset"], spec, grad.dtype, first, d_model, frequencies, table
        )
        result["encoding_scale_tensor"] = (grad * encoding).sum().reshape(scale.shape)
    if positions_trained or frequencies_trained:
        of_encoding = grad if scale is None else grad * scale.reshape(())
        wanted = (positions_trained, frequencies_trained)
        result["positions"], result["frequencies"] = encode.gradients(
            of_encoding, positions, frequencies, wanted, given["offset"], spec, first, whole
        )
    return result
