"""How far the encodings are from the truth, whatever the speed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from posenc_ext import CONVENTIONS, Convention, functional, reference

from .rows import Row
from .settings import Settings

EXACT_FLOOR, REFERENCE_FLOOR = 2.5e-7, 1.5e-7
WIDTHS = (512, 63)

FloatArray = npt.NDArray[np.float64]


def exact(measure: str, settings: Settings) -> list[Row]:
    """Precision "exact" against 60 digits of mpmath, up to position 2^40."""
    try:
        import mpmath  # type: ignore[import-untyped]
    except ImportError:
        return [Row(measure, "exact", note="needs mpmath", floor=EXACT_FLOOR)]
    positions = sample(40, 20 if settings.quick else 60)
    waves: dict[tuple[str, float, int], tuple[FloatArray, FloatArray]] = {}
    worst = Worst()
    with mpmath.workdps(60):
        for convention, width in recipes():
            # Conventions differ by order of columns more than by waves: compute each set once.
            padded = width + width % 2 if convention.odd == "round_up" else width
            key = (convention.divisor, convention.base, padded)
            if key not in waves:
                pairs = (width + 1) // 2
                steps = mpmath.mpf(2) / padded if convention.divisor == "d" else mpmath.mpf(1) / max(padded // 2 - 1, 1)
                frequencies = [mpmath.power(convention.base, -k * steps) for k in range(pairs)]
                both = [[mpmath.cos_sin(p * w) for w in frequencies] for p in positions]
                cosine, sine = (np.array([[float(pair[i]) for pair in row] for row in both]) for i in (0, 1))
                waves[key] = sine, cosine
            worst.see(convention, "exact", width, positions, waves[key])
    return [worst.row(measure, "exact", EXACT_FLOOR, "largest error, positions to 2^40")]


def reference_angles(measure: str, settings: Settings) -> list[Row]:
    """Precision "reference" against the sine of its own angle, the fp32 product, up to position 2^24."""
    positions = sample(24, 200 if settings.quick else 1000)
    worst = Worst()
    for convention, width in recipes():
        frequencies = functional.angular_frequencies(width, convention=convention, precision="reference")
        angles = np.array(positions, dtype=np.float32)[:, None] * frequencies.numpy().astype(np.float32)
        wide = angles.astype(np.float64)  # numpy's fp64 sine is right to the last bits at any angle
        worst.see(convention, "reference", width, positions, (np.sin(wide), np.cos(wide)))
    return [worst.row(measure, "reference", REFERENCE_FLOOR, "largest error, positions to 2^24")]


def recipes() -> Iterator[tuple[Convention, int]]:
    """Every convention, at an even and at an odd width."""
    for convention in CONVENTIONS.values():
        for width in WIDTHS:
            yield convention, width


def sample(bits: int, count: int) -> list[int]:
    """Positions up to 2^bits, both signs: the ends, powers of two and their neighbours, seeded ones of every size."""
    generator = np.random.default_rng(0)
    chosen = {0, 1, 2, 3, 2**bits, 2**bits - 1}
    for power in range(8, bits, 8):
        chosen |= {2**power - 1, 2**power, 2**power + 1}
    while len(chosen) < count:
        chosen.add(round(2 ** generator.uniform(0, bits)))
    return sorted(position if i % 4 else -position for i, position in enumerate(sorted(chosen)))


class Worst:
    """The largest error met, and where."""

    def __init__(self) -> None:
        self.error = 0.0
        self.where = ""
        self.checked = 0

    def see(
        self,
        convention: Convention,
        precision: str,
        width: int,
        positions: list[int],
        waves: tuple[FloatArray, FloatArray],
    ) -> None:
        """Compare fp32 encodings with columns built from these waves, sines and cosines [positions, pairs]."""
        sine, cosine = waves
        sines = width // 2 if convention.odd == "zero" else (width + 1) // 2
        truth = np.zeros((len(positions), width))
        sine_columns, cosine_columns = reference.wave_columns(width, convention.layout, sines=sines)
        truth[:, sine_columns] = sine[:, :sines]
        truth[:, cosine_columns] = cosine[:, : width // 2]
        found = functional.positional_encoding(
            torch.tensor(positions), width, convention=convention, precision=precision, dtype=torch.float32
        )
        if math.isnan(self.error):
            return  # nothing is worse
        errors = np.abs(found.numpy().astype(np.float64) - truth)
        self.checked += errors.size
        at = np.unravel_index(np.argmax(errors), errors.shape)  # of a NaN, if there is one
        if not float(errors[at]) <= self.error:
            self.error = float(errors[at])
            self.where = f"{convention.name}, width {width}, position {positions[int(at[0])]}, column {int(at[1])}"

    def row(self, measure: str, contender: str, floor: float, what: str) -> Row:
        """The result."""
        error = self.error if math.isfinite(self.error) else None  # JSON has no NaN; no number misses the floor
        note = f"{what}; {self.checked} numbers, worst at {self.where}"
        return Row(measure, contender, value=error, unit="error", floor=floor, note=note)
