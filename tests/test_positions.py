"""Positions that are counted: of real tokens in padded rows, of sequences in packed ones."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import make
import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from make import D, V
from test_properties import SETTINGS, laid_out
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import posenc_ext
from posenc_ext.functional import (
    embed,
    positions_from_cu_seqlens,
    positions_from_padding,
    positions_from_sequence_ids,
)
from posenc_ext.ops import positions as op

ops = torch.ops.posenc_ext
PAD = 1
IDS = torch.tensor([[1, 1, 5, 6, 1, 2], [3, 4, 5, 1, 1, 1], [1, 1, 1, 1, 1, 1], [9, 8, 7, 6, 5, 4]])


def counted(tokens: Tensor, pad: int, offset: Any, first: int, at_pads: int | None, batch_first: bool) -> Tensor:
    """Token by token."""
    axis = tokens.dim() - 1 if batch_first else 0
    rows = tokens.movedim(axis, -1).numpy()
    result = np.zeros(rows.shape, dtype=np.int64)
    offsets = np.broadcast_to(np.asarray(offset), rows.shape[:-1])
    for row in np.ndindex(*rows.shape[:-1]):
        position = first + int(offsets[row])
        for t, token in enumerate(rows[row]):
            if token != pad:
                result[row][t], position = position, position + 1
            else:
                result[row][t] = position - 1 if at_pads is None else at_pads
    return torch.from_numpy(result).movedim(-1, axis).contiguous()


def in_runs(tokens: Tensor, first: int, batch_first: bool) -> Tensor:
    """Token by token."""
    axis = tokens.dim() - 1 if batch_first else 0
    rows = tokens.movedim(axis, -1).numpy()
    result = np.zeros(rows.shape, dtype=np.int64)
    for row in np.ndindex(*rows.shape[:-1]):
        position = first
        for t, token in enumerate(rows[row]):
            position = position + 1 if t > 0 and token == rows[row][t - 1] else first
            result[row][t] = position
    return torch.from_numpy(result).movedim(-1, axis).contiguous()


shapes = st.lists(st.integers(0, 20), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=150, **SETTINGS)
@given(shapes, seeds, st.sampled_from([torch.int64, torch.int32, torch.bool]), st.booleans(), st.integers(0, 3))
def test_real_tokens_are_counted(shape, seed, dtype, batch_first, kind):
    """Any shape, strides and type, rare and frequent pads, every kind of offset; the composed form too."""
    random = torch.Generator().manual_seed(seed)
    tokens = laid_out((torch.rand(shape, generator=random) > [0.1, 0.5, 0.9, 1][seed % 4]).to(dtype), random)
    rows = tokens.shape[:-1] if batch_first else tokens.shape[1:]
    drawn = laid_out(torch.randint(-50, 50, rows, generator=random), random)
    offset = (3, torch.tensor(7, dtype=torch.int32), drawn, drawn.int())[kind]
    first, at_pads = ((0, 0), (2, 1), (0, None), (-(2**40), -1))[seed // 4 % 4]
    options = {"first_position": first, "padding_position": at_pads, "batch_first": batch_first}
    got = positions_from_padding(tokens, 1, offset=offset, **options)
    want = counted(tokens, 1, offset, first, at_pads, batch_first)
    assert_same_bits(got, want)
    assert got.is_contiguous()
    offsets = offset if isinstance(offset, Tensor) else torch.tensor(offset)
    assert_same_bits(op.compose_from_padding(tokens, 1, offsets, first, at_pads, batch_first), want)


@settings(max_examples=100, **SETTINGS)
@given(shapes, seeds, st.sampled_from([torch.int64, torch.int32]), st.booleans())
def test_sequences_of_a_row_are_counted(shape, seed, dtype, batch_first):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 10, shape, generator=random) < seed % 5
    ids = laid_out((ids.cumsum(-1 if batch_first else 0) % 3 - 1).to(dtype), random)
    want = in_runs(ids, 2, batch_first)
    assert_same_bits(positions_from_sequence_ids(ids, first_position=2, batch_first=batch_first), want)
    assert_same_bits(op.compose_from_sequence_ids(ids, 2, batch_first), want)


@settings(max_examples=100, **SETTINGS)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 4), st.integers(-3, 3))
def test_packed_sequences_are_counted(lengths, spare, first):
    """Empty ones too; what comes after the last one counts from its end."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    want = torch.tensor([first + i for length in (*lengths, spare) for i in range(length)], dtype=torch.int64)
    for given_starts in (starts, starts.int(), torch.stack((starts, starts), 1)[:, 0]):
        assert_same_bits(positions_from_cu_seqlens(given_starts, len(want), first_position=first), want)
    assert_same_bits(op.compose_from_cu_seqlens(starts, len(want), first), want)


def test_threads_do_not_matter():
    """Rows, and packed tokens, enough of them for every thread."""
    tokens, starts = make.ids((64, 3000), 4, seed=1), make.ids((5000,), 60, seed=2).cumsum(0)
    starts[0] = 0

    def results() -> list[Tensor]:
        of_rows = [f(tokens) for f in (lambda t: positions_from_padding(t, 1), positions_from_sequence_ids)]
        return [*of_rows, positions_from_cu_seqlens(starts, int(starts[-1]) + 5)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wants = results()
        torch.set_num_threads(4)
        for got, want in zip(results(), wants, strict=True):
            assert_same_bits(got, want)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(wants[0], op.compose_from_padding(tokens, 1))
    assert_same_bits(wants[1], op.compose_from_sequence_ids(tokens))
    assert_same_bits(wants[2], op.compose_from_cu_seqlens(starts, int(starts[-1]) + 5))


# ---- what other projects compute -------------------------------------------------------------------------------------


@pytest.mark.slow
@make.each("cache", [0, 3, "tensor"])
def test_m2m100_and_roberta(cache):
    m2m100 = pytest.importorskip("transformers.models.m2m_100.modeling_m2m_100").M2M100SinusoidalPositionalEmbedding
    roberta = pytest.importorskip("transformers.models.roberta.modeling_roberta").RobertaEmbeddings
    length = torch.tensor(4) if cache == "tensor" else cache
    got = positions_from_padding(IDS, PAD, offset=length, first_position=PAD + 1, padding_position=PAD)
    for theirs in (m2m100, roberta):
        assert_same_bits(got, theirs.create_position_ids_from_input_ids(IDS, PAD, length))


@pytest.mark.slow
def test_fsmt():
    """It adds the length of the cache at pads too."""
    fsmt = pytest.importorskip("transformers.models.fsmt.modeling_fsmt").SinusoidalPositionalEmbedding
    got = positions_from_padding(IDS, PAD, first_position=PAD + 1, padding_position=PAD)
    assert_same_bits(got + 5, fsmt.make_positions(IDS, PAD) + 5)


@pytest.mark.slow
def test_opt():
    opt = pytest.importorskip("transformers.models.opt.modeling_opt").OPTLearnedPositionalEmbedding
    mask = (IDS != PAD).long()
    table = opt(20, 3)
    got = positions_from_padding(mask, 0, first_position=2, padding_position=1)
    assert_same_bits(table.weight[got], table(mask))


@pytest.mark.slow
def test_decoders():
    """What transformers' generate makes of an attention mask, for GPT-2 and all others that take position_ids."""
    generation = pytest.importorskip("transformers.generation.utils").GenerationMixin
    mask = (IDS != PAD).long()
    theirs = generation._prepare_position_ids_for_generation(None, IDS, {"attention_mask": mask})
    assert_same_bits(positions_from_padding(mask, 0), theirs)
    assert_same_bits(positions_from_padding(mask.bool(), 0, padding_position=None), mask.cumsum(-1) - 1)
    assert_same_bits(positions_from_padding(mask == 0, True, padding_position=None), mask.cumsum(-1) - 1)
    # Bloom's.
    assert_same_bits(positions_from_padding(mask, 0), (mask.cumsum(-1) - 1) * mask)


@pytest.mark.slow
def test_packed_rows_of_transformers():
    """Its masks find the sequences of a packed row where positions start anew."""
    masks = pytest.importorskip("transformers.masking_utils")
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 4, 4, 4, 4, 7]])
    found = masks.find_packed_sequence_indices(positions_from_sequence_ids(numbers))
    assert_same_bits(found, torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 1]]))


# ---- the layer -------------------------------------------------------------------------------------------------------

each_order = make.each("batch_first", [True, False])
CONVENTIONS = ("vaswani", "fairseq", "marian")
lengths_of_rows = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def padded(rows: list[Tensor], side: str, more: int = 0) -> Tensor:
    length = max(map(len, rows)) + more
    pads = [torch.full([length - len(row)], PAD) for row in rows]
    return torch.stack([torch.cat((p, r) if side == "left" else (r, p)) for p, r in zip(pads, rows, strict=True)])


def some_rows(lengths: list[int], seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(PAD + 1, V, (length,), generator=random) for length in lengths]


@settings(max_examples=40, **SETTINGS)
@given(lengths_of_rows, seeds, st.sampled_from(["left", "right"]), st.sampled_from(CONVENTIONS), st.booleans())
def test_padded_rows_are_what_they_are_alone(lengths, seed, side, convention, batch_first):
    rows = some_rows(lengths, seed)
    layer = make.layer(padding_idx=PAD, count_padding=False, convention=convention, batch_first=batch_first)
    alone = make.layer(padding_idx=PAD, convention=convention)
    ids = padded(rows, side, more=seed % 3)
    ids = ids if batch_first else ids.t()
    for y in (layer(ids), layer(ids, padding_mask=ids == PAD)):
        for row, got in zip(rows, y if batch_first else y.transpose(0, 1), strict=True):
            start = len(got) - len(row) if side == "left" else 0
            assert_same_bits(got[start : start + len(row)], alone(row))


@settings(max_examples=30, **SETTINGS)
@given(lengths_of_rows, seeds, st.integers(1, 4), st.sampled_from(CONVENTIONS))
def test_step_by_step_is_one_pass(lengths, seed, step, convention):
    """With the number of real tokens so far, one for each row, as the offset."""
    ids = padded(some_rows(lengths, seed), "left", more=1)
    layer = make.layer(padding_idx=PAD, count_padding=False, convention=convention)
    want, cached = layer(ids), torch.zeros(len(ids), dtype=torch.int64)
    for start in range(0, ids.shape[1], step):
        part = ids[:, start : start + step]
        got = layer(part, offset=cached)
        real = part != PAD
        assert_same_bits(got[real], want[:, start : start + step][real])
        cached = cached + real.sum(1)


@settings(max_examples=40, **SETTINGS)
@given(lengths_of_rows, seeds, st.sampled_from(CONVENTIONS))
def test_packed_sequences_are_what_they_are_alone(lengths, seed, convention):
    rows, weight = some_rows(lengths, seed), make.table(seed=1)
    packed = torch.cat(rows)
    first = posenc_ext.CONVENTIONS[convention].first_position
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    numbers = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    want = torch.cat([embed(row, weight, convention=convention) for row in rows])
    for positions in (
        positions_from_cu_seqlens(starts, len(packed), first_position=first),
        positions_from_sequence_ids(numbers, first_position=first),
    ):
        assert_same_bits(embed(packed, weight, positions=positions, convention=convention), want)


def test_other_layers_are_unchanged():
    """A layer counts pads unless it is told not to, explicit positions are taken, and it can be seen and copied."""
    plain, layer = make.layer(padding_idx=PAD), make.layer(padding_idx=PAD, count_padding=False)
    assert not torch.equal(plain(IDS), layer(IDS))
    assert_same_bits(layer(IDS, positions=torch.arange(6)), plain(IDS))
    assert "count_padding=False" in repr(layer)
    assert "count_padding" not in repr(plain)
    assert_same_bits(pickle.loads(pickle.dumps(layer))(IDS), layer(IDS))
    layer.count_padding = True
    assert_same_bits(layer(IDS), plain(IDS))
    old = make.layer(padding_idx=PAD)
    del old.__dict__["count_padding"]  # as those that were pickled before
    assert_same_bits(old(IDS), plain(IDS))


def test_a_lut_that_is_called():
    layer = make.layer(padding_idx=PAD, count_padding=False)
    want = layer(IDS)
    layer.lut.register_forward_hook(lambda *_: None)
    assert_same_bits(layer(IDS), want)


def test_gradients_do_not_depend_on_padding():
    layer = make.layer(padding_idx=PAD, count_padding=False)
    layer(IDS).square().sum().backward()
    want = make.layer()
    for row in IDS:
        want(row[row != PAD]).square().sum().backward()
    assert torch.equal(layer.weight.grad[PAD], torch.zeros(D))
    torch.testing.assert_close(layer.weight.grad, want.weight.grad, rtol=1e-6, atol=1e-6)


# ---- refused ---------------------------------------------------------------------------------------------------------

NESTED = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
LAYER = make.layer(padding_idx=PAD, count_padding=False)
STARTS = torch.tensor([0, 2, 5])
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "scalar": (lambda: positions_from_padding(IDS[0, 0], 1), ValueError, "ids_or_mask must have at least 1 dimension"),
    "floats": (
        lambda: positions_from_padding(IDS.float(), 1),
        ValueError,
        "ids_or_mask must have dtype int64, int32 or bool, got Float",
    ),
    "no tensor": (lambda: positions_from_padding([[1]], 1), TypeError, "ids_or_mask must be a torch.Tensor, got list"),
    "no padding_idx": (
        lambda: positions_from_padding(IDS, None),
        TypeError,
        "padding_idx must be an int, got NoneType",
    ),
    "padding_idx past int64": (
        lambda: positions_from_padding(IDS, 2**63),
        ValueError,
        "padding_idx 9223372036854775808 exceeds the int64 range",
    ),
    "floats as offset": (
        lambda: positions_from_padding(IDS, 1, offset=torch.tensor(1.0)),
        TypeError,
        "offset must have dtype int64 or int32",
    ),
    "a number as offset": (
        lambda: positions_from_padding(IDS, 1, offset=1.5),
        TypeError,
        "offset must be an int or an integer tensor, got 1.5",
    ),
    "offset of another shape": (
        lambda: positions_from_padding(IDS, 1, offset=torch.arange(6)),
        ValueError,
        "offset must be 0-d or hold one number for each row of the batch [4], got shape [6]",
    ),
    "offset past int64": (
        lambda: positions_from_padding(IDS, 1, offset=2**63 - 1, first_position=1),
        ValueError,
        "offset 9223372036854775808 exceeds the int64 range",
    ),
    "padding_position": (
        lambda: positions_from_padding(IDS, 1, padding_position="x"),
        TypeError,
        "padding_position must be an int, got str",
    ),
    "nested": (lambda: positions_from_padding(NESTED, 1), ValueError, "ids_or_mask must not be nested"),
    "nested sequence ids": (lambda: positions_from_sequence_ids(NESTED), ValueError, "ids must not be nested"),
    "scalar sequence id": (
        lambda: positions_from_sequence_ids(IDS[0, 0]),
        ValueError,
        "ids must have at least 1 dimension",
    ),
    "sequence ids of another type": (
        lambda: positions_from_sequence_ids(IDS.bool()),
        ValueError,
        "ids must have dtype int64 or int32, got Bool",
    ),
    "starts of floats": (
        lambda: positions_from_cu_seqlens(STARTS.double(), 5),
        ValueError,
        "cu_seqlens must have dtype int64 or int32, got Double",
    ),
    "two axes": (
        lambda: positions_from_cu_seqlens(STARTS[None], 5),
        ValueError,
        "cu_seqlens must have 1 dimension, got shape [1, 3]",
    ),
    "scalar start": (lambda: positions_from_cu_seqlens(STARTS[0], 5), ValueError, "cu_seqlens must have 1 dimension"),
    "no starts": (lambda: positions_from_cu_seqlens(STARTS[:0], 5), ValueError, "cu_seqlens must hold a 0"),
    "another beginning": (
        lambda: positions_from_cu_seqlens(STARTS + 1, 9),
        ValueError,
        "cu_seqlens must begin with 0, got 1",
    ),
    "descending": (
        lambda: positions_from_cu_seqlens(torch.tensor([0, 4, 3]), 9),
        ValueError,
        "cu_seqlens must not descend, got 4 and then 3",
    ),
    "total": (
        lambda: positions_from_cu_seqlens(STARTS, 4),
        ValueError,
        "total must be at least the last of cu_seqlens (5), got 4",
    ),
    "negative total": (
        lambda: positions_from_cu_seqlens(STARTS, -1),
        ValueError,
        "total must not be negative, got -1",
    ),
    "total of floats": (lambda: positions_from_cu_seqlens(STARTS, 5.0), TypeError, "total must be an int, got float"),
    "a layer without padding_idx": (
        lambda: make.layer(count_padding=False)(IDS),
        ValueError,
        "count_padding=False needs padding_idx, or a padding_mask",
    ),
    "a mask without a use": (
        lambda: make.layer()(IDS, padding_mask=IDS == PAD),
        ValueError,
        "padding_mask cannot be combined with count_padding=True",
    ),
    "a mask and positions": (
        lambda: LAYER(IDS, padding_mask=IDS == PAD, positions=IDS),
        ValueError,
        "padding_mask cannot be combined with positions",
    ),
    "a mask of integers": (
        lambda: LAYER(IDS, padding_mask=(IDS != PAD).long()),
        ValueError,
        "padding_mask must be a bool tensor of the shape of x [4, 6], True at pads",
    ),
    "a mask of another shape": (
        lambda: LAYER(IDS, padding_mask=(IDS == PAD)[:, 1:]),
        ValueError,
        "padding_mask must be a bool tensor of the shape of x [4, 6]",
    ),
    "nested ids": (lambda: LAYER(NESTED), ValueError, "ids_or_mask must not be nested"),
    "unfuse": (lambda: posenc_ext.unfuse(LAYER), ValueError, "has count_padding=False"),
}


@make.each(("call", "error", "text"), REFUSED)
def test_refused(call, error, text):
    with pytest.raises(error) as refusal:
        call()
    assert text in str(refusal.value)
    assert str(refusal.value).startswith("posenc_ext")


# ---- recorded calls --------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[tuple[int, int]], tuple[Any, ...]], Any]] = {
    "padding": (
        lambda i: positions_from_padding(i, 1, first_position=2, padding_position=None),
        lambda s: (make.ids(s, 3),),
        ops.positions_from_padding.default,
    ),
    "padding, offsets": (
        lambda i, o: positions_from_padding(i, 1, offset=o),
        lambda s: (make.ids(s, 3), make.ids(s[:1], 90)),
        ops.positions_from_padding.default,
    ),
    "mask, scalar offset": (
        lambda m, o: positions_from_padding(m, True, offset=o, batch_first=False),
        lambda s: (make.ids(s, 2).bool(), torch.tensor(s[0])),
        ops.positions_from_padding.default,
    ),
    "packed": (
        lambda c, i: positions_from_cu_seqlens(c, i.shape[1]),
        lambda s: (torch.arange(s[0]) * s[1] // s[0], make.ids(s)),
        ops.positions_from_cu_seqlens.default,
    ),
    "sequence ids": (
        lambda i: positions_from_sequence_ids(i),
        lambda s: (make.ids(s, 2),),
        ops.positions_from_sequence_ids.default,
    ),
    "layer": (
        make.layer(padding_idx=PAD, count_padding=False),
        lambda s: (make.ids(s, 3),),
        ops.positions_from_padding.default,
    ),
}
SHAPES = ((2, 5), (4, 9), (3, 7))


def each_call(*fast: str) -> pytest.MarkDecorator:
    """The others are slow."""
    values = [
        pytest.param(*call, id=name, marks=() if name in fast else pytest.mark.slow) for name, call in CALLS.items()
    ]
    return pytest.mark.parametrize(("function", "arguments", "target"), values)


def has(graph: torch.fx.Graph, target: Any) -> bool:
    return any(node.target == target for node in graph.nodes)


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Tensor:
        return self.function(*given)


class One(nn.Module):
    """The same of one argument: torch.fx cannot trace a list of them."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: Tensor) -> Tensor:
        return self.function(given)


def dynamic(example: tuple[Any, ...]) -> Any:
    return (tuple(dict.fromkeys(range(value.dim()), Dim.DYNAMIC) for value in example),)


@make.each(("function", "arguments", "target"), CALLS)
@make.each("mode", ["real", "fake", "symbolic"])
def test_make_fx(function, arguments, target, mode):
    if isinstance(function, nn.Module) and mode != "real":
        pytest.skip("its weight is a constant, which is not a fake tensor")
    graph = make_fx(function, tracing_mode=mode)(*arguments(SHAPES[0]))
    assert has(graph.graph, target)
    given = arguments(SHAPES[1 if mode == "symbolic" else 0])
    assert_same_bits(graph(*given), function(*given))


@each_call("packed", "sequence ids")
def test_export(function, arguments, target):
    """With every axis as a symbol; taken apart into core ATen the program gives the same integers."""
    example = arguments(SHAPES[0])
    program = torch.export.export(Call(function), example, dynamic_shapes=dynamic(example))
    assert has(program.graph, target)
    lowered = program.run_decompositions(posenc_ext.decompositions())
    assert not any("posenc_ext" in str(node.target) for node in lowered.graph.nodes)
    for shape in SHAPES:
        given = arguments(shape)
        want = function(*given)
        assert_same_bits(program.module()(*given), want)
        torch.testing.assert_close(lowered.module()(*given), want, atol=1e-6, rtol=1e-6)


@each_call("layer")
def test_compile(function, arguments, target):
    """One program for all shapes, without a break."""
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in SHAPES:
        given = arguments(shape)
        assert_same_bits(compiled(*given), function(*given))


@make.each(("function", "arguments", "target"), CALLS)
@pytest.mark.filterwarnings("ignore")
def test_jit_trace(function, arguments, target):
    example = arguments(SHAPES[0])
    traced = torch.jit.trace(Call(function), example, check_trace=False)
    assert target.name() in str(traced.inlined_graph)
    for shape in SHAPES[: 1 if target == ops.positions_from_cu_seqlens.default else None]:  # an int is fixed in a trace
        given = arguments(shape)
        assert_same_bits(traced(*given), function(*given), str(shape))


@make.each("name", ["padding", "layer"])
def test_symbolic_trace(name):
    function, arguments, _ = CALLS[name]
    graph = torch.fx.symbolic_trace(function if isinstance(function, nn.Module) else One(function))
    given = arguments(SHAPES[1])
    assert_same_bits(graph(*given), function(*given))


@make.each(("function", "arguments", "target"), CALLS)
def test_vmap(function, arguments, target):
    """Where functorch is at work, the same from PyTorch's own ops."""
    batch = [arguments(SHAPES[0]) for _ in range(3)]
    given = [torch.stack(column) for column in zip(*batch, strict=True)]
    got = torch.func.vmap(function)(*given)
    for row, each in zip(got, batch, strict=True):
        assert_same_bits(row, function(*each))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@each_call()
def test_onnx(function, arguments, target):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    example, file = arguments(SHAPES[0]), io.BytesIO()
    program = torch.onnx.export(Call(function), example, dynamo=True, dynamic_shapes=dynamic(example), verbose=False)
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    for shape in SHAPES:
        given = arguments(shape)
        feeds = {i.name: g.numpy() for i, g in zip(session.get_inputs(), given, strict=False)}
        (got,) = session.run(None, feeds)
        torch.testing.assert_close(torch.from_numpy(got), function(*given).detach(), atol=1e-6, rtol=1e-6)
