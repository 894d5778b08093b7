"""What every op consists of, in core ATen, for tools that know no custom op: ONNX, ExecuTorch and the like.

The frequencies become constants of the graph, one for each column of the output, so layouts and odd widths are data.
Angles of precision exact are counted in parts of a turn, as the kernels do (csrc/sinusoid.h), with products and
remainders of int64 that do not overflow; there are no shifts, which some runtimes lack.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posenc_ext import _C
from posenc_ext.conventions import (
    AT_PADDING,
    DIVISORS,
    DTYPES,
    LAYOUTS,
    NO_ENCODING,
    ODD_RULES,
    OFFSETS,
    PRECISIONS,
    SEQUENCE_FIRST,
)
from posenc_ext.ops import compose, positions
from posenc_ext.ops.call import GradientCall, by_name, with_running_index
from posenc_ext.ops.compose import _scaled, _wide
from posenc_ext.reference import sinusoid_columns


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Every op of `torch.ops.posenc_ext` as a function of core ATen ops, for `ExportedProgram.run_decompositions`.

    The encoding is within 3e-7 of the op's in fp32. Out-of-range ids are whatever `aten.embedding` makes of them.
    Nothing is registered: a table acts where it is handed in.

    Returns:
        For each op a function with its arguments, of which those with a default may be left out. It raises
        NotImplementedError for sparse weight gradients.

    Examples:
        >>> import torch, posenc_ext
        >>> layer, ids = posenc_ext.TransformerEmbedding(100, 8), torch.zeros(2, 5, dtype=torch.int64)
        >>> program = torch.export.export(layer.eval(), (ids,))
        >>> core = program.run_decompositions(posenc_ext.decompositions())
        >>> any("posenc_ext" in str(node.target) for node in core.graph.nodes)
        False
    """
    ops = torch.ops.posenc_ext
    overloads = {getattr(ops, name).default: formula for name, formula in _FORMULAS.items()}
    return {overload: _as_op(overload, formula) for overload, formula in overloads.items()}


# Arguments of the general ops.
_WITHOUT = {"seed", "dropout_p"}


def _as_op(op: Any, formula: Callable[..., Any]) -> Callable[..., Any]:
    """`formula`, which names the arguments of `op` that it knows; any other must have its default."""
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    parameters = inspect.signature(formula).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(formula)
    def decomposed(*inputs: Any, **keywords: Any) -> Any:
        given = defaults | by_name(op, inputs, keywords)
        unknown = given.keys() & _WITHOUT if takes_all else given.keys() - parameters.keys()
        for name in unknown:
            value = given.pop(name)
            if isinstance(value, Tensor) or value != defaults[name]:
                raise NotImplementedError(f"{op.name()}: {name} has no decomposition")
        return formula(**given)

    return decomposed


# ---- the encoding ----------------------------------------------------------------------------------------------------


class _Spec:
    """What a base and flags say (csrc/spec.h)."""

    def __init__(self, base: float, flags: int) -> None:
        bits, none, sequence_first = 4, 1 << 16, SEQUENCE_FIRST
        if flags < 512:  # of version 0.1
            bits, none, sequence_first = 2, 0, 256
        codes = [flags >> bits * place & (1 << bits) - 1 for place in range(4)]
        self.base = base
        self.encoded = not flags & none if none else codes[1] != 3
        self.sequence_first = bool(flags & sequence_first)
        self.divisor, self.layout, self.odd, self.precision = (
            next((name for name, known in names.items() if known == code), "")
            for names, code in zip((DIVISORS, LAYOUTS, ODD_RULES, PRECISIONS), codes, strict=True)
        )


def _encode(
    positions: Tensor,
    d_model: int,
    offset: int,
    base: float,
    flags: int,
    dtype: torch.dtype,
    frequencies: Tensor | None = None,
) -> Tensor:
    """As the op `positional_encoding`."""
    spec, acc, d_model = _Spec(base, flags), _wide(dtype), int(d_model)  # a width that varies is fixed here
    width = d_model + d_model % 2 if spec.odd == "round_up" else d_model
    pairs = d_model // 2 if spec.odd == "zero" else (d_model + 1) // 2
    if frequencies is not None or positions.is_floating_point():
        angle = _angle(positions.unsqueeze(-1), offset, spec, width, pairs, frequencies)
        sine, cosine = angle.sin().to(acc), angle.cos().to(acc)
        return _arranged(sine, _columns(cosine, 0, d_model // 2), d_model, spec.layout).to(dtype)
    p = (positions.to(torch.int64) + offset).unsqueeze(-1)
    if spec.precision == "reference":
        angle = (p.to(torch.float32) * _frequencies(spec, width, pairs, p.device)).to(acc)
        sine, cosine = angle.sin(), angle.cos()
    else:
        phase = _phase(p, _turns(spec, width, pairs, p.device))
        sine, cosine = _sine_of(phase, acc), _sine_of(phase + _TURN // 4, acc)
    return _arranged(sine, _columns(cosine, 0, d_model // 2), d_model, spec.layout).to(dtype)


def _angle(p: Tensor, offset: int, spec: _Spec, width: int, pairs: int, frequencies: Tensor | None) -> Tensor:
    """Angles in float64, differentiable; of positions that are floating, or of frequencies that are given."""
    fp64 = p.to(torch.float64)
    if spec.precision == "reference":
        w = _frequencies(spec, width, pairs, p.device) if frequencies is None else frequencies.to(torch.float32)
        return ((fp64 + offset).to(torch.float32) * w).to(torch.float64)
    if frequencies is not None:
        return (fp64 + offset) * frequencies.to(torch.float64)
    # The whole part in parts of a turn, so that it is right at any position.
    whole = fp64.floor()
    phase = _phase(whole.to(torch.int64) + offset, _turns(spec, width, pairs, p.device)) % _TURN
    return phase.to(torch.float64) * (2 * math.pi / _TURN) + (fp64 - whole) * _radians(spec, width, pairs, p.device)


def _angular(d_model: int, base: float, flags: int, device: torch.device) -> Tensor:
    """The frequencies of an encoding, float64 [pairs]."""
    spec, d_model = _Spec(base, flags), int(d_model)
    width = d_model + d_model % 2 if spec.odd == "round_up" else d_model
    pairs = d_model // 2 if spec.odd == "zero" else (d_model + 1) // 2
    exact = spec.precision != "reference"
    return (_radians if exact else _frequencies)(spec, width, pairs, device).to(torch.float64)


def _radians(spec: _Spec, width: int, pairs: int, device: torch.device) -> Tensor:
    """Of precision exact, float64 [pairs]."""
    first, second, third = (digit.to(torch.float64) for digit in _turns(spec, width, pairs, device))
    return (first + (second + third / _DIGIT) / _DIGIT) * (2 * math.pi / _DIGIT)


def _frequencies(spec: _Spec, width: int, pairs: int, device: torch.device) -> Tensor:
    """Of precision reference, float32 [pairs], to the bit (csrc/frequency.cpp)."""
    half = width // 2 - (spec.divisor == "half_minus_1")
    numerator, denominator = (2, width) if spec.divisor == "d" else (1, max(half, 1))
    step = float(np.float32(-(math.log(spec.base) / denominator)))
    exponent = _range(numerator * pairs, device, numerator).to(torch.float32) * step
    return exponent.to(torch.float64).exp().to(torch.float32)


# A whole turn is _TURN parts, counted in two digits of 30 bits: then no product of digits overflows, nor a few of them.
_DIGIT = 1 << 30
_TURN = _DIGIT * _DIGIT


def _turns(spec: _Spec, width: int, pairs: int, device: torch.device) -> list[Tensor]:
    """90 bits of w / 2pi, three digits, most significant first; int64 [pairs] each."""
    words = _C.frequency_table(spec.base, DIVISORS[spec.divisor], width, pairs)["turns"].astype(object)
    exact = [int(turn) for turn in (words[0] << 96) + (words[1] << 64) + (words[2] << 32) + words[3]]

    def digits(values: list[int]) -> list[Tensor]:
        upper = [value >> 30 for value in values]
        return [vector([u >> 30 for u in upper])] + [vector([v % _DIGIT for v in vs]) for vs in (upper, values)]

    def vector(values: list[int]) -> Tensor:
        # Not torch.tensor: ExportedProgram.run_decompositions loses the constants that a decomposition makes.
        parts = [torch.full([1], value, dtype=torch.int64, device=device) for value in values]
        return torch.cat(parts) if parts else torch.full([0], 0, dtype=torch.int64, device=device)

    # Written as rows of so many, the frequencies are the first of each row times the ratios within a row.
    count = max(math.isqrt(pairs), 1)
    a = [digit.unsqueeze(1) for digit in digits([turn >> 38 for turn in exact[::count]])]
    b = digits([(turn << 90) // exact[0] for turn in exact[:count]])
    low = a[0] * b[1] + a[1] * b[0] + _upper(a[0] * b[2] + a[1] * b[1] + a[2] * b[0])
    high = a[0] * b[0] + _upper(low)
    return [_columns(digit.view(-1), 0, pairs) for digit in (_upper(high), high % _DIGIT, low % _DIGIT)]


def _upper(x: Tensor) -> Tensor:
    """x / _DIGIT, rounded down, in two steps that are also exact where a runtime divides integers as float32."""

    def quotient(x: Tensor, bits: int) -> Tensor:
        return torch.div(x - x % (1 << bits), 1 << bits, rounding_mode="trunc")

    return quotient(x, 45) * (1 << 15) + quotient(x % (1 << 45), 30)


def _phase(p: Tensor, turns: list[Tensor]) -> Tensor:
    """The fraction of p * w / 2pi, and some whole turns; right to 2^-28 of a turn for every p."""
    low, high = p % _DIGIT, _upper(p)
    first, second, third = turns
    return (low * first + high * second % _DIGIT) % _DIGIT * _DIGIT + low * second + high * third % _TURN


def _sine_of(phase: Tensor, dtype: torch.dtype) -> Tensor:
    """sin(2pi * phase / _TURN)."""
    # sin(a) = sin(|b| - pi/2), where b is a + 3pi/2, less as many turns as put it into [-pi, pi).
    part = ((phase + _TURN // 4 * 3) % _TURN - _TURN // 2).abs() - _TURN // 4
    return (part.to(dtype) * (2 * math.pi / _TURN)).sin()


def _arranged(sine: Tensor, cosine: Tensor, d_model: int, layout: str) -> Tensor:
    """Sines and cosines [..., pairs] in their columns."""
    sines, cosines = sinusoid_columns(d_model, layout, sines=sine.shape[-1])
    parts = [sine, cosine] if sines.start < cosines.start else [cosine, sine]
    if sines.step == 2:
        pairs = torch.cat([_columns(part, 0, len(cosines)).unsqueeze(-1) for part in parts], dim=-1)
        parts = [pairs.view(*cosine.shape[:-1], 2 * len(cosines)), _columns(sine, len(cosines), len(sines))]
    result = torch.cat(parts, dim=-1)
    missing = d_model - len(sines) - len(cosines)
    return torch.constant_pad_nd(result, [0, missing]) if missing else result


def _columns(x: Tensor, start: int, end: int) -> Tensor:
    """`x[..., start:end]`."""
    return x if end - start == x.shape[-1] else x[..., start:end]


def _range(end: int, device: torch.device, step: int = 1) -> Tensor:
    return torch.arange(0, end, step, dtype=torch.int64, device=device)


# ---- the ops ---------------------------------------------------------------------------------------------------------


def _add(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    base: float,
    flags: int,
    token_scale: float = 1.0,
    first_column: int = 0,
    d_model: int = -1,
    encoding_scale: float = 1.0,
    encoding_scale_tensor: Tensor | None = None,
    frequencies: Tensor | None = None,
    position_table: Tensor | None = None,
) -> Tensor:
    spec, token_shape, width = _Spec(base, flags), x.shape[:-1], x.shape[-1]
    result = x.to(_wide(x.dtype))
    if token_scale != 1:
        result = result * token_scale
    if spec.encoded or position_table is not None:
        if positions is None:
            rank = len(token_shape)
            length = 1 if rank == 0 else token_shape[0 if spec.sequence_first else -1]
            shape = [] if rank == 0 else [length] + [1] * (rank - 1) * spec.sequence_first
            positions = _range(length, x.device).view(shape)
        elif flags & OFFSETS:
            positions = with_running_index(positions, not spec.sequence_first)
        if position_table is not None:
            encoding = torch.embedding(position_table, positions.to(torch.int64) + offset).to(result.dtype)
        else:
            whole = width if d_model < 0 else d_model
            encoding = _encode(positions, whole, offset, base, flags, result.dtype, frequencies)
            encoding = _columns(encoding, first_column, first_column + width)
        result = result + _scaled(encoding, encoding_scale, encoding_scale_tensor)
    return result.to(x.dtype)


def _embed(
    weight: Tensor,
    input: Tensor,
    positions: Tensor | None,
    offset: int,
    token_scale: float,
    base: float,
    flags: int,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
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
    def encoded(rows: Tensor) -> Tensor:
        part = (first_column, d_model, encoding_scale, encoding_scale_tensor, frequencies, position_table)
        if not at_padding:
            return _add(rows, positions, offset, base, flags, token_scale, *part)
        padding = (input == padding_idx).unsqueeze(-1)
        if at_padding == AT_PADDING["no_encoding"]:
            plain = _add(rows, None, 0, *NO_ENCODING, token_scale)
            return torch.where(padding, plain, _add(rows, positions, offset, base, flags, token_scale, *part))
        rows = torch.where(padding, torch.full_like(rows, -0.0), rows)  # -0 + x is x
        result = _add(rows, positions, offset, base, flags, token_scale, *part)
        return result if at_padding != AT_PADDING["zeros"] else torch.where(padding, torch.zeros_like(result), result)

    if total_rows < 0:
        return encoded(torch.embedding(weight, input, padding_idx, scale_grad_by_freq, sparse))
    # A shard of rows: ids of other rows look up one row more, and their sum is negative zero.
    count = weight.shape[0]
    row = input.to(torch.int64) - first_row
    here = torch.logical_and(row >= 0, row < count)
    known = torch.logical_and(input >= 0, input < total_rows)
    row = torch.where(here, row, torch.where(known, torch.full_like(row, count), torch.full_like(row, -1)))
    padding = padding_idx - first_row
    rows = torch.embedding(
        torch.constant_pad_nd(weight, [0, 0, 0, 1]),
        row,
        padding if 0 <= padding < count else -1,
        scale_grad_by_freq,
    )
    result = encoded(rows)
    return torch.where(here.unsqueeze(-1), result, torch.full_like(result, -0.0))


def _embed_backward(
    grad: Tensor, input: Tensor, num_weights: int, token_scale: float, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    call = GradientCall(grad, input, num_weights, token_scale, padding_idx, scale_grad_by_freq)
    return compose.weight_gradient(call, sparse=False)


def _embed_backward_sparse(grad: Tensor, **_: Any) -> Any:
    raise NotImplementedError("posenc_ext::embed_backward_sparse: core ATen has no sparse gradients")


def _embed_out(out: Tensor, **arguments: Any) -> None:
    out.copy_(_embed(**arguments))


def _add_out(out: Tensor, **arguments: Any) -> None:
    out.copy_(_add(**arguments))


def _encode_as(dtype: int, **arguments: Any) -> Tensor:
    return _encode(**arguments, dtype=DTYPES[dtype])


def _encode_out(out: Tensor, **arguments: Any) -> None:
    out.copy_(_encode(**arguments, dtype=out.dtype))


def _check_embed(**_: Any) -> None:
    """The checks are the op's own."""


_FORMULAS: dict[str, Callable[..., Any]] = {
    "embed": _embed,
    "_embed_fwd": _embed,
    "embed_general": _embed,
    "embed_out": _embed_out,
    "check_embed": _check_embed,
    "embed_backward": _embed_backward,
    "_embed_bwd": _embed_backward,
    "embed_backward_sparse": _embed_backward_sparse,
    "_embed_bwd_sparse": _embed_backward_sparse,
    "embed_general_backward": _embed_backward,
    "embed_general_backward_sparse": _embed_backward_sparse,
    "embed_general_out": _embed_out,
    "add_general": _add,
    "add_general_out": _add_out,
    "add_positional_encoding": _add,
    "_add_positional_encoding_fwd": _add,
    "add_positional_encoding_out": _add_out,
    "positional_encoding": _encode,
    "positional_encoding_out": _encode_out,
    "positional_encoding_general": _encode_as,
    "positional_encoding_general_out": _encode_out,
    "positions_from_padding": positions.compose_from_padding,
    "positions_from_cu_seqlens": positions.compose_from_cu_seqlens,
    "positions_from_sequence_ids": positions.compose_from_sequence_ids,
}
