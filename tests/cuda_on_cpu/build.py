"""Build the check programs from the kernels' source, compiled by g++, or from their PTX, translated to C++.

Each object is compiled once: the name of its file is a hash of the command and, for translated PTX, of the text. So two
architectures share the kernels whose PTX is the same.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from . import ptx_to_cpp

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"

# Of csrc/cuda: what the checks of the kernels do without.
NOT_KERNELS = {"runtime.cu"}
# Compiled once for each element type, as in setup.py.
FORWARD_KERNELS = "forward_kernels.cu"
# What `checks --two-types` and `--few` ask for: sanitizers see no more in the kernels of other element types.
TWO_TYPES = ("float32", "bfloat16")

# Of every file that the shim is included in. Compiled beforehand, since they take longer than most of those files.
SHIM_HEADERS = [
    "cuda_shim.h",
    "cuda_bf16.h",
    "cuda_fp16.h",
    "functional",
    "map",
    "mutex",
    "sstream",
    "string",
    "thread",
]

SANITIZERS = {
    "plain": [],
    # Every access to memory calls access_checks.cpp.
    "watched": [
        "-fsanitize=kernel-address",
        "--param",
        "asan-instrumentation-with-call-threshold=0",
        "--param",
        "asan-stack=0",
        "--param",
        "asan-globals=0",
        "-U__SANITIZE_ADDRESS__",
    ],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread", "--param", "tsan-distinguish-volatile=1"],
}
# -O1 and little debug information, because compiling takes longer than running.
HOST_FLAGS = ["-x", "c++", "-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing"]
# The warnings turned off are about NVIDIA's headers and pragmas.
SHIM_FLAGS = ["-DPOSENC_CUDA_ON_CPU", "-Wall", "-Werror", "-Wno-unknown-pragmas",
              "-Wno-class-memaccess", "-Wno-maybe-uninitialized", "-Wno-unused-variable"]  # fmt: skip
NVCC_FLAGS = json.loads((CSRC / "cuda/nvcc_flags.json").read_text()) if CSRC.exists() else []


class BuildError(Exception):
    """A compiler failed; the text is its command and its output."""


def run(command: Sequence[str | Path], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)


def compile_or_raise(command: Sequence[str | Path]) -> None:
    result = run(command)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


def nvcc() -> str | None:
    """The CUDA compiler, from CUDA_HOME or else from PATH."""
    home = os.environ.get("CUDA_HOME")
    candidate = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    return candidate or shutil.which("nvcc")


def gxx() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


@functools.cache
def cuda_include() -> Path:
    """The folder of the toolkit's headers, as nvcc reports it."""
    report = run([nvcc() or "nvcc", "--dryrun", "-x", "cu", os.devnull]).stderr
    top = re.search(r"^#\$ TOP=(.*)$", report, re.M)
    if not top:
        raise BuildError(f"nvcc --dryrun does not say where it is:\n{report}")
    return Path(top[1].strip()) / "include"


@functools.cache
def torch_flags() -> tuple[str, ...]:
    """For what is written against torch's stable ABI, as setup.py compiles it."""
    setup = (ROOT / "setup.py").read_text()
    target = re.search(r'^TORCH_TARGET = "(\w+)"', setup, re.M)
    package = importlib.util.find_spec("torch")
    if not target or not package or not package.origin:
        raise BuildError("no torch, or no TORCH_TARGET in setup.py")
    return (f"-DTORCH_TARGET_VERSION={target[1]}", "-isystem", str(Path(package.origin).parent / "include"))


@functools.cache
def fma_flags() -> tuple[str, ...]:
    """g++ flags for this machine's FMA instruction. Results are the same without it, only slower."""
    cpu = Path("/proc/cpuinfo")
    return ("-mfma",) if cpu.exists() and re.search(r"^flags.*\bfma\b", cpu.read_text(), re.M) else ()


class Unit(NamedTuple):
    """A source file, and the element type to compile it for; "" for a file that is compiled once for all of them."""

    path: Path
    dtype: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.stem}_{self.dtype}" if self.dtype else self.path.stem

    @property
    def flags(self) -> list[str]:
        return [f"-DPOSENC_DTYPE={self.dtype}"] if self.dtype else []


@functools.cache
def element_types() -> tuple[str, ...]:
    """Those that setup.py compiles the forward kernels for, in its order."""
    listed = re.search(r"^ELEMENT_TYPES = (\(.*?\))", (ROOT / "setup.py").read_text(), re.M)
    if not listed:
        raise BuildError("setup.py has no ELEMENT_TYPES")
    types: tuple[str, ...] = ast.literal_eval(listed[1])
    return types


def kernel_units(csrc: Path = CSRC, dtypes: Sequence[str] | None = None) -> list[Unit]:
    """The files that hold kernels and their launchers, slowest to compile first."""
    sources = sorted(path for path in (csrc / "cuda").glob("*.cu") if path.name not in NOT_KERNELS)
    forward = [Unit(path, t) for path in sources if path.name == FORWARD_KERNELS for t in dtypes or element_types()]
    return forward + [Unit(path) for path in sources if path.name != FORWARD_KERNELS]


def includes(csrc: Path = CSRC) -> list[str | Path]:
    return [f"-I{HERE}", f"-I{csrc}", "-isystem", cuda_include()]


class Builder:
    """Builds objects and programs in one folder, several at a time."""

    def __init__(self, folder: Path, workers: int | None = None) -> None:
        self.folder = folder
        self.workers = workers or os.cpu_count() or 1
        self.made: dict[str, futures.Future[Path]] = {}
        self.lock = threading.Lock()
        self.pool = futures.ThreadPoolExecutor(self.workers)
        self.linkers = futures.ThreadPoolExecutor(self.workers)  # that wait for the objects of the other pool

    def later(self, key: str, make: Callable[[], Path]) -> futures.Future[Path]:
        """The result of `make`, which a worker runs once for each key."""
        with self.lock:
            if key not in self.made:
                self.made[key] = self.pool.submit(make)
            return self.made[key]

    def ahead(self, program: Callable[[], Path]) -> futures.Future[Path]:
        """A program that will be wanted."""
        return self.linkers.submit(program)

    def close(self) -> None:
        """Cancel the jobs that have not started."""
        self.linkers.shutdown(wait=False, cancel_futures=True)
        self.pool.shutdown(cancel_futures=True)

    def prefetch(self, *wanted: Callable[[], object]) -> None:
        """Start building what is `wanted`, in this order, before it is used. An error is raised again at the use."""

        def ask() -> None:
            for want in wanted:
                with contextlib.suppress(BuildError, ptx_to_cpp.TranslationError, RuntimeError, futures.CancelledError):
                    want()

        threading.Thread(target=ask, daemon=True).start()

    def object(
        self,
        source: Path,
        flags: Iterable[str | Path],
        text: str | None = None,
        after: futures.Future[Path] | None = None,
    ) -> futures.Future[Path]:
        """The object of a source file. If `text` is given, the file is written first; `after`: asked for before it."""
        command = [gxx() or "g++", *HOST_FLAGS, *map(str, flags), "-c", str(source)]
        key = hashlib.sha256("\0".join(command).encode()).hexdigest()[:20]
        target = self.folder / f"{source.stem}-{key}.o"

        def make() -> Path:
            if after is not None:
                after.result()  # began before this one
            if text is not None:
                source.write_text(text)
            compile_or_raise([*command, "-o", target])
            return target

        return self.later(key, make)

    # -- parts of every program

    def host_objects(self) -> list[futures.Future[Path]]:
        """The checks, and the CPU backend that they compare the kernels with."""
        names = ("checks", "forward_checks", "backward_checks", "positions_checks")
        checks = [HERE / f"{name}.cpp" for name in names]
        return [*self.reference_objects(), *[self.object(path, includes()) for path in checks]]

    def reference_objects(self) -> list[futures.Future[Path]]:
        """The CPU backend with one instruction set, since all have the same bits, and the runtime."""
        shared = [CSRC / name for name in ("frequency.cpp", "segments.cpp", "errors.cpp")]
        kernels = CSRC / "cpu/kernels/baseline.cpp"
        reference = [kernels, *sorted((CSRC / "cpu").glob("*.cpp")), *shared]  # the slowest first
        flags = ["-DPOSENC_BASELINE_ONLY", *fma_flags(), *includes()]
        return [*[self.object(path, flags) for path in reference], self.runtime_object()]

    def runtime_object(self) -> futures.Future[Path]:
        """The CUDA runtime without a device."""
        return self.object(HERE / "fake_cuda.cpp", includes())

    # -- kernels from their source

    def shim_object(self, unit: Unit, mode: str, csrc: Path = CSRC, from_ptx: bool = False) -> Any:
        only_declared = ["-DPOSENC_KERNELS_FROM_PTX"] if from_ptx else []
        header = self.shim_header(mode)
        flags = [*SHIM_FLAGS, *fma_flags(), *SANITIZERS[mode], *only_declared, *unit.flags, *includes(csrc)]
        return self.object(unit.path, ["-include", self.folder / f"shim-{mode}.h", *flags], after=header)

    def shim_header(self, mode: str) -> futures.Future[Path]:
        """The headers before every file, compiled. g++ takes them for the header that they are named after."""
        header = self.folder / f"shim-{mode}.h"
        target = header.with_suffix(".h.gch")
        flags = [*HOST_FLAGS, "-x", "c++-header", *SHIM_FLAGS, *fma_flags(), *SANITIZERS[mode], *includes()]

        def make() -> Path:
            header.write_text("".join(f"#include <{name}>\n" for name in SHIM_HEADERS))
            compile_or_raise([gxx() or "g++", *flags, "-c", header, "-o", target])
            return target

        return self.later(f"header {mode}", make)

    def kernels_from_source(self, mode: str, units: Sequence[Unit] | None = None) -> list[Any]:
        return [self.shim_object(unit, mode) for unit in units or kernel_units()]

    # -- the host half

    def host_units(self) -> list[Unit]:
        """Of csrc: all that runs on the host around the kernels, and the kernels of one element type."""
        return [*kernel_units(dtypes=("float32",)), Unit(CSRC / "cuda/runtime.cu"),
                *[Unit(path) for path in sorted((CSRC / "torch").glob("*.cpp"))]]  # fmt: skip

    def host_unit(self, unit: Unit, csrc: Path = CSRC) -> futures.Future[Path]:
        unit = unit._replace(path=csrc / unit.path.relative_to(CSRC))
        if unit.path.suffix == ".cu":
            return self.shim_object(unit, "watched", csrc)
        return self.object(unit.path, [*SANITIZERS["watched"], *torch_flags(), *includes(csrc)])

    def host_check_objects(self) -> list[Any]:
        """The checks, torch's stand-in, and what they share with other programs."""
        with_torch = [HERE / name for name in ("host_checks.cpp", "fake_torch.cpp")]
        return [*[self.object(path, [*torch_flags(), *includes()]) for path in with_torch],
                self.shim_object(Unit(HERE / "access_checks.cpp"), "plain"), *self.reference_objects()]  # fmt: skip

    def host_program(self, name: str = "host", units: Sequence[Any] | None = None) -> Path:
        objects = units or [self.host_unit(unit) for unit in self.host_units()]
        return self.link(name, [*objects, *self.host_check_objects()], "plain", partial=True)

    def contention_program(self, mode: str, csrc: Path = CSRC, name: str = "") -> Path:
        """Many threads at one record: they take turns at every access to memory ("contention"), or under TSan."""
        checks, runtime = Unit(HERE / "contention_checks.cpp"), self.runtime_object()
        if mode == "memory order":
            return self.link(name or mode, [self.shim_object(checks, "tsan", csrc), runtime], "tsan", partial=True)
        objects = [self.shim_object(checks, "watched", csrc), runtime]
        return self.link(name or mode, [*objects, self.shim_object(Unit(HERE / "access_checks.cpp"), "plain")], "plain",
                         partial=True)  # fmt: skip

    # -- kernels from PTX

    def ptx(self, unit: Unit, arch: int) -> futures.Future[Path]:
        target = self.folder / f"{unit.name}-{arch}.ptx"

        def make() -> Path:
            compile_or_raise([nvcc() or "nvcc", *NVCC_FLAGS, "-ptx", f"-arch=compute_{arch}", f"-I{CSRC}", f"-I{HERE}",
                              *unit.flags, unit.path, "-o", target])  # fmt: skip
            return target

        return self.later(f"ptx {unit.name} {arch}", make)

    def translated_objects(self, ptx: str, name: str) -> list[futures.Future[Path]]:
        """The kernels of one PTX file, translated, six to an object."""
        kernels = list(ptx_to_cpp.translate(ptx).values())
        groups = [kernels[i : i + 6] for i in range(0, len(kernels), 6)]
        return [self.translated_object("\n".join(group), name) for group in groups]

    def translated_object(self, functions: str, name: str) -> futures.Future[Path]:
        # Without line numbers in the comments, so that equal code is equal text.
        text = ptx_to_cpp.PRELUDE + re.sub(r"  // \d+: ", "  // ", functions)
        source = self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.cpp"
        return self.object(source, ["-w", *fma_flags(), f"-I{HERE}"], text)

    def kernels_from_ptx(self, arch: int, mode: str, units: Sequence[Unit] | None = None) -> list[Any]:
        """The translated kernels, what they call (ptx_runtime.cpp), and the launchers."""
        units = units or kernel_units()
        launchers = [self.shim_object(unit, mode, from_ptx=True) for unit in units]
        runtime = self.shim_object(Unit(HERE / "ptx_runtime.cpp"), mode)
        texts = [self.ptx(unit, arch) for unit in units]
        translated = [part for unit, text in zip(units, texts, strict=True)
                      for part in self.translated_objects(text.result().read_text(), unit.name)]  # fmt: skip
        return [*launchers, runtime, *translated]

    # -- programs

    def link(self, name: str, objects: Iterable[Any], mode: str, partial: bool = False) -> Path:
        """A program. A partial one may lack kernels, as long as it does not call them."""
        target = self.folder / name
        if target.exists():
            return target
        flags = ["-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"] if partial else []
        flags += ["-rdynamic"]  # torch's getter of streams is looked up by name
        paths = [part if isinstance(part, Path) else part.result() for part in objects]
        compile_or_raise([gxx() or "g++", *SANITIZERS[mode], *flags, *paths, "-o", target])
        return target

    def source_program(self, mode: str, units: Sequence[Unit] | None = None) -> Path:
        objects = [*self.kernels_from_source(mode, units), *self.host_objects()]
        return self.link(f"source-{mode}", objects, mode, partial=units is not None)

    def ptx_program(self, arch: int, mode: str, units: Sequence[Unit] | None = None) -> Path:
        objects = [*self.kernels_from_ptx(arch, mode, units), *self.host_objects()]
        return self.link(f"ptx-{arch}-{mode}", objects, mode, partial=units is not None)

    def sample_objects(self, mode: str, arch: int | None = None) -> list[Any]:
        kernels = Unit(HERE / "sample_kernels.cu")
        checks = self.shim_object(Unit(HERE / "sample_checks.cpp"), mode, from_ptx=True)
        if arch is None:
            return [checks, self.shim_object(kernels, mode), self.runtime_object()]
        runtime = self.shim_object(Unit(HERE / "ptx_runtime.cpp"), mode)
        return [
            checks,
            runtime,
            self.runtime_object(),
            *self.translated_objects(self.ptx(kernels, arch).result().read_text(), "samples"),
        ]

    def sample_program(self, mode: str, arch: int | None = None) -> Path:
        return self.link(f"samples-{arch or 'source'}-{mode}", self.sample_objects(mode, arch), mode)


def environment(**changes: str) -> dict[str, str]:
    """The environment of a check program: sanitizers stop it at their first report."""
    sanitizers = {
        "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
    }
    return {**os.environ, **sanitizers, **changes}


def run_program(program: Path, *arguments: str, seed: int = 0, timeout: float = 240) -> tuple[int, str]:
    """Exit status and all output; a program that runs longer than `timeout` seconds has failed."""
    try:
        result = run([program, *arguments], env=environment(CUDA_ON_CPU_SEED=str(seed)), timeout=timeout)
    except subprocess.TimeoutExpired:
        return -1, f"still running after {timeout} seconds"
    return result.returncode, result.stdout + result.stderr
