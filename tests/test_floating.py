"""Positions that are no integers, and frequencies that are given: values, gradients, tracing, modules, errors."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from typing import Any

import make
import mpmath
import numpy as np
import pytest
import torch
from helpers import assert_same_bits, in_every_isa
from hypothesis import given, settings
from hypothesis import strategies as st
from make import B, D, T, V
from test_properties import SETTINGS
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import posenc_ext
from posenc_ext import CONVENTIONS, Convention
from posenc_ext.functional import add_positional_encoding, angular_frequencies, embed, positional_encoding
from posenc_ext.reference import sinusoid_columns

ops = torch.ops.posenc_ext
FLOATING = (torch.float32, torch.float64)
# Where one formula gives way to another, fractions of every size, and both signs.
NUMBERS = [
    0.0,
    0.5,
    1 / 3,
    -2.75,
    4999.9,
    1e-6,
    -1e-12,
    2**18 + 0.25,
    -(2**18),
    2**24 + 2.0,
    2**31 + 0.5,
    2**32 - 0.125,
]
NUMBERS += [-(2**32) - 0.375, 2**40 - 0.0625, -(2**40)]


def frequencies_of(convention: Convention, width: int) -> list[Any]:
    """From the formula of the convention's divisor."""
    whole = width + width % 2 if convention.odd == "round_up" else width
    pairs = width // 2 if convention.odd == "zero" else (width + 1) // 2
    with mpmath.workdps(60):
        k = [mpmath.mpf(i) for i in range(pairs)]
        base = mpmath.mpf(convention.base)
        if convention.divisor == "half_minus_1":
            return [base ** (-i / max(whole // 2 - 1, 1)) for i in k]
        return [base ** (-2 * i / whole if convention.divisor == "d" else -i / (whole // 2)) for i in k]


def truth(positions: Tensor, frequencies: list[Any], width: int, layout: str, turn: int = 0) -> Tensor:
    """The encoding, or its derivative by the angle (`turn` 1), in float64."""
    sines, cosines = sinusoid_columns(width, layout, sines=len(frequencies))
    table = np.zeros((positions.numel(), width))
    with mpmath.workdps(60):
        for row, p in enumerate(positions.double().flatten().tolist()):
            angles = [mpmath.mpf(p) * w for w in frequencies]
            first, second = (mpmath.sin, mpmath.cos) if not turn else (mpmath.cos, lambda a: -mpmath.sin(a))
            table[row, sines] = [float(first(a)) for a in angles]
            table[row, cosines] = [float(second(a)) for a in angles[: len(cosines)]]
    return torch.from_numpy(table).view(*positions.shape, width)


def in_fp32(positions: Tensor, frequencies: Tensor, width: int, layout: str) -> Tensor:
    """As peers form the angle, and its sine and cosine without further error."""
    sines, cosines = sinusoid_columns(width, layout, sines=len(frequencies))
    angles = (positions.float().unsqueeze(-1) * frequencies.float()).double().numpy()
    table = np.zeros((*positions.shape, width))
    table[..., sines], table[..., cosines] = np.sin(angles), np.cos(angles[..., : len(cosines)])
    return torch.from_numpy(table)


def refused(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


# ---- values ----------------------------------------------------------------------------------------------------------


@make.each_convention
@make.each("width", (6, 7))
@make.each("dtype", FLOATING)
def test_positions_are_exact(convention, width, dtype):
    """To 2.5e-7 at any float64 position up to 2^40; sin(-p) = -sin(p) and cos(-p) = cos(p) to the bit."""
    positions = torch.tensor(NUMBERS, dtype=dtype)
    want = truth(positions, frequencies_of(convention, width), width, convention.layout)
    for out, bound in ((torch.float32, 2.5e-7), (torch.float64, 1e-15)):
        at = {"convention": convention, "precision": "exact", "dtype": out}
        got = positional_encoding(positions, width, **at)
        assert (got - want).abs().max() < bound
        pairs = sinusoid_columns(width, convention.layout, sines=len(frequencies_of(convention, width)))
        mirrored = positional_encoding(-positions, width, **at)
        assert_same_bits(mirrored[:, pairs[0]] + 0.0, -got[:, pairs[0]] + 0.0)  # + 0: of either zero
        assert_same_bits(mirrored[:, pairs[1]], got[:, pairs[1]])


@make.each("dtype", FLOATING)
def test_positions_of_precision_reference_are_those_of_peers(dtype):
    positions = torch.tensor(NUMBERS, dtype=dtype)
    for convention in CONVENTIONS.values():
        w = angular_frequencies(D, convention=convention, precision="reference")
        got = positional_encoding(positions, D, convention=convention, precision="reference")
        assert (got - in_fp32(positions, w, D, convention.layout)).abs().max() < 1.2e-7


@make.each_precision
@make.each("dtype", make.DTYPES)
def test_a_whole_number_is_the_integer(precision, dtype):
    """To the bit, wherever it comes from."""
    integers = torch.tensor([[0, 1, -7, 4999], [2**23, -(2**24), 3, 2**18]])
    weight, ids = make.table(V, 34, dtype=dtype), torch.randint(V, (2, 4))
    x = make.x((2, 4, 34), dtype=dtype)
    for convention in ("vaswani", "tensor2tensor"):
        at = {"convention": convention, "precision": precision}
        for positions in (integers.float(), integers.double()):
            assert_same_bits(
                embed(ids, weight, positions=positions, **at), embed(ids, weight, positions=integers, **at)
            )
            want = add_positional_encoding(x, positions=integers, **at)
            assert_same_bits(add_positional_encoding(x, positions=positions, **at), want)
            want = positional_encoding(integers, 34, dtype=dtype, **at)
            assert_same_bits(positional_encoding(positions, 34, dtype=dtype, **at), want)


@settings(max_examples=60, **SETTINGS)
@given(st.floats(-(2.0**40), 2.0**40), st.integers(-(2**40), 2**40), st.booleans())
def test_an_offset_is_added_without_rounding(number, offset, as_tensor):
    """Also where float32 could not hold the sum; a tensor is added in float64."""
    position = torch.tensor([number], dtype=torch.float64)
    if as_tensor:
        want = positional_encoding(position + offset, 6, precision="exact")
        assert_same_bits(positional_encoding(position, 6, offset=torch.tensor(offset), precision="exact"), want)
        return
    got = positional_encoding(position, 6, offset=offset, precision="exact")
    with mpmath.workdps(60):
        angles = [(mpmath.mpf(number) + offset) * w for w in frequencies_of(CONVENTIONS["vaswani"], 6)]
        want = torch.tensor([[float(f(a)) for a in angles for f in (mpmath.sin, mpmath.cos)]], dtype=torch.float64)
    assert (got - want).abs().max() < 2.5e-7


@make.each_precision
@make.each("dtype", FLOATING)
def test_what_is_no_number_has_no_encoding(precision, dtype):
    """NaN in every column that holds a sine or a cosine, and nothing else touched."""
    positions = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -(2.0**63), 1.5], dtype=dtype)
    for width, convention in ((34, "vaswani"), (7, "tensor2tensor")):
        got = positional_encoding(positions, width, convention=convention, precision=precision, dtype=dtype)
        encoded = slice(0, width - width % 2)
        assert got[:5, encoded].isnan().all()
        assert not got[5].isnan().any()
        assert width % 2 == 0 or not got[:, -1].any()
    assert embed(make.ids((1, 6)), make.table(), positions=positions[None]).isnan().any(-1).tolist() == [
        [True] * 5 + [False]
    ]


def test_the_wide_fp32_table_of_a_peer():
    """transformers' own recipe of frequencies: with them, its table to 1.2e-7 over 0..5000; without, 1e-4 and more."""
    half = 256
    w = torch.exp(torch.arange(half) * -(math.log(10000.0) / (half - 1)))  # M2M100
    angle = torch.arange(5000.0).unsqueeze(1) * w
    table = torch.cat([angle.sin(), angle.cos()], dim=1)
    at = {"convention": "tensor2tensor"}
    got = positional_encoding(5000, 2 * half, frequencies=w, **at)
    assert (got.double() - table).abs().max() <= 1.2e-7
    assert (positional_encoding(5000, 2 * half, **at) - table).abs().max() > 1e-5


GIVEN = {
    "below 1": lambda pairs: torch.rand(pairs, dtype=torch.float64),
    "of both signs": lambda pairs: torch.linspace(-3, 3, pairs, dtype=torch.float64),
    "of every size": lambda pairs: torch.logspace(-30, 9, pairs, dtype=torch.float64),
    "zero": lambda pairs: torch.zeros(pairs, dtype=torch.float64),
}


@make.each("make_frequencies", GIVEN)
@make.each("of", FLOATING)
@make.each("width", (6, 34, 7))
def test_frequencies_are_exact(make_frequencies, of, width):
    """To 2.5e-7 at integer positions up to 2^31, and at fractions."""
    w = make_frequencies((width + 1) // 2).to(of)
    exact = [mpmath.mpf(x) for x in w.double().tolist()]
    for positions in (
        torch.tensor([0, 1, -5, 4999, 2**31, -(2**31)]),
        torch.tensor([0.5, -2.75, 1e5 / 3, 2**31 + 0.5]),
    ):
        for layout in ("interleaved", "cos_sin"):
            convention = Convention(layout=layout, precision="exact")
            want = truth(positions, exact, width, layout)
            for out, bound in ((torch.float32, 2.5e-7), (torch.float64, 1e-15)):
                got = positional_encoding(positions, width, frequencies=w, convention=convention, dtype=out)
                assert (got - want).abs().max() < bound
                reference = {"convention": convention, "precision": "reference", "dtype": out, "frequencies": w}
                want32 = in_fp32(positions, w, width, layout)
                assert (positional_encoding(positions, width, **reference) - want32).abs().max() < 2.5e-7


@make.each_precision
def test_frequencies_that_are_no_numbers(precision):
    """NaN in their own columns alone."""
    w = torch.tensor([math.nan, 1.0, math.inf, 2.0])
    got = positional_encoding(torch.tensor([0, 3]), 8, frequencies=w, precision=precision)
    assert got.isnan()[0].tolist() == [True, True, False, False] * 2
    assert got.isnan()[1].tolist() == [True, True, False, False] * 2


def test_a_convention_s_own_frequencies_are_itself():
    """Handed in, they give what the convention gives."""
    x = make.x((2, 50, 34))
    for convention in CONVENTIONS.values():
        for precision, bound in (("exact", 3e-7), ("reference", 0)):
            at = {"convention": convention, "precision": precision, "offset": 100}
            w = angular_frequencies(34, convention=convention, precision=precision)
            got = add_positional_encoding(x, frequencies=w, **at)
            assert (got - add_positional_encoding(x, **at)).abs().max() <= bound


def test_every_way_to_a_row(threads, force_isa):
    """Sources, layouts, broadcast and per-token positions, column blocks, dropout beside them: each element is
    scale * base + PE of its own position, whatever the thread, the ISA and the path."""
    w = torch.randn(17)
    positions = torch.randn(B, T).cumsum(1) * 3
    ids, weight, x = make.ids(), make.table(V, 34), make.x((B, T, 34))
    for convention in ("vaswani", "tensor2tensor", "musicgen"):
        for frequencies in (None, w):
            for p in (positions, positions[0], positions[0].double()):
                at: dict[str, Any] = {"convention": convention, "precision": "exact", "frequencies": frequencies}
                pe = positional_encoding(p.expand(B, T), 34, **at)

                def calls(p: Tensor = p, at: dict[str, Any] = at) -> list[Tensor]:
                    part = {name: value for name, value in zip(("base", "flags"), spec_of(at), strict=True)}
                    given = {"frequencies": at["frequencies"], "positions": p.expand(B, T), **part}
                    return [
                        embed(ids, weight, positions=p, token_scale=1.5, **at),
                        add_positional_encoding(x, positions=p, **at),
                        embed(ids.T, weight, positions=p.expand(B, T).T, token_scale=1.5, batch_first=False, **at),
                        ops.embed_general(weight[:, 3:30], ids, first_column=3, d_model=34, token_scale=1.5, **given),
                        embed(ids, weight.bfloat16(), positions=p, token_scale=1.5, **at),
                    ]

                got = calls()
                assert_same_bits(got[0], weight[ids] * 1.5 + pe)
                assert_same_bits(got[1], x + pe)
                assert_same_bits(got[2], got[0].transpose(0, 1))
                assert_same_bits(got[3], got[0][..., 3:30])
                assert_same_bits(got[4], (weight.bfloat16().float()[ids] * 1.5 + pe).bfloat16())
                for count in (1, 3):
                    threads(count)
                    for a, b in zip(calls(), got, strict=True):
                        assert_same_bits(a, b)
                for n, want in enumerate(got):
                    assert_same_bits(in_every_isa(force_isa, lambda n=n, calls=calls: calls()[n]), want)


def spec_of(at: dict[str, Any]) -> Any:
    return CONVENTIONS[at["convention"]].spec(at["precision"])


# ---- gradients -------------------------------------------------------------------------------------------------------


@make.each_layout
@make.each("odd", ("sine", "zero", "round_up"))
@make.each("divisor", ("d", "half_minus_1"))
@make.each("width", (6, 7))
def test_gradcheck(layout, odd, divisor, width):
    """Of positions, frequencies and scale together, to the second order."""
    convention = Convention(divisor=divisor, layout=layout, odd=odd, base=50.0, precision="exact")
    ids = torch.tensor([[1, 2, 3], [3, 0, 1]])
    weight = make.table(5, width, dtype=torch.float64)
    positions = torch.randn(2, 3, dtype=torch.float64).mul_(3).requires_grad_()
    w = torch.randn((width + (odd != "zero")) // 2, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def layer(positions: Tensor, w: Tensor | None, scale: Tensor) -> Tensor:
        return embed(
            ids, weight, positions=positions, frequencies=w, encoding_scale=scale, convention=convention, offset=2,
            padding_idx=3, at_padding="no_encoding",
        )  # fmt: skip

    for frequencies in (w, None):
        assert torch.autograd.gradcheck(layer, (positions, frequencies, scale))
        assert torch.autograd.gradgradcheck(layer, (positions, frequencies, scale))

    def pe(positions: Tensor, w: Tensor | None) -> Tensor:
        return positional_encoding(positions, width, frequencies=w, convention=convention, dtype=torch.float64)

    assert torch.autograd.gradcheck(pe, (positions, w))
    assert torch.autograd.gradcheck(lambda p: pe(p, None), (positions,))
    x = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: add_positional_encoding(x, frequencies=w, convention=convention, offset=1), (x, w)
    )


@make.each_precision
def test_gradients_are_right_far_out(precision):
    """Where autograd through a float32 angle is not."""
    p = torch.tensor([3.25, 1e5 + 0.5, 2.0**31 + 0.5], dtype=torch.float64, requires_grad=True)
    convention = Convention(layout="sin_cos")
    got = positional_encoding(p, 6, convention=convention, precision="exact", dtype=torch.float32)
    up = torch.randn(3, 6)
    (grad,) = torch.autograd.grad(got, p, up)
    w = frequencies_of(convention, 6)
    want = truth(p.detach(), w, 6, "sin_cos", turn=1) * up.double()
    want = (want[:, :3] + want[:, 3:]) @ torch.tensor([float(x) for x in w], dtype=torch.float64)
    assert (grad - want).abs().max() < 2e-6


def test_gradients_under_dropout():
    """The elements that are dropped have no part in them."""
    weight = make.table(V, 64, grad=True)
    p = torch.randn(B, T).mul_(5).requires_grad_()
    y = embed(make.ids(), weight, positions=p, dropout_p=0.5, precision="exact")
    pe = positional_encoding(p, 64, precision="exact")
    (got,) = torch.autograd.grad(y.sum(), p)
    (want,) = torch.autograd.grad((pe * torch.where(y == 0, 0.0, 2.0)).sum(), p)
    assert (got - want).abs().max() < 1e-5


def test_shards_of_rows_leave_other_tokens_out():
    p = torch.randn(B, T).requires_grad_()
    weight, ids = make.table(), make.ids()
    (whole,) = torch.autograd.grad(ops.embed_general(weight, ids, p).sum(), p)
    parts = [
        torch.autograd.grad(ops.embed_general(weight[a:b], ids, p, first_row=a, total_rows=V).sum(), p)[0]
        for a, b in ((0, 4), (4, V))
    ]
    assert torch.allclose(sum(parts), whole, atol=1e-6)
    (columns,) = torch.autograd.grad(
        ops.embed_general(weight[:, :3], ids, p, first_column=0, d_model=D).sum()
        + ops.embed_general(weight[:, 3:], ids, p, first_column=3, d_model=D).sum(),
        p,
    )
    assert torch.allclose(columns, whole, atol=1e-6)


def test_ops_without_keywords_refuse_trained_positions():
    p = torch.randn(B, T, requires_grad=True)
    text = "embed: positions must not require a gradient"
    refused(ValueError, text, lambda: ops.embed(make.table(), make.ids(), p, 0, 1.0, *make.spec()))
    text = "add_positional_encoding: positions must not require a gradient"
    refused(ValueError, text, lambda: ops.add_positional_encoding(make.x(), p, 0, *make.spec()))


# ---- programs --------------------------------------------------------------------------------------------------------


def call_of(kind: str) -> Any:
    weight = make.table(V, 12)
    functions = {
        "embed": lambda i, p, w: embed(i, weight, token_scale=0.1, positions=p, frequencies=w, precision="exact"),
        "add": lambda i, p, w: add_positional_encoding(weight[i], positions=p, frequencies=w),
        "PE": lambda i, p, w: positional_encoding(p, 12, frequencies=w, convention="musicgen"),
    }
    return functions[kind]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return make.ids(), torch.randn(B, T).mul_(9).requires_grad_(), torch.rand(6).requires_grad_()


@make.each("kind", ("embed", "add", "PE"))
def test_traced(kind):
    """Compiled, recorded and decomposed programs keep values and gradients."""
    function, given = call_of(kind), inputs()
    want = function(*given)
    wanted = torch.autograd.grad(want.square().sum(), given[1:])
    decomposed = make_fx(function, decomposition_table=posenc_ext.decompositions())(*given)
    assert "posenc_ext" not in decomposed.code
    for program in (
        torch.compile(function, backend="aot_eager", fullgraph=True),
        make_fx(function)(*given),
        decomposed,
    ):
        got = program(*given)
        assert (got - want).abs().max() < 3e-7
        for a, b in zip(torch.autograd.grad(got.square().sum(), given[1:]), wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=2e-5)


@make.each("kind", ("embed", "add", "PE"))
def test_transforms(kind):
    """vmap, forward mode, per-sample gradients."""
    function, (i, p, w) = call_of(kind), inputs()
    rows = torch.vmap(function, (0, 0, None))(i, p, w)
    assert (rows - function(i, p, w)).abs().max() < 3e-7
    tangent = torch.randn_like(p)
    _, got = torch.func.jvp(lambda p: function(i, p, w), (p.detach(),), (tangent,))
    want = torch.func.jacrev(lambda p: function(i, p, w))(p.detach())
    want = (want * tangent).sum((-1, -2))
    assert torch.allclose(got, want, atol=2e-5)


def test_nested():
    rows = [torch.randint(V, (n,)) for n in (3, 5)]
    positions = [torch.randn(n) for n in (3, 5)]
    ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
    p = torch.nested.nested_tensor_from_jagged(torch.cat(positions), ids.offsets())
    w, table = torch.rand(D // 2), make.table()
    got = embed(ids, table, positions=p, frequencies=w)
    for a, i, q in zip(got.unbind(), rows, positions, strict=True):
        assert_same_bits(a, embed(i, table, positions=q, frequencies=w))


def test_out():
    ids, weight, w, p = make.ids(), make.table(), torch.rand(D // 2), torch.randn(B, T)
    out = torch.empty(B, T, D)
    for call in (
        lambda **out: embed(ids, weight, positions=p, frequencies=w, **out),
        lambda **out: add_positional_encoding(weight[ids], positions=p, frequencies=w, **out),
        lambda **out: positional_encoding(p, D, frequencies=w, **out),
        lambda **out: positional_encoding(p, D, **out),
    ):
        want = call()
        assert_same_bits(call(out=out), want)
    text = "out= is not differentiable, but {} requires a gradient"
    p.requires_grad_()
    for call in (
        lambda: embed(ids, weight, positions=p, out=out),
        lambda: add_positional_encoding(out.clone(), positions=p, out=out),
        lambda: positional_encoding(p, D, out=out),
    ):
        refused(ValueError, text.format("positions"), call)
    w.requires_grad_()
    refused(ValueError, text.format("frequencies"), lambda: embed(ids, weight, frequencies=w, out=out))
    text = "out must not share memory with frequencies"
    buffer = torch.zeros(B * T * D + D // 2)
    view = buffer[: B * T * D].view(B, T, D)
    refused(ValueError, text, lambda: embed(ids, weight, frequencies=buffer[-D:][: D // 2], out=view))


# ---- errors ----------------------------------------------------------------------------------------------------------

BAD_CALLS = {
    "positions must have dtype int64, int32, float32 or float64, got": lambda: {"positions": torch.zeros(T).half()},
    "frequencies must have dtype float32 or float64, got": lambda: {"frequencies": torch.ones(D // 2).bfloat16()},
    f"frequencies must have shape [{D // 2}], one for each pair of columns, got [3]": lambda: {
        "frequencies": torch.ones(3)
    },
    f"frequencies must have shape [{D // 2}], one for each pair of columns, got []": lambda: {
        "frequencies": torch.tensor(1.0)
    },
}


@make.each("options", BAD_CALLS)
def test_what_is_refused(options):
    (text,) = (text for text, made in BAD_CALLS.items() if made is options)
    for op, call in (
        ("embed", lambda **given: embed(make.ids(), make.table(), **given)),
        ("add_", lambda **given: add_positional_encoding(make.x(), **given)),
        (
            "positional_encoding",
            lambda **given: positional_encoding(given.pop("positions", torch.arange(T)), D, **given),
        ),
    ):
        refused(ValueError, text, lambda call=call: call(**options()))
        with (
            torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
            pytest.raises(ValueError, match="posenc_ext::" + op) as refusal,
        ):
            call(**options())
        assert text.partition(", got")[0] in str(refusal.value)
    refused(
        TypeError,
        "frequencies must be a torch.Tensor, got list",
        lambda: embed(make.ids(), make.table(), frequencies=[1.0]),
    )


def test_nothing_is_scaled_before_frequencies_are_checked():
    weight = make.table() * 100
    before = weight.clone()
    with pytest.raises(ValueError, match="frequencies must have shape"):
        embed(make.ids(), weight, max_norm=1.0, frequencies=torch.ones(3))
    assert_same_bits(weight, before)


# ---- modules ---------------------------------------------------------------------------------------------------------

LAYERS = {
    "PositionalEncoding": lambda w: (posenc_ext.PositionalEncoding(D, frequencies=w), make.x()),
    "TransformerEmbedding": lambda w: (posenc_ext.TransformerEmbedding(V, D, frequencies=w), make.ids()),
}


@make.each("make_layer", LAYERS)
def test_modules_keep_frequencies(make_layer):
    """Their dtype under casts, their numbers in copies; saved only as a parameter."""
    w = torch.rand(D // 2, dtype=torch.float64)
    layer, x = make_layer(w)
    want = layer(x)
    assert not any("frequencies" in name for name in layer.state_dict())
    for changed in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half().float()):
        assert changed.frequencies.dtype == torch.float64
        assert_same_bits(changed.frequencies, w)
    assert_same_bits(copy.deepcopy(layer)(x), want)
    trained, x = make_layer(nn.Parameter(w))
    assert "frequencies" in trained.state_dict()
    trained(x).sum().backward()
    assert trained.frequencies.grad.count_nonzero() == D // 2
    trained.bfloat16()
    assert trained.frequencies.dtype == trained.frequencies.grad.dtype == torch.float64
    assert_same_bits(trained.frequencies.detach(), w)
    stored = io.BytesIO()
    torch.save(trained.state_dict(), stored)
    stored.seek(0)
    other, _ = make_layer(nn.Parameter(torch.zeros_like(w)))
    other.load_state_dict(torch.load(stored))
    assert_same_bits(other.frequencies.detach(), w)


@make.each("make_layer", LAYERS)
def test_modules_on_the_meta_device(make_layer):
    """to_empty keeps frequencies that have data; those that have none are refused until they are set."""
    w = torch.rand(D // 2)
    layer, _ = make_layer(w)
    layer.to_empty(device="cpu")
    assert_same_bits(layer.frequencies, w)
    layer.to("meta")
    assert layer.frequencies.is_meta
    text = "frequencies have no data on the meta device"
    with pytest.raises(NotImplementedError, match=text):
        layer.to_empty(device="cpu")
    layer.frequencies = w
    layer.to_empty(device="cpu")
    assert_same_bits(layer.frequencies, w)


@make.each("make_layer", LAYERS)
def test_modules_refuse_what_does_not_fit(make_layer):
    for value in (torch.ones(3), torch.ones(D // 2).half(), [1.0]):
        layer, _ = make_layer(None)
        error = ValueError if isinstance(value, Tensor) else TypeError
        with pytest.raises(error, match="frequencies must be"):
            layer.frequencies = value
        with pytest.raises(error, match="frequencies must be"):
            make_layer(value)


def test_pe_and_unfuse_have_frequencies_and_scale():
    w = torch.rand(D // 2)
    layer = posenc_ext.PositionalEncoding(D, 50, frequencies=w, encoding_scale=0.25)
    x = torch.zeros(1, 50, D)
    assert_same_bits(layer.pe, layer(x))
    assert_same_bits(posenc_ext.unfuse(layer, max_len=50)(x), layer(x))
    fused = posenc_ext.TransformerEmbedding(V, D, padding_idx=0, at_padding="zeros")
    with pytest.raises(ValueError, match="at_padding='zeros'"):
        posenc_ext.unfuse(fused)


def test_layers_pickled_before_they_had_frequencies():
    layer = posenc_ext.PositionalEncoding(D)
    x = make.x()
    del layer.__dict__["frequencies"], layer.__dict__["encoding_scale"]
    assert_same_bits(pickle.loads(pickle.dumps(layer))(x), posenc_ext.PositionalEncoding(D)(x))


def test_interpolated_positions_train():
    """A layer that learns how far its positions are apart finds the factor that made the data."""
    factor = nn.Parameter(torch.tensor(0.9))
    target = positional_encoding(torch.arange(32) * 0.8, D, precision="exact")
    optimiser = torch.optim.Adam([factor], lr=0.01)
    for _ in range(150):
        optimiser.zero_grad()
        (positional_encoding(torch.arange(32) * factor, D, precision="exact") - target).square().mean().backward()
        optimiser.step()
    assert abs(factor.item() - 0.8) < 1e-3
