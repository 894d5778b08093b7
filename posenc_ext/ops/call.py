"""What a call says: its arguments, each named once, and its positions, resolved once."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc_ext.conventions import NO_ENCODING, OFFSETS

INT64 = 2**63
LEAST = -INT64


class EmbedCall(NamedTuple):
    """token_scale * weight[input] + encoding(positions + offset); in the order of the op `embed`."""

    weight: Tensor
    input: Tensor
    positions: Tensor | None = None  # of the shape of input, or None for the running index
    offset: int = 0
    token_scale: float = 1.0
    base: float = NO_ENCODING.base
    flags: int = NO_ENCODING.flags
    padding_idx: int = -1  # none
    scale_grad_by_freq: bool = False
    sparse: bool = False


# An `EmbedCall` without names, which is made and taken apart half a microsecond faster.
EmbedArguments = tuple[Tensor, Tensor, Tensor | None, int, float, float, int, int, bool, bool]


class GradientCall(NamedTuple):
    """The weight gradient of `embed`; in the order of the op `embed_backward`."""

    grad: Tensor
    input: Tensor
    num_weights: int
    token_scale: float
    padding_idx: int
    scale_grad_by_freq: bool


def by_name(op: Any, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `op` under their names in its schema."""
    return dict(zip((argument.name for argument in op._schema.arguments), inputs, strict=False)) | dict(keywords)


def check_offset(op: str, offset: int) -> None:
    """Refuse what the op's int64 argument cannot hold; the dispatcher's own message names neither."""
    if not LEAST <= offset < INT64:
        raise offset_error(op, offset)


def offset_error(op: str, offset: int) -> ValueError:
    """What `check_offset` raises."""
    return ValueError(f"posenc_ext::{op}: offset {offset} exceeds the int64 range")


def resolve_offset(
    offset: Any,
    positions: Tensor | None,
    token_shape: torch.Size,
    batch_first: bool,
    first_position: int,
    device: torch.device,
    op: str,
) -> tuple[int, Tensor | None, int]:
    """An offset that is not an int: as one, or, where it is a tensor, 0 and positions that hold it.

    Returns the offset, the positions, and what is to be added to flags: `OFFSETS` where the positions are the offsets.

    Args:
        offset: an integer, or an integer tensor: 0-d, or one number for each row of the batch.
        positions: as in `embed`; None for the index along the sequence, from `first_position`.
        token_shape, batch_first, op: as in `broadcast_positions`.
        first_position: of the convention.
        device: of the tokens. An offset may also be 0-d and on the CPU.

    Raises:
        TypeError: another type.
        ValueError: a tensor of another shape.
    """
    if not isinstance(offset, Tensor):
        if isinstance(offset, torch.SymInt):
            return offset, positions, 0  # type: ignore[return-value]  # an int, while a program is traced
        try:
            return operator.index(offset), positions, 0
        except TypeError:
            text = f"offset must be an int or an integer tensor, got {offset!r}"
            raise TypeError(f"posenc_ext::{op}: {text}") from None
    check_integer(op, "offset", offset)
    batch_shape = token_shape[:-1] if batch_first else token_shape[1:]
    if offset.dim() and offset.shape != batch_shape:
        raise ValueError(
            f"posenc_ext::{op}: offset must be 0-d or hold one number for each row of the batch {list(batch_shape)}, "
            f"got shape {list(offset.shape)}"
        )
    if offset.device != device:
        if offset.dim() or offset.device.type != "cpu":
            raise ValueError(
                f"posenc_ext::{op}: offset must be on the device of the tokens ({device}), got {offset.device}"
            )
        offset = torch.zeros((), dtype=torch.int64, device=device) + offset  # by value: nothing waits
    if token_shape:
        offset = offset.unsqueeze(-1 if batch_first else 0)
    if positions is None:
        return first_position, offset.expand(token_shape), OFFSETS
    wide = positions.double() if positions.is_floating_point() else positions.long()
    return 0, broadcast_positions(wide, token_shape, batch_first, op) + offset, 0


def with_running_index(positions: Tensor, batch_first: bool) -> Tensor:
    """Offsets of the shape of the tokens, and the index along the sequence added to them."""
    if positions.dim() == 0:
        return positions
    axis = -1 if batch_first else 0
    index = torch.arange(0, positions.shape[axis], 1, device=positions.device)  # 1: core ATen has no other
    return positions.long() + (index if batch_first else index.reshape([-1] + [1] * (positions.dim() - 1)))


def check_integer(op: str, argument: str, tensor: Tensor) -> None:
    """Refuse what would count as an integer and is none, such as booleans."""
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"posenc_ext::{op}: {argument} must have dtype int64 or int32, got {tensor.dtype}")


def broadcast_positions(
    positions: Tensor, token_shape: torch.Size, batch_first: bool = True, op: str = "broadcast_positions"
) -> Tensor:
    """Positions as a view of the shape of the token axes.

    Args:
        positions: broadcastable to the token axes, or 1-D along the sequence axis.
        token_shape: sizes of the token axes.
        batch_first: whether the sequence is the last token axis, or the first one.
        op: for the message.

    Raises:
        ValueError: positions of another shape.
    """
    if positions.shape == token_shape:
        return positions
    given = positions
    if positions.dim() == 1 and not batch_first and len(token_shape) > 1:
        positions = positions.reshape([-1] + [1] * (len(token_shape) - 1))
    # Not by catching what expand raises: a traced call would not get there.
    pairs = zip(reversed(positions.shape), reversed(token_shape), strict=False)
    if positions.dim() > len(token_shape) or any(size not in (1, tokens) for size, tokens in pairs):
        raise ValueError(
            f"posenc_ext::{op}: positions must be broadcastable to the tokens {list(token_shape)}, or 1-D along the "
            f"sequence, got shape {list(given.shape)}"
        )
    return positions.expand(token_shape)
