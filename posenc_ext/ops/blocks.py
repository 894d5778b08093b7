"""Positions of several axes: each axis encodes columns of its own, so that memory is crossed once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from posenc_ext.conventions import Spec
from posenc_ext.ops.add import run as run_add
from posenc_ext.ops.compose import transforms_active
from posenc_ext.ops.tracing import PLAIN, dispatch_modes, dynamo_compiling, jit_tracing

ORDERS = ("axes", "functions")

_add_out = torch.ops.posenc_ext.add_general_out.default
_plain_out = torch.ops.posenc_ext.add_positional_encoding_out.default


class Block(NamedTuple):
    """Columns column .. column + width - 1 are columns first, ... of the encoding of one axis, of width d_model."""

    axis: int
    column: int
    width: int
    first: int
    d_model: int


def blocks_of(op: str, axes: int, d_model: int, widths: Sequence[int] | None, order: str, layout: str) -> list[Block]:
    """The blocks that d_model columns consist of.

    Args:
        op: for messages.
        axes: number of axes.
        d_model, widths, order: as in `functional.positional_encoding_nd`.
        layout: of the convention.

    Raises:
        ValueError: an argument that does not fit.
    """

    def require(good: bool, text: str) -> None:
        if not good:
            raise ValueError(f"posenc_ext::{op}: {text}")

    require(axes > 0, "positions must have at least 1 number in its last axis, got 0")
    require(d_model > 0, f"d_model must be positive, got {d_model}")
    require(order in ORDERS, f"order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
    if widths is None:
        widths = [2 * -(-d_model // (2 * axes))] * axes
    require(len(widths) == axes, f"widths must have one number for each of the {axes} axes, got {list(widths)}")
    good = all(width > 0 for width in widths) and sum(widths) >= d_model
    require(good, f"widths must be positive and their sum at least d_model {d_model}, got {list(widths)}")
    if order == "axes":
        starts = [0, *itertools.accumulate(widths)]
        cut = [min(width, d_model - start) for start, width in zip(starts, widths, strict=False)]
        return [Block(axis, starts[axis], cut[axis], 0, widths[axis]) for axis in range(axes) if cut[axis] > 0]
    require(layout != "interleaved", "order='functions' needs a convention of layout 'sin_cos' or 'cos_sin'")
    good = sum(widths) == d_model and not any(width % 2 for width in widths)
    require(good, f"widths of order='functions' must be even and sum to d_model {d_model}, got {list(widths)}")
    halves = [(axis, width // 2, first) for first in (0, 1) for axis, width in enumerate(widths)]
    starts = [0, *itertools.accumulate(half for _, half, _ in halves)]
    return [
        Block(a, start, half, first * half, 2 * half) for start, (a, half, first) in zip(starts, halves, strict=False)
    ]


def run(
    x: Tensor,
    positions: Sequence[Tensor],
    blocks: Sequence[Block],
    spec: Spec,
    token_scale: float,
    further: dict[str, Any],
) -> Tensor:
    """token_scale * x + encoding, differentiably.

    Args:
        x: [..., d_model].
        positions: of each axis, of the shape of the tokens.
        blocks: what x consists of.
        spec, token_scale, further: as in `add.run`.
    """
    scale = further.get("encoding_scale_tensor")
    if (
        dynamo_compiling()
        or dispatch_modes()
        or jit_tracing()
        or type(x) not in PLAIN
        or transforms_active()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (scale, *positions)))
    ):
        parts = [
            run_add(_part(x, b), positions[b.axis], 0, spec, token_scale, b.first, b.d_model, further) for b in blocks
        ]
        return torch.cat(parts, dim=-1)
    return _apply(x, positions, blocks, spec, token_scale, further)


def write(
    out: Tensor,
    x: Tensor,
    positions: Sequence[Tensor],
    blocks: Sequence[Block],
    spec: Spec,
    token_scale: float,
    further: dict[str, Any],
) -> None:
    """As `run`, into out."""
    base, flags = spec
    for block in blocks:
        if token_scale == 1 and not further and block.width == block.d_model:  # the least that can be done
            _plain_out(_part(x, block), positions[block.axis], 0, base, flags, _part(out, block))
            continue
        part = {"first_column": block.first, "d_model": block.d_model, **further}
        given = {"offset": 0, "base": base, "flags": flags, "token_scale": token_scale, **part}
        _add_out(_part(x, block), positions[block.axis], out=_part(out, block), **given)


def _part(x: Tensor, block: Block) -> Tensor:
    return x.narrow(-1, block.column, block.width)


class _AddBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Any, blocks: Any, spec: Spec, token_scale: float, further: Any) -> Any:
        ctx.token_scale = token_scale
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        write(out, x, positions, blocks, spec, token_scale, further)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.token_scale, None, None, None, None, None


_apply: Callable[..., Tensor] = _AddBlocks.apply
