"""The forward pass: into a given output, and as a module that allocates its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc_ext import functional

from . import traffic
from .contenders import COMPILED, EAGER, OURS, Shape, agree, compiled, fused, id_batches, stretches, table, textbook
from .rows import Row
from .settings import OUT, POOLED, Settings
from .timing import COPY, Contender, compare, run_rounds

INDEX_SELECT = "torch.index_select(out=)"

# What a textbook layer may be off by: its fp32 table rounds some frequencies otherwise, which turns the last positions
# by up to 2048 * 2^-24; in bf16 it rounds three times.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


def into_out(measure: str, shape: Shape, floor: float, settings: Settings, *, positions: bool = False) -> list[Row]:
    """Everything, against the gather alone: what the scale, the waves and the sum cost on top of moving the rows."""
    weight, ids = table(shape), id_batches(shape)
    out = torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    flat = out.view(-1, shape.width)
    # All rows of positions are full and alike, but nobody tells the kernel: it makes the waves of every token anew.
    places = torch.arange(shape.length).repeat(shape.batch, 1) if positions else None

    def ours(tokens: Tensor) -> None:
        functional.embed(tokens, weight, positions=places, out=out)

    def gather(tokens: Tensor) -> None:
        torch.index_select(weight, 0, tokens, out=flat)

    def copy(piece: Tensor) -> None:
        flat.view(-1).copy_(piece)

    ours(ids[0])
    waves = functional.positional_encoding(shape.length, shape.width)
    agree([out, (weight[ids[0]].float() * shape.token_scale + waves).to(shape.dtype)], TOLERANCE[shape.dtype])
    timed = run_rounds(
        [
            Contender(OURS, ours, ids),
            Contender(INDEX_SELECT, gather, [tokens.view(-1) for tokens in ids]),
            Contender(COPY, copy, stretches(weight, out.numel())),
        ],
        settings,
        calls=len(ids),
    )
    return compare(
        measure,
        OUT,
        timed,
        floors={INDEX_SELECT: floor},
        bytes_moved=traffic.forward(shape.tokens, shape.width, shape.element, positions),
        copy_bytes=traffic.copy(out.numel(), shape.element),
    )


@torch.no_grad()
def as_module(measure: str, shape: Shape, settings: Settings, mode: str) -> list[Row]:
    """The layer as a model calls it in inference, against the textbook pair."""
    weight, ids = nn.Parameter(table(shape)), id_batches(shape)
    ours, eager = fused(shape, weight), textbook(shape, weight)
    contenders = [Contender(OURS, ours, ids), Contender(EAGER, eager, ids)]
    agree([ours(ids[0]), eager(ids[0])], TOLERANCE[shape.dtype])
    failure = ""
    if not settings.quick:
        faster, failure = compiled(eager, lambda layer: layer(ids[0]))
        if faster is not None:
            agree([ours(ids[0]), faster(ids[0])], TOLERANCE[shape.dtype])
            contenders.append(Contender(COMPILED, faster, ids))
    elements = shape.tokens * shape.width
    contenders.append(Contender(COPY, Tensor.clone, stretches(weight, elements)))
    timed = run_rounds(contenders, settings, calls=len(ids))
    floors = {EAGER: 0.40, COMPILED: 0.90} if mode == POOLED else {}
    rows = compare(
        measure,
        mode,
        timed,
        floors=floors,
        bytes_moved=traffic.forward(shape.tokens, shape.width, shape.element),
        copy_bytes=traffic.copy(elements, shape.element),
    )
    return [*rows, *missing(measure, mode, failure, floors)]


def missing(measure: str, mode: str, failure: str, floors: dict[str, float]) -> list[Row]:
    """The row of a contender that could not be built."""
    return [Row(measure, COMPILED, mode, floor=floors.get(COMPILED), note=failure)] if failure else []
