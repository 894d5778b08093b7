"""A lower bound of the forward's time on a GPU, from its memory traffic. Nothing here is measured."""

from collections.abc import Sequence
from typing import Any

import torch

from . import report
from .inputs import Shape

LABEL = "estimate, not measured"
BANDWIDTH = {"A100": 2039, "H100": 3350, "H200": 4800}  # GB/s, by the makers' data sheets
SHAPES = [
    Shape(batch, length, width, dtype)
    for batch, length, width in ((32, 512, 512), (8, 2048, 1024), (1, 131072, 1024))
    for dtype in (torch.float32, torch.bfloat16)
]


def chip_of(name: str) -> str:
    """The data sheet of a GPU by the name that the driver gives it, or that of the H200."""
    return next((chip for chip in BANDWIDTH if chip in name.upper()), "H200")


def estimates(chip: str) -> list[dict[str, Any]]:
    """The time that each shape's bytes take when memory gives all it has; latency is not in it."""
    return [
        {
            "shape": shape.text,
            "chip": chip,
            "MB": round(shape.forward_bytes() / 1e6, 1),
            "us": round(shape.forward_bytes() / BANDWIDTH[chip] / 1e3, 1),
            "label": LABEL,
        }
        for shape in SHAPES
    ]


def show(entries: Sequence[dict[str, Any]]) -> None:
    """The table."""
    lines = [[str(value) for value in entry.values()] for entry in entries]
    report.table(f"Lower bounds of the forward, {LABEL}", list(entries[0]), lines)
