"""The tables a reader sees."""

import contextlib
import itertools
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .cases import KERNEL, OTHER, OUT, PLAIN, POOLED
from .rows import Row, series, slower
from .timing import CALLED, COLD, GRAPH

WIDTH = 100  # where nobody looks, and COLUMNS is not set

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


_COLUMNS = ("", "median", "ratio", "quartiles", "threshold", "", "MB", "GB/s", "of copy")
_LEAST_WIDTH = {"quartiles": 100, "of copy": 100, "MB": 120, "GB/s": 120}  # of a terminal that shows the column


def show(rows: Sequence[Row], titles: Mapping[str, str]) -> None:
    """One table for each mode, notes below it, and the verdict."""
    shown = [i for i, name in enumerate(_COLUMNS) if width() >= _LEAST_WIDTH.get(name, 0)]
    for mode, heading in _SECTIONS.items():
        chosen = [row for row in rows if row.mode == mode and not row.axis]
        lines = []
        for case, of_case in itertools.groupby(chosen, key=lambda row: row.case):
            lines.append([titles.get(case, case)])
            lines += [[cells(row)[i] for i in shown] for row in of_case]
        if chosen:
            table(heading, [_COLUMNS[i] for i in shown], lines)
            say("".join(f"  {row.case}, {row.provider}: {row.note}\n" for row in chosen if row.note))
    for case, points in series(rows).items():
        show_series(titles.get(case, case), points)
    say(verdict(rows))


def show_series(title: str, lines: Mapping[str, Sequence[Row]]) -> None:
    """A line for each provider, a column for each point; below it what failed."""
    rows = [row for points in lines.values() for row in points]
    points = list(dict.fromkeys(row.at for row in rows))
    texts = []
    for name, of_provider in lines.items():
        at = {row.at: "failed" if row.failed else _took(row) for row in of_provider}
        texts.append([name, *(at.get(point, "") for point in points)])
    table(title, [rows[0].axis, *map(str, points)], texts)
    say("".join(f"  {row.provider}, {row.at}: {row.note}\n" for row in rows if row.note))


def cells(row: Row) -> list[str]:
    """A row as text."""
    quartiles = "" if row.q25 is None else f"{row.q25:.2f}-{row.q75:.2f}"
    speeds = number(row.bytes, "bytes"), number(row.gigabytes_per_second, "GB/s"), number(row.of_copy, "share")
    judged = number(row.ratio), quartiles, threshold(row), mark(row)
    return [f"  {row.provider}", "failed" if row.failed else _took(row), *judged, *speeds]


def _took(row: Row) -> str:
    return number(row.median_us, "us") if row.value is None else number(row.value, row.unit)


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


def show_changes(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """What became of every row that both runs have, then those that got worse by more than their scatter, by name."""
    before, lines = {row.key: row for row in old}, []
    both = [row for row in new if row.key in before]
    for (case, mode), of_case in itertools.groupby(both, key=lambda row: (row.case, row.mode)):
        lines.append([f"{case} {mode}".strip()])
        for row in of_case:
            was = before[row.key]
            change = f"{row.median_us / was.median_us - 1:+.0%}" if row.median_us and was.median_us else ""
            ratios = number(was.ratio), number(row.ratio), "slower" if slower(was, row) else ""
            lines.append([f"  {_label(row)}", _took(was), _took(row), change, *ratios])
    table("Against the older run", ("", "before", "now", "change", "ratio", "now", ""), lines)
    worse = [row for row in both if slower(before[row.key], row)]
    say(f"{len(worse)} of {len(both)} rows got worse by more than their scatter")
    for row in worse:
        say(f"  slower: {f'{row.case} {row.mode}'.strip()}, {_label(row)}: {_change(before[row.key], row)}")
    if gone := len(before) - len(both):
        say(f"{gone} rows of the older run are not in this one")
    return worse


def _label(row: Row) -> str:
    return row.provider if row.at is None else f"{row.provider}, at {row.at}"


def _change(was: Row, now: Row) -> str:
    """The numbers that the judgement was made from."""
    if now.failed:
        return now.note
    if now.value is not None or now.ratio is None:
        spread = [f" ({r.us25:.4g}-{r.us75:.4g})" if r.us25 is not None else "" for r in (was, now)]
        return f"{_took(was)}{spread[0]} before, {_took(now)}{spread[1]} now"
    texts = [f"{number(r.ratio)} ({number(r.q25)}-{number(r.q75)})" for r in (was, now)]
    return f"ratio {texts[0]} before, {texts[1]} now"


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


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((WIDTH, 0)).columns


def say(text: str) -> None:
    """Lines of text, cut at the width of the terminal."""
    for line in text.splitlines():
        print("\n".join(textwrap.wrap(line, width(), subsequent_indent="    ")))


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """To the standard output, with rich where it is installed: a machine lent for a benchmark may not have it.

    Args:
        title: above the table.
        columns: their names; the first one holds text.
        lines: of cells; a single cell is the title of those below it.
    """
    try:
        from rich import box, console
        from rich.table import Table
    except ImportError:
        print("\n".join([title, *("\t".join(line) for line in (columns, *lines)), ""]))
        return
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        made.add_column(name, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for line in lines:
        if len(line) == 1:
            made.add_section()
        made.add_row(*(_STYLES.get(cell, cell) for cell in line), style="bold" if len(line) == 1 else None)
    console.Console(width=width()).print(made)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Gives what is to be called before each step: it says how many are done, of how many, and what comes next.

    On the standard error: in one line that is drawn over where rich has a terminal, else line by line. Nothing is drawn
    between the calls, since a thread that does would disturb what is measured.
    """
    start, done = time.monotonic(), itertools.count()
    line = "{done} of {total} done, {took:.0f} s: {title}"
    try:
        from rich import console, progress, table

        screen = console.Console(stderr=True)
    except ImportError:
        screen = None
    if screen is None or not screen.is_terminal:
        yield lambda title: print(
            line.format(done=next(done), total=total, took=time.monotonic() - start, title=title),
            file=sys.stderr,
            flush=True,
        )
        return
    column = progress.TextColumn("{task.description}", table_column=table.Column(no_wrap=True, overflow="ellipsis"))
    with progress.Progress(column, console=screen, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("")
        yield lambda title: bar.update(
            task,
            description=line.format(done=next(done), total=total, took=time.monotonic() - start, title=title),
            refresh=True,
        )
