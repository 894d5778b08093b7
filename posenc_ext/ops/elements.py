"""What a call does with each element: the scale of the encoding and dropout. Their arguments and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import AT_PADDING, NO_ENCODING, SEQUENCE_FIRST, Spec
from posenc_ext.ops import compose, encode

_ops = torch.ops.posenc_ext


def arguments(
    op: str,
    like: Tensor,
    encoding_scale: float | Tensor,
    dropout_p: float,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
) -> dict[str, Any] | None:
    """Those of the general ops that differ from the defaults; None for none.

    Args:
        op: for messages.
        like: what has the device and the dtype of the result.
        encoding_scale, dropout_p, positions, frequencies: as in `functional.embed`.
    """
    result: dict[str, Any] = {}
    if frequencies is not None or (positions is not None and positions.is_floating_point()):
        result["frequencies"] = frequencies  # also None: positions have a gradient there alone
    if isinstance(encoding_scale, Tensor):
        # To the type that sums have: a scale in bfloat16 would be rounded twice.
        result["encoding_scale_tensor"] = encoding_scale.to(compose._wide(like.dtype))
    elif encoding_scale != 1:
        result["encoding_scale"] = float(encoding_scale)
    if dropout_p:
        if not 0 <= dropout_p <= 1:
            raise ValueError(f"posenc_ext::{op}: dropout_p must lie in [0, 1], got {dropout_p}")
        # From torch's generator of that device, so all that repeats its numbers repeats ours.
        result["seed"] = torch.randint(0, 2**62, (), device=like.device)
        result["dropout_p"] = float(dropout_p)
    return result or None


def save(ctx: Any, given: Mapping[str, Any], input: Tensor | None = None) -> None:
    """Keep what the gradients take of the arguments of a general op, under their names."""
    # The encoding is made again, and only where something of it is trained.
    of_encoding = [given[name] for name in _OF_ENCODING]
    ctx.trained = [tensor is not None and tensor.requires_grad for tensor in of_encoding]
    ctx.save_for_backward(input, given["seed"], *(of_encoding if any(ctx.trained) else [None] * len(of_encoding)))
    ctx.elements = {name: value for name, value in given.items() if not isinstance(value, Tensor)}


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor | None]]:
    """The gradient of the sum that dropout was applied to, the saved input, and those of the parts of the encoding."""
    input, seed, *of_encoding = ctx.saved_tensors  # once: checkpoints make them again at each look
    given = ctx.elements
    if seed is not None:
        # The same elements are dropped. Tokens are numbered in the order of memory.
        flags = NO_ENCODING.flags | given["flags"] & SEQUENCE_FIRST
        part = {name: given[name] for name in ("dropout_p", "first_column", "d_model")}
        grad = _ops.add_general(grad, seed=seed, flags=flags, **part)
    if not any(ctx.trained):
        return grad, input, {}
    positions, scale, frequencies = of_encoding
    return grad, input, _encoding_gradients(grad, input, positions, scale, frequencies, ctx.trained, given)


# The tensors that an encoding is made of.
_OF_ENCODING = ("positions", "encoding_scale_tensor", "frequencies")


def _encoding_gradients(
    grad: Tensor,
    input: Tensor | None,
    positions: Tensor | None,
    scale: Tensor | None,
    frequencies: Tensor | None,
    trained: list[bool],
    given: Mapping[str, Any],
) -> dict[str, Tensor | None]:
    positions_trained, scale_trained, frequencies_trained = trained
    first, width, d_model = given["first_column"], grad.shape[-1], given["d_model"]
    spec, whole = Spec(given["base"], given["flags"]), width if d_model < 0 else d_model
    grad = grad.to(compose._wide(grad.dtype)) * given["encoding_scale"]
    without = None
    if given.get("at_padding", 0) in (AT_PADDING["no_encoding"], AT_PADDING["zeros"]):
        without = input == given["padding_idx"]
    if input is not None and given.get("total_rows", -1) >= 0:
        elsewhere = (input < given["first_row"]) | (input >= given["first_row"] + given["rows"])
        without = elsewhere if without is None else without | elsewhere
    if without is not None:
        grad = grad.masked_fill(without.unsqueeze(-1), 0)
    result: dict[str, Tensor | None] = {}
    if scale is not None and scale_trained:
        offset, tokens = given["offset"], grad.shape[:-1]
        encoding = compose._encoding(tokens, whole, positions, offset, spec, grad.dtype, grad.device, frequencies)
        result["encoding_scale_tensor"] = (grad * encoding[..., first : first + width]).sum().reshape(scale.shape)
    if positions_trained or frequencies_trained:
        of_encoding = grad if scale is None else grad * scale.reshape(())
        wanted = (positions_trained, frequencies_trained)
        result["positions"], result["frequencies"] = encode.gradients(
            of_encoding, positions, frequencies, wanted, given["offset"], spec, first, whole
        )
    return result
