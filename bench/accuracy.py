"""How far the encodings are from the truth, whatever the speed."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch

from posenc_ext import CONVENTIONS, Convention, functional, reference

from .rows import Row
from .timing import Settings

WIDTHS = (512, 63)  # even and odd

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
