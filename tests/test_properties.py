"""Random shapes, strides, dtypes and specs against the truth; the same examples every time."""

import dataclasses
import math

import make
import numpy as np
import torch
from helpers import (
    assert_close,
    assert_same_bits,
    dirty_memory,
    exact_encoding,
    true_encoding,
    true_gradient,
    unit_roundoff,
    wide,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posenc_ext import Convention
from posenc_ext.conventions import DIVISORS, LAYOUTS, ODD_RULES, PRECISIONS
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding

SETTINGS = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": [HealthCheck.too_slow]}

conventions = st.builds(
    Convention,
    divisor=st.sampled_from(list(DIVISORS)),
    base=st.one_of(st.sampled_from([1.0, 2.0, 10000.0]), st.floats(1, 1e6)),
    layout=st.sampled_from(list(LAYOUTS)),
    odd=st.sampled_from(list(ODD_RULES)),
    first_position=st.integers(0, 3),
)
token_shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
widths = st.one_of(st.integers(1, 40), st.sampled_from([64, 130, 511, 600]))
seeds = st.integers(0, 2**32 - 1)
scales = st.one_of(st.just(None), st.floats(0.01, 100))


def laid_out(tensor, random):
    """The same numbers with other strides: axes permuted, gaps between them, an offset."""
    rank = tensor.dim()
    if rank == 0:
        return tensor
    order = torch.randperm(rank, generator=random).tolist()
    steps = [int(torch.randint(1, 4, (), generator=random)) for _ in range(rank)]
    start = int(torch.randint(0, 4, (), generator=random))
    buffer = torch.full([tensor.shape[axis] * steps[axis] + start for axis in order], 77).to(tensor.dtype)
    view = buffer.permute([order.index(axis) for axis in range(rank)])
    view = view[tuple(slice(start, start + size * step, step) for size, step in zip(tensor.shape, steps, strict=True))]
    assert view.shape == tensor.shape
    return view.copy_(tensor)


@dataclasses.dataclass
class Batch:
    """Ids of any shape and strides, a table, perhaps positions; everything drawn from one seed."""

    ids: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor | None
    kwargs: dict
    places: np.ndarray  # the position of every token
    random: torch.Generator


@st.composite
def batches(draw, dtypes=make.DTYPES):
    shape, width, seed = draw(token_shapes), draw(widths), draw(seeds)
    rows = draw(st.integers(1, 30))
    batch_first, convention = draw(st.booleans()), draw(conventions)
    random = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from(dtypes))
    int_type = draw(st.sampled_from([torch.int64, torch.int32]))
    ids = laid_out(torch.randint(rows, shape, generator=random).to(int_type), random)
    weight = laid_out(torch.randn(rows, width, generator=random).to(dtype), random)
    limit = draw(st.sampled_from([10, 5000, 10**6]))
    offset = draw(st.integers(-limit, limit))
    kwargs = {"offset": offset, "batch_first": batch_first, "convention": convention}
    kwargs["precision"] = draw(st.sampled_from(list(PRECISIONS)))
    axis = len(shape) - 1 if batch_first else 0
    if draw(st.booleans()):
        # Some axes of size 1: what is broadcast there.
        own = [1 if draw(st.booleans()) else size for size in shape]
        positions = laid_out(torch.randint(-limit, limit + 1, own, generator=random), random)
        places = positions.expand(shape).numpy() + offset
    else:
        positions = None
        line = np.arange(shape[axis] if shape else 1).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        places = np.broadcast_to(line, shape) + offset + convention.first_position
    return Batch(ids, weight, positions, kwargs, places, random)


def truth(batch):
    """The encoding of every token, and how far off they may be in fp32 (fp64)."""
    convention, precision = batch.kwargs["convention"], batch.kwargs["precision"]
    encoding = true_encoding(batch.places, batch.weight.shape[1], convention, precision)
    bound = 1e-15 if batch.weight.dtype == torch.float64 else 1.5e-7
    # The truth itself is off by the rounding of its angle.
    return encoding, bound + 2.0**-52 * np.abs(batch.places, dtype=np.float64)[..., None]


def assert_sum(got, batch, rows):
    """Rows plus encoding, but for the rounding of a product, a sum of two terms and the store."""
    encoding, bound = truth(batch)
    dtype, size = batch.weight.dtype, np.abs(rows) + np.abs(encoding)
    bound = bound + 3 * unit_roundoff(wide(dtype)) * size + 2.0**-25 * (dtype == torch.float16)
    if dtype != wide(dtype):
        bound = bound + unit_roundoff(dtype) * 1.01 * size
    assert_close(got, rows + encoding, bound, f"{batch.kwargs}")


@settings(max_examples=120, **SETTINGS)
@given(batches(), scales)
def test_embed(batch, scale):
    got = embed(batch.ids, batch.weight, positions=batch.positions, token_scale=scale, **batch.kwargs)
    rows = batch.weight.double()[batch.ids.long()].numpy()
    assert_sum(got, batch, rows * (math.sqrt(batch.weight.shape[1]) if scale is None else scale))
    assert got.is_contiguous()
    assert got.dtype == batch.weight.dtype


@settings(max_examples=80, **SETTINGS)
@given(batches())
def test_add(batch):
    x = laid_out(batch.weight[batch.ids.long()], batch.random)
    got = add_positional_encoding(x, positions=batch.positions, **batch.kwargs)
    assert_sum(got, batch, x.double().numpy())


@settings(max_examples=80, **SETTINGS)
@given(batches())
def test_out_is_the_same_and_nothing_around_it_is_touched(batch):
    want = embed(batch.ids, batch.weight, positions=batch.positions, **batch.kwargs)
    start, gap = torch.randint(0, 9, (2,), generator=batch.random).tolist()
    end = start + want.shape[-1]
    buffer = torch.full((*want.shape[:-1], end + gap), 7.0, dtype=want.dtype)
    out = buffer[..., start:end]
    embed(batch.ids, batch.weight, positions=batch.positions, out=out, **batch.kwargs)
    assert_same_bits(out, want, f"{batch.kwargs}")
    assert (buffer[..., :start] == 7).all()
    assert (buffer[..., end:] == 7).all()


@settings(max_examples=120, **SETTINGS)
@given(batches(), st.floats(0.01, 100), st.booleans(), st.booleans(), st.integers(-1, 29))
def test_gradient(batch, scale, sparse, by_frequency, padding_idx):
    rows, width = batch.weight.shape
    padding_idx = min(padding_idx, rows - 1)
    weight = batch.weight.detach().requires_grad_()
    flags = {"scale_grad_by_freq": by_frequency, "padding_idx": padding_idx if padding_idx >= 0 else None}
    out = embed(batch.ids, weight, positions=batch.positions, token_scale=scale, sparse=sparse, **flags, **batch.kwargs)
    grad = laid_out(torch.randn(out.shape, generator=batch.random).to(weight.dtype), batch.random)
    dirty_memory(rows * width, rows * width // 2)
    (got,) = torch.autograd.grad(out, weight, grad)
    assert got.is_sparse == sparse
    assert got.dtype == weight.dtype
    want, bound = true_gradient(grad, batch.ids, rows, scale, padding_idx, by_frequency)
    assert_close(got.to_dense() if sparse else got, want, bound, f"{tuple(batch.ids.shape)}")


@settings(max_examples=60, **SETTINGS)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    st.integers(1, 12),
    conventions,
    st.sampled_from([torch.float32, torch.float64]),
)
def test_exact_at_any_position(positions, width, convention, dtype):
    got = positional_encoding(torch.tensor(positions), width, convention=convention, precision="exact", dtype=dtype)
    bound = 2.5e-7 if dtype == torch.float32 else 1e-15
    assert_close(got, exact_encoding(positions, width, convention), bound, f"{convention}")


@settings(max_examples=60, **SETTINGS)
@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=5),
    st.integers(-(2**62), 2**62),
    conventions,
    st.sampled_from(list(PRECISIONS)),
)
def test_an_offset_is_added_to_the_position(positions, offset, convention, precision):
    options = {"convention": convention, "precision": precision}
    want = positional_encoding(torch.tensor([p + offset for p in positions]), 9, **options)
    assert_same_bits(positional_encoding(torch.tensor(positions), 9, offset=offset, **options), want, "offset")
