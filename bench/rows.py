"""What a run leaves behind: rows of plain data, their thresholds, and the JSON they are kept in."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT = 2
_FORMER = {"measure": "case", "contender": "provider", "floor": "threshold"}  # the keys of format 1

# Preemptions per second. Measured on two cores with two threads: up to 80 on an otherwise idle machine, whose own
# housekeeping has no third core to run on; from 150 with one busy neighbour.
DISTURBED = 120.0

FAILED = "failed: "  # how the note of a provider without a result begins


@dataclasses.dataclass(frozen=True)
class Row:
    """One provider of one case.

    Attributes:
        case: name of the case, as `--only` takes it.
        provider: who ran. The first row of a case is the one measured, the others are its baselines, or inform.
        mode: how memory was handed out (`"out="`, `"pooled"`, `"plain"`) or, on a GPU, how calls were made (`"cold"`,
            `"called"`, `"graph"`); empty where neither matters.
        at, axis: the point of a series that the row is, and what varies along it; empty for rows that stand alone.
        median_us: median time of one call.
        us25, us75: quartiles of that time over the rounds.
        rounds: that it is the median of.
        preempted: how often per second the system took a core away during the rounds.
        ratio: median over the rounds of the first provider's time by this one's (a speed-up where `at_least`).
        q25, q75: quartiles of that ratio over the rounds.
        threshold: what the ratio, or the value, must reach; None for information.
        at_least: whether the threshold is a lower bound.
        bytes: that one call must move, by the byte model.
        of_copy: those bytes per second as a fraction of what a copy reached in the same rounds.
        value, unit: a result that is not a time.
        note: what a reader should know.
    """

    case: str
    provider: str
    mode: str = ""
    median_us: float | None = None
    rounds: int | None = None
    preempted: float | None = None
    ratio: float | None = None
    q25: float | None = None
    q75: float | None = None
    threshold: float | None = None
    at_least: bool = False
    bytes: int | None = None
    of_copy: float | None = None
    value: float | None = None
    unit: str = ""
    note: str = ""
    at: int | str | None = None
    axis: str = ""
    us25: float | None = None
    us75: float | None = None

    @property
    def key(self) -> tuple[str, str, str, int | str | None]:
        """What tells it from all other rows of a run."""
        return self.case, self.mode, self.provider, self.at

    @property
    def gigabytes_per_second(self) -> float | None:
        """Of the bytes that had to be moved."""
        return self.bytes / self.median_us / 1e3 if self.bytes and self.median_us else None

    @property
    def judged(self) -> float | None:
        """The number that the threshold is about."""
        return self.value if self.ratio is None else self.ratio

    @property
    def passed(self) -> bool | None:
        """Whether the threshold is reached; None without one. A threshold without a number is missed."""
        if self.threshold is None or self.judged is None:
            return None if self.threshold is None else False
        return self.judged >= self.threshold if self.at_least else self.judged <= self.threshold

    @property
    def failed(self) -> bool:
        """Whether the provider raised, or computed something else."""
        return self.note.startswith(FAILED)

    @property
    def disturbed(self) -> bool:
        """Whether something else wanted the cores, so that times and ratios mean little."""
        return self.preempted is not None and self.preempted > DISTURBED


def write(path: Path, rows: Sequence[Row], **sections: Any) -> None:
    """Keep a run as JSON: sections of plain data, then the rows, each with its bandwidth and its verdict.

    What a row does not have is not written.
    """
    more = ("gigabytes_per_second", "passed")
    data = [dataclasses.asdict(row) | {name: getattr(row, name) for name in more} for row in rows]
    data = [{name: value for name, value in entry.items() if value not in (None, "")} for entry in data]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **sections, "rows": data}, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a run that was kept, and the facts of its machine; fields of a newer version are passed over.

    Raises:
        ValueError: the file is not such a run.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") not in (1, FORMAT):
        raise ValueError(f"{path} must be a result of this benchmark, format 1 or {FORMAT}")
    known = {field.name for field in dataclasses.fields(Row)}
    entries = ({_FORMER.get(name, name): value for name, value in entry.items()} for entry in content["rows"])
    found = [Row(**{name: value for name, value in entry.items() if name in known}) for entry in entries]
    return found, content.get("machine", {})


def series(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """The points of sweeps and the like: by the name of their case, then by provider."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row.axis:
            found.setdefault(row.case, {}).setdefault(row.provider, []).append(row)
    return found


# What may differ between two runs of the same layer in a value that is not a time.
SAME_VALUE = {"error": 0.01, "share": 0.02}  # of the value before
SAME_MEMORY = 1.0  # MiB: a few pages more or less


def slower(was: Row, now: Row) -> bool:
    """Whether a row got worse by more than its own scatter.

    A row with a ratio is judged by it, since that is taken inside each round: the quartiles of the two runs must be
    apart, on the wrong side. A row without one is judged by the quartiles of its time. A value must be worse by more
    than repeating gives. A provider that ran before and fails now is worse.
    """
    if now.failed or was.failed:
        return now.failed and not was.failed
    if now.value is not None and was.value is not None:
        margin = SAME_MEMORY if now.unit == "MiB" else SAME_VALUE.get(now.unit, 0.01) * abs(was.value)
        return now.value < was.value - margin if now.at_least else now.value > was.value + margin
    if now.q25 is not None and now.q75 is not None and was.q25 is not None and was.q75 is not None:
        return now.q75 < was.q25 if now.at_least else now.q25 > was.q75
    if now.ratio is None and now.us25 is not None and was.us75 is not None:
        return now.us25 > was.us75
    return False
