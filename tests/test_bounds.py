"""Nothing is read or written outside the tensors of a call."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import child

from posenc_ext import _C


@pytest.mark.slow
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("isa", _C.available_isas())
def test_tensors_at_the_edge_of_memory(isa, side, tmp_path):
    program = Path(__file__).with_name("guarded.py")
    process = subprocess.run([sys.executable, program, isa, side], capture_output=True, text=True, **child(tmp_path))
    assert process.returncode == 0, f"ended with {process.returncode}; a signal, if negative\n{process.stderr[-3000:]}"
    assert process.stdout.split() == ["done"]
