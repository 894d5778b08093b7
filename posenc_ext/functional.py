"""The functional forms: one pass over memory, no table.

Positions. Without `positions` a token's position is its index along the sequence axis, from the convention's first
position; the sequence axis is the last token axis (batch-first) or the first one (`batch_first=False`). `offset` is
added to every position: the length of the cache, in a decoder. `positions` gives them explicitly: integers,
broadcastable to the token axes, or 1-D along the sequence axis; negative ones are welcome, sin(-p) = -sin(p) and
cos(-p) = cos(p) exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posenc_ext import _C, ops
from posenc_ext.conventions import DIVISORS, NO_WAVES, Convention, Recipe, resolve

__all__ = [
    "add_positional_encoding",
    "angular_frequencies",
    "embed",
    "positional_encoding",
    "scaled_embedding",
]


def embed(
    input: Tensor,
    weight: Tensor,
    *,
    offset: int = 0,
    positions: Tensor | None = None,
    token_scale: float | None = None,
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    batch_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`weight[input] * token_scale + PE`, the input layer of a Transformer, in one pass.

    Vaswani et al. 2017, sections 3.4 and 3.5.

    Args:
        input: token ids, int64 or int32, any shape (batch, length for the usual batch).
        weight: the embedding table [vocab_size, d_model], float32, float64, bfloat16 or float16.
        offset: added to every position (with `positions`, a sum past int64 wraps).
        positions: explicit positions, see above.
        token_scale: factor of the looked-up row; None for sqrt(d_model). Never rounded to the dtype of `weight`.
        convention: name of a convention or a `Convention`.
        precision: `"reference"` or `"exact"`; None for the convention's own.
        padding_idx: row that gets no gradient; its lookup is not zeroed. May be negative, counting from the end.
        max_norm, norm_type: rows looked up are first scaled down, in place, to this norm, as `nn.Embedding` does.
        scale_grad_by_freq: divide each row's gradient by the number of times it was looked up.
        sparse: give `weight` a sparse gradient, coalesced.
        batch_first: which token axis is the sequence, see above.
        out: tensor to write into, [*input.shape, d_model] with contiguous columns; not differentiable.

    Returns:
        [*input.shape, d_model] in the dtype of `weight`: computed in fp32 (fp64 for fp64) and rounded once.

    Raises:
        IndexError: an id outside [0, vocab_size); nothing has been written. On CUDA it comes later:
            see `posenc_ext.check_errors`.
        ValueError: any other argument that does not fit.
        NotImplementedError: `sparse=True` inside torch.compile or torch.export.
    """
    chosen = resolve(convention)
    if weight.dim() != 2:
        raise ValueError(
            f"posenc_ext::embed: weight must have 2 dimensions [vocab_size, d_model], got shape {list(weight.shape)}"
        )
    return _embed(
        input,
        weight,
        positions if positions is None else _spread(positions, input.shape, batch_first, "embed"),
        offset if positions is not None else offset + chosen.first_position,
        token_scale,
        chosen.recipe(precision, batch_first),
        padding_idx,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        sparse,
        out,
    )


def scaled_embedding(
    input: Tensor,
    weight: Tensor,
    *,
    token_scale: float | None = None,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`weight[input] * token_scale` in one pass: `embed` without an encoding. Arguments and errors as there."""
    if weight.dim() != 2:
        raise ValueError(
            f"posenc_ext::embed: weight must have 2 dimensions [vocab_size, d_model], got shape {list(weight.shape)}"
        )
    return _embed(
        input,
        weight,
        None,
        0,
        token_scale,
        NO_WAVES,
        padding_idx,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        sparse,
        out,
    )


def _embed(
    input: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    offset: int,
    token_scale: float | None,
    recipe: Recipe,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
    out: Tensor | None,
) -> Tensor:
    if token_scale is None:
        token_scale = math.sqrt(weight.shape[1])
    pad = -1 if padding_idx is None else _row_of(padding_idx, weight.shape[0])
    if out is not None:
        _refuse_gradient("embed", weight=weight, out=out)
    if max_norm is not None:
        _renormalise(weight, input, positions, offset, recipe, out, max_norm, norm_type)
    if out is not None:
        ops.check_offset("embed", offset)
        torch.ops.posenc_ext.embed_out(weight, input, positions, offset, token_scale, *recipe, out)
        return _written(out)
    return ops.embed(weight, input, positions, offset, token_scale, recipe, pad, scale_grad_by_freq, sparse)


def add_positional_encoding(
    x: Tensor,
    *,
    offset: int = 0,
    positions: Tensor | None = None,
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    batch_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`x + PE` in one pass, without a table.

    Args:
        x: activations [..., length, d_model] (batch-first) or [length, ..., d_model], in the dtypes of `embed`.
        offset, positions, convention, precision, batch_first: as in `embed`; the last axis of `x` is no token axis.
        out: tensor to write into, of the shape and dtype of `x`; may be `x` itself. Not differentiable.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: an argument that does not fit.
    """
    chosen = resolve(convention)
    recipe = chosen.recipe(precision, batch_first)
    if positions is None:
        offset = offset + chosen.first_position
    else:
        positions = _spread(positions, x.shape[:-1], batch_first, "add_positional_encoding")
    if out is not None:
        _refuse_gradient("add_positional_encoding", x=x, out=out)
        ops.check_offset("add_positional_encoding", offset)
        torch.ops.posenc_ext.add_positional_encoding_out(x, positions, offset, *recipe, out)
        return _written(out)
    return ops.add_positional_encoding(x, positions, offset, recipe)


def positional_encoding(
    positions_or_length: Tensor | int,
    d_model: int,
    *,
    offset: int = 0,
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The encoding itself.

    Args:
        positions_or_length: integer positions of any shape, or a length: then the positions run from the convention's
            first one.
        d_model: width D.
        offset: added to every position (with `positions`, a sum past int64 wraps).
        convention, precision: as in `embed`.
        dtype: of the result; None for `torch.get_default_dtype()`.
        device: of the result, for a length; a tensor of positions stays where it is.
        out: tensor to write into, [*positions.shape, d_model]; its dtype is used.

    Returns:
        [*positions.shape, d_model], or [length, d_model].

    Raises:
        ValueError: an argument that does not fit.
    """
    chosen = resolve(convention)
    if isinstance(positions_or_length, Tensor):
        positions = positions_or_length
        if device is not None and torch.device(device) != positions.device:
            raise ValueError(
                f"posenc_ext::positional_encoding: device must be that of positions ({positions.device}), got {device}"
            )
    else:
        if positions_or_length < 0:
            raise ValueError(f"posenc_ext::positional_encoding: length must not be negative, got {positions_or_length}")
        positions = torch.arange(positions_or_length, device=device)
        offset = offset + chosen.first_position
        if offset + positions_or_length > 2**63:
            raise ValueError(
                f"posenc_ext::positional_encoding: offset {offset} + length {positions_or_length} "
                "exceeds the int64 range"
            )
    ops.check_offset("positional_encoding", offset)
    recipe = chosen.recipe(precision)
    if out is not None:
        _refuse_gradient("positional_encoding", out=out)
        torch.ops.posenc_ext.positional_encoding_out(positions, d_model, offset, *recipe, out)
        return _written(out)
    return ops.positional_encoding(positions, d_model, offset, recipe, dtype or torch.get_default_dtype())


def angular_frequencies(
    d_model: int, *, convention: str | Convention = "vaswani", precision: str | None = None
) -> Tensor:
    """The frequencies w_k that the encoding uses, in radians per position, float64 [pairs].

    `"exact"`: base^(-2k/D) or base^(-k/(D/2-1)). `"reference"`: the float32 numbers that fp32 tables are built from,
    exp(fl32(2k) * fl32(-ln(base)/D)) with the exponential rounded correctly.
    """
    if d_model < 1:
        raise ValueError(f"posenc_ext.angular_frequencies: d_model must be positive, got {d_model}")
    chosen = resolve(convention)
    chosen.recipe(precision)  # refuses an unknown precision
    width = d_model + d_model % 2 if chosen.odd == "round_up" else d_model
    pairs = d_model // 2 if chosen.odd == "zero" else (d_model + 1) // 2
    table = _C.frequency_table(chosen.base, DIVISORS[chosen.divisor], width, pairs)
    if (precision or chosen.precision) == "reference":
        return torch.from_numpy(table["angular"]).double()
    words = torch.from_numpy(table["turns"].astype("float64"))
    return 2 * math.pi * (words[0] * 2.0**-32 + words[1] * 2.0**-64)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _spread(positions: Tensor, token_shape: torch.Size, batch_first: bool, op: str) -> Tensor:
    """Positions as a view of the shape of the token axes."""
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


def _row_of(padding_idx: int, vocab_size: int) -> int:
    if not -vocab_size <= padding_idx < vocab_size:
        raise ValueError(f"posenc_ext::embed: padding_idx must lie in [{-vocab_size}, {vocab_size}), got {padding_idx}")
    return padding_idx + vocab_size if padding_idx < 0 else padding_idx


def _renormalise(
    weight: Tensor,
    input: Tensor,
    positions: Tensor | None,
    offset: int,
    recipe: Recipe,
    out: Tensor | None,
    max_norm: float,
    norm_type: float,
) -> None:
    if not max_norm > 0:
        raise ValueError(f"posenc_ext::embed: max_norm must be positive, got {max_norm}")
    # Rows are scaled in place, so whatever the call would refuse must be refused first.
    ops.check_offset("embed", offset)
    ops.check_embed(weight, input, positions, offset, *recipe, out)
    with torch.no_grad():
        torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)


def _written(out: Tensor) -> Tensor:
    """Tell autograd that `out` was written to, as PyTorch's own ops do: a graph that had saved it must notice."""
    if not (torch.compiler.is_compiling() or out.is_inference()):
        torch.autograd.graph.increment_version(out)
    return out


def _refuse_gradient(op: str, **tensors: Tensor) -> None:
    """Writing into `out` leaves no history, so neither it nor what it is made of may need one."""
    for argument, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"posenc_ext::{op}: out= is not differentiable, but {argument} requires a gradient; use torch.no_grad()"
            )
