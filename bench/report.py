"""The tables a reader sees."""

import sys
from collections.abc import Mapping, Sequence

from .cases import KERNEL, OTHER, OUT, PLAIN, POOLED
from .rows import Row
from .timing import CALLED, COLD, GRAPH

WIDTH = 150  # where nobody looks: narrower, and text would break across lines

_SECTIONS = {
    OUT: "Into a given output (out=)",
    POOLED: "Pooled allocator: freed memory is used again",
    OTHER: "Latency, memory, accuracy",
    PLAIN: "Plain allocator, for information: glibc returns large blocks to the system and every page is paid for anew",
    KERNEL: "The loop of the forward on one thread, for each instruction set",
    COLD: "Cold: the device's time for a call that finds nothing in the cache",
    CALLED: "Called as a program does, launches included",
    GRAPH: "The same calls, replayed from one CUDA graph",
}

_STYLES = {"pass": "[green]pass[/]", "MISS": "[bold red]MISS[/]", "failed": "[red]failed[/]"}


def show(rows: Sequence[Row], titles: Mapping[str, str]) -> None:
    """One table for each mode, notes below it, and the verdict."""
    columns = ("case", "provider", "median", "ratio", "quartiles", "threshold", "", "MB", "GB/s", "of copy")
    for mode, heading in _SECTIONS.items():
        chosen, lines, last = [row for row in rows if row.mode == mode], [], ""
        for row in chosen:
            lines.append(cells(row, titles.get(row.case, row.case) if row.case != last else ""))
            last = row.case
        if chosen:
            table(heading, columns, lines)
            print("".join(f"  {row.case}, {row.provider}: {row.note}\n" for row in chosen if row.note))
    print(verdict(rows))


def cells(row: Row, title: str) -> list[str]:
    """A row as text."""
    took = number(row.median_us, "us") if row.value is None else number(row.value, row.unit)
    quartiles = "" if row.q25 is None else f"{row.q25:.2f}-{row.q75:.2f}"
    speeds = number(row.bytes, "bytes"), number(row.gigabytes_per_second, "GB/s"), number(row.of_copy, "share")
    judged = number(row.ratio), quartiles, threshold(row), mark(row)
    return [title, row.provider, "failed" if row.failed else took, *judged, *speeds]


def mark(row: Row) -> str:
    """A mark that survives a terminal without colours; with a question mark where the machine was not ours alone."""
    word = {None: "", True: "pass", False: "MISS"}[row.passed]
    return word + "?" if word and row.disturbed else word


def verdict(rows: Sequence[Row]) -> str:
    """How many thresholds were reached, and which were not."""
    judged = [row for row in rows if row.passed is not None]
    missed = [row for row in judged if not row.passed]
    text = f"{len(judged) - len(missed)} of {len(judged)} thresholds reached"
    for row in missed:
        got = number(row.judged, row.unit) or "nothing"
        text += f"\n  missed: {f'{row.case} {row.mode}'.rstrip()}, {row.provider}: {got}, threshold {threshold(row)}"
    if disturbed := {row.case for row in judged if row.disturbed}:
        text += f"\nSomething else was running during {len(disturbed)} cases (marked ?): their ratios mean little."
    return text


def show_changes(old: Sequence[Row], new: Sequence[Row]) -> None:
    """What became of every row that both runs have."""
    before, lines = {(row.case, row.mode, row.provider): row for row in old}, []
    for row in new:
        if was := before.get((row.case, row.mode, row.provider)):
            took = [number(r.median_us, "us") if r.value is None else number(r.value, r.unit) for r in (was, row)]
            change = f"{row.median_us / was.median_us - 1:+.0%}" if row.median_us and was.median_us else ""
            name = f"{row.case} {row.mode}".strip()
            lines.append([name, row.provider, *took, change, number(was.ratio), number(row.ratio)])
    columns = ("case", "provider", "median before", "now", "change", "ratio before", "now")
    table("Against the older run", columns, lines, sections=False)


_FORMATS = {"us": "{:.3g} us", "error": "{:.2e}", "share": "{:.0%}", "bytes": "{:.1f}", "GB/s": "{:.0f}", "": "{:.2f}"}


def number(value: float | None, unit: str = "") -> str:
    """With the digits that the unit deserves; empty for None. Bytes are shown as MB."""
    if value is None:
        return ""
    if unit == "us" and value >= 999:
        return f"{value:.0f} us" if value < 10000 else f"{value / 1000:.1f} ms"
    return _FORMATS.get(unit, f"{{:.2f}} {unit}").format(value / 1e6 if unit == "bytes" else value)


def threshold(row: Row) -> str:
    """The threshold and its direction."""
    return "" if row.threshold is None else f"{'>=' if row.at_least else '<='} {number(row.threshold, row.unit)}"


def table(title: str, columns: Sequence[str], lines: Sequence[list[str]], sections: bool = True) -> None:
    """To the standard output, with rich where it is installed: a machine lent for a benchmark may not have it.

    Args:
        title: above the table.
        columns: their names; the first two hold text.
        lines: of cells.
        sections: whether a line that begins with text begins a section.
    """
    try:
        from rich import box, console
        from rich.table import Table
    except ImportError:
        print("\n".join([title, *("\t".join(line) for line in (columns, *lines)), ""]))
        return
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < 2 else "right", no_wrap=i > 1)
    for line in lines:
        if sections and line[0]:
            made.add_section()
        made.add_row(*(_STYLES.get(cell, cell) for cell in line))
    console.Console(width=None if sys.stdout.isatty() else WIDTH).print(made)
