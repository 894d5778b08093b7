"""Contenders against each other, in interleaved rounds.

`torch.utils.benchmark.Timer` times one statement at a time, so that two statements meet two different states of the
machine; a slow second of a shared CPU then looks like a slow kernel. Here every round times every contender, and ratios
are taken inside a round.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .rows import Row
from .settings import FEWEST_ROUNDS, Settings


@dataclasses.dataclass(frozen=True)
class Contender:
    """A call, and the inputs it is given in turn.

    Attributes:
        name: for the table.
        call: what is timed, with one input.
        inputs: at least a few, so that no contender meets the rows it has just read.
        threads: to be set for it; None leaves them as they are.
    """

    name: str
    call: Callable[[Any], object]
    inputs: Sequence[Any]
    threads: int | None = None


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    q25: float
    q75: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of a sample."""
        q25, median, q75 = (float(q) for q in np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75)))
        return Spread(median, q25, q75)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Seconds per call: one number per contender and round, rounds in the same order for all.

    `preempted` is how often per second the system took a core away from us meanwhile.
    """

    seconds: dict[str, list[float]]
    preempted: float = 0.0

    def median_us(self, name: str) -> float:
        """Median time of one call in microseconds."""
        return Spread.of(self.seconds[name]).median * 1e6

    def ratio(self, name: str, against: str) -> Spread:
        """Time of `name` over time of `against`, taken round by round."""
        return Spread.of([mine / other for mine, other in zip(self.seconds[name], self.seconds[against], strict=True)])


def run_rounds(contenders: Sequence[Contender], settings: Settings, calls: int) -> Rounds:
    """Time `calls` calls of each contender in each round, for as many rounds as the settings allow.

    A round starts with another contender each time, so that none always follows the same one. Before its calls are
    timed a contender makes one that is not: the caches and threads it finds are not its own doing.
    """
    threads_before = torch.get_num_threads()
    inputs = [list(itertools.islice(itertools.cycle(c.inputs), calls)) for c in contenders]
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would land on whoever happens to run
    start, preempted = time.monotonic(), _preemptions()
    try:
        for number in range(-1, settings.rounds):  # round -1 warms everyone up
            if number >= FEWEST_ROUNDS and time.monotonic() - start > settings.seconds:
                break
            for turn in range(len(contenders)):
                at = (turn + number) % len(contenders)
                contender = contenders[at]
                if contender.threads is not None and torch.get_num_threads() != contender.threads:
                    torch.set_num_threads(contender.threads)
                elapsed = _time_calls(contender.call, inputs[at])
                if number >= 0:
                    seconds[contender.name].append(elapsed / calls)
    finally:
        if collecting:
            gc.enable()
        torch.set_num_threads(threads_before)
    return Rounds(seconds, (_preemptions() - preempted) / (time.monotonic() - start))


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _time_calls(call: Callable[[Any], object], inputs: Sequence[Any]) -> float:
    call(inputs[-1])
    start = time.perf_counter()
    for given in inputs:
        call(given)
    return time.perf_counter() - start


COPY = "copy"


def compare(
    measure: str,
    mode: str,
    timed: Rounds,
    *,
    floors: dict[str, float] | None = None,
    bytes_moved: int | None = None,
    copy_bytes: int | None = None,
    notes: dict[str, str] | None = None,
) -> list[Row]:
    """Rows of a measure: the first contender of `timed`, then what it is held against.

    Args:
        measure: name of the measure.
        mode: of memory, see `Row`.
        timed: the rounds; a contender named "copy" sets the bandwidth.
        floors: by contender; the others are for information.
        bytes_moved: by the byte model, the same for all contenders: what they share is the task.
        copy_bytes: that the copy reads and writes.
        notes: by contender.
    """
    floors, notes = floors or {}, notes or {}
    first, *others = timed.seconds
    rows = []
    for name in (first, *others):
        spread = timed.ratio(first, name) if name != first else None
        moved = copy_bytes if name == COPY else bytes_moved
        of_copy = None
        if moved is not None and copy_bytes is not None and COPY in timed.seconds:
            of_copy = timed.ratio(COPY, name).median * moved / copy_bytes
        rows.append(
            Row(
                measure,
                name,
                mode,
                median_us=timed.median_us(name),
                rounds=len(timed.seconds[name]),
                preempted=timed.preempted,
                ratio=spread.median if spread else None,
                q25=spread.q25 if spread else None,
                q75=spread.q75 if spread else None,
                floor=floors.get(name),
                bytes=moved,
                of_copy=of_copy,
                note=notes.get(name, ""),
            )
        )
    return rows
