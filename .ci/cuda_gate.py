"""What the CUDA compiler made of the kernels, read from a built wheel.

For every kernel of ours and every architecture:
    no stack frame (so no spill) and no local memory
    kernels on whole vectors load and store 128 bits at a time
    no arithmetic that flushes subnormal numbers to zero
    fused multiply-adds only where the source writes them: in the polynomials of fp32 sines and cosines, and there they
    are; none where a table is scaled and an encoding is added, where these are a multiplication and an addition

Kernels of CUB, which sort the ids, are left to its authors. So is the division of scale_grad_by_freq, which brings
instructions of its own into sum_rows.

Usage: python .ci/cuda_gate.py WHEEL
"""

from __future__ import annotations

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
DIVISION = {"fused": 20, "flushing": 4}


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


def problems_of(name: str, code: list[str]) -> list[str]:
    """What the machine code of a kernel should not have, and what it lacks."""
    text = "\n".join(code)

    def count(pattern: str) -> int:
        return len(re.findall(rf"\b(?:{pattern})\b", text))

    problems = []
    kernel, _, rest = name.partition("<")
    parameters = rest.rstrip(">").split(", ")
    divides = kernel == "sum_rows"
    forward = kernel.startswith("forward")
    encodes = forward and "plain" not in parameters
    fused, multiplied, added = count("[FD]FMA2?"), count("[FD]MUL2?"), count("[FD]ADD2?")
    if count("LDL|STL"):
        problems.append("local memory")
    if kernel == "forward_vectors" or "true" in parameters:
        if not count(r"STG\.E\.128"):
            problems.append("no 128-bit store")
        if "none" not in parameters and not count(r"LDG\.E\.128"):
            problems.append("no 128-bit load")
    if count(r"[FD](?:ADD|MUL|FMA)2?\S*\.FTZ") > (DIVISION["flushing"] if divides else 0):
        problems.append("subnormal numbers are flushed to zero")
    if encodes and "double" not in parameters:
        if not fused:
            problems.append("no fused multiply-add in an encoding")
    elif fused > (DIVISION["fused"] if divides else 0):
        problems.append(f"{fused} fused multiply-adds")
    if forward and "gathered" in parameters and not multiplied:
        problems.append("no multiplication by the scale")
    if encodes and "none" not in parameters and not added:
        problems.append("no addition of the encoding")
    return problems


def main(wheel: str) -> int:
    """Run the gate; 1 if a kernel fails it."""
    problems = []
    registers: dict[str, dict[str, int]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        zipfile.ZipFile(wheel).extractall(folder)
        (library,) = map(str, Path(folder).rglob("libposenc_ext_ops.so"))
        used = list(pool.map(lambda a: resources(library, a), ARCHITECTURES))
        code = list(pool.map(lambda a: instructions(library, a), ARCHITECTURES))
    symbols = sorted(code[0])
    names = dict(zip(symbols, readable(symbols), strict=True)) if symbols else {}
    for architecture, of_kernels, usage in zip(ARCHITECTURES, code, used, strict=True):
        if set(of_kernels) != set(names) or set(usage) != set(names) or not names:
            problems.append(f"sm_{architecture}: kernels are missing")
            continue
        for symbol, name in names.items():
            registers[name][architecture], memory = usage[symbol]
            found = problems_of(name, of_kernels[symbol]) + (
                [f"{memory} bytes of stack or local memory"] if memory else []
            )
            problems += [f"{name} on sm_{architecture}: {problem}" for problem in found]
    print(f"{'registers of a thread':70}" + "".join(f"{'sm_' + a:>7}" for a in ARCHITECTURES))
    for name in sorted(registers):
        print(f"{name:70}" + "".join(f"{registers[name][a]:7}" for a in ARCHITECTURES if a in registers[name]))
    print(f"{len(names)} kernels, {sum(name.startswith('forward') for name in names.values())} of them forward")
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
