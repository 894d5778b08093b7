"""What the CUDA compiler made of the kernels: read from a built wheel, held to csrc/cuda/sass_budget.json.

For every kernel of ours and every architecture: no stack frame (so no spill) and no local memory; in kernels on whole
vectors, 128-bit accesses of global memory; in the storing loop of the forward kernels, no more instructions for an
element than the budget says. Kernels of CUB, which sort the ids, are left to its authors.

Usage: python .ci/cuda_gate.py WHEEL [--write]     --write takes the counts found as the new budget
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

BUDGET = Path("csrc/cuda/sass_budget.json")
ARCHITECTURES = ("75", "80", "90", "100", "120")
ELEMENT_BYTES = {"float": 4, "double": 8, "bfloat16": 2, "float16": 2}
SOURCES = ("gathered", "dense", "none")
COLUMNS = ("interleaved", "halves", "plain")
MODES = ("shared", "token_exact", "token_reference")


def tool(name: str) -> str:
    """A program of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or of a CUDA toolkit."""
    installed = sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/bin/{name}"))
    found = str(installed[-1]) if installed else shutil.which(name)
    if not found:
        raise SystemExit(f"cuda_gate: {name} not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


def run(*command: str, folder: Path | None = None) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def readable(mangled: list[str]) -> dict[str, str]:
    """Mangled names of kernels to names such as forward_vectors<float, gathered, interleaved, shared>."""
    names = {}
    for symbol, text in zip(mangled, run("c++filt", *mangled).splitlines(), strict=True):
        for enum, values in (("Source", SOURCES), ("cuda::Columns", COLUMNS), ("cuda::Mode", MODES)):
            text = re.sub(rf"\(posenc::{enum}\)(\d)", lambda m, v=values: v[int(m[1])], text)
        text = re.sub(r"\([^()]*\)$|^void ", "", text)
        text = text.replace("posenc::cuda::", "").replace("__nv_bfloat16", "bfloat16").replace("__half", "float16")
        names[symbol] = text
    return names


# ---- resources -------------------------------------------------------------------------------------------------------


def resource_problems(library: Path) -> list[str]:
    """Stack frames and local memory of our kernels."""
    problems, seen, architecture, function = [], 0, "", ""
    for line in run(tool("cuobjdump"), "-res-usage", str(library)).splitlines():
        if match := re.search(r"^arch = sm_(\d+)", line):
            architecture = match[1]
        elif match := re.search(r"Function (\S+):", line):
            function = match[1]
        elif (match := re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", line)) and is_ours(function):
            seen += 1
            if int(match[2]) or int(match[3]):
                problems.append(f"{function} on sm_{architecture}: stack {match[2]}, local memory {match[3]} bytes")
    print(f"{seen} kernels read, {len(problems)} with a stack frame or local memory")
    return problems if seen else ["no kernel found in the library"]


def is_ours(symbol: str) -> bool:
    """Whether a kernel is of this project."""
    return symbol.startswith("_ZN6posenc4cuda")


# ---- machine code ----------------------------------------------------------------------------------------------------


def functions(cubin: Path) -> dict[str, list[str]]:
    """Instructions and labels of each kernel of ours."""
    code: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in run(tool("nvdisasm"), "-c", str(cubin)).splitlines():
        if match := re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line):
            lines = code.setdefault(match[1], []) if is_ours(match[1]) else []
        elif match := re.match(r"\s*(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            lines.append(match[1] or match[2])
    return code


def loops(lines: list[str]) -> list[list[str]]:
    """Innermost loops: what lies between a label and a branch back to it."""
    labels, instructions, spans = {}, [], []
    for line in lines:
        if line.startswith(".L_x_"):
            labels[line] = len(instructions)
            continue
        instructions.append(line)
        match = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", line)
        if match and match[1] in labels:
            spans.append((labels[match[1]], len(instructions)))
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [instructions[a:b] for a, b in inner]


def per_element(name: str, lines: list[str]) -> float | None:
    """Instructions for an element in the loop that stores most vectors; None where no loop does."""
    found = [(sum("STG.E.128" in line for line in loop), len(loop)) for loop in loops(lines)]
    most = max((stores for stores, _ in found), default=0)
    if not most:
        return None
    elements = most * 16 / ELEMENT_BYTES[re.search(r"<(\w+)", name)[1]]
    return round(max(length for stores, length in found if stores == most) / elements, 2)


def code_problems(name: str, architecture: str, lines: list[str]) -> list[str]:
    """Local memory, and missing wide accesses."""
    place = f"{name} on sm_{architecture}"
    problems = [f"{place}: {line}" for line in lines if re.search(r"\b(LDL|STL)\b", line)]
    on_vectors = name.startswith("forward_vectors") or ", true>" in name
    wide_store = any(re.search(r"STG\.E\.128", line) for line in lines)
    wide_load = any(re.search(r"LDG\.E\.128", line) for line in lines)
    if on_vectors and not wide_store:
        problems.append(f"{place}: no 128-bit store")
    if on_vectors and ", none, " not in name and not wide_load:
        problems.append(f"{place}: no 128-bit load")
    return problems


def measure(library: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Instructions for an element by kernel and architecture, and what is wrong with the code."""
    counts: dict[str, dict[str, float]] = defaultdict(dict)
    problems: list[str] = []
    seen: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        run(tool("cuobjdump"), "-xelf", "all", str(library.resolve()), folder=Path(folder))
        cubins = sorted(Path(folder).glob("*.cubin"))
        with ThreadPoolExecutor() as pool:
            disassembled = list(pool.map(functions, cubins))
        for cubin, code in zip(cubins, disassembled, strict=True):
            architecture = re.search(r"\.sm_(\d+)\.cubin$", cubin.name)[1]
            names = readable(sorted(code)) if code else {}
            for symbol, name in names.items():
                seen[architecture].add(name)
                problems += code_problems(name, architecture, code[symbol])
                if name.startswith("forward_vectors"):
                    count = per_element(name, code[symbol])
                    if count is None:
                        problems.append(f"{name} on sm_{architecture}: no loop stores vectors")
                    else:
                        counts[name][architecture] = count
    for architecture in ARCHITECTURES:
        print(f"sm_{architecture}: {len(seen[architecture])} kernels")
        if len(seen[architecture]) != max(map(len, seen.values())) or not seen[architecture]:
            problems.append(f"sm_{architecture}: kernels are missing")
    return counts, problems


# ---- the budget ------------------------------------------------------------------------------------------------------


def limit(budget: dict, name: str) -> float:
    """The most instructions for an element that a kernel may ever take, whatever the compiler."""
    for entry in budget["limits"]:
        if re.fullmatch(entry["kernels"], name):
            return entry["instructions_per_element"]
    raise SystemExit(f"cuda_gate: {BUDGET} has no limit for {name}")


def budget_problems(counts: dict[str, dict[str, float]], budget: dict, compiler: str) -> list[str]:
    """Counts over the limits; and, of the compiler that the budget was made with, over the budget and its slack."""
    problems = []
    same = compiler == budget["nvcc"]
    if not same:
        print(f"nvcc {compiler}: held to the limits only, since the budget is of nvcc {budget['nvcc']}")
    for name, by_architecture in sorted(counts.items()):
        for architecture, count in by_architecture.items():
            most = limit(budget, name)
            planned = budget["kernels"].get(name, {}).get(architecture)
            if count > most:
                problems.append(f"{name} on sm_{architecture}: {count} instructions for an element, limit {most}")
            if same and planned is None:
                problems.append(f"{name} on sm_{architecture}: not in the budget; run with --write")
            elif same and count > planned * (1 + budget["slack"]):
                problems.append(f"{name} on sm_{architecture}: {count} instructions for an element, budget {planned}")
    return problems


def print_table(counts: dict[str, dict[str, float]]) -> None:
    """Instructions for an element."""
    print(f"{'instructions for an element of the storing loop':70}" + "".join(f"sm_{a:>4}" for a in ARCHITECTURES))
    for name in sorted(counts):
        print(f"{name:70}" + "".join(f"{counts[name].get(a, float('nan')):7.1f}" for a in ARCHITECTURES))


def nvcc_version() -> str:
    """Major and minor number of the compiler on PATH."""
    nvcc = shutil.which("nvcc")
    return re.search(r"release (\d+\.\d+)", run(nvcc, "--version"))[1] if nvcc else "unknown"


def main(wheel: str, write: bool) -> int:
    """Run the gate; 1 if a kernel fails it."""
    budget = json.loads(BUDGET.read_text())
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        (library,) = Path(folder).rglob("_C*.so")
        problems = resource_problems(library)
        counts, found = measure(library)
    problems += found
    print_table(counts)
    if write:
        budget["nvcc"] = nvcc_version()
        budget["kernels"] = {name: counts[name] for name in sorted(counts)}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
    problems += budget_problems(counts, budget, nvcc_version())
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], "--write" in sys.argv[2:]))
