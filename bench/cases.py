"""The cases: what is measured, as data, and how each kind makes its providers."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc_ext import _C, CONVENTIONS, Convention, LearnedPositionalEmbedding, functional

from . import accuracy, inputs, memory
from .inputs import COPY, EAGER, OURS, Shape, copy_of, gradient, table
from .rows import Row
from .timing import CALLED, COLD, GRAPH, Provider, Settings

COMPILED = "textbook, torch.compile"
AUTOTUNED = "textbook, max-autotune"
FORMULA = "no table, torch.compile"
INDEX_SELECT = "torch.index_select(out=)"
DENSE_BACKWARD = "embedding_dense_backward(g * scale)"
COMPOSED = "torch expression"
TORCH_SPARSE = "nn.Embedding(sparse=True) * scale"
TRANSFORMERS = "transformers, M2M100"
EMBEDDING = "F.embedding alone"
UNIFORM = f"{OURS}, uniform ids"
SHARE = "share of the copy's bandwidth"

# Where the output of a call lies; `Case.group`.
OUT = "out="  # in a tensor that exists
POOLED = "pooled"  # in memory that is used again, in a process of its own
PLAIN = "plain"  # the same cases, for information, with the allocator that the process was started with
OTHER = ""  # it does not matter
DEVICE = "device"  # on a GPU
KERNEL = "one thread"  # in a tensor that exists, and there is nothing but the loop

FP32, BF16 = torch.float32, torch.bfloat16

# Results differ by the last bits of fp32 frequencies, and in 16 bits by two or three roundings.
TOLERANCE = {FP32: 1e-4, BF16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-4}

ONE = Shape(1, 1, 512)


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to be found out.

    Attributes:
        name: for `--only`.
        title: for the table.
        providers: makes them when the case's turn comes. The first is the one measured.
        shape: of the inputs.
        thresholds: by baseline, the most that the first provider may take over the baseline's time; or by the name of a
            row with a value. None for a row that informs.
        bytes_moved: by one call, the same for all providers: what they share is the task.
        group: where the output lies.
        ids: how they are drawn, a key of `inputs.IDS`.
        tolerance: for the results of providers, which must agree, relative to their norm; None for the dtype's.
        calls: in one block, each with a batch of its own.
        ways: of calling.
        grad: whether autograd is on.
        threads: the fewest that it makes sense for.
        probe: gives the rows of a case that is not about time.
        axis: of a sweep, what varies along it. Sweeps run when they are asked for.
        at: the point of the sweep that this case is; the last part of its name.
    """

    name: str
    title: str
    providers: Callable[[Case, Settings], list[Provider]] | None = None
    shape: Shape = ONE
    thresholds: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    bytes_moved: Callable[[Shape], int | None] = Shape.forward_bytes
    group: str = OTHER
    ids: str = "uniform"
    tolerance: float | None = None
    calls: int = 8
    ways: tuple[str, ...] = (CALLED,)
    grad: bool = False
    threads: int = 1
    probe: Callable[[Settings], list[Row]] | None = None
    axis: str = ""
    at: int | str | None = None

    @property
    def series(self) -> str:
        """The name of its rows: all points of a sweep have the same."""
        return self.name if self.at is None else self.name.rpartition(".")[0]

    def batches(self, settings: Settings) -> list[Tensor]:
        """Ids for every call of a block, and for the one before it."""
        return [tokens.to(settings.device) for tokens in inputs.IDS[self.ids](self.shape, self.calls + 1)]

    def weight(self, settings: Settings) -> nn.Parameter:
        """The table, as a parameter."""
        return nn.Parameter(table(self.shape, settings.device))


# ---- forward ---------------------------------------------------------------------------------------------------------


def into_out(case: Case, settings: Settings, *, positions: str = "") -> list[Provider]:
    """Everything, against the gather alone: what scale, encoding and sum cost on top of moving the rows.

    Explicit positions: all rows alike, which nobody tells the kernel, or no two tokens alike.
    """
    shape, ids, weight = case.shape, case.batches(settings), case.weight(settings)
    data, out = weight.detach(), torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    flat, flat_ids = out.view(-1, shape.width), [tokens.view(-1) for tokens in ids]
    alike, unlike = torch.arange(shape.length).repeat(shape.batch, 1), torch.arange(shape.tokens).view(shape.batch, -1)
    places = {"": None, "alike": alike, "unlike": unlike}[positions]
    one_row = dataclasses.replace(shape, batch=1, length=shape.tokens)
    layer = inputs.textbook(one_row if positions == "unlike" else shape, weight)
    eager = (lambda tokens: layer(tokens.view(1, -1)).view_as(out)) if positions == "unlike" else layer
    return [
        Provider(OURS, lambda tokens: functional.embed(tokens, data, positions=places, out=out), ids),
        Provider(INDEX_SELECT, lambda tokens: torch.index_select(data, 0, tokens, out=flat), flat_ids, same=False),
        copy_of(shape, shape.tokens, out=out),
        Provider(EAGER, eager, ids, timed=False),
    ]


def normed(case: Case, settings: Settings) -> list[Provider]:
    """The layer and the op that reads its output at once: it matters which core has written a line."""
    shape, ids, weight = case.shape, case.batches(settings), case.weight(settings)
    data, out = weight.detach(), torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    flat, norm = out.view(-1, shape.width), nn.LayerNorm(shape.width, dtype=shape.dtype)
    eager = nn.Sequential(*inputs.textbook(shape, weight), norm)

    def theirs(tokens: Tensor) -> Tensor:
        torch.index_select(data, 0, tokens.view(-1), out=flat)
        return norm(out)  # type: ignore[no-any-return]

    found = [
        Provider(OURS, lambda tokens: norm(functional.embed(tokens, data, out=out)), ids),
        Provider(INDEX_SELECT, theirs, ids, same=False),
        Provider(EAGER, eager, ids),
    ]
    if not settings.quick and COMPILED in case.thresholds:
        torch.compiler.reset()
        found.append(Provider(COMPILED, inputs.compiled(eager), ids))
    return found


def layers(case: Case, settings: Settings) -> list[Provider]:
    """The layer as a model calls it in inference, against all that could take its place, and a copy of its output."""
    shape, ids, weight = case.shape, case.batches(settings), case.weight(settings)
    eager = inputs.textbook(shape, weight)
    found = [Provider(OURS, inputs.fused(shape, weight), ids), Provider(EAGER, eager, ids)]
    if not settings.quick and COMPILED in case.thresholds:
        torch.compiler.reset()  # a function that has been compiled for too many shapes would run uncompiled
        found.append(Provider(COMPILED, inputs.compiled(eager), ids))
        if settings.gpu:  # max-autotune makes CUDA graphs of its own
            found.append(Provider(AUTOTUNED, inputs.compiled(eager, mode="max-autotune"), ids, sits_out=GRAPH))
            found.append(Provider(FORMULA, inputs.compiled(partial(inputs.formula, weight)), ids))
    found.append(Provider(EMBEDDING, lambda tokens: F.embedding(tokens, weight), ids, same=False))
    return [*found, copy_of(shape, shape.tokens, settings.device)] if shape.tokens > 1 else found


def decode(case: Case, settings: Settings) -> list[Provider]:
    """One token at the end of a cache: the position is an offset, and another one each time."""
    ours, eager = inputs.fused(case.shape, case.weight(settings)), inputs.textbook(case.shape, case.weight(settings))[0]
    encoding = inputs.OffsetPositionalEncoding(case.shape.width)
    steps = [(tokens, 7 + 613 * (i % 8)) for i, tokens in enumerate(case.batches(settings))]
    return [
        Provider(OURS, lambda given: ours(given[0], offset=given[1]), steps),
        Provider(EAGER, lambda given: encoding(eager(given[0]), given[1]), steps),
    ]


def decode_compiled(case: Case, settings: Settings) -> list[Provider]:
    """One token at a position that is in a tensor, as with a static cache. Eager where nothing is to be compiled."""
    weight = case.weight(settings)
    layer, eager = inputs.fused(case.shape, weight), inputs.textbook(case.shape, weight)[0]
    encoding = inputs.OffsetPositionalEncoding(case.shape.width)
    encoding.to(case.shape.dtype)
    steps = [(tokens, torch.tensor([7 + 613 * (i % 8)])) for i, tokens in enumerate(case.batches(settings))]

    def ours(tokens: Tensor, position: Tensor) -> Tensor:
        return layer(tokens, positions=position)  # type: ignore[no-any-return]

    def theirs(tokens: Tensor, position: Tensor) -> Tensor:
        return encoding(eager(tokens), position)  # type: ignore[no-any-return]

    calls: dict[str, Any] = {OURS: ours, EAGER: theirs}
    if not settings.quick:
        torch.compiler.reset()
        calls = {f"{OURS}, torch.compile": inputs.compiled(ours), COMPILED: inputs.compiled(theirs), **calls}
    return [Provider(name, partial(_spread, call), steps) for name, call in calls.items()]


def _spread(call: Callable[..., Tensor], given: tuple[Any, ...]) -> Tensor:
    return call(*given)


P = 0.1  # of dropout
LEARNED, COMPILED_LEARNED = "wte(x) + wpe(arange)", "wte(x) + wpe(arange), torch.compile"

# What a call may do besides, and what it then is compared with.
EXTRAS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": P},
    "encoding_scale": {"encoding_scale": 0.5},
    "no_encoding": {"at_padding": "no_encoding", "padding_idx": 0},
    "no_embedding": {"at_padding": "no_embedding", "padding_idx": 0},
    "zeros": {"at_padding": "zeros", "padding_idx": 0},
}
PLAIN_FORWARD = f"{OURS}, plain"
EXPLICIT = f"{OURS}, explicit positions"


def extra(case: Case, settings: Settings, *, what: str) -> list[Provider]:
    """One of them, against the plain forward. An eighth of the tokens is padding."""
    shape, ids, data = case.shape, case.batches(settings), case.weight(settings).detach()
    out = torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    for tokens in ids:
        tokens[:, ::8] = 0
    return [
        Provider(OURS, lambda tokens: functional.embed(tokens, data, **EXTRAS[what], out=out), ids),
        Provider(PLAIN_FORWARD, lambda tokens: functional.embed(tokens, data, out=out), ids, same=False),
    ]


def offsets(case: Case, settings: Settings) -> list[Provider]:
    """A tensor with an offset for each row, against positions that hold the same."""
    shape, ids, data = case.shape, case.batches(settings), case.weight(settings).detach()
    out = torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    offset = torch.arange(shape.batch) * 17
    places = offset.unsqueeze(1) + torch.arange(shape.length)
    return [
        Provider(OURS, lambda tokens: functional.embed(tokens, data, offset=offset, out=out), ids),
        Provider(EXPLICIT, lambda tokens: functional.embed(tokens, data, positions=places, out=out), ids),
    ]


def floating(case: Case, settings: Settings) -> list[Provider]:
    """Positions with a fraction, against integers."""
    shape, ids, data = case.shape, case.batches(settings), case.weight(settings).detach()
    out = torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    places = torch.arange(shape.length).repeat(shape.batch, 1)
    times = places + 0.37
    return [
        Provider(OURS, lambda tokens: functional.embed(tokens, data, positions=times, out=out), ids),
        Provider(EXPLICIT, lambda tokens: functional.embed(tokens, data, positions=places, out=out), ids, same=False),
    ]


def timesteps(case: Case, settings: Settings) -> list[Provider]:
    """The encoding of diffusion timesteps, as get_timestep_embedding of diffusers composes it."""
    width, half = case.shape.width, case.shape.width // 2
    generator = torch.Generator().manual_seed(3)
    times = [torch.rand(case.shape.length, generator=generator) * 1000 for _ in range(case.calls + 1)]
    convention = Convention(divisor="half", layout="cos_sin", odd="zero")

    def composed(times: Tensor) -> Tensor:
        w = torch.exp(-math.log(10000) * torch.arange(0, half, dtype=torch.float32) / half)
        angle = times[:, None].float() * w[None, :]
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(case.shape.dtype)

    def ours(times: Tensor) -> Tensor:
        return functional.positional_encoding(times, width, convention=convention, dtype=case.shape.dtype)

    return [Provider(OURS, ours, times), Provider(COMPOSED, composed, times)]


def axes(case: Case, settings: Settings) -> list[Provider]:
    """Activations on a grid and the encoding of its two axes, against the same in torch's ops, and a stored table."""
    shape, rows = case.shape, 1 << (case.shape.length.bit_length() - 1) // 2
    given = [torch.randn(shape.batch, shape.length, shape.width).to(shape.dtype) for _ in range(case.calls + 1)]
    places = functional.grid_positions(rows, shape.length // rows).flatten(0, 1)
    stored = functional.positional_encoding_nd(places, shape.width, convention="marian", dtype=shape.dtype)

    def composed(x: Tensor) -> Tensor:
        quarter = shape.width // 4
        w = torch.exp(-math.log(10000) * torch.arange(quarter) / quarter)
        angles = [place[:, None] * w for place in places.float().unbind(-1)]
        return x + torch.cat([part for a in angles for part in (a.sin(), a.cos())], dim=-1).to(x.dtype)

    def ours(x: Tensor) -> Tensor:
        return functional.add_positional_encoding_nd(x, places, convention="marian")

    return [
        Provider(OURS, ours, given),
        Provider(COMPOSED, composed, given),
        Provider("x + a stored table", lambda x: x + stored, given),
    ]


def padded(case: Case, settings: Settings) -> list[Provider]:
    """Positions count real tokens and pads have no encoding: M2M100's two modules. A quarter of each row is padding.

    Where transformers is not installed, the same written in torch's ops.
    """
    shape, batches, weight, pad = case.shape, case.batches(settings), case.weight(settings), 1
    for tokens in batches:
        tokens[:, : shape.length // 4] = pad
    options = {"padding_idx": pad, "count_padding": False, "at_padding": "no_encoding", "convention": "fairseq"}
    layer = inputs.fused(shape, weight, **options)
    rows = functional.positional_encoding(shape.length + 2, shape.width, convention="tensor2tensor", dtype=shape.dtype)
    rows[pad] = 0

    def of_m2m100(tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens, weight, pad) * math.sqrt(shape.width)
        mask = tokens.ne(pad).int()
        positions = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + pad
        return embedded + rows.index_select(0, positions.view(-1)).view(*tokens.shape, -1)

    peer = _m2m100(shape, weight, pad)
    other = Provider(COMPOSED, of_m2m100, batches) if peer is None else Provider(TRANSFORMERS, peer, batches)
    return [Provider(OURS, layer, batches), other]


def _m2m100(shape: Shape, weight: nn.Parameter, pad: int) -> Callable[[Tensor], Tensor] | None:
    """The two modules of transformers on this weight; None where it is not installed."""
    try:
        modeling: Any = importlib.import_module("transformers.models.m2m_100.modeling_m2m_100")
    except ImportError:
        return None
    with torch.device("meta"):
        words = modeling.M2M100ScaledWordEmbedding(shape.vocabulary, shape.width, pad, shape.token_scale)
    words.weight = weight
    places = modeling.M2M100SinusoidalPositionalEmbedding(shape.length + 2, shape.width, pad).to(shape.dtype)
    return lambda tokens: words(tokens) + places(tokens)


def learned(case: Case, settings: Settings) -> list[Provider]:
    """Token + position, both looked up: GPT-2's input layer."""
    shape, ids, weight = case.shape, case.batches(settings), case.weight(settings)
    positions = nn.Parameter(table(dataclasses.replace(shape, vocabulary=shape.length), settings.device))
    position = LearnedPositionalEmbedding(shape.length, shape.width, device="meta")
    position.weight = positions
    layer = inputs.fused(shape, weight, token_scale=1, position=position)

    def eager(tokens: Tensor) -> Tensor:
        return F.embedding(tokens, weight) + F.embedding(torch.arange(tokens.shape[1], device=tokens.device), positions)

    found = [Provider(OURS, layer, ids), Provider(LEARNED, eager, ids)]
    if not settings.quick:
        torch.compiler.reset()
        found.append(Provider(COMPILED_LEARNED, inputs.compiled(eager), ids))
    return found


def with_dropout(case: Case, settings: Settings, *, backward: bool) -> list[Provider]:
    """The layer in training. Each draws numbers of its own, so no two results are the same."""
    shape, ids, weight, grad = case.shape, case.batches(settings), case.weight(settings), gradient(case.shape)
    ours, eager = inputs.fused(shape, weight), nn.Sequential(*inputs.textbook(shape, weight), nn.Dropout(P))
    ours.dropout.p = P
    calls: dict[str, Any] = {OURS: ours, EAGER: eager}
    if not settings.quick:
        torch.compiler.reset()
        calls[COMPILED] = inputs.compiled(eager)
    return [
        Provider(name, _trained(weight, layer.train(), grad) if backward else layer.train(), ids, same=False)
        for name, layer in calls.items()
    ]


def counted(case: Case, settings: Settings, *, decoder: bool = False) -> list[Provider]:
    """Positions of real tokens; a quarter of each row, on the left, is padding."""
    batches, pad = case.batches(settings), 1
    for tokens in batches:
        tokens[:, : case.shape.length // 4] = pad
    if decoder:
        masks = [(tokens != pad).long() for tokens in batches]

        def of_generate(mask: Tensor) -> Tensor:
            return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)

        return [
            Provider(OURS, lambda mask: functional.positions_from_padding(mask, 0), masks),
            Provider(COMPOSED, of_generate, masks),
        ]

    def of_m2m100(tokens: Tensor) -> Tensor:
        mask = tokens.ne(pad).int()
        return ((torch.cumsum(mask, dim=1).type_as(mask) + 0) * mask).long() + pad

    options = {"first_position": pad + 1, "padding_position": pad}
    return [
        Provider(OURS, lambda tokens: functional.positions_from_padding(tokens, pad, **options), batches),
        Provider(COMPOSED, of_m2m100, batches),
    ]


def packed(case: Case, settings: Settings, *, by_ids: bool = False) -> list[Provider]:
    """Positions of sequences of 1 to 200 tokens behind one another."""
    shape, generator = case.shape, torch.Generator().manual_seed(5)
    inputs, total = [], shape.length
    for _ in range(case.calls + 1):
        ends = torch.randint(1, 200, (total,), generator=generator).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[ends < total], ends.new_tensor([total])])
        numbers = torch.repeat_interleave(starts.diff())
        inputs.append(numbers.expand(shape.batch, total).contiguous() if by_ids else starts)
    if by_ids:

        def by_maximum(ids: Tensor) -> Tensor:
            index, begins = torch.arange(total), torch.ones_like(ids, dtype=torch.bool)
            begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
            return index - torch.where(begins, index, 0).cummax(-1)[0]

        return [
            Provider(OURS, functional.positions_from_sequence_ids, inputs),
            Provider(COMPOSED, by_maximum, inputs),
        ]

    def by_repetition(starts: Tensor) -> Tensor:
        return torch.arange(total) - torch.repeat_interleave(starts[:-1], starts.diff())

    return [
        Provider(OURS, lambda starts: functional.positions_from_cu_seqlens(starts, total), inputs),
        Provider(COMPOSED, by_repetition, inputs),
    ]


def strided(case: Case, settings: Settings) -> list[Provider]:
    """Ids that are a transposed view: what finding them costs."""
    ids, layer = case.batches(settings), inputs.fused(case.shape, case.weight(settings))
    views = [tokens.t().contiguous().t() for tokens in ids]
    return [Provider(f"{OURS}, strided ids", layer, views), Provider(OURS, layer, ids)]


def large_copy(case: Case, settings: Settings) -> list[Provider]:
    """As much as makes nothing else count: the bandwidth of the device's memory."""
    source = case.weight(settings).detach()
    return [Provider(COPY, torch.empty_like(source).copy_, [source])]


def _array(tensor: Tensor) -> Any:
    """A view of a tensor for `_C.embed_raw`: NumPy has no bfloat16, so its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def kernel(case: Case, settings: Settings, *, precision: str) -> list[Provider]:
    """The kernel alone, for each instruction set: no torch call, no allocation."""
    shape, ids, weight = case.shape, case.batches(settings), table(case.shape)
    out = torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    weight_array, out_array = _array(weight), _array(out)
    rest = (0, shape.token_scale, *CONVENTIONS["vaswani"].spec(precision))
    usual = _C.active_isa()

    def call(isa: str, tokens: Tensor) -> Tensor:
        _C.force_isa(isa)
        _C.embed_raw(weight_array, tokens.numpy(), out_array, *rest)
        _C.force_isa(usual)
        return out

    found = [Provider(isa, partial(call, isa), ids) for isa in _C.available_isas()]
    return [*found, dataclasses.replace(copy_of(shape, shape.tokens, out=out), threads=1)]


# ---- backward --------------------------------------------------------------------------------------------------------


def _trained(weight: Tensor, layer: Callable[[Tensor], Tensor], grad: Tensor) -> Callable[[Tensor], Any]:
    """Forward and backward to the weight's gradient; the old one is dropped inside every call, by all alike."""

    def call(tokens: Tensor) -> Tensor | None:
        weight.grad = None
        layer(tokens).backward(grad)  # type: ignore[no-untyped-call]
        return weight.grad

    return call


def step(case: Case, settings: Settings) -> list[Provider]:
    """A training step, without the optimiser."""
    shape, ids, weight, grad = case.shape, case.batches(settings), case.weight(settings), gradient(case.shape)
    eager = inputs.textbook(shape, weight)
    calls = {OURS: inputs.fused(shape, weight), EAGER: eager}
    if not settings.quick:
        calls[COMPILED] = inputs.compiled(eager)
    found = [Provider(name, _trained(weight, layer, grad), ids) for name, layer in calls.items()]
    return [*found, copy_of(shape, (3 * shape.tokens + shape.vocabulary) // 2)]


def backward(case: Case, settings: Settings) -> list[Provider]:
    """The gradient of the weight alone, against what eager's backward runs: that of the product, then of the lookup."""
    shape, ids, grad = case.shape, case.batches(settings), gradient(case.shape, settings.device)
    rows, scale = shape.vocabulary, shape.token_scale
    ours, theirs = torch.ops.posenc_ext._embed_bwd.default, torch.ops.aten.embedding_dense_backward.default
    plain = Provider("embedding_dense_backward(g)", lambda ids: theirs(grad, ids, rows, -1, False), ids, same=False)
    return [
        Provider(OURS, lambda ids: ours(grad, ids, rows, scale, -1, False), ids),
        Provider(DENSE_BACKWARD, lambda ids: theirs(grad * scale, ids, rows, -1, False), ids),
        *([plain] if settings.gpu else []),
        copy_of(shape, (shape.tokens + rows) // 2, settings.device),
    ]


def repeated(case: Case, settings: Settings) -> list[Provider]:
    """One id in half of all places: all those gradients go to one row, so they cannot be shared out by rows."""
    ours, theirs, *_ = backward(case, settings)
    ids = dataclasses.replace(case, ids="uniform").batches(settings)
    return [
        dataclasses.replace(ours, name=f"{OURS}, half equal"),
        dataclasses.replace(ours, name=UNIFORM, inputs=ids, same=False),
        dataclasses.replace(theirs, name=f"{DENSE_BACKWARD}, half equal"),
    ]


def _sparse_gradient(shape: Shape, grad: Tensor, ids: Tensor) -> Tensor:
    op, size = torch.ops.posenc_ext._embed_bwd_sparse.default, (shape.vocabulary, shape.width)
    found, values = op(grad, ids, shape.vocabulary, shape.token_scale, -1, False)
    return torch.sparse_coo_tensor(found.unsqueeze(0), values, size, is_coalesced=True, check_invariants=False)


def sparse_step(case: Case, settings: Settings) -> list[Provider]:
    """Forward, sparse backward, coalesced gradient, SparseAdam: a whole step of a few rows in a large table.

    The baseline adds no encoding, so the fused layer does all of its work and more. Neither can be faster than the
    optimiser's own work on a gradient that was there before.
    """
    shape, ids, grad = case.shape, case.batches(settings), gradient(case.shape)
    stepping = partial(_stepping, torch.optim.SparseAdam)
    ours, theirs, third = (nn.Parameter(table(shape).clone()) for _ in range(3))
    layer, lookup = inputs.fused(shape, ours, sparse=True), nn.Embedding(shape.vocabulary, shape.width, sparse=True)
    lookup.weight = theirs
    ready = [_sparse_gradient(shape, grad, tokens) for tokens in ids]
    scaled = _trained(theirs, lambda tokens: lookup(tokens) * shape.token_scale, grad)
    return [
        Provider(OURS, stepping(ours, _trained(ours, layer, grad)), ids),
        Provider(TORCH_SPARSE, stepping(theirs, scaled), ids),
        Provider("SparseAdam's step alone", stepping(third, lambda given: given), ready, same=False),
    ]


def _stepping(optimiser: Any, weight: nn.Parameter, gradient_of: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """A step of the optimiser with the gradient of a batch."""
    adam = optimiser([weight], lr=1e-3)

    def call(given: Any) -> Tensor:
        found = gradient_of(given)
        weight.grad = found.coalesce() if found.is_sparse else found
        adam.step()
        return weight

    return call


def optimised(case: Case, settings: Settings, *, sparse: bool) -> list[Provider]:
    """A whole training step: forward with dropout, backward, optimiser. Everyone trains a table of its own."""
    shape, ids, grad = case.shape, case.batches(settings), gradient(case.shape)
    adam: Any = torch.optim.SparseAdam if sparse else partial(torch.optim.Adam, fused=True)
    ours, eager, compiled, alone = (nn.Parameter(table(shape).clone()) for _ in range(4))
    layer = inputs.fused(shape, ours, sparse=sparse)
    layer.dropout.p = P

    def textbook(weight: nn.Parameter) -> nn.Module:
        embeddings: Any
        embeddings, encoding = inputs.textbook(shape, weight)
        embeddings.lut.sparse = sparse
        return nn.Sequential(embeddings, encoding, nn.Dropout(P)).train()

    calls: dict[str, tuple[nn.Parameter, Any]] = {OURS: (ours, layer.train()), EAGER: (eager, textbook(eager))}
    if not settings.quick and not sparse:  # no compiled graph has sparse gradients
        torch.compiler.reset()
        calls[COMPILED] = compiled, inputs.compiled(textbook(compiled))
    found = [
        Provider(name, _stepping(adam, weight, _trained(weight, call, grad)), ids, same=False)
        for name, (weight, call) in calls.items()
    ]
    if sparse:
        ready = [_sparse_gradient(shape, grad, tokens) for tokens in ids]
    else:  # Adam walks over the whole table, whatever the batch
        ready = [torch.ops.posenc_ext._embed_bwd.default(grad, ids[0], shape.vocabulary, shape.token_scale, -1, False)]
    name = f"{'SparseAdam' if sparse else 'Adam'}'s step alone"
    return [*found, Provider(name, _stepping(adam, alone, lambda given: given), ready, same=False)]


def sparse_backward(case: Case, settings: Settings) -> list[Provider]:
    """The coalesced sparse gradient alone, without the step."""
    shape, ids, grad = case.shape, case.batches(settings), gradient(case.shape)
    rows, scale, op = shape.vocabulary, shape.token_scale, torch.ops.aten.embedding_backward.default
    name = "embedding_sparse_backward(g * scale).coalesce()"
    return [
        Provider(OURS, partial(_sparse_gradient, shape, grad), ids),
        Provider(name, lambda tokens: op(grad * scale, tokens, rows, -1, False, True).coalesce(), ids),
    ]


# ---- bytes: see `Shape` ----------------------------------------------------------------------------------------------


def sparse_bytes(shape: Shape) -> int:
    """A backward that writes the rows that were looked up."""
    return shape.backward_bytes(shape.distinct)


def sparse_step_bytes(shape: Shape) -> int:
    """SparseAdam reads the gradient, and reads and writes the weight and both moments."""
    return shape.forward_bytes() + sparse_bytes(shape) + shape.row_bytes(7 * shape.distinct)


def step_bytes(shape: Shape) -> int:
    """Forward and backward."""
    return shape.forward_bytes() + shape.backward_bytes()


def adam_bytes(shape: Shape) -> int:
    """Adam does so with the whole table."""
    return step_bytes(shape) + shape.row_bytes(7 * shape.vocabulary)


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def swept(case: Case, settings: Settings, *, backward: bool, threads: int | None) -> list[Provider]:
    """A point of a sweep: the layer, the textbook's, a bare lookup, and the copy that is the limit."""
    shape, ids, weight = case.shape, case.batches(settings), case.weight(settings)
    calls: dict[str, Callable[[Tensor], Any]] = {OURS: inputs.fused(shape, weight)}
    calls |= {EAGER: inputs.textbook(shape, weight), EMBEDDING: lambda tokens: F.embedding(tokens, weight)}
    rows = shape.tokens
    if backward:
        grad, rows = gradient(shape), (3 * shape.tokens + shape.vocabulary) // 2
        calls = {name: _trained(weight, call, grad) for name, call in calls.items()}
    found = [Provider(name, call, ids, same=name != EMBEDDING) for name, call in calls.items()]
    return [dataclasses.replace(provider, threads=threads) for provider in (*found, copy_of(shape, rows))]


def sweep_points(axis: str) -> dict[int | str, Shape]:
    """Where each sweep measures."""
    base = Shape(4, 512, 512)
    if axis == "tokens":
        return {n: Shape(1, n, 512) for n in (1, 8, 64, 512, 4096, 32768)}
    if axis == "width":
        return {n: dataclasses.replace(base, width=n) for n in (64, 128, 256, 512, 1024, 2048)}
    if axis == "vocabulary":
        return {n: dataclasses.replace(base, vocabulary=n) for n in (1000, 4000, 16000, 64000, 128000)}
    if axis == "dtype":
        return {name: base.of(dtype) for dtype, name in inputs.TYPES.items()}
    if axis == "ids":
        return dict.fromkeys(inputs.IDS, base)
    powers = (2**i for i in range(10))
    return {n: Shape(16, 512, 512) for n in powers if n <= (os.cpu_count() or 1)}


SWEEPS = ("tokens", "width", "vocabulary", "ids", "dtype", "threads", "length")


def sweep_cases() -> Iterator[Case]:
    """How cost grows: forward and training along each axis, and memory along the length."""
    for axis, backward in itertools.product(SWEEPS[:-1], (False, True)):
        task = "step" if backward else "forward"
        for at, shape in sweep_points(axis).items():
            threads = int(at) if axis == "threads" else None
            yield Case(
                f"sweep.{axis}.{task}.{at}",
                f"{'forward + backward' if backward else 'forward'} by {axis}",
                partial(swept, backward=backward, threads=threads),
                shape,
                bytes_moved=step_bytes if backward else Shape.forward_bytes,
                group=POOLED,
                ids=str(at) if axis == "ids" else "uniform",
                tolerance=None if shape.dtype == FP32 else 3e-2,  # a hot row's gradient has many rounded terms
                calls=4 if backward else max(4, min(500, 2**14 // shape.tokens)),
                grad=backward,
                axis=axis,
                at=at,
            )
    yield Case("sweep.length.memory", "memory by length", probe=memory.by_length, axis="length")


# ---- threads ---------------------------------------------------------------------------------------------------------


def by_threads(build: Callable[[Case, Settings], list[Provider]], case: Case, settings: Settings) -> list[Provider]:
    """What another kind of case measures, and its copy: with all threads, and with one."""
    found = []
    for provider in build(case, settings):
        if provider.name in (OURS, COPY):
            many, one = f"{provider.name}, {settings.threads} threads", f"{provider.name}, 1 thread"
            found.append(dataclasses.replace(provider, name=many, threads=settings.threads))
            found.append(dataclasses.replace(provider, name=one, threads=1, speedup_over=many))
    return found


# ---- the lists -------------------------------------------------------------------------------------------------------


def cpu_cases() -> Iterator[Case]:
    """The cases of the CPU."""
    batched, single = Shape(16, 512, 512), Shape(1, 2048, 1024)  # a batch shares the encoding of a position, or cannot
    shapes, text = (batched, single, batched.of(BF16), single.of(BF16)), batched.text
    out, pooled = partial(Case, group=OUT), partial(Case, group=POOLED)

    for shape, most in zip(shapes, (0.90, 1.10, 1.20, 2.0), strict=True):
        title = f"forward {shape.text}, out="
        yield out(f"forward.out.{shape.name}", title, into_out, shape, {INDEX_SELECT: most})
    for kind in ("alike", "unlike"):
        name, title = f"forward.{kind}.{batched.name}", f"forward {text}, positions of rows {kind}, out="
        with_positions = partial(into_out, positions=kind), batched, {INDEX_SELECT: 1.0 if kind == "alike" else 1.30}
        yield out(name, title, *with_positions, bytes_moved=partial(Shape.forward_bytes, positions=True))
    for shape in shapes:
        title = f"forward {shape.text}"
        yield pooled(f"forward.module.{shape.name}", title, layers, shape, {EAGER: 0.40, COMPILED: 0.90})

    for dtype, (batch, length) in itertools.product(
        (FP32, BF16), ((2, 128), (7, 128), (4, 256), (2, 512), (7, 512), (16, 512), (32, 512))
    ):
        shape = Shape(batch, length, 512, dtype)
        size = shape.row_bytes(shape.tokens) >> 20
        title, limit = f"forward {shape.text}, then LayerNorm", 1.25 if size < 1 else 1.1 if size < 4 else 1.0
        compiled = {COMPILED: None} if (batch, length) == (16, 512) else {}
        yield pooled(f"forward.normed.{shape.name}", title, normed, shape, {INDEX_SELECT: limit, **compiled})

    for shape, most in ((batched, 1.5), (batched.of(BF16), 2.0)):
        for what in EXTRAS:
            title, limit = f"forward {shape.text}, {what}, out=", {PLAIN_FORWARD: most if what == "dropout" else 1.15}
            yield out(f"forward.{what}.{shape.name}", title, partial(extra, what=what), shape, limit)
        title = f"forward {shape.text}, an offset for each row, out="
        yield out(f"forward.offsets.{shape.name}", title, offsets, shape, {EXPLICIT: 1.0})
        title = f"forward {shape.text}, floating positions, out="
        yield out(f"forward.floating.{shape.name}", title, floating, shape, {EXPLICIT: 1.25})
        title = f"forward {shape.text}, padded, as M2M100"
        yield pooled(f"forward.padded.{shape.name}", title, padded, shape, {COMPOSED: 0.25, TRANSFORMERS: 0.25})
        title, limits = f"forward {shape.text}, token + learned table", {LEARNED: 0.50, COMPILED_LEARNED: 0.90}
        yield pooled(f"forward.learned.{shape.name}", title, learned, shape, limits)
        for name, title, back, limits in (
            ("dropout.forward", f"forward {shape.text}, dropout {P}", False, (0.06, 0.08)),
            ("dropout.step", f"forward + backward {shape.text}, dropout {P}", True, (0.15, 0.10)),
        ):
            providers, limit = partial(with_dropout, backward=back), dict(zip((EAGER, COMPILED), limits, strict=True))
            yield pooled(f"{name}.{shape.name}", title, providers, shape, limit, grad=True, calls=4)

    dense = partial(pooled, shape=batched, calls=4, bytes_moved=Shape.backward_bytes)
    more: dict[str, Any] = {"thresholds": {EAGER: 0.60, COMPILED: 0.90}, "grad": True}
    more["bytes_moved"] = step_bytes
    yield dense("train.step", f"forward + backward {text}", step, **more)
    yield dense("train.backward", f"backward alone {text}", backward, thresholds={DENSE_BACKWARD: 0.65})
    more = {"thresholds": {UNIFORM: 1.5}, "ids": "half-hot"}
    yield dense("train.repeated", "backward, half of all ids equal", repeated, **more)

    few, title = Shape(1, 512, 512), "sparse: 512 tokens, backward, SparseAdam step"
    more = {"tolerance": 1e-6, "calls": 4, "grad": True}  # a step moves few rows of the table, and those little
    yield pooled("sparse.step", title, sparse_step, few, {TORCH_SPARSE: 0.80}, sparse_step_bytes, **more)
    more = {"calls": 4, "grad": True}
    title = f"train step {text}, dropout {P}, Adam"
    yield pooled("train.adam", title, partial(optimised, sparse=False), batched, {}, adam_bytes, **more)
    title = f"train step {few.text}, dropout {P}, SparseAdam"
    yield pooled("train.sparse_adam", title, partial(optimised, sparse=True), few, {}, sparse_step_bytes, **more)
    title = "sparse: the coalesced gradient alone"
    yield pooled("sparse.backward", title, sparse_backward, few, {}, sparse_bytes, calls=32)

    times = Shape(1, 4096, 320)
    for shape in (times, times.of(BF16)):
        title = f"timestep embedding {shape.text}"
        yield pooled(f"timesteps.{shape.name}", title, timesteps, shape, {COMPOSED: 0.25})
    for shape in (Shape(8, 1024, 512), Shape(8, 1024, 512, BF16)):
        yield pooled(f"axes.{shape.name}", f"two axes, added to {shape.text}", axes, shape, {COMPOSED: 1.0})

    one = partial(Case, thresholds={EAGER: 0.40}, bytes_moved=lambda shape: None, calls=1000)
    yield one("token.call", "one token, no grad", layers)
    yield one("token.decode", "one token at an offset, no grad", decode)
    yield one("token.compiled", "one token at a position in a tensor, compiled", decode_compiled, thresholds={})
    count = partial(Case, thresholds={COMPOSED: 1.0}, bytes_moved=lambda shape: 16 * shape.tokens, calls=64)
    many, long = Shape(16, 512, 1), Shape(1, 8192, 1)
    yield count("positions.padding", "positions of real tokens [16, 512], as M2M100", counted, many)
    yield count("positions.mask", "positions by attention mask [16, 512]", partial(counted, decoder=True), many)
    yield count("positions.step", "positions of one token [16, 1], as M2M100", counted, Shape(16, 1, 1))
    yield count("positions.packed", "positions by cu_seqlens [8192]", packed, long)
    yield count("positions.ids", "positions by sequence ids [16, 512]", partial(packed, by_ids=True), many)
    for name, title, probe, key, most in (
        ("memory.forward", f"memory of a forward {memory.SHAPE.text}", memory.forward, OURS, 16.0),
        ("accuracy.exact", "error of precision exact", accuracy.exact, "exact", 2.5e-7),
        ("accuracy.reference", "error of precision reference", accuracy.reference_angles, "reference", 1.5e-7),
    ):
        yield Case(name, title, thresholds={key: most}, probe=probe)
    yield Case("accuracy.positions", "largest error by position, width 512", probe=accuracy.by_position)

    threads = partial(Case, thresholds={f"{OURS}, 1 thread": 1.6}, calls=4, threads=2)
    for shape in (batched, batched.of(BF16), Shape(32, 512, 512)):
        title = f"speed-up by threads: forward {shape.text}, out="
        yield threads(f"threads.forward.{shape.name}", title, partial(by_threads, into_out), shape, group=OUT)
    title, moved = f"speed-up by threads: backward {text}", Shape.backward_bytes
    providers = partial(by_threads, backward)
    yield threads("threads.backward", title, providers, batched, bytes_moved=moved, group=POOLED)


def kernel_cases() -> Iterator[Case]:
    """The kernel of the forward on one thread; first on a table small enough for the second-level cache."""
    cached, batched, single = Shape(1, 64, 512, vocabulary=64), Shape(16, 512, 512), Shape(1, 2048, 1024)
    shapes = (cached, batched, single, cached.of(BF16), single.of(BF16))
    for shape, precision in itertools.product(shapes, ("reference", "exact")):
        name, title = f"kernel.{precision}.{shape.name}", f"{precision}, {shape.text}"
        yield Case(name, title, partial(kernel, precision=precision), shape, group=KERNEL)


def gpu_cases(tiny: bool) -> Iterator[Case]:
    """The cases of a GPU, the most important ones first; `tiny` makes shapes that a CPU gets through in no time."""
    small, large, long, one, apart = (32, 512, 512), (8, 2048, 1024), (1, 2**17, 1024), (256, 1, 4096), (32, 2048, 1024)
    if tiny:
        small, large, long, one, apart = (2, 8, 32), (2, 16, 32), (1, 64, 32), (4, 1, 64), (2, 16, 32)
    divisor = 1000 if tiny else 1
    cold = partial(Case, group=DEVICE, calls=12, ways=(COLD,))
    size = Shape(*long, vocabulary=long[1])
    yield cold("copy.large", "copy of 512 MiB", large_copy, size, {}, lambda shape: shape.row_bytes(2 * shape.tokens))

    def forward(sizes: tuple[int, int, int], share: float | None = None, **more: Any) -> Iterator[Case]:
        thresholds = {SHARE: share, EAGER: 1 / 2.5, COMPILED: 1.0, AUTOTUNED: 1.0, FORMULA: 1.0}
        for shape in (Shape(*sizes), Shape(*sizes, BF16)):
            yield cold(f"forward.{shape.name}", f"forward {shape.text}", layers, shape, thresholds, **more)

    def gradients(name: str, shape: Shape, ids: str, most: float) -> Case:
        title = f"backward {shape.text}, {shape.vocabulary} rows, {ids} ids"
        tolerance = 1e-4 if shape.dtype == FP32 else 3e-2  # torch adds rounded terms, which a hot row has many of
        thresholds, moved = {SHARE: None, DENSE_BACKWARD: most}, Shape.backward_bytes
        return cold(name, title, backward, shape, thresholds, moved, ids=ids, tolerance=tolerance)

    yield from forward(large, 0.90)
    yield from forward(small)
    # The rows of 64 calls are together larger than the cache, and take far more than a graph's launch.
    yield from forward(one, calls=64, ways=(CALLED, GRAPH))
    for rows, ids, dtype in itertools.product((32_000 // divisor, 256_000 // divisor), inputs.IDS, (FP32, BF16)):
        shape = Shape(*small, dtype, rows)
        yield gradients(f"backward.{ids}.{rows}.{shape.name}", shape, ids, 1 / 1.5)
    yield from forward(long, 0.90)
    shape = Shape(*apart, BF16)
    yield cold("forward.strided", f"forward {shape.text}, strided ids", strided, shape, {OURS: 1.3})
    for tokens in (512, 4096, 65_536):  # few tokens leave most of the time to rows that nobody looked up
        shape = Shape(1, tokens // 64 if tiny else tokens, small[2], vocabulary=32_000 // divisor)
        yield gradients(f"backward.tokens.{shape.length}", shape, "uniform", 1.2)
