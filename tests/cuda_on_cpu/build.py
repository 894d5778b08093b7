"""Build the check programs: the kernels' source under g++, or nvcc's PTX of them translated to C++.

Objects that differ in nothing are compiled once: what is written here is keyed by the command and the text it compiles,
so the PTX of two architectures shares the kernels that came out the same.
"""

from __future__ import annotations

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
CSRC = HERE.parent.parent / "csrc"

# Of csrc/cuda: what the checks of the kernels do without.
NOT_KERNELS = {"runtime.cu"}
# Compiled once for each element type.
FORWARD_KERNELS = "forward_kernels.cu"
ELEMENT_TYPES = ("float32", "bfloat16", "float64", "float16")
# TSan knows some thousand threads at a time, and is slow at them: `checks --few` asks for these kernels alone.
TSAN_TYPES = ("float32", "bfloat16")

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
# -O1 and little debug information: most of the time goes into compiling.
HOST_FLAGS = ["-x", "c++", "-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing"]
# As nvcc does it with its runtime, the shim is included before a file. The warnings left out are about NVIDIA's headers
# and pragmas.
SHIM_FLAGS = ["-include", "cuda_shim.h", "-DPOSENC_CUDA_ON_CPU", "-Wall", "-Werror", "-Wno-unknown-pragmas",
              "-Wno-class-memaccess", "-Wno-maybe-uninitialized", "-Wno-unused-variable"]  # fmt: skip
NVCC_FLAGS = json.loads((CSRC / "cuda/nvcc_flags.json").read_text()) if CSRC.exists() else []


class BuildError(Exception):
    """A compiler's complaint."""


def run(command: Sequence[str | Path], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)


def compile_or_raise(command: Sequence[str | Path]) -> None:
    result = run(command)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


def nvcc() -> str | None:
    """The compiler, of CUDA_HOME or on PATH."""
    home = os.environ.get("CUDA_HOME")
    candidate = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    return candidate or shutil.which("nvcc")


def gxx() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


@functools.cache
def cuda_include() -> Path:
    """Where the toolkit's headers lie, as nvcc itself says."""
    said = run([nvcc() or "nvcc", "--dryrun", "-x", "cu", os.devnull]).stderr
    top = re.search(r"^#\$ TOP=(.*)$", said, re.M)
    if not top:
        raise BuildError(f"nvcc --dryrun does not say where it is:\n{said}")
    return Path(top[1].strip()) / "include"


@functools.cache
def torch_flags() -> tuple[str, ...]:
    """For what is written against torch's stable ABI, as setup.py compiles it."""
    setup = (HERE.parent.parent / "setup.py").read_text()
    target = re.search(r'^TORCH_TARGET = "(\w+)"', setup, re.M)
    package = importlib.util.find_spec("torch")
    if not target or not package or not package.origin:
        raise BuildError("no torch, or no TORCH_TARGET in setup.py")
    return (f"-DTORCH_TARGET_VERSION={target[1]}", "-isystem", str(Path(package.origin).parent / "include"))


@functools.cache
def fma_flags() -> tuple[str, ...]:
    """The fused multiply-add of the kernels is exact either way; with the instruction it is fast."""
    cpu = Path("/proc/cpuinfo")
    return ("-mfma",) if cpu.exists() and re.search(r"^flags.*\bfma\b", cpu.read_text(), re.M) else ()


class Unit(NamedTuple):
    """A source of the kernels, and the element type it is compiled for, if it is compiled once for each."""

    path: Path
    dtype: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.stem}_{self.dtype}" if self.dtype else self.path.stem

    @property
    def flags(self) -> list[str]:
        return [f"-DPOSENC_DTYPE={self.dtype}"] if self.dtype else []


def kernel_units(csrc: Path = CSRC, dtypes: Sequence[str] = ELEMENT_TYPES) -> list[Unit]:
    """The slowest first."""
    sources = sorted(path for path in (csrc / "cuda").glob("*.cu") if path.name not in NOT_KERNELS)
    forward = [Unit(path, dtype) for path in sources if path.name == FORWARD_KERNELS for dtype in dtypes]
    return forward + [Unit(path) for path in sources if path.name != FORWARD_KERNELS]


def includes(csrc: Path = CSRC) -> list[str | Path]:
    return [f"-I{HERE}", f"-I{csrc}", "-isystem", cuda_include()]


class Builder:
    """Objects and programs in one folder."""

    def __init__(self, folder: Path, workers: int | None = None) -> None:
        self.folder = folder
        self.workers = workers or os.cpu_count() or 1
        self.made: dict[str, futures.Future[Path]] = {}
        self.lock = threading.Lock()
        self.pool = futures.ThreadPoolExecutor(self.workers)
        self.linkers = futures.ThreadPoolExecutor(self.workers)  # that wait for the objects of the other pool

    def later(self, key: str, make: Callable[[], Path]) -> futures.Future[Path]:
        """`make` on a worker, once for each key."""
        with self.lock:
            if key not in self.made:
                self.made[key] = self.pool.submit(make)
            return self.made[key]

    def ahead(self, program: Callable[[], Path]) -> futures.Future[Path]:
        """A program that will be wanted."""
        return self.linkers.submit(program)

    def close(self) -> None:
        """Forgets what has not begun."""
        self.linkers.shutdown(wait=False, cancel_futures=True)
        self.pool.shutdown(cancel_futures=True)

    def prefetch(self, *wanted: Callable[[], object]) -> None:
        """Asks for objects ahead of their use, in this order, until closed. What fails fails again where it is used."""

        def ask() -> None:
            for want in wanted:
                with contextlib.suppress(BuildError, ptx_to_cpp.TranslationError, RuntimeError, futures.CancelledError):
                    want()

        threading.Thread(target=ask, daemon=True).start()

    def object(self, source: Path, flags: Iterable[str | Path], text: str | None = None) -> futures.Future[Path]:
        """The object of a source, which is written first if its text is given."""
        command = [gxx() or "g++", *HOST_FLAGS, *map(str, flags), "-c", str(source)]
        key = hashlib.sha256("\0".join(command).encode()).hexdigest()[:20]
        target = self.folder / f"{source.stem}-{key}.o"

        def make() -> Path:
            if text is not None:
                source.write_text(text)
            compile_or_raise([*command, "-o", target])
            return target

        return self.later(key, make)

    # -- what is the same in every program

    def host_objects(self) -> list[futures.Future[Path]]:
        """The checks and the CPU backend they compare with."""
        checks = [HERE / name for name in ("checks.cpp", "forward_checks.cpp", "backward_checks.cpp")]
        return [*self.reference_objects(), *[self.object(path, includes()) for path in checks]]

    def reference_objects(self) -> list[futures.Future[Path]]:
        """The CPU backend, and the runtime."""
        reference = [*sorted((CSRC / "cpu").rglob("*.cpp")), CSRC / "frequency.cpp", CSRC / "segments.cpp"]
        return [*[self.object(path, includes()) for path in reference], self.runtime_object()]  # the slowest first

    def runtime_object(self) -> futures.Future[Path]:
        """The CUDA runtime without a device."""
        return self.object(HERE / "fake_cuda.cpp", includes())

    # -- kernels from their source

    def shim_object(self, unit: Unit, mode: str, csrc: Path = CSRC, from_ptx: bool = False) -> Any:
        only_declared = ["-DPOSENC_KERNELS_FROM_PTX"] if from_ptx else []
        flags = [*SHIM_FLAGS, *fma_flags(), *SANITIZERS[mode], *only_declared, *unit.flags, *includes(csrc)]
        return self.object(unit.path, flags)

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

    def contention_program(self, csrc: Path = CSRC, name: str = "contention") -> Path:
        """Threads that take turns at every access to memory."""
        objects = [self.shim_object(Unit(HERE / "contention_checks.cpp"), "watched", csrc),
                   self.shim_object(Unit(HERE / "access_checks.cpp"), "plain"), self.runtime_object()]  # fmt: skip
        return self.link(name, objects, "plain", partial=True)

    # -- kernels from PTX

    def ptx(self, unit: Unit, arch: int) -> futures.Future[Path]:
        target = self.folder / f"{unit.name}-{arch}.ptx"

        def make() -> Path:
            compile_or_raise([nvcc() or "nvcc", *NVCC_FLAGS, "-ptx", f"-arch=compute_{arch}", f"-I{CSRC}", f"-I{HERE}",
                              *unit.flags, unit.path, "-o", target])  # fmt: skip
            return target

        return self.later(f"ptx {unit.name} {arch}", make)

    def translated_objects(self, ptx: str, name: str) -> list[futures.Future[Path]]:
        """The kernels of a file, a few to an object; like text gives one object, whatever it was compiled for."""
        kernels = list(ptx_to_cpp.translate(ptx).values())
        groups = [kernels[i : i + 6] for i in range(0, len(kernels), 6)]
        return [self.translated_object("\n".join(group), name) for group in groups]

    def translated_object(self, functions: str, name: str) -> futures.Future[Path]:
        # The comments hold line numbers, which differ where the code does not.
        text = ptx_to_cpp.PRELUDE + re.sub(r"  // \d+: ", "  // ", functions)
        source = self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.cpp"
        return self.object(source, ["-w", *fma_flags(), f"-I{HERE}"], text)

    def kernels_from_ptx(self, arch: int, mode: str) -> list[Any]:
        """The launchers, the runtime and the translated kernels."""
        units = kernel_units()
        launchers = [self.shim_object(unit, mode, from_ptx=True) for unit in units]
        runtime = self.shim_object(Unit(HERE / "ptx_runtime.cpp"), mode)
        texts = [self.ptx(unit, arch) for unit in units]
        translated = [part for unit, text in zip(units, texts, strict=True)
                      for part in self.translated_objects(text.result().read_text(), unit.name)]  # fmt: skip
        return [*launchers, runtime, *translated]

    # -- programs

    def link(self, name: str, objects: Iterable[Any], mode: str, partial: bool = False) -> Path:
        """A program; a partial one may lack kernels, which it then must not call."""
        target = self.folder / name
        if target.exists():
            return target
        flags = ["-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"] if partial else []
        flags += ["-rdynamic"]  # torch's getter of streams is looked up by name
        paths = [part if isinstance(part, Path) else part.result() for part in objects]
        compile_or_raise([gxx() or "g++", *SANITIZERS[mode], *flags, *paths, "-o", target])
        return target

    def source_program(self, mode: str) -> Path:
        return self.link(f"source-{mode}", [*self.kernels_from_source(mode), *self.host_objects()], mode)

    def ptx_program(self, arch: int, mode: str) -> Path:
        return self.link(f"ptx-{arch}-{mode}", [*self.kernels_from_ptx(arch, mode), *self.host_objects()], mode)

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
    """For a check program: sanitizers stop at what they find."""
    sanitizers = {
        "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
    }
    return {**os.environ, **sanitizers, **changes}


def run_program(program: Path, *arguments: str, seed: int = 0, timeout: float = 240) -> tuple[int, str]:
    """Exit status and all output; a program that runs too long has failed."""
    try:
        result = run([program, *arguments], env=environment(CUDA_ON_CPU_SEED=str(seed)), timeout=timeout)
    except subprocess.TimeoutExpired:
        return -1, f"still running after {timeout} seconds"
    return result.returncode, result.stdout + result.stderr
