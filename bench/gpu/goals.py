"""What is asked of the CUDA half, and the rows that say whether it was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..contenders import COMPILED, EAGER, OURS
from ..rows import Row
from ..timing import Rounds, compare

AUTOTUNED = "textbook, max-autotune"
FORMULA = "no table, torch.compile"
LOOKUP = "F.embedding alone"
DENSE_BACKWARD = "embedding_dense_backward(g * scale)"
PLAIN_BACKWARD = "embedding_dense_backward(g)"
STRIDED = "posenc_ext, strided ids"
SHARE = "share of the copy's bandwidth"

# Our time over theirs, at most.
FORWARD_GOALS = {EAGER: 1 / 2.5, COMPILED: 1.0, AUTOTUNED: 1.0, FORMULA: 1.0}
BACKWARD_GOALS = {DENSE_BACKWARD: 1 / 1.5}
FEW_TOKENS_GOALS = {DENSE_BACKWARD: 1.2}  # where most of the time goes into rows that nobody looked up
STRIDED_GOALS = {OURS: 1.3}
COPY_GOAL = 0.90  # of a copy's bandwidth, at least, for large shapes


def rows_of(
    measure: str,
    mode: str,
    timed: Rounds,
    *,
    ours: str,
    goals: Mapping[str, float],
    failures: Mapping[str, str],
    bytes_moved: int,
    copy_bytes: int | None = None,
    large: bool = False,
) -> list[Row]:
    """The rows of a measure: ours, the others, those that failed, and our share of the copy's bandwidth.

    Args:
        measure, mode: see `Row`.
        timed: the rounds; a contender named "copy" sets the bandwidth.
        ours: who is measured.
        goals: by contender. A goal of one that failed counts as missed: nothing shows that it was reached.
        failures: the reasons of those who are not in `timed`.
        bytes_moved, copy_bytes: of the byte model; no copy_bytes where there was no copy.
        large: whether the share has a goal.
    """
    if ours in timed.seconds:
        found = compare(measure, mode, timed, floors=dict(goals), bytes_moved=bytes_moved, copy_bytes=copy_bytes)
        if copy_bytes is not None:
            goal = COPY_GOAL if large else None
            found.insert(1, Row(measure, SHARE, mode, value=found[0].of_copy, floor=goal, at_least=True))
    else:  # nothing to take a ratio to; the times of the others are facts all the same
        found = [
            Row(measure, name, mode, timed.median_us(name), len(numbers), floor=goals.get(name), bytes=bytes_moved)
            for name, numbers in timed.seconds.items()
        ]
    return found + [Row(measure, name, mode, floor=goals.get(name), note=text) for name, text in failures.items()]


def failed(measure: str, mode: str, ours: str, goals: Mapping[str, float], note: str) -> list[Row]:
    """The rows of a measure that came to nothing."""
    return [
        Row(measure, ours, mode, note=note),
        *(Row(measure, name, mode, floor=goal) for name, goal in goals.items()),
    ]


def failures_of(rows: Sequence[Row]) -> list[str]:
    """One line for each contender that failed, whatever the reason."""
    return [f"{row.measure} {row.mode}, {row.contender}: {row.note}" for row in rows if row.note.startswith("failed")]
