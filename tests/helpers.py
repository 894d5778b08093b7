"""Comparisons, and the truth that results are held to."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posenc_ext import _C, Convention
from posenc_ext.reference import sinusoid_table

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# ---- the process -----------------------------------------------------------------------------------------------------


def child(folder: Path) -> dict[str, Any]:
    """For a subprocess: where to start it, and how it finds the packages of this process.

    Not in the checkout, where the sources would hide the package that is installed.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"cwd": folder, "env": {**os.environ, "PYTHONPATH": path}}


def run_code(code: str, folder: Path, **environment: str) -> str:
    """Run Python code in a process of its own, which must end well; what it printed."""
    settings = child(folder)
    settings["env"].update(environment)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **settings)
    assert done.returncode == 0, f"ended with {done.returncode}; a signal, if negative\n{done.stderr[-2000:]}"
    return done.stdout


def dirty_memory(*sizes: int) -> None:
    """Leave NaNs in what the allocator hands out next."""
    for block in [torch.full((size,), math.nan) for size in sizes for _ in range(3)]:
        del block


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Ops(TorchDispatchMode):
    """Records the names of the ops that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def is_fused(module: Any, *args: Any) -> bool:
    """Whether a layer of ids runs one op of the package, or calls its `lut` and at most adds to what it returns."""
    with Ops() as ops:
        module(*args)
    own = [name for name in ops.names if name.startswith("posenc_ext::")]
    lookups = [name for name in ops.names if name.startswith(("aten::embedding", "aten::_embedding", "aten::index"))]
    assert len(own) <= 1, ops.names
    assert len(lookups) + any("embed" in name for name in own) == 1, ops.names
    return not lookups


# ---- comparisons -----------------------------------------------------------------------------------------------------


def as_array(tensor: Tensor) -> np.ndarray:
    """A view of a tensor for `_C.embed_raw`: NumPy has no bfloat16, so its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTS[tensor.element_size()])


def assert_same_bits(got: Tensor, want: Tensor, what: str = "") -> None:
    """Equal in shape, dtype and every bit: tells -0 from 0, and takes a NaN for itself."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    if not torch.equal(bits(got), bits(want)):
        different = (bits(got) != bits(want)).nonzero()
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{what}: {len(different)} differ, first at {at}: {got[at].item()!r} is not {want[at].item()!r}"
        )


def assert_same_numbers(got: Tensor, want: Tensor, what: str = "") -> None:
    """Equal bits, but for the bits of a NaN."""
    assert torch.equal(got.isnan(), want.isnan()), what
    assert_same_bits(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0), what)


def in_every_isa(force_isa: Callable[[str], None], call: Callable[[], Tensor], what: str = "") -> Tensor:
    """The result of a call, which has the same bits in every instruction set."""
    force_isa("baseline")
    want = call()
    for isa in _C.available_isas():
        force_isa(isa)
        assert_same_bits(call(), want, f"{what}, {isa}")
    return want


def assert_close(got: Tensor, want: Any, bound: Any, what: str = "") -> None:
    """|got - want| <= bound everywhere; `want` and `bound` in double precision."""
    error = np.abs(got.detach().double().numpy() - np.asarray(want, dtype=np.float64))
    excess = error - bound
    assert not np.isnan(error).any(), f"{what}: NaN"
    assert excess.size == 0 or excess.max() <= 0, (
        f"{what}: error {error.max():.3g} at {np.unravel_index(excess.argmax(), excess.shape)}"
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that a table of this type is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def message(*parts: Any) -> str:
    """A pattern for pytest.raises(match=): the parts, in order, as plain text."""
    return "(?s)" + ".*".join(re.escape(str(part)) for part in parts)


def assert_refused(call: Callable[[], object], *words: Any, error: type[Exception] = ValueError) -> None:
    """The call ends in this error, with these words in this order."""
    with pytest.raises(error, match=message(*words)):
        call()


# ---- the truth -------------------------------------------------------------------------------------------------------


def fields(convention: Convention) -> dict[str, Any]:
    """The arguments of `sinusoid_table` for a convention."""
    return {name: getattr(convention, name) for name in ("base", "divisor", "layout", "odd")}


def exponent(width: int, convention: Convention) -> tuple[int, int]:
    """(n, m) of the frequencies base^(-n k / m)."""
    if convention.odd == "round_up":
        width += width % 2
    half = width // 2
    return {"d": (2, width), "half": (1, max(half, 1)), "half_minus_1": (1, max(half - 1, 1))}[convention.divisor]


def pairs_of(width: int, convention: Convention) -> int:
    """The number of sines."""
    return width // 2 if convention.odd == "zero" else (width + 1) // 2


def float32_frequencies(width: int, convention: Convention) -> np.ndarray:
    """exp(fl32(n k) * fl32(-ln(base) / m)) as fp32, the frequencies of fp32 tables."""
    n, m = exponent(width, convention)
    step = np.float32(-math.log(convention.base) / m)
    angle = np.float32(n * np.arange(pairs_of(width, convention))) * step
    return np.exp(angle.astype(np.float64)).astype(np.float32)


@functools.cache
def columns(width: int, layout: str, odd: str) -> tuple[list[int], list[int]]:
    """The columns of the sines and of the cosines, fastest first: what changes sign with the position, and what not."""
    there, back = sinusoid_table([0.5, -0.5], width, base=4.0, layout=layout, odd=odd)
    sines, cosines = ([j for j in range(width) if there[j] == s * back[j] != 0] for s in (-1, 1))
    return sorted(sines, key=lambda j: -there[j]), sorted(cosines, key=lambda j: there[j])


def arranged(sine: np.ndarray, cosine: np.ndarray, width: int, convention: Convention) -> np.ndarray:
    """Sines and cosines [..., pairs] put into their columns."""
    result = np.zeros((*sine.shape[:-1], width))
    sines, cosines = columns(width, convention.layout, convention.odd)
    result[..., sines] = sine
    result[..., cosines] = cosine[..., : width // 2]
    return result


def true_encoding(positions: Any, width: int, convention: Convention, precision: str) -> np.ndarray:
    """The encoding in double precision: of the true angle, or of the fp32 angle that fp32 tables are made from."""
    positions = np.asarray(positions, dtype=np.int64)
    if precision == "exact":
        return sinusoid_table(positions, width, **fields(convention))
    angle = (positions.astype(np.float32)[..., None] * float32_frequencies(width, convention)).astype(np.float64)
    return arranged(np.sin(angle), np.cos(angle), width, convention)


def exact_encoding(positions: Any, width: int, convention: Convention) -> np.ndarray:
    """The encoding of whole numbers of any size, rounded once from 50 digits."""
    import mpmath  # here, so that what needs no such digits runs without it

    n, m = exponent(width, convention)
    with mpmath.workdps(60):
        base = mpmath.mpf(convention.base)
        frequencies = [base ** (mpmath.mpf(-n * k) / m) for k in range(pairs_of(width, convention))]
        sine = [[float(mpmath.sin(int(p) * w)) for w in frequencies] for p in positions]
        cosine = [[float(mpmath.cos(int(p) * w)) for w in frequencies] for p in positions]
    return arranged(np.array(sine), np.array(cosine), width, convention)


def true_gradient(
    grad: Tensor, ids: Tensor, rows: int, scale: float, padding_idx: int = -1, by_frequency: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The weight gradient in double precision, and a bound on the error of sums in fp32 (fp64), rounded once."""
    flat = ids.reshape(-1).numpy().astype(np.int64)
    values = grad.detach().double().reshape(len(flat), grad.shape[-1]).numpy()
    kept = flat != padding_idx
    flat, values = flat[kept], values[kept]
    counts = np.bincount(flat, minlength=rows)[:, None]
    factor = scale / np.maximum(counts, 1) if by_frequency else np.full(counts.shape, scale)
    order = np.argsort(flat, kind="stable")
    starts = np.flatnonzero(np.diff(flat[order], prepend=-1))
    total, size = np.zeros((rows, grad.shape[-1])), np.zeros((rows, grad.shape[-1]))
    if len(starts):
        used = flat[order][starts]
        total[used] = np.add.reduceat(values[order], starts) * factor[used]
        size[used] = np.add.reduceat(np.abs(values[order]), starts) * factor[used]
    # At most 64 additions within a chunk, then one for each chunk, and a product or two. In fp64 the truth rounds too.
    steps = 64 + counts / 64 + 4 + (counts if grad.dtype == torch.float64 else 0)
    bound = steps * unit_roundoff(wide(grad.dtype)) * size
    if grad.dtype != wide(grad.dtype):
        bound = bound + unit_roundoff(grad.dtype) * 1.01 * np.abs(total) + 2.0**-25
    return total, bound
