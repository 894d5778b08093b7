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
        median_us: median time of one call.
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
    """Keep a run as JSON: sections of plain data, then the rows, each with its bandwidth and its verdict."""
    more = ("gigabytes_per_second", "passed")
    data = [dataclasses.asdict(row) | {name: getattr(row, name) for name in more} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **sections, "rows": data}, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> list[Row]:
    """The rows of a run that was kept; fields that a newer version added are passed over.

    Raises:
        ValueError: the file is not such a run.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") not in (1, FORMAT):
        raise ValueError(f"{path} must be a result of this benchmark, format 1 or {FORMAT}")
    known = {field.name for field in dataclasses.fields(Row)}
    entries = ({_FORMER.get(name, name): value for name, value in entry.items()} for entry in content["rows"])
    return [Row(**{name: value for name, value in entry.items() if name in known}) for entry in entries]
