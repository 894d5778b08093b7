"""What the CUDA compiler made of the kernels, read from a built wheel.

For every kernel of ours and every architecture:
    no stack frame (so no spill) and no local memory
    kernels on whole vectors load and store 128 bits at a time
    nothing that flushes subnormal numbers to zero
    fused multiply-adds only where the source writes them, in the polynomials of fp32 sines and cosines: no kernel
    without an encoding has one, those with one have as many as the polynomials take, and a base term adds none
    where a base term is scaled and an encoding is added, a multiplication and an addition for each element
    where ids are looked at, an id out of range is recorded by one atomic of its warp at most: a look without an atomic,
    the search for the warp's first, the atomic, and only behind that the lock, between whose atomics and what it guards
    there are fences; no atomics elsewhere
For sm_90, besides, as they are launched on a device of 132 multiprocessors. bench/in_flight.json, from which the
benchmark estimates, is compared with that, or written by --write:
    kernels that share encodings keep 24 KB of reads in flight on each, and ask for ids before they store
    the waves that blocks come in, rounded up, are at most a tenth more than unrounded; with the tokens of the busiest
    thread, which are few in small calls, a fifth

Kernels of CUB, which sort the ids, are left to its authors. So are the division of scale_grad_by_freq, which brings
instructions of its own into sum_segments, and the division of integers, which converts numbers with .FTZ.

Usage: python .ci/cuda_gate.py WHEEL [--write]
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ARCHITECTURES = ("75", "80", "90", "100", "120")
OURS = "_ZN6posenc4cuda"
ENUMS = {
    "Source": ("gathered", "dense", "none"),
    "cuda::Arrangement": ("interleaved", "halves", "plain"),
    "cuda::Mode": ("shared", "per_token_exact", "per_token_reference"),
    "cuda::Inner": ("along_batch", "along_seq"),
}
# Instructions of one division, at most.
DIVISION = {"fused": 20, "flushing": 8}
# Elements of 16 bytes, and fused multiply-adds of the polynomials of one pair.
ELEMENTS = {"float": 4, "double": 2, "bfloat16": 8, "half": 8}
POLYNOMIALS = 7
# Of an sm_90 device: an H100 or H200.
MULTIPROCESSORS, REGISTERS, WARPS, BLOCKS = 132, 65536, 64, 32
THREADS = 256  # of a block, in all of our kernels
LEAST_IN_FLIGHT = 24 << 10
TOGETHER = 4  # csrc/cuda/forward.h: kRowsTogether
# 16 bits at [8, 2048] x 1024 take 1.16 times the steps: 2048 times four rows for 396 places are 5.17 each. Two rows
# each would take 1.06, with half as much in flight and twice the encodings.
MOST_WAVES, MOST_STEPS = 1.1, 1.2
# [batch, seq] x width of the calls whose launches are looked at.
CALLS = ((32, 512, 512), (8, 2048, 1024), (64, 512, 768), (16, 2048, 4096), (1, 131072, 1024), (1, 65536, 512))
SIZES = {"float": 4, "bfloat16": 2, "half": 2, "double": 8}
IN_FLIGHT = Path(__file__).parent.parent / "bench/in_flight.json"
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
        self.name, self.code, self.text = name, code, "\n".join(code)
        self.function, _, rest = name.partition("<")
        self.parameters = rest.rstrip(">").split(", ")
        self.forward = self.function.startswith("forward")
        self.encodes = self.forward and "plain" not in self.parameters
        self.vectors = self.function in ("forward_vectors", "forward_tokens", "forward_general") or (
            not self.forward and "true" in self.parameters
        )
        self.shares = self.forward and bool({"shared", "along_batch", "along_seq"} & {*self.parameters})
        self.fp64 = "double" in self.parameters

    def count(self, pattern: str) -> int:
        """Instructions whose name begins so."""
        return len(re.findall(rf"\b(?:{pattern})\b", self.text))

    def numbers(self, operation: str) -> int:
        """Numbers that an operation computes: some instructions compute two."""
        return self.count(f"[FD]{operation}") + 2 * self.count(f"[FD]{operation}2")

    def without_base(self) -> str:
        """The kernel that differs in having no base term, and one token at a time."""
        name = re.sub("forward_tokens(.*), along_(?:batch|seq)", r"forward_vectors\1, shared", self.name)
        return name.replace("gathered", "none").replace("dense", "none")

    @property
    def vectors_of_token(self) -> int:
        """Vectors that a thread has of a row."""
        return 2 if "halves" in self.parameters else 1

    @property
    def encodings(self) -> int:
        """How often the code that makes an encoding is there."""
        return self.rows_ahead() // self.vectors_of_token if "along_seq" in self.parameters else 1

    def loops(self) -> list[range]:
        """The instructions of each loop, inner ones first."""
        backward = []
        for at, text in enumerate(self.code):
            if (match := re.search(r"\bBRA\S* .*?(0x[0-9a-f]+)$", text)) and (target := int(match[1], 16) // 16) < at:
                backward.append(range(target, at + 1))
        return sorted(backward, key=len)

    def rows_ahead(self) -> int:
        """Loads of 16 bytes of an innermost loop that are issued, one after the other, before the first is used."""
        most, seen = 0, set[int]()
        for loop in self.loops():
            if seen & set(loop):
                continue
            loads: dict[int, set[str]] = {}  # and the registers that wait for them
            for at in loop:
                waiting = set().union(*loads.values())
                match = re.search(r"LDG\.E\.128\S* (R\d+)", self.code[at])
                operands = self.code[at].split(", ", 1)[1] if match else self.code[at]
                if waiting & used_registers(operands):
                    most, loads = max(most, len(loads)), {}
                if match:
                    first = int(match[1][1:])
                    loads[at] = {f"R{first + i}" for i in range(4)}
            most = max(most, len(loads))
            if any("LDG.E.128" in self.code[at] for at in loop):
                seen |= set(loop)
        return most

    def rows_before_loops(self) -> int:
        """Loads of 16 bytes of a loop before its first store: those of the single tokens of a gradient."""
        for loop in reversed(self.loops()):
            text = [self.code[at] for at in loop]
            if store := next((i for i, line in enumerate(text) if "STG.E.128" in line), 0):
                return sum("LDG.E.128" in line for line in text[:store])
        return 0

    def ids_before_stores(self) -> int:
        """Loads of an id in the loop that loads rows, before its first store."""
        for loop in self.loops():
            text = [self.code[at] for at in loop]
            if any("LDG.E.128" in line for line in text):
                store = next((i for i, line in enumerate(text) if "STG.E.128" in line), 0)
                return sum("LDG.E.64" in line for line in text[:store])
        return 0


def used_registers(text: str) -> set[str]:
    """Those that an instruction names, with the second one of a pair."""
    found = set(re.findall(r"\bR\d+\b", text))
    return found | {f"R{int(number) + 1}" for number in re.findall(r"\bR(\d+)\.64", text)}


# What the recording of an id may do with memory that threads share, in its order, and a letter for each: a look at the
# record, an exchange within a warp, the atomic minimum, the lock, its release, a fence, and any other atomic.
STEPS = {
    r"LDG\S*\.64\.STRONG\S*": "L",
    r"SHFL\S*": "S",
    r"ATOMG?\S*\.MIN\.64\S*": "M",
    r"ATOMG?\S*\.CAS(?:\.64)?\.STRONG\S*": "C",
    r"ATOMG?\S*\.EXCH\.STRONG\S*": "X",
    r"MEMBAR\.SC\.GPU": "F",
    r"(?:ATOM|ATOMG|ATOMS|RED|REDG|REDS)\.\S*": "?",
}
# Behind the lock, and before it is freed, a fence.
RECORDS, TAKES = r"(L+S+MC[CLF]*FLF+X)+S*", r"C+F+CF+X"
READS_IDS = ("find_out_of_range", "mark_keys")


def problems_of_atomics(kernel: Kernel) -> list[str]:
    """Whether ids out of range are recorded, and a record is taken, as they should."""
    steps = ""
    for opcode in re.findall(r"^(?:@\S+ )?(\S+)", kernel.text, re.MULTILINE):
        steps += next((letter for pattern, letter in STEPS.items() if re.fullmatch(pattern, opcode)), "")
    if kernel.function == "take_record":
        return [] if re.fullmatch(TAKES, steps) else [f"taking a record: {steps}"]
    general = kernel.function == "forward_general" or (
        kernel.function == "forward_columns" and "true" in kernel.parameters
    )
    records = {"gathered", "dense"} if general else {"gathered"}  # dense: positions that a table has no row for
    if kernel.function in READS_IDS or (kernel.forward and records & {*kernel.parameters}):
        # What the compiler moves behind the end are the exchanges of warps that are not whole.
        return [] if re.fullmatch(RECORDS, steps) else [f"a record, not by one atomic of a warp and fences: {steps}"]
    return [f"atomics: {steps}"] if re.search("[MCXF?]", steps) else []


def problems_of(kernel: Kernel, kernels: dict[str, Kernel]) -> list[str]:
    """What the machine code of a kernel should not have, and what it lacks; `kernels` are all of an architecture."""
    problems = []
    divides = kernel.function.endswith("sum_segments")
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
        most = kernels[kernel.without_base()].numbers("FMA") * kernel.encodings
        if kernel.function == "forward_tokens":
            most *= 2  # the end of the polynomials, which both precisions have, may be there once for each
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


# ---- launches


class Launch(NamedTuple):
    """A kernel as one call launches it on an sm_90 device."""

    kernel: str
    call: str
    registers: int
    resident: int  # blocks on a multiprocessor
    blocks: int
    waves: float
    rounding: float  # waves and steps, rounded up, over what would be without rounding
    rows_ahead: int  # of a thread, in loads of 16 bytes
    in_flight: int  # bytes on a multiprocessor


def resident_blocks(registers: int) -> int:
    """Blocks on a multiprocessor: registers are given to warps by 256, and warps come by four."""
    warps = REGISTERS // (math.ceil(registers * 32 / 256) * 256) // 4 * 4
    return min(min(warps, WARPS) * 32 // THREADS, BLOCKS)


def shapes_of(calls: list[tuple[int, ...]]) -> list[list[int]]:
    """What csrc/cuda/launch_config.h makes of units, seq, batch, the blocks that a device holds, and rows together."""
    source = Path(__file__).parent / "launch_shapes.cpp"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "shapes"
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        subprocess.run([*compiler, "-std=c++17", "-O1", source, "-o", program], check=True)
        text = "\n".join(" ".join(map(str, call)) for call in calls)
        answer = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout
    return [list(map(int, line.split())) for line in answer.splitlines()]


def launches_of(kernels: dict[str, Kernel], registers: dict[str, int]) -> list[Launch]:
    """Every forward kernel on whole vectors, as each call that it is chosen for launches it."""
    wanted = []
    for name, kernel in sorted(kernels.items()):
        if not kernel.forward or not kernel.vectors:
            continue
        resident = resident_blocks(registers[name])
        for batch, seq, width in CALLS:
            if ("along_seq" in kernel.parameters and batch > 1) or ("along_batch" in kernel.parameters and batch == 1):
                continue
            together = TOGETHER if kernel.shares and batch >= TOGETHER else 1
            units = width * SIZES[kernel.parameters[0]] // 16 // kernel.vectors_of_token
            wanted.append(
                (
                    kernel,
                    f"[{batch}, {seq}] x {width}",
                    resident,
                    (units, seq, batch, resident * MULTIPROCESSORS, together),
                )
            )
    launches = []
    for (kernel, call, resident, (_, seq, batch, places, _)), shape in zip(
        wanted, shapes_of([call for *_, call in wanted]), strict=True
    ):
        threads, y, z, x_blocks, y_blocks, z_blocks, steps = shape
        blocks = x_blocks * y_blocks * z_blocks
        waves = blocks / places
        least = math.ceil(seq / y) * math.ceil(batch / z) * y_blocks / places
        # Of the inner axis.
        along_batch = math.ceil(math.ceil(batch / z) / z_blocks)
        ahead = steps // along_batch if "along_seq" in kernel.parameters else along_batch
        rows = 0 if "none" in kernel.parameters else min(kernel.rows_ahead(), ahead * kernel.vectors_of_token)
        held = min(places, blocks) / MULTIPROCESSORS * threads
        rounding = math.ceil(waves) * steps / max(least, 1)
        launches.append(Launch(kernel.name, call, registers[kernel.name], resident, blocks, round(waves, 3),
                               round(rounding, 3), rows, round(held * rows * 16)))  # fmt: skip
    for name, kernel in sorted(kernels.items()):
        if kernel.function == "sum_segments" and kernel.vectors:
            resident, rows = resident_blocks(registers[name]), kernel.rows_before_loops()
            blocks, held = resident * MULTIPROCESSORS, resident * THREADS * rows * 16
            launches.append(Launch(name, "a full device", registers[name], resident, blocks, 1.0, 1.0, rows, held))
    return launches


def problems_of_launches(launches: list[Launch], kernels: dict[str, Kernel]) -> list[str]:
    """Those that leave the device idle or have too little in flight."""
    problems = []
    for launch in launches:
        kernel, where = kernels[launch.kernel], f"{launch.kernel} at {launch.call}"
        if math.ceil(launch.waves) > MOST_WAVES * launch.waves:
            problems.append(f"{where}: {launch.waves} waves")
        if launch.rounding > MOST_STEPS:
            problems.append(f"{where}: {launch.rounding} times the steps of an even launch")
        if kernel.function == "forward_tokens":
            if launch.in_flight < LEAST_IN_FLIGHT:
                problems.append(f"{where}: {launch.in_flight} bytes of reads in flight, of {LEAST_IN_FLIGHT}")
            if (
                "gathered" in kernel.parameters
                and kernel.ids_before_stores() < launch.rows_ahead // kernel.vectors_of_token
            ):
                problems.append(f"{where}: ids are not asked for before the first store")
    return problems


def problems_of_file(launches: list[Launch]) -> list[str]:
    """Where the benchmark's file promises more than the machine code has."""
    kept = json.loads(IN_FLIGHT.read_text()) if IN_FLIGHT.exists() else []
    found = {(launch.kernel, launch.call): launch for launch in launches}
    return [
        f"{IN_FLIGHT.name}: {entry['kernel']} at {entry['call']} is not so any more (--write)"
        for entry in kept
        if (launch := found.get((entry["kernel"], entry["call"]))) is None
        or launch.in_flight < entry["in_flight"]
        or launch.rounding > entry["rounding"]
    ] + ([] if kept else [f"{IN_FLIGHT.name} is missing (--write)"])


def write_file(launches: list[Launch]) -> None:
    """What the benchmark estimates with: kernels of gathered rows and interleaved columns."""
    kept = [one for one in launches if re.search(r"gathered, interleaved, (shared|along)|^sum_segments", one.kernel)]
    IN_FLIGHT.write_text("[\n" + ",\n".join(json.dumps(one._asdict()) for one in kept) + "\n]\n")


def show_launches(launches: list[Launch]) -> None:
    """The table."""
    print(f"\n{'launches on sm_90, 132 multiprocessors':62}{'call':>22}{'regs':>6}{'blocks':>7}{'waves':>7}"
          f"{'rounding':>10}{'ahead':>7}{'KB in flight':>14}")  # fmt: skip
    for one in launches:
        print(f"{one.kernel:62}{one.call:>22}{one.registers:6}{one.blocks:7}{one.waves:7.2f}{one.rounding:10.3f}"
              f"{one.rows_ahead:7}{one.in_flight / 1024:14.1f}")  # fmt: skip


def main(wheel: str, write: bool = False) -> int:
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
    if not problems or code[ARCHITECTURES.index("90")]:
        by_name = {kernel.name: kernel for kernel in code[ARCHITECTURES.index("90")].values()}
        launches = launches_of(by_name, {name: of["90"] for name, of in registers.items()})
        show_launches(launches)
        if write:
            write_file(launches)
        problems += problems_of_launches(launches, by_name) + problems_of_file(launches)
    print(f"{len(registers)} kernels, {sum(name.startswith('forward') for name in registers)} of them forward")
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], "--write" in sys.argv[2:]))
