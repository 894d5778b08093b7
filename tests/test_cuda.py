"""The CUDA half against the CPU half: every function, module and derivative, to the bit."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import make
import pytest
import torch
from cuda_helpers import ON_GPU, assert_gradient, assert_same, gpu_only, moved, needs_bytes
from helpers import assert_refused, assert_same_bits, assert_same_numbers
from make import D, V, ids, table
from test_opcheck import assert_checked, raw_ops_have_no_formula
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim
from torch.nn import functional as F

import posenc_ext
from posenc_ext import CONVENTIONS, functional, reference
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

pytestmark = pytest.mark.cuda

ops = torch.ops.posenc_ext

B, T = 2, 5
FAR = (0, 9, -3, -(2**18), 2**18, 2**24, 2**40, -(2**40))


# ---- forward ---------------------------------------------------------------------------------------------------------


@make.each_dtype
def test_every_kind_of_call(device, dtype):
    for here, there in zip(make.samples("cpu", dtype, False), make.samples(device, dtype, False), strict=True):
        assert there.weight.stride() == here.weight.stride()
        got = embed(there.input, there.weight, **there.kwargs)
        assert got.device == there.weight.device
        assert_same_bits(got.cpu(), embed(here.input, here.weight, **here.kwargs), here.name)


@make.each_dtype
@make.each_precision
def test_conventions(device, dtype, precision):
    """All of them, odd widths too, near and far, for each source of the base term."""
    for convention, width, offset in itertools.product(CONVENTIONS.values(), (31, 130), (0, -7, 2**24)):
        weight, x = table(V, width, dtype=dtype), make.x((B, T, width), dtype=dtype)
        options = {"convention": convention, "precision": precision, "offset": offset}
        options["what"] = f"{convention.name}, width {width}, offset {offset}"
        assert_same(device, embed, ids((B, T)), weight, **options)
        assert_same(device, add_positional_encoding, x, **options)
        assert_same(device, positional_encoding, ids(T), width, dtype=dtype, **options)


@make.each_dtype
@make.each_precision
def test_positions_of_every_size(device, dtype, precision):
    """By offset and one by one, so that each way of reducing an angle is taken."""
    weight = table(V, 66, dtype=dtype)
    for offset in FAR:
        assert_same(device, embed, ids((B, T)), weight, what=f"offset {offset}", precision=precision, offset=offset)
    powers = make.positions_of_every_size()
    for width in (1, 33, 66):
        assert_same(device, positional_encoding, powers, width, what=f"{width}", dtype=dtype, precision=precision)
    near = powers[powers.abs() < 2**31]
    options = {"dtype": dtype, "precision": precision, "offset": -5}
    assert_same(device, positional_encoding, near.int(), 66, what="int32", **options)


@make.each_dtype
def test_widths(device, dtype):
    """Every remainder of a vector, tables and activations that no vector load can take, columns with strides."""
    for width in (*make.WIDTHS, 4096):
        weight = torch.randn(V, width + 3).to(dtype)
        given, x = ids((3, 7)), torch.randn(3, 7, width + 3).to(dtype)
        for name, view in VIEWS.items():
            what = f"width {width}, {name}"

            assert_same(device, lambda i, w, v=view, d=width: embed(i, v(w, d)), given, weight, what=what)
            assert_same(device, lambda a, v=view, d=width: add_positional_encoding(v(a, d)), x, what=what)


VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "whole": lambda t, d: t[..., :d].contiguous(),
    "one number in": lambda t, d: t[..., 1 : d + 1],
    "three numbers in": lambda t, d: t[..., 3 : d + 3],
    "every second column": lambda t, d: t.repeat_interleave(2, dim=-1)[..., : 2 * d : 2],
}


@make.each_dtype
def test_explicit_positions(device, dtype):
    weight, given = table(V, 34, dtype=dtype), ids((4, 9))
    x = make.x((4, 9, 34), dtype=dtype)
    for name, positions in {
        "each its own": torch.randint(-(2**40), 2**40, (4, 9)),
        "small": torch.randint(-50, 50, (4, 9)),
        "one row": torch.arange(9) * 3 - 1,
        "one column": torch.arange(4)[:, None],
        "int32": torch.randint(-50, 50, (4, 9), dtype=torch.int32),
        "transposed": torch.randint(90, (9, 4)).t(),
        "one number": torch.tensor(77),
    }.items():
        for offset in (0, -40):
            options = {"positions": positions, "offset": offset}
            assert_same(device, embed, given, weight, what=name, **options)
            assert_same(device, add_positional_encoding, x, what=name, **options)
        assert_same(device, positional_encoding, positions, 34, what=name, dtype=dtype)
    assert_same(device, embed, given, weight, positions=torch.arange(4), batch_first=False)


@make.each_dtype
def test_sequence_first(device, dtype):
    weight, x = table(V, D, dtype=dtype), make.x((5, 3, 2, D), dtype=dtype)
    for shape in ((5, 3), (5,), (5, 3, 2), (1, 4), ()):
        assert_same(device, embed, ids(shape), weight, what=str(shape), batch_first=False, offset=3)
    assert_same(device, add_positional_encoding, x, batch_first=False)
    assert_same(device, lambda a: add_positional_encoding(a.movedim(0, 2), batch_first=False), x)


@make.each_dtype
def test_out(device, dtype):
    """Into tensors that exist, with gaps between rows, and in place; what lies between is left alone."""
    weight, given, x = table(V, 33, dtype=dtype), ids((4, 9)), make.x((4, 9, 33), dtype=dtype)

    def written(function: Callable[..., Tensor], wide_out: Tensor, *arguments: Any) -> Tensor:
        out = wide_out[:, ::2, 2:35]
        assert function(*arguments, out=out) is out
        return wide_out

    for function, *arguments in (
        (embed, given, weight),
        (scaled_embedding, given, weight),
        (add_positional_encoding, x),
        (positional_encoding, given, 33),
    ):
        assert_same(device, written, function, torch.full((4, 18, 40), 7.0, dtype=dtype), *arguments)
    assert_same(device, lambda a: add_positional_encoding(a, offset=4, out=a), x)
    narrow = torch.zeros(4, 9, 33, dtype=dtype)
    assert_same(device, lambda i, w, o: embed(i.t(), w, out=o.transpose(0, 1)), given, weight, narrow)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("rows", [0, 4])
def test_no_tokens(device, shape, rows):
    weight, x = torch.randn(rows, 6, requires_grad=True), torch.randn(*shape, 6)
    empty = torch.zeros(shape, dtype=torch.int64)
    assert_same(device, embed, empty, weight)
    assert_same(device, add_positional_encoding, x)
    assert_same(device, positional_encoding, empty, 6)
    for sparse in (False, True):
        there = moved(weight, device)
        (got,) = torch.autograd.grad(embed(moved(empty, device), there, sparse=sparse).sum(), there)
        assert_same_bits(got.to_dense().cpu(), torch.zeros(rows, 6))


def test_the_other_options(device):
    weight, given = torch.randn(V, 10), ids((B, T))
    for scale in (1.0, 0.0, -2.5, 1e-3):
        assert_same(device, embed, given, weight, token_scale=scale)
        assert_same(device, scaled_embedding, given, weight, token_scale=scale)
    for options in ({}, {"dtype": torch.float64}, {"offset": 2**40, "precision": "exact"}, {"convention": "fairseq"}):
        got = positional_encoding(40, 10, device=device, **options)
        assert_same_bits(got.cpu(), positional_encoding(40, 10, **options), str(options))
    own = posenc_ext.Convention(base=77.0, divisor="half_minus_1", layout="cos_sin", odd="zero", first_position=3)
    assert_same(device, embed, given, torch.randn(V, 9), convention=own)


@make.each_dtype
def test_special_numbers_in_the_table(device, dtype):
    """Infinities, NaN, zeros of both signs and subnormals go through as they do on the CPU."""
    weight = make.special(dtype, 12)
    given = torch.arange(len(weight)).repeat(2, 1)
    assert_same_numbers(embed(given.to(device), weight.to(device)).cpu(), embed(given, weight))


def test_ids_in_the_hundred_thousands(device):
    """More tokens than a grid has blocks on one axis, and a length that is no power of two."""
    weight = torch.randn(1000, 8)
    assert_same(device, embed, ids((1, 100_003), 1000), weight)
    assert_same(device, embed, ids((100_003, 1), 1000), weight)
    assert_same(device, embed, ids((331, 307), rows=1000), weight, batch_first=False)


# ---- backward --------------------------------------------------------------------------------------------------------


def gradient(given: Tensor, grad: Tensor, rows: int, **options: Any) -> Tensor:
    """The weight gradient by way of autograd."""
    weight = torch.zeros(rows, grad.shape[-1], dtype=grad.dtype, device=grad.device, requires_grad=True)
    return torch.autograd.grad(embed(given, weight, **options), weight, grad)[0]


def assert_same_gradient(device: str, given: Tensor, grad: Tensor, rows: int, what: str, **options: Any) -> None:
    got = gradient(given.to(device), grad.to(device), rows, **options)
    assert_gradient(got, gradient(given, grad, rows, **options), what)


def hot(count: int, rows: int, share: float) -> Tensor:
    """Ids of which a share are equal."""
    given = ids(count, rows=rows)
    given[torch.randperm(count)[: int(count * share)]] = rows // 2
    return given


# Tokens, with what makes their sum hard: long segments, and segments that end on either side of a chunk or a block.
DISTRIBUTIONS = {
    "one token": lambda: (ids(1, rows=50), 50),
    "uniform": lambda: (ids(3000, rows=1000), 1000),
    "half hot": lambda: (hot(3000, 1000, 0.5), 1000),
    "all equal": lambda: (torch.full((5000,), 3), 7),
    "all different": lambda: (torch.randperm(2048), 2048),
    "few rows": lambda: (ids(4097, rows=3), 3),
    "segments of 63 to 66": lambda: (torch.arange(40).repeat_interleave(torch.arange(40) % 4 + 63), 41),
    "most rows unused": lambda: (ids(200, rows=50_000), 50_000),
    "last row only": lambda: (torch.full((300,), 70_000), 70_001),
}


@make.dense_and_sparse
@make.each_dtype
@make.each("name", DISTRIBUTIONS.keys())
def test_gradients_of_every_distribution(device, name, dtype, sparse):
    given, rows = DISTRIBUTIONS[name]()
    for width in (1, 33, 512):
        grad = torch.randn(len(given), width).to(dtype)
        assert_same_gradient(device, given, grad, rows, f"{name}, width {width}", sparse=sparse)
    grad = torch.randn(len(given), 10).to(dtype)
    for options in ({"padding_idx": int(given[0])}, {"scale_grad_by_freq": True}):
        assert_same_gradient(device, given, grad, rows, f"{name}, {options}", sparse=sparse, **options)


@make.each_dtype
def test_gradients_of_every_kind_of_call(device, dtype):
    for here, there in zip(make.samples("cpu", dtype, True), make.samples(device, dtype, True), strict=True):
        for sparse in (False, True):
            want = embed(here.input, here.weight, sparse=sparse, **here.kwargs)
            got = embed(there.input, there.weight, sparse=sparse, **there.kwargs)
            grad = torch.randn(want.shape).to(dtype)
            (want,) = torch.autograd.grad(want, here.weight, grad)
            (got,) = torch.autograd.grad(got, there.weight, grad.to(device))
            assert got.dtype == there.weight.dtype
            assert_gradient(got, want, here.name)


@make.each_dtype
def test_gradients_of_any_strides(device, dtype):
    """`sum()` sends one number for all; others come transposed, sliced, or in the order of the sequence."""
    given = ids((4, 30), 6)
    here, there = (make.views((4, 30), 37, dtype, device=where, seed=1) for where in ("cpu", device))
    for name, grad in here.items():
        got = ops.embed_backward(there[name], given.to(device), 9, 2.5, -1, False)
        assert_same_bits(got.cpu(), ops.embed_backward(grad, given, 9, 2.5, -1, False), name)


def test_untouched_rows_are_positive_zeros(device):
    """Out of memory that held NaNs."""
    for rows in (5, 70_000):
        for block in [torch.full((rows, 33), math.nan, device=device) for _ in range(3)]:
            del block
        got = gradient(torch.tensor([rows - 1], device=device), torch.full((1, 33), -1.0, device=device), rows)
        assert_same_bits(got[:-1].cpu(), torch.zeros(rows - 1, 33))


@make.dense_and_sparse
def test_a_hundred_repeats_have_equal_bits(device, sparse):
    """The order of a sum may not depend on which block comes first."""
    given, weight = hot(40 * 512, 4000, 0.3).view(40, 512).to(device), torch.randn(4000, 64, device=device)
    grad = torch.randn(40, 512, 64, device=device)
    first_out, first_grad = embed(given, weight), gradient(given, grad, 4000, sparse=sparse)
    first_grad = first_grad._values() if sparse else first_grad
    for _ in range(100 if ON_GPU else 3):
        got = gradient(given, grad, 4000, sparse=sparse)
        # Compared where they are: that is faster, and one number comes back.
        assert torch.equal(embed(given, weight).view(torch.int32), first_out.view(torch.int32))
        assert torch.equal((got._values() if sparse else got).view(torch.int32), first_grad.view(torch.int32))


def test_deterministic_mode(device):
    """Nothing refuses it, and memory that it fills with NaNs beforehand shows up nowhere."""
    before = torch.are_deterministic_algorithms_enabled()
    given, grad = hot(3000, 1000, 0.5), torch.randn(3000, 37)
    try:
        torch.use_deterministic_algorithms(True)
        for sparse in (False, True):
            assert_same_gradient(device, given, grad, 1000, "gradient", sparse=sparse)
        assert_same(device, embed, given, torch.randn(1000, 37))
    finally:
        torch.use_deterministic_algorithms(before)


# ---- derivatives -----------------------------------------------------------------------------------------------------


@make.each("name", [s.name for s in make.samples("cpu", torch.float64, True) if s.differentiable])
def test_derivatives(device, name):
    (sample,) = (s for s in make.samples(device, torch.float64, True) if s.name == name)

    def function(weight: Tensor) -> Tensor:
        return embed(sample.input, weight, **sample.kwargs)

    assert gradcheck(function, sample.weight)
    assert gradgradcheck(function, sample.weight)


def test_derivatives_of_add(device):
    x = torch.randn(B, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    for options in ({"offset": 3}, {"positions": ids((B, 3)).to(device)}, {"batch_first": False}):
        assert gradcheck(lambda a, o=options: add_positional_encoding(a, **o), x, check_forward_ad=True)
        assert gradgradcheck(lambda a, o=options: add_positional_encoding(a, **o), x)


@make.dense_and_sparse
@pytest.mark.parametrize("flags", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}], ids=str)
def test_double_backward(device, sparse, flags):
    """create_graph: the weight gradient knows the output gradient it came from, and both are the CPU's."""

    def both(where: str) -> tuple[Tensor, Tensor]:
        random, given = make.random(5), ids((B, T), 4, device=where, seed=5)
        numbers = [torch.randn(s, dtype=torch.float64, generator=random) for s in ((V, D), (B, T, D), (V, D))]
        weight, grad, probe = (n.to(where).requires_grad_() for n in numbers)
        (first,) = torch.autograd.grad(embed(given, weight, sparse=sparse, **flags), weight, grad, create_graph=True)
        assert first.grad_fn is not None
        assert first.is_sparse == sparse
        (second,) = torch.autograd.grad((first.to_dense() * probe).sum(), grad)
        return first.detach().to_dense(), second

    for got, want in zip(both(device), both("cpu"), strict=True):
        assert_same_bits(got.cpu(), want)
    assert both("cpu")[1].count_nonzero() > 0


def test_transforms(device):
    """Forward mode, vmap and torch.func, composed from torch's own ops."""
    weight, given = table(device=device), ids((B, T)).to(device)
    tangent = torch.randn_like(weight)
    primal, got = torch.func.jvp(lambda w: embed(given, w), (weight,), (tangent,))
    assert_same_bits(primal, embed(given, weight))
    torch.testing.assert_close(got, tangent[given] * math.sqrt(D))
    stacked = torch.func.vmap(lambda i: embed(i, weight))(given)
    assert_same_bits(stacked, torch.stack([embed(i, weight) for i in given]))
    got = torch.func.grad(lambda w: embed(given, w).sin().sum())(weight)
    leaf = weight.clone().requires_grad_()
    embed(given, leaf).sin().sum().backward()
    torch.testing.assert_close(got, leaf.grad)


# ---- modules ---------------------------------------------------------------------------------------------------------


def tokens(where: str = "cpu") -> Tensor:
    return make.argument("Embeddings", (B, T), device=where)


def argument_of(kind: str, where: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Activations for a module that embeds positions alone."""
    if "Positional" in kind:
        return make.argument("PositionalEncoding", (B, T), device=where, dtype=dtype)
    return tokens(where)


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{kind: functools.partial(make.layer, kind) for kind in make.LAYERS},
    "padding, fairseq": functools.partial(make.layer, padding_idx=1, convention="fairseq"),
    "sequence first, frequency": functools.partial(make.layer, batch_first=False, scale_grad_by_freq=True),
    "sparse": functools.partial(make.layer, sparse=True),
    "max_norm": functools.partial(make.layer, max_norm=1.0),
    "PositionalEncoding, exact": functools.partial(make.layer, "PositionalEncoding", convention="marian"),
    "pair": make.pair,
    "fused": lambda: posenc_ext.fuse(make.pair()),
    "fused textbook": lambda: posenc_ext.fuse(make.pair(reference)),
}
every_module = make.each("kind", MODULES.keys())

# Where torch's own kernels, not ours, decide about the last bit.
ROUNDED = {"max_norm"}


def assert_as_on_cpu(kind: str, got: Tensor, want: Tensor) -> None:
    if kind in ROUNDED:
        torch.testing.assert_close(got.cpu(), want)
    else:
        assert_gradient(got, want, kind)


@every_module
def test_modules_follow_the_device(device, kind):
    """There and back again, casts on the way, and made there in the first place."""
    build, here, there = MODULES[kind], argument_of(kind), argument_of(kind, device)
    module, twin = build().to(device), build()
    assert_as_on_cpu(kind, module(there), twin(here))
    module.cpu()
    assert_as_on_cpu(kind, module(here), twin(here))
    assert_as_on_cpu(kind, copy.deepcopy(build().to(device))(there), build()(here))
    for dtype in (torch.bfloat16, torch.float64):
        module, twin = build().to(device).to(dtype), build().to(dtype)
        here, there = (argument_of(kind, where, dtype) for where in ("cpu", device))
        if kind not in ROUNDED:
            assert_as_on_cpu(kind, module(there), twin(here))
        assert module(there).dtype == dtype


@every_module
def test_gradients_through_modules(device, kind):
    def gradients(where: str) -> list[Tensor]:
        module, x = MODULES[kind]().to(where), argument_of(kind, where)
        wanted = [*module.parameters(), *([x.requires_grad_()] if x.is_floating_point() else [])]
        probe = torch.randn(B, T, D, generator=torch.Generator().manual_seed(4)).to(where)
        return list(torch.autograd.grad(module(x), wanted, probe))

    found, expected = gradients(device), gradients("cpu")
    assert len(found) == len(expected) > 0
    for got, want in zip(found, expected, strict=True):
        assert_as_on_cpu(kind, got, want)


def test_the_table_of_a_module_is_made_where_it_lives(device):
    module = make.layer("PositionalEncoding", max_len=30).to(device).half()
    assert (module.pe.device.type, module.pe.dtype) == (torch.device(device).type, torch.float16)
    assert_same_bits(module.pe.cpu(), make.layer("PositionalEncoding", max_len=30).half().pe)


def test_modules_made_on_the_device(device):
    for kind in make.OF_IDS:
        module = make.layer(kind, device=device, dtype=torch.bfloat16)
        assert module(tokens(device)).device.type == torch.device(device).type
    with torch.device(device):
        module = make.pair()
    assert_same_bits(posenc_ext.fuse(module)(tokens(device)), module(tokens(device)))


def test_fused_models_of_the_device(device):
    """Fused before or after the move; the weight is the same Parameter, tied or not."""

    def model() -> nn.Module:
        return nn.ModuleDict({"source": make.pair(), "target": make.pair(reference), "output": nn.Linear(D, V)})

    before, after, plain = posenc_ext.fuse(model()).to(device), posenc_ext.fuse(model().to(device)), model()
    for name in ("source", "target"):
        assert isinstance(before[name], posenc_ext.TransformerEmbedding)
        want = before[name](tokens(device))
        assert_same_bits(after[name](tokens(device)), want)
        torch.testing.assert_close(want.cpu(), plain[name](tokens()), rtol=0, atol=2e-5)


@pytest.mark.parametrize("start", ["device", "cpu"])
def test_state_dicts(device, start):
    """Of this layer and of the textbook pair, whose table is checked on whatever device it was loaded to."""
    old, where = make.pair(reference), device if start == "device" else "cpu"
    for saved in (old.state_dict(), posenc_ext.fuse(copy.deepcopy(old)).state_dict()):
        layer = make.layer().to(device)
        result = layer.load_state_dict(moved(dict(saved), where), strict=True)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert make.weight_of(layer).device.type == torch.device(device).type
        torch.testing.assert_close(layer(tokens(device)).cpu(), old(tokens()), rtol=0, atol=2e-5)
    foreign = make.layer(convention="tensor2tensor").to(device)
    with pytest.raises(RuntimeError, match="vaswani"):
        foreign.load_state_dict(moved(dict(old.state_dict()), where))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_a_training_step(device, options):
    """The weights after a few steps are the CPU's, to the bit: the product with the rate is exact."""

    def train(where: str) -> Tensor:
        module = make.layer(**options).to(where)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(4):
            given = ids((3, 4 + step), seed=step, device=where)
            grad = make.x((*given.shape, D), seed=step, device=where)
            optimizer.zero_grad()
            module(given).backward(grad)
            optimizer.step()
        return make.weight_of(module).detach()

    assert_same_bits(train(device).cpu(), train("cpu"))


def test_autocast(device):
    """As `F.embedding`: the output keeps the weight's dtype, and the backward pass sees it."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(V, D, dtype=dtype, device=device, requires_grad=True)
        seen: list[torch.dtype] = []
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            y = embed(tokens(device), weight)
            y.register_hook(lambda grad, seen=seen: seen.append(grad.dtype))
            z = F.linear(add_positional_encoding(y), torch.randn(D, D, device=device))
        assert (y.dtype, z.dtype) == (dtype, torch.bfloat16)
        z.float().sum().backward()
        assert seen == [dtype]
        assert weight.grad.dtype == dtype
        assert_same_bits(y, embed(tokens(device), weight))


def test_max_norm(device):
    """Rows are scaled down in place, as nn.Embedding does; by torch's own kernel on either device."""
    given = torch.tensor([[1, 2, 2], [5, 1, 0]])
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2)):
        for norm_type in (2.0, 1.0):
            here = (torch.randn(V, D) * 3).to(dtype)
            there, own = moved((here, here), device)
            options = {"max_norm": 1.0, "norm_type": norm_type}
            got, want = embed(given.to(device), there, **options), embed(given, here, **options)
            torch.testing.assert_close((there.cpu(), got.cpu()), (here, want), rtol=tolerance, atol=tolerance)
            F.embedding(given.to(device), own, **options)
            assert_same_bits(there, own, "weight")
            assert_same_bits(got, embed(given.to(device), own), "output")


# ---- what is refused -------------------------------------------------------------------------------------------------


@gpu_only
def test_tensors_on_two_devices(device):
    """By name, and before anything is written."""
    here, there = tokens(), tokens(device)
    weight, x = table(device=device), make.x((B, T, D), device=device)
    out = torch.full((B, T, D), 7.0)
    add = add_positional_encoding
    for op, name, owner, call in (
        ("embed", "input", "weight", lambda: embed(here, weight)),
        ("embed", "input", "weight (cpu", lambda: embed(there, weight.cpu())),
        ("embed", "positions", "weight", lambda: embed(there, weight, positions=here)),
        ("embed", "out", "weight", lambda: embed(there, weight, out=out)),
        ("add_positional_encoding", "positions", "x", lambda: add(x, positions=here)),
        ("add_positional_encoding", "out", "x", lambda: add(x, out=out)),
        ("positional_encoding", "out", "positions", lambda: positional_encoding(there, D, out=out)),
        ("embed_backward", "input", "grad", lambda: ops.embed_backward(x, here, V, 1.0, -1, False)),
    ):
        assert_refused(call, "posenc_ext::", f"{op}: {name} must be on the device of {owner}")
    assert (out == 7).all()
    assert_refused(lambda: positional_encoding(there, D, device="cpu"), "device must be that of positions")


def test_wrong_arguments(device):
    """The checks of the CPU half hold here too."""
    given, weight = tokens(device), table(device=device)
    x = make.x((B, T, D), device=device)
    out = torch.full((B, T, D), 7.0, device=device)
    for call in (
        lambda: embed(given.float(), weight),
        lambda: embed(given, weight.long()),
        lambda: embed(given, weight[:, :0]),
        lambda: embed(given, weight, padding_idx=V),
        lambda: embed(given, weight, positions=given[:, :2]),
        lambda: embed(given, weight, out=out[:, :, :5]),
        lambda: embed(given, weight, out=out.half()),
        lambda: embed(given, weight, out=out[:1].expand(B, T, D)),
        lambda: add_positional_encoding(x, out=x.view(-1)[1:].as_strided((B, T, D), (1, 1, 1))),
        lambda: embed(given, weight, offset=2**63 - 2),
        lambda: ops.embed_backward(x, given[:, :2], V, 1.0, -1, False),
    ):
        assert_refused(call, "posenc_ext::")
    assert (out == 7).all()


# ---- tracing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("dtype", "requires_grad"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
@raw_ops_have_no_formula
def test_opcheck(device, dtype, requires_grad):
    for sample in make.samples(device, dtype, requires_grad):
        for call in (*make.op_calls(sample).values(), *make.raw_calls(sample).values()):
            # The slow last check for one kind of call.
            assert_checked(call, traced=sample.name == "batch")


# Of ids, table and activations.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "embed": lambda i, w, a: embed(i, w, offset=3),
    "embed, positions": lambda i, w, a: embed(i, w, positions=i),
    "embed, out": lambda i, w, a: embed(i, w, out=torch.empty_like(a)),
    "scaled_embedding": lambda i, w, a: scaled_embedding(i, w),
    "add": lambda i, w, a: add_positional_encoding(a, batch_first=False),
    "positional_encoding": lambda i, w, a: positional_encoding(i, D),
    "length": lambda i, w, a: positional_encoding(a.shape[1], D, device=a.device),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@make.each("name", CALLS.keys())
def test_whole_graphs(device, fresh, name, dynamic):
    function, counter = CALLS[name], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    weight, first = table(device=device), None
    for shape in [(B, T), (3, 7), (4, 9)] if dynamic else [(B, T)]:
        arguments = ids(shape).to(device), weight, make.x((*shape, D)).to(device)
        assert_same_bits(compiled(*arguments), function(*arguments), name)
        first = first or counter.frame_count
    assert counter.frame_count == first


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_under_inductor(device, fresh, mode):
    """What users run: the op between generated kernels, forward and backward; in the other mode in CUDA graphs."""
    if ON_GPU:
        pytest.importorskip("triton")
    layer = make.layer(padding_idx=2).to(device)
    output = nn.Linear(D, V).to(device)
    parameters = [make.weight_of(layer), *output.parameters()]

    def loss(given: Tensor) -> Tensor:
        return F.cross_entropy(output(layer(given).tanh()).flatten(0, -2), given.flatten())

    compiled = torch.compile(loss, fullgraph=True, mode=mode)
    for step in range(4):
        given = ids((B, T), seed=step, device=device)
        torch.compiler.cudagraph_mark_step_begin()
        value = compiled(given)
        got = [value.detach().clone(), *(g.clone() for g in torch.autograd.grad(value, parameters))]
        value = loss(given)
        for mine, want in zip(got, [value.detach(), *torch.autograd.grad(value, parameters)], strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)
        assert got[1][2].count_nonzero() == 0  # the padding row


def test_export(device, fresh):
    """Exported there at one size, run there at others, and with another offset."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make.layer(padding_idx=1)

        def forward(self, given: Tensor, offset: int) -> Tensor:
            return self.layer(given, offset=offset)

    module = Step().to(device)
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=1024)}, Dim.DYNAMIC)
    program = torch.export.export(module, (ids((2, 5)).to(device), 3), dynamic_shapes=shapes).module()
    for shape, offset in (((2, 5), 3), ((2, 5), 7), ((4, 9), 0), ((1, 1000), 5000)):
        given = ids(shape).to(device)
        assert_same_bits(program(given, offset), module(given, offset))
    program(ids((3, 4)).to(device), 3).square().sum().backward()
    ((_, parameter),) = program.named_parameters()
    assert parameter.grad.count_nonzero() > 0
    assert parameter.grad[1].count_nonzero() == 0


# ---- sizes past 32 bits ----------------------------------------------------------------------------------------------


def test_more_than_two_to_the_31_elements_of_tokens(device):
    """The output, and the gradient read back from it, past the last 32-bit index. 16 bits: about 5 GiB."""
    width = 1024
    count = 2**31 // width + 3
    needs_bytes(2 * count * width + 2**30)
    weight = torch.randn(V, width).bfloat16()
    given = torch.zeros(1, count, dtype=torch.int32)
    given[0, -3:] = torch.tensor([5, 7, 5])
    out = embed(given.to(device), weight.to(device))
    assert out.numel() > 2**31
    for place in (0, 2**30 // width, count - 3, count - 2, count - 1):
        want = embed(given[:, place : place + 1], weight, offset=place)
        assert_same_bits(out[:, place : place + 1].cpu(), want, f"token {place}")
    # The rows of the last tokens: their gradients lie past 2^31. That of token 0 sums two million numbers.
    got = ops.embed_backward(out, given.to(device), V, 2.0, 0, False).cpu()
    tail = out[:, -3:].cpu()
    assert_same_bits(got, ops.embed_backward(tail, given[:, -3:], V, 2.0, 0, False), "gradient")


def test_more_than_two_to_the_31_elements_of_the_table(device):
    """int32 ids do not make for int32 arithmetic. The table and its gradient: about 9 GiB."""
    rows, width = 2**15 + 1, 2**16
    needs_bytes(2 * 2 * rows * width + 2**30)
    weight = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    last = torch.randn(width).bfloat16()
    weight[rows - 1] = last.to(device)
    given = torch.tensor([rows - 1], dtype=torch.int32)
    got = embed(given.to(device), weight).cpu()
    assert_same_bits(got, embed(torch.zeros(1, dtype=torch.int32), last[None]), "last row")
    del weight
    grad = torch.randn(1, width).bfloat16()
    got = ops.embed_backward(grad.to(device), given.to(device), rows, 2.0, -1, False)
    assert_same_bits(got[-1].cpu(), (grad[0] * 2), "gradient of the last row")
    assert got[:-1].count_nonzero() == 0


@make.each("shape", [(1, 1), (3, 7), (300, 5), (2, 2047), (2, 2048), (3, 5000), (2, 3, 300)])
@make.each("dtype", [torch.int64, torch.int32])
def test_counted_positions(device, shape, dtype):
    """Rows of one and of several tiles, more rows than the device has blocks, every stride."""
    tokens = ids(shape, 3, dtype=dtype)
    for batch_first, view in itertools.product((True, False), (lambda t: t, lambda t: t.transpose(0, -1))):
        given = view(tokens)
        rows = given.shape[:-1] if batch_first else given.shape[1:]
        for offset in (0, 5, torch.tensor(7), ids(rows, 90, dtype=dtype)):
            moved = offset.to(device) if isinstance(offset, torch.Tensor) else offset
            for options in ({}, {"padding_position": None, "first_position": 2}):
                options = {**options, "batch_first": batch_first}
                got = functional.positions_from_padding(given.to(device), 1, offset=moved, **options)
                want = functional.positions_from_padding(given, 1, offset=offset, **options)
                assert_same_bits(got.cpu(), want, f"{shape}, {options}")
        mask = given != 1
        got = functional.positions_from_padding(mask.to(device), 0, batch_first=batch_first)
        assert_same_bits(got.cpu(), functional.positions_from_padding(mask, 0, batch_first=batch_first), "mask")
        numbers = given.sort(-1 if batch_first else 0)[0]
        got = functional.positions_from_sequence_ids(numbers.to(device), batch_first=batch_first)
        assert_same_bits(got.cpu(), functional.positions_from_sequence_ids(numbers, batch_first=batch_first), "numbers")
    starts = torch.cat([torch.tensor([0]), tokens.flatten().cumsum(0)]).to(dtype)
    got = functional.positions_from_cu_seqlens(starts.to(device), int(starts[-1]) + 3, first_position=1)
    want = functional.positions_from_cu_seqlens(starts, int(starts[-1]) + 3, first_position=1)
    assert_same_bits(got.cpu(), want, "starts")


@make.each_dtype
def test_dropout_padding_scale_and_offsets(device, dtype):
    """The CPU's bits, with the same seed: where whole vectors fit, and where they do not."""
    seed, ids = torch.tensor(123456789), make.ids((5, 40))
    for width in (64, 37):
        weight = make.table(width=width, dtype=dtype)
        scale = torch.tensor(0.3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        for code in range(4):
            options = {"dropout_p": 0.3, "at_padding": code, "padding_idx": 2, "offset": 7}
            given = (None, None, None, seed, scale)
            want = ops.embed_general(weight, ids, *given, **options)
            moved = [None if value is None else value.to(device) for value in given]
            got = ops.embed_general(weight.to(device), ids.to(device), *moved, **options)
            assert_same_bits(got.cpu(), want, f"width {width}, at_padding {code}")
        offset, x = torch.tensor([3, 0, 9, 1, 2]), make.x((5, 40, width), dtype=dtype)
        want = functional.add_positional_encoding(x, offset=offset, encoding_scale=0.5)
        got = functional.add_positional_encoding(x.to(device), offset=offset.to(device), encoding_scale=0.5)
        assert_same_bits(got.cpu(), want, f"offsets, width {width}")


@make.each_dtype
def test_several_axes(device, dtype):
    grid, x = functional.grid_positions(3, 5).flatten(0, 1), make.x((2, 15, 40), dtype=dtype)
    want, got = (functional.add_positional_encoding_nd(x.to(d), grid.to(d)) for d in ("cpu", device))
    assert_same_bits(got.cpu(), want, "added")
    want, got = (functional.positional_encoding_nd(grid.to(d), 40, dtype=dtype) for d in ("cpu", device))
    assert_same_bits(got.cpu(), want, "alone")


def test_functional_is_what_was_tested():
    """Every public function is called above, but for those that reach no kernel."""
    tested = {"add_positional_encoding", "embed", "positional_encoding", "scaled_embedding"}
    tested |= {"positions_from_cu_seqlens", "positions_from_padding", "positions_from_sequence_ids"}
    tested |= {"add_positional_encoding_nd", "positional_encoding_nd"}
    of_the_host = {
        "grid_positions",
        "angular_frequencies",
        "broadcast_positions",
        "check_integer",
        "resolve_offset",
        "with_running_index",
    }
    assert set(functional.__all__) == tested | of_the_host
