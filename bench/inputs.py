"""Shapes, the bytes they move, ids, tables and layers: the same ones in every run.

Providers of one case share weight and output, so that none is lucky with the pages it was given.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posenc_ext
from posenc_ext import reference

from .timing import Provider

OURS = "posenc_ext"
EAGER = "textbook, eager"
COPY = "copy"

CPU = torch.device("cpu")
ID_BYTES = 8
SPANS = 8  # of a table to copy from

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Ids [batch, length] into a table [vocabulary, width].

    Its bytes are what a call has to move, however it is written. A row counts once for each token, as if no cache held
    it. The line that a store first reads is not counted, since a store may bypass the cache, nor are temporaries: who
    makes some shows a lower bandwidth for it.
    """

    batch: int
    length: int
    width: int
    dtype: torch.dtype = torch.float32
    vocabulary: int = 32000

    @property
    def tokens(self) -> int:
        """How many ids there are."""
        return self.batch * self.length

    @property
    def token_scale(self) -> float:
        """The factor of the looked-up rows."""
        return math.sqrt(self.width)

    @property
    def distinct(self) -> int:
        """How many different ids a batch is expected to have."""
        return round(self.vocabulary * (1 - (1 - 1 / self.vocabulary) ** self.tokens))

    @property
    def name(self) -> str:
        """For the name of a case."""
        return f"{TYPES[self.dtype]}.{self.batch}x{self.length}x{self.width}"

    @property
    def text(self) -> str:
        """For its title."""
        return f"{TYPES[self.dtype]} [{self.batch}, {self.length}] x {self.width}"

    def of(self, dtype: torch.dtype) -> Shape:
        """The same in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def row_bytes(self, rows: int) -> int:
        """Of so many rows."""
        return rows * self.width * self.dtype.itemsize

    def forward_bytes(self, positions: bool = False) -> int:
        """Ids (and positions) and rows read, output written."""
        return self.tokens * ID_BYTES * (1 + positions) + self.row_bytes(2 * self.tokens)

    def backward_bytes(self, rows: int | None = None) -> int:
        """Ids and output gradient read, rows of the weight gradient written: all of them, or so many."""
        return self.tokens * ID_BYTES + self.row_bytes(self.tokens + (self.vocabulary if rows is None else rows))


# ---- ids: a batch for every call of a block, drawn before the first one ----------------------------------------------


def uniform(shape: Shape, count: int) -> list[Tensor]:
    """Every row as likely as any other."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=generator) for _ in range(count)]


def half_equal(shape: Shape, count: int) -> list[Tensor]:
    """The uniform ones, with one id in a random half of all places."""
    generator, batches = torch.Generator().manual_seed(3), uniform(shape, count)
    for tokens in batches:
        places = torch.randperm(shape.tokens, generator=generator)[: shape.tokens // 2]
        tokens.view(-1)[places] = tokens.view(-1)[0].clone()
    return batches


def zipf(shape: Shape, count: int) -> list[Tensor]:
    """The r-th most frequent comes up 1/r as often as the first, as words do; shuffled over the rows."""
    generator = torch.Generator().manual_seed(4)
    weights = 1 / torch.arange(1, shape.vocabulary + 1, dtype=torch.float64)
    rows = torch.randperm(shape.vocabulary, generator=generator)
    ranks = torch.multinomial(weights, count * shape.tokens, replacement=True, generator=generator)
    return list(rows[ranks].view(count, shape.batch, shape.length).unbind())


IDS: dict[str, Callable[[Shape, int], list[Tensor]]] = {"uniform": uniform, "zipf": zipf, "half-hot": half_equal}


# ---- tables ----------------------------------------------------------------------------------------------------------


def numbers(size: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    """Normal ones, made where they are wanted: some are large."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(size), generator=generator, device=device).to(dtype)


_cached_numbers = functools.lru_cache(maxsize=4)(numbers)  # drawing a table takes longer than a round


def table(shape: Shape, device: torch.device = CPU) -> Tensor:
    """The weight, every page of it written; the same one for all cases of its size, so nobody may change it."""
    return _cached_numbers((shape.vocabulary, shape.width), shape.dtype, device)


def gradient(shape: Shape, device: torch.device = CPU) -> Tensor:
    """The gradient that arrives at the output."""
    return numbers((shape.batch, shape.length, shape.width), shape.dtype, device, seed=2)


def spans(source: Tensor, elements: int) -> list[Tensor]:
    """Flat pieces to copy from, as far apart as the source allows: what a gather of that size reads, in order."""
    flat = source.detach().view(-1)
    spare, count = flat.numel() - elements, min(SPANS, max(2, flat.numel() // elements))
    starts = [spare * i // (count - 1) // 64 * 64 for i in range(count)]  # whole cache lines
    return [flat[start : start + elements] for start in starts]


def copy_of(shape: Shape, rows: int, device: torch.device = CPU, out: Tensor | None = None) -> Provider:
    """The copy that sets the bandwidth: so many rows, from the table if it has that many; into `out`, or a clone."""
    elements = rows * shape.width
    source = table(shape, device) if rows <= shape.vocabulary else numbers((elements,), shape.dtype, device)
    call: Callable[[Tensor], object] = Tensor.clone if out is None else out.view(-1).copy_
    return Provider(COPY, call, spans(source, elements), same=False, bytes=shape.row_bytes(2 * rows))


# ---- layers ----------------------------------------------------------------------------------------------------------


def textbook(shape: Shape, weight: nn.Parameter) -> nn.Sequential:
    """`Embeddings` and `PositionalEncoding` as a textbook has them, on this weight; longer where it must be."""
    with weight.device:
        embeddings = reference.Embeddings(shape.width, shape.vocabulary)
        encoding = reference.PositionalEncoding(shape.width, max(5000, shape.length))
    layer = nn.Sequential(embeddings, encoding).to(shape.dtype)
    embeddings.lut.weight = weight
    return layer


class OffsetPositionalEncoding(reference.PositionalEncoding):
    """The textbook's, as its users change it for decoding."""

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Add the rows from `offset` on; of positions in a tensor, their rows."""
        if isinstance(offset, Tensor):
            return x + self.pe[:, offset]
        return x + self.pe[:, offset : offset + x.size(1)]


def formula(weight: Tensor, ids: Tensor) -> Tensor:
    """The layer without a table, written for a compiler: all of it is one expression over the output."""
    width, length = weight.shape[1], ids.shape[1]
    frequency = torch.exp(torch.arange(0, width, 2, device=ids.device) * (-math.log(10000.0) / width))
    angle = torch.arange(length, device=ids.device)[:, None] * frequency
    encoding = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
    return (F.embedding(ids, weight).float() * math.sqrt(width) + encoding).to(weight.dtype)


def fused(shape: Shape, weight: nn.Parameter, **options: Any) -> posenc_ext.TransformerEmbedding:
    """The fused layer on this weight."""
    layer = posenc_ext.TransformerEmbedding(shape.vocabulary, shape.width, device="meta", **options)
    layer.weight = weight
    return layer


def compiled(layer: Callable[..., Any], **options: Any) -> Any:
    """The layer under torch.compile, for one shape. It compiles when it is first called."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # idle compile workers would sit beside the measurement
    return torch.compile(layer, dynamic=False, fullgraph=True, **options)
