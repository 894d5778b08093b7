"""The textbook twins against loops written from the formula, and mpmath."""

import itertools
import math

import make
import mpmath
import numpy as np
import pytest
import torch
from helpers import default_dtype, fields
from hypothesis import given
from hypothesis import strategies as st

from posenc_ext import reference

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 9, 16)
POSITIONS = (0, 1, 2, 3, 17, 4999, 2**24, -5, 0.5, -1234.25)


def column(p, j, d, *, base=10000.0, divisor="d", layout="interleaved", odd="sine"):
    """Column j of the encoding of p with 50 digits: one column at a time, straight from the definition."""
    with mpmath.workdps(50):
        half, p = d // 2, mpmath.mpf(p)
        width = d + 1 if odd == "round_up" and d % 2 else d

        def w(k):
            exponent = mpmath.mpf(-2 * k) / width if divisor == "d" else mpmath.mpf(-k) / max(width // 2 - 1, 1)
            return mpmath.mpf(base) ** exponent

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
    for row in range(3):
        np.testing.assert_allclose(out[row] - x[row], expected, atol=5e-7)


def test_positional_encoding_ends_with_its_table():
    module = reference.PositionalEncoding(6, max_len=8)
    assert module(torch.zeros(1, 8, 6)).shape == (1, 8, 6)
    with pytest.raises(ValueError, match=r"at most max_len, the 8 positions of its table, got 9"):
        module(torch.zeros(1, 9, 6))


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


def test_learned_positions_end_where_the_sinusoid_goes_on():
    learned = reference.LearnedPositionalEmbedding(4, 3)
    assert learned(torch.zeros(1, 4, 3)).shape == (1, 4, 3)
    with pytest.raises(IndexError, match=r"at most max_len, the 4 positions it has rows for, got 5"):
        learned(torch.zeros(1, 5, 3))


# ---- NumPy table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", WIDTHS)
def test_numpy_table_against_mpmath(d):
    table = reference.get_sinusoidal_positional_encoding(40, d)
    assert table.shape == (40, d)
    assert table.dtype == np.float64
    np.testing.assert_allclose(table, table_of_columns(range(40), d), rtol=0, atol=40 * 2**-50)


def test_numpy_table_of_no_positions():
    assert reference.get_sinusoidal_positional_encoding(0, 5).shape == (0, 5)


@pytest.mark.parametrize(
    ("seq_len", "d_model", "message"),
    [
        (-1, 4, "seq_len must not be negative, got -1"),
        (4, 0, "d_model must be positive, got 0"),
        (4, -2, "d_model must be positive, got -2"),
    ],
)
def test_numpy_table_refuses(seq_len, d_model, message):
    with pytest.raises(ValueError, match=message):
        reference.get_sinusoidal_positional_encoding(seq_len, d_model)


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


def test_table_rows_written_out():
    s, c = math.sin, math.cos

    def row(d, **spec):
        return reference.sinusoid_table(1, d, **spec).tolist()

    near = pytest.approx
    assert row(4) == near([s(1), c(1), s(0.01), c(0.01)], abs=1e-15)
    assert row(4, layout="sin_cos") == near([s(1), s(0.01), c(1), c(0.01)], abs=1e-15)
    assert row(4, layout="cos_sin") == near([c(1), c(0.01), s(1), s(0.01)], abs=1e-15)
    assert row(4, divisor="half_minus_1") == near([s(1), c(1), s(1e-4), c(1e-4)], abs=1e-15)
    assert row(5, odd="zero", layout="sin_cos", base=32.0) == near([s(1), s(0.25), c(1), c(0.25), 0], abs=1e-15)
    assert row(5, odd="zero", layout="cos_sin", base=32.0) == near([c(1), c(0.25), s(1), s(0.25), 0], abs=1e-15)
    assert row(5, base=32.0) == near([s(1), c(1), s(0.25), c(0.25), s(0.0625)], abs=1e-15)
    assert row(5, layout="sin_cos", base=32.0) == near([s(1), s(0.25), s(0.0625), c(1), c(0.25)], abs=1e-15)
    assert row(5, layout="cos_sin", base=32.0) == near([c(1), c(0.25), s(1), s(0.25), s(0.0625)], abs=1e-15)
    assert row(5, odd="round_up", base=64.0) == near([s(1), c(1), s(0.25), c(0.25), s(0.0625)], abs=1e-15)
    assert row(1) == near([s(1)])
    assert row(1, odd="zero") == [0.0]


def test_table_takes_positions_of_any_shape():
    positions = [[0, 1, 2], [3, 4, 5]]
    table = reference.sinusoid_table(positions, 3)
    assert table.shape == (2, 3, 3)
    np.testing.assert_allclose(table.reshape(6, 3), table_of_columns(range(6), 3), atol=1e-14)
    assert reference.sinusoid_table([], 3).shape == (0, 3)
    assert reference.sinusoid_table(7, 3).shape == (3,)


@given(p=st.integers(-10_000, 10_000), n=st.integers(-10_000, 10_000), half=st.integers(1, 8))
def test_moving_on_is_a_rotation_of_every_pair(p, n, half):
    """The lesson of the module docstring: the step from p to p + n is the same matrix for all p."""
    here, there = reference.sinusoid_table([p, p + n], 2 * half)
    for k in range(half):
        turn = n * 10000.0 ** (-k / half)
        sine, cosine = here[2 * k], here[2 * k + 1]
        assert there[2 * k] == pytest.approx(sine * math.cos(turn) + cosine * math.sin(turn), abs=1e-10)
        assert there[2 * k + 1] == pytest.approx(cosine * math.cos(turn) - sine * math.sin(turn), abs=1e-10)


def test_frequencies_of_half_minus_1_end_at_one_over_base():
    frequencies = reference.sinusoid_frequencies(16, base=500.0, divisor="half_minus_1")
    assert len(frequencies) == 8
    assert frequencies[0] == 1
    assert frequencies[-1] == pytest.approx(1 / 500, rel=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 0}, "d_model must be positive, got 0"),
        ({"d_model": -3}, "d_model must be positive, got -3"),
        ({"base": 0.0}, "base must be positive, got 0.0"),
        ({"base": math.nan}, "base must be positive, got nan"),
        ({"divisor": "half"}, "divisor must be one of .*, got 'half'"),
        ({"layout": "sines"}, "layout must be one of .*, got 'sines'"),
        ({"odd": "cosine"}, "odd must be one of .*, got 'cosine'"),
    ],
)
def test_table_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        reference.sinusoid_table(**{"positions": [0, 1], "d_model": 4, **arguments})
