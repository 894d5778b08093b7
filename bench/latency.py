"""One token: nothing but the cost of a call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc_ext import reference

from .contenders import EAGER, OURS, Shape, agree, fused, id_batches, table, textbook
from .rows import Row
from .settings import Settings
from .timing import Contender, compare, run_rounds

SHAPE = Shape(1, 1, 512)
CALLS = 1000  # in one block: a clock reading must not count
FLOOR = 0.40


@torch.no_grad()
def one_token(measure: str, settings: Settings) -> list[Row]:
    """The layer called on one token, as at the start of a generation."""
    weight, ids = nn.Parameter(table(SHAPE)), id_batches(SHAPE)
    ours, eager = fused(SHAPE, weight), textbook(SHAPE, weight)
    agree([ours(ids[0]), eager(ids[0])], 1e-5)
    timed = run_rounds([Contender(OURS, ours, ids), Contender(EAGER, eager, ids)], settings, CALLS)
    return compare(measure, "", timed, floors={EAGER: FLOOR})


class OffsetPositionalEncoding(reference.PositionalEncoding):
    """The textbook's, as its users change it for decoding."""

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Add the rows from `offset` on."""
        return x + self.pe[:, offset : offset + x.size(1)]


@torch.no_grad()
def decode_step(measure: str, settings: Settings) -> list[Row]:
    """One token at the end of a cache: the position is an offset, and another one each time."""
    weight, ids = nn.Parameter(table(SHAPE)), id_batches(SHAPE)
    layer, embeddings = fused(SHAPE, weight), textbook(SHAPE, weight)[0]
    encoding = OffsetPositionalEncoding(SHAPE.width)

    def ours(given: tuple[Tensor, int]) -> Tensor:
        tokens, offset = given
        result: Tensor = layer(tokens, offset=offset)
        return result

    def eager(given: tuple[Tensor, int]) -> Tensor:
        tokens, offset = given
        result: Tensor = encoding(embeddings(tokens), offset)
        return result

    steps = [(tokens, 7 + 613 * i) for i, tokens in enumerate(ids)]
    agree([ours(steps[-1]), eager(steps[-1])], 5e-4)  # as in forward.py, at position 4298
    timed = run_rounds([Contender(OURS, ours, steps), Contender(EAGER, eager, steps)], settings, CALLS)
    return compare(measure, "", timed, floors={EAGER: FLOOR})
