"""Interleaved rounds on a device, in three ways of calling."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..settings import FEWEST_ROUNDS, Settings
from ..timing import Contender, Rounds
from .clock import Clock

# How calls are made and what is timed; `Row.mode`.
COLD = "cold"  # the device's time for one call that finds nothing in the cache; the host is far ahead
CALLED = "called"  # call after call as a program makes them; includes the host, where that is slower
GRAPH = "graph"  # the same calls, replayed from one CUDA graph

CALLS = 12  # in a block of large ones
HEAD_START = 2.0  # times what the host needs to queue a block


def run_rounds(
    contenders: Sequence[Contender], clock: Clock, settings: Settings, calls: int, mode: str
) -> tuple[Rounds, dict[str, str]]:
    """Time `calls` calls of each contender in each round, for as many rounds as the settings allow.

    Before its calls are timed a contender makes some that are not; who raises then is left out of the rounds.

    Returns:
        Seconds per call, one number per contender and round, and the reasons of those who are missing.
    """
    blocks: dict[str, Callable[[], float]] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        inputs = list(itertools.islice(itertools.cycle(contender.inputs), calls))
        try:
            block = _BLOCKS[mode](contender.call, inputs, clock)
            block()
            blocks[contender.name] = block
        except Exception as error:
            failures[contender.name] = reason(error)
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    start = time.monotonic()
    try:
        for number in range(settings.rounds if blocks else 0):
            if number >= FEWEST_ROUNDS and time.monotonic() - start > settings.seconds:
                break
            names = list(blocks)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(blocks[name]())
    finally:
        if collecting:
            gc.enable()
    return Rounds(seconds), failures


def reason(error: BaseException) -> str:
    """The first line of an exception, with its name."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"failed: {type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def _cold(call: Callable[[Any], object], inputs: Sequence[Any], clock: Clock) -> Callable[[], float]:
    """The median over the block of what the device took for one call."""
    for given in inputs[:3]:
        call(given)
    clock.synchronize()

    def queue() -> list[tuple[Any, Any]]:
        marks = []
        for given in inputs:
            clock.flush()
            start = clock.mark()
            call(given)
            marks.append((start, clock.mark()))
        return marks

    started = time.perf_counter()
    queue()
    to_queue = time.perf_counter() - started
    clock.synchronize()

    def block() -> float:
        clock.hold(HEAD_START * to_queue)
        marks = queue()
        clock.synchronize()
        return statistics.median(clock.seconds(start, end) for start, end in marks)

    return block


def _called(call: Callable[[Any], object], inputs: Sequence[Any], clock: Clock) -> Callable[[], float]:
    """The mean over the block, from the first call to the end of the last one's work."""

    def block() -> float:
        call(inputs[-1])
        clock.synchronize()
        start = time.perf_counter()
        for given in inputs:
            call(given)
        clock.synchronize()
        return (time.perf_counter() - start) / len(inputs)

    return block


def _graph(call: Callable[[Any], object], inputs: Sequence[Any], clock: Clock) -> Callable[[], float]:
    """The mean over the calls of one replay."""
    with torch.no_grad():
        for given in inputs[:3]:
            call(given)
        clock.synchronize()

        def all_calls() -> None:
            for given in inputs:
                call(given)

        replay = clock.capture(all_calls)

    def block() -> float:
        replay()
        start = clock.mark()
        replay()
        end = clock.mark()
        clock.synchronize()
        return clock.seconds(start, end) / len(inputs)

    return block


_BLOCKS = {COLD: _cold, CALLED: _called, GRAPH: _graph}
