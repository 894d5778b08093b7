"""From one thread to several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc_ext import functional

from . import traffic
from .contenders import BATCHED, OURS, Shape, gradient, id_batches, stretches, table
from .rows import Row
from .settings import OUT, POOLED, Settings
from .timing import COPY, Contender, run_rounds
from .training import backward_op

FLOOR_OF_TWO = 1.6


def forward(measure: str, shape: Shape, settings: Settings) -> list[Row]:
    """The forward pass into a given output."""
    weight, ids = table(shape), id_batches(shape)
    out = torch.empty(shape.batch, shape.length, shape.width, dtype=shape.dtype)
    flat = out.view(-1)
    return _scaling(
        measure,
        OUT,
        settings,
        lambda tokens: functional.embed(tokens, weight, out=out),
        ids,
        flat.copy_,
        stretches(weight, flat.numel()),
        traffic.forward(shape.tokens, shape.width, shape.element),
    )


def backward(measure: str, settings: Settings, mode: str) -> list[Row]:
    """The backward alone."""
    shape = BATCHED
    pieces = stretches(table(shape), (shape.tokens + shape.vocabulary) // 2 * shape.width)
    moved = traffic.backward(shape.tokens, shape.vocabulary, shape.width, shape.element)
    return _scaling(
        measure,
        mode,
        settings,
        backward_op(gradient(shape), shape),
        id_batches(shape),
        Tensor.clone,
        pieces,
        moved,
    )


def _scaling(
    measure: str,
    mode: str,
    settings: Settings,
    call: Callable[[Any], object],
    inputs: list[Tensor],
    copy: Callable[[Any], object],
    pieces: list[Tensor],
    moved: int,
) -> list[Row]:
    many = settings.threads
    if many < 2:
        return [Row(measure, OURS, mode, note="needs --threads 2 or more")]
    names = {(who, n): f"{who}, {n} thread{'s' * (n > 1)}" for who in (OURS, COPY) for n in (1, many)}
    timed = run_rounds(
        [
            Contender(names[who, threads], run, given, threads)
            for who, run, given in ((OURS, call, inputs), (COPY, copy, pieces))
            for threads in (many, 1)
        ],
        settings,
        calls=4,
    )
    speedup = {who: timed.ratio(names[who, 1], names[who, many]) for who in (OURS, COPY)}
    # Where memory is the limit no kernel scales better than a copy does.
    target = FLOOR_OF_TWO if many == 2 else math.inf
    floor = min(target, speedup[COPY].median) if mode in (OUT, POOLED) else None
    rows = []
    for who in (OURS, COPY):
        spread = speedup[who]
        taken = len(timed.seconds[names[who, many]])
        shared: dict[str, Any] = {"mode": mode, "rounds": taken, "preempted": timed.preempted, "bytes": moved}
        rows.append(Row(measure, names[who, many], median_us=timed.median_us(names[who, many]), **shared))
        rows.append(
            Row(
                measure,
                names[who, 1],
                median_us=timed.median_us(names[who, 1]),
                ratio=spread.median,
                q25=spread.q25,
                q75=spread.q75,
                floor=floor if who == OURS else None,
                at_least=True,
                **shared,
            )
        )
    return rows
