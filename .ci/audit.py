"""Audits of a built wheel: torch's stable ABI, glibc, links and exports, compiler flags, place of wide vectors.

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
OPS, MODULE = "libposenc_ext_ops.so", "_C*.so"
MAY_LINK = {
    OPS,
    "libtorch_cpu.so",
    "libc10.so",
    "libstdc++.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "ld-linux-x86-64.so.2",
}
MUST_HOLD = (f"posenc_ext/{OPS}", "posenc_ext/py.typed", "posenc_ext/_C.pyi", "posenc_ext/bench/__main__.py")
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


def check_symbols(ops: Path, module: Path) -> list[str]:
    """The ops know no Python and export no more than the module takes; the module has nothing of theirs within."""
    taken = set(run("nm", "--dynamic", "--undefined-only", "--format=just-symbols", str(module)).split())
    given = set(run("nm", "--dynamic", "--defined-only", "--format=just-symbols", str(ops)).split())
    needed = set(run("nm", "--dynamic", "--undefined-only", "--format=just-symbols", str(ops)).split())
    inside = set(re.findall(r"posenc::(?:cpu|cuda)::\w+", run("nm", "--demangle", "--defined-only", str(module))))
    exported = sorted(name for name in given - taken if "posenc" in name and not name.startswith("posenc_ext_"))
    print(f"the ops export {len(given)} symbols, of which the module takes {len(given & taken)}")
    return [
        *(f"the ops need {name} of Python" for name in sorted(needed) if re.match("_?Py", name)),
        *(f"the ops export {name}, which the module does not take" for name in exported),
        *(f"the module has {name} of its own" for name in sorted(inside)),
    ]


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
        problems = check_flags()
        libraries = {name: next(Path(folder, "posenc_ext").glob(name)) for name in (OPS, MODULE)}
        for library in libraries.values():
            problems += check_linked(library) + check_vectors(library)
            problems += check_symbol_versions(library, "manylinux" in wheel)
        problems += check_stable_abi(libraries[OPS]) + check_symbols(*libraries.values())
        problems += [f"the wheel lacks {name}" for name in MUST_HOLD if name not in names]
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
