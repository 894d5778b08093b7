"""What a build needs is asked for before anything is compiled, and what is missing is said in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = "import runpy, sys; sys.argv[0] = 'setup.py'; runpy.run_path('setup.py')"
NO_HEADERS = "import sysconfig; there = sysconfig.get_path; sysconfig.get_path = lambda name: '/nowhere/' + name\n"
NO_TORCH = "import importlib.util; importlib.util.find_spec = lambda name: None\n"


@pytest.fixture
def old_compiler(tmp_path):
    path = tmp_path / "c++-9"
    path.write_text("#!/bin/sh\necho '#define __GNUC__ 9'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the sources")
@pytest.mark.parametrize(
    ("compiler", "before", "said"),
    [
        ("no-such-c++", "", "there is no C++ compiler no-such-c++ on PATH: install g++, or name one in CXX"),
        ("old", "", "is g++ 9, and its C++20 is too old: g++ 11 or clang 14 or newer is needed"),
        ("c++", NO_HEADERS, "no Python.h in /nowhere/include: install the headers of Python (python3-dev)"),
        ("c++", NO_TORCH, "torch 2.10 or newer is needed for its headers: install it first"),
    ],
)
def test_what_is_missing_is_said_first(compiler, before, said, tmp_path, old_compiler):
    environment = {**os.environ, "CXX": old_compiler if compiler == "old" else compiler, "POSENC_NO_CUDA": "1"}
    command = [sys.executable, "-c", before + RUN, "build_ext", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("posenc_ext: ")
    assert said in line
    assert " -c " not in done.stdout
