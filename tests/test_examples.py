"""The scripts of examples/, by the commands that their README names: what each of them says it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import child

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the checkout's examples"),
]
needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)


def run(folder: Path, script: str, *arguments: object, processes: int = 0) -> str:
    """What a script prints, on one thread; with `processes`, started by torchrun."""
    settings = child(folder)
    settings["env"]["OMP_NUM_THREADS"] = "1"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    command = [sys.executable, *launcher, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(label: str, text: str) -> list[float]:
    """Those of the line that starts with a label, percentages as fractions."""
    found = re.search(rf"^{re.escape(label)}(?=\s)(.*)$", text, re.MULTILINE)
    assert found, f"no line {label!r} in\n{text}"
    words = re.findall(r"(?<![\w.])(-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(%?)", found[1])
    return [float(number.replace(",", "")) / (100 if percent else 1) for number, percent in words]


def test_the_readme_names_every_example():
    text = (EXAMPLES / "README.md").read_text()
    scripts = [str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")]
    assert scripts
    assert [script for script in scripts if f"({script})" not in text] == []


def test_train_translation(tmp_path):
    text = run(tmp_path, "train_translation.py", "--steps", 200, "--plot", "curves.png")
    (floor,) = numbers("least loss without positions, ln(6!)/6:", text)
    for kind in ("textbook", "fused", "learned"):
        loss, faultless, _ = numbers(kind, text)
        assert loss < 0.05, text
        assert faultless > 0.95, text
    loss, faultless, _ = numbers("none", text)
    assert loss > floor, text
    assert faultless < 0.1, text
    start, _, later = numbers("textbook - fused at most:", text)
    assert start < 1e-5, text
    assert later < 0.05, text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_long_context(tmp_path):
    text = run(tmp_path, "long_context.py", "--queries", 64)
    for length in (512, 32768, 131072):
        found, error, kept = numbers(f"posenc_ext   {length:7}", text)
        assert found == 1, text
        assert error <= 2e-3, text  # half of the last bit of bfloat16 below 1
        assert kept == 0, text
    for length in (32768, 131072):
        assert numbers(f"frequencies  {length:7}", text)[0] < 0.1, text
    assert numbers(f"table        {131072:7}", text)[1] > 5e-3, text


def test_decode(tmp_path):
    text = run(tmp_path, "decode.py", "--steps", 17)
    for way in ("whole pass, eager", "cache, eager", "cache, compiled"):
        _, equal = numbers(way, text)
        assert equal == 1, text
    assert numbers("different tokens:", text)[0] > 10, text
    assert numbers("graphs compiled:", text) == [1], text


def test_left_padded_batch(tmp_path):
    text = run(tmp_path, "left_padded_batch.py")
    assert "input layer, bits equal to those of a prompt alone: yes" in text
    equal, difference = numbers("real tokens counted", text)
    assert equal == 1, text
    assert difference < 1e-4, text
    equal, difference = numbers("pads counted too", text)
    assert equal < 0.9, text
    assert difference > 0.01, text


@needs_gloo
def test_training_on_several_processes(tmp_path):
    text = run(tmp_path, "distributed/train.py", processes=2)
    before, after = numbers("one process", text)
    assert after < before - 0.5, text
    for kind, local in (("ddp", [31, 32]), ("fsdp2", [16, 32]), ("rowwise", [16, 32]), ("colwise", [31, 16])):
        *losses, difference, rows, columns, all_rows, all_columns = numbers(kind, text)
        assert losses == pytest.approx([before, after], abs=1e-3), text
        assert difference < 1e-3, text
        assert [rows, columns] == local, text
        assert [all_rows, all_columns] == [31, 32], text


@needs_gloo
def test_sequence_shards(tmp_path):
    text = run(tmp_path, "distributed/sequence_shards.py", processes=2)
    for way in ("offset", "positions", "DTensor"):
        assert re.search(rf"^{way} +bits of the whole: yes;", text, re.MULTILINE), text
        assert numbers(way, text)[0] < 1e-5, text


def test_export_onnx(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    text = run(tmp_path, "export_onnx.py", "model.onnx")
    assert "operators that are not ONNX's own: none" in text
    for shape in ("[2, 5]", "[1, 1]", "[3, 700]"):
        assert numbers(f"ids {shape}: onnxruntime and torch differ by at most", text)[0] < 1e-5, text
