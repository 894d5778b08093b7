"""How far the encodings are from the truth, whatever the speed."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posenc_ext import CONVENTIONS, Convention, functional, reference

from .rows import Row
from .timing import Settings

WIDTHS = (512, 63)  # even and odd
POSITIONS = (2**4, 2**8, 2**12, 2**16, 2**20, 2**24)

SinCos = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]  # sines and cosines [positions, pairs]


def exact(settings: Settings) -> list[Row]:
    """Precision "exact" against 60 digits of mpmath, up to position 2^40."""
    positions = sample(40, 20 if settings.quick else 60)

    @cache  # conventions differ by order of columns more than by numbers
    def truth(divisor: str, base: float, pairs: int, width: int) -> SinCos:
        import mpmath  # type: ignore[import-untyped]

        with mpmath.workdps(60):
            step = mpmath.mpf(2) / width if divisor == "d" else mpmath.mpf(1) / max(width // 2 - 1, 1)
            frequencies = [mpmath.power(base, -k * step) for k in range(pairs)]
            both = np.array([[list(map(float, mpmath.cos_sin(p * w))) for w in frequencies] for p in positions])
        return both[..., 1], both[..., 0]

    def sin_cos(convention: Convention, width: int) -> SinCos:
        padded = width + width % 2 if convention.odd == "round_up" else width
        return truth(convention.divisor, convention.base, (width + 1) // 2, padded)

    return [worst("exact", positions, sin_cos, "positions to 2^40")]


def reference_angles(settings: Settings) -> list[Row]:
    """Precision "reference" against the sine of its own angle, the fp32 product, up to position 2^24."""
    positions = sample(24, 200 if settings.quick else 1000)

    def sin_cos(convention: Convention, width: int) -> SinCos:
        frequencies = functional.angular_frequencies(width, convention=convention, precision="reference")
        angles = np.array(positions, dtype=np.float32)[:, None] * frequencies.numpy().astype(np.float32)
        wide = angles.astype(np.float64)  # numpy's fp64 sine is right to the last bits at any angle
        return np.sin(wide), np.cos(wide)

    return [worst("reference", positions, sin_cos, "positions to 2^24")]


def by_position(settings: Settings) -> list[Row]:
    """The largest error near each of a few positions, for every convention and every way of making an encoding.

    Truth is the fp64 sine, which is right to 4e-9 at 2^24. Each point is 16 positions up to the one it is named after.
    """
    rows, width = [], WIDTHS[0]
    near = torch.tensor(POSITIONS)[:, None] - torch.arange(16)
    for convention in CONVENTIONS.values():
        fields = {name: getattr(convention, name) for name in ("base", "divisor", "layout", "odd")}
        truth = reference.sinusoid_table(near.numpy(), width, **fields)
        for name, make in RECIPES.items():
            errors = np.abs(make(near, width, convention).double().numpy() - truth).max((1, 2)).tolist()
            who = f"{convention.name}, {name}"
            for at, error in zip(POSITIONS, errors, strict=True):
                rows.append(Row("", who, value=error, unit="error", at=at, axis="position"))
    return rows


def peer_table(positions: Tensor, width: int, convention: Convention, compute: torch.dtype = torch.float32) -> Tensor:
    """A convention's encoding as its projects write it, every step rounded to one dtype."""
    frequency = reference.sinusoid_frequencies(
        width, base=convention.base, divisor=convention.divisor, odd=convention.odd
    )
    steps = torch.arange(len(frequency), dtype=compute)
    angle = positions.to(compute)[..., None] * torch.exp(steps * math.log(frequency[1]))  # the first is 1
    sines, cosines = reference.sinusoid_columns(width, convention.layout, sines=len(frequency))
    table = torch.zeros(*positions.shape, width, dtype=compute)
    table[..., list(sines)], table[..., list(cosines)] = angle.sin(), angle[..., : width // 2].cos()
    return table


def kept_table(positions: Tensor, width: int, convention: Convention, dtype: torch.dtype) -> Tensor:
    """A table as a model holds it: some projects compute it in fp64, most in fp32."""
    compute = torch.float64 if convention.precision == "exact" else torch.float32
    return peer_table(positions, width, convention, compute).to(dtype)


def ours(positions: Tensor, width: int, convention: Convention, precision: str) -> Tensor:
    """The fused encoding."""
    return functional.positional_encoding(
        positions, width, convention=convention, precision=precision, dtype=torch.float32
    )


RECIPES: dict[str, Callable[[Tensor, int, Convention], Tensor]] = {
    "exact": partial(ours, precision="exact"),
    "reference": partial(ours, precision="reference"),
    "fp32 table": partial(kept_table, dtype=torch.float32),
    "bf16 table": partial(kept_table, dtype=torch.bfloat16),
    "computed in bf16": partial(peer_table, compute=torch.bfloat16),
}


def sample(bits: int, count: int) -> list[int]:
    """Positions up to 2^bits, both signs: the ends, powers of two and their neighbours, seeded ones of every size."""
    generator = np.random.default_rng(0)
    chosen = {2**power + near for power in range(8, bits, 8) for near in (-1, 0, 1)}
    chosen |= {0, 1, 2, 3, 2**bits, 2**bits - 1}
    while len(chosen) < count:
        chosen.add(round(2 ** generator.uniform(0, bits)))
    return sorted(position if i % 4 else -position for i, position in enumerate(sorted(chosen)))


def worst(precision: str, positions: Sequence[int], sin_cos: Callable[[Convention, int], SinCos], what: str) -> Row:
    """The largest error of fp32 encodings over all conventions, and where it is."""
    largest, where, checked = 0.0, "nowhere", 0
    for convention, width in itertools.product(CONVENTIONS.values(), WIDTHS):
        fields = {name: getattr(convention, name) for name in ("base", "divisor", "layout", "odd")}
        at_0, at_1 = reference.sinusoid_table([0, 1], width, **fields)  # tells which columns hold what, fastest first
        cosines, sines = at_0 == 1, (at_0 == 0) & (at_1 != 0)
        sine, cosine = sin_cos(convention, width)
        truth = np.zeros((len(positions), width))
        truth[:, sines], truth[:, cosines] = sine[:, : sines.sum()], cosine[:, : cosines.sum()]
        encoding = partial(functional.positional_encoding, convention=convention, precision=precision)
        found = encoding(torch.tensor(positions), width, dtype=torch.float32)
        errors = np.abs(found.double().numpy() - truth)
        checked += errors.size
        row, column = map(int, np.unravel_index(np.argmax(errors), errors.shape))  # of a NaN, if there is one
        if not (errors[row, column] <= largest or math.isnan(largest)):  # nothing is worse than a NaN
            largest = float(errors[row, column])
            where = f"{convention.name}, width {width}, position {positions[row]}, column {column}"
    error = largest if math.isfinite(largest) else None  # JSON has no NaN; no number misses the threshold
    return Row("", precision, value=error, unit="error", note=f"{what}; {checked} numbers, worst at {where}")
