"""The forward kernel alone, on one thread, for each instruction set: `python -m bench.kernels`.

No torch call, no allocation, no argument check: what is left is the loop. Beside it stands `memcpy` of the bytes that
the loop writes, from the same table, so that a kernel's time splits into moving and computing.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator, Sequence

import torch
from rich import box
from rich.table import Table
from torch.utils.benchmark import Timer

from posenc_ext import _C
from posenc_ext.conventions import DIVISORS, LAYOUTS, ODD_RULES, PRECISIONS

from . import report
from .contenders import BATCHED, SINGLE, Shape, id_batches, of_dtype, stretches, table
from .wording import microseconds

# Small enough for the second-level cache, table and all: computing without moving.
CACHED = Shape(1, 64, 512, vocabulary=64)

_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; nothing is kept."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.kernels", description="The forward kernel alone.")
    parser.add_argument("--seconds", type=float, default=0.2, help="spent on each number (0.2)")
    args = parser.parse_args(argv)
    before = _C.active_isa()
    try:
        report.console().print(_table(args.seconds))
    finally:
        _C.force_isa(before)
    return 0


def _table(seconds: float) -> Table:
    result = Table(title="One thread", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("shape", "precision", "instruction set"):
        result.add_column(name)
    for name in ("time", "ns per element", "GB/s", "memcpy", "of memcpy"):
        result.add_column(name, justify="right", no_wrap=True)
    for shape in (CACHED, BATCHED, SINGLE, of_dtype(CACHED, torch.bfloat16), of_dtype(SINGLE, torch.bfloat16)):
        first = True
        for cells in _rows(shape, seconds):
            result.add_row(shape.text if first else "", *cells)
            first = False
        result.add_section()
    return result


def _rows(shape: Shape, seconds: float) -> Iterator[list[str]]:
    weight, ids = table(shape), id_batches(shape)
    out = torch.empty(shape.tokens, shape.width, dtype=shape.dtype)
    pieces = stretches(weight, out.numel())
    memcpy = _median("for piece in pieces: memmove(out, piece, size)", len(pieces), seconds, {
        "memmove": ctypes.memmove,
        "pieces": [ctypes.c_void_p(piece.data_ptr()) for piece in pieces],
        "out": ctypes.c_void_p(out.data_ptr()),
        "size": ctypes.c_size_t(out.nbytes),
    })  # fmt: skip
    for precision in ("reference", "exact"):
        for isa in _C.available_isas():
            _C.force_isa(isa)
            time = _median("for tokens in ids: kernel(weight, tokens, *rest)", len(ids), seconds, {
                "kernel": _C.embed_raw,
                "weight": weight.data_ptr(),
                "ids": [tokens.data_ptr() for tokens in ids],
                "rest": (
                    out.data_ptr(),
                    shape.batch,
                    shape.length,
                    shape.width,
                    _NUMBERS[shape.dtype],
                    0,
                    shape.token_scale,
                    10000.0,
                    DIVISORS["d"],
                    LAYOUTS["interleaved"],
                    ODD_RULES["sine"],
                    PRECISIONS[precision],
                ),
            })  # fmt: skip
            yield [
                precision,
                isa,
                microseconds(time * 1e6),
                f"{time / out.numel() * 1e9:.3f}",
                f"{2 * out.nbytes / time / 1e9:.1f}",
                microseconds(memcpy * 1e6),
                f"{memcpy / time:.0%}",
            ]


def _median(statement: str, calls: int, seconds: float, names: dict[str, object]) -> float:
    timer = Timer(statement, globals=names, num_threads=1)
    return float(timer.blocked_autorange(min_run_time=seconds).median) / calls


if __name__ == "__main__":
    sys.exit(main())
