"""Change one instruction of the kernels' PTX at a time, and see whether the checks notice.

    cd tests && python -m cuda_on_cpu.mutate [--seconds 300] [--seed 0] [--arch 80] [--file backward]

Prints a line for each mutant that survives all checks, and why, where a rule says so:

    same machine code    ptxas makes the same of the mutant and of the original
    never reached        a trap in the instruction's place survives too: no call of the checks comes there

What no rule explains is equivalent to the original for another reason, or shows a check that is missing. README.md
tells what was found. With --file, the kernels of other sources are compiled by g++, which takes a fraction of the time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from . import build, ptx_to_cpp

# Opcode, and what it is turned into.
SWAPS = [
    (r"\badd\.s", "sub.s"),
    (r"\bsub\.s", "add.s"),
    (r"\badd\.rn", "sub.rn"),
    (r"\bsub\.rn", "add.rn"),
    (r"\bmul\.rn", "add.rn"),
    (r"\bmul\.hi", "mul.lo"),
    (r"\bmul\.lo", "mul.hi"),
    (r"\bmad\.lo", "mad.hi"),
    (r"\bsetp\.lt", "setp.le"),
    (r"\bsetp\.le", "setp.lt"),
    (r"\bsetp\.gt", "setp.ge"),
    (r"\bsetp\.ge", "setp.gt"),
    (r"\bsetp\.eq", "setp.ne"),
    (r"\bsetp\.ne", "setp.eq"),
    (r"\band\.b", "or.b"),
    (r"\bor\.b", "and.b"),
    (r"\bxor\.b", "or.b"),
    (r"\band\.pred", "or.pred"),
    (r"\bor\.pred", "and.pred"),
    (r"\bshl\.b", "shr.u"),
    (r"\bshr\.u", "shr.s"),
    (r"\bshr\.u", "shl.b"),
    (r"\bmin\.", "max."),
    (r"\bmax\.", "min."),
]


@dataclasses.dataclass
class Mutant:
    source: str  # name of the unit
    kernel: str
    line: int
    before: str
    after: str


def changed_instructions(text: str) -> Iterator[str]:
    """Every way to change one instruction that is still PTX."""
    for pattern, replacement in SWAPS:
        if re.search(pattern, text):
            yield re.sub(pattern, replacement, text, count=1)
    match = re.fullmatch(r"((?:@!?%p\d+\s+)?[\w.:]+)\s+(.*)", text)
    if not match:
        return
    operands = ptx_to_cpp.split_operands(match[2])
    if re.search(r"\b(sub|shl|shr|selp|div|rem)\.", match[1]) and len(operands) >= 3 and operands[1] != operands[2]:
        yield f"{match[1]} {', '.join([operands[0], operands[2], operands[1], *operands[3:]])}"
    # A constant off by one. Those of branches and of parameters' offsets say nothing about arithmetic.
    if operands and re.fullmatch(r"-?\d+", operands[-1]) and not match[1].startswith("mov.b64"):
        yield f"{match[1]} {', '.join([*operands[:-1], str(int(operands[-1]) + 1)])}"
    if match[1].startswith("@"):
        yield text.replace("@!", "@", 1) if text.startswith("@!") else text.replace("@", "@!", 1)


def mutants_of(source: str, ptx: str) -> Iterator[Mutant]:
    for kernel in ptx_to_cpp.read_kernels(ptx):
        for statement in kernel.statements:
            if statement.text.startswith(".") or statement.text.endswith(":"):
                continue
            for after in changed_instructions(statement.text):
                yield Mutant(source, kernel.name, statement.line, statement.text, after)


class Mutation:
    """Original objects, and the text that mutants are made from."""

    def __init__(self, folder: Path, arch: int, only: str, workers: int) -> None:
        self.builder = build.Builder(folder, workers)
        self.arch = arch
        self.ptx = {}
        self.codes: dict[str, bytes] = {}
        self.lock = threading.Lock()
        units = [unit for unit in build.kernel_units() if only in unit.name]
        for unit in units:
            text = self.builder.ptx(unit, arch).result().read_text()
            if ".entry" in text:
                self.ptx[unit.name] = text
        self.kernels = {name: {kernel.name: kernel for kernel in ptx_to_cpp.read_kernels(text)}
                        for name, text in self.ptx.items()}  # fmt: skip
        self.modes = ("plain", "asan")
        self.originals = {}
        for mode in self.modes:
            others = [unit for unit in build.kernel_units() if unit not in units]
            parts = [*self.builder.kernels_from_ptx(arch, mode, units), *self.builder.host_objects()]
            parts += [self.builder.shim_object(unit, "plain") for unit in others]  # which no check of a mutant runs
            self.originals[mode] = [part.result() for part in parts]

    def mutants(self) -> list[Mutant]:
        return [mutant for name, text in self.ptx.items() for mutant in mutants_of(name, text)]

    def check(self, mutant: Mutant, number: int) -> str:
        """Who noticed the mutant: "plain", "asan", or "" for nobody; "invalid" if it does not compile."""
        original = self.kernels[mutant.source][mutant.kernel]
        statements = [
            dataclasses.replace(s, text=mutant.after) if (s.line, s.text) == (mutant.line, mutant.before) else s
            for s in original.statements
        ]
        kernel = dataclasses.replace(original, statements=statements)
        source = self.builder.folder / f"mutant-{number}.cpp"
        target, program = source.with_suffix(".o"), source.with_suffix("")
        try:
            source.write_text(ptx_to_cpp.PRELUDE + ptx_to_cpp.KernelTranslator(kernel).translate())
            flags = [*build.HOST_FLAGS, "-w", *build.fma_flags(), f"-I{build.HERE}"]
            build.compile_or_raise([build.gxx() or "g++", *flags, "-c", source, "-o", target])
            # The first definition of a kernel is the one that counts.
            first = ["-Wl,--allow-multiple-definition", target]
            for mode in self.modes:
                command = [build.gxx() or "g++", *build.SANITIZERS[mode], *first, *self.originals[mode], "-o", program]
                build.compile_or_raise(command)
                for group in groups_for(mutant):
                    status, _ = build.run_program(program, "--stop", "--only", group, timeout=60)
                    if status != 0:
                        return mode
            return ""
        except (build.BuildError, ptx_to_cpp.TranslationError):
            return "invalid"
        finally:
            for path in (source, target, program):
                path.unlink(missing_ok=True)

    def why(self, mutant: Mutant, number: int) -> str:
        """Which rule explains that a mutant survived; "" if none does, "invalid" if ptxas does not take it."""
        try:
            code = self.machine_code(mutant, number)
        except build.BuildError:
            return "invalid"
        if code == self.machine_code(dataclasses.replace(mutant, after=mutant.before), 0):
            return "same machine code"
        if self.check(dataclasses.replace(mutant, after="trap"), number) == "":
            return "never reached"
        return ""

    def machine_code(self, mutant: Mutant, number: int) -> bytes:
        """What ptxas makes of the mutant's kernel."""
        original = mutant.before == mutant.after
        with self.lock:
            if original and mutant.kernel in self.codes:
                return self.codes[mutant.kernel]
        lines = self.ptx[mutant.source].splitlines()
        line = lines[mutant.line - 1]
        assert " ".join(line.split()).endswith(mutant.before + ";"), line
        lines[mutant.line - 1] = line[: line.index(mutant.before.split()[0])] + mutant.after + ";"
        source = self.builder.folder / f"mutant-{number}-{mutant.kernel[-40:]}-{original}.ptx"
        target = source.with_suffix(".cubin")
        source.write_text("\n".join(lines))
        ptxas = Path(build.nvcc() or "nvcc").parent / "ptxas"
        build.compile_or_raise([ptxas, f"-arch=sm_{self.arch}", "--entry", mutant.kernel, source, "-o", target])
        code = target.read_bytes()
        source.unlink()
        target.unlink()
        with self.lock:
            if original:
                self.codes[mutant.kernel] = code
        return code


def groups_for(mutant: Mutant) -> list[str]:
    if mutant.source.startswith("forward"):
        return ["forward"]
    of_bounds = ["bounds", "forward: positions out of range"]
    return {"backward": ["backward"], "bounds": of_bounds}.get(mutant.source, [""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="start no mutant after this time")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--arch", type=int, default=80)
    parser.add_argument("--file", default="", help="only sources with this in their name")
    parser.add_argument("--workers", type=int, default=0, help="0: one for each core")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mutation = Mutation(Path(folder), arguments.arch, arguments.file, arguments.workers)
        mutants = mutation.mutants()
        random.Random(arguments.seed).shuffle(mutants)
        print(f"{len(mutants)} possible mutants of compute_{arguments.arch}", flush=True)
        end = time.monotonic() + arguments.seconds
        results: Counter[str] = Counter()
        reasons: Counter[str] = Counter()

        def try_one(number: int) -> None:
            if time.monotonic() > end:
                return
            mutant = mutants[number]
            noticed = mutation.check(mutant, number)
            why = mutation.why(mutant, number) if noticed == "" else ""
            results["invalid" if why == "invalid" else noticed] += 1
            if noticed == "" and why != "invalid":
                reasons[why or "no rule"] += 1
                kernel = build.run(["c++filt", mutant.kernel]).stdout.strip() or mutant.kernel
                place = f"{mutant.source}-{arguments.arch}.ptx:{mutant.line}"
                print(f"survived ({why or 'no rule says why'}): {place} {kernel}", flush=True)
                print(f"    {mutant.before}\n    {mutant.after}", flush=True)

        workers = arguments.workers or mutation.builder.workers
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(try_one, range(len(mutants))))
        tried = results["plain"] + results["asan"] + results[""]
        print(f"{tried} tried: {results['plain']} caught by values, {results['asan']} by ASan or UBSan alone, "
              f"{results['']} survived ({results['invalid']} more were not valid PTX)")  # fmt: skip
        print("of those that survived:", ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none")


if __name__ == "__main__":
    main()
