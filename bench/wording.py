"""Numbers and verdicts as text, for whatever prints them."""

from __future__ import annotations

from collections.abc import Sequence

from .rows import Row


def verdict(rows: Sequence[Row]) -> str:
    """How many floors were reached, and which were not."""
    judged = [row for row in rows if row.passed is not None]
    missed = [row for row in judged if not row.passed]
    text = f"{len(judged) - len(missed)} of {len(judged)} floors reached"
    for row in missed:
        got = "nothing" if row.judged is None else number(row.judged, row.unit)
        text += f"\n  missed: {f'{row.measure} {row.mode}'.rstrip()} against {row.contender}: {got}, floor {floor(row)}"
    disturbed = {row.measure for row in judged if row.disturbed}
    if disturbed:
        text += f"\nSomething else was running during {len(disturbed)} measures (marked ?): their ratios mean little."
    return text


def microseconds(time: float | None) -> str:
    """A time with three or four digits."""
    if time is None:
        return ""
    if time < 10:
        return f"{time:.2f} us"
    return f"{time:.0f} us" if time < 10000 else f"{time / 1000:.1f} ms"


def number(value: float, unit: str) -> str:
    """A value that is not a time."""
    if unit == "error":
        return f"{value:.2e}"
    return f"{value:.2f} {unit}".strip()


def floor(row: Row) -> str:
    """The floor and its direction."""
    if row.floor is None:
        return ""
    return f"{'>=' if row.at_least else '<='} {number(row.floor, row.unit)}"


def change(before: float | None, now: float | None) -> str:
    """In percent; less is faster."""
    return "" if not before or now is None else f"{now / before - 1:+.0%}"
