"""Build of the compiled half. Everything declarative is in pyproject.toml.

    posenc_ext/libposenc_ext_ops.so    the ops and their kernels, CPU and CUDA; knows no Python
    posenc_ext/_C*.so                  introspection from Python; links to the former

Objects are kept in build/objects, under the name of the command that made them, and made anew where that or what they
are made of has changed. So any two builds in one checkout share them, also those of pip.

Environment:
    POSENC_NO_CUDA=1        leave the CUDA half out even though nvcc is found
    POSENC_FORCE_CUDA=1     fail if the CUDA half cannot be built
    TORCH_CUDA_ARCH_LIST    architectures of the CUDA half (default: those of the list below that nvcc knows, and PTX of
                            the newest; never taken from a visible GPU)
    CXX                     the C++ compiler (default: c++); CXXFLAGS and LDFLAGS are added to its command lines
    DEBUG=1                 -O0 -g
    MAX_JOBS                compile jobs
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
OBJECTS = ROOT / "build/objects"
MODULE_SOURCE = ROOT / "csrc/python.cpp"
NO_CUDA_SOURCE = ROOT / "csrc/cuda/stub.cpp"
FORWARD_KERNELS = ROOT / "csrc/cuda/forward_kernels.cu"
# What decides the arithmetic of the kernels. The tests and the gate of the machine code read the same file.
NVCC_FLAGS = json.loads((ROOT / "csrc/cuda/nvcc_flags.json").read_text())
ELEMENT_TYPES = ("bfloat16", "float16", "float32", "float64")  # slowest to compile first
DEFAULT_CUDA_ARCHS = ("7.5", "8.0", "9.0", "10.0", "12.0")
# Names that TORCH_CUDA_ARCH_LIST may hold.
ARCHITECTURE_NAMES = {"Turing": "7.5", "Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}
LEAST_TORCH = (2, 10)
TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10: one build loads in every later torch
LEAST_COMPILER = {"g++": 11, "clang": 14}


def refuse(text: str) -> SystemExit:
    """What ends a build, in one line."""
    return SystemExit(f"posenc_ext: {text}")


@functools.cache
def run(*command: str | Path) -> str:
    """What a command says."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def announce(text: str) -> None:
    """A line that reaches a person at a terminal, although pip keeps the output of a build to itself."""
    print(f"posenc_ext: {text}", flush=True)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\nposenc_ext: {text}\n")


# ---- what the build needs


class Package(NamedTuple):
    """A package with headers."""

    folder: Path
    version: str


def find_package(name: str) -> Package | None:
    """A package that can be imported, perhaps from the environment this one is being installed into.

    pip builds in an isolated environment but with the same interpreter, whose site-packages torch may already be
    in. The headers used are ABI-stable, so any torch will do, and several GB of download are saved.
    """
    if (spec := importlib.util.find_spec(name)) is None:
        if sysconfig.get_path("purelib") in sys.path:
            return None
        sys.path.append(sysconfig.get_path("purelib"))
        spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Package(Path(spec.submodule_search_locations[0]), importlib.metadata.version(name))


def find_torch() -> Package | None:
    """A torch that is new enough."""
    torch = find_package("torch")
    return torch if torch and tuple(map(int, torch.version.split(".")[:2])) >= LEAST_TORCH else None


def find_compiler() -> list[str]:
    """The C++ compiler, tried out on what the sources ask for; refused before it has compiled for minutes."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if not shutil.which(compiler[0]):
        raise refuse(f"there is no C++ compiler {compiler[0]} on PATH: install g++, or name one in CXX")
    macros = run(*compiler, "-dM", "-E", "-x", "c++", os.devnull)
    defined = dict(re.findall(r"^#define (\w+) (\d+)$", macros, re.MULTILINE))
    kind, version = ("clang", "__clang_major__") if "__clang_major__" in defined else ("g++", "__GNUC__")
    if int(defined.get(version, 0)) < LEAST_COMPILER[kind]:
        least = " or ".join(f"{name} {number}" for name, number in LEAST_COMPILER.items())
        found = f"{kind} {defined.get(version, 'of an unknown version')}"
        raise refuse(f"{compiler[0]} is {found}, and its C++20 is too old: {least} or newer is needed")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise refuse(f"no Python.h in {headers}: install the headers of Python (python3-dev)")
    return compiler


def find_nvcc() -> Path | None:
    """The CUDA compiler for the CUDA half, or None where that is not to be built."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = (home and shutil.which("nvcc", path=str(Path(home) / "bin"))) or shutil.which("nvcc")
    if os.environ.get("POSENC_NO_CUDA") == "1":
        reason = "POSENC_NO_CUDA=1"
    elif not nvcc:
        reason = "no nvcc in CUDA_HOME or on PATH"
    else:
        return Path(nvcc)
    if os.environ.get("POSENC_FORCE_CUDA") == "1":
        raise refuse(f"POSENC_FORCE_CUDA=1, but the CUDA half cannot be built: {reason}")
    print(f"posenc_ext: CPU only ({reason})")
    return None


def check_environment() -> None:
    """nvcc takes flags from two variables as well."""
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        if re.search(r"fmad|fast.math|ftz|prec-(div|sqrt)", os.environ.get(name, "")):
            raise refuse(f"{name} must not change how kernels compute, got {os.environ[name]!r}")


def cuda_libraries(nvcc: Path) -> list[str]:
    """Folders of libraries, as nvcc itself has them: it may be a wrapper that lies elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cu"
        empty.touch()
        dry = run(nvcc, "--dryrun", "-c", empty)
    return re.findall(r'"?-L([^"\s]+)"?', "".join(re.findall(r"^#\$ LIBRARIES=(.*)$", dry, re.MULTILINE)))


def default_architectures(nvcc: Path) -> str:
    """Of the default list what this nvcc can compile for, in the form of TORCH_CUDA_ARCH_LIST."""
    known = run(nvcc, "--list-gpu-code").split()
    chosen = [a for a in DEFAULT_CUDA_ARCHS if f"sm_{a.replace('.', '')}" in known]
    if not chosen:
        raise refuse(f"{nvcc} compiles for none of {', '.join(DEFAULT_CUDA_ARCHS)}; POSENC_NO_CUDA=1?")
    # 10.0 too, whose PTX serves what lies between it and 12.0.
    return ";".join(f"{a}+PTX" if a in ("10.0", chosen[-1]) else a for a in chosen)


def architecture_flags(listed: str) -> list[str]:
    """The nvcc flags of a TORCH_CUDA_ARCH_LIST such as "8.0;9.0+PTX"."""
    flags = []
    for name, numbers in ARCHITECTURE_NAMES.items():
        listed = re.sub(rf"\b{name}(\+PTX)?", lambda match, n=numbers: n + (match[1] or ""), listed)
    for architecture in filter(None, re.split(r"[;,\s]+", listed)):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", architecture)
        if not match:
            raise refuse(f"TORCH_CUDA_ARCH_LIST must list numbers such as 9.0 or 9.0+PTX, got {listed}")
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


# ---- objects


class Object(NamedTuple):
    """An object file to be made.

    `versions`: of the compiler and of other projects' headers. They and the command are what, apart from our own
    sources, decides how it turns out; the folders of those headers do not, since pip's change with each build.
    """

    source: Path
    command: list[str]
    versions: str
    folders: tuple[Path, ...] = ()
    suffix: str = ""

    def path(self) -> Path:
        """Where it is kept: under a name that says how it is made."""
        made_by = " ".join([*self.command, str(self.source.relative_to(ROOT)), self.versions])
        key = hashlib.sha256(made_by.encode()).hexdigest()[:16]
        return OBJECTS / f"{self.source.parent.name}-{self.source.stem}{self.suffix}-{key}.o"


def find_ninja() -> str:
    """The program that compiles what is out of date."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    if not (ninja := shutil.which("ninja", path=os.pathsep.join(places))):
        raise refuse("ninja is needed to compile: pip install ninja")
    return ninja


def make(objects: list[Object]) -> None:
    """Those that are not there or out of date, several at a time."""
    lines = ["rule compile", "  command = $by -MMD -MF $out.d -c $in -o $out", "  depfile = $out.d", "  deps = gcc"]
    for one in objects:
        path, source = (re.sub(r"([$ :])", r"$\1", str(path)) for path in (one.path(), one.source))
        lines += [f"build {path}: compile {source}", f"  by = {shlex.join(one.command).replace('$', '$$')}"]
    OBJECTS.mkdir(parents=True, exist_ok=True)
    (OBJECTS / "build.ninja").write_text("\n".join(lines) + "\n")
    # Not in the command lines, by which ninja tells what is out of date.
    folders = dict.fromkeys(str(folder) for one in objects for folder in one.folders)
    environment = {**os.environ, "CPLUS_INCLUDE_PATH": os.pathsep.join(folders)}
    jobs = os.environ.get("MAX_JOBS", "")
    jobs = jobs if jobs.isdigit() and int(jobs) > 0 else str(os.cpu_count() or 1)
    ninja = [find_ninja(), "-C", str(OBJECTS)]
    missing = len(re.findall(r"^\[", run(*ninja, "-n"), re.MULTILINE))
    if missing:
        todo = f"{missing} of {len(objects)} files are to be compiled, {jobs} at a time"
        announce(f"{todo}; all of them take minutes, once: build/objects keeps them")
    if subprocess.run([*ninja, "-v", "-j", jobs], env=environment).returncode != 0:
        raise refuse("the compiler failed, see above")


def cuda_objects(nvcc: Path, architectures: str, debug: bool) -> list[Object]:
    """Objects of csrc/cuda/*.cu.

    The forward kernels take the longest, so their source is compiled once for each element type, at the same time.
    Not by torch's CUDAExtension: these files know no torch, so a CPU-only torch or one for another CUDA version is as
    good as any, and the machine needs no GPU.
    """
    check_environment()
    command = [str(nvcc), *NVCC_FLAGS, "-Xcompiler=-fPIC,-fvisibility=hidden"]
    command += ["-G", "-g"] if debug else []
    command += architecture_flags(architectures)
    version = run(nvcc, "--version")
    others = [path for path in sorted((ROOT / "csrc/cuda").glob("*.cu")) if path != FORWARD_KERNELS]
    return [
        *(Object(FORWARD_KERNELS, [*command, f"-DPOSENC_DTYPE={t}"], version, suffix=f"-{t}") for t in ELEMENT_TYPES),
        *(Object(source, command, version) for source in others),
    ]


class Build(build_ext):
    """Both libraries. All objects of both are compiled at the same time."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library of the ops serves every Python, so its name has no suffix of one."""
        name = super().get_ext_filename(fullname)
        return name.partition(".")[0] + ".so" if fullname.endswith("_ops") else name

    def build_extensions(self) -> None:
        """Checks what is needed, compiles, links."""
        compiler, nvcc, debug = find_compiler(), find_nvcc(), os.environ.get("DEBUG") == "1"
        if (torch := find_torch()) is None:
            raise refuse(
                f"torch {'.'.join(map(str, LEAST_TORCH))} or newer is needed for its headers: install it first"
            )
        # -ffp-contract=off and no fast-math: results must not depend on what the compiler may fuse.
        command = [*compiler, "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-DNDEBUG"]
        command += ["-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall"]
        command += [f"-ffile-prefix-map={ROOT}=."]  # what is built does not say where
        command += [*(["-O0", "-g"] if debug else ["-O3", "-g0"]), *shlex.split(os.environ.get("CXXFLAGS", ""))]
        link = [*compiler, "-shared", "-Wl,--as-needed", *shlex.split(os.environ.get("LDFLAGS", ""))]
        # The module too: what is newer in libstdc++ than torch's own wheels may ask for, torch's libraries have within.
        link_torch = [f"-L{torch.folder}/lib", "-ltorch_cpu", "-lc10"]
        print(f"posenc_ext: torch {torch.version} headers, target {TORCH_TARGET}, {shlex.join(command)}")

        ops, architectures, link_ops = [], "", []
        if nvcc:
            architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_architectures(nvcc)
            print(f"posenc_ext: CUDA half with {nvcc} for {architectures}")
            ops += cuda_objects(nvcc, architectures, debug)
            link_ops += [f"-L{folder}" for folder in cuda_libraries(nvcc)]
            link_ops += ["-lcudart_static", "-ldl", "-lpthread", "-lrt"]
        version = run(*compiler, "--version")
        for source in sorted((ROOT / "csrc").rglob("*.cpp")):
            if source.parent.name == "torch":
                target = f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"
                ops.append(Object(source, [*command, target], version + torch.version, (torch.folder / "include",)))
            elif source != MODULE_SOURCE and not (nvcc and source == NO_CUDA_SOURCE):
                ops.append(Object(source, command, version))
        said = {"TORCH_VERSION": torch.version, "CUDA_ARCHS": architectures}
        macros = [f'-DPOSENC_{name}="{value}"' for name, value in said.items()]
        # Without the pybind11 package, its headers among torch's own will do.
        binding = find_package("pybind11") or torch
        python = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("include", "platinclude"))
        folders = (binding.folder / "include", *python)
        module = Object(MODULE_SOURCE, [*command, *macros], version + binding.version + sys.version, folders)
        make([*ops, module])

        paths = {e.name.rpartition(".")[2]: Path(self.get_ext_fullpath(e.name)).absolute() for e in self.extensions}
        library, module_path = paths["libposenc_ext_ops"], paths["_C"]
        library.parent.mkdir(parents=True, exist_ok=True)
        for linked in (
            [*link, f"-Wl,-soname,{library.name}", "-o", library, *(o.path() for o in ops), *link_torch, *link_ops],
            [*link, "-Wl,-rpath,$ORIGIN", "-o", module_path, module.path(), library, *link_torch],
        ):
            subprocess.run(linked, check=True)


setup_requires = []
# pip asks for this before it builds. Metadata and source distributions need no torch.
if "egg_info" in sys.argv and not find_torch():
    announce("no torch here: pip installs one for the build alone, minutes long (`pip install torch` first saves them)")
    setup_requires = ["torch>=2.10"]

setup(
    ext_modules=[Extension(f"posenc_ext.{name}", []) for name in ("libposenc_ext_ops", "_C")],
    cmdclass={"build_ext": Build},
    setup_requires=setup_requires,
)
