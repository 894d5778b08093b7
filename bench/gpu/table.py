"""The table a reader sees: with rich where it is installed, plain where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..rows import Row
from ..wording import floor, number
from .goals import SHARE

COLUMNS = ("measure", "contender", "mode", "time", "GB/s", "of copy", "ratio", "quartiles", "goal", "", "MB")
LEFT = 3  # columns that are text


def cells(rows: Sequence[Row], titles: Mapping[str, str]) -> list[list[str]]:
    """One line of text for each row, in `COLUMNS`; a title only where a new measure begins."""
    lines, last = [], ""
    for row in rows:
        speed = row.gigabytes_per_second
        lines.append(
            [
                titles.get(row.measure, row.measure) if row.measure != last else "",
                row.contender,
                row.mode,
                _time(row),
                "" if speed is None else f"{speed:.0f}",
                "" if row.of_copy is None else f"{row.of_copy:.0%}",
                "" if row.ratio is None else f"{row.ratio:.2f}",
                "" if row.q25 is None or row.q75 is None else f"{row.q25:.2f}-{row.q75:.2f}",
                floor(row),
                {None: "", True: "pass", False: "MISS"}[row.passed],
                "" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
            ]
        )
        last = row.measure
    return lines


def _time(row: Row) -> str:
    if row.contender == SHARE and row.value is not None:
        return f"{row.value:.0%}"
    if row.value is not None:
        return number(row.value, row.unit)
    if row.median_us is None:
        return "failed" if row.note.startswith("failed") else ""
    return f"{row.median_us:.1f} us" if row.median_us < 1000 else f"{row.median_us / 1000:.2f} ms"


def estimate_cells(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Lines of the estimate."""
    return [
        [
            entry["kernel"],
            entry["chip"],
            f"{entry['instructions']:.1f}",
            f"{entry['issue'] / 1e12:.2f}e12/s",
            f"{entry['memory'] / 1e12:.2f}e12/s",
            f"{entry['of_bandwidth']:.0%}",
            entry["limit"],
            entry["label"],
        ]
        for entry in entries
    ]


ESTIMATE_COLUMNS = (
    "kernel",
    "chip",
    "instructions per element",
    "elements by issue",
    "elements by memory",
    "of bandwidth, at most",
    "limit",
    "",
)


def plain(columns: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """Columns of equal width, text to the left and numbers to the right."""
    widths = [max(len(line[i]) for line in (columns, *lines)) for i in range(len(columns))]

    def laid_out(line: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([laid_out(columns), "  ".join("-" * width for width in widths), *map(laid_out, lines)])


def show(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], left: int = LEFT) -> None:
    """To the standard output."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(f"{title}\n\n{plain(columns, lines, left)}\n")
        return
    console = Console()
    if console.width < 180:  # narrower, and numbers would break across lines
        console = Console(width=180)
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for place, line in enumerate(lines):
        if place and line[0]:
            table.add_section()
        styles = {"pass": "green", "MISS": "bold red", "failed": "red"}
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in line))
    console.print(table)
