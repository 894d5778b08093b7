"""Which convention a table of encodings follows, found from its numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc_ext import functional
from posenc_ext.conventions import CONVENTIONS, DIVISORS, LAYOUTS, ODD_RULES, PRECISIONS, Convention
from posenc_ext.reference import sinusoid_columns, sinusoid_frequencies

_HEAD = 256  # rows that the frequencies are measured in


class Identified(NamedTuple):
    """What `identify_convention` found: row r of the table is scale * the encoding of position start + r.

    Attributes:
        convention: of the layer that encodes likewise: a named one where one fits. Its `first_position` is that of the
            row after `padding_row`, or `start` where there is none. At an even width the odd rule cannot be told.
        scale: factor of all numbers, above 0; 1 and sqrt(D)^+-1 exactly.
        start: position of row 0.
        padding_row: index of a row of zeros, which fairseq and its heirs keep for pads, or None.
        difference: the largest absolute difference from what the convention computes, in that row none.

    Examples:
        >>> import posenc_ext
        >>> found = posenc_ext.identify_convention(posenc_ext.PositionalEncoding(64, max_len=100).pe)
        >>> found.convention.name, found.scale, found.start, found.padding_row
        ('vaswani', 1.0, 0, None)
    """

    convention: Convention
    scale: float
    start: int
    padding_row: int | None
    difference: float

    @property
    def divisor(self) -> str:
        """`convention.divisor`."""
        return self.convention.divisor

    @property
    def base(self) -> float:
        """`convention.base`."""
        return self.convention.base

    @property
    def layout(self) -> str:
        """`convention.layout`: the order of the columns."""
        return self.convention.layout

    @property
    def odd(self) -> str:
        """`convention.odd`."""
        return self.convention.odd


def identify_convention(table: Tensor) -> Identified | None:
    """The convention that a table of sinusoids follows.

    The columns of a pair have one length in all rows, which tells layout and scale. From row to row pair k turns by its
    frequency w_k, which tells the base of each divisor, and how far it is turned in row 0 tells the first position. Of
    the bases that give the same numbers the one with fewest digits is taken. What was found is compared with the whole
    table: it may differ by the rounding of the table's numbers and by what fp32 builders differ by, 4e-7 of a position.

    Args:
        table: [length, D], with any number of axes of size 1 among them, of a floating dtype; a NumPy array too.
            Numbers that were rounded to bfloat16 or float16 once are recognised in a wider type.

    Returns:
        What was found, or None where nothing fits. One row tells no base: then it is 10000. Below a width of 4 there is
        one pair, which tells no base either.

    Raises:
        TypeError: `table` is no dense tensor or array of a floating type.
        ValueError: `table` has another shape.

    Examples:
        >>> import torch, posenc_ext
        >>> table = posenc_ext.functional.positional_encoding(100, 64, convention="marian")
        >>> posenc_ext.identify_convention(table).convention.name
        'marian'
        >>> posenc_ext.identify_convention(torch.randn(100, 64)) is None
        True
    """
    table = torch.as_tensor(table)
    if not table.is_floating_point() or table.layout != torch.strided:
        raise TypeError(
            "posenc_ext.identify_convention: table must be a dense tensor of a floating type, got "
            f"{table.dtype} of layout {table.layout}"
        )
    if not is_table(table):
        raise ValueError(
            "posenc_ext.identify_convention: table must have shape [length, D], with axes of size 1 at most among "
            f"them, got {list(table.shape)}"
        )
    return identify(table.detach().reshape(-1, table.shape[-1]))


def is_table(table: Tensor, width: int | None = None) -> bool:
    """Whether a tensor is [length, D], of a width D if one is given, with any number of axes of size 1 among them."""
    lengths = [size for size in table.shape[:-1] if size != 1]
    return table.is_floating_point() and table.dim() >= 2 and len(lengths) <= 1 and width in (None, table.shape[-1])


def unit_of(numbers: Tensor) -> float:
    """The relative distance between numbers of the narrowest floating type that holds these, to judge by 64 rows."""
    numbers = numbers[:64]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(numbers.to(dtype).to(numbers.dtype), numbers):
            return torch.finfo(dtype).eps
    return torch.finfo(numbers.dtype).eps


def distance(
    rows: Tensor,
    convention: Convention,
    *,
    start: int,
    scale: float = 1.0,
    padding: int = -1,
    frequencies: Tensor | None = None,
) -> tuple[float, float]:
    """Largest and mean difference of rows [length, D] from scale * encoding; infinite, if one row is not of it.

    The tolerance is what fp32 builders differ by, which grows with the position since their frequencies differ in the
    last bit, and the rounding of the table's numbers. A row with the index `padding` may be zero.
    """
    unit = unit_of(rows)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    positions = torch.arange(start, start + len(rows), device=rows.device)
    error = functional.positional_encoding(
        positions,
        rows.shape[1],
        convention=convention,
        frequencies=None if frequencies is None else frequencies.detach().to(rows.device),
        dtype=rows.dtype,
    )
    error.mul_(scale).sub_(rows).abs_()
    if 0 <= padding < len(rows) and not bool(rows[padding].any()):
        error[padding] = 0
    tolerance = scale * (2 * unit + 1e-6 + 4e-7 * positions.abs())
    if not bool((error.amax(dim=1) <= tolerance).all()):
        return math.inf, math.inf
    return (float(error.max()), float(error.mean())) if len(rows) else (0.0, 0.0)


def identify(rows: Tensor) -> Identified | None:
    """`identify_convention` of rows [length, D]."""
    if rows.is_meta or not len(rows) or rows.shape[1] < 2 or not bool(rows.isfinite().all()):
        return None
    zero = (~rows.any(dim=1)).nonzero().flatten().tolist()
    if len(zero) > 1 or len(zero) == len(rows):
        return None
    padding = zero[0] if zero else -1
    # Two divisors give the same numbers for two bases, of which a person chose the round one.
    for _, fits in itertools.groupby(sorted(_fits(rows[:_HEAD], padding), key=_oddity), key=_oddity):
        found = [each for fit in fits for each in _named(rows, fit, padding)]
        if found:
            return min(found, key=lambda each: each[0])[1]
    return None


class _Fit(NamedTuple):
    digits: int  # of the base
    convention: Convention
    scale: float
    start: int
    even: bool


def _oddity(fit: _Fit) -> int:
    return (0 if fit.convention.base == 10000 else fit.digits) + (not _alike(fit))


def _alike(fit: _Fit) -> list[Convention]:
    """The named conventions with these columns, whatever their base."""
    return [c for c in CONVENTIONS.values() if same_columns(c, fit.convention, fit.even)]


def _fits(head: Tensor, padding: int) -> Iterator[_Fit]:
    """Layouts, odd rules and divisors that these rows follow, each with its roundest base."""
    width = head.shape[1]
    for layout, odd in itertools.product(LAYOUTS, ODD_RULES if width % 2 else ("zero",)):
        measured = _measure(head, layout, odd, padding)
        if measured is None:
            continue
        scale, pairs, turns = measured
        for divisor in DIVISORS if width % 2 else ("d", "half_minus_1"):
            exponents = sinusoid_frequencies(width, base=math.e, divisor=divisor, odd=odd)
            exponent = -torch.from_numpy(exponents[: pairs.shape[1]]).log().to(head.device)
            base, digits = _base(turns, exponent, unit_of(head) / len(head))
            if base >= 1:
                start = _start(pairs, base**-exponent)
                convention = Convention(divisor, base, layout, odd)
                if distance(head[:64], convention, start=start, scale=scale, padding=padding)[0] < math.inf:
                    yield _Fit(digits, convention, scale, start, width % 2 == 0)


def _measure(head: Tensor, layout: str, odd: str, padding: int) -> tuple[float, Tensor, Tensor | None] | None:
    """The scale of these rows, their pairs as numbers on the unit circle, and how far each turns from row to row.

    None where the numbers that this layout pairs do not have one length. The turns are None for a single row.
    """
    width, unit = head.shape[1], unit_of(head)
    cosines = width // 2
    sines = cosines if odd == "zero" else width - cosines
    sine, cosine = (
        head[:, columns.start : columns.stop : columns.step].double()
        for columns in sinusoid_columns(width, layout, sines=sines)
    )
    pairs = torch.complex(cosine, sine[:, :cosines].contiguous())
    lengths = pairs.abs()
    if 0 <= padding < len(head):
        lengths = torch.cat([lengths[:padding], lengths[padding + 1 :]])
    if not len(lengths):
        return None
    scale = float(lengths.square().mean().sqrt())
    if not bool(((lengths / scale - 1).abs() <= 4 * unit + 1e-5).all()):
        return None
    for round_one in (1.0, width**0.5, width**-0.5):
        if abs(scale / round_one - 1) <= 4 * unit:
            scale = round_one
    pairs /= scale
    if len(lengths) < 2 or (len(head) == 3 and padding == 1):
        return scale, pairs, None
    # Over two rows, four, eight...: each is told from the one before up to a whole turn.
    turns, rows = torch.zeros(cosines, dtype=torch.float64, device=head.device), 1
    while rows < len(head):
        measured = (pairs[rows:] * pairs[:-rows].conj()).sum(dim=0).angle()
        turns += _wrapped(measured - rows * turns) / rows
        rows *= 2
    return scale, pairs, turns


def _base(turns: Tensor | None, exponent: Tensor, noise: float) -> tuple[float, int]:
    """The base of the turns base ** -exponent with the fewest digits that they allow, and how many these are.

    Where nothing tells it, 10000.
    """
    if turns is None or not bool(((turns > 0) & (exponent > 0)).any()):
        return 10000.0, 1
    # Least squares. The logarithm of a turn is known the better the larger the turn.
    weight, turned = turns.clamp(min=0), torch.where(turns > 0, turns, 1).log()
    power = float((weight * exponent).square().sum())
    logarithm = -float((weight.square() * exponent * turned).sum()) / power
    residual = float((weight * (turned + logarithm * exponent)).square().mean())
    slack = 3 * math.sqrt(residual / power) + (noise + 2e-7) / math.sqrt(power)
    if abs(logarithm) > 700:
        return 0.0, 0
    for digits in range(1, 16):
        base = float(f"{math.exp(logarithm):.{digits}g}")
        if abs(math.log(base) - logarithm) <= slack:
            break
    return base, digits


def _start(pairs: Tensor, frequency: Tensor) -> int:
    """The position of the first row: from the slowest pair, made finer by each faster one."""
    rows = torch.arange(len(pairs), dtype=torch.float64, device=pairs.device).unsqueeze(1)
    phases = (pairs * torch.exp(-1j * rows * frequency)).sum(dim=0).angle()
    start = 0.0
    for phase, w in zip(reversed(phases.tolist()), reversed(frequency.tolist()), strict=True):
        if w > 1e-12:
            start += math.remainder(phase - start * w, math.tau) / w
    return round(start)


def _wrapped(angle: Tensor) -> Tensor:
    return torch.remainder(angle + math.pi, math.tau) - math.pi


def _named(rows: Tensor, fit: _Fit, padding: int) -> Iterator[tuple[tuple[float, int], Identified]]:
    """The conventions that compute this fit, with what tells which of them is meant."""
    first = fit.start if padding < 0 else fit.start + padding + 1
    unit = unit_of(rows)
    for plain, precision in itertools.product(_alike(fit) or [fit.convention], PRECISIONS):
        wanted: dict[str, Any] = {"base": fit.convention.base, "first_position": first, "precision": precision}
        changes = {name: value for name, value in wanted.items() if getattr(plain, name) != value}
        said = ", ".join(f"{n.replace('_', ' ')} {value}" for n, value in changes.items() if n != "precision")
        name = f"{plain.name!r} with {said}" if said else plain.name
        convention = dataclasses.replace(plain, name=name, **wanted)
        largest, mean = distance(rows, convention, start=fit.start, scale=fit.scale, padding=padding)
        if mean < math.inf:
            found = Identified(convention, fit.scale, fit.start, None if padding < 0 else padding, largest)
            yield (max(mean, unit * fit.scale / 16), len(changes)), found


def same_columns(a: Convention, b: Convention, even: bool) -> bool:
    """Whether two conventions differ in nothing but base, first position and precision, at an even or an odd width."""
    return (a.divisor, a.layout) == (b.divisor, b.layout) and (even or a.odd == b.odd)


def follows(rows: Tensor) -> list[tuple[Convention, str]]:
    """The conventions and precisions of layers that may have this table [length, D], nearest first.

    Their table is from position 0 or from their first position. Named ones, where one fits.
    """
    found = identify(rows)
    if found is None or found.scale != 1:
        return []
    far = {}
    for convention, precision in itertools.product(alike(found, rows.shape[1]) or [found.convention], PRECISIONS):
        padding = convention.first_position - 1 - found.start
        chosen = dataclasses.replace(convention, precision=precision)
        mean = distance(rows, chosen, start=found.start, padding=padding)[1]
        if found.start in (0, convention.first_position) and mean < math.inf:
            far[convention, precision] = (mean, precision != convention.precision)
    return sorted(far, key=lambda pair: far[pair])


def alike(found: Identified, width: int) -> list[Convention]:
    """The named conventions that compute the same numbers at this width."""
    named = CONVENTIONS.values()
    return [c for c in named if c.base == found.base and same_columns(c, found.convention, width % 2 == 0)]
