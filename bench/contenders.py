"""The inputs, the layers, and what they are held against.

Contenders of one measure share weight and output, so that none is lucky with the pages it was given.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import posenc_ext
from posenc_ext import reference

VOCABULARY = 32000
BATCHES = 8  # of ids: together they look up nearly every row once, so no call finds the rows of the last one in a cache

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Ids [batch, length] into a table [vocabulary, width]."""

    batch: int
    length: int
    width: int
    dtype: torch.dtype = torch.float32
    vocabulary: int = VOCABULARY

    @property
    def tokens(self) -> int:
        """How many ids there are."""
        return self.batch * self.length

    @property
    def element(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    @property
    def token_scale(self) -> float:
        """The factor of the looked-up rows."""
        return math.sqrt(self.width)

    @property
    def name(self) -> str:
        """For the name of a measure."""
        return f"{_DTYPES[self.dtype]}.{self.batch}x{self.length}x{self.width}"

    @property
    def text(self) -> str:
        """For its title."""
        return f"{_DTYPES[self.dtype]} [{self.batch}, {self.length}] x {self.width}"


# The two shapes of the floors: a batch that shares the sines of a position, and one that shares nothing.
BATCHED = Shape(16, 512, 512)
SINGLE = Shape(1, 2048, 1024)


def of_dtype(shape: Shape, dtype: torch.dtype) -> Shape:
    """The same shape in another dtype."""
    return dataclasses.replace(shape, dtype=dtype)


def id_batches(shape: Shape, count: int = BATCHES) -> list[Tensor]:
    """Uniform random ids, the same ones in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=generator) for _ in range(count)]


@functools.lru_cache(maxsize=4)  # drawing one takes longer than a round
def _drawn(vocabulary: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def table(shape: Shape) -> Tensor:
    """The weight, every page of it written; the same one for all measures of its size, so nobody may change it."""
    return _drawn(shape.vocabulary, shape.width, shape.dtype)


def gradient(shape: Shape) -> Tensor:
    """The gradient that arrives at the output."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape.batch, shape.length, shape.width, generator=generator).to(shape.dtype)


def stretches(weight: Tensor, elements: int) -> list[Tensor]:
    """Flat pieces of a table to copy from, as far apart as it allows: what a gather of that size reads, in order."""
    flat = weight.detach().view(-1)
    spare = flat.numel() - elements
    if spare < 0:
        raise ValueError(f"a table of {flat.numel()} numbers has no stretch of {elements}")
    count = min(BATCHES, max(2, flat.numel() // elements))
    starts = [spare * i // (count - 1) // 64 * 64 for i in range(count)]  # whole cache lines
    return [flat[start : start + elements] for start in starts]


def textbook(shape: Shape, weight: nn.Parameter) -> nn.Sequential:
    """`Embeddings` and `PositionalEncoding` as a textbook has them, on this weight; longer where it must be."""
    with weight.device:
        embeddings = reference.Embeddings(shape.width, shape.vocabulary)
        encoding = reference.PositionalEncoding(shape.width, max(5000, shape.length))
    layer = nn.Sequential(embeddings, encoding).to(shape.dtype)
    embeddings.lut.weight = weight
    return layer


def fused(shape: Shape, weight: nn.Parameter, *, sparse: bool = False) -> posenc_ext.TransformerEmbedding:
    """The fused layer on this weight."""
    layer = posenc_ext.TransformerEmbedding(shape.vocabulary, shape.width, sparse=sparse, device="meta")
    layer.weight = weight
    return layer


OURS = "posenc_ext"
EAGER = "textbook, eager"
COMPILED = "textbook, torch.compile"


def compiled(layer: nn.Module, try_out: Callable[[Any], object], **options: Any) -> tuple[Any, str]:
    """The layer under torch.compile, ready to run, or None and the reason (no C++ compiler, usually).

    Args:
        layer: to be compiled for one shape.
        try_out: makes it compile; it is given the compiled layer.
        options: of torch.compile.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # idle compile workers would sit beside the measurement
    faster = torch.compile(layer, dynamic=False, **options)
    try:
        try_out(faster)
    except Exception as error:
        return None, f"torch.compile failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return faster, ""


def agree(results: Sequence[Tensor], tolerance: float) -> None:
    """Contenders must do the same work before anyone asks who is faster.

    Raises:
        AssertionError: two results differ by more than `tolerance`, relative to 1 or the size of the number.
    """
    first, *others = (result.detach().to_dense().float() for result in results)
    for other in others:
        torch.testing.assert_close(first, other, rtol=tolerance, atol=tolerance)
