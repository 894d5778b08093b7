"""Positions that are counted: how the ops are called, and the same in core ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from posenc_ext.ops import compose, shard
from posenc_ext.ops.tracing import decomposed, is_traced
from posenc_ext.plain import is_dtensor

_ops = torch.ops.posenc_ext
_from_padding = _ops.positions_from_padding.default
_from_cu_seqlens = _ops.positions_from_cu_seqlens.default
_from_sequence_ids = _ops.positions_from_sequence_ids.default


def from_padding(
    tokens: Tensor,
    padding_idx: int,
    offsets: Tensor | None,
    first_position: int,
    padding_position: int | None,
    batch_first: bool,
) -> Tensor:
    """The op `positions_from_padding`."""
    rest = (first_position, padding_position, batch_first)
    if is_dtensor(tokens):

        def count(local: Tensor, offsets: Tensor | None = None) -> Tensor:
            return from_padding(local, padding_idx, offsets, *rest)

        return shard.positions("positions_from_padding", "ids_or_mask", count, tokens, batch_first, offsets)
    return _call(_from_padding, compose_from_padding, tokens, padding_idx, offsets, *rest)


def from_cu_seqlens(cu_seqlens: Tensor, total: int, first_position: int) -> Tensor:
    """The op `positions_from_cu_seqlens`."""
    shard.refuse("positions_from_cu_seqlens", cu_seqlens, cu_seqlens=cu_seqlens)
    return _call(_from_cu_seqlens, compose_from_cu_seqlens, cu_seqlens, total, first_position)


def from_sequence_ids(ids: Tensor, first_position: int, batch_first: bool) -> Tensor:
    """The op `positions_from_sequence_ids`."""
    if is_dtensor(ids):

        def count(local: Tensor) -> Tensor:
            return from_sequence_ids(local, first_position, batch_first)

        return shard.positions("positions_from_sequence_ids", "ids", count, ids, batch_first)
    return _call(_from_sequence_ids, compose_from_sequence_ids, ids, first_position, batch_first)


def _call(op: Any, composed: Callable[..., Tensor], tokens: Tensor, *rest: Any) -> Tensor:
    if compose.needed():
        return composed(tokens, *rest)
    return cast("Tensor", (decomposed(op) if is_traced(tokens) else op)(tokens, *rest))


# ---- the same in core ATen -------------------------------------------------------------------------------------------


def compose_from_padding(
    ids_or_mask: Tensor,
    padding_idx: int,
    offset: Tensor | None = None,
    first_position: int = 0,
    padding_position: int | None = 0,
    batch_first: bool = True,
) -> Tensor:
    """As the op `positions_from_padding`."""
    axis = -1 if batch_first else 0
    real = torch.ne(ids_or_mask.to(torch.int64), int(padding_idx))
    positions = real.to(torch.int64).cumsum(axis) + (first_position - 1)
    if offset is not None:
        positions = positions + offset.to(torch.int64).unsqueeze(axis)
    if padding_position is None:
        return positions
    return torch.where(real, positions, torch.full_like(positions, padding_position))


def compose_from_cu_seqlens(cu_seqlens: Tensor, total: int, first_position: int = 0) -> Tensor:
    """As the op `positions_from_cu_seqlens`."""
    starts = cu_seqlens.to(torch.int64)
    # At each start how much further it lies than the one before: their running sum is the start of every token.
    steps = starts - torch.constant_pad_nd(starts, [1, -1])
    begins = torch.zeros([total + 1], dtype=torch.int64, device=starts.device).scatter_add(0, starts, steps).cumsum(0)
    begins = begins[:total]
    return torch.arange(first_position, first_position + total, 1, device=starts.device) - begins


def compose_from_sequence_ids(ids: Tensor, first_position: int = 0, batch_first: bool = True) -> Tensor:
    """As the op `positions_from_sequence_ids`."""
    axis = -1 if batch_first else 0
    length = ids.shape[axis]
    first, later, earlier = (ids[..., :1], ids[..., 1:], ids[..., :-1]) if batch_first else (ids[:1], ids[1:], ids[:-1])
    changes = torch.ne(later, earlier).to(torch.int64)
    begun = torch.cat([torch.zeros_like(first, dtype=torch.int64), changes.cumsum(axis)], axis)
    lengths = torch.zeros_like(begun).scatter_add(axis, begun, torch.ones_like(begun))
    begins = (lengths.cumsum(axis) - lengths).gather(axis, begun)
    running = torch.arange(first_position, first_position + length, 1, device=ids.device)
    return running.view([length] + [1] * (0 if batch_first else ids.dim() - 1)) - begins
