"""How much memory a large call takes beyond its output.

Each contender runs in a fresh process. The system's high-water mark of resident memory (VmHWM) is reset just before the
call, and what it rose by is compared with the size of the output.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import nn

from posenc_ext import reference

from . import children
from .contenders import EAGER, OURS, Shape, fused, id_batches, table, textbook
from .rows import Row
from .settings import Settings

SHAPE = Shape(1, 131072, 1024, torch.bfloat16, vocabulary=4000)
FLOOR_MIB = 16.0


def forward(measure: str, settings: Settings) -> list[Row]:
    """The forward pass over a very long sequence."""
    rows = []
    for contender, floor in ((OURS, FLOOR_MIB), (EAGER, None)):
        if settings.quick and contender != OURS:
            continue
        found = children.call("memory:peak", {"contender": contender, "threads": settings.threads})
        note = f"MiB beyond an output of {found['output_mib']:.0f}"
        if found["table_mib"]:
            note += f", and a table of {found['table_mib']:.0f} before the call"
        rows.append(Row(measure, contender, "", value=found["extra_mib"], unit="MiB", floor=floor, note=note))
    return rows


@torch.no_grad()
def peak(contender: str, threads: int) -> dict[str, float]:
    """The child's side: one call, and what memory did meanwhile, in MiB."""
    torch.set_num_threads(threads)
    weight = nn.Parameter(table(SHAPE))
    table_mib = 0.0
    if contender == OURS:
        layer: nn.Module = fused(SHAPE, weight)
    else:
        encoding = reference.PositionalEncoding(SHAPE.width, SHAPE.length).to(SHAPE.dtype)
        layer = nn.Sequential(textbook(SHAPE, weight)[0], encoding)
        table_mib = encoding.pe.nbytes / 2**20
    (ids,) = id_batches(SHAPE, 1)
    layer(ids[:, :64])  # thread pool and frequencies are there before
    _reset_high_water()
    before = _status_mib("VmRSS")
    out = layer(ids)
    rise = _status_mib("VmHWM") - before
    output_mib = out.nbytes / 2**20
    return {"extra_mib": rise - output_mib, "output_mib": output_mib, "table_mib": table_mib}


def _reset_high_water() -> None:
    # Where the system refuses, the mark stays where building the layer left it: the result is too high, never too low.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
