"""Nothing is read or written outside the tensors of a call."""

import subprocess
import sys
from pathlib import Path

import pytest

from posenc_ext import _C


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("isa", _C.available_isas())
def test_tensors_at_the_edge_of_memory(isa, side):
    program = Path(__file__).with_name("guarded.py")
    child = subprocess.run([sys.executable, program, isa, side], capture_output=True, text=True)
    assert child.returncode == 0, f"ended with {child.returncode}; a signal, if negative\n{child.stderr[-3000:]}"
    assert child.stdout.split() == ["done"]
