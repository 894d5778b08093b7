"""Time on a device, and in its place time on the host, so that everything else can be tried without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

FLUSHED = 3  # times the size of the cache: what is read to push everything else out of it


class Clock(Protocol):
    """What the rounds need of a device."""

    device: torch.device

    def hold(self, seconds: float) -> None:
        """Keep the device busy for a while, so that the host can queue work behind it."""

    def flush(self) -> None:
        """Leave nothing in the device's cache that a call could find there."""

    def mark(self) -> Any:
        """A point in the order of the device's work."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another; both have been reached."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as something to be replayed in one launch."""


class CudaClock:
    """Events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
        self._ballast = torch.ones(FLUSHED * self.cache_bytes // 4, device=device)
        self._sink = torch.zeros((), device=device)
        self._cycles = 0.0

    def hold(self, seconds: float) -> None:
        """Spin. A private function of torch, which its own tests use; without it the host has no head start."""
        spin = getattr(torch.cuda, "_sleep", None)
        if spin is None:
            return
        if not self._cycles:
            spin(1_000_000)  # loads the kernel
            start = self.mark()
            spin(20_000_000)
            end = self.mark()
            self.synchronize()
            self._cycles = 20_000_000 / self.seconds(start, end)
        spin(int(seconds * self._cycles))

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
        """Of this device."""
        torch.cuda.synchronize(self.device)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph, after a warm-up on a side stream, as torch asks for."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


class HostClock:
    """The host's clock: every call is done when it returns, and a replay is the call."""

    device = torch.device("cpu")

    def hold(self, seconds: float) -> None:
        """Nothing runs behind the host's back."""

    def flush(self) -> None:
        """No time here is worth that."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def synchronize(self) -> None:
        """Nothing is queued."""

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call itself."""
        return call
