"""How much memory a large call takes beyond its output.

Each provider runs in a fresh process. The system's high-water mark of resident memory (VmHWM) is reset just before the
call, and what it rose by is compared with the size of the output.
"""

import contextlib
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


@torch.no_grad()
def peak(provider: str, threads: int) -> tuple[float, float, float]:
    """The child's side, in MiB: what one call takes beyond its output, that output, and the tables of the layer."""
    torch.set_num_threads(threads)
    weight = nn.Parameter(table(SHAPE))
    layer = fused(SHAPE, weight) if provider == OURS else textbook(SHAPE, weight)
    (ids,) = uniform(SHAPE, 1)
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
