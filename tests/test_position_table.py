"""A learned table of positions in place of the sinusoids, in the same pass."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import helpers
import make
import pytest
import torch
from helpers import assert_refused, assert_same_bits, in_every_isa
from make import B, D, T, V
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import posenc_ext
from posenc_ext import LearnedPositionalEmbedding, TransformerEmbedding
from posenc_ext.conventions import NO_ENCODING, OFFSETS
from posenc_ext.functional import add_positional_encoding, embed

ops = torch.ops.posenc_ext
ROWS = 40  # of the table of positions
IDS, W, P, X = make.ids(seed=1), make.table(seed=2), make.table(ROWS, seed=3), make.x(seed=4)
IN_TABLE = f"positions must lie in [0, {ROWS}), the rows of position_table, got"


def eager(weight: Tensor, rows: Tensor, positions: Tensor, scale: float = 1.0, encoding_scale: Any = 1.0) -> Tensor:
    """`wte(ids) * scale + wpe(positions)` in the type that sums have, rounded once."""
    wide = helpers.wide(weight.dtype)
    encoding = F.embedding(positions, weight).to(wide)
    if not (isinstance(encoding_scale, float) and encoding_scale == 1):
        encoding = encoding * encoding_scale
    return (rows.to(wide) * scale + encoding).to(weight.dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


@make.each_dtype
@make.each("width", make.WIDTHS)
def test_values(dtype, width):
    """Of every way to say a position: the bits of eager's lookups, product and sum."""
    w, p = make.table(width=width, dtype=dtype), make.table(ROWS, width, dtype=dtype)
    ids, given, index = make.ids(), make.ids(rows=ROWS - 9), torch.arange(T)
    offsets, rows = torch.tensor([3, 0, 30]), w[ids]
    for options, positions in (
        ({}, index),
        ({"offset": 9}, index + 9),
        ({"offset": offsets}, index + offsets[:, None]),
        ({"offset": torch.tensor(5)}, index + 5),
        ({"positions": given.int()}, given),
        ({"positions": given[0], "offset": 9}, given[0] + 9),
        ({"positions": given, "offset": torch.tensor([1, 2, 9])}, given + torch.tensor([[1], [2], [9]])),
        ({"encoding_scale": 0.3}, index),
    ):
        factor = options.get("encoding_scale", 1.0)
        want, options = eager(p, rows, positions.expand(B, T), 2.5, factor), {**options, "position_table": p}
        assert_same_bits(embed(ids, w, token_scale=2.5, **options), want, f"{options}")
        assert_same_bits(add_positional_encoding(rows, token_scale=2.5, **options), want, f"{options}")
    want = eager(p, rows, index[:B, None].expand(B, T), 2.5)
    assert_same_bits(embed(ids, w, token_scale=2.5, position_table=p, batch_first=False), want, "sequence first")
    scalar = embed(ids[0, 0], w, token_scale=2.5, position_table=p, offset=7)
    assert_same_bits(scalar, eager(p, rows[0, 0], torch.tensor(7), 2.5), "one token")


def test_values_of_tables_with_strides():
    wide = make.table(ROWS, 3 * D)
    for table in (
        wide[:, 3 : 3 + D],
        wide[::2, :D],
        wide[:, : 2 * D : 2],
        make.table(D, ROWS).t(),
        P[:1].expand(ROWS, D),
    ):
        want = eager(table, W[IDS], torch.arange(T).expand(B, T))
        assert_same_bits(embed(IDS, W, token_scale=1, position_table=table), want, f"{table.stride()}")


@make.each_dtype
@make.each("size", {"small": 9, "large": 9000})
def test_threads_and_instruction_sets(dtype, size, force_isa, threads):
    """Both sides of the size for streaming, positions that are shared and that are not; with all else of an element."""
    width = 515
    w, p = make.table(50, width, dtype=dtype), make.table(30, width, dtype=dtype)
    ids = make.ids((size // 30 + 1, 30), 50)
    given = make.ids(tuple(ids.shape), 30)
    elements = {"encoding_scale": 0.3, "at_padding": "no_encoding", "padding_idx": 3}
    for options in ({}, {"positions": given}, {"positions": given, **elements}):

        def call(options: Any = options) -> Tensor:
            torch.manual_seed(0)
            return embed(ids, w, position_table=p, dropout_p=0.1 if "encoding_scale" in options else 0.0, **options)

        threads(1)
        want = in_every_isa(force_isa, call, f"{options.keys()}")
        for count in (2, 3):
            threads(count)
            assert_same_bits(call(), want, f"{count} threads")


def test_padding_and_dropout():
    """What a token of padding_idx is, and which elements are dropped: the same as beside sinusoids."""
    padding, pad = (IDS == 2).unsqueeze(-1), {"padding_idx": 2, "position_table": P, "token_scale": 2.0}
    assert padding.any()
    encoding, row = F.embedding(torch.arange(T), P).expand(B, T, D), 2.0 * W[IDS]
    for name, want in {
        "embed": row + encoding,
        "no_encoding": torch.where(padding, row, row + encoding),
        "no_embedding": torch.where(padding, encoding, row + encoding),
        "zeros": (row + encoding).masked_fill(padding, 0),
    }.items():
        assert_same_bits(embed(IDS, W, at_padding=name, **pad), want, name)
        given = {"seed": torch.tensor(5), "dropout_p": 0.25, "flags": NO_ENCODING.flags}
        kept = ops.add_general(torch.ones(B, T, D), **given) != 0
        call = {
            "position_table": P,
            "token_scale": 2.0,
            "padding_idx": 2,
            "at_padding": posenc_ext.conventions.AT_PADDING[name],
        }
        dropped = ops.embed_general(W, IDS, **call, **given)
        assert_same_bits(dropped, torch.where(kept, want * (4 / 3), 0.0) if name != "zeros" else dropped, name)
        assert not dropped[~kept].any()


# ---- gradients -------------------------------------------------------------------------------------------------------


@make.each("at_padding", posenc_ext.conventions.AT_PADDING.keys())
def test_gradients(at_padding):
    """To first and second order, of weight, table and scale, by finite differences."""
    ids = torch.tensor([[0, 1, 4], [2, 2, 0]])
    w, p = make.table(5, 4, dtype=torch.float64, grad=True), make.table(9, 4, dtype=torch.float64, grad=True)
    scale, x = (
        torch.tensor(0.7, dtype=torch.float64, requires_grad=True),
        make.x((2, 3, 4), dtype=torch.float64, grad=True),
    )
    options = {"at_padding": at_padding, "padding_idx": 2} if at_padding != "embed" else {}

    def layer(w: Tensor, p: Tensor, scale: Tensor) -> Tensor:
        # The row of padding_idx is kept from training, which differences do not know.
        w = torch.where((torch.arange(5) == 2)[:, None], make.table(5, 4, dtype=w.dtype, seed=9), w) if options else w
        return embed(ids, w, position_table=p, encoding_scale=scale, offset=torch.tensor([3, 0]), **options)

    def add(x: Tensor, p: Tensor, scale: Tensor) -> Tensor:
        return add_positional_encoding(x, position_table=p, encoding_scale=scale, positions=ids, token_scale=2.0)

    for function, first in ((layer, w), (add, x)):
        assert torch.autograd.gradcheck(function, (first, p, scale))
        assert torch.autograd.gradgradcheck(function, (first, p, scale))


@make.each_dtype
def test_gradient_of_the_table(dtype):
    """Summed in fp32 and rounded once, with a scale that is a number or a tensor; dropped elements have no part."""
    positions, grad = make.ids((B, 300), ROWS), make.x((B, 300, D)).to(dtype)
    for scale in (1.0, 0.3, torch.tensor(0.3)):
        p = make.table(ROWS, dtype=dtype, grad=True)
        y = add_positional_encoding(grad, positions=positions, position_table=p, encoding_scale=scale)
        (got,) = torch.autograd.grad(y, p, grad)
        want, bound = helpers.true_gradient(grad, positions, ROWS, float(scale))
        helpers.assert_close(got, want, bound * 1.01)
        assert_same_bits(
            torch.autograd.grad(
                add_positional_encoding(grad, positions=positions, position_table=p, encoding_scale=scale), p, grad
            )[0],
            got,
        )
    p = P.clone().requires_grad_()
    y = embed(IDS, W, position_table=p, dropout_p=0.5)
    y.sum().backward()
    dropped = (y == 0).sum(0)
    torch.testing.assert_close(p.grad[:T], 2.0 * (B - dropped))
    assert not p.grad[T:].any()


def test_a_table_that_changes_after_the_forward():
    """Its gradient takes none of its numbers, as that of nn.Embedding."""
    p = P.clone().requires_grad_()
    y = embed(IDS, W, position_table=p)
    with torch.no_grad():
        p.zero_()
    y.sum().backward()
    assert torch.equal(p.grad[:T], torch.full((T, D), float(B)))


def test_a_shard_of_rows_has_its_tokens_part_of_the_gradient():
    rows = {"first_row": 4, "total_rows": V, "flags": NO_ENCODING.flags}
    p, scale = P.clone().requires_grad_(), torch.tensor(0.5, requires_grad=True)
    y = ops.embed_general(W[4:7], IDS, position_table=p, encoding_scale_tensor=scale, **rows)
    here = ((IDS >= 4) & (IDS < 7)).float()
    assert_same_bits(y.detach()[here == 0], torch.full((int((1 - here).sum()), D), -0.0))
    y.sum().backward()
    assert torch.equal(p.grad[:T], 0.5 * here.sum(0)[:, None].expand(T, D))
    torch.testing.assert_close(scale.grad, (here.sum(0)[:, None] * P[:T]).sum())


# ---- positions out of range ------------------------------------------------------------------------------------------

BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"offset": ROWS - T + 1}, f"{ROWS} at token[0, {T - 1}]"),
    "negative offset": ({"offset": -2}, "-2 at token[0, 0]"),
    "positions": ({"positions": torch.tensor([0, 1, 2, -1, 4, 40, 6])}, "-1 at token[0, 3]"),
    "int32 positions": ({"positions": (IDS + 30).int().index_fill(0, torch.tensor(2), 99)}, "99 at token[2, 0]"),
    "sum": ({"positions": IDS, "offset": 2**61}, f"{2**61 + int(IDS[0, 0])} at token[0, 0]"),
    "wrapped sum": ({"positions": IDS + (2**63 - 20), "offset": 2**62 - 1}, "at token[0, 0]"),
    "offsets": ({"offset": torch.tensor([0, 34, 35])}, f"{ROWS} at token[1, 6]"),
    "sequence first": ({"offset": ROWS - 2, "batch_first": False}, f"{ROWS} at token[2, 0]"),
}


@make.each("options, said", BEYOND)
def test_positions_out_of_range(options, said):
    """Nothing is written, neither to out nor to rows that max_norm would scale."""
    for call in (
        lambda **more: embed(IDS, W, position_table=P, **options, **more),
        lambda **more: add_positional_encoding(X, position_table=P, **options, **more),
    ):
        out = torch.full((B, T, D), 7.0)
        assert_refused(call, IN_TABLE, said, error=IndexError)
        assert_refused(lambda call=call, out=out: call(out=out), IN_TABLE, said, error=IndexError)
        assert (out == 7).all()
    weight = 100 * W
    assert_refused(lambda: embed(IDS, weight, max_norm=1.0, position_table=P, **options), IN_TABLE, error=IndexError)
    assert torch.equal(weight, 100 * W)


def test_positions_out_of_range_compiled():
    program = torch.compile(
        lambda i, w, p, o: embed(i, w, position_table=p, offset=o), backend="aot_eager", dynamic=True
    )
    assert torch.equal(program(IDS, W, P, 3), embed(IDS, W, position_table=P, offset=3))
    for weight in (W, W.clone().requires_grad_()):
        assert_refused(
            lambda w=weight: program(IDS, w, P, ROWS - 2), IN_TABLE, f"{ROWS} at token[0, 2]", error=IndexError
        )


def test_no_tokens_have_no_position():
    assert embed(IDS[:, :0], W, position_table=P[:0], offset=99).shape == (B, 0, D)
    assert_refused(lambda: embed(IDS, W, position_table=P[:0]), "got 21 positions", error=IndexError)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another width": ({"position_table": P[:, 1:]}, ("position_table must have shape [max_len, 8], got", "[40, 7]")),
    "one axis": ({"position_table": P[0]}, ("position_table must have shape [max_len, 8], got", "[8]")),
    "another dtype": ({"position_table": P.double()}, ("position_table must have the dtype of",)),
    "a convention": ({"position_table": P, "convention": "fairseq"}, ("position_table takes the place", "'fairseq'")),
    "a precision": ({"position_table": P, "precision": "exact"}, ("position_table takes the place", "'exact'")),
    "frequencies": ({"position_table": P, "frequencies": torch.ones(4)}, ("position_table takes", "frequencies")),
    "floating positions": ({"position_table": P, "positions": IDS.float()}, ("positions must have dtype int64 or",)),
    "a far offset": ({"position_table": P, "offset": 2**62}, ("offset must lie between -2**62 and 2**62", str(2**62))),
}  # fmt: skip


@make.each("options, words", REFUSED)
def test_what_is_refused(options, words):
    for call in (lambda: embed(IDS, W, **options), lambda: add_positional_encoding(X, **options)):
        assert_refused(call, *words)
        if "offset" not in options:  # a number, which a program may have as a symbol
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                assert_refused(call, words[0])
    assert_refused(lambda: embed(IDS, W, position_table=3), "position_table must be a torch.Tensor", error=TypeError)


def test_the_ops_refuse_sinusoids_beside_a_table():
    words = "flags must say that there are no sinusoids where position_table is given"
    assert_refused(lambda: ops.embed_general(W, IDS, position_table=P), words)
    assert_refused(lambda: ops.add_general(X, position_table=P), words)


def test_out():
    out = torch.empty(B, T, D)
    assert_same_bits(embed(IDS, W, position_table=P, out=out), embed(IDS, W, position_table=P))
    assert_same_bits(
        add_positional_encoding(X, position_table=P, out=out), add_positional_encoding(X, position_table=P)
    )
    x = X.clone()
    assert_same_bits(add_positional_encoding(x, position_table=P, out=x), add_positional_encoding(X, position_table=P))
    for call in (lambda **o: embed(IDS, W, **o), lambda **o: add_positional_encoding(X, **o)):
        assert_refused(
            lambda c=call: c(position_table=P, out=P[: B * T].view(B, T, D)),
            "out must not share memory with position_table",
        )
        words = "out= is not differentiable, but position_table requires a gradient"
        assert_refused(lambda c=call: c(position_table=P.clone().requires_grad_(), out=out), words)


# ---- transforms and programs -----------------------------------------------------------------------------------------


def test_transforms():
    """torch.func and forward mode: the numbers of the op."""
    direction, options = (
        torch.randn_like(P),
        {"positions": IDS, "token_scale": 2.0, "at_padding": "zeros", "padding_idx": 2},
    )

    def function(p: Tensor) -> Tensor:
        return embed(IDS, W, position_table=p, encoding_scale=0.5, **options)

    want = function(P)
    got, tangent = torch.func.jvp(function, (P,), (direction,))
    assert_same_bits(got, want)
    torch.testing.assert_close(tangent, function(P + direction) - want, atol=1e-5, rtol=1e-5)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(P, direction)))
    assert_same_bits(dual.primal, want)
    torch.testing.assert_close(dual.tangent, tangent)
    p = P.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(p).sin().sum(), p)
    torch.testing.assert_close(torch.func.grad(lambda p: function(p).sin().sum())(P), gradient)
    stacked = torch.func.vmap(lambda i, p: embed(i, W, position_table=p))(IDS, torch.stack([P, 2 * P, -P]))
    for i, factor in enumerate((1, 2, -1)):
        assert_same_bits(stacked[i], embed(IDS[i], W, position_table=factor * P))


def calls(grad: bool) -> list[tuple[Any, dict[str, Any]]]:
    def tensor(t: Tensor) -> Tensor:
        return t.clone().requires_grad_(grad)

    table = {"position_table": tensor(P), "flags": NO_ENCODING.flags}
    offsets = {"positions": IDS[:, :1].expand(B, T), "flags": NO_ENCODING.flags | OFFSETS}
    scale = torch.tensor(0.5, requires_grad=grad)
    result = [
        (ops.embed_general, {"weight": tensor(W), "input": IDS, "positions": IDS, **table}),
        (ops.embed_general, {"weight": tensor(W), "input": IDS, "encoding_scale_tensor": scale, "offset": 3, **table}),
        (ops.embed_general, {"weight": tensor(W), "input": IDS, "at_padding": 1, "padding_idx": 2, **table}),
        (ops.add_general, {"x": tensor(X), **table, **offsets}),
        (ops.add_general, {"x": tensor(X), "encoding_scale_tensor": scale, **table}),
    ]  # fmt: skip
    if not grad:
        out = torch.empty(B, T, D)
        result += [
            (ops.embed_general_out, {"weight": W, "input": IDS, "out": out, **table}),
            (ops.add_general_out, {"x": X, "out": out, **table}),
            (ops.check_embed, {"weight": W, "input": IDS, "positions": None, "offset": 0, "base": 2.0, **table}),
        ]
    return result


@make.each("grad", [False, True])
def test_opcheck(grad):
    for op, arguments in calls(grad):
        positional = [a.name for a in op.default._schema.arguments if not a.kwarg_only and a.name in arguments]
        defaults = {a.name: a.default_value for a in op.default._schema.arguments if not a.kwarg_only}
        last = max(list(defaults).index(name) for name in positional)
        inputs = [arguments.get(name, defaults[name]) for name in list(defaults)[: last + 1]]
        keywords = {name: value for name, value in arguments.items() if name not in positional}
        torch.library.opcheck(op.default, inputs, keywords)


def test_programs():
    """Compiled, traced, exported and taken apart: forward and gradients of the eager call."""
    layer = TransformerEmbedding(V, D, position=LearnedPositionalEmbedding(ROWS, D), padding_idx=2, at_padding="zeros")

    def results(function: Any, ids: Tensor) -> list[Tensor]:
        y = function(ids)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), list(layer.parameters()))]

    want, longer = results(layer, IDS), make.ids((2, 19))
    for function in (
        torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True),
        torch.jit.trace(layer, (IDS,)),
        torch.export.export(
            layer, (IDS,), dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
        ).module(),
    ):
        for ids in (IDS, longer):
            for got, expected in zip(results(function, ids), results(layer, ids), strict=True):
                torch.testing.assert_close(got, expected)
    program = torch.export.export(layer, (IDS,)).run_decompositions(posenc_ext.decompositions())
    assert not any("posenc_ext" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(IDS), want[0])
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda p: embed(IDS, W, position_table=p))(P)
    assert torch.ops.posenc_ext.embed_general.default in [node.target for node in graph.graph.nodes]
    assert_same_bits(graph(2 * P), embed(IDS, W, position_table=2 * P))
    assert_same_bits(torch.fx.symbolic_trace(layer)(longer), layer(longer).detach())


@pytest.mark.slow
def test_compiled_by_inductor():
    layer = TransformerEmbedding(V, D, position=LearnedPositionalEmbedding(ROWS, D), dropout=0.5)
    program = torch.compile(layer)
    torch.manual_seed(1)
    y = program(IDS)
    y.sum().backward()
    got, layer.position.weight.grad = layer.position.weight.grad, None
    kept = y.detach() != 0
    assert_same_bits(y.detach(), torch.where(kept, 2 * layer.eval()(IDS).detach(), 0.0))
    torch.testing.assert_close(got[:T], 2.0 * kept.sum(0))


@pytest.mark.slow
def test_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    layer = TransformerEmbedding(V, D, position=LearnedPositionalEmbedding(ROWS, D)).eval()
    program = torch.onnx.export(layer, (IDS,), dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: IDS.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), layer(IDS).detach())


def test_nested():
    """Positions start anew in each row."""
    rows = [IDS[0], IDS[1, :2], IDS[2, :5]]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    p = P.clone().requires_grad_()
    got = embed(nested, W, position_table=p, offset=torch.tensor([0, 7, 2]))
    for row, part, offset in zip(rows, got.unbind(), (0, 7, 2), strict=True):
        assert_same_bits(part.detach(), embed(row, W, position_table=P, offset=offset))
    got.values().sum().backward()
    assert torch.equal(p.grad.sum(), torch.tensor(14.0 * D))
    x = torch.nested.nested_tensor([W[row] for row in rows], layout=torch.jagged)
    learned = LearnedPositionalEmbedding.from_pretrained(P)
    for row, part in zip(rows, learned(x).unbind(), strict=True):
        assert_same_bits(part, learned(W[row]))


# ---- the modules -----------------------------------------------------------------------------------------------------


def layer_with_table(**options: Any) -> TransformerEmbedding:
    torch.manual_seed(3)
    of_position = {name: options.pop(name) for name in ("dropout_of_position", "dtype_of_position") if name in options}
    position = LearnedPositionalEmbedding(
        ROWS,
        D,
        dropout=of_position.get("dropout_of_position", 0.0),
        dtype=of_position.get("dtype_of_position"),
        batch_first=options.get("batch_first", True),
    )
    return TransformerEmbedding(V, D, position=position, **options)


def composed(layer: TransformerEmbedding, ids: Tensor, positions: Tensor) -> Tensor:
    """The same from the children."""
    return eager(layer.position.weight, layer.lut(ids), positions, layer.token_scale, layer.encoding_scale)


def test_a_layer_of_both():
    layer = layer_with_table(token_scale=1)
    assert list(layer.state_dict()) == ["lut.weight", "position.weight"]
    assert helpers.is_fused(layer, IDS)
    assert_same_bits(layer(IDS).detach(), composed(layer, IDS, torch.arange(T)).detach())
    assert_same_bits(layer(IDS, offset=4).detach(), composed(layer, IDS, torch.arange(4, 4 + T)).detach())
    assert_same_bits(layer(IDS, positions=IDS).detach(), composed(layer, IDS, IDS).detach())
    assert layer_with_table(batch_first=False)(IDS).shape == (B, T, D)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(IDS), layer(IDS))
    fresh = layer_with_table()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.position.weight, layer.position.weight)
    assert "convention" not in repr(layer)
    assert "(position): LearnedPositionalEmbedding(\n    40, 8, batch_first=True" in repr(layer)
    assert TransformerEmbedding(V, D).position is None


def test_counted_positions():
    ids = torch.tensor([[2, 2, 5, 6], [3, 4, 2, 2]])
    layer = layer_with_table(padding_idx=2, count_padding=False)
    assert_same_bits(layer(ids)[0, 2:], layer(torch.tensor([5, 6])))
    layer.position.register_forward_hook(lambda *_: None)
    assert_same_bits(layer(ids)[0, 2:], layer(torch.tensor([5, 6])))


CALLED = {
    "a hook": lambda layer: layer.position.register_forward_hook(lambda *_: None),
    "a hook of lut": lambda layer: layer.lut.register_forward_hook(lambda *_: None),
    "another class": lambda layer: setattr(layer, "position", nn_wrapper(layer.position)),
    "a parametrisation": lambda layer: nn.utils.parametrize.register_parametrization(
        layer.position, "weight", nn.Identity()
    ),
    "a forward of its own": lambda layer: setattr(layer.position, "forward", layer.position.forward),
}


def nn_wrapper(position: nn.Module) -> nn.Module:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = position

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            return self.base(x, **options)

    return Wrapper()


@make.each("how", CALLED.keys())
@make.each("at_padding", posenc_ext.conventions.AT_PADDING.keys())
def test_what_is_not_plain_is_called(how, at_padding):
    for encoding_scale in (1.0, 0.5, torch.tensor(0.5)):
        options = {"padding_idx": 2, "at_padding": at_padding, "encoding_scale": encoding_scale}
        want, layer = layer_with_table(**options)(IDS, offset=3), layer_with_table(**options)
        CALLED[how](layer)
        seen: list[Any] = []
        for child in [layer.lut] if how == "a hook of lut" else [layer.lut, layer.position]:
            child.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        assert_same_bits(layer(IDS, offset=3).detach(), want.detach())
        assert len(seen) == (1 if how == "a hook of lut" else 2)


def test_a_position_of_its_own_dropout_or_dtype_is_called():
    layer = layer_with_table(dropout_of_position=0.5)
    assert not helpers.is_fused(layer, IDS)
    assert (layer(IDS) == 0).any()
    assert helpers.is_fused(layer.eval(), IDS)
    mixed = layer_with_table(dtype_of_position=torch.float64)
    assert mixed(IDS).dtype == torch.float64
    torch.testing.assert_close(mixed(IDS), mixed.lut(IDS) * mixed.token_scale + mixed.position.weight[:T])


def test_what_cannot_be_a_position():
    make_layer = TransformerEmbedding
    learned = LearnedPositionalEmbedding(ROWS, D)
    assert_refused(
        lambda: make_layer(V, D, position=3), "position must be a LearnedPositionalEmbedding", error=TypeError
    )
    words = "position must be a LearnedPositionalEmbedding", "got Embedding; LearnedPositionalEmbedding.from_pretrained"
    assert_refused(lambda: make_layer(V, D, position=nn.Embedding(ROWS, D)), *words, error=TypeError)
    assert_refused(lambda: make_layer(V, 2 * D, position=learned), "position must have width 16, got 8")
    words = "position takes the place of sinusoids, got convention 'fairseq' too"
    assert_refused(lambda: make_layer(V, D, position=learned, convention="fairseq"), words)
    assert_refused(lambda: make_layer(V, D, position=learned, precision="exact"), "got precision 'exact' too")
    layer = layer_with_table()
    assert_refused(lambda: setattr(layer, "convention", "fairseq"), words)
    assert_refused(lambda: setattr(layer, "precision", "exact"), "got precision 'exact' too")
    plain = make.layer(convention="fairseq")
    assert_refused(lambda: setattr(plain, "position", learned), words)
    assert layer.convention.name == "vaswani"
    assert plain.position is None
    layer.batch_first = False
    assert_refused(lambda: layer(IDS), "position must have the layer's batch_first (False), got True")


def test_set_later():
    layer, sinusoids = make.layer(), make.layer()
    layer.position = LearnedPositionalEmbedding.from_pretrained(P)
    assert_same_bits(layer(IDS), embed(IDS, layer.lut.weight, position_table=P))
    layer.position = None
    assert_same_bits(layer(IDS), sinusoids(IDS))


def test_from_pretrained():
    """The way out for a checkpoint whose table no convention explains."""
    table = make.table(ROWS)
    learned = LearnedPositionalEmbedding.from_pretrained(table, dropout=0.5)
    assert learned.weight.data_ptr() == table.data_ptr()
    assert not learned.weight.requires_grad
    assert LearnedPositionalEmbedding.from_pretrained(table, freeze=False).weight.requires_grad
    assert_same_bits(learned.eval()(X), X + table[:T])
    assert_refused(
        lambda: LearnedPositionalEmbedding.from_pretrained(table[None]), "2 dimensions [max_len, d_model], got"
    )
    with pytest.raises(
        RuntimeError, match=r"it follows no known convention.*LearnedPositionalEmbedding\.from_pretrained"
    ):
        make.layer("PositionalEncoding").load_state_dict({"pe": table[None]})


def test_unfused():
    layer = layer_with_table()
    want, plain = layer(IDS), posenc_ext.unfuse(layer)
    assert [type(part).__name__ for part in plain] == ["Embeddings", "LearnedPositionalEmbedding"]
    assert_same_bits(plain(IDS).detach(), want.detach())


def test_promotion():
    """`x + weight[position]`, as PyTorch adds two types."""
    learned = LearnedPositionalEmbedding(ROWS, D)
    for dtype in (torch.bfloat16, torch.float64):
        x = X.to(dtype)
        assert_same_bits(learned(x).detach(), (x + learned.weight[:T]).detach())


@pytest.mark.slow
def test_the_layers_of_transformers():
    """GPT-2's and BERT's, forward and gradients; BERT's segments are one more embedding on top."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "hidden_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(n_embd=D, n_head=2, n_layer=0, n_positions=ROWS, **sizes))
    layer = TransformerEmbedding(V, D, token_scale=1, position=LearnedPositionalEmbedding(ROWS, D))
    layer.load_state_dict({"lut.weight": gpt2.wte.weight, "position.weight": gpt2.wpe.weight})
    y, want = layer(IDS), gpt2.wte(IDS) + gpt2.wpe(torch.arange(T))
    assert_same_bits(y.detach(), want.detach())
    torch.testing.assert_close(gpt2.ln_f(y), gpt2(IDS).last_hidden_state)
    grad = torch.randn_like(y)
    for got, expected in zip(
        torch.autograd.grad(y, [layer.lut.weight, layer.position.weight], grad),
        torch.autograd.grad(want, [gpt2.wte.weight, gpt2.wpe.weight], grad),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)

    config = transformers.BertConfig(hidden_size=D, num_attention_heads=2, max_position_embeddings=ROWS, **sizes)
    bert = transformers.models.bert.modeling_bert.BertEmbeddings(config).eval()
    layer.load_state_dict(
        {"lut.weight": bert.word_embeddings.weight, "position.weight": bert.position_embeddings.weight}
    )
    segments = make.ids(rows=2)
    got = bert.LayerNorm(layer(IDS) + bert.token_type_embeddings(segments))
    torch.testing.assert_close(got, bert(IDS, token_type_ids=segments))
