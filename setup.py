"""Build of the compiled half (posenc_ext._C). Everything declarative is in pyproject.toml.

Environment:
    POSENC_NO_CUDA=1        leave the CUDA half out even though nvcc is found
    POSENC_FORCE_CUDA=1     fail if the CUDA half cannot be built
    TORCH_CUDA_ARCH_LIST    architectures of the CUDA half (default: those of the list below that nvcc knows, and PTX of
                            the newest; never taken from a visible GPU)
    DEBUG=1                 -O0 -g
    MAX_JOBS                compile jobs
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
FORWARD_KERNELS = ROOT / "csrc/cuda/forward_kernels.cu"
# What decides the arithmetic of the kernels. The tests and the gate of the machine code read the same file.
NVCC_FLAGS = json.loads((ROOT / "csrc/cuda/nvcc_flags.json").read_text())
ELEMENT_TYPES = ("float32", "float64", "bfloat16", "float16")
DEFAULT_CUDA_ARCHS = ("7.5", "8.0", "9.0", "10.0", "12.0")
# Names that TORCH_CUDA_ARCH_LIST may hold.
ARCHITECTURE_NAMES = {"Turing": "7.5", "Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}
TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10: one build loads in every later torch


def find_torch() -> bool:
    """Whether torch can be imported, perhaps from the environment this package is being installed into.

    pip builds in an isolated environment but with the same interpreter, whose site-packages torch may already be
    in. The headers used are ABI-stable, so any torch will do, and several GB of download are saved.
    """
    if importlib.util.find_spec("torch") is None:
        sys.path.append(sysconfig.get_path("purelib"))
    return importlib.util.find_spec("torch") is not None


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
        raise SystemExit(f"posenc_ext: POSENC_FORCE_CUDA=1, but the CUDA half cannot be built: {reason}")
    print(f"posenc_ext: CPU only ({reason})")
    return None


def check_environment() -> None:
    """nvcc takes flags from two variables as well."""
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        if re.search(r"fmad|fast.math|ftz|prec-(div|sqrt)", os.environ.get(name, "")):
            raise SystemExit(f"posenc_ext: {name} must not change how kernels compute, got {os.environ[name]!r}")


def cuda_libraries(nvcc: Path) -> list[str]:
    """Folders of libraries, as nvcc itself has them: it may be a wrapper that lies elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cu"
        empty.touch()
        dry = subprocess.run([nvcc, "--dryrun", "-c", empty], capture_output=True, text=True, check=True).stderr
    return re.findall(r'"?-L([^"\s]+)"?', "".join(re.findall(r"^#\$ LIBRARIES=(.*)$", dry, re.MULTILINE)))


def default_architectures(nvcc: Path) -> str:
    """Of the default list what this nvcc can compile for, in the form of TORCH_CUDA_ARCH_LIST."""
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    chosen = [a for a in DEFAULT_CUDA_ARCHS if f"sm_{a.replace('.', '')}" in known.split()]
    if not chosen:
        raise SystemExit(f"posenc_ext: {nvcc} compiles for none of {', '.join(DEFAULT_CUDA_ARCHS)}; POSENC_NO_CUDA=1?")
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
            raise SystemExit(f"posenc_ext: TORCH_CUDA_ARCH_LIST must list numbers such as 9.0 or 9.0+PTX, got {listed}")
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def compile_cuda(nvcc: Path, folder: Path, architectures: str, debug: bool) -> list[str]:
    """Objects of csrc/cuda/*.cu, compiled anew where something they are made of has changed.

    The forward kernels take the longest, so their source is compiled once for each element type, at the same time.
    Not by torch's CUDAExtension: these files know no torch, so a CPU-only torch or one for another CUDA version is as
    good as any, and the machine needs no GPU.
    """
    objects = [(path, path.stem, []) for path in sorted((ROOT / "csrc/cuda").glob("*.cu")) if path != FORWARD_KERNELS]
    # The slowest first.
    objects[:0] = [(FORWARD_KERNELS, f"forward_{t}", [f"-DPOSENC_DTYPE={t}"]) for t in ELEMENT_TYPES]
    headers = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh")]
    check_environment()
    flags = [*NVCC_FLAGS, "-Xcompiler=-fPIC,-fvisibility=hidden", "-DPOSENC_WITH_CUDA"]
    flags += ["-G", "-g"] if debug else []
    flags += architecture_flags(architectures)
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    newest = max(path.stat().st_mtime for path in [*headers, ROOT / "setup.py"])
    folder.mkdir(parents=True, exist_ok=True)

    def build(item: tuple[Path, str, list[str]]) -> str:
        source, name, macros = item
        target = folder / f"{name}.o"
        command = [str(nvcc), *flags, *macros, "-c", str(source), "-o", str(target)]
        record = target.with_suffix(".command")
        made_by = " ".join(command) + "\n" + version
        fresh = target.exists() and record.exists() and record.read_text() == made_by
        if not fresh or target.stat().st_mtime < max(newest, source.stat().st_mtime):
            print(" ".join(command), flush=True)
            record.unlink(missing_ok=True)  # written last: a target without it is half made
            subprocess.run(command, check=True)
            record.write_text(made_by)
        return str(target)

    jobs = os.environ.get("MAX_JOBS", "")
    with ThreadPoolExecutor(int(jobs) if jobs.isdigit() and int(jobs) > 0 else os.cpu_count()) as pool:
        return list(pool.map(build, objects))


def extension() -> dict:
    """ext_modules and cmdclass; imports torch, so only called for a build."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("**/*.cpp"))
    nvcc = find_nvcc()
    debug = os.environ.get("DEBUG") == "1"
    # -ffp-contract=off and no fast-math: results must not depend on what the compiler may fuse.
    flags = ["-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden"]
    flags += [f"-ffile-prefix-map={ROOT}=."]  # what is built does not say where
    flags += ["-O0", "-g"] if debug else ["-O3", "-g0"]
    macros = [("TORCH_TARGET_VERSION", TORCH_TARGET), ("POSENC_TORCH_VERSION", f'"{torch.__version__}"')]
    # Without the pybind11 package, its headers among torch's own will do.
    pybind11 = importlib.util.find_spec("pybind11")
    include_dirs = [str(Path(folder) / "include") for folder in pybind11.submodule_search_locations] if pybind11 else []
    library_dirs, libraries = [], []
    if nvcc:
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_architectures(nvcc)
        library_dirs = cuda_libraries(nvcc)
        libraries = ["cudart_static", "dl", "pthread", "rt"]
        macros += [("POSENC_WITH_CUDA", None), ("POSENC_CUDA_ARCHS", f'"{architectures}"')]
        print(f"posenc_ext: CUDA half with {nvcc} for {architectures}")
    print(f"posenc_ext: torch {torch.__version__} headers, target {TORCH_TARGET}, flags {' '.join(flags)}")
    module = CppExtension(
        "posenc_ext._C",
        sources,
        include_dirs=include_dirs,
        library_dirs=library_dirs,
        define_macros=macros,
        extra_compile_args={"cxx": flags},
        extra_link_args=["-Wl,--as-needed"],
    )
    module.libraries = [name for name in module.libraries if name in ("torch_cpu", "c10")] + libraries

    class Build(BuildExtension):
        """Compiles the CUDA half first and links it in."""

        def build_extensions(self) -> None:
            self.force = True  # what is out of date is found out object by object, by ninja where it is there
            if nvcc:
                objects = compile_cuda(nvcc, Path(self.build_temp).absolute() / "cuda", architectures, debug)
                module.extra_objects = objects
            super().build_extensions()

    return {"ext_modules": [module], "cmdclass": {"build_ext": Build}}


BUILDING = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"} & set(sys.argv)

if find_torch():
    setup(**(extension() if BUILDING else {}))
else:
    # Asked for by pip before it builds; metadata and source distributions need no torch.
    setup(setup_requires=["torch>=2.10"] if "egg_info" in sys.argv else [])
