"""Which convention a table follows: told from its numbers, and nothing told of numbers that are none."""

from __future__ import annotations

import dataclasses

import make
import pytest
import torch
from helpers import assert_refused, fields
from torch import Tensor

from posenc_ext import CONVENTIONS, Convention, Identified, PositionalEncoding, functional, identify_convention
from posenc_ext.reference import sinusoid_frequencies, sinusoid_table

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def table(convention: Convention, rows: int, width: int, start: int = 0) -> Tensor:
    """In fp64, made without the ops."""
    return torch.from_numpy(sinusoid_table(range(start, start + rows), width, **fields(convention)))


def found_in(numbers: Tensor) -> Identified:
    found = identify_convention(numbers)
    assert found is not None
    return found


@make.each_convention
@make.each("dtype", DTYPES)
def test_every_named_convention(convention, dtype):
    """From its first position. The precision shows in the last rows of tables that are as exact as fp32."""
    for width, rows in ((5, 9), (16, 64), (37, 300), (64, 300)):
        numbers = functional.positional_encoding(rows, width, convention=convention, dtype=dtype)
        found = found_in(numbers)
        got, want = found.convention, convention
        assert (got.divisor, got.base, got.layout, found.start) == (
            want.divisor,
            want.base,
            want.layout,
            want.first_position,
        )
        assert (found.divisor, found.base, found.layout, found.odd) == (got.divisor, got.base, got.layout, got.odd)
        assert width % 2 == 0 or got.odd == convention.odd
        assert (found.scale, found.padding_row) == (1, None)
        assert found.difference <= torch.finfo(dtype).eps
        if rows == 300 and dtype in (torch.float32, torch.float64) and convention.name != "positional_encodings":
            assert got == convention


@make.each("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 16**-0.5, 4.0, 0.731])
def test_scales(scale, dtype):
    """Constants that projects use exactly, trained ones as well as the numbers say."""
    for convention in (CONVENTIONS["vaswani"], CONVENTIONS["musicgen"]):
        found = found_in((table(convention, 50, 16) * scale).to(dtype))
        assert (found.divisor, found.layout) == (convention.divisor, convention.layout)
        assert found.scale == (scale if scale != 0.731 else pytest.approx(scale, rel=torch.finfo(dtype).eps))
        assert found.difference <= 8 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("base", [2.0, 500.0, 20000.0, 500000.0, 1e6, 1230.0])
@make.each_convention
def test_bases(convention, base):
    """Of a base with few digits all are found; of any other as many as the table tells."""
    own = dataclasses.replace(convention, base=base)
    for width in (15, 16, 64):
        for dtype in (torch.float64, torch.float32):
            found = found_in(table(own, 100, width).to(dtype))
            assert (found.base, found.divisor, found.layout) == (base, own.divisor, own.layout)
            assert width % 2 == 0 or found.odd == own.odd
    odd = dataclasses.replace(convention, base=10000 * 1.37 ** (64 / 62))
    found = found_in(table(odd, 300, 64).float())  # or with the base that the other divisor needs for it
    got, want = (sinusoid_frequencies(64, base=c.base, divisor=c.divisor) for c in (found, odd))
    assert got == pytest.approx(want, rel=5e-6)


@pytest.mark.parametrize("start", [-3, 0, 1, 2, 4990])
def test_first_positions(start):
    found = found_in(table(CONVENTIONS["tensor2tensor"], 40, 32, start))
    assert found.start == found.convention.first_position == start
    names = {0: "tensor2tensor", 1: "opennmt_tf", 2: "fairseq"}
    assert found.convention.name == names.get(start, f"'tensor2tensor' with first position {start}")


@make.each("dtype", DTYPES)
@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_row_for_pads(row, dtype):
    """Fairseq's and M2M100's tables hold zeros at padding_idx, and the first position is behind it."""
    numbers = table(CONVENTIONS["fairseq"], 40, 16).to(dtype)
    numbers[row] = 0
    found = found_in(numbers)
    assert (found.padding_row, found.start, found.convention.first_position) == (row, 0, row + 1)
    if row == 1:
        assert found.convention.name.startswith(("fairseq", "'fairseq'"))
    numbers[20] = 0
    assert identify_convention(numbers) is None


def test_short_tables():
    """Two rows tell all there is; one row of a table tells its order and its position."""
    for convention in CONVENTIONS.values():
        for rows in (1, 2, 3):
            for start in {1, convention.first_position or 1}:
                found = found_in(table(convention, rows, 16, start))
                assert (found.base, found.layout, found.start) == (10000, convention.layout, start)
                assert found.divisor == convention.divisor
    for width in (2, 3):  # too narrow to tell a base
        assert found_in(table(CONVENTIONS["sin_cos"], 9, width)).base == 10000


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_numbers_that_were_rounded_once(narrow):
    """A model that was cast and cast back."""
    rounded = table(CONVENTIONS["vaswani"], 200, 32).to(narrow).double()
    assert found_in(rounded).base == 10000
    assert identify_convention(rounded + torch.finfo(narrow).eps * torch.rand_like(rounded)) is None


def test_shapes():
    numbers = PositionalEncoding(16, 30).pe[0]
    want = found_in(numbers)
    for given in (
        numbers[None],
        numbers[:, None],
        numbers[None, :, None],
        numbers.numpy(),
        torch.nn.Parameter(numbers),
    ):
        assert found_in(given) == want
    for shape in ((16,), (2, 15, 16)):
        text = f"table must have shape [length, D], with axes of size 1 at most among them, got {list(shape)}"
        assert_refused(lambda shape=shape: identify_convention(torch.zeros(shape)), text)
    for wrong in (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4).to_sparse()):
        assert_refused(lambda wrong=wrong: identify_convention(wrong), "table must be a dense", error=TypeError)


NOTHING = {
    "noise": lambda x: torch.randn_like(x),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "a row twice": lambda x: x.index_copy(0, torch.tensor(7), x[8:9]),
    "a far row": lambda x: x.index_copy(0, torch.tensor(399), x[:1]),
    "not a number": lambda x: x.index_fill(0, torch.tensor(3), float("nan")),
    "columns exchanged": lambda x: x.roll(1, dims=1),
    "trained": lambda x: x + 0.01 * torch.randn_like(x),
    "other frequencies": lambda x: torch.cat([x[:, :16], x[:, :16]], dim=1),
    "no rows": lambda x: x[:0],
    "one column": lambda x: x[:, :1],
}


@make.each("wrong", NOTHING)
def test_nothing_is_found(wrong):
    assert identify_convention(wrong(table(CONVENTIONS["vaswani"], 400, 32).float())) is None


def test_a_convention_of_one_s_own():
    own = Convention("half", base=300.0, layout="cos_sin", odd="zero")
    found = found_in(table(own, 40, 9).float())
    assert (found.divisor, found.base, found.layout, found.odd) == ("half", 300.0, "cos_sin", "zero")
    layer = PositionalEncoding(9, convention=found.convention)
    layer.load_state_dict({"pe": table(own, 40, 9).float()})
