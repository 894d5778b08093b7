"""The same values from PyTorch's own ops, which have every rule of functorch transforms and forward-mode AD.

Slower than the custom ops, and bit-equal to them.
"""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from posenc_ext.conventions import AT_PADDING, NO_ENCODING, OFFSETS, SEQUENCE_FIRST, Spec
from posenc_ext.ops.call import EmbedCall, GradientCall, with_running_index
from posenc_ext.reference import sinusoid_columns

transforms_active = torch._C._are_functorch_transforms_active


def needed() -> bool:
    """Whether a transform of functorch or forward-mode AD is active."""
    return transforms_active() or forward_ad._current_level >= 0


def embed(
    call: EmbedCall,
    first_row: int = 0,
    total_rows: int = -1,
    first_column: int = 0,
    d_model: int = -1,
    encoding_scale: float = 1.0,
    encoding_scale_tensor: Tensor | None = None,
    at_padding: int = 0,
    frequencies: Tensor | None = None,
    position_table: Tensor | None = None,
) -> Tensor:
    """As `ops.embed.run`; the other arguments as in the op `embed_general`."""
    weight, input = call.weight, call.input
    row, elsewhere = input, None
    if total_rows >= 0:
        # Ids of other rows look up one row more, and those of no row -1, which PyTorch refuses.
        known, row = (input >= 0) & (input < total_rows), input.long() - first_row
        elsewhere = known & ((row < 0) | (row >= len(weight)))
        row = torch.where(known, row.masked_fill(elsewhere, len(weight)), -1)
        weight = torch.cat([weight, weight.new_zeros((1, weight.shape[1]))])
    rows = torch.nn.functional.embedding(row, weight, scale_grad_by_freq=call.scale_grad_by_freq, sparse=call.sparse)
    if call.padding_idx >= 0:
        # By detaching, not by embedding's own option: forward mode does not know that one.
        rows = torch.where((input == call.padding_idx).unsqueeze(-1), rows.detach(), rows)
    wide = _wide(weight.dtype)
    scaled = rows.to(wide) * call.token_scale
    spec = Spec(call.base, call.flags)
    if spec != NO_ENCODING or position_table is not None:
        encoding = columns_of_encoding(
            rows, call.positions, call.offset, spec, wide, first_column, d_model, frequencies, position_table
        )
        encoding = _scaled(encoding, encoding_scale, encoding_scale_tensor)
        if at_padding != AT_PADDING["embed"]:
            padding = (input == call.padding_idx).unsqueeze(-1)
            if at_padding != AT_PADDING["no_encoding"]:
                scaled = scaled.masked_fill(padding, -0.0)  # x + -0 is x, also where x is -0
            if at_padding != AT_PADDING["no_embedding"]:
                encoding = torch.where(padding, -0.0, encoding)
            scaled = scaled + encoding
            if at_padding == AT_PADDING["zeros"]:
                scaled = scaled.masked_fill(padding, 0.0)
        else:
            scaled = scaled + encoding
    result = scaled.to(weight.dtype)
    return result if elsewhere is None else result.masked_fill(elsewhere.unsqueeze(-1), -0.0)


def dropped(x: Tensor, seed: Tensor, dropout_p: float, first_column: int = 0, d_model: int = -1) -> Tensor:
    """What dropout leaves of x, as in the op `add_general`."""
    part = {"dropout_p": dropout_p, "first_column": first_column, "d_model": d_model, "flags": NO_ENCODING.flags}
    if not needed():
        result: Tensor = torch.ops.posenc_ext.add_general.default(x, seed=seed, **part)
        return result
    factor = torch.ones(x.shape, dtype=_wide(x.dtype), device=x.device)
    factor = torch.ops.posenc_ext.add_general.default(factor, seed=seed, **part)
    return torch.where(factor != 0, x * factor, 0.0).to(x.dtype)


def weight_gradient(call: GradientCall, sparse: bool) -> Tensor:
    """As the op `embed_backward`."""
    if sparse:
        raise NotImplementedError(
            "posenc_ext::embed_backward_sparse: forward mode and torch.func have no sparse gradients"
        )
    scaled = call.grad.to(_wide(call.grad.dtype)) * call.token_scale
    result: Tensor = torch.ops.aten.embedding_dense_backward(
        scaled, call.input, call.num_weights, call.padding_idx, call.scale_grad_by_freq
    )
    return result.to(call.grad.dtype)


def add(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    token_scale: float = 1.0,
    first_column: int = 0,
    d_model: int = -1,
    encoding_scale: float = 1.0,
    encoding_scale_tensor: Tensor | None = None,
    frequencies: Tensor | None = None,
    position_table: Tensor | None = None,
) -> Tensor:
    """As `ops.add.run`."""
    part = (first_column, d_model, frequencies, position_table)
    wide = _wide(x.dtype)
    encoding = columns_of_encoding(x, positions, offset, spec, wide, *part)
    encoding = _scaled(encoding, encoding_scale, encoding_scale_tensor)
    return (x.to(wide) * token_scale + encoding).to(x.dtype)


def _scaled(encoding: Tensor, number: float, tensor: Tensor | None) -> Tensor:
    if number != 1:
        encoding = encoding * number
    return encoding if tensor is None else encoding * tensor.reshape(())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def columns_of_encoding(
    like: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    dtype: torch.dtype,
    first_column: int,
    d_model: int,
    frequencies: Tensor | None,
    position_table: Tensor | None,
) -> Tensor:
    """The encoding of a batch of tokens, broadcastable to `like`; where that is a shard of columns, so is a table."""
    token_shape, width = like.shape[:-1], like.shape[-1]
    if position_table is not None:
        rows = rows_of_table(token_shape, positions, offset, spec, like.device)
        return torch.nn.functional.embedding(rows, position_table).to(dtype)
    whole = width if d_model < 0 else d_model
    encoding = _encoding(token_shape, whole, positions, offset, spec, dtype, like.device, frequencies)
    return encoding[..., first_column : first_column + width]


def rows_of_table(
    token_shape: torch.Size, positions: Tensor | None, offset: int, spec: Spec, device: torch.device
) -> Tensor:
    """The positions of a batch of tokens, int64, broadcastable to it."""
    return running_positions(token_shape, positions, spec, device).long() + offset


def _encoding(
    token_shape: torch.Size,
    d_model: int,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    dtype: torch.dtype,
    device: torch.device,
    frequencies: Tensor | None = None,
) -> Tensor:
    """The encoding of a batch of tokens, broadcastable to it."""
    from posenc_ext.ops import encode  # which imports this module

    positions, spec = running_positions(token_shape, positions, spec, device), Spec(spec.base, spec.flags & ~OFFSETS)
    return encode.run(positions, d_model, offset, spec, dtype, frequencies)


def running_positions(token_shape: torch.Size, positions: Tensor | None, spec: Spec, device: torch.device) -> Tensor:
    """The positions of a batch of tokens but for the offset, broadcastable to it."""
    batch_first, rank = not spec.flags & SEQUENCE_FIRST, len(token_shape)
    if positions is not None:
        return with_running_index(positions, batch_first) if spec.flags & OFFSETS else positions
    length = 1 if rank == 0 else token_shape[-1 if batch_first else 0]
    index = torch.arange(length, device=device)
    return index.reshape([length] + [1] * (0 if batch_first else rank - 1)) if rank else index[0]


def encode(
    positions: Tensor, d_model: int, offset: int, spec: Spec, dtype: torch.dtype, frequencies: Tensor | None
) -> Tensor:
    """As `ops.encode.run`, within 3e-7 where positions are floating or frequencies are given."""
    from posenc_ext.decompositions import _encode  # which needs the ops

    return _encode(positions, d_model, offset, *spec, dtype, frequencies)


def columns(d_model: int, spec: Spec) -> tuple[slice, slice]:
    """Where the sines and the cosines of an encoding are."""
    from posenc_ext.decompositions import _Spec

    decoded = _Spec(*spec)
    sines = d_model // 2 if decoded.odd == "zero" else (d_model + 1) // 2
    first, second = sinusoid_columns(d_model, decoded.layout, sines=sines)
    return slice(first.start, first.stop, first.step), slice(second.start, second.stop, second.step)


def angular_frequencies(d_model: int, spec: Spec, device: torch.device) -> Tensor:
    """Those of a spec, float64 [pairs]."""
    from posenc_ext.decompositions import _angular

    return _angular(d_model, *spec, device)
