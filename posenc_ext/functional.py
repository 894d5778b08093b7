"""The functional forms: one pass over memory, no table.

Positions. Without `positions` a token's position is its index along the sequence axis, from the convention's first
position; the sequence axis is the last token axis (batch-first) or the first one (`batch_first=False`). `offset` is
added to every position: the length of the cache, in a decoder. It is an int or an integer tensor, 0-d or one number for
each row of the batch. `positions` gives them explicitly, broadcastable to the token axes, or 1-D along the sequence
axis: int64 or int32, or float32 or float64 for times, coordinates and interpolated positions, which may be trained.
Negative ones are welcome, sin(-p) = -sin(p) and cos(-p) = cos(p) exactly. A floating one is right to 2^-64, and its
encoding NaN where it is not finite or not below 2^63.

A DTensor as weight or as activations gives a DTensor, with the bits of one process: see `posenc_ext.ops.shard`.

Nested jagged tensors of ids or activations give nested jagged results; their positions start anew in each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _functorch as functorch
from torch.overrides import handle_torch_function, has_torch_function_unary, has_torch_function_variadic

from posenc_ext import _C, jagged
from posenc_ext.conventions import (
    AT_PADDING,
    CONVENTIONS,
    DIVISORS,
    NO_ENCODING,
    SEQUENCE_FIRST,
    Convention,
    Spec,
    resolve,
)
from posenc_ext.ops import blocks as _blocks
from posenc_ext.ops import compose as _compose
from posenc_ext.ops import elements as _elements
from posenc_ext.ops import encode as _encode
from posenc_ext.ops import positions as _positions
from posenc_ext.ops import shard as _shard
from posenc_ext.ops.add import run as run_add
from posenc_ext.ops.call import (
    INT64,
    LEAST,
    EmbedArguments,
    broadcast_positions,
    check_integer,
    check_offset,
    offset_error,
    resolve_offset,
    with_running_index,
)
from posenc_ext.ops.embed import run as run_embed
from posenc_ext.ops.tracing import PLAIN, in_onnx_export
from posenc_ext.plain import is_dtensor

_ops = torch.ops.posenc_ext
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_embed_out = _ops.embed_out.default
torch.fx.node.has_side_effect(_ops.check_embed.default)  # it returns nothing, and must be kept in a traced graph
for _name in ("positional_encoding", "positional_encoding_nd", "add_positional_encoding_nd"):
    torch.fx.wrap(_name)  # torch.fx.symbolic_trace may have a symbol for the length

__all__ = [
    "add_positional_encoding",
    "add_positional_encoding_nd",
    "angular_frequencies",
    "broadcast_positions",
    "check_integer",
    "embed",
    "grid_positions",
    "positional_encoding",
    "positional_encoding_nd",
    "positions_from_cu_seqlens",
    "positions_from_padding",
    "positions_from_sequence_ids",
    "resolve_offset",
    "scaled_embedding",
    "with_running_index",
]


def embed(
    input: Tensor,
    weight: Tensor,
    *,
    offset: int | Tensor = 0,
    positions: Tensor | None = None,
    token_scale: float | None = None,
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    frequencies: Tensor | None = None,
    encoding_scale: float | Tensor = 1.0,
    position_table: Tensor | None = None,
    at_padding: str = "embed",
    dropout_p: float = 0.0,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    batch_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`weight[input] * token_scale + PE`, the input layer of a Transformer, in one pass.

    The formula is that of Vaswani et al. 2017, "Attention Is All You Need", sections 3.4 and 3.5; with the default
    convention PE(p, 2k) = sin(p * w_k) and PE(p, 2k + 1) = cos(p * w_k), where w_k = 10000^(-2k/d_model).

    Args:
        input: token ids, int64 or int32, any shape: [batch, length] for the usual batch; also a nested jagged tensor.
        weight: the embedding table [vocab_size, d_model], float32, float64, bfloat16 or float16.
        offset: added to every position, such as the number of tokens in a decoder's cache: an int, or an int64 or int32
            tensor, 0-d or [batch], one number for each row. With `positions` a sum past int64 wraps.
        positions: positions in place of the running index, int64, int32, float32 or float64, broadcastable to the shape
            of `input`, or 1-D along the sequence. They may be negative. Floating ones may be trained; one that is not
            finite or not below 2^63 gives NaN.
        token_scale: factor of the looked-up row; None for sqrt(d_model). Never rounded to the dtype of `weight`.
        convention: which encoding: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"`, angles as fp32 tables form them; `"exact"`, right to about 1e-7 at every position;
            None for the convention's own.
        frequencies: w_k of each pair of columns in radians per position, in place of the convention's base and divisor,
            float32 or float64 [pairs]; the layout still says which column holds which pair. May be trained. With the
            fp32 frequencies of a project's own table, `"reference"` gives that table.
        encoding_scale: factor of the encoding, a number or a tensor that holds one and may be trained.
        position_table: a learned table [max_len, d_model] of the dtype of `weight`, in place of the sinusoids: a token
            at position p gets its row p (GPT-2, BERT). Positions count from 0 and must lie in [0, max_len).
        at_padding: what a token of `padding_idx` is: `"embed"`, a token like any other; `"no_encoding"`, its row alone
            (fairseq, M2M100); `"no_embedding"`, its encoding alone; `"zeros"`.
        dropout_p: probability with which an element is dropped, in steps of 2^-16; the others are divided by 1 - p. The
            numbers come from Philox4x32-7 with a seed that `torch.randint` draws. It acts whenever it is not 0: pass 0
            in evaluation.
        padding_idx: row that gets no gradient; its lookup is not zeroed. May be negative, counting from the end.
        max_norm: rows looked up whose norm is larger are first scaled down to it, in place, in `weight`; None for none.
        norm_type: p of that p-norm.
        scale_grad_by_freq: divide each row's gradient by the number of times it was looked up.
        sparse: give `weight` a sparse gradient, coalesced.
        batch_first: whether the sequence is the last axis of `input`, or the first one.
        out: tensor to write into, [*input.shape, d_model] in the dtype of `weight`, with contiguous columns. Not
            differentiable.

    Returns:
        [*input.shape, d_model] in the dtype of `weight`: computed in fp32 (fp64 for fp64) and rounded once. A DTensor
        where `weight` or `input` is one.

    Raises:
        IndexError: an id outside [0, vocab_size), or a position outside `position_table`; nothing has been written. On
            CUDA it comes later, from a later call or from `posenc_ext.check_errors()`.
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape, or a value out of range.
        NotImplementedError: `sparse=True` inside torch.compile or torch.export.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> weight = torch.zeros(100, 4)
        >>> F.embed(torch.tensor([[7, 8]]), weight)
        tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
                 [0.8415, 0.5403, 0.0100, 0.9999]]])
        >>> F.embed(torch.tensor([[9]]), weight, offset=torch.tensor([1])).shape
        torch.Size([1, 1, 4])
    """
    try:
        if has_torch_function_variadic(input, weight) or input.is_nested:
            return _overridden(embed, "input", locals())
        if dropout_p and out is None and _drops_apart(weight, input):
            return _dropped(embed, locals())
        chosen = convention if type(convention) is Convention else resolve(convention)
        base, flags = chosen._specs[None, batch_first] if precision is None else chosen.spec(precision, batch_first)
        if position_table is not None:
            base, flags = _spec_of_table("embed", weight, position_table, chosen, precision, frequencies, batch_first)
        if type(offset) is not int:
            offset, positions, offsets = resolve_offset(
                offset, positions, input.shape, batch_first, chosen.first_position, input.device, "embed"
            )
            flags |= offsets
        if positions is None:
            offset = offset + chosen.first_position
        else:
            positions = broadcast_positions(positions, input.shape, batch_first, "embed")
        call = (
            weight,
            input,
            positions,
            offset,
            math.sqrt(weight.shape[1]) if token_scale is None else token_scale,
            base,
            flags,
            -1 if padding_idx is None else _row_of(padding_idx, weight),
            scale_grad_by_freq,
            sparse,
        )
        general: dict[str, Any] | None = None  # what only the op embed_general takes
        if (
            dropout_p
            or at_padding != "embed"
            or position_table is not None
            or type(encoding_scale) is not float
            or encoding_scale != 1
            or frequencies is not None
            or (positions is not None and positions.is_floating_point())
        ):
            general = _elements.arguments(
                "embed", weight, encoding_scale, dropout_p, positions, frequencies, position_table
            )
            if at_padding != "embed":
                general = {**(general or {}), "at_padding": _at_padding(at_padding, padding_idx)}
        if max_norm is None and out is None:
            return run_embed(call, general)
        return _embed_in_place(call, max_norm, norm_type, out, general)
    except Exception:
        _explain(
            "embed",
            offset,
            input=input,
            weight=weight,
            positions=positions,
            frequencies=frequencies,
            position_table=position_table,
            out=out,
        )
        raise


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
    """`weight[input] * token_scale` in one pass: the lookup of a Transformer without positions.

    The factor is that of Vaswani et al. 2017, "Attention Is All You Need", section 3.4.

    Args:
        input: token ids, int64 or int32, any shape; also a nested jagged tensor.
        weight: the embedding table [vocab_size, d_model], float32, float64, bfloat16 or float16.
        token_scale: factor of the looked-up row; None for sqrt(d_model). Never rounded to the dtype of `weight`.
        padding_idx: row that gets no gradient; its lookup is not zeroed. May be negative, counting from the end.
        max_norm: rows looked up whose norm is larger are first scaled down to it, in place, in `weight`; None for none.
        norm_type: p of that p-norm.
        scale_grad_by_freq: divide each row's gradient by the number of times it was looked up.
        sparse: give `weight` a sparse gradient, coalesced.
        out: tensor to write into, [*input.shape, d_model] in the dtype of `weight`, with contiguous columns. Not
            differentiable.

    Returns:
        [*input.shape, d_model] in the dtype of `weight`: computed in fp32 (fp64 for fp64) and rounded once.

    Raises:
        IndexError: an id outside [0, vocab_size); nothing has been written. On CUDA it comes later, from a later call
            or from `posenc_ext.check_errors()`.
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape, or a value out of range.
        NotImplementedError: `sparse=True` inside torch.compile or torch.export.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> F.scaled_embedding(torch.tensor([2, 0]), torch.eye(4))
        tensor([[0., 0., 2., 0.],
                [2., 0., 0., 0.]])
    """
    try:
        if has_torch_function_variadic(input, weight) or input.is_nested:
            return _overridden(scaled_embedding, "input", locals())
        call = (
            weight,
            input,
            None,
            0,
            math.sqrt(weight.shape[1]) if token_scale is None else token_scale,
            *NO_ENCODING,
            -1 if padding_idx is None else _row_of(padding_idx, weight),
            scale_grad_by_freq,
            sparse,
        )
        if max_norm is None and out is None:
            return run_embed(call)
        return _embed_in_place(call, max_norm, norm_type, out)
    except Exception:
        _explain("embed", input=input, weight=weight, out=out)
        raise


def add_positional_encoding(
    x: Tensor,
    *,
    offset: int | Tensor = 0,
    positions: Tensor | None = None,
    token_scale: float = 1.0,
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    frequencies: Tensor | None = None,
    encoding_scale: float | Tensor = 1.0,
    position_table: Tensor | None = None,
    dropout_p: float = 0.0,
    batch_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`x * token_scale + PE` in one pass, without a table of sinusoids.

    The formula is that of Vaswani et al. 2017, "Attention Is All You Need", section 3.5; with the default convention
    PE(p, 2k) = sin(p * w_k) and PE(p, 2k + 1) = cos(p * w_k), where w_k = 10000^(-2k/d_model).

    Args:
        x: activations [..., length, d_model], or [length, ..., d_model] with `batch_first=False`; float32, float64,
            bfloat16 or float16; also a nested jagged tensor.
        offset: added to every position, such as the number of tokens in a decoder's cache: an int, or an int64 or int32
            tensor, 0-d or [batch], one number for each row. With `positions` a sum past int64 wraps.
        positions: positions in place of the running index, int64, int32, float32 or float64, broadcastable to the axes
            of `x` but the last, or 1-D along the sequence. They may be negative. Floating ones may be trained; one that
            is not finite or not below 2^63 gives NaN.
        token_scale: factor of `x`, for rows that were looked up elsewhere.
        convention: which encoding: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"`, angles as fp32 tables form them; `"exact"`, right to about 1e-7 at every position;
            None for the convention's own.
        frequencies: w_k of each pair of columns in radians per position, in place of the convention's base and divisor,
            float32 or float64 [pairs]; the layout still says which column holds which pair. May be trained. With the
            fp32 frequencies of a project's own table, `"reference"` gives that table.
        encoding_scale: factor of the encoding, a number or a tensor that holds one and may be trained.
        position_table: a learned table [max_len, d_model] of the dtype of `x`, in place of the sinusoids: a token at
            position p gets its row p. Positions count from 0 and must lie in [0, max_len).
        dropout_p: probability with which an element is dropped, in steps of 2^-16; the others are divided by 1 - p. The
            numbers come from Philox4x32-7 with a seed that `torch.randint` draws. It acts whenever it is not 0: pass 0
            in evaluation.
        batch_first: whether the sequence is the last axis of `x` before d_model, or the first one.
        out: tensor to write into, of the shape and dtype of `x`; may be `x` itself. Not differentiable.

    Returns:
        A tensor of the shape and dtype of `x`: computed in fp32 (fp64 for fp64) and rounded once.

    Raises:
        IndexError: a position outside `position_table`; nothing has been written. On CUDA it comes later, from a later
            call or from `posenc_ext.check_errors()`.
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape, or a value out of range.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> F.add_positional_encoding(torch.zeros(1, 2, 4))
        tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
                 [0.8415, 0.5403, 0.0100, 0.9999]]])
    """
    return add_sinusoids(
        x,
        offset,
        positions,
        token_scale,
        convention,
        precision,
        frequencies,
        encoding_scale,
        dropout_p,
        batch_first,
        out,
        position_table=position_table,
    )


def positional_encoding(
    positions_or_length: Tensor | int,
    d_model: int,
    *,
    offset: int | Tensor = 0,
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    frequencies: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The encoding itself: a sinusoid of each position in each column.

    The formula is that of Vaswani et al. 2017, "Attention Is All You Need", section 3.5; with the default convention
    PE(p, 2k) = sin(p * w_k) and PE(p, 2k + 1) = cos(p * w_k), where w_k = 10000^(-2k/d_model).

    Args:
        positions_or_length: positions of any shape, int64, int32, float32 or float64; floating ones may be trained. Or
            a length, an int: then the positions run from the convention's first one.
        d_model: width D, from 1 to 2^24.
        offset: added to every position: an int, or an int64 or int32 tensor, 0-d or one number for each row of
            `positions`. With `positions` a sum past int64 wraps.
        convention: which encoding: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"`, angles as fp32 tables form them; `"exact"`, right to about 1e-7 at every position;
            None for the convention's own.
        frequencies: w_k of each pair of columns in radians per position, in place of the convention's base and divisor,
            float32 or float64 [pairs]; the layout still says which column holds which pair. May be trained. With the
            fp32 frequencies of a project's own table, `"reference"` gives that table.
        dtype: of the result, float32, float64, bfloat16 or float16; None for `torch.get_default_dtype()`.
        device: of the result, for a length; a tensor of positions stays where it is.
        out: tensor to write into, [*positions.shape, d_model]; its dtype is used. Not differentiable.

    Returns:
        [*positions.shape, d_model], or [length, d_model].

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape, or a value out of range.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> F.positional_encoding(2, 4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
        >>> F.positional_encoding(torch.tensor([0.5]), 2, precision="exact")  # between two positions
        tensor([[0.4794, 0.8776]])
    """
    try:
        if isinstance(positions_or_length, Tensor) and (
            has_torch_function_unary(positions_or_length) or positions_or_length.is_nested
        ):
            return _overridden(positional_encoding, "positions_or_length", locals())
        chosen = convention if type(convention) is Convention else resolve(convention)
        if isinstance(positions_or_length, Tensor):
            positions, first = positions_or_length, 0
            if device is not None and torch.device(device) != positions.device:
                raise ValueError(
                    "posenc_ext::positional_encoding: device must be that of positions "
                    f"({positions.device}), got {device}"
                )
        else:
            if positions_or_length < 0:
                raise ValueError(
                    f"posenc_ext::positional_encoding: length must not be negative, got {positions_or_length}"
                )
            positions, first = torch.arange(positions_or_length, device=device), chosen.first_position
        if type(offset) is not int:
            shape = positions.shape
            device_of = positions.device
            offset, moved, _ = resolve_offset(offset, positions, shape, True, 0, device_of, "positional_encoding")
            positions = positions if moved is None else moved
        offset = offset + first
        if not isinstance(positions_or_length, Tensor) and offset + positions_or_length > 2**63:
            raise ValueError(
                f"posenc_ext::positional_encoding: offset {offset} + length {positions_or_length} "
                "exceeds the int64 range"
            )
        check_offset("positional_encoding", offset)
        spec = chosen.spec(precision)
        if out is None:
            return _encode.run(positions, d_model, offset, spec, dtype or torch.get_default_dtype(), frequencies)
        _check_out("positional_encoding", out, "positions", positions, {"frequencies": frequencies})
        if frequencies is None:
            _ops.positional_encoding_out(positions, d_model, offset, *spec, out)
        else:
            _ops.positional_encoding_general_out(
                positions, frequencies, d_model=d_model, offset=offset, base=spec.base, flags=spec.flags, out=out
            )
        return _bump_version(out)
    except Exception:
        _explain_positions(positions_or_length)
        _explain("positional_encoding", frequencies=frequencies, out=out)
        raise


def grid_positions(*sizes: int, device: torch.device | str | None = None) -> Tensor:
    """The index of each cell of a grid along each axis.

    For an image `grid_positions(height, width)` holds (y, x), and `.flip(-1)` turns it into (x, y). The cells of
    `.flatten(0, -2)` are in row-major order. What `torch.meshgrid` gives with indexing "ij", stacked.

    Args:
        *sizes: cells along each axis, one int an axis, at least one.
        device: of the result.

    Returns:
        int64 [*sizes, len(sizes)].

    Raises:
        ValueError: no size was given.

    Examples:
        >>> from posenc_ext import functional as F
        >>> F.grid_positions(2, 3)[1]
        tensor([[1, 0],
                [1, 1],
                [1, 2]])
    """
    if not sizes:
        raise ValueError("posenc_ext::grid_positions: sizes must have at least 1 number, got none")
    index = [torch.arange(size, device=device) for size in sizes]
    return torch.stack(torch.meshgrid(*index, indexing="ij"), dim=-1)


def add_positional_encoding_nd(
    x: Tensor,
    positions: Tensor,
    *,
    widths: Sequence[int] | None = None,
    order: str = "axes",
    token_scale: float = 1.0,
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    encoding_scale: float | Tensor = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`x * token_scale + PE` of positions on several axes, in one pass.

    Each axis is encoded in columns of its own, by the formula of Vaswani et al. 2017, section 3.5, as images and grids
    do (DETR, Carion et al. 2020; MAE, He et al. 2022). docs/recipes.md has the call for each project.

    Args:
        x: activations [..., d_model], float32, float64, bfloat16 or float16.
        positions: [..., n], int64, int32, float32 or float64, a number for each of n axes; broadcastable to the axes of
            `x` but the last. Floating ones may be trained.
        widths: columns of each axis, one int an axis; each axis is encoded as if it were alone with that width. None
            for equal even widths, the least that hold d_model. What the last of them have beyond d_model is cut off.
        order: `"axes"`: the columns of the first axis, then those of the second, and so on; `"functions"`: the first
            halves of all axes, then the second halves, so all sines before all cosines.
        token_scale: factor of `x`.
        convention: which encoding each axis has: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"`, angles as fp32 tables form them; `"exact"`, right to about 1e-7 at every position;
            None for the convention's own.
        encoding_scale: factor of the encoding, a number or a tensor that holds one and may be trained.
        out: tensor to write into, of the shape and dtype of `x`; may be `x` itself. Not differentiable.

    Returns:
        A tensor of the shape and dtype of `x`. The first position of a convention plays no part.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape, or a value out of range.
        NotImplementedError: `x` is a DTensor or nested.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> image = torch.zeros(2, 14, 14, 64)
        >>> F.add_positional_encoding_nd(image, F.grid_positions(14, 14)).shape
        torch.Size([2, 14, 14, 64])
    """
    op = "add_positional_encoding_nd"
    try:
        if isinstance(x, Tensor) and x.is_nested:
            raise NotImplementedError(f"posenc_ext::{op}: x must not be nested, got layout {x.layout}")
        if has_torch_function_variadic(x, positions):
            given: dict[str, Any] = {
                "widths": widths,
                "order": order,
                "token_scale": token_scale,
                "convention": convention,
            }
            given |= {"precision": precision, "encoding_scale": encoding_scale, "out": out}
            return _overridden(add_positional_encoding_nd, "x", {"x": x, "positions": positions, **given})
        if is_dtensor(x):
            raise NotImplementedError(f"posenc_ext::{op}: x must not be a DTensor; encode the columns of x.to_local()")
        if x.dim() == 0 or positions.dim() == 0:
            name, shape = ("x", "[..., d_model]") if x.dim() == 0 else ("positions", "[..., n]")
            raise ValueError(f"posenc_ext::{op}: {name} must have shape {shape}, got a scalar")
        chosen = resolve(convention)
        blocks = _blocks.blocks_of(op, positions.shape[-1], x.shape[-1], widths, order, chosen.layout)
        each = [broadcast_positions(p, x.shape[:-1], True, op) for p in positions.unbind(-1)]
        general = _elements.arguments(op, x, encoding_scale, 0.0, positions) or {}
        call = (x, each, blocks, chosen.spec(precision), float(token_scale), general)
        if out is None:
            return _blocks.run(*call)
        _check_out(op, out, "x", x, general, positions)
        if out.shape != x.shape:
            raise ValueError(f"posenc_ext::{op}: out must have shape {list(x.shape)}, got {list(out.shape)}")
        if _is_compiling():  # which knows no out= that is a block of columns
            return out.copy_(_blocks.run(*call))
        _blocks.write(out, *call)
        return _bump_version(out)
    except Exception:
        _explain(op, x=x, positions=positions, out=out)
        raise


def positional_encoding_nd(
    positions: Tensor,
    d_model: int,
    *,
    widths: Sequence[int] | None = None,
    order: str = "axes",
    convention: str | Convention = "vaswani",
    precision: str | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The encoding of positions on several axes itself.

    Each axis is encoded in columns of its own, by the formula of Vaswani et al. 2017, section 3.5, as images and grids
    do (DETR, Carion et al. 2020; MAE, He et al. 2022). docs/recipes.md has the call for each project.

    Args:
        positions: [..., n], int64, int32, float32 or float64, a number for each of n axes: those of `grid_positions`,
            or any others. Floating ones may be trained.
        d_model: width D of all axes together.
        widths: columns of each axis, one int an axis; each axis is encoded as if it were alone with that width. None
            for equal even widths, the least that hold d_model. What the last of them have beyond d_model is cut off.
        order: `"axes"`: the columns of the first axis, then those of the second, and so on; `"functions"`: the first
            halves of all axes, then the second halves, so all sines before all cosines.
        convention: which encoding each axis has: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"`, angles as fp32 tables form them; `"exact"`, right to about 1e-7 at every position;
            None for the convention's own.
        dtype: of the result, float32, float64, bfloat16 or float16; None for `torch.get_default_dtype()`.
        out: tensor to write into, [*positions.shape[:-1], d_model]; its dtype is used. Not differentiable.

    Returns:
        [*positions.shape[:-1], d_model]. The first position of a convention plays no part.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape, or a value out of range.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> F.positional_encoding_nd(torch.tensor([[0, 1]]), 4)
        tensor([[0.0000, 1.0000, 0.8415, 0.5403]])
    """
    try:
        if has_torch_function_unary(positions) or positions.is_nested:
            return _overridden(positional_encoding_nd, "positions", locals())
        chosen = (dtype or torch.get_default_dtype()) if out is None else out.dtype
        # -0 + e is e, to the bit.
        nothing = torch.full((d_model,), -0.0, dtype=chosen, device=positions.device)
        x = nothing.expand(*positions.shape[:-1], d_model)
        options = {"widths": widths, "order": order, "convention": convention, "precision": precision}
        return add_positional_encoding_nd(x, positions, out=out, **options)  # type: ignore[arg-type]
    except Exception:
        _explain("positional_encoding_nd", positions=positions, out=out)
        raise


def positions_from_padding(
    ids_or_mask: Tensor,
    padding_idx: int,
    *,
    offset: int | Tensor = 0,
    first_position: int = 0,
    padding_position: int | None = 0,
    batch_first: bool = True,
) -> Tensor:
    """Positions that count the real tokens of each row alone, so that padding on either side changes none of them.

    A real token has `first_position + offset + (real tokens before it)`, a pad `padding_position`. What projects write:

        attention_mask.cumsum(-1) - 1         positions_from_padding(attention_mask, 0, padding_position=None)
        the same, masked_fill(mask == 0, 1)   positions_from_padding(attention_mask, 0, padding_position=1)
        fairseq, M2M100, with pad the         positions_from_padding(ids, pad, offset=cache_length,
        id of pads: from pad + 1, pad           first_position=pad + 1, padding_position=pad)
        OPT: (cumsum * mask - 1) + 2          positions_from_padding(mask, 0, first_position=2, padding_position=1)
        FSMT: the offset at pads too          positions_from_padding(ids, pad, first_position=pad + 1,
                                                padding_position=pad) + cache_length

    Args:
        ids_or_mask: token ids or a mask [..., length] (batch-first) or [length, ...], int64, int32 or bool.
        padding_idx: the number that marks a pad. Of ids that of the pad token, as it stands in them; 0 for an attention
            mask (1 is a real token); 1, or True, for a `key_padding_mask` of PyTorch (True is a pad).
        offset: the number of real tokens in the cache of a decoder, added to the positions of real tokens: an int or an
            integer tensor, 0-d or one number for each row of the batch.
        first_position: of the first real token of a row.
        padding_position: of every pad. None: counting goes on there, so a pad has the position of the real token before
            it, and those at the beginning have `first_position + offset - 1`.
        batch_first: which axis is the sequence: the last one or the first one.

    Returns:
        int64, contiguous, of the shape of `ids_or_mask`.

    Raises:
        TypeError: an argument of another Python type, or an `offset` that is no integer tensor.
        ValueError: a tensor of another dtype or shape. A nested tensor is refused: its rows need no pads, and positions
            start anew in each of them.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> F.positions_from_padding(torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]]), 0)
        tensor([[0, 0, 0, 1],
                [0, 1, 2, 0]])
    """
    try:
        if has_torch_function_unary(ids_or_mask) or ids_or_mask.is_nested:
            return _overridden(positions_from_padding, "ids_or_mask", locals())
        offsets = None
        if isinstance(offset, Tensor):
            check_integer("positions_from_padding", "offset", offset)
            offsets, offset = offset, 0
        elif type(offset) is not int:
            offset, _, _ = resolve_offset(
                offset, None, ids_or_mask.shape, batch_first, 0, ids_or_mask.device, "positions_from_padding"
            )
        first = first_position + offset
        check_offset("positions_from_padding", first)
        return _positions.from_padding(ids_or_mask, padding_idx, offsets, first, padding_position, batch_first)
    except Exception:
        _explain("positions_from_padding", ids_or_mask=ids_or_mask)
        _explain_integers(
            "positions_from_padding",
            padding_idx=padding_idx,
            first_position=first_position,
            padding_position=padding_position,
        )
        raise


def positions_from_cu_seqlens(cu_seqlens: Tensor, total: int, *, first_position: int = 0) -> Tensor:
    """Positions of sequences packed behind one another, which start anew in each of them.

    Args:
        cu_seqlens: 0 and then the end of each sequence, int32 or int64 [sequences + 1], as FlashAttention and
            `torch.nn.attention.varlen` take them. On the CPU they are checked. On a GPU that would be to wait for the
            device, so wrong ones give wrong positions.
        total: number of tokens, at least the last of `cu_seqlens`. Tokens after it count anew from there.
        first_position: of the first token of each sequence.

    Returns:
        int64 [total].

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape, numbers that descend, or a `total` that is too small.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> F.positions_from_cu_seqlens(torch.tensor([0, 3, 7]), 7)
        tensor([0, 1, 2, 0, 1, 2, 3])
    """
    try:
        if has_torch_function_unary(cu_seqlens) or cu_seqlens.is_nested:
            return _overridden(positions_from_cu_seqlens, "cu_seqlens", locals())
        check_offset("positions_from_cu_seqlens", first_position)
        return _positions.from_cu_seqlens(cu_seqlens, total, first_position)
    except Exception:
        _explain("positions_from_cu_seqlens", cu_seqlens=cu_seqlens)
        _explain_integers("positions_from_cu_seqlens", total=total, first_position=first_position)
        raise


def positions_from_sequence_ids(ids: Tensor, *, first_position: int = 0, batch_first: bool = True) -> Tensor:
    """Positions of packed rows, which start anew wherever the number of the sequence changes.

    Args:
        ids: which sequence each token belongs to, int64 or int32 [..., length] (batch-first) or [length, ...]. Any
            numbers: only where one differs from the one before it matters.
        first_position: of the first token of each sequence.
        batch_first: which axis is the sequence: the last one or the first one.

    Returns:
        int64, contiguous, of the shape of `ids`.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a tensor of another dtype or shape.

    Examples:
        >>> import torch
        >>> from posenc_ext import functional as F
        >>> F.positions_from_sequence_ids(torch.tensor([[5, 5, 5, 6, 6]]))
        tensor([[0, 1, 2, 0, 1]])
    """
    try:
        if has_torch_function_unary(ids) or ids.is_nested:
            return _overridden(positions_from_sequence_ids, "ids", locals())
        check_offset("positions_from_sequence_ids", first_position)
        return _positions.from_sequence_ids(ids, first_position, batch_first)
    except Exception:
        _explain("positions_from_sequence_ids", ids=ids)
        _explain_integers("positions_from_sequence_ids", first_position=first_position)
        raise


def angular_frequencies(
    d_model: int, *, convention: str | Convention = "vaswani", precision: str | None = None
) -> Tensor:
    """The frequencies w_k that the encoding uses, in radians per position.

    `"exact"`: those of the convention's divisor: base^(-2k/D) (Vaswani et al. 2017, section 3.5), base^(-k/(D/2-1))
    (tensor2tensor) or base^(-k/floor(D/2)) (diffusers). `"reference"`: the float32 numbers that fp32 tables are built
    from, exp(fl32(2k) * fl32(-ln(base)/D)) with the exponential rounded correctly.

    Args:
        d_model: width D, from 1 to 2^24.
        convention: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"` or `"exact"`; None for the convention's own.

    Returns:
        float64 [pairs] on the CPU, fastest first. There are d_model // 2 pairs, and one more at an odd width whose last
        column is a sine.

    Raises:
        ValueError: `d_model` out of range, an unknown convention or precision.

    Examples:
        >>> from posenc_ext import functional as F
        >>> F.angular_frequencies(4, precision="exact")
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    if not 1 <= d_model <= 2**24:
        text = "positive" if d_model < 1 else f"at most {2**24}"
        raise ValueError(f"posenc_ext.angular_frequencies: d_model must be {text}, got {d_model}")
    chosen = resolve(convention)
    chosen.spec(precision)  # refuses an unknown precision
    width = d_model + d_model % 2 if chosen.odd == "round_up" else d_model
    pairs = d_model // 2 if chosen.odd == "zero" else (d_model + 1) // 2
    table = _C.frequency_table(chosen.base, DIVISORS[chosen.divisor], width, pairs)
    if (precision or chosen.precision) == "reference":
        return torch.from_numpy(table["angular"]).double()
    words = torch.from_numpy(table["turns"].astype("float64"))
    return 2 * math.pi * (words[0] * 2.0**-32 + words[1] * 2.0**-64)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def add_sinusoids(
    x: Tensor,
    offset: int | Tensor,
    positions: Tensor | None,
    token_scale: float,
    convention: str | Convention,
    precision: str | None,
    frequencies: Tensor | None,
    encoding_scale: float | Tensor,
    dropout_p: float,
    batch_first: bool,
    out: Tensor | None = None,
    d_model: int | None = None,
    position_table: Tensor | None = None,
) -> Tensor:
    """`add_positional_encoding` for this package: without keywords; `d_model`: the width that x must have."""
    try:
        if d_model is not None and (not (sizes := x.shape) or sizes[-1] != d_model):
            raise ValueError(
                f"posenc_ext.PositionalEncoding: x must have width {d_model} in its last axis, got {list(x.shape)}"
            )
        if has_torch_function_unary(x) or x.is_nested:
            return _overridden(add_positional_encoding, "x", _public(locals()))
        if dropout_p and out is None and _drops_apart(x, x):
            return _dropped(add_positional_encoding, _public(locals()))
        chosen = convention if type(convention) is Convention else resolve(convention)
        spec = chosen._specs[None, batch_first] if precision is None else chosen.spec(precision, batch_first)
        if position_table is not None:
            op = "add_positional_encoding"
            spec = _spec_of_table(op, x, position_table, chosen, precision, frequencies, batch_first)
        if type(offset) is not int:
            offset, positions, offsets = resolve_offset(
                offset,
                positions,
                x.shape[:-1],
                batch_first,
                chosen.first_position,
                x.device,
                "add_positional_encoding",
            )
            spec = Spec(spec.base, spec.flags | offsets)
        if positions is None:
            offset = offset + chosen.first_position
        else:
            positions = broadcast_positions(positions, x.shape[:-1], batch_first, "add_positional_encoding")
        general: dict[str, Any] | None = None  # what only the op add_general takes
        if (
            dropout_p
            or position_table is not None
            or type(encoding_scale) is not float
            or encoding_scale != 1
            or frequencies is not None
            or (positions is not None and positions.is_floating_point())
        ):
            general = _elements.arguments(
                "add_positional_encoding", x, encoding_scale, dropout_p, positions, frequencies, position_table
            )
        if out is None:
            return run_add(x, positions, offset, spec, token_scale, 0, -1, general)
        _shard.refuse("add_positional_encoding", x, out=out)
        _check_out("add_positional_encoding", out, "x", x, general, positions)
        check_offset("add_positional_encoding", offset)
        if general is None and token_scale == 1:
            _ops.add_positional_encoding_out(x, positions, offset, *spec, out)
        else:
            _ops.add_general_out(
                x,
                positions,
                offset=offset,
                base=spec.base,
                flags=spec.flags,
                token_scale=token_scale,
                out=out,
                **(general or {}),
            )
        return _bump_version(out)
    except Exception:
        _explain(
            "add_positional_encoding",
            offset,
            x=x,
            positions=positions,
            frequencies=frequencies,
            position_table=position_table,
            out=out,
        )
        raise


def _public(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `add_positional_encoding` among the locals of `add_sinusoids`."""
    return {name: value for name, value in arguments.items() if name not in ("d_model", "sizes")}


def _overridden(function: Callable[..., Tensor], tokens: str, arguments: dict[str, Any]) -> Tensor:
    """What a nested tensor, a subclass with `__torch_function__` or a mode makes of a call."""
    given = arguments[tokens]
    if isinstance(given, Tensor) and given.is_nested:
        if function.__name__.startswith("positions_from_"):
            raise ValueError(
                f"posenc_ext::{function.__name__}: {tokens} must not be nested, got layout {given.layout}; without it "
                "the positions of a nested tensor start anew in each row"
            )
        return jagged.apply(function, function.__name__, tokens, arguments)
    relevant = (given, arguments["weight"]) if "weight" in arguments else (given,)
    result: Tensor = handle_torch_function(function, relevant, **arguments)
    return result


def _explain(op: str, offset: Any = 0, /, **arguments: Any) -> None:
    """Once a call has failed: raise what is wrong with an argument, where that is the reason and not said already."""
    for name, value in arguments.items():
        if value is None and name in ("positions", "frequencies", "position_table", "out"):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"posenc_ext::{op}: {name} must be a torch.Tensor, got {type(value).__name__}") from None
        if value.layout not in (torch.strided, torch.jagged):
            raise ValueError(f"posenc_ext::{op}: {name} must be a dense tensor, got layout {value.layout}") from None
        if name == "weight" and value.dim() != 2:
            text = "weight must have 2 dimensions [vocab_size, d_model]"
            raise ValueError(f"posenc_ext::{op}: {text}, got shape {list(value.shape)}") from None
    if type(offset) is int and not LEAST <= offset < INT64:
        raise offset_error(op, offset) from None


def _explain_integers(op: str, **arguments: Any) -> None:
    """As `_explain`, for integers."""
    for name, value in arguments.items():
        if not isinstance(value, (Integral, torch.SymInt, Tensor)) and not (
            value is None and name == "padding_position"
        ):
            raise TypeError(f"posenc_ext::{op}: {name} must be an int, got {type(value).__name__}") from None
        if isinstance(value, Integral):
            integer = int(value)
            if not -(2**63) <= integer < 2**63:
                raise ValueError(f"posenc_ext::{op}: {name} {integer} exceeds the int64 range") from None


def _explain_positions(given: Any) -> None:
    """As `_explain`, for what may be a length."""
    if isinstance(given, Tensor):
        _explain("positional_encoding", positions=given)
    elif not isinstance(given, (Integral, torch.SymInt)):
        raise TypeError(
            "posenc_ext::positional_encoding: positions_or_length must be a torch.Tensor or an int, "
            f"got {type(given).__name__}"
        ) from None


def _row_of(padding_idx: int, weight: Tensor) -> int:
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise ValueError(f"posenc_ext::embed: padding_idx must lie in [{-rows}, {rows}), got {padding_idx}")
    return padding_idx + rows if padding_idx < 0 else padding_idx


def _embed_in_place(
    call: EmbedArguments,
    max_norm: float | None,
    norm_type: float,
    out: Tensor | None,
    general: dict[str, Any] | None = None,
) -> Tensor:
    """An embed that writes: to the rows of weight that are too long, or to out."""
    weight, input, positions, offset, token_scale, base, flags, padding_idx, _, _ = call
    if type(weight) not in PLAIN:
        _shard.refuse("embed", weight, max_norm=max_norm, out=out)
    check_offset("embed", offset)
    if out is not None:
        _check_out("embed", out, "weight", weight, general, positions)
    if max_norm is not None:
        if not max_norm > 0:
            raise ValueError(f"posenc_ext::embed: max_norm must be positive, got {max_norm}")
        if in_onnx_export():
            raise NotImplementedError(
                "posenc_ext::embed: max_norm must be None in an export to ONNX, which scales no rows in place, "
                f"got {max_norm}"
            )
        # Whatever the call would refuse must be refused before the rows are scaled.
        further = general or {}
        tables = further.get("frequencies"), further.get("position_table")
        _ops.check_embed(weight, input, positions, offset, base, flags, out, *tables)
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    if out is None:
        return run_embed(call, general)
    if general is None:
        write = _embed_out if _is_compiling() else _embed_out._op
        write(weight, input, positions, offset, token_scale, base, flags, out)
    else:
        _ops.embed_general_out(
            weight,
            input,
            positions,
            offset=offset,
            token_scale=token_scale,
            base=base,
            flags=flags,
            padding_idx=padding_idx,
            out=out,
            **general,
        )
    return _bump_version(out)


def _spec_of_table(
    op: str,
    like: Tensor,
    table: Tensor,
    convention: Convention,
    precision: str | None,
    frequencies: Tensor | None,
    batch_first: bool,
) -> Spec:
    """No sinusoids, where `position_table` takes their place."""
    usual = CONVENTIONS["vaswani"]  # not compared as a whole, which a compiled program cannot
    sinusoids = {
        f"convention {convention.name!r}": convention._specs[None, True] != usual._specs[None, True]
        or convention.first_position != usual.first_position,
        f"precision {precision!r}": precision is not None,
        "frequencies": frequencies is not None,
    }
    for name, given in sinusoids.items():
        if given:
            raise ValueError(f"posenc_ext::{op}: position_table takes the place of sinusoids, got {name} too")
    if is_dtensor(table) and not is_dtensor(like):
        raise ValueError(f"posenc_ext::{op}: position_table must be a Tensor where the rows are one, got a DTensor")
    return Spec(NO_ENCODING.base, NO_ENCODING.flags | (0 if batch_first else SEQUENCE_FIRST))


def _at_padding(name: str, padding_idx: int | None) -> int:
    if name not in AT_PADDING:
        known = ", ".join(map(repr, AT_PADDING))
        raise ValueError(f"posenc_ext::embed: at_padding must be one of {known}, got {name!r}")
    if padding_idx is None:
        raise ValueError(f"posenc_ext::embed: at_padding={name!r} needs a padding_idx, got None")
    return AT_PADDING[name]


def _drops_apart(like: Tensor, input: Tensor) -> bool:
    """Whether dropout is a call of its own: the op has no rule for it, or an exported program may be evaluated."""
    return _compose.needed() or is_dtensor(like) or is_dtensor(input) or torch.compiler.is_exporting()


def _dropped(function: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    probability = arguments.pop("dropout_p")
    return torch.nn.functional.dropout(function(**arguments), probability)


def _bump_version(out: Tensor) -> Tensor:
    """Tell autograd that `out` was written to, as PyTorch's own ops do: a graph that had saved it must notice."""
    if not (_is_compiling() or out.is_inference()):
        torch.autograd.graph.increment_version(out)
    return out


def _check_out(
    op: str,
    out: Tensor,
    name: str,
    given: Tensor | None,
    general: dict[str, Any] | None = None,
    positions: Tensor | None = None,
) -> None:
    """Writing into `out` leaves no history, so neither it nor what it is made of may need one."""
    if _grad_enabled() or forward_ad._current_level >= 0:
        known = general or {}
        names = {"encoding_scale": "encoding_scale_tensor", "frequencies": "frequencies"}
        others = {name: known.get(key) for name, key in {**names, "position_table": "position_table"}.items()}
        _check_history(op, {"positions": positions, name: given, **others, "out": out})
    if _is_compiling():
        if in_onnx_export():
            raise NotImplementedError(
                f"posenc_ext::{op}: out must be None in an export to ONNX, which writes nothing in place, got shape "
                f"{list(out.shape)}"
            )
        return
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"posenc_ext::{op}: out is an inference tensor. Inplace update to inference tensor outside InferenceMode "
            "is not allowed; write to a clone of it"
        )
    if out.is_neg():
        raise ValueError(f"posenc_ext::{op}: out must not be a negated view; write to out.resolve_neg()")


def _check_history(op: str, tensors: dict[str, Tensor | None]) -> None:
    for argument, tensor in tensors.items():
        if tensor is None:
            continue
        if _grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"posenc_ext::{op}: out= is not differentiable, but {argument} requires a gradient; use torch.no_grad()"
            )
        if forward_ad._current_level >= 0 and _has_tangent(tensor):
            raise NotImplementedError(
                f"posenc_ext::{op}: out= does not support forward-mode AD, but {argument} takes part in it"
            )


def _has_tangent(tensor: Tensor) -> bool:
    """Whether forward mode follows the tensor, or may: of the wrappers of torch.func, jvp sees through its own only."""
    if _is_compiling():
        return True  # no way to look
    if functorch.is_functorch_wrapped_tensor(tensor):
        inner = functorch.get_interpreter_stack()[-1]
        if inner.key() != functorch.TransformType.Jvp or inner.level() != functorch.maybe_get_level(tensor):
            return True
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
