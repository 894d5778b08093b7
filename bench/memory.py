"""How much memory a large call takes beyond its output.

Each provider runs in a fresh process. The system's high-water mark of resident memory (VmHWM) is reset just before the
call, and what it rose by is compared with the size of the output.
"""

import contextlib
import dataclasses
from pathlib import Path

import torch
from torch import nn

from . import children
from .inputs import EAGER, OURS, Shape, fused, table, textbook, uniform
from .rows import Row
from .timing import Settings

SHAPE = Shape(1, 131072, 1024, torch.bfloat16, vocabulary=4000)


def forward(settings: Settings) -> list[Row]:
    """The forward pass over a very long sequence."""
    rows = []
    for provider in (OURS,) if settings.quick else (OURS, EAGER):
        extra, output, tables = children.call(peak, provider, settings.threads)
        note = f"MiB beyond an output of {output:.0f}, and a table of {tables:.0f} before the call"
        rows.append(Row("", provider, value=extra, unit="MiB", note=note))
    return rows


LENGTHS = (2**10, 2**12, 2**14, 2**16, 2**17)


def by_length(settings: Settings) -> list[Row]:
    """What a forward takes besides ids, weight and output, by length; the textbook's table of positions is in it."""
    rows = []
    for provider in (OURS, EAGER):
        for length in LENGTHS:
            extra, _, tables = children.call(peak, provider, settings.threads, length)
            rows.append(Row("", provider, value=extra + tables, unit="MiB", at=length, axis="length"))
    return rows


@torch.no_grad()
def peak(provider: str, threads: int, length: int | None = None) -> tuple[float, float, float]:
    """The child's side, in MiB: what one call takes beyond its output, that output, and the tables of the layer."""
    torch.set_num_threads(threads)
    shape = dataclasses.replace(SHAPE, length=length or SHAPE.length)
    weight = nn.Parameter(table(shape))
    layer = fused(shape, weight) if provider == OURS else textbook(shape, weight)
    (ids,) = uniform(shape, 1)
    layer(ids[:, :64])  # thread pool and frequencies are there before
    # Where the system refuses, the mark stays where building the layer left it: the result is too high, never too low.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_mib("VmRSS")
    out = layer(ids)
    rise, output = _status_mib("VmHWM") - before, out.nbytes / 2**20
    return rise - output, output, sum(buffer.nbytes for buffer in layer.buffers()) / 2**20


def _status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024
