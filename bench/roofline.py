"""Lower bounds of times on a GPU: from the traffic, and from the reads that the kernels keep in flight.

Nothing here is measured. in_flight.json is what .ci/cuda_gate.py reads from the machine code for sm_90, and checks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import report
from .inputs import Shape

LABEL = "estimate, not measured"
BANDWIDTH = {"A100": 2039, "H100": 3350, "H200": 4800}  # GB/s, by the makers' data sheets
MULTIPROCESSORS = {"A100": 108, "H100": 132, "H200": 132}
LATENCY = 1.0  # us from a load to its value under load: 0.8 to 1.2 is usual
LAUNCH = 2.0  # us from the end of a kernel to the start of the next one in a stream
SHAPES = [
    Shape(batch, length, width, dtype)
    for batch, length, width in ((32, 512, 512), (8, 2048, 1024), (1, 131072, 1024))
    for dtype in (torch.float32, torch.bfloat16)
]
# The gradient of a table, of which few rows have tokens.
GRADIENT = Shape(32, 512, 1024, vocabulary=256000)
_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}


def chip_of(name: str) -> str:
    """The data sheet of a GPU by the name that the driver gives it, or that of the H200."""
    return next((chip for chip in BANDWIDTH if chip in name.upper()), "H200")


def machine_code() -> dict[tuple[str, str], dict[str, Any]]:
    """What is known of each kernel and call."""
    entries = json.loads((Path(__file__).parent / "in_flight.json").read_text())
    return {(entry["kernel"], entry["call"]): entry for entry in entries}


def microseconds(megabytes: float, chip: str, in_flight: int = 0, read: float = 0.0, latencies: float = 1.0) -> float:
    """The time of so many MB of which `read` are read: what memory takes, or what waiting for the reads takes."""
    waiting = read * 1e6 * latencies * LATENCY / (in_flight * MULTIPROCESSORS[chip]) if in_flight else 0.0
    return max(megabytes / BANDWIDTH[chip] * 1e3, waiting)


def estimates(chip: str) -> list[dict[str, Any]]:
    """Each shape: bytes over bandwidth, and what the kernel's reads in flight and the rounding of its launch allow."""
    known, entries = machine_code(), []
    for shape in SHAPES:
        axis = "along_seq" if shape.batch == 1 else "along_batch"
        call = f"[{shape.batch}, {shape.length}] x {shape.width}"
        name = f"{_TYPES[shape.dtype]}, gathered, interleaved"
        megabytes = shape.forward_bytes() / 1e6
        entry = {"shape": shape.text, "chip": chip, "MB": round(megabytes, 1),
                 "us": round(microseconds(megabytes, chip), 1)}  # fmt: skip
        for column, kernel in (("vectors", f"forward_vectors<{name}, shared>"),
                               ("tokens", f"forward_tokens<{name}, {axis}>")):  # fmt: skip
            one = known[kernel, call]
            read = shape.row_bytes(shape.tokens) / 1e6
            took = microseconds(megabytes, chip, one["in_flight"], read) * one["rounding"]
            entry[f"{column} KB"] = round(one["in_flight"] / 1024, 1)
            entry[f"{column} us"] = round(took, 1)
        entries.append({**entry, "label": LABEL})
    return entries


def gradient(chip: str) -> dict[str, Any]:
    """The dense gradient: the output cleared, then the rows that have tokens; and the time to write it once."""
    shape = GRADIENT
    rows = min(shape.distinct, shape.tokens)
    write = microseconds(shape.row_bytes(shape.vocabulary) / 1e6, chip)
    in_flight = machine_code()["sum_segments<float, true>", "a full device"]["in_flight"]
    # A gradient waits for its place in the order, so twice. Ids, keys and places are read and written eight times by
    # marking and sorting; seven kernels and the clearing come one after the other.
    read = shape.row_bytes(shape.tokens) / 1e6
    sums = microseconds(read + shape.row_bytes(rows) / 1e6, chip, in_flight, read, 2.0)
    sort = microseconds(8 * 8 * shape.tokens / 1e6, chip)
    took = write + sort + sums + 8 * LAUNCH
    return {"shape": f"{shape.text}, {shape.vocabulary} rows", "chip": chip, "write us": round(write, 1),
            "us": round(took, 1), "ratio": round(took / write, 2), "label": LABEL}  # fmt: skip


def show(entries: Sequence[dict[str, Any]]) -> None:
    """The tables."""
    lines = [[str(value) for key, value in entry.items() if key != "label"] for entry in entries]
    report.table(f"Lower bounds of the forward, {LABEL}", list(entries[0])[:-1], lines)
    backward = gradient(entries[0]["chip"])
    line = [str(value) for key, value in backward.items() if key != "label"]
    report.table(f"Lower bound of the gradient, {LABEL}", list(backward)[:-1], [line])
