"""What training adds: the gradient of the weight, dense and sparse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import traffic
from .contenders import (
    BATCHED,
    COMPILED,
    EAGER,
    OURS,
    Shape,
    agree,
    compiled,
    fused,
    gradient,
    id_batches,
    stretches,
    table,
    textbook,
)
from .forward import missing
from .rows import Row
from .settings import POOLED, Settings
from .timing import COPY, Contender, compare, run_rounds

# Sums of many fp32 gradients in another order.
TOLERANCE = 1e-4

SPARSE = Shape(1, 512, 512)


def step(measure: str, settings: Settings, mode: str) -> list[Row]:
    """Forward and backward to the weight's gradient; the old one is dropped inside every timed call, by all alike."""
    shape = BATCHED
    weight, ids, grad = nn.Parameter(table(shape)), id_batches(shape), gradient(shape)
    eager = textbook(shape, weight)
    calls = {OURS: _trained(fused(shape, weight), weight, grad), EAGER: _trained(eager, weight, grad)}
    failure = ""
    if not settings.quick:
        faster, failure = compiled(eager, lambda layer: _trained(layer, weight, grad)(ids[0]))
        if faster is not None:
            calls[COMPILED] = _trained(faster, weight, grad)
    agree([_gradient_after(call, ids[0], weight) for call in calls.values()], TOLERANCE)
    moved = traffic.forward(shape.tokens, shape.width, shape.element)
    moved += traffic.backward(shape.tokens, shape.vocabulary, shape.width, shape.element)
    pieces = stretches(weight, (3 * shape.tokens + shape.vocabulary) // 2 * shape.width)
    contenders = [Contender(name, call, ids) for name, call in calls.items()]
    timed = run_rounds([*contenders, Contender(COPY, Tensor.clone, pieces)], settings, calls=len(ids) // 2)
    floors = {EAGER: 0.60, COMPILED: 0.90} if mode == POOLED else {}
    rows = compare(
        measure,
        mode,
        timed,
        floors=floors,
        bytes_moved=moved,
        copy_bytes=traffic.copy(pieces[0].numel(), shape.element),
    )
    return [*rows, *missing(measure, mode, failure, floors)]


def _trained(layer: Callable[[Tensor], Tensor], weight: nn.Parameter, grad: Tensor) -> Callable[[Tensor], None]:
    def call(tokens: Tensor) -> None:
        weight.grad = None
        layer(tokens).backward(grad)  # type: ignore[no-untyped-call]

    return call


def _gradient_after(call: Callable[[Tensor], None], tokens: Tensor, weight: nn.Parameter) -> Tensor:
    call(tokens)
    assert weight.grad is not None
    return weight.grad


DENSE_BACKWARD = "embedding_dense_backward(g * scale)"


def backward_op(grad: Tensor, shape: Shape) -> Callable[[Tensor], Tensor]:
    """Our backward alone."""
    op = torch.ops.posenc_ext._embed_bwd.default
    rows, scale = shape.vocabulary, shape.token_scale
    return lambda tokens: op(grad, tokens, rows, scale, -1, False)


def torch_backward_op(grad: Tensor, shape: Shape) -> Callable[[Tensor], Tensor]:
    """What eager's backward runs: the gradient of the product, then that of the lookup."""
    op = torch.ops.aten.embedding_dense_backward.default
    rows, scale = shape.vocabulary, shape.token_scale
    return lambda tokens: op(grad * scale, tokens, rows, -1, False)


def backward(measure: str, settings: Settings, mode: str) -> list[Row]:
    """The backward alone, against torch's."""
    shape = BATCHED
    ids, grad, weight = id_batches(shape), gradient(shape), table(shape)
    ours, theirs = backward_op(grad, shape), torch_backward_op(grad, shape)
    agree([ours(ids[0]), theirs(ids[0])], TOLERANCE)
    pieces = stretches(weight, (shape.tokens + shape.vocabulary) // 2 * shape.width)
    timed = run_rounds(
        [Contender(OURS, ours, ids), Contender(DENSE_BACKWARD, theirs, ids), Contender(COPY, Tensor.clone, pieces)],
        settings,
        calls=len(ids) // 2,
    )
    return compare(
        measure,
        mode,
        timed,
        floors={DENSE_BACKWARD: 0.65} if mode == POOLED else {},
        bytes_moved=traffic.backward(shape.tokens, shape.vocabulary, shape.width, shape.element),
        copy_bytes=traffic.copy(pieces[0].numel(), shape.element),
    )


def half_equal(ids: list[Tensor]) -> list[Tensor]:
    """The same batches, with one id in a random half of all places."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for tokens in ids:
        chosen = torch.randperm(tokens.numel(), generator=generator)[: tokens.numel() // 2]
        flat = tokens.flatten().clone()
        flat[chosen] = flat[0].item()
        result.append(flat.view_as(tokens))
    return result


def repeated(measure: str, settings: Settings, mode: str) -> list[Row]:
    """One id in half of all places: all those gradients go to one row, so they cannot be shared out by rows."""
    shape = BATCHED
    ids, grad = id_batches(shape), gradient(shape)
    ours, theirs = backward_op(grad, shape), torch_backward_op(grad, shape)
    skewed = half_equal(ids)
    # Four thousand numbers are summed into one row: the tolerance is that of fp32 sums of that length.
    agree([ours(skewed[0]), theirs(skewed[0])], 5e-3)
    uniform = f"{OURS}, uniform ids"
    timed = run_rounds(
        [
            Contender(f"{OURS}, half equal", ours, skewed),
            Contender(uniform, ours, ids),
            Contender(f"{DENSE_BACKWARD}, half equal", theirs, skewed),
        ],
        settings,
        calls=len(ids) // 2,
    )
    return compare(
        measure,
        mode,
        timed,
        floors={uniform: 1.5} if mode == POOLED else {},
        bytes_moved=traffic.backward(shape.tokens, shape.vocabulary, shape.width, shape.element),
    )


TORCH_SPARSE = "nn.Embedding(sparse=True) * scale"
STEP_ALONE = "SparseAdam's step alone"


def _sparse_gradient(ids: Tensor, grad: Tensor, shape: Shape) -> Tensor:
    """A coalesced gradient of the table."""
    rows, values = torch.ops.posenc_ext._embed_bwd_sparse(grad, ids, shape.vocabulary, shape.token_scale, -1, False)
    size = (shape.vocabulary, shape.width)
    return torch.sparse_coo_tensor(rows[None], values, size, is_coalesced=True, check_invariants=False)


def sparse_step(measure: str, settings: Settings, mode: str) -> list[Row]:
    """Forward, sparse backward, coalesced gradient, SparseAdam: a whole step of a few rows in a large table.

    The contender adds no encoding, so the fused layer does all of its work and more.
    """
    shape = SPARSE
    ids, grad = id_batches(shape), gradient(shape)
    ours = nn.Parameter(table(shape).clone())
    embedding = nn.Embedding(shape.vocabulary, shape.width, sparse=True, _weight=table(shape).clone())
    theirs = embedding.weight
    scale = shape.token_scale
    optimisers: dict[int, Any] = {id(weight): torch.optim.SparseAdam([weight], lr=1e-3) for weight in (ours, theirs)}
    layer = fused(shape, ours, sparse=True)

    def run(weight: Tensor, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        optimiser = optimisers[id(weight)]

        def call(tokens: Tensor) -> None:
            weight.grad = None
            forward(tokens).backward(grad)  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            weight.grad = weight.grad.coalesce()
            optimiser.step()

        return call

    # What neither can be faster than: the optimiser's own work on a gradient that was there before.
    at_hand = nn.Parameter(table(shape).clone())
    step_alone = torch.optim.SparseAdam([at_hand], lr=1e-3)
    ready = {id(tokens): _sparse_gradient(tokens, grad, shape) for tokens in ids}

    def take_step(tokens: Tensor) -> None:
        at_hand.grad = ready[id(tokens)]
        step_alone.step()

    contenders = [
        Contender(OURS, run(ours, layer), ids),
        Contender(TORCH_SPARSE, run(theirs, lambda tokens: embedding(tokens) * scale), ids),
    ]
    for contender in contenders:
        contender.call(ids[0])
    agree([ours[ids[0]], theirs[ids[0]]], TOLERANCE)
    contenders.append(Contender(STEP_ALONE, take_step, ids))
    timed = run_rounds(contenders, settings, calls=len(ids) // 2)
    distinct = _distinct(ids)
    moved = traffic.forward(shape.tokens, shape.width, shape.element)
    moved += traffic.backward(shape.tokens, distinct, shape.width, shape.element)
    moved += traffic.sparse_adam(distinct, shape.width, shape.element)
    return compare(measure, mode, timed, floors={TORCH_SPARSE: 0.80} if mode == POOLED else {}, bytes_moved=moved)


def sparse_backward(measure: str, settings: Settings, mode: str) -> list[Row]:
    """The coalesced sparse gradient alone, without the step."""
    shape = SPARSE
    ids, grad = id_batches(shape), gradient(shape)
    rows, scale, width = shape.vocabulary, shape.token_scale, shape.width
    op, torch_op = torch.ops.posenc_ext._embed_bwd_sparse.default, torch.ops.aten.embedding_backward.default

    def ours(tokens: Tensor) -> Tensor:
        found, values = op(grad, tokens, rows, scale, -1, False)
        return torch.sparse_coo_tensor(
            found.unsqueeze(0), values, (rows, width), is_coalesced=True, check_invariants=False
        )

    def theirs(tokens: Tensor) -> Tensor:
        result: Tensor = torch_op(grad * scale, tokens, rows, -1, False, True)
        return result.coalesce()

    agree([ours(ids[0]), theirs(ids[0])], TOLERANCE)
    name = "embedding_sparse_backward(g * scale).coalesce()"
    timed = run_rounds([Contender(OURS, ours, ids), Contender(name, theirs, ids)], settings, calls=4 * len(ids))
    moved = traffic.backward(shape.tokens, _distinct(ids), width, shape.element)
    return compare(measure, mode, timed, bytes_moved=moved)


def _distinct(ids: list[Tensor]) -> int:
    return math.ceil(sum(len(set(tokens.flatten().tolist())) for tokens in ids) / len(ids))
