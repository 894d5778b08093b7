"""Interleaved rounds, by the clock of the host or of a device.

`torch.utils.benchmark.Timer` times one statement at a time, so two statements meet two different states of the machine,
and a slow second of a shared CPU looks like a slow kernel. Here every round times every provider, and ratios are taken
inside a round.
"""

import dataclasses
import functools
import gc
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .rows import FAILED

FEWEST_ROUNDS = 5
MOST_HERTZ = 3e9  # of a GPU: what it spins for is then long enough
HEAD_START = 2.0  # times what the host needs to queue a block
FLUSHED = 3  # times the size of the cache: what is read to push everything else out of it

# How calls are made and what is timed.
CALLED = "called"  # call after call, as a program makes them; on a device the host is in it, where that is slower
COLD = "cold"  # the device's time for one call that finds nothing in the cache; the host is far ahead
GRAPH = "graph"  # the calls of a block, replayed from one CUDA graph


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every case is told.

    Attributes:
        rounds: of interleaved timings.
        seconds: after which a case starts no further round, once it has a few.
        threads: of torch.
        quick: leave out what only informs, and what must be compiled first.
        gpu: run the cases of the GPU.
        dry_run: with tiny shapes, on the CPU.
    """

    rounds: int = 25
    seconds: float = 6.0
    threads: int = 2
    quick: bool = False
    gpu: bool = False
    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return torch.device("cuda" if self.gpu and not self.dry_run else "cpu")


@dataclasses.dataclass(frozen=True)
class Provider:
    """A call, and the inputs it is given in turn.

    Attributes:
        name: for the table.
        call: what is timed, with one input.
        inputs: one for each call of a block and one more, so that no batch comes twice within a block.
        same: whether its result must be that of the case's first provider.
        timed: False for one that is here to compare results with.
        bytes: that a call must move, where it is not what the case says.
        threads: to be set for it; None leaves them as they are.
        speedup_over: the provider that is the same with more threads; the ratio is then what these bring.
        sits_out: a way of calling in which it takes no part.
    """

    name: str
    call: Callable[[Any], Any]
    inputs: Sequence[Any]
    same: bool = True
    timed: bool = True
    bytes: int | None = None
    threads: int | None = None
    speedup_over: str = ""
    sits_out: str = ""


@dataclasses.dataclass
class Rounds:
    """Seconds per call: one number per provider and round, rounds in the same order for all.

    `preempted` is how often per second the system took a core away from us meanwhile; `failures` has the reasons of the
    providers that are missing.
    """

    seconds: dict[str, list[float]]
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    preempted: float = 0.0

    def median_us(self, name: str) -> float:
        """Median time of one call in microseconds."""
        return statistics.median(self.seconds[name]) * 1e6

    def quartiles_us(self, name: str) -> list[float]:
        """Of the times that the median is taken of."""
        return [float(value) for value in np.quantile(self.seconds[name], (0.25, 0.75)) * 1e6]

    def ratio(self, name: str, over: str) -> dict[str, float]:
        """Time of `name` over that of `over`, taken round by round: the median and its quartiles."""
        ratios = [mine / other for mine, other in zip(self.seconds[name], self.seconds[over], strict=True)]
        return dict(zip(("ratio", "q25", "q75"), np.quantile(ratios, (0.5, 0.25, 0.75)).tolist(), strict=True))


class HostClock:
    """The host's clock: every call is done when it returns, and a replay is the call."""

    def hold(self, seconds: float) -> None:
        """Keep the device busy for a while, so that the host can queue work behind it."""

    def flush(self) -> None:
        """Leave nothing in the device's cache that a call could find there."""

    def mark(self) -> Any:
        """A point in the order of the device's work."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another; both have been reached."""
        return float(end - start)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as something to be replayed in one launch."""
        return call


class CudaClock(HostClock):
    """Events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
        self._ballast = torch.ones(FLUSHED * cache_bytes // 4, device=device)
        self._sink = torch.zeros((), device=device)

    def hold(self, seconds: float) -> None:
        """Spin. A private function of torch, which its own tests use; without it the host has no head start."""
        getattr(torch.cuda, "_sleep", int)(int(seconds * MOST_HERTZ))

    def flush(self) -> None:
        """By reading: lines left behind by writing would have to be written back during the call that is timed."""
        torch.sum(self._ballast, dim=0, out=self._sink)

    def mark(self) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """As the device measured it."""
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Of the current device."""
        torch.cuda.synchronize()

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph, after a warm-up on a side stream, as torch asks for."""
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


@functools.cache
def clock_of(device: torch.device) -> HostClock:
    """One for each device: that of a GPU holds memory."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def run_rounds(providers: Sequence[Provider], settings: Settings, calls: int, way: str = CALLED) -> Rounds:
    """Time `calls` calls of each provider in each round, for as many rounds as the settings allow.

    A round starts with another provider each time, so that none always follows the same one. Everyone runs a block
    before the first round; who raises then is left out.
    """
    clock = clock_of(settings.device)
    blocks: dict[str, tuple[int, Callable[[], float]]] = {}
    timed = Rounds({})
    threads_before, collecting = torch.get_num_threads(), gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would land on whoever happens to run
    try:
        for provider in providers:
            inputs = [provider.inputs[i % len(provider.inputs)] for i in range(calls + 1)]
            try:
                torch.set_num_threads(provider.threads or threads_before)
                block = _block(way, provider.call, inputs, clock)
                block()
                blocks[provider.name] = provider.threads or threads_before, block
            except Exception as error:
                timed.failures[provider.name] = reason(error)
        timed.seconds = {name: [] for name in blocks}
        start, preempted = time.monotonic(), _preemptions()
        for number in range(settings.rounds if blocks else 0):
            if number >= FEWEST_ROUNDS and time.monotonic() - start > settings.seconds:
                break
            first = number % len(blocks)
            for name in [*blocks][first:] + [*blocks][:first]:
                threads, block = blocks[name]
                torch.set_num_threads(threads)
                timed.seconds[name].append(block())
        timed.preempted = (_preemptions() - preempted) / max(time.monotonic() - start, 1e-9)
    finally:
        if collecting:
            gc.enable()
        torch.set_num_threads(threads_before)
    return timed


def reason(error: BaseException) -> str:
    """The first line of an exception, with its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{FAILED}{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _block(way: str, call: Callable[[Any], object], inputs: Sequence[Any], clock: HostClock) -> Callable[[], float]:
    """What times a call for each of the inputs but the first, and returns seconds per call.

    The call with the first input is not timed: the caches and threads it finds are not the provider's own doing.
    """
    first, *fresh = inputs

    def queue_cold() -> list[tuple[Any, Any]]:
        marks = []
        for given in fresh:
            clock.flush()
            start = clock.mark()
            call(given)
            marks.append((start, clock.mark()))
        return marks

    def all_calls() -> None:
        for given in fresh:
            call(given)

    def cold() -> float:
        clock.hold(HEAD_START * to_queue)
        marks = queue_cold()
        clock.synchronize()
        return statistics.median(clock.seconds(start, end) for start, end in marks)

    def called() -> float:
        call(first)
        clock.synchronize()
        return mean(all_calls)

    def graph() -> float:
        replay()
        return mean(replay)

    def mean(calls: Callable[[], object]) -> float:
        start = clock.mark()
        calls()
        end = clock.mark()
        clock.synchronize()
        return clock.seconds(start, end) / len(fresh)

    for given in inputs[:3]:
        call(given)
    if way == COLD:
        queue_cold()
        clock.synchronize()
        to_queue = time.perf_counter()
        queue_cold()
        to_queue = time.perf_counter() - to_queue
    clock.synchronize()
    replay = clock.capture(all_calls) if way == GRAPH else all_calls
    return {COLD: cold, CALLED: called, GRAPH: graph}[way]
