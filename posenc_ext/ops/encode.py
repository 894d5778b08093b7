"""The encoding alone, of numbers that may be trained: the eager entry, and the gradients to positions and frequencies.

A sinusoid's derivative is the other sinusoid of its pair, so the gradients are made of the encoding once more:

    d sin(p w) = cos(p w) (w dp + p dw)        d cos(p w) = -sin(p w) (w dp + p dw)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import DTYPES, OFFSETS, Spec
from posenc_ext.ops import compose
from posenc_ext.ops.call import by_name
from posenc_ext.ops.tracing import decomposed, is_traced

_ops = torch.ops.posenc_ext
_general = _ops.positional_encoding_general.default


def run(
    positions: Tensor, d_model: int, offset: int, spec: Spec, dtype: torch.dtype, frequencies: Tensor | None = None
) -> Tensor:
    """The encoding of positions, differentiable in positions that are floating and in frequencies."""
    if frequencies is None and not positions.is_floating_point():
        op = _ops.positional_encoding.default
        result: Tensor = (decomposed(op) if is_traced(positions) else op)(positions, d_model, offset, *spec, dtype)
        return result
    if compose.needed():
        return compose.encode(positions, d_model, offset, spec, dtype, frequencies)
    if dtype not in DTYPES:
        names = "float32, float64, bfloat16 or float16"
        raise ValueError(f"posenc_ext::positional_encoding: dtype must be {names}, got {dtype}")
    base, flags, code = *spec, DTYPES.index(dtype)
    result = decomposed(_general)(
        positions, frequencies, d_model=d_model, offset=offset, base=base, flags=flags, dtype=code
    )
    return result


def gradients(
    grad: Tensor,
    positions: Tensor | None,
    frequencies: Tensor | None,
    wanted: tuple[bool, bool],
    offset: int,
    spec: Spec,
    first_column: int = 0,
    d_model: int = -1,
) -> tuple[Tensor | None, Tensor | None]:
    """Those of positions and of frequencies, where they are wanted.

    Args:
        grad: of the encoding, [*tokens, width], float32 or float64.
        positions: as in the ops; None for the running index.
        frequencies: likewise.
        wanted: whether the gradient of positions, and that of frequencies.
        offset, spec: likewise.
        first_column, d_model: the encoding is a shard, columns first_column, ... of d_model.
    """
    width = grad.shape[-1]
    whole = width if d_model < 0 else d_model
    if whole != width:
        grad = torch.nn.functional.pad(grad, (first_column, whole - first_column - width))
    numbers = compose.running_positions(grad.shape[:-1], positions, spec, grad.device)
    spec = Spec(spec.base, spec.flags & ~OFFSETS)
    sines, cosines = compose.columns(whole, spec)
    encoding = run(numbers, whole, offset, spec, grad.dtype, frequencies)
    w = compose.angular_frequencies(whole, spec, grad.device) if frequencies is None else frequencies.double()
    sine, cosine = encoding[..., sines], encoding[..., cosines]
    p = numbers.double() + offset
    if sine.shape[-1] > cosine.shape[-1]:  # a sine alone
        cosine = torch.cat([cosine, torch.cos(p * w[-1]).to(grad.dtype).unsqueeze(-1)], dim=-1)
    of_sine, of_cosine = grad[..., sines], grad[..., cosines]
    by_angle = of_sine * cosine
    paired = of_cosine.shape[-1]
    by_angle = torch.cat([by_angle[..., :paired] - of_cosine * sine[..., :paired], by_angle[..., paired:]], dim=-1)
    of_positions = of_frequencies = None
    if positions is not None and wanted[0]:
        of_positions = (by_angle @ w.to(grad.dtype)).to(positions.dtype)
    if frequencies is not None and wanted[1]:
        tokens = by_angle.reshape(-1, by_angle.shape[-1])
        of_frequencies = (p.expand(grad.shape[:-1]).reshape(-1).to(grad.dtype) @ tokens).to(frequencies.dtype)
    return of_positions, of_frequencies


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: dict[str, Any]) -> None:
    given = by_name(_general, inputs, keyword_only_inputs)
    ctx.save_for_backward(given["positions"], given["frequencies"])
    ctx.wanted = (
        given["positions"].requires_grad,
        given["frequencies"] is not None and given["frequencies"].requires_grad,
    )
    ctx.offset, ctx.spec = given["offset"], Spec(given["base"], given["flags"])


def _formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    positions, frequencies = ctx.saved_tensors
    wide = grad.to(compose._wide(grad.dtype))
    return gradients(wide, positions, frequencies, ctx.wanted, ctx.offset, ctx.spec)


torch.library.register_autograd("posenc_ext::positional_encoding_general", _formula, setup_context=_save)
