"""The command `posenc-ext plot`: encodings as pictures."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from posenc_ext import functional, reference
from posenc_ext.console import UsageError
from posenc_ext.conventions import CONVENTIONS, Convention

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The largest table that plot makes: far more than a picture has points.
MOST_PLOTTED = 2**24


def run(args: argparse.Namespace) -> None:
    """Write the three pictures, for the parsed arguments of the command."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plot needs matplotlib: pip install 'posenc_ext[plot]'") from None
    convention = CONVENTIONS[args.convention]
    if args.length * args.d_model > MOST_PLOTTED:
        raise UsageError(f"plot draws at most {MOST_PLOTTED} values, got {args.length} positions of {args.d_model}")
    if not _waves(args.d_model, convention):
        raise UsageError(f"plot needs a wave, and {convention.name} has none in d_model {args.d_model}")
    table = functional.positional_encoding(args.length, args.d_model, convention=convention).double().numpy()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, draw, size in (
        ("heat_map", draw_heat_map, (9.0, 5.5)),
        ("waves", draw_waves, (9.0, 6.5)),
        ("similarity", draw_similarity, (9.0, 5.0)),
    ):
        # A Figure of its own, without pyplot: it draws with Agg, and needs no display.
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        draw(figure, table, convention)
        path = args.output / f"{name}.png"
        figure.savefig(path, format="png")
        print(path)


def draw_heat_map(figure: Figure, table: reference.FloatArray, convention: Convention) -> None:
    """Value by position and column."""
    axes = figure.add_subplot()
    length, d_model = table.shape
    first = convention.first_position - 0.5
    image = axes.imshow(
        table,
        cmap="RdBu_r",
        vmin=-1,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, d_model - 0.5, first + length, first),
    )
    figure.colorbar(image, label="value")
    axes.set(xlabel="column", ylabel="position", title=_title("Sinusoidal position encodings", table, convention))


def draw_waves(figure: Figure, table: reference.FloatArray, convention: Convention) -> None:
    """A few column pairs along the positions, from fast to slow."""
    length, d_model = table.shape
    positions = np.arange(length) + convention.first_position
    waves = _waves(d_model, convention)
    # Faster ones would fill their panel with ink, slower ones cross it as straight lines.
    legible = [wave for wave in waves if length / 25 <= wave[0] <= 8 * length] or waves
    chosen = [legible[i] for i in np.unique(np.linspace(0, len(legible) - 1, 4).round().astype(int))]
    panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    # The wave itself is drawn thin; what the table holds of it are the dots.
    fine = np.linspace(positions[0], positions[-1], 2000)
    dot = float(np.clip(600 / length, 1.5, 6))
    dots: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": dot}
    for axes, (wavelength, sine, cosine) in zip(panels, chosen, strict=True):
        angle = 2 * math.pi * fine / wavelength
        for column, wave, name, color in (
            (sine, np.sin(angle), "sine", "tab:blue"),
            (cosine, np.cos(angle), "cosine", "tab:orange"),
        ):
            if column is not None:
                axes.plot(fine, wave, color=color, linewidth=0.8)
                axes.plot(positions, table[:, column], color=color, label=f"column {column}, {name}", **dots)
        axes.set(ylim=(-1.15, 1.15), yticks=(-1, 0, 1))
        axes.set_title(f"one turn in {wavelength:,.1f} positions", fontsize="medium", loc="left")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, markerscale=6 / dot)
        _tidy(axes)
    margin = 0.01 * length
    panels[-1].set(xlabel="position", xlim=(positions[0] - margin, positions[-1] + margin))
    figure.suptitle(_title("The waves by column", table, convention))


def _waves(d_model: int, convention: Convention) -> list[tuple[float, int, int | None]]:
    """(wavelength, column of the sine, column of the cosine if there is one) of every frequency, fastest first."""
    frequency = reference.sinusoid_frequencies(
        d_model, base=convention.base, divisor=convention.divisor, odd=convention.odd
    )
    sines, cosines = len(frequency), d_model // 2
    sine_columns, cosine_columns = reference.sinusoid_columns(d_model, convention.layout, sines=sines)
    pairs = [*cosine_columns, *[None] * (sines - cosines)]
    return list(zip((2 * math.pi / frequency).tolist(), sine_columns, pairs, strict=True))


def draw_similarity(figure: Figure, table: reference.FloatArray, convention: Convention) -> None:
    """The dot product of two encodings by the distance between them, seen from three positions."""
    axes = figure.add_subplot()
    length = len(table)
    starts = np.unique([length // 4, length // 2, 3 * length // 4])
    # Lines that lie on each other stay visible when the later ones are narrower.
    for i, start in enumerate(starts):
        distance = np.arange(length) - start
        p = start + convention.first_position
        axes.plot(distance, table @ table[start], linewidth=5 - 1.8 * i, label=f"p = {p}")
    axes.set(xlabel="distance k", ylabel="PE(p) · PE(p + k)")
    axes.set_title(_title("Similarity by distance", table, convention))
    axes.legend(frameon=False)
    _tidy(axes)


def _title(what: str, table: reference.FloatArray, convention: Convention) -> str:
    length, d_model = table.shape
    return f"{what}: {convention.name}, {length} positions, d_model {d_model}"


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
