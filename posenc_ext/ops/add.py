"""token_scale * x + encoding: the eager entry and the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from posenc_ext.conventions import Spec
from posenc_ext.ops import compose, elements, shard
from posenc_ext.ops.call import by_name, check_offset
from posenc_ext.ops.compose import transforms_active
from posenc_ext.ops.embed import refuse_trained_positions
from posenc_ext.ops.tracing import (
    PLAIN,
    decomposed,
    dispatch_modes,
    dynamo_compiling,
    jit_tracing,
)
from posenc_ext.plain import is_dtensor

_ops = torch.ops.posenc_ext
_add = _ops.add_positional_encoding.default
_add_fwd = _ops._add_positional_encoding_fwd.default
_add_now = _add_fwd._op  # as embed._embed_now
_add_general = _ops.add_general.default
_is_compiling = torch.compiler.is_compiling
_is_exporting = torch.compiler.is_exporting
_grad_enabled = torch.is_grad_enabled


def run(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    token_scale: float = 1.0,
    first_column: int = 0,
    d_model: int = -1,
    further: dict[str, Any] | None = None,
) -> Tensor:
    """token_scale * x + encoding(positions + offset), differentiably.

    Args:
        x: [..., width].
        positions: of the shape of the tokens, or None for the running index.
        offset, spec, token_scale: as in the ops.
        first_column, d_model: x is a shard, columns first_column, ... of d_model; -1: it is the whole.
        further: arguments of `add_general`: encoding_scale, dropout_p, seed, position_table, ...
    """
    if (
        dynamo_compiling()
        or dispatch_modes()
        or jit_tracing()
        or type(x) not in PLAIN
        or (positions is not None and type(positions) is not Tensor)
    ):
        return _run_traced(x, positions, offset, spec, token_scale, first_column, d_model, further or {})
    if transforms_active() or forward_ad._current_level >= 0:  # compose.needed(), without a call
        return compose.add(x, positions, offset, spec, token_scale, first_column, d_model, **(further or {}))
    if further is not None or token_scale != 1 or d_model >= 0:
        return _run_general(x, positions, offset, spec, token_scale, first_column, d_model, further or {})
    if x.requires_grad and _grad_enabled():
        return _apply(x, positions, offset, *spec)
    base, flags = spec
    result: Tensor = _add_now(x, positions, offset, base, flags)
    return result


def _run_traced(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    token_scale: float,
    first_column: int,
    d_model: int,
    further: dict[str, Any],
) -> Tensor:
    """As `embed._run_traced`."""
    if is_dtensor(x):
        return shard.add(run, x, positions, offset, spec, token_scale, further)
    if not _is_compiling():
        check_offset("add_positional_encoding", offset)
    if compose.needed():
        return compose.add(x, positions, offset, spec, token_scale, first_column, d_model, **further)
    if further or token_scale != 1 or d_model >= 0:
        return _run_general(x, positions, offset, spec, token_scale, first_column, d_model, further)
    raw = dynamo_compiling() and not (_grad_enabled() and x.requires_grad) and not _is_exporting()
    result: Tensor = (_add_fwd if raw else decomposed(_add))(x, positions, offset, *spec)
    return result


def _run_general(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    token_scale: float,
    first_column: int,
    d_model: int,
    further: dict[str, Any],
) -> Tensor:
    base, flags = spec
    part = {"first_column": first_column, "d_model": d_model, **further}
    result: Tensor = decomposed(_add_general)(
        x, positions, offset=offset, base=base, flags=flags, token_scale=token_scale, **part
    )
    return result


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return _add_now(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


_apply: Callable[..., Tensor] = _Add.apply


def _check_positions(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    refuse_trained_positions(_add, inputs[1])


torch.library.register_autograd("posenc_ext::add_positional_encoding", _Add.backward, setup_context=_check_positions)


def _save_general(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: dict[str, Any] | None = None
) -> None:
    elements.save(ctx, by_name(_add_general, inputs, keyword_only_inputs or {}))


def _add_general_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, dropout, found = elements.gradients(ctx, grad)
    of_sum = compose.dropped(grad, **dropout) if dropout else grad
    return elements.in_order(_add_general, {"x": of_sum * ctx.elements["token_scale"], **found})


torch.library.register_autograd("posenc_ext::add_general", _add_general_formula, setup_context=_save_general)
