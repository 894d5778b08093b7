"""token_scale * x + encoding: the eager entry and the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from posenc_ext.conventions import Spec
from posenc_ext.ops import compose, shard
from posenc_ext.ops.call import INT64, by_name, offset_error
from posenc_ext.ops.compose import transforms_active
from posenc_ext.plain import is_dtensor

_PLAIN = shard.PLAIN
_ops = torch.ops.posenc_ext
_add = _ops.add_positional_encoding.default
_add_fwd = _ops._add_positional_encoding_fwd.default
_add_general = _ops.add_general.default
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


def run(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    token_scale: float = 1.0,
    first_column: int = 0,
    d_model: int = -1,
) -> Tensor:
    """token_scale * x + encoding(positions + offset), differentiably.

    Args:
        x: [..., width].
        positions: of the shape of the tokens, or None for the running index.
        offset, spec, token_scale: as in the ops.
        first_column, d_model: x is a shard, columns first_column, ... of d_model; -1: it is the whole.
    """
    if type(x) not in _PLAIN and is_dtensor(x):
        return shard.add(run, x, positions, offset, spec, token_scale)
    plain = token_scale == 1 and d_model < 0
    result: Tensor
    if _is_compiling() and not compose.needed():
        if plain:
            result = _add(x, positions, offset, *spec)
        else:
            result = _run_general(x, positions, offset, spec, token_scale, first_column, d_model)
        return result
    if not -INT64 <= offset < INT64:
        raise offset_error("add_positional_encoding", offset)
    if transforms_active() or forward_ad._current_level >= 0:  # compose.needed(), without a call
        return compose.add(x, positions, offset, spec, token_scale, first_column, d_model)
    if not plain:
        return _run_general(x, positions, offset, spec, token_scale, first_column, d_model)
    if x.requires_grad and _grad_enabled():
        return _apply(x, positions, offset, *spec)
    result = _add_fwd(x, positions, offset, *spec)
    return result


def _run_general(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    token_scale: float,
    first_column: int,
    d_model: int,
) -> Tensor:
    base, flags = spec
    part = {"first_column": first_column, "d_model": d_model}
    result: Tensor = _add_general(x, positions, offset=offset, base=base, flags=flags, token_scale=token_scale, **part)
    return result


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return _add_fwd(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


_apply: Callable[..., Tensor] = _Add.apply
torch.library.register_autograd("posenc_ext::add_positional_encoding", _Add.backward)


def _save_scale(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: dict[str, Any] | None = None
) -> None:
    ctx.token_scale = by_name(_add_general, inputs, keyword_only_inputs or {})["token_scale"]


def _add_general_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad * ctx.token_scale, None


torch.library.register_autograd("posenc_ext::add_general", _add_general_formula, setup_context=_save_scale)
