"""Numbers and ids to measure with, the same ones in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..contenders import Shape, id_batches
from ..training import half_equal


def numbers(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random, and made where they are wanted: some are large."""
    return torch.randn(tuple(shape), generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)


def zipf(shape: Shape, count: int) -> list[Tensor]:
    """Ids of which the r-th most frequent comes up 1/r as often as the first, as words do; shuffled over the rows."""
    generator = torch.Generator().manual_seed(4)
    weights = 1 / torch.arange(1, shape.vocabulary + 1, dtype=torch.float64)
    rows = torch.randperm(shape.vocabulary, generator=generator)
    drawn = [torch.multinomial(weights, shape.tokens, replacement=True, generator=generator) for _ in range(count)]
    return [rows[ranks].view(shape.batch, shape.length) for ranks in drawn]


IDS: dict[str, Callable[[Shape, int], list[Tensor]]] = {
    "uniform": id_batches,
    "zipf": zipf,
    "half-hot": lambda shape, count: half_equal(id_batches(shape, count)),
}
