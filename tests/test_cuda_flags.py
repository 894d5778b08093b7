"""The flags that decide how CUDA kernels compute: one list of them, and a gate that sees when it does not hold."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_on_cpu import build

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.nvcc() is None, reason="nvcc is neither in CUDA_HOME nor on PATH"),
    pytest.mark.skipif(not (ROOT / ".ci/cuda_gate.py").exists(), reason="no gate here (.ci/cuda_gate.py)"),
]

# Two of the kernels: a table is scaled, an encoding is made and added, and the encoding alone.
KERNELS = """#include "cuda/forward.cuh"
namespace posenc::cuda {
template __global__ void forward_vectors<float, Source::gathered, Arrangement::interleaved, Mode::shared>(
    const ForwardParams, const ForwardLaunch);
template __global__ void forward_vectors<float, Source::none, Arrangement::interleaved, Mode::shared>(
    const ForwardParams, const ForwardLaunch);
}
"""


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("cuda_gate", ROOT / ".ci/cuda_gate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.cuobjdump("--version")
    except SystemExit as reason:
        pytest.skip(str(reason))
    return module


def problems(gate, folder, flags, csrc=build.CSRC, **environment):
    """What the gate says of kernels that are compiled with these flags."""
    source, cubin = folder / "kernels.cu", folder / "kernels.cubin"
    source.write_text(KERNELS)
    command = [build.nvcc(), *flags, "-arch=sm_90", "-cubin", f"-I{csrc}", source, "-o", cubin]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    kernels = gate.kernels_of(str(cubin), "90")
    assert len(kernels) == 2
    by_name = {kernel.name: kernel for kernel in kernels.values()}
    return [problem for kernel in kernels.values() for problem in gate.problems_of(kernel, by_name)]


def test_gate_takes_the_flags(gate, tmp_path):
    assert gate.problems_of_flags() == []
    assert problems(gate, tmp_path, build.NVCC_FLAGS) == []


FUSED, FLUSHED = "additions of the encoding", "subnormal numbers are flushed"
OTHERS = {
    "no flag for fused multiply-adds": ([f for f in build.NVCC_FLAGS if "fmad" not in f], {}, FUSED),
    "fast math": ([*build.NVCC_FLAGS, "--use_fast_math"], {}, FLUSHED),
    "appended by the environment": (build.NVCC_FLAGS, {"NVCC_APPEND_FLAGS": "--fmad=true"}, FUSED),
    "prepended by the environment": (build.NVCC_FLAGS, {"NVCC_PREPEND_FLAGS": "-use_fast_math"}, FLUSHED),
}


@pytest.mark.parametrize(("flags", "environment", "said"), OTHERS.values(), ids=OTHERS)
def test_gate_refuses_others(gate, tmp_path, flags, environment, said):
    found = problems(gate, tmp_path, flags, **environment)
    assert any(said in problem for problem in found), found


# Of the record of ids out of range, what keeps most threads from an atomic.
CHANGES = {
    "every thread of a warp": "|| !is_first_of_warp(key) ",
    "no look before": "*first <= key || ",
    "the lock for all": "|| atomicMin(&record->first, key) <= key",
}


@pytest.mark.parametrize("words", CHANGES.values(), ids=CHANGES)
def test_gate_counts_atomics(gate, tmp_path, words):
    csrc = tmp_path / "csrc"
    shutil.copytree(build.CSRC, csrc)
    changed = csrc / "cuda/out_of_range.cuh"
    assert words in changed.read_text()
    changed.write_text(changed.read_text().replace(words, ""))
    found = problems(gate, tmp_path, build.NVCC_FLAGS, csrc)
    assert len(found) == 1
    assert "a record, not by one atomic of a warp" in found[0]


@pytest.mark.parametrize("flags", [["-O3"], [*build.NVCC_FLAGS, "--use_fast_math"], ["--fmad=true"]], ids=str)
def test_gate_reads_the_list(gate, tmp_path, monkeypatch, flags):
    changed = tmp_path / "nvcc_flags.json"
    changed.write_text(json.dumps(flags))
    monkeypatch.setattr(gate, "FLAGS", changed)
    assert gate.problems_of_flags() != []


def test_setup_reads_the_list(monkeypatch):
    """And lets the environment add nothing to it."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    assert setup["NVCC_FLAGS"] == build.NVCC_FLAGS
    assert "fmad" not in re.sub(r"fmad\|fast", "", (ROOT / "setup.py").read_text())
    nvcc = Path(build.nvcc())
    objects = setup["cuda_objects"](nvcc, "9.0", False)
    assert {tuple(one.command[1 : 1 + len(build.NVCC_FLAGS)]) for one in objects} == {tuple(build.NVCC_FLAGS)}
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        for flags in ("--fmad=true", "-use_fast_math", "-ftz=true"):
            monkeypatch.setenv(name, flags)
            with pytest.raises(SystemExit, match=f"{name} must not .* '{flags}'"):
                setup["cuda_objects"](nvcc, "9.0", False)
        monkeypatch.delenv(name)
