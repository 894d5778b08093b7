"""Recorded calls: graphs hold the public op, which has a gradient, and every op can be taken apart into core ATen."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import make
import pytest
import torch
from helpers import assert_same_bits, float32_frequencies
from make import B, D, T, V, ids, x
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import posenc_ext
from posenc_ext import Convention, decompositions
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding

ops = torch.ops.posenc_ext
W = make.table(seed=1)
DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}

LAYERS: dict[str, Callable[[], Any]] = {
    "Embeddings": lambda: make.layer("Embeddings"),
    "TransformerEmbedding": lambda: make.layer(padding_idx=1),
    "sequence first": lambda: make.layer(batch_first=False, convention="tensor2tensor", width=7),
    "PositionalEncoding": lambda: make.layer("PositionalEncoding", convention="fairseq"),
    "LearnedPositionalEmbedding": lambda: make.layer("LearnedPositionalEmbedding"),
}
each_traced_layer = make.each("name", list(LAYERS))


def layer_and_argument(name: str, shape: tuple[int, int] = (B, T)) -> tuple[Any, Tensor]:
    layer = LAYERS[name]()
    kind = type(layer).__name__
    return layer, make.argument(kind, shape, getattr(layer, "d_model", D))


def targets(graph: torch.fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of a sum of squares, for every tensor that requires one."""
    wanted = [t for t in tensors if t.requires_grad]
    return torch.autograd.grad(function(*tensors).square().sum(), wanted)


# ---- what is recorded ------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The ops that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op)
        return op(*args, **(kwargs or {}))


class Recording(Tensor):
    """A tensor that notes what is done with it."""

    seen: list[Any] = []  # noqa: RUF012
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Recording:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.plain = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(op)
        return op(*(getattr(a, "plain", a) for a in args), **(kwargs or {}))


CALLS: dict[str, tuple[Callable[..., Tensor], Tensor, Any]] = {
    "embed": (lambda w, i: embed(i, w), W, ops.embed.default),
    "embed, positions": (lambda w, i: embed(i, w, positions=i), W, ops.embed.default),
    "scaled_embedding": (lambda w, i: posenc_ext.functional.scaled_embedding(i, w), W, ops.embed.default),
    "add": (lambda a, i: add_positional_encoding(a), x(seed=2), ops.add_positional_encoding.default),
    "add, positions": (
        lambda a, i: add_positional_encoding(a, positions=i),
        x(seed=2),
        ops.add_positional_encoding.default,
    ),
}


@make.each(("function", "tensor", "op"), CALLS)
@make.each("requires_grad", [False, True])
def test_a_dispatch_mode_sees_the_public_op(function, tensor, op, requires_grad):
    given = tensor.clone().requires_grad_(requires_grad)
    with Recorder() as mode:
        y = function(given, ids(seed=3))
    assert [seen for seen in mode.seen if seen.namespace == "posenc_ext"] == [op]
    assert_same_bits(y, function(given, ids(seed=3)))


@make.each(("function", "tensor", "op"), CALLS)
def test_another_type_of_tensor_gets_the_public_op(function, tensor, op):
    Recording.seen = []
    function(Recording(tensor), ids(seed=3))
    assert Recording.seen == [op]
    Recording.seen = []
    function(tensor, Recording(ids(seed=3)))
    assert Recording.seen in ([op], [])  # one of the calls has no use for ids


def test_the_gradient_is_recorded_as_the_public_op():
    """So a graph of a training step can be differentiated once more."""
    given = W.clone().requires_grad_()
    with Recorder() as mode:
        gradients(lambda w: embed(ids(), w), given)
    assert ops.embed_backward.default in mode.seen
    assert ops._embed_bwd.default not in mode.seen


@make.each("mode", ["real", "fake", "symbolic"])
@make.each(("function", "tensor", "op"), CALLS)
def test_make_fx(function, tensor, op, mode):
    """The graph of a forward pass trains as nn.Embedding does, and runs at other sizes where they are symbols."""
    given = tensor.clone().requires_grad_()
    graph = make_fx(function, tracing_mode=mode)(given, ids(seed=3))
    assert op in targets(graph.graph)
    other = ids((B, T), seed=4)
    (got,), (want,) = (gradients(f, given, other) for f in (graph, function))
    assert torch.equal(got, want)
    assert want.count_nonzero() > 0
    if op == ops.embed.default and mode == "symbolic":
        other = ids((4, 9), seed=4)
        assert_same_bits(graph(given, other), function(given, other))


@make.each("mode", ["real", "fake", "symbolic"])
def test_make_fx_of_a_whole_step(mode):
    """Forward and backward in one graph: the gradient is that of nn.Embedding."""

    def step(weight: Tensor, tokens: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(embed(tokens, weight, padding_idx=2).sin().sum(), weight)
        return gradient

    given = W.clone().requires_grad_()
    graph = make_fx(step, tracing_mode=mode)(given, ids(seed=3))
    other = ids(seed=4)
    rows = nn.functional.embedding(other, given, padding_idx=2) * math.sqrt(D)
    (want,) = torch.autograd.grad((rows + positional_encoding(T, D)).sin().sum(), given)
    torch.testing.assert_close(graph(given, other), want)
    assert {ops.embed.default, ops.embed_backward.default} <= set(targets(graph.graph))


# ---- torch.jit -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer and what comes after it."""

    def __init__(self, layer: nn.Module, width: int = D) -> None:
        super().__init__()
        self.layer, self.output = layer, nn.Linear(width, 3)

    def forward(self, given: Tensor) -> Tensor:
        return self.output(self.layer(given))


@pytest.mark.filterwarnings("ignore")
@each_traced_layer
def test_jit_trace(name):
    """A trainable module: the trace passes its own check, is saved, loaded, run at other sizes and trained."""
    layer, given = layer_and_argument(name)
    net = Net(layer, layer.d_model)
    traced = torch.jit.trace(net, (given,))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for shape in ((B, T), (1, 1), (4, 9)):
        _, other = layer_and_argument(name, shape)
        assert torch.equal(loaded(other), net(other))
    for module in (loaded, net):
        module(other).square().sum().backward()
    got, want = ({n: p.grad for n, p in module.named_parameters()} for module in (loaded, net))
    assert got.keys() == want.keys()
    for parameter in want:
        torch.testing.assert_close(got[parameter], want[parameter])


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_takes_offsets_as_tensors():
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make.layer()

        def forward(self, given: Tensor, offset: Tensor) -> Tensor:
            return self.layer(given, offset=offset)

    step = Step()
    traced = torch.jit.trace(step, (ids(), torch.tensor(3)))
    for shape, offset in (((B, T), 7), ((1, 1), 0), ((4, 9), 5000)):
        assert torch.equal(traced(given := ids(shape), torch.tensor(offset)), step.layer(given, offset=offset))


@pytest.mark.filterwarnings("ignore")
@each_traced_layer
@make.each("nested", [False, True])
def test_jit_script_is_refused_in_words(name, nested):
    layer, _ = layer_and_argument(name)
    kind = type(layer).__name__
    with pytest.raises(NotImplementedError, match=rf"posenc_ext\.{kind}: torch\.jit\.script is not supported"):
        torch.jit.script(nn.Sequential(nn.Identity(), Net(layer)) if nested else layer)


# ---- torch.fx --------------------------------------------------------------------------------------------------------


@each_traced_layer
@make.each("nested", [False, True])
def test_symbolic_trace(name, nested):
    """One node; the traced module runs, trains, is copied and traced anew."""
    layer, given = layer_and_argument(name)
    model = Net(layer, layer.d_model) if nested else layer
    traced = torch.fx.symbolic_trace(model)
    assert len(targets(traced.graph)) == 1
    again = torch.fx.symbolic_trace(copy.deepcopy(traced))
    assert targets(again.graph) == targets(traced.graph)
    _, other = layer_and_argument(name, (4, 9))
    for module in (traced, again):
        for argument in (given, other):
            assert torch.equal(module(argument), model(argument))
        parameters = dict(module.named_parameters())
        if parameters:
            module.zero_grad()
            model.zero_grad()
            module(given).square().sum().backward()
            grads = {n: p.grad.clone() for n, p in module.named_parameters()}
            model.zero_grad()
            model(given).square().sum().backward()
            for parameter, grad in grads.items():
                assert torch.equal(grad, model.get_parameter(parameter).grad)


def test_symbolic_trace_keeps_dropout_that_is_off_for_now():
    layer = make.layer(dropout=0.5).eval()
    traced = torch.fx.symbolic_trace(layer)
    given = ids((20, 30))
    assert torch.equal(traced(given), layer(given))
    dropped = (traced.train()(given) == 0).float().mean().item()
    assert 0.4 < dropped < 0.6


def test_symbolic_trace_of_a_convention_without_a_name():
    layer = make.layer(convention=Convention(base=77.0, layout="sin_cos"))
    traced = torch.fx.symbolic_trace(layer)
    assert set(targets(traced.graph)) == {Convention, posenc_ext.modules._embed_counted}
    assert torch.equal(traced(given := ids()), layer(given))


def test_symbolic_trace_takes_a_padding_mask():
    """The graph cannot know whether it gets one: it decides when it runs."""
    given = ids((3, 5))
    mask = torch.tensor([[False] * 5, [True, True, False, False, False], [True, False, False, True, True]])
    layer = make.layer(count_padding=False)
    traced = torch.fx.symbolic_trace(layer)
    assert len(targets(traced.graph)) == 1
    assert torch.equal(traced(given, padding_mask=mask), layer(given, padding_mask=mask))
    assert not torch.equal(traced(given, padding_mask=mask), make.layer()(given))
    with pytest.raises(ValueError, match="padding_mask cannot be combined with count_padding=True"):
        torch.fx.symbolic_trace(make.layer())(given, padding_mask=mask)


def test_symbolic_trace_of_the_functional_forms():
    def function(given: Tensor, tokens: Tensor) -> Tensor:
        y = posenc_ext.functional.add_positional_encoding(given, convention="fairseq", offset=3)
        return y + embed(tokens, W) + posenc_ext.functional.positional_encoding(given.shape[1], D)

    traced = torch.fx.symbolic_trace(function)
    given, tokens = x((4, 9, D)), ids((4, 9))
    assert torch.equal(traced(given, tokens), function(given, tokens))


def test_symbolic_trace_of_a_lookup_that_is_called():
    layer, calls = make.layer(), []
    layer.lut.register_forward_hook(lambda *_: calls.append(1))
    traced = torch.fx.symbolic_trace(layer)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["lut"]
    assert torch.equal(traced(given := ids()), layer(given))
    assert len(calls) == 2


# ---- torch.export ----------------------------------------------------------------------------------------------------


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@make.each("strict", {"non-strict": False, "strict": True})
@make.each("context", {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode})
def test_an_exported_program_holds_the_public_op(context, strict):
    """Also where it is exported without gradients: it may be trained all the same."""
    model = nn.Sequential(make.layer(), make.layer("PositionalEncoding"))
    given = ids()
    with context():
        program = torch.export.export(model, (given,), strict=strict)
    assert {ops.embed.default, ops.add_positional_encoding.default} <= set(targets(program.graph))
    module = program.module()
    for m in (module, model):
        m(given).square().sum().backward()
    ((_, got),) = module.named_parameters()
    assert torch.equal(got.grad, make.weight_of(model[0]).grad)


# ---- decompositions --------------------------------------------------------------------------------------------------

TABLE = decompositions()
PREFIX = "posenc_ext::"
REGISTERED = [n.removeprefix(PREFIX) for n in torch._C._dispatch_get_all_op_names() if n.startswith(PREFIX)]
SPARSE = ("embed_backward_sparse", "_embed_bwd_sparse", "embed_general_backward_sparse")


def test_every_op_has_a_decomposition():
    assert set(decompositions()) == {getattr(ops, name).default for name in REGISTERED}


def far_positions() -> Tensor:
    """Near ones, both ends of the 32 bits that most programs count in, and both sides of every power of two."""
    ends = torch.tensor([2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63)])
    return torch.cat([torch.arange(-5, 50), ends, make.positions_of_every_size()[::3]])


@make.each_precision
@make.each("dtype", [torch.float32, torch.float64])
def test_encoding_of_every_convention(precision, dtype):
    op, positions = ops.positional_encoding.default, far_positions()
    for convention in make.every_combination():
        for width in (1, 3, 8, 31):
            arguments = (positions, width, 0, *convention.spec(precision), dtype)
            torch.testing.assert_close(TABLE[op](*arguments), op(*arguments), atol=3e-7, rtol=0)


@pytest.mark.slow
@make.each_precision
def test_encoding_of_wide_rows_and_many_positions(precision):
    op = ops.positional_encoding.default
    positions = torch.randint(-(2**31), 2**31, (20000,), generator=make.random(0))
    for width in (130, 512, 1030):
        arguments = (positions, width, 0, *make.spec(precision=precision), torch.float32)
        torch.testing.assert_close(TABLE[op](*arguments), op(*arguments), atol=3e-7, rtol=0)


def test_frequencies_of_reference_to_the_bit():
    """They are computed in the graph; one that were rounded otherwise would show at far positions only."""
    from posenc_ext.decompositions import _frequencies, _Spec

    for divisor, base in (("d", 1e4), ("d", 500.0), ("half_minus_1", 1e6), ("half", 1e4)):
        convention = Convention(divisor=divisor, base=base)
        for width in (2, 64, 129, 512, 1030, 4096):
            pairs = (width + 1) // 2
            got = _frequencies(_Spec(*convention.spec()), width, pairs, torch.device("cpu"))
            assert_same_bits(got, torch.from_numpy(float32_frequencies(width, convention)[:pairs]))


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value or ())


def both(call: make.OpCall) -> Iterator[tuple[Tensor, Tensor]]:
    """What the decomposition and the op return or write."""
    copies = [call.moved(lambda t: t.clone()) for _ in range(2)]
    results = TABLE[call.overload](*copies[0].args, **copies[0].kwargs), copies[1]()
    assert (results[0] is None) == (results[1] is None)
    pairs = [tuple(as_tuple(result) for result in results)]
    if call.op.endswith("out"):
        pairs.append((copies[0].args[-1:], copies[1].args[-1:]))
    for got, want in pairs:
        yield from zip(got, want, strict=True)


@make.each("dtype", make.DTYPES)
def test_every_op_is_its_decomposition(dtype):
    """One rounding of the result, besides what the encodings differ by."""
    ulp = torch.finfo(dtype).eps
    for sample in make.samples("cpu", dtype, requires_grad=False):
        calls = {**make.op_calls(sample), **make.raw_calls(sample)}
        assert set(calls) == set(REGISTERED)
        for name, call in calls.items():
            if name in SPARSE:
                with pytest.raises(NotImplementedError, match="posenc_ext::embed_backward_sparse"):
                    TABLE[call.overload](*call.args)
                continue
            for got, want in both(call):
                torch.testing.assert_close(got, want, atol=3e-7, rtol=2 * ulp, msg=f"{name}, {sample.name}")


def test_arguments_with_a_default_may_be_left_out():
    """As they are in a program that was saved."""
    spec = make.spec()
    for call in (
        make.OpCall("embed", (W, ids(), None, 0, 1.75, *spec)),
        make.OpCall("embed", (W, ids(), None, 0, 1.75, *spec), {"padding_idx": 2}),
        make.OpCall("embed_general", (W, ids())),
        make.OpCall("embed_general", (W, ids()), {"offset": 3}),
    ):
        for got, want in both(call):
            torch.testing.assert_close(got, want, atol=3e-7, rtol=3e-7)


def test_an_argument_without_a_formula_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="posenc_ext::embed_general: dropout_p has no decomposition"):
        TABLE[ops.embed_general.default](W, ids(), dropout_p=0.5)


def test_flags_of_programs_exported_by_the_first_version():
    op = ops.embed.default
    for divisor, layout, odd, precision, sequence_first in ((0, 0, 0, 1, 0), (1, 2, 1, 0, 1), (0, 3, 0, 0, 0)):
        flags = divisor | layout << 2 | odd << 4 | precision << 6 | sequence_first << 8
        arguments = (make.table(V, 7), ids(), None, 5, 1.75, 1e4, flags)
        torch.testing.assert_close(TABLE[op](*arguments), op(*arguments), atol=3e-7, rtol=3e-7)


def test_shards_add_up_to_the_whole():
    """Of rows, and of columns."""
    from posenc_ext.decompositions import _embed

    weight, rest = make.table(V, 10), (None, 3, 1.75, *make.spec("tensor2tensor"))
    want = _embed(weight, given := ids(), *rest)
    rows = [(0, 4), (4, 4), (4, V)]
    parts = [_embed(weight[a:b], given, *rest, first_row=a, total_rows=V) for a, b in rows]
    assert torch.equal(sum(parts), want)
    columns = [(0, 3), (3, 9), (9, 10)]
    parts = [_embed(weight[:, a:b], given, *rest, first_column=a, d_model=10) for a, b in columns]
    assert torch.equal(torch.cat(parts, dim=-1), want)
    with pytest.raises(IndexError):
        _embed(weight[:4], torch.tensor([V]), *rest, first_row=0, total_rows=V)


def test_gradients_of_shards_are_parts_of_the_whole():
    """Of rows, the padding row in either of them, and of columns."""
    from posenc_ext.decompositions import _embed

    weight, given, grad = make.table(V, 10), ids(), x((B, T, 10))

    def gradient(shard: Tensor, padding_idx: int, columns: slice = slice(None), **place: int) -> Tensor:
        leaf = shard.clone().requires_grad_()
        y = _embed(leaf, given, None, 3, 1.75, *make.spec("tensor2tensor"), padding_idx, **place)
        return torch.autograd.grad(y, leaf, grad[..., columns])[0]

    for padding_idx in (-1, int(given.min()), int(given.max())):
        want = gradient(weight, padding_idx)
        for a, b in ((0, 4), (4, 4), (4, V)):
            got = gradient(weight[a:b], padding_idx, first_row=a, total_rows=V)
            torch.testing.assert_close(got, want[a:b])
        for a, b in ((0, 3), (3, 10)):
            got = gradient(weight[:, a:b], padding_idx, slice(a, b), first_column=a, d_model=10)
            torch.testing.assert_close(got, want[:, a:b])


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[..., Any], ...]]] = {
    **{
        name: (lambda name=name: LAYERS[name](), (lambda shape, name=name: layer_and_argument(name, shape)[1],))
        for name in LAYERS
    },
    "exact": (lambda: make.layer(convention="marian", dtype=torch.bfloat16), (ids,)),
    "positions, int32": (lambda: Call(lambda i, p: embed(i, W, positions=p)), (lambda s: ids(s).int(), ids)),
    "offset": (lambda: Call(lambda i, o: embed(i, W, offset=o)), (ids, lambda shape: shape[0] * shape[1] + 2)),
    "offset of a tensor": (lambda: Call(lambda i, o: embed(i, W, offset=o)), (ids, lambda shape: ids(shape[0], 90))),
    "embed_general": (lambda: Call(lambda i: ops.embed_general(W, i, offset=4)), (ids,)),
    "positional_encoding": (lambda: Call(lambda p: positional_encoding(p, 9, dtype=torch.float16)), (ids,)),
    "embed_backward": (
        lambda: Call(lambda i, a: ops.embed_backward(a, i, V, 1.75, 2, True)),
        (ids, lambda shape: x((*shape, D))),
    ),
}


SLOW = ("Embeddings", "PositionalEncoding", "LearnedPositionalEmbedding", "embed_backward", "offset of a tensor")


@pytest.mark.parametrize(
    ("name", "default"),
    [
        *(pytest.param(name, False, marks=pytest.mark.slow if name in SLOW else ()) for name in PROGRAMS),
        ("TransformerEmbedding", True),
        pytest.param("exact", True, marks=pytest.mark.slow),
    ],
)
def test_run_decompositions(name, default):
    """Saved, loaded and taken apart: nothing but core ATen is left, any size runs, and it can be trained."""
    make_module, makers = PROGRAMS[name]
    module = make_module()
    example = [maker((2, 5)) for maker in makers]
    shapes = tuple(
        {axis: Dim.DYNAMIC for axis in range(min(e.dim(), 2))} if isinstance(e, Tensor) else Dim.DYNAMIC
        for e in example
    )
    dynamic = (shapes,) if isinstance(module, Call) else shapes
    program = saved_and_loaded(torch.export.export(module, tuple(example), dynamic_shapes=dynamic))
    own = torch.export.default_decompositions() if default else {}
    program = program.run_decompositions({**own, **decompositions()})
    # The assertion is what torch makes of a `.to()`.
    known = {torch.ops.aten._assert_tensor_metadata.default}
    for op in set(targets(program.graph)) - known:
        assert not isinstance(op, torch._ops.OpOverload) or torch.Tag.core in op.tags, op
    lowered = program.module()
    for shape in ((2, 5), (4, 9)):
        given = [maker(shape) for maker in makers]
        got, want = lowered(*given), module(*given)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=2 * torch.finfo(want.dtype).eps)
    if name == "TransformerEmbedding":
        for m in (lowered, module):
            m(*given).square().sum().backward()
        torch.testing.assert_close(lowered.get_parameter("lut.weight").grad, make.weight_of(module).grad)
        assert lowered.get_parameter("lut.weight").grad[1].count_nonzero() == 0  # the padding row


def test_nothing_is_registered():
    """Fake tensors would take a formula that torch knows of before the op's own fake kernel."""
    known = [torch._decomp.decomposition_table, torch.export.default_decompositions()]
    assert not any(op in table for op in decompositions() for table in known)
