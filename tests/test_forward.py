"""The forward values of the three sources: gathered rows, dense rows, nothing."""

import dataclasses
import math

import make
import mpmath
import numpy as np
import pytest
import torch
from helpers import (
    arranged,
    assert_close,
    assert_same_bits,
    assert_same_numbers,
    columns,
    default_dtype,
    exact_encoding,
    float32_frequencies,
    true_encoding,
    unit_roundoff,
    wide,
)

from posenc_ext import CONVENTIONS, Convention, reference
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding
from posenc_ext.ops import add

VASWANI = CONVENTIONS["vaswani"]
ENCODING_BOUND = {torch.float32: 1.5e-7, torch.float64: 1e-15}


def close_to_encoding(got, want, dtype, positions, what):
    """One error of a sine and, in 16 bits, one rounding. The truth in double precision is off by 2^-52 * |p|."""
    bound = ENCODING_BOUND[wide(dtype)] + 2.0**-52 * np.abs(np.asarray(positions, dtype=np.float64))[..., None]
    if dtype != wide(dtype):
        bound = bound + unit_roundoff(dtype) * 1.01
    assert_close(got, want, bound, what)


# ---- all conventions, dtypes, widths ---------------------------------------------------------------------------------

POSITIONS = [0, 1, 2, 7, 255, 256, 257, 1850, 4999, -5]


@make.each_convention
@make.each_precision
@make.each("width", make.WIDTHS)
def test_values(convention, precision, width):
    """PE alone against the truth; the other sources to the bit against what eager makes of it."""
    positions = torch.tensor(POSITIONS)
    truth = true_encoding(POSITIONS, width, convention, precision)
    options = {"convention": convention, "precision": precision}
    ids = torch.randint(9, positions.shape)
    for dtype in make.DTYPES:
        encoding = positional_encoding(positions, width, dtype=wide(dtype), **options)
        close_to_encoding(encoding, truth, wide(dtype), POSITIONS, f"encoding {dtype}")
        got = positional_encoding(positions, width, dtype=dtype, **options)
        assert_same_bits(got, encoding.to(dtype), f"PE {dtype}")

        weight = make.table(9, width, dtype=dtype)
        rows = weight[ids].to(wide(dtype)) * math.sqrt(width)
        got = embed(ids, weight, positions=positions, **options)
        assert_same_bits(got, (rows + encoding).to(dtype), f"embed {dtype}")

        x = torch.randn(len(POSITIONS), width).to(dtype)
        got = add_positional_encoding(x, positions=positions, **options)
        assert_same_bits(got, (x.to(wide(dtype)) + encoding).to(dtype), f"add {dtype}")
        got = add.run(x, positions, 0, convention.spec(precision), 1.7)
        assert_same_bits(got, (x.to(wide(dtype)) * 1.7 + encoding).to(dtype), f"scale and add {dtype}")


@make.each_convention
@make.each_precision
@pytest.mark.parametrize("width", [1, 3, 8, 130])
def test_running_index(convention, precision, width):
    """Without positions a token's position is its index, from the convention's first one, plus the offset."""
    weight, ids = make.table(width=width), make.ids((2, 20))
    for offset in (0, 3, -4, 10**6):
        positions = torch.arange(20) + offset + convention.first_position
        options = {"offset": offset, "convention": convention, "precision": precision}
        encoding = positional_encoding(20, width, **options)
        truth = true_encoding(positions, width, convention, precision)
        close_to_encoding(encoding, truth, torch.float32, positions, f"offset {offset}")
        # One sequence may be computed in another way than several.
        for given in (ids, ids[:1], ids[0]):
            rows = weight[given]
            assert_same_bits(embed(given, weight, **options), rows * math.sqrt(width) + encoding, f"embed, {offset}")
            assert_same_bits(add_positional_encoding(rows, **options), rows + encoding, f"add, {offset}")


@pytest.mark.parametrize("base", [1.0, 2.0, 37.5, 500000.0, 1e300])
@make.each_precision
def test_bases(base, precision):
    convention = dataclasses.replace(VASWANI, base=base, name="custom")
    truth = true_encoding(POSITIONS, 20, convention, precision)
    for dtype in make.DTYPES:
        got = positional_encoding(torch.tensor(POSITIONS), 20, convention=convention, precision=precision, dtype=dtype)
        close_to_encoding(got, truth, dtype, POSITIONS, f"{dtype}")


@make.each("convention", make.every_combination())
def test_every_combination_of_a_convention(convention):
    """Also those that no project uses; 515 is odd and has more pairs than a tile."""
    for width in (1, 2, 3, 4, 9, 515):
        truth = true_encoding(POSITIONS, width, convention, "exact")
        got = positional_encoding(torch.tensor(POSITIONS), width, convention=convention, precision="exact")
        close_to_encoding(got, truth, torch.float32, POSITIONS, f"width {width}")


# ---- against the textbook modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [6, 7, 64, 512])
def test_agrees_with_the_textbook_modules(width):
    """Up to position 5000, to 1e-4, wherever torch.exp rounds the frequency of their table correctly.

    It does in at least 95 % of the columns. In the others the frequency is off by one unit, up to 2^-24 radians per
    position, and the fp32 angle by one of its own, up to 2^-11: not ours to repeat, since torch.exp need not round
    alike on every machine.
    """
    lookup, table = reference.Embeddings(width, 30), reference.PositionalEncoding(width, 5000).pe[0]
    theirs = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width)).numpy()
    same = np.repeat(theirs == float32_frequencies(width, VASWANI), 2)[:width]
    assert same.mean() >= 0.95
    bound = np.where(same, 1e-4, 1e-4 + 5000 * 2.0**-24 + 2.0**-11)
    encoding = positional_encoding(5000, width)
    assert_close(encoding, table.double(), np.where(same, 5e-7, bound), "PE")
    ids = torch.randint(30, (2, 5000))
    with torch.no_grad():
        rows = lookup(ids)
        assert_close(embed(ids, lookup.lut.weight), (rows + table).double(), bound, "embed")
    assert_close(add_positional_encoding(rows), (rows + table).double(), bound, "add")


# ---- 16-bit tables ---------------------------------------------------------------------------------------------------


@make.each_dtype
@pytest.mark.parametrize("scale", [None, 0.0, 1.0, -2.5, 1e-3, 1 + 2.0**-8])
def test_token_scale(dtype, scale):
    """It is not rounded to the dtype of the table: the last one is 1 in bfloat16."""
    weight, ids = make.table(50, 33, dtype=dtype), torch.arange(50)
    rows = weight.to(wide(dtype)) * (math.sqrt(33) if scale is None else scale)
    assert_same_bits(scaled_embedding(ids, weight, token_scale=scale), rows.to(dtype), "rows")
    want = (rows + positional_encoding(50, 33, dtype=wide(dtype))).to(dtype)
    assert_same_bits(embed(ids, weight, token_scale=scale), want, "embed")
    scaled = add.run(weight, None, 0, make.spec(), math.sqrt(33) if scale is None else scale)
    assert_same_bits(scaled, want, "add")


# ---- far positions ---------------------------------------------------------------------------------------------------


def far(limit):
    """Positions up to 2^limit, spread evenly over their sizes, and around every power of two that matters."""
    random = np.random.default_rng(0)
    marks = {2**e + d for e in (16, 18, 24, 31, 32, 33, 40, 48, 62) for d in (-1, 0, 1) if 2**e + d <= 2**limit}
    return sorted(marks | {int(p) for p in np.exp2(random.uniform(8, limit, 30))})


@make.each("convention", [*make.every_combination(), Convention(base=2.0, name="base 2")])
@pytest.mark.parametrize("limit", [40, 62])
def test_exact_stays_exact(convention, limit):
    positions = [*far(limit), *(-p for p in far(limit)[-5:])]
    if limit == 62:
        positions += [2**63 - 1, -(2**63 - 1), -(2**63)]
    truth = exact_encoding(positions, 9, convention)
    for dtype, bound in {torch.float32: 2.5e-7, torch.float64: 1e-15}.items():
        got = positional_encoding(torch.tensor(positions), 9, convention=convention, precision="exact", dtype=dtype)
        assert_close(got, truth, bound, f"{dtype}")


@pytest.mark.parametrize("width", [9, 64])
@pytest.mark.parametrize("limit", [24, 62])
def test_reference_is_right_about_its_angle(width, limit):
    positions = [*far(limit), 2**63 - 1] if limit == 62 else far(limit)
    truth = true_encoding(positions, width, VASWANI, "reference")
    got = positional_encoding(torch.tensor(positions), width, precision="reference")
    assert_close(got, truth, 1.5e-7, "float32")


def test_reference_in_double_precision():
    """The fp32 angle, and its sine and cosine to fp64."""
    positions = far(62)
    frequencies = float32_frequencies(9, VASWANI)
    angles = np.array(positions, dtype=np.int64).astype(np.float32)[:, None] * frequencies
    with mpmath.workdps(50):
        sine = np.array([[float(mpmath.sin(float(a))) for a in row] for row in angles])
        cosine = np.array([[float(mpmath.cos(float(a))) for a in row] for row in angles])
    got = positional_encoding(torch.tensor(positions), 9, precision="reference", dtype=torch.float64)
    assert_close(got, arranged(sine, cosine, 9, VASWANI), 5e-16, "float64")


@make.each_convention
@make.each_precision
def test_negative_positions(convention, precision):
    """sin(-p) = -sin(p) and cos(-p) = cos(p), exactly, in every dtype."""
    positions = torch.tensor([1, 2, 3, 1000, 2**18 + 1, 2**25 + 3, 2**40, 2**62 + 12345])
    for width in (1, 8, 35):
        sines, cosines = columns(width, convention.layout, convention.odd)
        sign = torch.zeros(width)
        sign[sines], sign[cosines] = -1.0, 1.0
        for dtype in make.DTYPES:
            options = {"convention": convention, "precision": precision, "dtype": dtype}
            there = positional_encoding(positions, width, **options)
            back = positional_encoding(-positions, width, **options)
            assert torch.equal(back, there * sign.to(dtype)), (width, dtype)


# ---- token axes ------------------------------------------------------------------------------------------------------

SHAPES = [(), (5,), (1,), (2, 5), (5, 1), (1, 5), (2, 3, 4), (2, 1, 3, 4), (3, 2, 2, 1)]


def index_along_sequence(shape, batch_first):
    """The index along the sequence axis, for every token."""
    if not shape:
        return torch.tensor(0)
    axis = len(shape) - 1 if batch_first else 0
    return torch.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_sequence_axis(shape, batch_first):
    weight = torch.randn(9, 7)
    index = index_along_sequence(shape, batch_first)
    encoding = positional_encoding(index + 3, 7)
    for dtype in (torch.int64, torch.int32):
        ids = torch.randint(9, shape).to(dtype)
        rows = weight[ids.long()]
        want = rows * math.sqrt(7) + encoding
        assert_same_bits(embed(ids, weight, offset=3, batch_first=batch_first), want, "offset")
        for positions, offset in ((index + 3, 0), (index.contiguous().to(torch.int32), 3)):
            got = embed(ids, weight, positions=positions, offset=offset, batch_first=batch_first)
            assert_same_bits(got, want, "positions")
        for positions in (None, index):
            got = add_positional_encoding(rows, positions=positions, offset=3, batch_first=batch_first)
            assert_same_bits(got, rows + encoding, "add")


def position_views():
    """Name -> positions, batch_first for tokens [3, 4] (batch-first) or [4, 3]."""
    line = torch.tensor([5, 0, -3, 700])
    column = torch.tensor([[1], [40], [-7]])
    table = torch.randint(-50, 50, (3, 4))
    return {
        "one number": (torch.tensor(8), True),
        "[T]": (line, True),
        "[T], sequence first": (line, False),
        "[1, T]": (line[None], True),
        "[T, 1], sequence first": (line[:, None], False),
        "[B, 1]": (column, True),
        "[1, B], sequence first": (column.t(), False),
        "a row each": (table, True),
        "a row each, sequence first": (table.t(), False),
        "transposed": (table.t().contiguous().t(), True),
        "every second": (torch.randint(-50, 50, (6, 8))[::2, ::2], True),
        "expanded": (line.expand(3, 4), True),
        "expanded by rows": (column.expand(3, 4), True),
        "offset view": (torch.randint(-50, 50, (30,))[5:17].view(3, 4), True),
    }


@make.each(("positions", "batch_first"), position_views())
def test_positions_broadcast(positions, batch_first):
    shape = (3, 4) if batch_first else (4, 3)
    full = (positions[:, None] if positions.dim() == 1 and not batch_first else positions).expand(shape)
    weight = torch.randn(9, 10)
    ids = torch.randint(9, shape)
    encoding = positional_encoding(full.contiguous(), 10)
    for dtype in (torch.int64, torch.int32):
        kwargs = {"positions": positions.to(dtype), "batch_first": batch_first}
        assert_same_bits(embed(ids, weight, **kwargs), weight[ids] * math.sqrt(10) + encoding, "embed")
        assert_same_bits(add_positional_encoding(weight[ids], **kwargs), weight[ids] + encoding, "add")
    assert_same_bits(positional_encoding(full, 10), encoding, "PE")
    assert_same_bits(positional_encoding(full - 4, 10, offset=4), encoding, "PE, offset")


def test_three_batch_axes_of_positions():
    """Axes that cannot be walked with one stride are copied, and give the same."""
    positions = torch.randint(0, 99, (4, 3, 2, 5)).permute(2, 0, 1, 3)
    ids = torch.randint(9, (2, 4, 3, 5))
    weight = torch.randn(9, 6)
    for batch_first in (True, False):
        got = embed(ids, weight, positions=positions, batch_first=batch_first)
        assert_same_bits(got, embed(ids, weight, positions=positions.contiguous(), batch_first=batch_first), "embed")
        assert_same_bits(got, weight[ids] * math.sqrt(6) + positional_encoding(positions.contiguous(), 6), "parts")


ID_VIEWS = {
    "transposed": ((4, 3), lambda ids: ids.t()),
    "every second": ((6, 8), lambda ids: ids[::2, 1::2]),
    "expanded": ((1, 4), lambda ids: ids.expand(3, 4)),
    "one id": ((), lambda ids: ids.expand(3, 4)),
    "offset view": ((30,), lambda ids: ids[7:19].view(3, 4)),
}


@make.each(("shape", "view"), ID_VIEWS)
@make.each("dtype", [torch.int64, torch.int32])
def test_ids_of_any_strides(shape, view, dtype):
    ids, weight = view(make.ids(shape, dtype=dtype)), make.table()
    for batch_first in (True, False):
        want = embed(ids.contiguous().long(), weight, batch_first=batch_first)
        assert_same_bits(embed(ids, weight, batch_first=batch_first), want, f"batch_first={batch_first}")


WEIGHT_VIEWS = {
    "columns of a wider one": ((9, 50), lambda w: w[:, 3:38]),
    "every second column": ((9, 70), lambda w: w[:, 1::2]),
    "every second row": ((18, 35), lambda w: w[::2]),
    "transposed": ((35, 9), lambda w: w.t()),
    "offset view": ((400,), lambda w: w[7 : 7 + 9 * 35].view(9, 35)),
    "one row": ((1, 35), lambda w: w.expand(9, 35)),
    "one column": ((9, 1), lambda w: w.expand(9, 35)),
    "of three axes": ((9, 2, 35), lambda w: w[:, 1]),
}


@make.each_dtype
@make.each(("shape", "view"), WEIGHT_VIEWS)
def test_weight_of_any_strides(shape, view, dtype):
    weight, ids = view(make.x(shape, dtype=dtype)), make.ids((3, 4), 9)
    for part in (weight, weight[:, :1]):
        for convention in ("vaswani", "tensor2tensor"):
            want = embed(ids, part.contiguous(), convention=convention)
            assert_same_bits(embed(ids, part, convention=convention), want, f"{convention}, {tuple(part.shape)}")


@make.each_dtype
@make.each("name", ["permuted batch axes", *make.VIEWS])
def test_x_of_any_strides(name, dtype):
    permuted = make.x((2, 5, 3, 4, 35), dtype=dtype).permute(2, 1, 0, 3, 4)
    x = {"permuted batch axes": permuted, **make.views((3, 4), 35, dtype)}[name]
    for batch_first in (True, False):
        got = add_positional_encoding(x, batch_first=batch_first)
        assert_same_bits(got, add_positional_encoding(x.contiguous(), batch_first=batch_first), name)
        index = index_along_sequence(x.shape[:-1], batch_first)
        encoding = positional_encoding(index.contiguous(), 35, dtype=wide(dtype))
        assert_same_bits(got, (x.to(wide(dtype)) + encoding).to(dtype), name)
        assert got.is_contiguous()


# ---- special values, aliasing, nothing -------------------------------------------------------------------------------


@make.each_dtype
def test_special_numbers_pass_through(dtype):
    """And nothing spreads from a row to its neighbours."""
    weight = make.special(dtype, 37)
    encoding = positional_encoding(len(weight), 37, dtype=wide(dtype))
    want = (weight.to(wide(dtype)) * math.sqrt(37) + encoding).to(dtype)
    assert_same_numbers(embed(torch.arange(len(weight)), weight), want, "embed")
    assert_same_numbers(add_positional_encoding(weight), (weight.to(wide(dtype)) + encoding).to(dtype), "add")


IDS, POS, LINE, W, X = make.ids((2, 3)), make.ids((2, 3)), torch.arange(9), make.table(), make.x((2, 3, 8))
# Every public call, among them those with little to do: a function of its tensors, and the tensors.
CALLS = {
    "embed": (embed, (IDS, W)),
    "embed, positions": (lambda i, w, p: embed(i, w, positions=p), (IDS, W, POS)),
    "embed of all rows": (lambda i, w: embed(i, w, token_scale=1.0), (LINE, W)),
    "rows alone": (lambda i, w: scaled_embedding(i, w, token_scale=1.0), (LINE, W)),
    "rows of width 1": (lambda i, w: scaled_embedding(i, w, token_scale=1.0), (LINE, W[:, :1].contiguous())),
    "add": (add_positional_encoding, (X,)),
    "add, positions": (lambda x, p: add_positional_encoding(x, positions=p), (X, POS)),
    "add to a row at 0": (add_positional_encoding, (X[0, 0],)),
    "add nothing": (lambda x: add_positional_encoding(x, convention="tensor2tensor"), (X[..., :1].contiguous(),)),
    "PE": (lambda p: positional_encoding(p, 8), (POS,)),
    "PE of width 1 in fp64": (lambda p: positional_encoding(p, 1, dtype=torch.float64), (POS,)),
}


@make.each(("function", "tensors"), CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_inputs_are_not_written_and_results_have_memory_of_their_own(function, tensors, grad):
    tensors = [t.detach().clone().requires_grad_(grad and t.is_floating_point()) for t in tensors]
    copies = [t.detach().clone() for t in tensors]
    got = function(*tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert_same_bits(tensor, copy, "input")
    for other in (*tensors, function(*tensors)):
        assert got.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3), (0, 0), (2, 3, 0)], ids=str)
@make.each_dtype
def test_no_tokens(shape, dtype):
    ids = torch.zeros(shape, dtype=torch.int64)
    for rows in (0, 5):
        weight = torch.randn(rows, 6).to(dtype)
        for kwargs in ({}, {"positions": ids}, {"batch_first": False}, {"offset": 2**62}):
            got = embed(ids, weight, **kwargs)
            assert got.shape == (*shape, 6)
            assert got.dtype == dtype
    x = torch.zeros(*shape, 6, dtype=dtype)
    for kwargs in ({}, {"positions": ids.int()}, {"batch_first": False}):
        assert add_positional_encoding(x, **kwargs).shape == x.shape
    assert positional_encoding(ids, 6, dtype=dtype).shape == x.shape
    assert positional_encoding(0, 6).shape == (0, 6)
    assert scaled_embedding(ids, torch.randn(0, 6)).shape == x.shape


@make.each_dtype
def test_dtype_and_layout_of_the_result(dtype):
    for sample in make.samples("cpu", dtype, requires_grad=False):
        got = embed(sample.input, sample.weight, **sample.kwargs)
        assert got.dtype == dtype, sample.name
        assert got.shape == (*sample.input.shape, sample.weight.shape[1]), sample.name
        assert got.is_contiguous(), sample.name
    with default_dtype(wide(dtype)):
        assert positional_encoding(3, 4).dtype == wide(dtype)


# ---- max_norm (changes the table, then looks up) ---------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_max_norm_is_that_of_torch(norm_type):
    weight = torch.randn(9, 6) * 3
    ours, theirs = weight.clone(), weight.clone()
    ids = torch.tensor([[1, 1, 4], [8, 0, 1]])
    got = embed(ids, ours, max_norm=1.5, norm_type=norm_type)
    rows = torch.nn.functional.embedding(ids, theirs, max_norm=1.5, norm_type=norm_type)
    assert_same_bits(ours, theirs, "table")
    assert not torch.equal(ours, weight)
    assert_same_bits(got, rows * math.sqrt(6) + positional_encoding(3, 6), "embed")
