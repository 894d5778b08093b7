"""The forward on a device: against all that could take its place, and a copy of its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import traffic
from ..contenders import COMPILED, EAGER, OURS, Shape, agree, compiled, fused, id_batches, textbook
from ..rows import Row
from ..settings import Settings
from ..timing import COPY, Contender
from .clock import Clock
from .goals import AUTOTUNED, FORMULA, FORWARD_GOALS, LOOKUP, STRIDED, STRIDED_GOALS, rows_of
from .inputs import numbers
from .rounds import CALLS, COLD, GRAPH, reason, run_rounds

DECODE_CALLS = 64  # whose rows together are larger than the cache, and far more than a graph's launch


class Formula(nn.Module):
    """The layer without a table, written for a compiler: all of it is one expression over the output."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [batch, length] -> [batch, length, d_model]."""
        width = self.weight.shape[1]
        column = torch.arange(width, device=ids.device)
        frequency = torch.exp((column - column % 2).float() * (-math.log(10000.0) / width))
        angle = torch.arange(ids.shape[1], device=ids.device).float().unsqueeze(1) * frequency
        waves = torch.where(column % 2 == 0, angle.sin(), angle.cos())
        return (F.embedding(ids, self.weight).float() * math.sqrt(width) + waves).to(self.weight.dtype)


def tolerance(shape: Shape) -> float:
    """What contenders may differ by: the last bits of fp32 frequencies, and two or three roundings to 16 bits."""
    return max(2e-4, shape.length * 2.0**-21) + (3e-2 if shape.dtype == torch.bfloat16 else 0)


@torch.no_grad()
def forward(
    measure: str, clock: Clock, settings: Settings, *, shape: Shape, modes: Sequence[str], large: bool
) -> list[Row]:
    """The layer as a model calls it in inference, against all that could take its place, and a copy of its output."""
    torch.compiler.reset()  # a function that has been compiled for too many shapes would run uncompiled
    weight = nn.Parameter(numbers((shape.vocabulary, shape.width), shape.dtype, clock.device))
    calls = CALLS if modes == (COLD,) else DECODE_CALLS
    ids = [tokens.to(clock.device) for tokens in id_batches(shape, calls)]
    source = numbers((shape.batch, shape.length, shape.width), shape.dtype, clock.device)
    out = torch.empty_like(source)
    eager = textbook(shape, weight)
    made, failures = _forward_contenders(shape, weight, eager, ids[0], settings)
    contenders = [Contender(name, call, ids) for name, call in made.items()]
    contenders.append(Contender(COPY, out.copy_, [source]))
    goals = {name: goal for name, goal in FORWARD_GOALS.items() if name in made or name in failures}
    found: list[Row] = []
    for mode in modes:
        taking_part = contenders
        if mode == GRAPH:  # which is what this one does by itself
            taking_part = [c for c in contenders if c.name != AUTOTUNED]
        timed, broken = run_rounds(taking_part, clock, settings, calls, mode)
        found += rows_of(
            measure,
            mode,
            timed,
            ours=OURS,
            goals={name: goal for name, goal in goals.items() if mode != GRAPH or name != AUTOTUNED},
            failures={**{n: t for n, t in failures.items() if mode != GRAPH or n != AUTOTUNED}, **broken},
            bytes_moved=traffic.forward(shape.tokens, shape.width, shape.element),
            copy_bytes=traffic.copy(out.numel(), shape.element),
            large=large,
        )
    return found


def _forward_contenders(
    shape: Shape, weight: nn.Parameter, eager: nn.Module, tokens: Tensor, settings: Settings
) -> tuple[dict[str, Callable[[Any], object]], dict[str, str]]:
    """Those that run and agree with ours, and the reasons of the others."""
    ours = fused(shape, weight)
    wanted = ours(tokens)
    made: dict[str, Callable[[Any], object]] = {OURS: ours}
    failures: dict[str, str] = {}

    def add(name: str, call: Callable[[Any], Any]) -> None:
        try:
            agree([wanted, call(tokens)], tolerance(shape))
            made[name] = call
        except Exception as error:
            failures[name] = reason(error)

    add(EAGER, eager)
    if not settings.quick:
        for name, layer, options in (
            (COMPILED, eager, {}),
            (AUTOTUNED, eager, {"mode": "max-autotune"}),
            (FORMULA, Formula(weight), {}),
        ):
            faster, why = compiled(layer, lambda call: call(tokens), fullgraph=True, **options)
            if faster is None:
                failures[name] = why.replace("torch.compile failed", "failed")
            else:
                add(name, faster)
    made[LOOKUP] = lambda given: F.embedding(given, weight)
    return made, failures


@torch.no_grad()
def strided(measure: str, clock: Clock, settings: Settings, *, shape: Shape) -> list[Row]:
    """Ids that are a transposed view: what finding them costs."""
    weight = nn.Parameter(numbers((shape.vocabulary, shape.width), shape.dtype, clock.device))
    ids = [tokens.to(clock.device) for tokens in id_batches(shape, CALLS)]
    apart = [tokens.t().contiguous().t() for tokens in ids]
    layer = fused(shape, weight)
    contenders = [Contender(STRIDED, layer, apart), Contender(OURS, layer, ids)]
    timed, failures = run_rounds(contenders, clock, settings, CALLS, COLD)
    return rows_of(
        measure,
        COLD,
        timed,
        ours=STRIDED,
        goals=STRIDED_GOALS,
        failures=failures,
        bytes_moved=traffic.forward(shape.tokens, shape.width, shape.element),
    )
