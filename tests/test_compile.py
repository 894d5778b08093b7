"""torch.compile and torch.export: whole graphs, right at other sizes and offsets, compiled once."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import make
import pytest
import torch
from helpers import assert_same_bits
from make import B, D, T, V, ids, x
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.nn import functional as F

import posenc_ext
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

# Whatever the backend, the ops are called as they are; inductor is there for what it compiles around them, slowly.
EAGER = "aot_eager"
INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)

SHAPE = (B, T)
W = make.table(seed=1)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def activations(shape: tuple[int, ...]) -> Tensor:
    return x((*shape, D))


LAYER, ENCODING = make.layer(), make.layer("PositionalEncoding")
LEARNED = make.layer("LearnedPositionalEmbedding")
FAIRSEQ = {"convention": "fairseq", "padding_idx": 1, "batch_first": False}

# Every module and functional form: the call, and what makes each of its arguments for a batch of a given shape.
IDS, IDS32, ACTS, TABLE = ids, lambda shape: ids(shape).int(), activations, lambda shape: W.clone()
CALLS: dict[str, tuple[Callable[..., Any], tuple[Callable[..., Tensor], ...]]] = {
    "Embeddings": (make.layer("Embeddings"), (IDS,)),
    "Embeddings, fp64, int32": (make.layer("Embeddings").double(), (IDS32,)),
    "TransformerEmbedding": (LAYER, (IDS,)),
    "TransformerEmbedding, bf16, int32": (make.layer().bfloat16(), (IDS32,)),
    "TransformerEmbedding, fairseq": (make.layer(**FAIRSEQ), (IDS,)),
    "PositionalEncoding": (ENCODING, (ACTS,)),
    "pe": (lambda a: ENCODING.pe + a[0, 0], (ACTS,)),
    "PositionalEncoding, exact": (make.layer("PositionalEncoding", convention="marian"), (ACTS,)),
    "LearnedPositionalEmbedding": (LEARNED, (ACTS,)),
    "LearnedPositionalEmbedding, positions": (lambda a, p: LEARNED(a, positions=p), (ACTS, IDS)),
    "embed": (lambda i: embed(i, W, offset=3), (IDS,)),
    "embed, positions": (lambda i, p: embed(i, W, positions=p), (IDS, IDS)),
    "embed, one row of positions": (lambda i, p: embed(i, W, positions=p), (IDS, lambda shape: ids(shape[-1]))),
    "embed, out": (lambda i, o: embed(i, W, out=o), (IDS, ACTS)),
    "scaled_embedding": (lambda i: scaled_embedding(i, W), (IDS,)),
    "scaled_embedding, out": (lambda i, o: scaled_embedding(i, W, out=o), (IDS, ACTS)),
    "add": (lambda a: add_positional_encoding(a, batch_first=False), (ACTS,)),
    "add, out": (lambda a, o: add_positional_encoding(a, out=o), (ACTS, ACTS)),
    "add, in place": (lambda a: add_positional_encoding(a, out=a), (ACTS,)),
    "positional_encoding": (lambda p: positional_encoding(p, D), (IDS,)),
    "positional_encoding, length": (lambda a: positional_encoding(a.shape[1], D), (ACTS,)),
    "positional_encoding, bf16": (lambda p: positional_encoding(p, D, dtype=torch.bfloat16) + 1, (IDS,)),
    "positional_encoding, out": (lambda p, o: positional_encoding(p, D, out=o), (IDS, ACTS)),
    "max_norm": (lambda i, w: embed(i, w, max_norm=0.5), (IDS, TABLE)),
    "max_norm, norm_type": (lambda i, w: scaled_embedding(i, w, max_norm=0.5, norm_type=1.0), (IDS, TABLE)),
}


# Which argument is written to.
WRITTEN = {name: 0 if "in place" in name else 1 for name in CALLS if "out" in name or "place" in name or "norm" in name}


@make.each("name", list(CALLS))
def test_whole_graph(name):
    """fullgraph: any break is an error. Values, and what was written to, are those of the eager call, to the bit."""
    function, makers = CALLS[name]
    counter = CompileCounterWithBackend(EAGER)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for shape in (SHAPE, (4, 9), (5, 6)):
        given = [maker(shape) for maker in makers]
        eager_arguments, got_arguments = ([a.clone() for a in given] for _ in range(2))
        assert_same_bits(compiled(*got_arguments), function(*eager_arguments))
        for i, (got, expected, before) in enumerate(zip(got_arguments, eager_arguments, given, strict=True)):
            assert torch.equal(got, expected)
            assert torch.equal(got, before) == (WRITTEN.get(name) != i)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1  # one program for all sizes


@pytest.mark.slow
@make.each("name", ["TransformerEmbedding", "embed, out"])
def test_whole_graph_under_inductor(name):
    function, makers = CALLS[name]
    compiled = torch.compile(lambda *a: function(*a) * 2, fullgraph=True, dynamic=True)
    for shape in (SHAPE, (2, 9)):
        given = [maker(shape) for maker in makers]
        expected = function(*[a.clone() for a in given]) * 2
        assert torch.equal(compiled(*given), expected)


def compiled_graph(function: Callable[..., Any], *given: Tensor) -> torch.fx.GraphModule:
    """The one graph that a call is compiled into."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compile(function, backend=backend, fullgraph=True)(*given)
    (graph,) = graphs
    return graph


def ops_of(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def test_the_compiled_graph_holds_the_op_and_no_table():
    graph = compiled_graph(make.layer(), ids())
    assert ops_of(graph) == [torch.ops.posenc_ext.embed.default]
    held = [*graph.parameters(), *graph.buffers()]
    assert all(t.numel() in (0, V * D) for t in held)


def test_a_program_that_needs_no_gradient_holds_the_raw_op():
    """The formula would cost each call several microseconds. A sparse one does not matter then."""
    raw, raw_add = torch.ops.posenc_ext._embed_fwd.default, torch.ops.posenc_ext._add_positional_encoding_fwd.default
    frozen = make.layer().requires_grad_(False)
    assert ops_of(compiled_graph(frozen, ids())) == [raw]
    assert ops_of(compiled_graph(add_positional_encoding, x())) == [raw_add]
    with torch.no_grad():
        for layer in (make.layer(padding_idx=1), make.layer(sparse=True)):
            assert ops_of(compiled_graph(layer, ids())) == [raw]
        assert ops_of(compiled_graph(add_positional_encoding, x(grad=True))) == [raw_add]
    assert ops_of(compiled_graph(add_positional_encoding, x(grad=True))) == [
        torch.ops.posenc_ext.add_positional_encoding.default
    ]


# ---- steps of a decoder ----------------------------------------------------------------------------------------------

STEPS = {
    "TransformerEmbedding": (LAYER, ids),
    "PositionalEncoding": (make.layer("PositionalEncoding", convention="fairseq"), activations),
    "LearnedPositionalEmbedding": (LEARNED, activations),
    "embed": (lambda i, **k: embed(i, W, **k), ids),
    "add": (add_positional_encoding, activations),
    "length": (lambda length, **k: positional_encoding(length, D, **k), lambda shape: shape[1]),
}


@make.each("name", list(STEPS))
@make.each("changing", ["offset", "both"])
def test_no_recompilation_by_the_step(name, changing):
    """One compile for the first call, one when a number is seen to change, and none in 14 more steps; from 0 on."""
    function, argument = STEPS[name]
    counter = CompileCounterWithBackend(EAGER)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for step in range(16):
        given = argument((B, 2 + step if changing == "both" else 2))
        assert torch.equal(compiled(given, offset=step), function(given, offset=step))
        if step == 1:
            settled = counter.frame_count
    assert counter.frame_count == settled <= 2


@make.each("name", list(STEPS))
def test_an_offset_in_a_tensor_is_compiled_once(name):
    function, argument = STEPS[name]
    given = argument((B, 1))
    for offset in (torch.tensor(0), torch.arange(B)):
        if name == "length" and offset.dim():  # there are no rows
            continue
        counter = CompileCounterWithBackend(EAGER)
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        for step in range(6):
            assert torch.equal(compiled(given, offset=offset + step), function(given, offset=offset + step))
        assert counter.frame_count == 1
        torch.compiler.reset()


def test_a_decoder_that_counts_its_own_steps():
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = make.layer()
            self.seen = 0

        def forward(self, token: Tensor) -> Tensor:
            y = self.embed(token, offset=self.seen)
            self.seen += token.shape[1]
            return y

    decoder = Decoder()
    counter = CompileCounterWithBackend(EAGER)
    compiled = torch.compile(decoder, backend=counter, fullgraph=True)
    tokens = ids((B, 20))
    # Without this setting torch takes every number that a module holds for a constant.
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        steps = [compiled(tokens[:, t : t + 1]) for t in range(20)]
    assert torch.equal(torch.cat(steps, dim=1), decoder.embed(tokens))
    assert counter.frame_count <= 3


@pytest.mark.parametrize(("name", "dynamic"), [*((name, True) for name in STEPS), ("TransformerEmbedding", False)])
def test_no_offset_is_baked_in(name, dynamic):
    function, argument = STEPS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=EAGER)
    given, offsets = argument(SHAPE), (5, 9, 5)
    results = [compiled(given, offset=offset) for offset in offsets]
    for got, offset in zip(results, offsets, strict=True):
        assert torch.equal(got, function(given, offset=offset))
    assert not torch.equal(results[0], results[1])  # so they do differ


def test_the_spec_is_part_of_the_program():
    """Another convention, precision or scale is another program, never the first one's values."""
    compiled = torch.compile(embed, backend=EAGER)
    given = ids()
    for options in (
        {},
        {"convention": "fairseq"},
        {"precision": "exact", "offset": 2**40},
        {"token_scale": 1.0},
        {"token_scale": 0.3},
        {"batch_first": False},
        {"convention": posenc_ext.Convention(base=77.0)},
    ):
        assert torch.equal(compiled(given, W, **options), embed(given, W, **options))


# ---- errors ----------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = {
    "embed": embed,
    "padding": lambda i, w: embed(i, w, padding_idx=1),
    "a gradient": lambda i, w: LAYER(i),
    "scaled_embedding": scaled_embedding,
    "out": lambda i, w: embed(i, w, out=torch.zeros(3, D)),
    "max_norm": lambda i, w: embed(i, w, max_norm=0.1),
}


@make.each("function", OUT_OF_RANGE)
@pytest.mark.parametrize("backend", [EAGER, INDUCTOR])
def test_out_of_range_ids(function, backend):
    """The error of the eager call, by name, and nothing written."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    good, table = torch.tensor([0, 1, 2]), W.clone()
    assert torch.equal(compiled(good, table.clone()), function(good, table.clone()))
    for bad in (-1, V):
        text = rf"posenc_ext::embed: input must hold ids in \[0, {V}\), got {bad} at input\[2\]"
        with pytest.raises(IndexError, match=text):
            compiled(torch.tensor([0, 1, bad]), table)
        assert torch.equal(table, W)


I3 = torch.tensor([1, 2, 3])
WRONG = {
    "ids of floats": (embed, (torch.ones(2, 3), W)),
    "out of another shape": (lambda i, w, o: embed(i, w, out=o), (I3, W, torch.zeros(4, D))),
    "positions of another shape": (lambda i, w, p: embed(i, w, positions=p), (I3, W, torch.tensor([1, 2]))),
    "no width": (embed, (I3, torch.zeros(V, 0))),
    "encoding of no width": (lambda p: positional_encoding(p, 0), (I3,)),
    "max_norm": (lambda i, w: embed(i, w, max_norm=0.0), (I3, W)),
    "padding_idx": (lambda i, w: embed(i, w, padding_idx=V), (I3, W)),
}


@make.each(("function", "given"), WRONG)
def test_wrong_arguments(function, given):
    """Refused as in eager mode, sooner or later: no compiled program takes what the op does not."""
    given = [a.clone() for a in given]
    before = [a.clone() for a in given]
    with pytest.raises(ValueError, match="posenc_ext::") as eager:
        function(*given)
    with pytest.raises(Exception, match="posenc_ext::") as compiled:
        torch.compile(function, backend=EAGER)(*given)
    assert str(eager.value).splitlines()[0][:60] in str(compiled.value)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_sparse_gradients_are_refused_with_the_reason():
    module = make.layer(sparse=True)
    with pytest.raises(Exception, match=r"sparse=True cannot be traced \(.* have no sparse gradients\)"):
        torch.compile(module, fullgraph=True, backend=EAGER)(ids())
    with pytest.raises(Exception, match=r"sparse=True cannot be traced"):
        torch.export.export(module, (ids(),), strict=True)
    with pytest.raises(NotImplementedError, match=r"sparse=True cannot be traced"):
        torch.export.export(module, (ids(),))


def test_sparse_gradients_fall_back_to_eager_where_the_graph_may_break():
    module, given = make.layer(sparse=True), ids()
    torch.compile(lambda i: (module(i) * 2).sum(), backend=EAGER)(given).backward()
    assert make.weight_of(module).grad.is_sparse
    expected = torch.bincount(given.flatten(), minlength=V).unsqueeze(1) * 2 * math.sqrt(D)
    weight = make.weight_of(module)
    torch.testing.assert_close(weight.grad.to_dense(), expected.expand(V, D).float())


@pytest.mark.parametrize("dynamic", [False, True])
def test_learned_positions_past_their_end(dynamic):
    """The length may be a number or a symbol by then; the error is the same."""
    module = make.layer("LearnedPositionalEmbedding", max_len=8)
    compiled = torch.compile(module, dynamic=dynamic, backend=EAGER)
    assert torch.equal(compiled(given := activations((B, 7))), module(given))
    with pytest.raises(IndexError, match=r"positions must lie in \[0, 8\).*got 8 at token\[0, 8\]"):
        compiled(activations((B, 9)))


# ---- training --------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = make.layer(**options)
        self.again = make.layer("PositionalEncoding")
        self.output = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.again(self.embed(tokens).tanh()))


FLAGS = {
    "padding, frequency": {"padding_idx": 2, "scale_grad_by_freq": True},
    "max_norm, bf16": {"max_norm": 1.0, "dtype": torch.bfloat16},
}


@make.each("flags", FLAGS)
@pytest.mark.parametrize("backend", [EAGER, INDUCTOR])
def test_training_steps(flags, backend):
    """Several shapes, so the second one brings symbols in; weights after each step as in eager mode."""

    def train(compiled: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(2)
        model = Model(**flags)
        model.to(flags.get("dtype", torch.float32))
        loss = lambda i: F.cross_entropy(model(i).flatten(0, -2).float(), i.flatten())  # noqa: E731
        if compiled:
            loss = torch.compile(loss, fullgraph=True, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step, shape in enumerate([(2, 5), (3, 4), (2, 6)]):
            torch.manual_seed(step)
            optimizer.zero_grad()
            value = loss(ids(shape))
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses, [p.detach() for p in model.parameters()]

    (losses, parameters), (expected_losses, expected) = train(True), train(False)
    tolerance = 1e-5 if flags.get("dtype") is None else 3e-2
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    for got, want in zip(parameters, expected, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_dropout_trains_compiled():
    module = make.layer(dropout=0.5)
    compiled = torch.compile(module, fullgraph=True, backend=EAGER)
    y = compiled(ids((20, 30)))
    kept = (y != 0).float().mean().item()
    assert 0.4 < kept < 0.6
    y.sum().backward()
    assert make.weight_of(module).grad.count_nonzero() > 0
    given = ids()
    assert torch.equal(torch.compile(module.eval(), fullgraph=True, backend=EAGER)(given), module(given))


@make.each("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_backward_pass(dynamic):
    """The whole step in one graph, the backward pass with it."""
    model, given = Model(), ids()

    def step(tokens: Tensor) -> None:
        model(tokens).square().mean().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend=EAGER, dynamic=dynamic)(given)
    compiled = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step(given)
    for got, parameter in zip(compiled, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda w, i: torch.func.grad(lambda v: embed(i, v).sin().sum())(w),
    "jvp": lambda w, i: torch.func.jvp(lambda v: embed(i, v), (w,), (w.cos(),))[1],
    "vmap": lambda w, i: torch.func.vmap(lambda j: embed(j, w))(i),
    "per sample": lambda w, i: torch.func.vmap(torch.func.grad(lambda v, j: embed(j, v).sin().sum()), (None, 0))(w, i),
    "grad of add": lambda w, i: torch.func.grad(lambda v: add_positional_encoding(v).sin().sum())(w),
    "jvp of add": lambda w, i: torch.func.jvp(add_positional_encoding, (w,), (w.cos(),))[1],
}


@make.each("function", TRANSFORMS)
def test_transforms_inside_a_compiled_program(function):
    """Right or refused; a tangent or a gradient that is left out must not pass for zero."""
    given = ids()
    expected = function(W, given)
    assert expected.count_nonzero() > 0
    got = torch.compile(function, backend=EAGER, fullgraph=True)(W, given)
    torch.testing.assert_close(got, expected)


# ---- export ----------------------------------------------------------------------------------------------------------


class Keyword(nn.Module):
    """A layer called with a keyword that export takes as an input."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, given: Tensor, value: Any) -> Tensor:
        return self.layer(given, **{self.name: value})


def saved_and_loaded(program: torch.export.ExportedProgram) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


EXPORTED = {
    "Embeddings": (make.layer("Embeddings"), ids),
    "TransformerEmbedding": (make.layer(padding_idx=1), ids),
    "sequence first": (make.layer(batch_first=False, convention="marian"), ids),
    "PositionalEncoding": (ENCODING, activations),
    "LearnedPositionalEmbedding": (LEARNED, activations),
}
LONGEST = {"LearnedPositionalEmbedding": 40}
each_strictness = make.each("strict", {"non-strict": False, "strict": True})
each_fused = make.each("name", ["TransformerEmbedding", "PositionalEncoding"])


def dims(name: str) -> dict[int, Any]:
    return {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST.get(name, 1024))}


def exported(name: str, strict: bool) -> nn.Module:
    """Exported with any batch and length, saved and loaded."""
    module, argument = EXPORTED[name]
    program = torch.export.export(module, (argument((2, 5)),), dynamic_shapes=(dims(name),), strict=strict)
    return saved_and_loaded(program)


@each_strictness
@make.each("name", list(EXPORTED))
def test_export_runs_at_other_sizes(name, strict):
    module, argument = EXPORTED[name]
    loaded, longest = exported(name, strict), LONGEST.get(name, 1024)
    for shape in ((2, 5), (1, 1), (7, 33), (3, longest)):
        given = argument(shape)
        assert torch.equal(loaded(given), module(given))
    with pytest.raises((IndexError, RuntimeError, AssertionError)):
        loaded(argument((2, longest + 1)))


@each_strictness
@each_fused
@make.each("keyword", ["offset", "positions"])
def test_export_takes_keywords_as_inputs(name, keyword, strict):
    """Exported at 3 and run at 7: the values for 7."""
    (layer, argument), tokens, in_numbers = EXPORTED[name], dims(name), keyword == "offset"
    example = (argument((2, 5)), 3 if in_numbers else ids((2, 5)))
    shapes = (tokens, Dim.DYNAMIC if in_numbers else tokens)
    program = torch.export.export(Keyword(layer, keyword), example, dynamic_shapes=shapes, strict=strict)
    loaded = saved_and_loaded(program)
    for shape, offset in (((2, 5), 3), ((2, 5), 7), ((4, 9), 0), ((1, 1), 5000)):
        given, value = argument(shape), offset if in_numbers else torch.randint(-90, 90, shape)
        assert torch.equal(loaded(given, value), layer(given, **{keyword: value}))


@each_strictness
def test_an_offset_that_export_did_fix_is_refused(strict):
    """Without a dynamic shape for it the number belongs to the program, and another one is an error."""
    layer, argument = EXPORTED["TransformerEmbedding"]
    given = argument((2, 5))
    program = torch.export.export(Keyword(layer, "offset"), (given, 3), strict=strict).module()
    assert torch.equal(program(given, 3), layer(given, offset=3))
    with pytest.raises((RuntimeError, AssertionError)):
        program(given, 7)


@each_strictness
@make.each("name", ["Embeddings", "TransformerEmbedding"])
def test_exported_programs_can_be_trained(name, strict):
    (module, _), given, loaded = EXPORTED[name], ids((3, 4)), exported(name, strict)
    ((_, parameter),) = loaded.named_parameters()
    loaded(given).square().sum().backward()
    module.zero_grad()
    module(given).square().sum().backward()
    torch.testing.assert_close(parameter.grad, make.weight_of(module).grad)
    assert parameter.grad.count_nonzero() > 0
    if name == "TransformerEmbedding":
        assert parameter.grad[1].count_nonzero() == 0  # the padding row


def test_exported_programs_hold_the_op_and_the_weight_alone():
    module, _ = EXPORTED["TransformerEmbedding"]
    program = torch.export.export(module, (ids((2, 5)),), dynamic_shapes=(dims("TransformerEmbedding"),))
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.posenc_ext.embed.default in calls
    tensors = [*program.state_dict.values(), *program.constants.values()]
    assert [tuple(t.shape) for t in tensors if t.numel()] == [(V, D)]
    # Lowered to torch's core operators the op stays whole.
    lowered = program.run_decompositions()
    assert torch.ops.posenc_ext.embed.default in [node.target for node in lowered.graph.nodes]
    given = ids((4, 6))
    for found in (program.module(), lowered.module()):
        assert torch.equal(found(given), module(given))
        with pytest.raises(IndexError, match=rf"\[0, {V}\), got {V}"):
            found(torch.full((2, 5), V))
