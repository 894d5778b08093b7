"""An estimate of the forward's speed from the instructions that the compiler made of it. Nothing here is measured.

A kernel can be no faster than its memory traffic, nor than its instructions can be issued. Which of the two binds, and
how far apart they are, can be said before any GPU has run it: the number of instructions per element comes from the
gate that disassembles the kernels, the rest from the makers' data sheets.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import report

LABEL = "estimate, not measured"
LANES = 128  # results of one instruction per multiprocessor and clock, for fp32 and most integer instructions
BUDGET = Path("csrc/cuda/sass_budget.json")  # in a checkout


class Chip(NamedTuple):
    """The figures of a data sheet: compute capability without the dot, boost clock, bandwidth of the memory."""

    name: str
    architecture: str
    multiprocessors: int
    gigahertz: float
    gigabytes_per_second: float


CHIPS = {
    "A100": Chip("A100 80GB", "80", 108, 1.41, 2039),
    "H100": Chip("H100 SXM", "90", 132, 1.98, 3350),
    "H200": Chip("H200", "90", 132, 1.98, 4800),
}


def chip_of(name: str, fallback: str = "H200") -> Chip:
    """The data sheet of a GPU by the name that the driver gives it, or of another one."""
    return next((chip for key, chip in CHIPS.items() if key in name.upper()), CHIPS[fallback])


def estimate(kernel: str, instructions: float, chip: Chip) -> dict[str, Any]:
    """Elements per second, when every lane issues each clock and memory gives all it has: both are upper bounds."""
    moved = bytes_per_element(kernel)
    issue = chip.multiprocessors * LANES * chip.gigahertz * 1e9 / instructions
    memory = chip.gigabytes_per_second * 1e9 / moved
    share, limit = min(issue / memory, 1.0), "memory" if issue >= memory else "instructions"
    entry = {"kernel": kernel, "chip": chip.name, "instructions": instructions, "bytes_per_element": moved}
    return entry | {"issue": issue, "memory": memory, "of_bandwidth": share, "limit": limit, "label": LABEL}


def bytes_per_element(kernel: str) -> int:
    """Of a kernel named forward_vectors<type, source, ...>: what is read, where there is a source, and written.

    Raises:
        ValueError: another kind of name.
    """
    match = re.match(r"\w+<(float16|bfloat16|float|double), (gathered|dense|none)\b", kernel)
    if not match:
        raise ValueError(f"the kernel's name must begin like forward_vectors<float, gathered, got {kernel!r}")
    size = {"float16": 2, "bfloat16": 2, "float": 4, "double": 8}[match[1]]
    return size if match[2] == "none" else 2 * size


def estimates(path: Path, chip: Chip) -> list[dict[str, Any]]:
    """One for each kernel that the disassembly gate's budget has for the chip's architecture.

    The file is `{"kernels": {name: {architecture: instructions per element of the storing loop}}}`.

    Raises:
        ValueError: the file is no such budget.
    """
    try:
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"].items()
        counted = [(name, float(counts[chip.architecture])) for name, counts in kernels if chip.architecture in counts]
        return [estimate(name, instructions, chip) for name, instructions in counted]
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} must be a budget as the disassembly gate writes it: {error!r}") from error


def show(entries: Sequence[dict[str, Any]]) -> None:
    """The table."""
    lines = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in entry.values()] for entry in entries]
    title = f"Upper bounds of the forward, {LABEL}: instructions from the disassembly, data sheet figures"
    report.table(title, list(entries[0]) if entries else [], lines, sections=False)
