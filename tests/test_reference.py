"""The textbook twins against loops written from the formula, and mpmath."""

import functools
import itertools
import math

import make
import mpmath
import numpy as np
import pytest
import torch
from helpers import assert_refused, default_dtype, fields

from posenc_ext import reference

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 9, 16)
POSITIONS = (0, 1, 2, 3, 17, 4999, 2**24, -5, 0.5, -1234.25)


def column(p, j, d, *, base=10000.0, divisor="d", layout="interleaved", odd="sine"):
    """Column j of the encoding of p with 50 digits: one column at a time, straight from the definition."""
    with mpmath.workdps(50):
        half, p = d // 2, mpmath.mpf(p)
        width = d + 1 if odd == "round_up" and d % 2 else d

        def w(k):
            denominator = {"d": mpmath.mpf(width) / 2, "half": width // 2, "half_minus_1": width // 2 - 1}[divisor]
            return mpmath.mpf(base) ** (mpmath.mpf(-k) / (denominator or 1))

        sines = half + 1 if d % 2 and odd != "zero" else half
        order = {
            "interleaved": [(f, k) for k in range(half) for f in ("sin", "cos")] + [("sin", half)] * (sines - half),
            "sin_cos": [("sin", k) for k in range(sines)] + [("cos", k) for k in range(half)],
            "cos_sin": [("cos", k) for k in range(half)] + [("sin", k) for k in range(sines)],
        }[layout]
        if j >= len(order):
            return 0.0
        function, k = order[j]
        return float(getattr(mpmath, function)(p * w(k)))


def table_of_columns(positions, d, **spec):
    return np.array([[column(p, j, d, **spec) for j in range(d)] for p in positions])


# ---- Embeddings ------------------------------------------------------------------------------------------------------


def test_embeddings_give_the_published_example():
    torch.manual_seed(0)
    row = reference.Embeddings(6, 9)(torch.tensor([1]))
    published = [-0.7741, -5.1812, 0.7894, -3.0945, 0.8573, 0.7548]
    assert row.shape == (1, 6)
    assert np.round(row[0].tolist(), 4).tolist() == published


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 1, 3)])
def test_embeddings_scale_the_row_of_every_id(shape, dtype):
    module = reference.Embeddings(5, 7)
    ids = torch.randint(7, shape, dtype=dtype)
    out = module(ids)
    assert out.shape == (*shape, 5)
    assert out.dtype == torch.float32
    rows = module.lut.weight.tolist()
    expected = [[value * math.sqrt(5) for value in rows[i]] for i in ids.flatten().tolist()]
    np.testing.assert_allclose(out.detach().reshape(-1, 5), np.reshape(expected, (-1, 5)), rtol=2e-7)


def test_embeddings_train_the_rows_looked_up():
    module = reference.Embeddings(4, 3)
    module(torch.tensor([2, 2, 0])).sum().backward()
    np.testing.assert_array_equal(module.lut.weight.grad, [[2.0] * 4, [0.0] * 4, [4.0] * 4])


# ---- PositionalEncoding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", WIDTHS)
def test_positional_encoding_table(d):
    module = reference.PositionalEncoding(d, max_len=5000)
    assert list(module.state_dict()) == ["pe"]
    assert module.pe.shape == (1, 5000, d)
    assert module.pe.dtype == torch.float32
    for p in (0, 1, 2, 63, 1000, 4999):
        # Exponent, frequency and product are rounded to float32, each of which moves the angle by about 2 ** -24 of it.
        np.testing.assert_allclose(module.pe[0, p], table_of_columns([p], d)[0], rtol=0, atol=1e-7 + p * 4 * 2**-24)


def test_positional_encoding_table_is_formed_in_float32():
    """Old checkpoints hold the sine and cosine of the angle that float32 gives: every step of the formula rounded."""
    d, p, f32 = 64, 4999, np.float32
    row = reference.PositionalEncoding(d, max_len=5000).pe[0, p].tolist()
    for k in range(d // 2):
        exponent = f32(2 * k) * f32(-math.log(10000.0) / d)
        frequency = f32(mpmath.exp(mpmath.mpf(float(exponent))))
        # The exponential of a library may end on the number next to the right one.
        nearby = (frequency, np.nextafter(frequency, f32(0)), np.nextafter(frequency, f32(2)))
        angles = [mpmath.mpf(float(f32(p) * w)) for w in nearby]
        errors = [max(abs(row[2 * k] - mpmath.sin(a)), abs(row[2 * k + 1] - mpmath.cos(a))) for a in angles]
        assert min(errors) < 1.5e-7, k


def test_positional_encoding_adds_the_first_rows():
    module = reference.PositionalEncoding(6, max_len=8)
    x = torch.randn(3, 5, 6)
    out = module(x)
    expected = table_of_columns(range(5), 6)
    np.testing.assert_allclose(out - x, np.broadcast_to(expected, (3, 5, 6)), atol=5e-7)


def test_positions_end_with_their_table():
    for module, error, words in (
        (reference.PositionalEncoding(6, max_len=8), ValueError, "of its table"),
        (reference.LearnedPositionalEmbedding(8, 6), IndexError, "it has rows for"),
    ):
        assert module(torch.zeros(1, 8, 6)).shape == (1, 8, 6)
        call = functools.partial(module, torch.zeros(1, 9, 6))
        assert_refused(call, "at most max_len, the 8 positions", words, "got 9", error=error)


def test_positional_encoding_defaults_to_5000_positions_whatever_the_default_dtype():
    with default_dtype(torch.float64):
        module = reference.PositionalEncoding(2)
    assert module.pe.shape == (1, 5000, 2)
    # sin and cos of 4999 are those of its angle in float32, which is exact for whole numbers.
    np.testing.assert_allclose(module.pe[0, 4999].tolist(), [math.sin(4999), math.cos(4999)], atol=1e-7)


# ---- LearnedPositionalEmbedding --------------------------------------------------------------------------------------


def test_learned_positions_add_their_rows_and_learn():
    module = reference.LearnedPositionalEmbedding(4, 3)
    assert [(name, tuple(p.shape)) for name, p in module.named_parameters()] == [("weight", (4, 3))]
    x = torch.randn(2, 3, 3)
    out = module(x)
    rows = module.weight.tolist()
    for b, t, j in itertools.product(range(2), range(3), range(3)):
        assert out[b, t, j].item() == pytest.approx(x[b, t, j].item() + rows[t][j], abs=1e-6)
    out.sum().backward()
    np.testing.assert_array_equal(module.weight.grad, [[2.0] * 3] * 3 + [[0.0] * 3])


# ---- NumPy table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", WIDTHS)
def test_numpy_table_against_mpmath(d):
    assert reference.get_sinusoidal_positional_encoding(0, d).shape == (0, d)
    table = reference.get_sinusoidal_positional_encoding(40, d)
    assert table.shape == (40, d)
    assert table.dtype == np.float64
    np.testing.assert_allclose(table, table_of_columns(range(40), d), rtol=0, atol=40 * 2**-50)


# ---- sinusoid_table --------------------------------------------------------------------------------------------------


@make.each("convention", [c for base in (10000.0, 500.0) for c in make.every_combination(base=base)])
def test_table_of_every_convention_against_mpmath(convention):
    # The bound that the docstring gives.
    bound = 2.0**-52 * (1 + np.abs(POSITIONS))[:, np.newaxis]
    for d in WIDTHS:
        table = reference.sinusoid_table(POSITIONS, d, **fields(convention))
        assert table.shape == (len(POSITIONS), d)
        assert table.dtype == np.float64
        error = np.abs(table - table_of_columns(POSITIONS, d, **fields(convention)))
        assert (error <= bound).all(), (d, error.max())


def test_table_takes_positions_of_any_shape():
    positions = [[0, 1, 2], [3, 4, 5]]
    table = reference.sinusoid_table(positions, 3)
    assert table.shape == (2, 3, 3)
    np.testing.assert_allclose(table.reshape(6, 3), table_of_columns(range(6), 3), atol=1e-14)
    assert reference.sinusoid_table([], 3).shape == (0, 3)
    assert reference.sinusoid_table(7, 3).shape == (3,)


def numpy_form(seq_len=4, d_model=4):
    return reference.get_sinusoidal_positional_encoding(seq_len, d_model)


def table_form(**arguments):
    return reference.sinusoid_table([0, 1], **{"d_model": 4, **arguments})


@pytest.mark.parametrize(
    ("function", "name", "value", "rule"),
    [
        (numpy_form, "seq_len", -1, "must not be negative"),
        *[(form, "d_model", value, "must be positive") for form in (numpy_form, table_form) for value in (0, -3)],
        *[(table_form, "base", value, "must be positive") for value in (0.0, math.nan)],
        (table_form, "divisor", "third", "must be one of"),
        (table_form, "layout", "sines", "must be one of"),
        (table_form, "odd", "cosine", "must be one of"),
    ],
)
def test_tables_refuse(function, name, value, rule):
    assert_refused(lambda: function(**{name: value}), f"{name} {rule}", f"got {value!r}")
