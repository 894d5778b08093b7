"""An estimate of the forward's speed from the instructions that the compiler made of it. Nothing here is measured.

A kernel can be no faster than its memory traffic, nor than its instructions can be issued. Which of the two binds, and
how far apart they are, can be said before any GPU has run it: the number of instructions per element comes from the
gate that disassembles the kernels, the rest from the makers' data sheets.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

LABEL = "estimate, not measured"
LANES = 128  # results of one instruction per multiprocessor and clock, for fp32 and most integer instructions


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of a data sheet.

    Attributes:
        name: as the driver says it.
        architecture: its compute capability without the dot.
        multiprocessors: how many there are.
        gigahertz: the boost clock.
        gigabytes_per_second: of memory.
    """

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


@dataclasses.dataclass(frozen=True)
class Estimate:
    """For one kernel on one chip.

    Attributes:
        kernel, chip: names.
        instructions: per element of the output.
        issue, memory: elements per second that each limit allows.
        of_bandwidth: the share of the memory's bandwidth that the slower of the two leaves.
    """

    kernel: str
    chip: str
    instructions: float
    bytes_per_element: float
    issue: float
    memory: float

    @property
    def of_bandwidth(self) -> float:
        """At most 1; below it instructions are the limit."""
        return min(self.issue / self.memory, 1.0)

    @property
    def limit(self) -> str:
        """Which one binds."""
        return "memory" if self.issue >= self.memory else "instructions"


def estimate(kernel: str, instructions: float, bytes_per_element: float, chip: Chip) -> Estimate:
    """Every lane issues each clock, and memory gives all it has: neither happens, so both are upper bounds."""
    issue = chip.multiprocessors * LANES * chip.gigahertz * 1e9 / instructions
    memory = chip.gigabytes_per_second * 1e9 / bytes_per_element
    return Estimate(kernel, chip.name, instructions, bytes_per_element, issue, memory)


def read_kernels(path: Path, architecture: str) -> dict[str, tuple[float, float]]:
    """Instructions and bytes per element of each kernel of the disassembly gate's budget, for one architecture.

    The file is `{"kernels": {name: {architecture: instructions per element of the storing loop}}}`.

    Raises:
        ValueError: the file is no such budget.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    kernels = content.get("kernels") if isinstance(content, dict) else None
    if not isinstance(kernels, dict) or not all(isinstance(counts, dict) for counts in kernels.values()):
        raise ValueError(f"{path} must hold an object 'kernels', as the disassembly gate writes it")
    found = {}
    for name, counts in kernels.items():
        if architecture not in counts:
            continue  # not compiled for it
        instructions = float(counts[architecture])
        if not instructions > 0:
            raise ValueError(f"{path}: instructions per element of {name!r} must be positive, got {instructions}")
        found[name] = instructions, bytes_per_element(name)
    return found


def bytes_per_element(kernel: str) -> float:
    """Of a kernel named forward_vectors<type, source, ...>: what is read, where there is a source, and written.

    Raises:
        ValueError: another kind of name.
    """
    match = re.match(r"\w+<(float16|bfloat16|float|double), (gathered|dense|none)\b", kernel)
    if not match:
        raise ValueError(f"the kernel's name must begin like forward_vectors<float, gathered, got {kernel!r}")
    size = {"float16": 2, "bfloat16": 2, "float": 4, "double": 8}[match[1]]
    return float(size if match[2] == "none" else 2 * size)


def estimates(path: Path, chip: Chip) -> list[dict[str, Any]]:
    """Plain data for the result, each entry labelled for what it is."""
    made = [estimate(name, *numbers, chip) for name, numbers in read_kernels(path, chip.architecture).items()]
    return [{**dataclasses.asdict(e), "of_bandwidth": e.of_bandwidth, "limit": e.limit, "label": LABEL} for e in made]


def chip_of(name: str, fallback: str = "H200") -> Chip:
    """The data sheet of a GPU by the name that the driver gives it, or of another one."""
    return next((chip for key, chip in CHIPS.items() if key in name.upper()), CHIPS[fallback])
