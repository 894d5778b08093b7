"""x + encoding: the eager entry and the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import Spec
from posenc_ext.ops import compose

_add = torch.ops.posenc_ext.add_positional_encoding.default
_add_fwd = torch.ops.posenc_ext._add_positional_encoding_fwd.default
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


def run(x: Tensor, positions: Tensor | None, offset: int, spec: Spec) -> Tensor:
    """X + encoding(positions + offset), differentiable in x; positions as `resolve_positions` gives them."""
    base, flags = spec
    if compose.needed():
        return compose.add(x, positions, offset, spec)
    result: Tensor
    if _is_compiling():
        result = _add(x, positions, offset, base, flags)
    elif x.requires_grad and _grad_enabled():
        result = _apply(x, positions, offset, base, flags)
    else:
        result = _add_fwd(x, positions, offset, base, flags)
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
