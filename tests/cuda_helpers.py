"""What the tests of the CUDA half share. They hold it to the CPU half, to the bit.

POSENC_TEST_DEVICE=cpu runs them with the CPU in place of the GPU. That proves nothing about CUDA; it is how the tests
themselves are tested where there is no GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, message
from torch import Tensor

import posenc_ext
from posenc_ext import _C

DEVICE = os.environ.get("POSENC_TEST_DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"


def missing() -> str:
    """Why the tests cannot run here; empty if they can."""
    if not ON_GPU:
        return ""
    if not torch.cuda.is_available():
        return "needs a GPU: torch.cuda.is_available() is False"
    if not _C.build_info()["cuda"]:
        return "a GPU is there, but posenc_ext was built without its CUDA half"
    return ""


if reason := missing():
    pytest.skip(reason, allow_module_level=True)

gpu_only = pytest.mark.skipif(not ON_GPU, reason="about the GPU itself: nothing on a CPU can stand in")
two_gpus = pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")


def settle() -> None:
    """Wait for the device, and raise what it found."""
    if ON_GPU:
        torch.cuda.synchronize()
        posenc_ext.check_errors()


def needs_bytes(count: int) -> None:
    """Skip the test that calls it where memory is short."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if ON_GPU:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    if free < count:
        pytest.skip(f"needs {count / 2**30:.0f} GiB of memory, {free / 2**30:.1f} are free")


# ---- the same on both ------------------------------------------------------------------------------------------------


def moved(value: Any, device: str) -> Any:
    """Copies of tensors, also of those in tuples and dictionaries, on a device. Strides of views are not kept."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    return value


def assert_same(device: str, function: Callable[..., Tensor], *arguments: Any, what: str = "", **options: Any) -> None:
    """A call on the device gives the bits of the same call on the CPU, and gives them on the device."""
    got = function(*moved(arguments, device), **moved(options, device))
    assert got.device.type == torch.device(device).type, what
    assert_same_bits(got.cpu(), function(*arguments, **options), what)


def assert_gradient(got: Tensor | None, want: Tensor | None, what: str = "") -> None:
    """Equal to the bit; sparse ones in their layout as well."""
    assert got is not None, what
    assert want is not None, what
    assert got.is_sparse == want.is_sparse, what
    if got.is_sparse:
        assert got.is_coalesced() == want.is_coalesced(), what
        assert_same_bits(got._indices().cpu(), want._indices(), f"{what}, rows")
        got, want = got._values(), want._values()
    assert_same_bits(got.cpu(), want, what)


# ---- ids out of range ------------------------------------------------------------------------------------------------


def assert_refused(call: Callable[[], object], *words: Any) -> None:
    """IndexError by the time errors are asked for: at once on a CPU, when the kernel has run on a GPU."""
    with pytest.raises(IndexError, match=message(*words)):
        give_up_on(call)
    forget()


def give_up_on(call: Callable[[], object]) -> None:
    call()
    settle()


def forget() -> None:
    """Drop errors that a call left besides the one it was tested for, as a backward pass does after its forward."""
    for _ in range(8):
        try:
            return settle()
        except IndexError:
            pass
    raise AssertionError("check_errors() raises without end")


def sleep(seconds: float = 0.2) -> None:
    """Keep the current stream busy, so that whatever is queued behind it has not run when the host goes on."""
    torch.cuda._sleep(int(seconds * cycles_per_second()))


@functools.cache
def cycles_per_second() -> float:
    """Of the clock that `torch.cuda._sleep` counts."""
    torch.cuda._sleep(1_000_000)  # the first one loads the kernel
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / (start.elapsed_time(end) / 1000)
