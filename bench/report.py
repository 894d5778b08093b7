"""The tables a reader sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .measures import MEASURES
from .rows import Row
from .settings import OUT, PLAIN, POOLED
from .wording import change, floor, microseconds, number, verdict

WIDTH = 132  # narrower, and numbers would break across lines

_SECTIONS = {
    OUT: "Into a given output (out=)",
    POOLED: "Pooled allocator: freed memory is used again",
    "": "Latency, memory, accuracy",
    PLAIN: "Plain allocator, for information: glibc returns large blocks to the system and every page is paid for anew",
}


def console() -> Console:
    """Wide enough for the tables, also where nobody looks."""
    usual = Console()
    return usual if usual.width >= WIDTH else Console(width=WIDTH)


def show(rows: Sequence[Row], machine: dict[str, Any], to: Console) -> None:
    """One table for each mode of memory, and the verdict."""
    to.print(
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}, torch {machine['torch']}, "
        f"posenc_ext {machine['posenc_ext']}, {machine['date']}",
        highlight=False,
    )
    to.print()
    for mode, title in _SECTIONS.items():
        chosen = [row for row in rows if row.mode == mode]
        if chosen:
            to.print(_table(title, chosen))
            for row in chosen:
                if row.note:
                    to.print(f"  {row.measure}, {row.contender}: {row.note}", highlight=False)
            to.print()
    to.print(verdict(rows), highlight=False)


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = _empty_table(title)
    table.add_column("measure")
    table.add_column("contender")
    for name in ("median", "ratio", "quartiles", "floor"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("MB", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row in rows:
        if last and row.measure != last:
            table.add_section()
        first = row.measure != last
        table.add_row(
            MEASURES[row.measure].title if first else "",
            row.contender,
            microseconds(row.median_us) if row.value is None else number(row.value, row.unit),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.q25 is None or row.q75 is None else f"{row.q25:.2f}-{row.q75:.2f}",
            floor(row),
            mark(row),
            "" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
            "" if row.of_copy is None else f"{row.of_copy:.0%}",
        )
        last = row.measure
    return table


def _empty_table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)


def mark(row: Row) -> str:
    """A mark that survives a terminal without colours; with a question mark where the machine was not ours alone."""
    word = {None: "", True: "[green]pass[/]", False: "[bold red]MISS[/]"}[row.passed]
    return word + "?" if word and row.disturbed else word


def show_changes(old: Sequence[Row], new: Sequence[Row], to: Console) -> None:
    """What became of every row that both runs have."""
    before = {row.key: row for row in old}
    table = _empty_table("Against the older run")
    table.add_column("measure", no_wrap=True)
    table.add_column("contender")
    for name in ("median before", "now", "change", "ratio before", "now"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in new:
        if row.key not in before:
            continue
        was = before[row.key]
        if row.value is not None and was.value is not None:
            cells = [number(was.value, was.unit), number(row.value, row.unit), "", "", ""]
        else:
            cells = [
                microseconds(was.median_us),
                microseconds(row.median_us),
                change(was.median_us, row.median_us),
                "" if was.ratio is None else f"{was.ratio:.2f}",
                "" if row.ratio is None else f"{row.ratio:.2f}",
            ]
        table.add_row(f"{row.measure} {row.mode if row.mode == PLAIN else ''}".strip(), row.contender, *cells)
    to.print(table)
