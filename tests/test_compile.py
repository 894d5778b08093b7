"""torch.compile and torch.export: whole graphs, right at other sizes and offsets, compiled once."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.nn import functional as F

import posenc_ext
from posenc_ext import functional

V, D, B, T = 11, 6, 2, 5

# Whatever the backend, the ops are called as they are; inductor is there for what it compiles around them.
EAGER, INDUCTOR = "aot_eager", "inductor"


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def ids(*shape: int) -> Tensor:
    return torch.randint(V, shape or (B, T))


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, T)), D)


def weight() -> Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(1))


W = weight()
LEARNED = posenc_ext.LearnedPositionalEmbedding(40, D)

# Every module and functional form: the call, and its arguments for a batch of a given shape.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]] = {
    "Embeddings": (posenc_ext.Embeddings(D, V), lambda *s: (ids(*s),)),
    "TransformerEmbedding": (posenc_ext.TransformerEmbedding(V, D), lambda *s: (ids(*s),)),
    "TransformerEmbedding, fairseq": (
        posenc_ext.TransformerEmbedding(V, D, convention="fairseq", padding_idx=1, batch_first=False),
        lambda *s: (ids(*s),),
    ),
    "PositionalEncoding": (posenc_ext.PositionalEncoding(D), lambda *s: (x(*s),)),
    "PositionalEncoding, exact": (posenc_ext.PositionalEncoding(D, convention="marian"), lambda *s: (x(*s),)),
    "LearnedPositionalEmbedding": (LEARNED, lambda *s: (x(*s),)),
    "LearnedPositionalEmbedding, positions": (
        lambda a, p: LEARNED(a, positions=p),
        lambda *s: (x(*s), ids(*s)),
    ),
    "embed": (lambda i: functional.embed(i, W, offset=3), lambda *s: (ids(*s),)),
    "embed, positions": (lambda i, p: functional.embed(i, W, positions=p), lambda *s: (ids(*s), ids(*s))),
    "embed, one row of positions": (lambda i, p: functional.embed(i, W, positions=p), lambda *s: (ids(*s), ids(s[-1]))),
    "embed, out": (lambda i, o: functional.embed(i, W, out=o), lambda *s: (ids(*s), x(*s))),
    "scaled_embedding": (lambda i: functional.scaled_embedding(i, W), lambda *s: (ids(*s),)),
    "scaled_embedding, out": (lambda i, o: functional.scaled_embedding(i, W, out=o), lambda *s: (ids(*s), x(*s))),
    "add": (lambda a: functional.add_positional_encoding(a, batch_first=False), lambda *s: (x(*s),)),
    "add, out": (lambda a, o: functional.add_positional_encoding(a, out=o), lambda *s: (x(*s), x(*s))),
    "add, in place": (lambda a: functional.add_positional_encoding(a, out=a), lambda *s: (x(*s),)),
    "positional_encoding": (lambda p: functional.positional_encoding(p, D), lambda *s: (ids(*s),)),
    "positional_encoding, length": (lambda a: functional.positional_encoding(a.shape[1], D), lambda *s: (x(*s),)),
    "positional_encoding, bf16": (
        lambda p: functional.positional_encoding(p, D, dtype=torch.bfloat16) + 1,
        lambda *s: (ids(*s),),
    ),
    "positional_encoding, out": (
        lambda p, o: functional.positional_encoding(p, D, out=o),
        lambda *s: (ids(*s), x(*s)),
    ),
    "max_norm": (lambda i, w: functional.embed(i, w, max_norm=0.5), lambda *s: (ids(*s), weight())),
    "max_norm, norm_type": (
        lambda i, w: functional.scaled_embedding(i, w, max_norm=0.5, norm_type=1.0),
        lambda *s: (ids(*s), weight()),
    ),
}


# Which argument is written to.
WRITTEN = {name: 0 if "in place" in name else 1 for name in CALLS if "out" in name or "place" in name or "norm" in name}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
def test_whole_graph(name, dynamic):
    """fullgraph: any break is an error. Values, and what was written to, are those of the eager call, to the bit."""
    function, arguments = CALLS[name]
    counter = CompileCounterWithBackend(EAGER)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    first = None
    for shape in [(B, T), (3, 7), (4, 9)] if dynamic else [(B, T)]:
        given = arguments(*shape)
        eager_arguments, got_arguments = ([a.clone() for a in given] for _ in range(2))
        assert_same_bits(compiled(*got_arguments), function(*eager_arguments))
        for i, (got, expected, before) in enumerate(zip(got_arguments, eager_arguments, given, strict=True)):
            assert torch.equal(got, expected)
            assert torch.equal(got, before) == (WRITTEN.get(name) != i)
        first = first or counter.frame_count
    assert counter.frame_count == first


@pytest.mark.parametrize("name", ["TransformerEmbedding", "embed, out"])
def test_whole_graph_under_inductor(name):
    function, arguments = CALLS[name]
    compiled = torch.compile(lambda *a: function(*a) * 2, fullgraph=True, dynamic=True)
    for shape in ((B, T), (3, 7)):
        given = arguments(*shape)
        expected = function(*[a.clone() for a in given]) * 2
        assert torch.equal(compiled(*given), expected)


def test_the_compiled_graph_holds_the_op_and_no_table():
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    module = posenc_ext.TransformerEmbedding(V, D)
    torch.compile(module, backend=backend, fullgraph=True)(ids())
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert calls == [torch.ops.posenc_ext.embed.default]
    held = [*graph.parameters(), *graph.buffers()]
    assert all(t.numel() in (0, V * D) for t in held)


# ---- steps of a decoder ----------------------------------------------------------------------------------------------

STEPS = {
    "TransformerEmbedding": (posenc_ext.TransformerEmbedding(V, D), ids),
    "PositionalEncoding": (posenc_ext.PositionalEncoding(D, convention="fairseq"), x),
    "LearnedPositionalEmbedding": (posenc_ext.LearnedPositionalEmbedding(200, D), x),
    "embed": (lambda i, **k: functional.embed(i, W, **k), ids),
    "add": (functional.add_positional_encoding, x),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("changing", ["offset", "length", "both"])
def test_no_recompilation_by_the_step(name, changing):
    """One compile for the first call, one when a number is seen to change, and none in 48 more steps."""
    function, argument = STEPS[name]
    counter = CompileCounterWithBackend(EAGER)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for step in range(50):
        given = argument(B, 2 + step if changing != "offset" else 2)
        offset = 3 + step if changing != "length" else 3
        assert torch.equal(compiled(given, offset=offset), function(given, offset=offset))
        if step == 1:
            settled = counter.frame_count
    assert counter.frame_count == settled <= 2


def test_a_decoder_that_counts_its_own_steps():
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = posenc_ext.TransformerEmbedding(V, D)
            self.seen = 0

        def forward(self, token: Tensor) -> Tensor:
            y = self.embed(token, offset=self.seen)
            self.seen += token.shape[1]
            return y

    decoder = Decoder()
    counter = CompileCounterWithBackend(EAGER)
    compiled = torch.compile(decoder, backend=counter, fullgraph=True)
    tokens = ids(B, 50)
    # Without this setting torch takes every number that a module holds for a constant.
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        steps = [compiled(tokens[:, t : t + 1]) for t in range(50)]
    assert torch.equal(torch.cat(steps, dim=1), decoder.embed(tokens))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_no_offset_is_baked_in(name, dynamic):
    function, argument = STEPS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=EAGER)
    given = argument()
    results = [compiled(given, offset=offset) for offset in (5, 9, 2, 5)]
    for got, offset in zip(results, (5, 9, 2, 5), strict=True):
        assert torch.equal(got, function(given, offset=offset))
    assert len({r.sum().item() for r in results}) == 3  # so they do differ


def test_length_argument_of_positional_encoding():
    counter = CompileCounterWithBackend(EAGER)
    compiled = torch.compile(functional.positional_encoding, fullgraph=True, backend=counter)
    for length in (3, 5, 9, 40):
        for offset in (2, 7):
            got = compiled(length, D, offset=offset)
            assert torch.equal(got, functional.positional_encoding(length, D, offset=offset))
    assert counter.frame_count <= 3


def test_the_recipe_is_part_of_the_program():
    """Another convention, precision or scale is another program, never the first one's values."""
    compiled = torch.compile(functional.embed, backend=EAGER)
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
        assert torch.equal(compiled(given, W, **options), functional.embed(given, W, **options))


def test_pe_compiles():
    module = posenc_ext.PositionalEncoding(D, 9)
    assert torch.equal(torch.compile(lambda: module.pe, fullgraph=True, backend=EAGER)(), module.pe)


@pytest.mark.parametrize("kind", ["Embeddings", "TransformerEmbedding"])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_other_types(kind, cast):
    module = (posenc_ext.Embeddings(D, V) if kind == "Embeddings" else posenc_ext.TransformerEmbedding(V, D)).to(cast)
    given = ids().int()
    assert_same_bits(torch.compile(module, fullgraph=True, backend=EAGER)(given), module(given))


# ---- errors ----------------------------------------------------------------------------------------------------------

BAD_IDS = {
    "embed": lambda i, w: functional.embed(i, w),
    "padding": lambda i, w: functional.embed(i, w, padding_idx=1),
    "scaled_embedding": lambda i, w: functional.scaled_embedding(i, w),
    "out": lambda i, w: functional.embed(i, w, out=torch.zeros(3, D)),
    "max_norm": lambda i, w: functional.embed(i, w, max_norm=0.1),
}


@pytest.mark.parametrize("name", BAD_IDS)
@pytest.mark.parametrize("backend", [EAGER, INDUCTOR])
def test_bad_ids(name, backend):
    """The error of the eager call, by name, and nothing written."""
    compiled = torch.compile(BAD_IDS[name], fullgraph=True, backend=backend)
    good, table = torch.tensor([0, 1, 2]), weight()
    assert torch.equal(compiled(good, table.clone()), BAD_IDS[name](good, table.clone()))
    for bad in (-1, V):
        text = rf"posenc_ext::embed: input must hold ids in \[0, {V}\), got {bad} at input\[2\]"
        with pytest.raises(IndexError, match=text):
            compiled(torch.tensor([0, 1, bad]), table)
        assert torch.equal(table, weight())


def test_bad_ids_in_a_compiled_training_step():
    module = posenc_ext.TransformerEmbedding(V, D)
    compiled = torch.compile(lambda i: module(i).sum(), fullgraph=True, backend=EAGER)
    compiled(ids(3)).backward()
    with pytest.raises(IndexError, match=f"got {V + 4} at"):
        compiled(torch.tensor([0, V + 4, 1]))


WRONG = {
    "ids of floats": (lambda a, w: functional.embed(a, w), lambda: (torch.ones(2, 3), W)),
    "out of another shape": (
        lambda i, w, o: functional.embed(i, w, out=o),
        lambda: (torch.tensor([1, 2, 3]), W, torch.zeros(4, D)),
    ),
    "positions of another shape": (
        lambda i, w, p: functional.embed(i, w, positions=p),
        lambda: (torch.tensor([1, 2, 3]), W, torch.tensor([1, 2])),
    ),
    "no width": (lambda i, w: functional.embed(i, w), lambda: (torch.tensor([1, 2, 3]), torch.zeros(V, 0))),
    "encoding of no width": (lambda p: functional.positional_encoding(p, 0), lambda: (torch.arange(3),)),
    "max_norm": (
        lambda i, w: functional.embed(i, w, max_norm=0.0),
        lambda: (torch.tensor([1, 2]), weight()),
    ),
    "padding_idx": (lambda i, w: functional.embed(i, w, padding_idx=V), lambda: (torch.tensor([1, 2]), weight())),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    """Refused as in eager mode, sooner or later: no compiled program takes what the op does not."""
    function, arguments = WRONG[name]
    with pytest.raises(ValueError, match="posenc_ext::") as eager:
        function(*arguments())
    given = arguments()
    before = [a.clone() for a in given]
    with pytest.raises(Exception, match="posenc_ext::") as compiled:
        torch.compile(function, backend=EAGER)(*given)
    assert str(eager.value).splitlines()[0][:60] in str(compiled.value)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_sparse_gradients_are_refused_with_the_reason():
    module = posenc_ext.TransformerEmbedding(V, D, sparse=True)
    with pytest.raises(Exception, match=r"sparse=True cannot be traced \(.* have no sparse gradients\)"):
        torch.compile(module, fullgraph=True, backend=EAGER)(ids())
    with pytest.raises(Exception, match=r"sparse=True cannot be traced"):
        torch.export.export(module, (ids(),), strict=True)
    with pytest.raises(NotImplementedError, match=r"sparse=True cannot be traced"):
        torch.export.export(module, (ids(),))


def test_sparse_gradients_fall_back_to_eager_where_the_graph_may_break():
    module = posenc_ext.TransformerEmbedding(V, D, sparse=True)
    given = ids()
    torch.compile(lambda i: (module(i) * 2).sum(), backend=EAGER)(given).backward()
    assert module.weight.grad.is_sparse
    expected = torch.bincount(given.flatten(), minlength=V).unsqueeze(1) * 2 * math.sqrt(D)
    torch.testing.assert_close(module.weight.grad.to_dense(), expected.expand(V, D).float())


@pytest.mark.parametrize("dynamic", [False, True])
def test_learned_positions_past_their_end(dynamic):
    """The length may be a number or a symbol by then; the error is the same."""
    module = posenc_ext.LearnedPositionalEmbedding(8, D)
    compiled = torch.compile(module, dynamic=dynamic, backend=EAGER)
    assert torch.equal(compiled(given := x(B, 7)), module(given))
    with pytest.raises(IndexError, match=r"positions must lie in \[0, 8\).*got 0 to 8"):
        compiled(x(B, 9))


# ---- training --------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = posenc_ext.TransformerEmbedding(V, D, **options)
        self.again = posenc_ext.PositionalEncoding(D)
        self.output = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.again(self.embed(tokens).tanh()))


FLAGS = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "frequency": {"scale_grad_by_freq": True},
    "max_norm": {"max_norm": 1.0},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize(("kind", "backend"), [*((kind, EAGER) for kind in FLAGS), ("padding", INDUCTOR)])
def test_training_steps(kind, backend):
    """Several shapes, so the second one brings symbols in; weights after each step as in eager mode."""

    flags = FLAGS[kind]

    def train(compiled: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(2)
        model = Model(**flags)
        model.to(flags.get("dtype", torch.float32))
        loss = lambda i: F.cross_entropy(model(i).flatten(0, -2).float(), i.flatten())  # noqa: E731
        if compiled:
            loss = torch.compile(loss, fullgraph=True, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step, shape in enumerate([(2, 5), (2, 5), (3, 4), (2, 6)]):
            torch.manual_seed(step)
            optimizer.zero_grad()
            value = loss(ids(*shape))
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
    module = posenc_ext.TransformerEmbedding(V, D, dropout=0.5)
    compiled = torch.compile(module, fullgraph=True, backend=EAGER)
    y = compiled(ids(20, 30))
    kept = (y != 0).float().mean().item()
    assert 0.4 < kept < 0.6
    y.sum().backward()
    assert module.weight.grad.count_nonzero() > 0
    given = ids()
    assert torch.equal(torch.compile(module.eval(), fullgraph=True, backend=EAGER)(given), module(given))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_backward_pass(dynamic):
    """The whole step in one graph, the backward pass with it."""
    model = Model()

    def step(tokens: Tensor) -> Tensor:
        value = model(tokens).square().mean()
        value.backward()
        return value.detach()

    gradients = []
    given = ids()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend=EAGER, dynamic=dynamic)(given)
        gradients.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    step(given)
    for got, expected in zip(gradients[0], [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(got, expected)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda w, i: torch.func.grad(lambda v: functional.embed(i, v).sin().sum())(w),
    "jvp": lambda w, i: torch.func.jvp(lambda v: functional.embed(i, v), (w,), (w.cos(),))[1],
    "vmap": lambda w, i: torch.func.vmap(lambda j: functional.embed(j, w))(i),
    "per sample": lambda w, i: torch.func.vmap(
        torch.func.grad(lambda v, j: functional.embed(j, v).sin().sum()), (None, 0)
    )(w, i),
    "grad of add": lambda w, i: torch.func.grad(lambda v: functional.add_positional_encoding(v).sin().sum())(w),
    "jvp of add": lambda w, i: torch.func.jvp(functional.add_positional_encoding, (w,), (w.cos(),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_a_compiled_program(name):
    """Right or refused; a tangent or a gradient that is left out must not pass for zero."""
    function, given = TRANSFORMS[name], ids()
    expected = function(W, given)
    assert expected.count_nonzero() > 0
    got = torch.compile(function, backend=EAGER, fullgraph=True)(W, given)
    torch.testing.assert_close(got, expected)


# ---- export ----------------------------------------------------------------------------------------------------------


class Offset(nn.Module):
    """A layer called with an offset, which export takes as an input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor, offset: int) -> Tensor:
        return self.layer(value, offset=offset)


class Positions(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor, positions: Tensor) -> Tensor:
        return self.layer(value, positions=positions)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


BATCH, LENGTH = Dim("batch", min=1, max=64), Dim("length", min=1, max=1024)

EXPORTED = {
    "Embeddings": (posenc_ext.Embeddings(D, V), ids),
    "TransformerEmbedding": (posenc_ext.TransformerEmbedding(V, D, padding_idx=1), ids),
    "sequence first": (posenc_ext.TransformerEmbedding(V, D, batch_first=False, convention="marian"), ids),
    "PositionalEncoding": (posenc_ext.PositionalEncoding(D), x),
}
strictness = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])


@strictness
@pytest.mark.parametrize("name", EXPORTED)
def test_export_runs_at_other_sizes(name, strict):
    module, argument = EXPORTED[name]
    program = torch.export.export(module, (argument(2, 5),), dynamic_shapes=({0: BATCH, 1: LENGTH},), strict=strict)
    loaded = saved_and_loaded(program).module()
    for shape in ((2, 5), (1, 1), (7, 33), (3, 1000)):
        given = argument(*shape)
        assert torch.equal(loaded(given), module(given))


@strictness
def test_export_of_learned_positions(strict):
    module = posenc_ext.LearnedPositionalEmbedding(40, D)
    length = Dim("length", min=1, max=40)
    program = torch.export.export(module, (x(2, 5),), dynamic_shapes=({0: BATCH, 1: length},), strict=strict)
    loaded = saved_and_loaded(program).module()
    for shape in ((1, 1), (7, 33), (3, 40)):
        given = x(*shape)
        assert torch.equal(loaded(given), module(given))
    with pytest.raises((IndexError, RuntimeError, AssertionError)):
        loaded(x(2, 41))


@strictness
@pytest.mark.parametrize("name", ["TransformerEmbedding", "PositionalEncoding"])
def test_export_takes_the_offset_as_an_input(name, strict):
    """Exported at 3 and run at 7: the values for 7."""
    layer, argument = EXPORTED[name]
    module = Offset(layer)
    shapes = ({0: BATCH, 1: LENGTH}, Dim.DYNAMIC)
    program = torch.export.export(module, (argument(2, 5), 3), dynamic_shapes=shapes, strict=strict)
    loaded = saved_and_loaded(program).module()
    for shape, offset in (((2, 5), 3), ((2, 5), 7), ((4, 9), 0), ((1, 1), 5000)):
        given = argument(*shape)
        assert torch.equal(loaded(given, offset), layer(given, offset=offset))


@strictness
def test_an_offset_that_export_did_fix_is_refused(strict):
    """Without a dynamic shape for it the number belongs to the program, and another one is an error."""
    layer, argument = EXPORTED["TransformerEmbedding"]
    given = argument(2, 5)
    program = torch.export.export(Offset(layer), (given, 3), strict=strict).module()
    assert torch.equal(program(given, 3), layer(given, offset=3))
    with pytest.raises((RuntimeError, AssertionError)):
        program(given, 7)


@strictness
@pytest.mark.parametrize("name", ["TransformerEmbedding", "PositionalEncoding"])
def test_export_with_positions(name, strict):
    layer, argument = EXPORTED[name]
    shapes = ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: LENGTH})
    program = torch.export.export(Positions(layer), (argument(2, 5), ids(2, 5)), dynamic_shapes=shapes, strict=strict)
    loaded = saved_and_loaded(program).module()
    for shape in ((2, 5), (4, 9)):
        given, positions = argument(*shape), torch.randint(-90, 90, shape)
        assert torch.equal(loaded(given, positions), layer(given, positions=positions))


@strictness
@pytest.mark.parametrize("name", ["Embeddings", "TransformerEmbedding"])
def test_exported_programs_can_be_trained(name, strict):
    module, _ = EXPORTED[name]
    given = ids(3, 4)
    program = torch.export.export(module, (ids(2, 5),), dynamic_shapes=({0: BATCH, 1: LENGTH},), strict=strict)
    loaded = saved_and_loaded(program).module()
    ((_, parameter),) = loaded.named_parameters()
    loaded(given).square().sum().backward()
    module.zero_grad()
    module(given).square().sum().backward()
    ((_, expected),) = module.named_parameters()
    torch.testing.assert_close(parameter.grad, expected.grad)
    assert parameter.grad.count_nonzero() > 0
    if name == "TransformerEmbedding":
        assert parameter.grad[1].count_nonzero() == 0  # the padding row


def test_exported_programs_hold_the_op_and_the_weight_alone():
    module, _ = EXPORTED["TransformerEmbedding"]
    program = torch.export.export(module, (ids(2, 5),), dynamic_shapes=({0: BATCH, 1: LENGTH},))
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.posenc_ext.embed.default in calls
    tensors = [*program.state_dict.values(), *program.constants.values()]
    assert [tuple(t.shape) for t in tensors if t.numel()] == [(V, D)]
    # Lowered to torch's core operators the op stays whole.
    lowered = program.run_decompositions()
    assert torch.ops.posenc_ext.embed.default in [node.target for node in lowered.graph.nodes]
    given = ids(4, 6)
    assert torch.equal(lowered.module()(given), module(given))


def test_forward_of_an_exported_program_checks_ids():
    module, _ = EXPORTED["TransformerEmbedding"]
    program = torch.export.export(module, (ids(2, 5),)).module()
    with pytest.raises(IndexError, match=rf"\[0, {V}\), got {V}"):
        program(torch.full((2, 5), V))
