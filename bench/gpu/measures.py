"""What is measured on a GPU, the most important first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..contenders import OURS, Shape
from ..rows import Row
from ..settings import Settings
from ..timing import COPY, Contender
from .backward import backward
from .clock import Clock
from .forward import forward, strided
from .goals import BACKWARD_GOALS, FORWARD_GOALS, failed
from .inputs import IDS, numbers
from .rounds import CALLED, CALLS, COLD, GRAPH, reason, run_rounds

DTYPES = (torch.float32, torch.bfloat16)
LARGE_COPY = 2**29  # bytes


@dataclasses.dataclass(frozen=True)
class Measure:
    """Something to be found out: a name for `--only`, a title for the table, and how."""

    name: str
    title: str
    run: Callable[[str, Clock, Settings], list[Row]]


def measures(tiny: bool) -> dict[str, Measure]:
    """By name, the most important ones first; `tiny` makes shapes that a CPU gets through in no time."""
    return {measure.name: measure for measure in _all(tiny)}


def _all(tiny: bool) -> Iterator[Measure]:
    yield Measure(
        "copy.large", f"copy of {LARGE_COPY >> 20} MiB", partial(large_copy, size=2**16 if tiny else LARGE_COPY)
    )
    small, large, long, decode = (32, 512, 512), (8, 2048, 1024), (1, 131_072, 1024), (256, 1, 4096)
    if tiny:
        small, large, long, decode = (2, 8, 32), (2, 16, 32), (1, 64, 32), (4, 1, 64)
    for sizes, is_large in ((large, True), (small, False)):
        for dtype in DTYPES:
            yield _forward_measure(Shape(*sizes, dtype), (COLD,), is_large)
    for dtype in DTYPES:
        yield _forward_measure(Shape(*decode, dtype), (CALLED, GRAPH), False)
    for rows in (32_000, 256_000):
        for kind in IDS:
            for dtype in DTYPES:
                shape = Shape(*small, dtype, rows // 1000 if tiny else rows)
                title = f"backward {shape.text}, {shape.vocabulary} rows, {kind} ids"
                name = f"backward.{kind}.{shape.vocabulary}.{shape.name}"
                yield Measure(name, title, partial(backward, shape=shape, kind=kind))
    for dtype in DTYPES:
        yield _forward_measure(Shape(*long, dtype), (COLD,), True)
    shape = Shape(*((2, 16, 32) if tiny else (32, 2048, 1024)), torch.bfloat16)
    yield Measure("forward.strided", f"forward {shape.text}, strided ids", partial(strided, shape=shape))
    for tokens in (512, 4096, 65_536):
        shape = Shape(1, tokens // 64 if tiny else tokens, small[2], vocabulary=32 if tiny else 32_000)
        title = f"backward {shape.text}, {shape.vocabulary} rows, uniform ids"
        run = partial(backward, shape=shape, kind="uniform", goal=False)
        yield Measure(f"backward.tokens.{shape.length}", title, run)


def _forward_measure(shape: Shape, modes: Sequence[str], large: bool) -> Measure:
    run = partial(forward, shape=shape, modes=modes, large=large)
    return Measure(f"forward.{shape.name}", f"forward {shape.text}", run)


def large_copy(measure: str, clock: Clock, settings: Settings, *, size: int) -> list[Row]:
    """As much as makes nothing else count: the bandwidth of the device's memory."""
    source = numbers((size // 4,), torch.float32, clock.device)
    out = torch.empty_like(source)
    timed, failures = run_rounds([Contender(COPY, out.copy_, [source])], clock, settings, CALLS, COLD)
    if failures:
        return [Row(measure, COPY, COLD, note=failures[COPY])]
    return [Row(measure, COPY, COLD, timed.median_us(COPY), len(timed.seconds[COPY]), bytes=2 * size)]


def run(measure: Measure, clock: Clock, settings: Settings) -> list[Row]:
    """A measure, whatever happens to it."""
    try:
        return measure.run(measure.name, clock, settings)
    except Exception as error:
        goals = BACKWARD_GOALS if measure.name.startswith("backward") else FORWARD_GOALS
        return failed(measure.name, "", OURS, goals, reason(error))
