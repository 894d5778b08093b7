"""Audits of a built wheel: torch's stable ABI, glibc, linked libraries, compiler flags, place of wide vectors.

Usage: python .ci/audit.py WHEEL
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Newest symbol versions that torch's own manylinux_2_28 wheels may use.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
MAY_LINK = {
    "libtorch_cpu.so",
    "libc10.so",
    "libstdc++.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "ld-linux-x86-64.so.2",
}
MUST_HOLD = ("posenc_ext/py.typed", "posenc_ext/_C.pyi", "posenc_ext/bench/__main__.py")
FORBIDDEN_FLAGS = ("-ffast-math", "-Ofast", "--use_fast_math", "-use_fast_math", "-march=native", "-fopenmp")


def run(*command: str) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def version(text: str) -> tuple[int, ...]:
    """A version number that can be compared."""
    return tuple(int(part) for part in text.split("."))


def check_stable_abi(library: Path) -> list[str]:
    """Everything the library takes from torch is in its stable C interface."""
    result = subprocess.run(["torch-abi-audit", "--check", "torch", str(library)], capture_output=True, text=True)
    print(result.stdout.strip())
    return [] if result.returncode == 0 else [f"torch-abi-audit failed: {result.stderr.strip()}"]


def check_symbol_versions(library: Path, manylinux: bool) -> list[str]:
    """No newer libstdc++ than torch asks for; nor glibc, in a wheel that promises to run elsewhere.

    A wheel tagged plain linux was built for the machine it was built on, whose glibc it may use.
    """
    problems = []
    needed = run("readelf", "--version-info", "--wide", str(library))
    found = re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)", needed)
    newest: dict[str, tuple[int, ...]] = {}
    for family, number in found:
        newest[family] = max(newest.get(family, ()), version(number))
    for family, number in newest.items():
        print(f"{family} up to {'.'.join(map(str, number))}")
        if number > NEWEST[family] and (manylinux or family != "GLIBC"):
            problems.append(f"{family} {number} is newer than {NEWEST[family]}")
    return problems


def check_linked(library: Path) -> list[str]:
    """Nothing but torch and the system's C and C++ libraries; no OpenMP run time above all."""
    linked = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", run("readelf", "--dynamic", "--wide", str(library))))
    print("links", ", ".join(sorted(linked)))
    return [f"links {name}" for name in sorted(linked - MAY_LINK)]


def check_vectors(library: Path) -> list[str]:
    """AVX registers only inside the kernels that run-time dispatch reaches."""
    problems = set()
    function = ""
    for line in run("objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(library)).splitlines():
        if line.endswith(">:"):
            function = line[line.index("<") + 1 : -2]
        elif re.search(r"%[yz]mm\d", line) and "x86_64_v" not in function:
            problems.add(f"wide vectors in {function}")
    return sorted(problems)


def check_flags() -> list[str]:
    """No flag that lets the compiler change results, or that builds for this machine alone."""
    text = Path("setup.py").read_text()
    return [f"setup.py names {flag}" for flag in FORBIDDEN_FLAGS if flag in text]


def main(wheel: str) -> int:
    """Run every audit; 1 if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        names = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
        print(*names, sep="\n")
        (library,) = Path(folder).rglob("_C*.so")
        problems = check_flags()
        for check in (check_stable_abi, check_linked, check_vectors):
            problems += check(library)
        problems += check_symbol_versions(library, "manylinux" in wheel)
        problems += [f"the wheel lacks {name}" for name in MUST_HOLD if name not in names]
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
