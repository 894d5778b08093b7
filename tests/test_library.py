"""The library of the ops by itself: without the Python module, without Python, and one state for both."""

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits, child, run_code

import posenc_ext
from posenc_ext import _C, Convention, functional

IDS = torch.tensor([[3, 1, 4, 1, 5]])
CPP = Path(__file__).parent.parent / "examples/cpp"


def test_the_module_chooses_the_kernels_of_the_ops(force_isa):
    active = ctypes.CDLL(posenc_ext.ops_library()).posenc_ext_active_isa  # of the library that torch has loaded
    active.restype = ctypes.c_char_p
    for isa in (*_C.available_isas(), *reversed(_C.available_isas())):
        force_isa(isa)
        assert active().decode() == isa == _C.active_isa()


def test_threads_share_the_library(force_isa):
    """New specs, kernels that change and calls, all at the same time: each result is as if it were alone."""
    calls = [
        functools.partial(functional.positional_encoding, IDS, 64, convention=Convention(base=float(base)))
        for base in range(2, 66)
    ]
    isas = _C.available_isas()

    def one(i):
        force_isa(isas[i % len(isas)])
        return calls[i % len(calls)]()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(16 * len(calls))))
    for i, result in enumerate(results):
        assert_same_bits(result, calls[i % len(calls)]())


LIBRARY_ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
ids = torch.tensor([[3, 1, 4, 1, 5]])
exported, traced = torch.export.load("exported.pt2").module(), torch.jit.load("traced.pt")
with torch.no_grad():
    torch.save([exported(ids), traced(ids)], "results.pt")
try:
    exported.to("meta")(ids.to("meta"))
except NotImplementedError as error:
    print(error)
assert not any(name.startswith("posenc_ext") for name in sys.modules)
"""


def test_programs_run_where_the_library_is_loaded_alone(tmp_path):
    """Without fake kernels, though: torch says what has them."""
    layer = posenc_ext.TransformerEmbedding(10, 8).eval()
    torch.export.save(torch.export.export(layer, (IDS,)), tmp_path / "exported.pt2")
    with torch.no_grad():
        torch.jit.save(torch.jit.trace(layer, (IDS,)), tmp_path / "traced.pt")
    said = run_code(f"import sys\nsys.argv[1:] = [{posenc_ext.ops_library()!r}]\n{LIBRARY_ALONE}", tmp_path)
    for result in torch.load(tmp_path / "results.pt"):
        assert_same_bits(result, layer(IDS).detach())
    if torch.__version__ >= "2.13":
        assert "need to import the 'posenc_ext.ops.fake' Python module" in said


@pytest.mark.slow
def test_a_program_in_cpp_runs_a_compiled_model(tmp_path):
    """The example, by the commands that it names: same numbers as in Python, and an error that C++ can catch."""
    if not (compiler := shutil.which("c++")) or not CPP.exists():
        pytest.skip("needs a C++ compiler and the checkout's examples")
    spec = importlib.util.spec_from_file_location("compile_model", CPP / "compile_model.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    subprocess.run([sys.executable, CPP / "compile_model.py", "model.pt2"], check=True, **child(tmp_path))
    folder = Path(torch.__path__[0])
    folders = [f"-I{folder}/include", f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib"]
    command = [compiler, "-std=c++20", CPP / "run_model.cpp", "-o", "run_model", *folders, "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True, **child(tmp_path))

    def run(*ids):
        command = ["./run_model", posenc_ext.ops_library(), "model.pt2", *map(str, ids)]
        return subprocess.run(command, capture_output=True, text=True, **child(tmp_path))

    done = run(*IDS[0].tolist())
    assert done.returncode == 0, done.stderr
    got = torch.tensor([[float(number) for number in line.split()] for line in done.stdout.splitlines()])
    torch.testing.assert_close(got, example.make_model()(IDS)[0].detach())
    refused = run(3, 10)
    assert refused.returncode == 1
    assert "posenc_ext::embed: input must hold ids in [0, 10), got 10 at input[0, 1]" in refused.stderr
