"""What the tests share: sample inputs, and the truth that results are held to."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posenc_ext import CONVENTIONS, Convention
from posenc_ext.reference import sinusoid_table, wave_columns

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PRECISIONS = ("exact", "reference")
# Every remainder of a vector's length, a tile of 256 pairs and one more, and widths with nothing in the first pair.
WIDTHS = (1, 2, 3, 5, 6, 7, 8, 31, 127, 128, 130, 513, 1030)

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def child(folder: Path) -> dict[str, Any]:
    """For a subprocess: where to start it, and how it finds the packages of this process.

    Not in the checkout, where the sources would hide the package that is installed.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"cwd": folder, "env": {**os.environ, "PYTHONPATH": path}}


def name_of(value: Any) -> str:
    """A short id for a parametrised test."""
    return str(value).removeprefix("torch.")


# ---- sample inputs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    """One call `functional.embed(input, weight, **kwargs)`."""

    name: str
    weight: Tensor
    input: Tensor
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def sample_inputs(device: str, dtype: torch.dtype, requires_grad: bool) -> list[Sample]:
    """Small calls of every kind: shapes, strides, id types, positions, conventions, flags."""
    random = torch.Generator().manual_seed(0)

    def table(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=random).to(device, dtype).requires_grad_(requires_grad)

    def ids(*shape: int, rows: int = 11, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(rows, shape, generator=random).to(device, dtype)

    strided = torch.randn(11, 16, generator=random).to(device, dtype)[:, 3:9].requires_grad_(requires_grad)
    steps = torch.tensor([[4, -1, 70000], [0, 2, 2]], device=device)
    return [
        Sample("batch", table(11, 6), ids(2, 3)),
        Sample("int32 ids, odd width", table(11, 7), ids(2, 3, dtype=torch.int32)),
        Sample("one token", table(11, 6), ids()),
        Sample("no tokens", table(11, 6), ids(2, 0)),
        Sample("four axes, offset", table(11, 6), ids(2, 1, 3, 2), {"offset": 9}),
        Sample("sequence first", table(11, 6), ids(3, 2), {"batch_first": False}),
        Sample("transposed ids", table(11, 6), ids(3, 2).t()),
        Sample("expanded ids", table(11, 6), ids(1, 3).expand(4, 3)),
        Sample("positions", table(11, 6), ids(2, 3), {"positions": steps}),
        Sample("positions of a row", table(11, 6), ids(2, 3), {"positions": steps[0].to(torch.int32)}),
        Sample("table with strides", strided, ids(2, 3)),
        Sample("padding", table(11, 6), ids(2, 3, rows=3), {"padding_idx": 1}),
        Sample("scaled by frequency", table(11, 6), ids(2, 3, rows=3), {"scale_grad_by_freq": True}),
        Sample("tensor2tensor", table(11, 7), ids(2, 3), {"convention": "tensor2tensor"}),
        Sample("exact, far out", table(11, 6), ids(2, 3), {"precision": "exact", "offset": 2**40}),
        Sample("scale one", table(11, 6), ids(2, 3), {"token_scale": 1.0}),
    ]


def dirty_memory(*sizes: int) -> None:
    """Leave NaNs in what the allocator hands out next."""
    for block in [torch.full((size,), math.nan) for size in sizes for _ in range(3)]:
        del block


# ---- comparisons -----------------------------------------------------------------------------------------------------


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


# ---- the truth -------------------------------------------------------------------------------------------------------


def fields(convention: Convention) -> dict[str, Any]:
    """The arguments of `sinusoid_table` for a convention."""
    return {name: getattr(convention, name) for name in ("base", "divisor", "layout", "odd")}


def float32_frequencies(width: int, pairs: int, convention: Convention) -> np.ndarray:
    """exp(fl32(n k) * fl32(-ln(base) / denominator)) as fp32, the frequencies of fp32 tables."""
    if convention.odd == "round_up":
        width += width % 2
    numerator, denominator = (2, width) if convention.divisor == "d" else (1, max(width // 2 - 1, 1))
    step = np.float32(-math.log(convention.base) / denominator)
    exponent = np.float32(numerator * np.arange(pairs)) * step
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def arranged(sine: np.ndarray, cosine: np.ndarray, width: int, layout: str) -> np.ndarray:
    """Waves [..., pairs] put into their columns."""
    table = np.zeros((*sine.shape[:-1], width))
    sines, cosines = wave_columns(width, layout, sines=sine.shape[-1])
    table[..., sines] = sine
    table[..., cosines] = cosine[..., : width // 2]
    return table


def true_waves(positions: Any, width: int, convention: Convention, precision: str) -> np.ndarray:
    """The encoding in double precision: of the true angle, or of the fp32 angle that fp32 tables are made from."""
    positions = np.asarray(positions, dtype=np.int64)
    if precision == "exact":
        return sinusoid_table(positions, width, **fields(convention))
    pairs = width // 2 if convention.odd == "zero" else (width + 1) // 2
    angle = positions.astype(np.float32)[..., None] * float32_frequencies(width, pairs, convention)
    angle = angle.astype(np.float64)
    return arranged(np.sin(angle), np.cos(angle), width, convention.layout)


def exact_waves(positions: Any, width: int, convention: Convention) -> np.ndarray:
    """The encoding of whole numbers of any size, rounded once from 50 digits."""
    if convention.odd == "round_up":
        raise NotImplementedError
    import mpmath  # here, so that what needs no such digits runs without it

    pairs = width // 2 if convention.odd == "zero" else (width + 1) // 2
    with mpmath.workdps(60):
        base = mpmath.mpf(convention.base)
        if convention.divisor == "d":
            frequencies = [base ** (mpmath.mpf(-2 * k) / width) for k in range(pairs)]
        else:
            frequencies = [base ** (mpmath.mpf(-k) / max(width // 2 - 1, 1)) for k in range(pairs)]
        sine = [[float(mpmath.sin(int(p) * w)) for w in frequencies] for p in positions]
        cosine = [[float(mpmath.cos(int(p) * w)) for w in frequencies] for p in positions]
    return arranged(np.array(sine), np.array(cosine), width, convention.layout)


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
    # At most 64 additions within a piece, then one for each piece, and a product or two. In fp64 the truth rounds too.
    steps = 64 + counts / 64 + 4 + (counts if grad.dtype == torch.float64 else 0)
    bound = steps * unit_roundoff(wide(grad.dtype)) * size
    if grad.dtype != wide(grad.dtype):
        bound = bound + unit_roundoff(grad.dtype) * 1.01 * np.abs(total) + 2.0**-25
    return total, bound


NAMED = [CONVENTIONS[name] for name in CONVENTIONS]
