"""The mathematics alone: frequencies, reduction of angles, polynomials."""

import mpmath
import numpy as np
import pytest
from helpers import exponent, run_code

from posenc_ext import _C, Convention
from posenc_ext.conventions import DIVISORS

ANGLE_BOUND32 = 1.1e-7
ANGLE_BOUND64 = 4e-16

# ---- sin and cos of a phase ------------------------------------------------------------------------------------------


def edges(bits):
    """Phases around every eighth of a turn, where the polynomials change over, and around every power of two."""
    turn = 1 << bits
    marks = [i * turn // 16 for i in range(16)] + [1 << i for i in range(bits)]
    return np.array(sorted({(mark + step) % turn for mark in marks for step in range(-3, 4)}), dtype=f"uint{bits}")


def phases32():
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    return np.concatenate([edges(32), random])


def phases64(count=1500):
    random = np.random.default_rng(1).integers(0, 1 << 64, count, dtype=np.uint64)
    return np.concatenate([edges(64), random])


def assert_sines(found, angles, bound):
    """With the digits that mpmath is set to."""
    for a, sine, cosine in zip(angles, *(part.tolist() for part in found), strict=True):
        assert abs(sine - mpmath.sin(a)) <= bound, a
        assert abs(cosine - mpmath.cos(a)) <= bound, a


def test_phase32_error():
    phases = phases32()
    sine, cosine = _C.sincos_of_phase32(phases)
    # The remainder of a half turn is exact in double precision, so that the truth is not off by the size of the angle.
    angle = phases.view(np.int32).astype(np.float64) * (2 * np.pi / 2**32)
    assert sine.dtype == cosine.dtype == np.float32
    assert np.abs(sine - np.sin(angle)).max() <= ANGLE_BOUND32
    assert np.abs(cosine - np.cos(angle)).max() <= ANGLE_BOUND32


def test_phase64_error():
    phases = phases64()
    found = _C.sincos_of_phase64(phases)
    assert [part.dtype for part in found] == [np.float64] * 2
    with mpmath.workdps(50):
        assert_sines(found, [2 * mpmath.pi * p / 2**64 for p in phases.tolist()], ANGLE_BOUND64)


@pytest.mark.parametrize("bits", [32, 64])
def test_phase_symmetry(bits):
    """A quarter turn swaps sine and cosine, and turning back negates the sine, both to the last bit."""
    sincos = getattr(_C, f"sincos_of_phase{bits}")
    phases = phases32() if bits == 32 else phases64(20_000)
    quarter = phases.dtype.type(1 << (bits - 2))
    sine, cosine = sincos(phases)
    next_sine, next_cosine = sincos(phases + quarter)
    np.testing.assert_array_equal(next_sine, cosine)
    np.testing.assert_array_equal(next_cosine, -sine)
    half_sine, half_cosine = sincos(phases + quarter + quarter)
    np.testing.assert_array_equal(half_sine, -sine)
    np.testing.assert_array_equal(half_cosine, -cosine)
    # Odd multiples of an eighth of a turn belong to the quarter after them, whichever way one comes.
    inner = phases % quarter != quarter // 2
    back_sine, back_cosine = sincos(np.zeros_like(phases) - phases)
    np.testing.assert_array_equal(back_sine[inner], -sine[inner])
    np.testing.assert_array_equal(back_cosine[inner], cosine[inner])


@pytest.mark.parametrize("bits", [32, 64])
def test_quarters_are_exact(bits):
    phases = np.array([i << (bits - 2) for i in range(4)], dtype=f"uint{bits}")
    sine, cosine = getattr(_C, f"sincos_of_phase{bits}")(phases)
    assert sine.tolist() == [0, 1, 0, -1]
    assert cosine.tolist() == [1, 0, -1, 0]


# ---- sin and cos of an fp32 angle ------------------------------------------------------------------------------------


def test_angle_error_up_to_2_18():
    random = np.random.default_rng(2)
    spread = (random.uniform(0, 2**18, 100_000), np.exp2(random.uniform(-40, 18, 100_000)))
    marks = np.arange(1000) * (np.pi / 4)  # where the polynomials change over
    last = np.nextafter(np.float32(2**18), np.float32(0))
    angles = np.concatenate([*spread, marks, [0.0, last]]).astype(np.float32)
    sine, cosine = _C.sincos_of_angle(angles)
    assert np.abs(sine - np.sin(angles.astype(np.float64))).max() <= ANGLE_BOUND32
    assert np.abs(cosine - np.cos(angles.astype(np.float64))).max() <= ANGLE_BOUND32


def test_angle_error_up_to_2_63():
    """Across every place where another reduction takes over (2^18, 2^24), and up to the largest position."""
    random = np.random.default_rng(3)
    marks = [np.float32(2.0**e) for e in range(15, 64)]
    around = [np.nextafter(mark, to) for mark in marks for to in (np.float32(0), np.float32(np.inf))]
    angles = np.concatenate([np.exp2(random.uniform(15, 63, 1500)), marks, around]).astype(np.float32)
    with mpmath.workdps(50):
        assert_sines(_C.sincos_of_angle(angles), angles.tolist(), ANGLE_BOUND32)


def test_tiny_angles():
    """sin x = x and cos x = 1 to fp32, down to the smallest numbers."""
    angles = np.array([0, 1e-44, 1e-40, 1.2e-38, 1e-30, 1e-20, 1e-10, 1e-5], dtype=np.float32)
    sine, cosine = _C.sincos_of_angle(angles)
    np.testing.assert_allclose(sine[3:], angles[3:], rtol=2e-7, atol=0)
    assert np.abs(sine[:3]).max() <= 1e-38  # subnormal: whatever, as long as it is nothing
    np.testing.assert_array_equal(cosine, np.ones_like(cosine))
    assert sine[0] == 0


# ---- frequencies -----------------------------------------------------------------------------------------------------

# base, divisor, width, pairs
TABLES = [
    *[(1e4, divisor, width, pairs) for divisor in DIVISORS for width, pairs in ((512, 256), (1, 1), (2, 1), (7, 4))],
    (10000.0, "half_minus_1", 3, 2),
    (10000.0, "half_minus_1", 4, 2),
    (10000.0, "half", 9, 5),
    (1.0, "d", 64, 32),
    *[(2.0, divisor, 130, 65) for divisor in DIVISORS],
    (3.7, "d", 6, 3),
    (1.0 + 2.0**-52, "d", 10, 5),
    (500000.0, "d", 128, 64),
    (1e300, "d", 100, 50),
    (1e300, "half_minus_1", 4, 2),
    (1.7976931348623157e308, "d", 50, 25),
    (10000.0, "d", 16384, 8192),
    (10000.0, "half_minus_1", 2**24 - 1, 9),
    (10000.0, "d", 2**24, 9),
]
each_table = pytest.mark.parametrize(("base", "divisor", "width", "pairs"), TABLES)


def frequency_table(base, divisor, width, pairs):
    """The table, and (numerator, denominator) of the exponent -k * numerator / denominator."""
    return _C.frequency_table(base, DIVISORS[divisor], width, pairs), *exponent(width, Convention(divisor=divisor))


def some_of(pairs):
    """Every pair of a small table, some of a large one; always the last."""
    return sorted({*range(0, pairs, max(1, pairs // 64)), pairs - 1})


@each_table
def test_turns_to_128_bits(base, divisor, width, pairs):
    table, numerator, denominator = frequency_table(base, divisor, width, pairs)
    words = table["turns"]
    assert words.shape == (4, pairs)
    assert words.dtype == np.uint32
    with mpmath.workdps(70):
        for k in some_of(pairs):
            got = sum(int(words[i, k]) << (96 - 32 * i) for i in range(4))
            want = mpmath.power(base, mpmath.mpf(-numerator * k) / denominator) / (2 * mpmath.pi) * 2**128
            assert abs(got - want) <= 8, (k, float(got - want))


def test_half_is_d_at_even_widths():
    for width in (2, 4, 130, 1022):
        half, d = (_C.frequency_table(1e4, DIVISORS[name], width, width // 2) for name in ("half", "d"))
        assert all(np.array_equal(half[key], d[key]) for key in ("turns", "angular"))
    half, d = (_C.frequency_table(1e4, DIVISORS[name], 7, 3) for name in ("half", "d"))
    assert not np.array_equal(half["turns"], d["turns"])


@each_table
def test_angular_is_correctly_rounded(base, divisor, width, pairs):
    """exp(fl32(n k) * fl32(-ln(base) / denominator)) to the nearest fp32 number."""
    table, numerator, denominator = frequency_table(base, divisor, width, pairs)
    angular = table["angular"]
    assert angular.shape == (pairs,)
    assert angular.dtype == np.float32
    step = np.float32(-np.log(base) / denominator)
    with mpmath.workdps(40):
        for k in some_of(pairs):
            got = angular[k]
            want = mpmath.exp(mpmath.mpf(float(np.float32(numerator * k) * step)))
            error = abs(mpmath.mpf(float(got)) - want)
            for other in (np.nextafter(got, np.float32(0)), np.nextafter(got, np.float32(2))):
                assert error <= abs(mpmath.mpf(float(other)) - want), k


def test_a_table_does_not_depend_on_how_much_of_it_is_asked_for():
    whole = _C.frequency_table(10000.0, 0, 512, 256)
    part = _C.frequency_table(10000.0, 0, 512, 7)
    np.testing.assert_array_equal(part["turns"], whole["turns"][:, :7])
    np.testing.assert_array_equal(part["angular"], whole["angular"][:7])


def test_tables_of_many_bases(tmp_path):
    """Those used last are kept, up to 8 MiB; a table that was dropped comes out the same again, in any thread."""
    code = """
import os, torch
from concurrent.futures import ThreadPoolExecutor
from posenc_ext import Convention
from posenc_ext.functional import positional_encoding

def total(base):
    row = positional_encoding(torch.tensor([977]), 1024, convention=Convention(base=base))
    return row.view(torch.int32).sum().item()

def memory():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
bases = [1000.0 + i for i in range(3000)]
before, few = memory(), [total(base) for base in bases[:200]]
with ThreadPoolExecutor(4) as pool:
    totals = list(pool.map(total, bases))
print(memory() - before)
assert totals[:200] == few == [total(base) for base in bases[:200]] and len(set(totals)) > 2900
"""
    assert int(run_code(code, tmp_path)) < 2**25
