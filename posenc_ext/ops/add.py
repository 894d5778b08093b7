"""x + encoding: the eager entry and the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from posenc_ext.conventions import Spec
from posenc_ext.ops import compose
from posenc_ext.ops.call import INT64, LEAST, check_offset, offset_error
from posenc_ext.ops.compose import transforms_active
from posenc_ext.ops.tracing import (
    PLAIN,
    decomposed,
    dispatch_modes,
    dynamo_compiling,
    jit_tracing,
)

_add = torch.ops.posenc_ext.add_positional_encoding.default
_add_fwd = torch.ops.posenc_ext._add_positional_encoding_fwd.default
_is_compiling = torch.compiler.is_compiling
_is_exporting = torch.compiler.is_exporting
_grad_enabled = torch.is_grad_enabled


def run(x: Tensor, positions: Tensor | None, offset: int, spec: Spec, token_scale: float = 1.0) -> Tensor:
    """Add encoding(positions + offset) to x, differentiably; positions, where given, have the shape of the tokens."""
    if token_scale != 1:
        x = x * token_scale  # TEMPORARY until add_general
    if (
        dynamo_compiling()
        or dispatch_modes()
        or jit_tracing()
        or type(x) not in PLAIN
        or (positions is not None and type(positions) is not Tensor)
    ):
        return _run_traced(x, positions, offset, spec)
    if not LEAST <= offset < INT64:
        raise offset_error("add_positional_encoding", offset)
    if transforms_active() or forward_ad._current_level >= 0:  # compose.needed(), without a call
        return compose.add(x, positions, offset, spec)
    if _grad_enabled() and x.requires_grad:
        return _apply(x, positions, offset, *spec)
    result: Tensor = _add_fwd(x, positions, offset, *spec)
    return result


def _run_traced(x: Tensor, positions: Tensor | None, offset: int, spec: Spec) -> Tensor:
    """As `embed._run_traced`."""
    if not _is_compiling():
        check_offset("add_positional_encoding", offset)
    if compose.needed():
        return compose.add(x, positions, offset, spec)
    raw = dynamo_compiling() and not (_grad_enabled() and x.requires_grad) and not _is_exporting()
    result: Tensor = (_add_fwd if raw else decomposed(_add))(x, positions, offset, *spec)
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
