"""What the CUDA compiler made of the kernels, read from a built wheel.

For every kernel of ours and every architecture:
    no stack frame (so no spill) and no local memory
    kernels on whole vectors load and store 128 bits at a time
    nothing that flushes subnormal numbers to zero
    fused multiply-adds only where the source writes them, in the polynomials of fp32 sines and cosines: no kernel
    without an encoding has one, those with one have as many as the polynomials take, and a base term adds none
    where a base term is scaled and an encoding is added, a multiplication and an addition for each element
    where ids are looked at, an id out of range is recorded by one atomic of its warp at most: a look without an atomic,
    the search for the warp's first, the atomic, and only behind that the lock; no atomics elsewhere

Kernels of CUB, which sort the ids, are left to its authors. So are the division of scale_grad_by_freq, which brings
instructions of its own into sum_rows, and the division of integers, which converts numbers with .FTZ.

Usage: python .ci/cuda_gate.py WHEEL
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHITECTURES = ("75", "80", "90", "100", "120")
OURS = "_ZN6posenc4cuda"
ENUMS = {
    "Source": ("gathered", "dense", "none"),
    "cuda::Arrangement": ("interleaved", "halves", "plain"),
    "cuda::Mode": ("shared", "per_token_exact", "per_token_reference"),
}
# Instructions of one division, at most.
DIVISION = {"fused": 20, "flushing": 8}
# Elements of 16 bytes, and fused multiply-adds of the polynomials of one pair.
ELEMENTS = {"float": 4, "double": 2, "bfloat16": 8, "half": 8}
POLYNOMIALS = 7
FLAGS = Path(__file__).parent.parent / "csrc/cuda/nvcc_flags.json"


def cuobjdump(*arguments: str) -> str:
    """Output of the program of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or of a CUDA toolkit."""
    installed = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump"))
    program = str(installed[-1]) if installed else shutil.which("cuobjdump")
    if not program:
        raise SystemExit("cuda_gate: cuobjdump not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def readable(symbols: list[str]) -> list[str]:
    """Mangled names to names such as forward_vectors<float, gathered, interleaved, shared>."""
    text = subprocess.run(["c++filt", *symbols], check=True, capture_output=True, text=True).stdout
    for enum, values in ENUMS.items():
        text = re.sub(rf"\(posenc::{enum}\)(\d)", lambda m, v=values: v[int(m[1])], text)
    text = re.sub(r"\([^()]*\)$|^void ", "", text, flags=re.MULTILINE)
    return (
        text.replace("posenc::cuda::", "").replace("__nv_bfloat16", "bfloat16").replace("__half", "half").splitlines()
    )


def resources(library: str, architecture: str) -> dict[str, tuple[int, int]]:
    """Registers, and bytes of stack and local memory, of each kernel of ours."""
    found = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)",
        cuobjdump("-res-usage", "-arch", f"sm_{architecture}", library),
    )
    return {name: (int(registers), int(stack) + int(local)) for name, registers, stack, local in found
            if name.startswith(OURS)}  # fmt: skip


def instructions(library: str, architecture: str) -> dict[str, list[str]]:
    """The machine code of each kernel of ours."""
    code: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in cuobjdump("-sass", "-arch", f"sm_{architecture}", library).splitlines():
        if match := re.match(r"\s*Function : (\w+)", line):
            lines = code.setdefault(match[1], []) if match[1].startswith(OURS) else []
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            lines.append(match[1])
    return code


class Kernel:
    """A kernel's name, taken apart, and its machine code."""

    def __init__(self, name: str, code: list[str]) -> None:
        self.name, self.text = name, "\n".join(code)
        self.function, _, rest = name.partition("<")
        self.parameters = rest.rstrip(">").split(", ")
        self.forward = self.function.startswith("forward")
        self.encodes = self.forward and "plain" not in self.parameters
        self.vectors = self.function == "forward_vectors" or "true" in self.parameters
        self.fp64 = "double" in self.parameters

    def count(self, pattern: str) -> int:
        """Instructions whose name begins so."""
        return len(re.findall(rf"\b(?:{pattern})\b", self.text))

    def numbers(self, operation: str) -> int:
        """Numbers that an operation computes: some instructions compute two."""
        return self.count(f"[FD]{operation}") + 2 * self.count(f"[FD]{operation}2")

    def without_base(self) -> str:
        """The kernel that differs in having no base term."""
        return self.name.replace("gathered", "none").replace("dense", "none")


# What the recording of an id may do with memory that threads share, in its order, and a letter for each: a look at the
# record, an exchange within a warp, the atomic minimum, the lock, its release, and any other atomic.
STEPS = {
    r"LDG\S*\.64\.STRONG\S*": "L",
    r"SHFL\S*": "S",
    r"ATOMG?\S*\.MIN\.64\S*": "M",
    r"ATOMG?\S*\.CAS\.STRONG\S*": "C",
    r"ATOMG?\S*\.EXCH\.STRONG\S*": "X",
    r"(?:ATOM|ATOMG|ATOMS|RED|REDG|REDS)\.\S*": "?",
}
READS_IDS = ("find_out_of_range", "mark_keys")


def problems_of_atomics(kernel: Kernel) -> list[str]:
    """Whether ids out of range are recorded as they should; the host's one thread that takes a record is let alone."""
    steps = ""
    for opcode in re.findall(r"^(?:@\S+ )?(\S+)", kernel.text, re.MULTILINE):
        steps += next((letter for pattern, letter in STEPS.items() if re.fullmatch(pattern, opcode)), "")
    if kernel.function == "take_record":
        return []
    if kernel.function in READS_IDS or (kernel.forward and "gathered" in kernel.parameters):
        # What the compiler moves behind the end are the exchanges of warps that are not whole.
        return [] if re.fullmatch(r"(L+S+MC[CL]*X)+S*", steps) else [f"more than one atomic of a warp: {steps}"]
    return [f"atomics: {steps}"] if re.search("[MCX?]", steps) else []


def problems_of(kernel: Kernel, kernels: dict[str, Kernel]) -> list[str]:
    """What the machine code of a kernel should not have, and what it lacks; `kernels` are all of an architecture."""
    problems = []
    divides = kernel.function == "sum_rows"
    fused, multiplied, added = map(kernel.numbers, ("FMA", "MUL", "ADD"))
    if kernel.count("LDL|STL"):
        problems.append("local memory")
    problems += problems_of_atomics(kernel)
    stored = kernel.count(r"STG\.E\.128")
    if kernel.vectors:
        if not stored:
            problems.append("no 128-bit store")
        if "none" not in kernel.parameters and not kernel.count(r"LDG\.E\.128"):
            problems.append("no 128-bit load")
    if len(re.findall(r"\b(?!F2I)\w+\S*\.FTZ", kernel.text)) > (DIVISION["flushing"] if divides else 0):
        problems.append("subnormal numbers are flushed to zero")

    # A row of a gathered table has a second store, for an id that has no row.
    rows = stored // 2 if "gathered" in kernel.parameters else stored
    elements = rows * ELEMENTS[kernel.parameters[0]] if kernel.vectors else 1
    if kernel.encodes and not kernel.fp64:
        most = kernels[kernel.without_base()].numbers("FMA")
        pairs = ELEMENTS[kernel.parameters[0]] // (1 if "halves" in kernel.parameters else 2) if kernel.vectors else 1
        if fused < POLYNOMIALS * pairs:
            problems.append(f"{fused} fused multiply-adds, where the polynomials take {POLYNOMIALS * pairs}")
        if fused > most:
            problems.append(f"{fused} fused multiply-adds, where the encoding alone takes {most}")
    elif fused > (DIVISION["fused"] if divides else 0):
        problems.append(f"{fused} fused multiply-adds")
    if kernel.forward and "gathered" in kernel.parameters and multiplied < elements:
        problems.append(f"{multiplied} multiplications by the scale, of {elements} elements")
    if kernel.encodes and "none" not in kernel.parameters and added < elements:
        problems.append(f"{added} additions of the encoding, of {elements} elements")
    return problems


def problems_of_flags() -> list[str]:
    """What setup.py hands to nvcc: the arithmetic as it is written."""
    flags = json.loads(FLAGS.read_text())
    problems = [f"{flag} is among the flags" for flag in flags if re.search(r"fast.math|ftz|prec-|fmad=true", flag)]
    return problems + ([] if "--fmad=false" in flags else ["--fmad=false is not among the flags"])


def kernels_of(library: str, architecture: str) -> dict[str, Kernel]:
    """Kernels of ours, under the names of their symbols."""
    code = instructions(library, architecture)
    names = readable(list(code)) if code else []
    return {symbol: Kernel(name, code[symbol]) for symbol, name in zip(code, names, strict=True)}


def main(wheel: str) -> int:
    """Run the gate; 1 if a kernel fails it."""
    problems = problems_of_flags()
    registers: dict[str, dict[str, int]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        zipfile.ZipFile(wheel).extractall(folder)
        (library,) = map(str, Path(folder).rglob("libposenc_ext_ops.so"))
        used = list(pool.map(lambda a: resources(library, a), ARCHITECTURES))
        code = list(pool.map(lambda a: kernels_of(library, a), ARCHITECTURES))
    for architecture, kernels, usage in zip(ARCHITECTURES, code, used, strict=True):
        if set(kernels) != set(code[0]) or set(usage) != set(code[0]) or not kernels:
            problems.append(f"sm_{architecture}: kernels are missing")
            continue
        by_name = {kernel.name: kernel for kernel in kernels.values()}
        for symbol, kernel in kernels.items():
            registers[kernel.name][architecture], memory = usage[symbol]
            found = problems_of(kernel, by_name) + ([f"{memory} bytes of stack or local memory"] if memory else [])
            problems += [f"{kernel.name} on sm_{architecture}: {problem}" for problem in found]
    print(f"{'registers of a thread':70}" + "".join(f"{'sm_' + a:>7}" for a in ARCHITECTURES))
    for name in sorted(registers):
        print(f"{name:70}" + "".join(f"{registers[name][a]:7}" for a in ARCHITECTURES if a in registers[name]))
    print(f"{len(registers)} kernels, {sum(name.startswith('forward') for name in registers)} of them forward")
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
