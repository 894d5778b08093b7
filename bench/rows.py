"""What a measurement leaves behind: rows of plain data, their floors, and the JSON they are kept in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT = 1

# Preemptions per second. Measured on two cores with two threads: up to 80 on an otherwise idle machine, whose own
# housekeeping has no third core to run on; from 150 with one busy neighbour.
DISTURBED = 120.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender of one measure.

    Attributes:
        measure: name of the measure, as `--only` takes it.
        contender: who ran. The first row of a measure is the one measured, the others are what it is held against.
        mode: how memory was handed out: `"out="`, `"pooled"`, `"plain"`, or empty where it does not matter.
        median_us: median time of one call.
        rounds: that it is the median of.
        preempted: how often per second the system took a core away during the rounds.
        ratio: median over the rounds of the first contender's time by this one's (a speed-up where `at_least`).
        q25, q75: quartiles of that ratio over the rounds.
        floor: what the ratio, or the value, must reach; None for information.
        at_least: whether the floor is a lower bound.
        bytes: that one call must move, by the byte model.
        of_copy: those bytes per second as a fraction of what a copy reached in the same rounds.
        value, unit: the result of a measure that is not a time.
        note: what a reader should know.
    """

    measure: str
    contender: str
    mode: str = ""
    median_us: float | None = None
    rounds: int | None = None
    preempted: float | None = None
    ratio: float | None = None
    q25: float | None = None
    q75: float | None = None
    floor: float | None = None
    at_least: bool = False
    bytes: int | None = None
    of_copy: float | None = None
    value: float | None = None
    unit: str = ""
    note: str = ""

    @property
    def gigabytes_per_second(self) -> float | None:
        """Of the bytes that had to be moved."""
        return self.bytes / self.median_us / 1e3 if self.bytes and self.median_us else None

    @property
    def judged(self) -> float | None:
        """The number that the floor is about."""
        return self.value if self.ratio is None else self.ratio

    @property
    def passed(self) -> bool | None:
        """Whether the floor is reached; None without a floor. A floor without a number is missed."""
        if self.floor is None:
            return None
        if self.judged is None:
            return False
        return self.judged >= self.floor if self.at_least else self.judged <= self.floor

    @property
    def disturbed(self) -> bool:
        """Whether something else wanted the cores, so that times and ratios mean little."""
        return self.preempted is not None and self.preempted > DISTURBED

    @property
    def key(self) -> tuple[str, str, str]:
        """What names the same row in another run."""
        return self.measure, self.mode, self.contender


def to_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain data, each with its bandwidth and its verdict."""
    return [
        {**dataclasses.asdict(row), "gigabytes_per_second": row.gigabytes_per_second, "passed": row.passed}
        for row in rows
    ]


def from_data(data: Sequence[dict[str, Any]]) -> list[Row]:
    """The inverse of `to_data`; fields that a newer version added are passed over."""
    known = {field.name for field in dataclasses.fields(Row)}
    return [Row(**{name: value for name, value in entry.items() if name in known}) for entry in data]


def write(path: Path, rows: Sequence[Row], machine: dict[str, Any], settings: dict[str, Any], **more: Any) -> None:
    """Keep a run as JSON, with `more` sections of plain data."""
    content = {"format": FORMAT, "machine": machine, "settings": settings, **more, "rows": to_data(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a run that was kept, and its machine.

    Raises:
        ValueError: the file is not such a run.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} must be a result of this benchmark, format {FORMAT}")
    return from_data(content["rows"]), content["machine"]
