"""The gradient of the weight on a device."""

from __future__ import annotations

import torch

from .. import traffic
from ..contenders import OURS, Shape
from ..rows import Row
from ..settings import Settings
from ..timing import COPY, Contender
from ..training import backward_op, torch_backward_op
from .clock import Clock
from .goals import BACKWARD_GOALS, DENSE_BACKWARD, FEW_TOKENS_GOALS, PLAIN_BACKWARD, rows_of
from .inputs import IDS, numbers
from .rounds import CALLS, COLD, reason, run_rounds


@torch.no_grad()
def backward(
    measure: str, clock: Clock, settings: Settings, *, shape: Shape, kind: str, goal: bool = True
) -> list[Row]:
    """The gradient of the weight alone, against what eager's backward runs."""
    ids = [tokens.to(clock.device) for tokens in IDS[kind](shape, CALLS)]
    grad = numbers((shape.batch, shape.length, shape.width), shape.dtype, clock.device)
    ours, theirs = backward_op(grad, shape), torch_backward_op(grad, shape)
    plain = torch.ops.aten.embedding_dense_backward.default
    failures = {}
    try:
        # In 16 bits torch adds rounded terms; the share of a hot row is what is left of its sum.
        mine, other = ours(ids[0]).float(), theirs(ids[0]).float()
        apart = (mine - other).norm() / mine.norm()
        limit = 1e-4 if shape.dtype == torch.float32 else 3e-2
        if not apart < limit:
            failures[DENSE_BACKWARD] = f"failed: differs from ours by {apart:.2g} of its norm"
        del mine, other
    except Exception as error:
        failures[DENSE_BACKWARD] = reason(error)
    moved = traffic.backward(shape.tokens, shape.vocabulary, shape.width, shape.element)
    source = numbers((moved // 2 // shape.element,), shape.dtype, clock.device)
    out = torch.empty_like(source)
    contenders = [
        Contender(OURS, ours, ids),
        Contender(DENSE_BACKWARD, theirs, ids),
        Contender(PLAIN_BACKWARD, lambda given: plain(grad, given, shape.vocabulary, -1, False), ids),
        Contender(COPY, out.copy_, [source]),
    ]
    timed, broken = run_rounds([c for c in contenders if c.name not in failures], clock, settings, CALLS, COLD)
    return rows_of(
        measure,
        COLD,
        timed,
        ours=OURS,
        goals=BACKWARD_GOALS if goal else FEW_TOKENS_GOALS,
        failures={**failures, **broken},
        bytes_moved=moved,
        copy_bytes=traffic.copy(source.numel(), shape.element),
    )
