"""The pictures of a run: how cost grows, how errors grow with the position, memory along the length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import COPY
from .rows import Row, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"us": "time of a call (us)", "GB/s": "bytes moved over time (GB/s)", "error": "largest error", "MiB": "MiB"}


def figure_type() -> type[Figure]:
    """matplotlib's, without pyplot: it needs no display.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plots needs matplotlib: pip install 'posenc_ext[plot]'") from None
    return Figure


def write(rows: Sequence[Row], folder: Path, machine: str) -> list[Path]:
    """A PNG for each sweep and probe that the rows hold points of; `machine` is a line for the foot of each.

    Raises:
        ValueError: no row is a point of a series, or matplotlib is not installed.
    """
    figures = dict(draw(rows))
    if not figures:
        raise ValueError("--plots needs a run with --sweep, or the case accuracy.positions")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        figure.supxlabel(machine, fontsize="x-small", color="gray")
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], format="png", dpi=120)
    return paths


def draw(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """Names and figures. Those of a sweep have a column for each task, and times above bandwidths."""
    found = series(rows)
    for axis in dict.fromkeys(row.axis for row in rows if row.axis):
        names = [name for name, lines in found.items() if next(iter(lines.values()))[0].axis == axis]
        if axis == "position":
            yield "error_by_position", _by_convention(found[names[0]])
        else:
            unit = next(iter(found[names[0]].values()))[0].unit
            units = [unit] if unit else ["us", "GB/s"]
            size = (1.5 + 4.5 * len(names), 1.5 + 3.5 * len(units))
            figure = figure_type()(figsize=size, layout="constrained")
            panels = figure.subplots(len(units), len(names), squeeze=False)
            for unit, line in zip(units, panels, strict=True):
                for name, axes in zip(names, line, strict=True):
                    _panel(axes, found[name], unit)
                    axes.set(title=name.rpartition(".")[2], xlabel=axis, ylabel=NAMES[unit])
            panels[0, 0].legend(frameon=False, fontsize="small")
            yield f"{'memory' if axis == 'length' else 'cost'}_by_{axis}", figure


def _by_convention(lines: dict[str, list[Row]]) -> Figure:
    """A panel for each convention, and in it a line for each way of making its encoding."""
    conventions = list(dict.fromkeys(name.partition(", ")[0] for name in lines))
    figure = figure_type()(figsize=(11, 3 * -(-len(conventions) // 3)), layout="constrained")
    panels = figure.subplots(-(-len(conventions) // 3), 3, sharex=True, sharey=True, squeeze=False).flatten()
    for convention, axes in zip(conventions, panels, strict=False):
        own = {name.partition(", ")[2]: of for name, of in lines.items() if name.partition(", ")[0] == convention}
        _panel(axes, own, "error")
        axes.set(title=convention, xlabel="position", ylabel=NAMES["error"])
    panels[0].legend(frameon=False, fontsize="x-small")
    for axes in panels[len(conventions) :]:
        axes.remove()
    return figure


def _panel(axes: Axes, lines: dict[str, list[Row]], unit: str) -> None:
    """One line for each provider, the copy's dashed: nothing that moves as many bytes through memory is faster."""
    for name, points in lines.items():
        drawn: list[tuple[Any, float]] = []
        drawn += [(row.at, height) for row in points if (height := _height(row, unit)) is not None]
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if name == COPY else {"marker": "o"}
        label = f"{name}, the limit" if name == COPY else name
        axes.plot([x for x, _ in drawn], [y for _, y in drawn], label=label, markersize=4, **style)
    if all(isinstance(row.at, int) for points in lines.values() for row in points):
        axes.set_xscale("log", base=2)
    if unit in ("us", "error"):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _height(row: Row, unit: str) -> float | None:
    return row.median_us if unit == "us" else row.gigabytes_per_second if unit == "GB/s" else row.value
