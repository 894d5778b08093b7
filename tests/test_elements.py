"""Dropout, the scale of the encoding, padding and offsets, all in the pass that looks rows up."""

from __future__ import annotations

import math
from typing import Any

import helpers
import make
import numpy as np
import torch
from helpers import assert_refused, assert_same_bits, in_every_isa
from make import B, D, T, V
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import posenc_ext
from posenc_ext.conventions import AT_PADDING, NO_ENCODING, OFFSETS
from posenc_ext.functional import add_positional_encoding, embed

ops = torch.ops.posenc_ext
SEED = 0x0123456789ABCDEF

# ---- Philox ----------------------------------------------------------------------------------------------------------


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-7 (Salmon et al. 2011, section 3.3) of counters [..., 4], with numpy's 64-bit products."""
    low = np.uint64(0xFFFFFFFF)
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(7):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ key[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def drawn(tokens: int, width: int, seed: int, first: int = 0) -> Tensor:
    """The 16 bits of each element: half c % 8 of the draw for c / 8 and the token (csrc/dropout.h)."""
    column = np.arange(first, first + width)
    counter = np.zeros((tokens, width, 4), dtype=np.uint32)
    counter[..., 0], counter[..., 2] = column // 8, np.arange(tokens)[:, None]
    words = np.take_along_axis(philox(counter, seed), (column % 8 // 2)[None, :, None].repeat(tokens, 0), axis=-1)[
        ..., 0
    ]
    return torch.from_numpy((words >> (16 * (column % 2)) & 0xFFFF).astype(np.int64))


def kept(shape: tuple[int, ...], p: float, seed: int = SEED, first: int = 0) -> Tensor:
    """Which elements of an output are kept."""
    return (drawn(math.prod(shape[:-1]), shape[-1], seed, first) >= round(p * 2**16)).view(shape)


def test_the_published_answers():
    """Of Random123, the authors' own library: kat_vectors, philox4x32 7."""
    for counter, seed, want in (
        ([0] * 4, 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([0xFFFFFFFF] * 4, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ):
        assert " ".join(f"{word:08x}" for word in philox(np.array(counter), seed)) == want


# ---- dropout ---------------------------------------------------------------------------------------------------------


def general(weight: Tensor, input: Tensor, p: float, seed: int | None = SEED, **more: Any) -> Tensor:
    base, flags = make.spec(more.pop("convention", "vaswani"), None, more.pop("batch_first", True))
    options = {
        "base": base,
        "flags": flags,
        "dropout_p": p,
        "seed": None if seed is None else torch.tensor(seed),
        **more,
    }
    return ops.embed_general(weight, input, **options)


FACTOR = 2**16 / (2**16 - round(0.3 * 2**16))


@make.each_dtype
@make.each("width", make.WIDTHS)
def test_which_elements_are_dropped(dtype, width, force_isa, threads):
    """Those that the formula says, of every layout, instruction set and number of threads; the others are divided."""
    weight, input = make.table(width=width, dtype=dtype), make.ids((2, 9))
    for convention in ("vaswani", "tensor2tensor", "musicgen"):
        # Rounded once, after the division.
        plain = general(weight.to(helpers.wide(dtype)), input, 0.0, None, convention=convention)
        want = torch.where(kept(plain.shape, 0.3), plain * FACTOR, 0.0).to(dtype)
        for count in (1, 3):
            threads(count)
            got = in_every_isa(force_isa, lambda c=convention: general(weight, input, 0.3, convention=c))
            assert_same_bits(got, want, f"{convention}, {count} threads")


@make.each_dtype
def test_in_large_outputs(dtype):
    """Whose stores bypass the cache; one sequence, and a batch whose rows share encodings."""
    for shape in ((1, 1100), (12, 100)):
        weight, input = make.table(width=1030, dtype=dtype), make.ids(shape)
        plain = general(weight.to(helpers.wide(dtype)), input, 0.0, None)
        want = torch.where(kept(plain.shape, 0.3), plain * FACTOR, 0.0).to(dtype)
        assert_same_bits(general(weight, input, 0.3), want)


def test_tokens_are_counted_in_the_order_of_memory():
    weight, input = make.table(), make.ids((T, B))
    plain = general(weight, input, 0.0, None, batch_first=False)
    want = torch.where(kept(plain.shape, 0.3), plain * FACTOR, 0.0)
    assert_same_bits(general(weight, input, 0.3, batch_first=False), want)
    out = torch.empty(2 * T, B, D)[::2]
    base, flags = make.spec(batch_first=False)
    options = {"base": base, "flags": flags, "dropout_p": 0.3, "seed": torch.tensor(SEED)}
    ops.embed_general_out(weight, input.t().contiguous().t(), **options, out=out)
    assert_same_bits(out, want)


def test_shards_draw_what_the_whole_draws():
    weight, input = make.table(width=37), make.ids()
    whole = general(weight, input, 0.4)
    for a, b in ((0, 5), (5, 24), (24, 37)):
        part = general(weight[:, a:b].contiguous(), input, 0.4, first_column=a, d_model=37)
        assert torch.equal(part, whole[..., a:b])
    rows = [general(weight[a:b], input, 0.4, first_row=a, total_rows=V) for a, b in ((0, 4), (4, V))]
    assert torch.equal(rows[0] + rows[1], whole)


@make.each_dtype
def test_dropout_of_activations(dtype):
    x = make.x(dtype=dtype)
    got = ops.add_general(x, seed=torch.tensor(SEED), dropout_p=0.3)
    plain = add_positional_encoding(x.to(helpers.wide(dtype)))
    assert_same_bits(got, torch.where(kept(x.shape, 0.3), plain * FACTOR, 0.0).to(dtype))
    # Without an encoding: what the gradient goes through.
    mask = ops.add_general(x, seed=torch.tensor(SEED), dropout_p=0.3, flags=NO_ENCODING.flags)
    assert_same_bits(mask, torch.where(kept(x.shape, 0.3), x.to(plain.dtype) * FACTOR, 0.0).to(dtype))


def test_probabilities(monkeypatch):
    weight, input = make.table(), make.ids()
    plain = embed(input, weight)
    assert not embed(input, weight, dropout_p=1.0).any()
    assert torch.equal(embed(input, weight, dropout_p=2**-18), plain)  # rounds to 0
    got = embed(input, weight, dropout_p=2**-17 + 2**-20)  # rounds to 2^-16
    assert torch.equal(got[got != 0], (plain * (2**16 / (2**16 - 1)))[got != 0])
    for p in (-0.1, 1.5, math.nan, math.inf):
        assert_refused(lambda p=p: embed(input, weight, dropout_p=p), "embed", "dropout_p", "[0, 1]", p)
        assert_refused(lambda p=p: general(weight, input, p), "embed_general", "dropout_p", "[0, 1]")
    assert_refused(lambda: general(weight, input, 0.0), "embed_general", "seed")
    base, flags = make.spec()
    for seed in (None, torch.tensor(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)):
        call = lambda s=seed: ops.embed_general(weight, input, base=base, flags=flags, dropout_p=0.5, seed=s)  # noqa: E731
        assert_refused(call, "embed_general", "seed")


def test_the_share_of_dropped_elements():
    """Within five standard deviations; for each column, each token and their neighbours."""
    shape, p = (1, 512, 512), 0.25
    dropped = embed(make.ids(shape[:2]), torch.ones(V, shape[2]), convention="tensor2tensor", dropout_p=p)[0] == 0
    dropped = dropped.double()
    for axis in (0, 1):
        worst = (dropped.mean(axis) - p).abs().max()
        assert worst < 5 * math.sqrt(p * (1 - p) / 512)
        following = dropped * dropped.roll(1, axis)
        assert abs(following.mean() - p * p) < 5 * math.sqrt(p * p * (1 - p * p) / 512**2)
    assert abs(dropped.mean() - p) < 5 * math.sqrt(p * (1 - p) / 512**2)


def test_torchs_generator_seeds_it():
    weight, input = make.table(), make.ids()
    first, second = (embed(input, weight, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    make.table(), make.ids()
    assert torch.equal(embed(input, weight, dropout_p=0.5), first)


@make.each("reentrant", [False, True])
def test_checkpointing_repeats_it(reentrant):
    input, gradients = make.ids(), []
    for through in (lambda f, *a: checkpoint(f, *a, use_reentrant=reentrant), lambda f, *a: f(*a)):
        weight = make.table(seed=1, grad=True)
        torch.manual_seed(3)
        through(lambda w: embed(input, w, dropout_p=0.5), weight).square().sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


@make.each_dtype
@make.each("sparse", [False, True])
def test_the_gradient_is_dropped_alike(dtype, sparse):
    weight, input = make.table(dtype=dtype, grad=True), make.ids()
    y = embed(input, weight, dropout_p=0.3, token_scale=2.0, sparse=sparse, padding_idx=2, scale_grad_by_freq=True)
    grad = make.x(y.shape, dtype=dtype)
    (got,) = torch.autograd.grad(y, weight, grad)
    of_sum = torch.where(y != 0, grad.to(helpers.wide(dtype)) * FACTOR, 0.0)
    assert got.is_sparse == sparse
    assert_same_bits(got.to_dense(), ops.embed_backward(of_sum, input, V, 2.0, 2, True).to(dtype))


@make.each_dtype
@make.each("width", make.WIDTHS)
def test_which_elements_of_a_gradient_are_dropped(dtype, width, force_isa, threads):
    """Those of the output, of shards as well. What is left is rounded once, as a sum."""
    wide, seed = helpers.wide(dtype), torch.tensor(SEED)
    streamed = (4 << 20) // (width * dtype.itemsize) + 1
    for tokens, rows in ((30, 9), (200, 3), *(((30, streamed),) if width > 100 else ())):
        grad, input = make.x((tokens, width), dtype=dtype), make.ids(tokens, min(rows, 9))
        for first in (0, 5):
            given = (input, rows, 1.5, -1, False)
            of_sum = torch.where(kept(grad.shape, 0.3, first=first), grad.to(wide) * FACTOR, 0.0)
            want = ops.embed_backward(of_sum, *given).to(dtype)
            options = {"dropout_p": 0.3, "seed": seed, "first_column": first, "d_model": width + 8}
            what = f"{tokens} tokens, {rows} rows, from column {first}"

            def call(sparse=False, args=(grad, *given), options=options):
                op = ops.embed_general_backward_sparse if sparse else ops.embed_general_backward
                return op(*args, **options)

            for count in (1, 3):
                threads(count)
                assert_same_bits(in_every_isa(force_isa, call), want, f"{what}, {count} threads")
            found, values = call(sparse=True)
            assert_same_bits(values, want[found], f"{what}, sparse")


@make.each("name", make.VIEWS)
def test_gradients_of_any_strides_are_dropped(name):
    grad, input = make.views((4, 30), 37, torch.float32)[name], make.ids((4, 30), 6)
    options = {"dropout_p": 0.3, "seed": torch.tensor(SEED)}
    got, want = (ops.embed_general_backward(g, input, 9, 2.5, -1, False, **options) for g in (grad, grad.contiguous()))
    assert_same_bits(got, want)


def test_gradients_that_are_refused():
    grad, input = make.x(), make.ids()

    def call(**options):
        return ops.embed_general_backward(grad, input, V, 1.0, -1, False, **options)

    seed = torch.tensor(SEED)
    for options, words in (
        ({"dropout_p": 1.5, "seed": seed}, ("dropout_p", "[0, 1]", 1.5)),
        ({"dropout_p": 0.5}, ("seed", "no seed")),
        ({"seed": seed}, ("seed", "and a seed")),
        ({"dropout_p": 0.5, "seed": seed.int()}, ("seed", "int64")),
        ({"first_column": 1}, ("first_column", "[0, 0]", 1)),
        ({"d_model": D - 1}, ("d_model", D - 1)),
    ):
        assert_refused(lambda o=options: call(**o), "embed_general_backward", *words)


def test_a_gradient_of_shards():
    weight, input = make.table(width=37, grad=True), make.ids()
    grad = make.x((*input.shape, 37))
    (whole,) = torch.autograd.grad(general(weight, input, 0.4), weight, grad)
    rows, columns = weight.detach()[4:].requires_grad_(), weight.detach()[:, 5:24].requires_grad_()
    y = general(rows, input, 0.4, first_row=4, total_rows=V)
    assert_same_bits(torch.autograd.grad(y, rows, grad)[0], whole[4:])
    y = general(columns, input, 0.4, first_column=5, d_model=37)
    assert_same_bits(torch.autograd.grad(y, columns, grad[..., 5:24])[0], whole[:, 5:24])


def test_a_backward_draws_in_its_sums():
    """No other tensor is made."""
    weight, input = make.table(grad=True), make.ids()
    y = embed(input, weight, dropout_p=0.3)
    with helpers.Ops() as seen:
        y.backward(make.x(y.shape))
    assert [name for name in seen.names if name.startswith("posenc_ext")] == ["posenc_ext::embed_general_backward"]


def test_forward_mode_over_a_backward():
    weight, input, x = make.table(grad=True), make.ids(), make.x(grad=True)
    grad, tangent = make.x(seed=1), make.x(seed=2)
    for of, y in (
        (weight, embed(input, weight, dropout_p=0.3)),
        (x, add_positional_encoding(x, dropout_p=0.3)),
    ):
        want = [torch.autograd.grad(y, of, given, retain_graph=True)[0] for given in (grad, tangent)]
        with forward_ad.dual_level():
            (dual,) = torch.autograd.grad(y, of, forward_ad.make_dual(grad, tangent))
            torch.testing.assert_close([*forward_ad.unpack_dual(dual)], want)


def seeded(function):
    def call(*given):
        torch.manual_seed(7)
        return function(*given)

    return call


def test_gradients_of_every_order():
    """To the table or the activations, and to the scale of the encoding, with dropout between."""
    input, x = make.ids(), make.x(dtype=torch.float64, grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    weight = make.table(dtype=torch.float64, grad=True)
    offset = torch.tensor([4, 0, 2])

    def lookup(w, s):
        return embed(input, w, offset=offset, dropout_p=0.3, encoding_scale=s)

    def addition(a, s):
        return add_positional_encoding(a, offset=offset, token_scale=1.5, dropout_p=0.3, encoding_scale=s)

    for call, of in ((lookup, weight), (addition, x)):
        assert torch.autograd.gradcheck(seeded(call), (of, scale))
        assert torch.autograd.gradgradcheck(seeded(call), (of, scale))
    for name in AT_PADDING:
        padded = torch.cat([torch.full((1, D), math.nan, dtype=torch.float64), weight.detach()[1:]])
        padded[0] = 1.0 if name in ("embed", "no_encoding") else math.nan
        rows = padded[1:].clone().requires_grad_()

        def with_padding(w, s, name=name, first=padded[:1]):
            table = torch.cat([first, w])
            return embed(input, table, padding_idx=0, at_padding=name, encoding_scale=s)

        assert torch.autograd.gradcheck(with_padding, (rows, scale)), name


def test_transforms_use_torchs_dropout():
    weight, input = make.table(), make.ids()
    got = torch.func.grad(seeded(lambda w: embed(input, w, dropout_p=0.5, token_scale=1.0).sum()))(weight)
    assert set(torch.unique(got).tolist()) <= {2.0 * n for n in range(input.numel() + 1)}
    torch.manual_seed(7)
    with forward_ad.dual_level():
        y = embed(input, forward_ad.make_dual(weight, torch.ones_like(weight)), dropout_p=0.5, token_scale=1.0)
        tangent = forward_ad.unpack_dual(y).tangent
    assert torch.equal(tangent, torch.where(y != 0, 2.0, 0.0))
    torch.manual_seed(7)
    assert torch.equal(y, F.dropout(embed(input, weight, token_scale=1.0), 0.5))


def test_compiled():
    """One graph; its mask in the gradient too; manual_seed repeats it."""
    layer, input = make.layer(dropout=0.5).train(), make.ids()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        layer.zero_grad()
        y = compiled(input)
        y.sum().backward()
        results.append((y.detach(), layer.weight.grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    y, gradient = results[0]
    want = torch.zeros(V, D).index_add_(0, input.flatten(), 2 * layer.token_scale * (y != 0).float().view(-1, D))
    torch.testing.assert_close(gradient, want)
    torch.manual_seed(7)
    assert torch.equal(layer(input), y)


def test_exported_programs_hold_torchs_dropout():
    """Which tools turn off for evaluation."""
    program = torch.export.export(make.layer(dropout=0.5).train(), (make.ids(),))
    assert "aten.dropout" in str(program.graph) or "aten.bernoulli" in str(program.graph)


def test_dtensors_use_torchs_dropout(tmp_path):
    """Which keeps ranks alike. A scale in a tensor is refused by name."""
    code = """
import torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from posenc_ext.functional import embed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = distribute_tensor(torch.randn(11, 8), init_device_mesh("cpu", (1,)), [Shard(1)])
ids, torch_dropout = torch.randint(0, 11, (3, 7)), torch.nn.functional.dropout
calls = []
torch.nn.functional.dropout = lambda y, p: calls.append(p) or torch_dropout(y, p)
y = embed(ids, weight, dropout_p=0.5, encoding_scale=0.5)
plain = embed(ids, weight, encoding_scale=0.5).to_local()
kept = y.to_local() != 0
assert calls == [0.5] and torch.equal(y.to_local(), torch.where(kept, 2 * plain, 0.0)) and 0 < kept.sum() < 168
try:
    embed(ids, weight, encoding_scale=torch.tensor(2.0))
except ValueError as error:
    print(error)
"""
    assert "encoding_scale cannot be combined with a DTensor" in helpers.run_code(code, tmp_path)


def test_nested_rows():
    rows = [make.ids(n) for n in (3, 0, 5)]
    weight, input = make.table(), torch.nested.nested_tensor(rows, layout=torch.jagged)
    torch.manual_seed(7)
    y = embed(input, weight, dropout_p=0.5, encoding_scale=2.0).values()
    plain = embed(input, weight, encoding_scale=2.0).values()
    assert torch.equal(y, torch.where(y != 0, 2 * plain, 0.0))
    assert 0 < (y == 0).double().mean() < 1


def test_modules_drop_in_the_pass_only_while_the_child_is_plain():
    input = make.ids()
    for kind in ("TransformerEmbedding", "PositionalEncoding"):
        layer, given = make.layer(kind, dropout=0.5).train(), make.argument(kind)
        with helpers.Ops() as seen:
            layer(given)
        assert [n for n in seen.names if "dropout" in n or "bernoulli" in n] == [], seen.names
        layer.dropout.register_forward_hook(lambda *_: None)
        torch.manual_seed(7)
        got = layer(given)
        torch.manual_seed(7)
        assert torch.equal(got, F.dropout(layer.eval()(given), 0.5))
    layer = make.layer(dropout=0.5).train()
    layer.dropout.eval()
    assert (layer(input) != 0).all()


# ---- the scale of the encoding ---------------------------------------------------------------------------------------


@make.each_dtype
def test_encoding_scale(dtype, force_isa):
    wide = helpers.wide(dtype)
    for width in (1, 7, 64, 513):
        weight, input, x = (
            make.table(width=width, dtype=dtype),
            make.ids((2, 20)),
            make.x((2, 20, width), dtype=dtype),
        )
        for convention in ("vaswani", "tensor2tensor", "positional_encodings"):
            chosen = {"convention": convention, "offset": 5}
            encoding = posenc_ext.functional.positional_encoding(20, width, dtype=wide, **chosen)
            for scale in (0.3, torch.tensor(0.3), torch.tensor([0.3], dtype=torch.float64)):
                factor = torch.as_tensor(scale, dtype=wide)
                want = (weight[input].to(wide) * 2.0 + encoding * factor).to(dtype)
                call = {"encoding_scale": scale, **chosen}
                got = in_every_isa(force_isa, lambda c=call, w=weight, i=input: embed(i, w, token_scale=2.0, **c))
                assert_same_bits(got, want)
                assert_same_bits(embed(input, weight, token_scale=2.0, out=torch.empty_like(want), **call), want)
                want = (x.to(wide) + encoding * factor).to(dtype)
                assert_same_bits(add_positional_encoding(x, **call), want)
                assert_same_bits(add_positional_encoding(x, out=torch.empty_like(x), **call), want)


def test_a_scale_that_is_trained():
    """A parameter of the module, saved with it; in bfloat16 it keeps its own dtype and gradient."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = posenc_ext.TransformerEmbedding(V, D, encoding_scale=nn.Parameter(torch.tensor(0.5)), dtype=dtype).to(
            dtype
        )
        assert set(layer.state_dict()) == {"lut.weight", "encoding_scale"}
        input, grad = make.ids(), make.x(dtype=dtype)
        layer(input).backward(grad)
        encoding = posenc_ext.functional.positional_encoding(T, D, dtype=torch.float64)
        want = (grad.double() * encoding).sum()
        assert layer.encoding_scale.grad.dtype == dtype
        torch.testing.assert_close(layer.encoding_scale.grad.double(), want, atol=1e-5, rtol=1e-2)
        add = posenc_ext.PositionalEncoding(D, encoding_scale=layer.encoding_scale)
        assert torch.equal(add(grad), add_positional_encoding(grad, encoding_scale=layer.encoding_scale))


def test_scales_that_are_refused():
    weight, input = make.table(), make.ids()
    two = torch.ones(2)
    assert_refused(
        lambda: embed(input, weight, encoding_scale=two), "embed_general", "encoding_scale_tensor", "one number"
    )
    trained = torch.tensor(2.0, requires_grad=True)
    out = torch.empty(B, T, D)
    assert_refused(lambda: embed(input, weight, encoding_scale=trained, out=out), "embed", "out", "encoding_scale")


# ---- padding ---------------------------------------------------------------------------------------------------------


@make.each_dtype
@make.each("name", AT_PADDING.keys())
def test_at_padding(dtype, name, force_isa):
    """Against the formula, with a row of NaN where the row must not matter; the padding row gets no gradient."""
    wide = helpers.wide(dtype)
    for width in (1, 7, 64, 513):
        for shape in ((1, 40), (3, 40)):
            for convention in ("vaswani", "tensor2tensor"):
                weight, input = make.table(width=width, dtype=dtype), make.ids(shape)
                weight[2] = math.nan if name in ("no_embedding", "zeros") else 0.5
                encoding = posenc_ext.functional.positional_encoding(40, width, dtype=wide, convention=convention)
                rows, padding = weight[input].to(wide) * 1.5, (input == 2).unsqueeze(-1)
                nothing = torch.zeros_like(rows)
                at = {"embed": rows + encoding, "no_encoding": rows, "no_embedding": encoding, "zeros": nothing}[name]
                want = torch.where(padding, at, rows + encoding).to(dtype)
                options = {"padding_idx": 2 - V, "at_padding": name, "token_scale": 1.5, "convention": convention}
                got = in_every_isa(force_isa, lambda w=weight, i=input, o=options: embed(i, w, **o))
                assert_same_bits(got, want, name)
                assert_same_bits(embed(input, weight, out=torch.empty_like(want), **options), want)
                trained = weight.clone().requires_grad_()
                embed(input, trained, **options).sum().backward()
                assert not trained.grad[2].any()
                assert not trained.grad.isnan().any()


def test_at_padding_in_a_layer_whose_lookup_is_called():
    for name in AT_PADDING:
        layer = posenc_ext.TransformerEmbedding(V, D, padding_idx=0, at_padding=name)
        fused = layer(input := make.ids())
        layer.lut.register_forward_hook(lambda *_: None)
        assert_same_bits(layer(input), fused, name)


def test_shards_with_padding():
    weight, input = make.table(), make.ids((B, 30))
    for name, code in AT_PADDING.items():
        options = {"padding_idx": 5, "at_padding": code}
        parts = [
            ops.embed_general(weight[a:b], input, first_row=a, total_rows=V, **options) for a, b in ((0, 4), (4, V))
        ]
        assert torch.equal(parts[0] + parts[1], ops.embed_general(weight, input, **options)), name


def test_paddings_that_are_refused():
    weight, input = make.table(), make.ids()
    assert_refused(lambda: embed(input, weight, at_padding="none", padding_idx=0), "embed", "at_padding", "'none'")
    assert_refused(lambda: embed(input, weight, at_padding="zeros"), "embed", "padding_idx", "None")
    assert_refused(lambda: ops.embed_general(weight, input, at_padding=4, padding_idx=0), "at_padding", "[0, 4)", 4)
    assert_refused(lambda: ops.embed_general(weight, input, at_padding=1), "padding_idx", f"[0, {V})", -1)


# ---- offsets ---------------------------------------------------------------------------------------------------------


@make.each_dtype
def test_offsets_of_rows(dtype, force_isa):
    """The bits of explicit positions, without positions being made."""
    index = torch.arange(T)
    for offset in (torch.tensor(9), torch.tensor([3, 0, -(2**40)]), torch.tensor([1, 2, 3], dtype=torch.int32)):
        for batch_first in (True, False):
            weight, input = make.table(dtype=dtype), make.ids()
            positions = index + offset.long().unsqueeze(-1)
            positions = positions.expand(B, T)
            if not batch_first:
                input, positions = input.t(), positions.t()
            options = {"convention": "fairseq", "batch_first": batch_first}
            want = embed(input, weight, positions=positions + 2, **options)
            options["offset"] = offset
            got = in_every_isa(force_isa, lambda i=input, w=weight, o=options: embed(i, w, **o))
            assert_same_bits(got, want)
            assert_same_bits(embed(input, weight, out=torch.empty_like(want), **options), want)
            x = make.x((*input.shape, D), dtype=dtype)
            got = add_positional_encoding(x, **options)
            del options["offset"]
            assert_same_bits(got, add_positional_encoding(x, positions=positions + 2, **options))


def test_an_offset_makes_no_other_tensor():
    weight, input = make.table(), make.ids()
    for offset in (torch.tensor(9), torch.tensor([3, 0, 5])):
        with helpers.Ops() as seen:
            embed(input, weight, offset=offset)
        assert set(seen.names) <= {"posenc_ext::embed", "posenc_ext::_embed_fwd", "aten::unsqueeze", "aten::expand"}
    spec = make.spec()
    positions = torch.tensor([3, 0, 5]).unsqueeze(1).expand(B, T)
    got = ops.embed(weight, input, positions, 0, 1.0, spec.base, spec.flags | OFFSETS)
    assert torch.equal(got, embed(input, weight, offset=positions[:, 0], token_scale=1.0))
