"""Fixtures: what a test changes for the whole process is put back after it."""

import pytest
import torch

from posenc_ext import _C, functional


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Call it to set the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def force_isa():
    """Call it to choose the instruction set."""
    before = _C.active_isa()
    yield _C.force_isa
    _C.force_isa(before)


@pytest.fixture
def torchs_dropout(monkeypatch):
    """Dropout after the pass, by torch, so that layers drop what the textbook's modules drop."""
    monkeypatch.setattr(functional, "_drops_apart", lambda *_: True)


@pytest.fixture
def device():
    """Where the tests of the CUDA half run. A test that puts in an id out of range must itself wait for the error."""
    from cuda_helpers import DEVICE, settle

    yield DEVICE
    settle()


@pytest.fixture(scope="session")
def cuda_builder(tmp_path_factory):
    """What is compiled of the CUDA half for the CPU, once for all its tests."""
    from cuda_on_cpu import build

    builder = build.Builder(tmp_path_factory.mktemp("cuda_on_cpu"))
    yield builder
    builder.close()
