"""The same values from PyTorch's own ops, which have every rule of functorch transforms and forward-mode AD.

Slower than the custom ops, and bit-equal to them.
"""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from posenc_ext.conventions import NO_ENCODING, SEQUENCE_FIRST, Spec
from posenc_ext.ops.call import EmbedCall, GradientCall

transforms_active = torch._C._are_functorch_transforms_active


def needed() -> bool:
    """Whether a transform of functorch or forward-mode AD is active."""
    return transforms_active() or forward_ad._current_level >= 0


def embed(call: EmbedCall) -> Tensor:
    """As `ops.embed.run`."""
    weight, input = call.weight, call.input
    rows = torch.nn.functional.embedding(input, weight, scale_grad_by_freq=call.scale_grad_by_freq, sparse=call.sparse)
    if call.padding_idx >= 0:
        # By detaching, not by embedding's own option: forward mode does not know that one.
        rows = torch.where((input == call.padding_idx).unsqueeze(-1), rows.detach(), rows)
    wide = _wide(weight.dtype)
    scaled = rows.to(wide) * call.token_scale
    spec = Spec(call.base, call.flags)
    if spec != NO_ENCODING:
        scaled = scaled + _encoding(
            input.shape, weight.shape[1], call.positions, call.offset, spec, wide, weight.device
        )
    return scaled.to(weight.dtype)


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


def add(x: Tensor, positions: Tensor | None, offset: int, spec: Spec, token_scale: float = 1.0) -> Tensor:
    """As `ops.add.run`."""
    wide = _wide(x.dtype)
    encoding = _encoding(x.shape[:-1], x.shape[-1], positions, offset, spec, wide, x.device)
    return (x.to(wide) * token_scale + encoding).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _encoding(
    token_shape: torch.Size,
    d_model: int,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The encoding of a batch of tokens, broadcastable to it."""
    if positions is None:
        batch_first, rank = not spec.flags & SEQUENCE_FIRST, len(token_shape)
        length = 1 if rank == 0 else token_shape[-1 if batch_first else 0]
        positions = torch.arange(length, device=device)
        positions = positions.reshape([length] + [1] * (0 if batch_first else rank - 1)) if rank else positions[0]
    result: Tensor = torch.ops.posenc_ext.positional_encoding.default(positions, d_model, offset, *spec, dtype)
    return result
