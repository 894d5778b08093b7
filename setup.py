"""Build of the compiled half (posenc_ext._C). Everything declarative is in pyproject.toml.

Environment:
    POSENC_NO_CUDA=1        leave the CUDA half out even though nvcc is found
    POSENC_FORCE_CUDA=1     fail if the CUDA half cannot be built
    TORCH_CUDA_ARCH_LIST    architectures of the CUDA half (default below; never taken from a visible GPU)
    DEBUG=1                 -O0 -g
    MAX_JOBS                compile jobs
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
DEFAULT_CUDA_ARCHS = "7.5;8.0;9.0;10.0;12.0+PTX"
TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10: one build loads in every later torch


def find_torch() -> bool:
    """Whether torch can be imported, perhaps from the environment this package is being installed into.

    pip builds in an isolated environment but with the same interpreter, whose site-packages torch may already be
    in. The headers used are ABI-stable, so any torch will do, and several GB of download are saved.
    """
    if importlib.util.find_spec("torch") is None:
        sys.path.append(sysconfig.get_path("purelib"))
    return importlib.util.find_spec("torch") is not None


def cuda_sources() -> list[str]:
    """The CUDA half's files, or none where it is not to be built."""
    forced = os.environ.get("POSENC_FORCE_CUDA") == "1"
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").glob("*.cu"))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (home and shutil.which("nvcc", path=str(Path(home) / "bin")))
    if os.environ.get("POSENC_NO_CUDA") == "1":
        reason = "POSENC_NO_CUDA=1"
    elif not sources:
        reason = "csrc/cuda has no kernels yet"
    elif not nvcc:
        reason = "no nvcc on PATH or in CUDA_HOME"
    else:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHS)
        print(f"posenc_ext: CUDA half with {nvcc} for {os.environ['TORCH_CUDA_ARCH_LIST']}")
        return sources
    if forced:
        raise SystemExit(f"posenc_ext: POSENC_FORCE_CUDA=1, but the CUDA half cannot be built: {reason}")
    print(f"posenc_ext: CPU only ({reason})")
    return []


def extension() -> dict:
    """ext_modules and cmdclass; imports torch, so only called for a build."""
    import pybind11
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("**/*.cpp"))
    cuda = cuda_sources()
    debug = os.environ.get("DEBUG") == "1"
    # -ffp-contract=off and no fast-math: results must not depend on what the compiler may fuse.
    flags = ["-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden"]
    flags += ["-O0", "-g"] if debug else ["-O3", "-g0"]
    macros = [("TORCH_TARGET_VERSION", TORCH_TARGET), ("POSENC_TORCH_VERSION", f'"{torch.__version__}"')]
    if cuda:
        archs = os.environ["TORCH_CUDA_ARCH_LIST"]
        macros += [("POSENC_WITH_CUDA", None), ("USE_CUDA", None), ("POSENC_CUDA_ARCHS", f'"{archs}"')]
    print(f"posenc_ext: torch {torch.__version__} headers, target {TORCH_TARGET}, flags {' '.join(flags)}")
    module = (CUDAExtension if cuda else CppExtension)(
        "posenc_ext._C",
        sources + cuda,
        include_dirs=[pybind11.get_include()],
        define_macros=macros,
        extra_compile_args={"cxx": flags, "nvcc": ["-O3", "--fmad=false"]} if cuda else {"cxx": flags},
        extra_link_args=["-Wl,--as-needed"],
    )
    module.libraries = [name for name in module.libraries if name in ("torch_cpu", "c10")]
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExtension}}


BUILDING = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"} & set(sys.argv)

if find_torch():
    setup(**(extension() if BUILDING else {}))
else:
    # Asked for by pip before it builds; metadata and source distributions need no torch.
    setup(setup_requires=["torch>=2.10"] if "egg_info" in sys.argv else [])
