"""What a call does with each element: the scale of the encoding and dropout. Their arguments and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import AT_PADDING, Spec
from posenc_ext.ops import compose


def arguments(op: str, like: Tensor, encoding_scale: float | Tensor, dropout_p: float) -> dict[str, Any] | None:
    """Those of the general ops that differ from the defaults; None for none.

    Args:
        op: for messages.
        like: what has the device and the dtype of the result.
        encoding_scale, dropout_p: as in `functional.embed`.
    """
    result: dict[str, Any] = {}
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
    scale = given["encoding_scale_tensor"]
    # The encoding is made again, and only where the scale is trained.
    trained = scale is not None and scale.requires_grad
    ctx.save_for_backward(input, given["seed"], *((given["positions"], scale) if trained else (None, None)))
    ctx.elements = {name: value for name, value in given.items() if not isinstance(value, Tensor)}


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, dict[str, Any], Tensor | None]:
    """The saved input, the arguments of dropout where it took place, and the gradient of encoding_scale."""
    input, seed, positions, scale = ctx.saved_tensors  # once: checkpoints make them again at each look
    given, dropout = ctx.elements, {}
    if seed is not None:
        dropout = {"seed": seed, **{name: given[name] for name in ("dropout_p", "first_column", "d_model")}}
    if scale is None:
        return input, dropout, None
    of_sum = compose.dropped(grad, **dropout) if dropout else grad
    return input, dropout, _scale_gradient(of_sum, input, positions, scale, given)


def _scale_gradient(
    grad: Tensor, input: Tensor | None, positions: Tensor | None, scale: Tensor, given: Mapping[str, Any]
) -> Tensor:
    first, width, d_model = given["first_column"], grad.shape[-1], given["d_model"]
    spec, whole = Spec(given["base"], given["flags"]), width if d_model < 0 else d_model
    encoding = compose._encoding(grad.shape[:-1], whole, positions, given["offset"], spec, scale.dtype, grad.device)
    product = grad.to(scale.dtype) * encoding[..., first : first + width]
    if given.get("at_padding", 0) in (AT_PADDING["no_encoding"], AT_PADDING["zeros"]):
        product = product.masked_fill((input == given["padding_idx"]).unsqueeze(-1), 0)
    gradient: Tensor = product.sum() * given["encoding_scale"]
    return gradient.reshape(scale.shape)
