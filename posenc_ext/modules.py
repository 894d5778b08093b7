"""Modules with the textbook's names and arguments; none keeps a table."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from posenc_ext import functional
from posenc_ext.checkpoints import consume_tables
from posenc_ext.conventions import Convention, resolve

__all__ = ["Embeddings", "LearnedPositionalEmbedding", "PositionalEncoding", "TransformerEmbedding"]

_DEFAULT_TABLE_ROWS = 5000  # the textbook's max_len


def _check(owner: str, **arguments: Any) -> None:
    """Refuse what no layer can be made of; None is fine where it may be given."""
    for name, value in arguments.items():
        if name == "dropout" and not 0.0 <= value <= 1.0:
            raise ValueError(f"posenc_ext.{owner}: dropout must lie in [0, 1], got {value}")
        if name != "dropout" and value is not None and not value > 0:
            raise ValueError(f"posenc_ext.{owner}: {name} must be positive, got {value}")


def _row(owner: str, padding_idx: int | None, vocab_size: int) -> None:
    if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
        raise ValueError(
            f"posenc_ext.{owner}: padding_idx must lie in [{-vocab_size}, {vocab_size}), got {padding_idx}"
        )


class Embeddings(nn.Module):
    """`lut(x) * sqrt(d_model)` in one pass.

    Args:
        d_model: width.
        vocab_size: number of rows.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, device, dtype: as in `nn.Embedding`.

    Attributes:
        lut: the `nn.Embedding` that holds the weight and its options, initialised as ever.
        token_scale: sqrt(d_model), a Python float: `F.embedding(x, m.lut.weight) * m.token_scale` is `m(x)`.

    Raises:
        ValueError: a size that is not positive, or an option out of range.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check("Embeddings", d_model=d_model, vocab_size=vocab_size, max_norm=max_norm)
        _row("Embeddings", padding_idx, vocab_size)
        self.lut = nn.Embedding(
            vocab_size,
            d_model,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            device=device,
            dtype=dtype,
        )
        self.d_model = d_model
        self.token_scale = math.sqrt(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Ids of any shape, int64 or int32 -> [*x.shape, d_model]."""
        lut = self.lut
        return functional.scaled_embedding(
            x,
            lut.weight,
            token_scale=self.token_scale,
            padding_idx=lut.padding_idx,
            max_norm=lut.max_norm,
            norm_type=lut.norm_type,
            scale_grad_by_freq=lut.scale_grad_by_freq,
            sparse=lut.sparse,
        )


class PositionalEncoding(nn.Module):
    """`x + PE` in one pass, for any length.

    Args:
        d_model: width.
        max_len: rows of `.pe` (None: 5000, the textbook's); limits nothing.
        convention: name of a convention or a `Convention`.
        precision: `"reference"` or `"exact"`; None for the convention's own.
        dropout: probability, applied to the sum in training.
        batch_first: whether x is [..., length, d_model] or [length, ..., d_model].

    A table in a checkpoint (`pe`, `pos_embedding`, `weights`, ...) is checked against the formula and dropped; one of
    another convention is refused. The module saves nothing itself.

    Raises:
        ValueError: a size that is not positive, an unknown convention or precision.
    """

    _placement: Tensor

    def __init__(
        self,
        d_model: int,
        max_len: int | None = None,
        *,
        convention: str | Convention = "vaswani",
        precision: str | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        _check("PositionalEncoding", d_model=d_model, max_len=max_len, dropout=dropout)
        self.d_model = d_model
        self.max_len = max_len
        self.convention = resolve(convention)
        self.convention.spec(precision)  # refuses an unknown precision
        self.precision = precision or self.convention.precision
        self.dropout = dropout
        self.batch_first = batch_first
        # Holds nothing; follows .to() and .half(), so that .pe knows where and in which dtype it is wanted.
        self.register_buffer("_placement", torch.empty(0), persistent=False)

    def forward(self, x: Tensor, *, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        """X [..., length, d_model] -> the same shape and dtype; `offset` and `positions` as in `functional`."""
        sizes = x.shape
        if not sizes or sizes[-1] != self.d_model:
            raise ValueError(
                f"posenc_ext.PositionalEncoding: x must have width {self.d_model} in its last axis, got {list(x.shape)}"
            )
        y = functional.add_positional_encoding(
            x,
            offset=offset,
            positions=positions,
            convention=self.convention,
            precision=self.precision,
            batch_first=self.batch_first,
        )
        return nn.functional.dropout(y, self.dropout, self.training) if self.dropout else y

    @property
    def pe(self) -> Tensor:
        """The table the textbook module would hold: [1, max_len, d_model], or [max_len, 1, d_model] sequence-first."""
        rows = functional.positional_encoding(
            self.max_len or _DEFAULT_TABLE_ROWS,
            self.d_model,
            convention=self.convention,
            precision=self.precision,
            dtype=self._placement.dtype,
            device=self._placement.device,
        )
        return rows.unsqueeze(0 if self.batch_first else 1)

    def extra_repr(self) -> str:
        """Size, convention and options."""
        return (
            f"{self.d_model}, max_len={self.max_len}, convention={self.convention.name!r}, "
            f"precision={self.precision!r}, dropout={self.dropout}, batch_first={self.batch_first}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        error_msgs = rest[-1]
        consume_tables(self, self.convention, state_dict, [prefix], error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class TransformerEmbedding(nn.Module):
    """`weight[x] * token_scale + PE`: the whole input layer in one pass.

    Args:
        vocab_size: number of rows.
        d_model: width.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, device, dtype: as in `nn.Embedding`.
        convention, precision, dropout, batch_first: as in `PositionalEncoding`.
        token_scale: factor of the looked-up row; None for sqrt(d_model).

    Attributes:
        weight: [vocab_size, d_model], initialised with the numbers `nn.Embedding` draws.

    Loads checkpoints of the textbook pair as well: `lut.weight` or `0.lut.weight` becomes `weight`, and a table (`pe`,
    `1.pe`, ...) is checked and dropped as in `PositionalEncoding`.

    Raises:
        ValueError: a size that is not positive, or an option out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        padding_idx: int | None = None,
        convention: str | Convention = "vaswani",
        precision: str | None = None,
        dropout: float = 0.0,
        token_scale: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check("TransformerEmbedding", vocab_size=vocab_size, d_model=d_model, max_norm=max_norm, dropout=dropout)
        _row("TransformerEmbedding", padding_idx, vocab_size)
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.padding_idx = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + vocab_size
        self.convention = resolve(convention)
        self.convention.spec(precision)  # refuses an unknown precision
        self.precision = precision or self.convention.precision
        self.dropout = dropout
        self.token_scale = math.sqrt(d_model) if token_scale is None else float(token_scale)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.batch_first = batch_first
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Embedding` does: N(0, 1), the padding row zero."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].fill_(0)

    def forward(self, x: Tensor, *, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        """Ids of any shape -> [*x.shape, d_model] in the dtype of `weight`; the rest as in `functional`."""
        weight = self._parameters.get("weight")  # a microsecond less than self.weight, which nn.Module searches for
        y = functional.embed(
            x,
            self.weight if weight is None else weight,
            offset=offset,
            positions=positions,
            token_scale=self.token_scale,
            convention=self.convention,
            precision=self.precision,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
            batch_first=self.batch_first,
        )
        return nn.functional.dropout(y, self.dropout, self.training) if self.dropout else y

    def extra_repr(self) -> str:
        """Sizes, convention and options."""
        options = "".join(
            f", {name}={getattr(self, name)!r}"
            for name, default in (
                ("padding_idx", None),
                ("max_norm", None),
                ("scale_grad_by_freq", False),
                ("sparse", False),
                ("batch_first", True),
                ("dropout", 0.0),
            )
            if getattr(self, name) != default
        )
        return (
            f"{self.vocab_size}, {self.d_model}, convention={self.convention.name!r}, precision={self.precision!r}, "
            f"token_scale={self.token_scale:.6g}{options}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        error_msgs = rest[-1]
        own = prefix + "weight"
        for name in ("lut.weight", "0.lut.weight"):
            if own not in state_dict and prefix + name in state_dict:
                state_dict[own] = state_dict.pop(prefix + name)
        consume_tables(self, self.convention, state_dict, [prefix, prefix + "1."], error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class LearnedPositionalEmbedding(nn.Module):
    """The trainable alternative: `x + weight[position]`, called like `PositionalEncoding`, and as long as its table.

    Args:
        max_len: number of positions.
        d_model: width.
        dropout, batch_first: as in `PositionalEncoding`.
        device, dtype: of the weight.

    Attributes:
        weight: [max_len, d_model], drawn from N(0, 1) as `nn.Embedding` does.

    Raises:
        ValueError: a size that is not positive.
    """

    def __init__(
        self,
        max_len: int,
        d_model: int,
        *,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check("LearnedPositionalEmbedding", max_len=max_len, d_model=d_model, dropout=dropout)
        self.max_len = max_len
        self.d_model = d_model
        self.dropout = dropout
        self.batch_first = batch_first
        self.weight = nn.Parameter(torch.empty(max_len, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1)."""
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor, *, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        """X [..., length, d_model] -> the same shape.

        Raises:
            IndexError: a position outside [0, max_len): nothing was learned for it.
            TypeError: positions that are not int64 or int32.
            ValueError: x of another width, positions of another shape.
        """
        if x.shape[-1:] != (self.d_model,):
            raise ValueError(
                f"posenc_ext.LearnedPositionalEmbedding: x must have width {self.d_model} in its last axis, "
                f"got {list(x.shape)}"
            )
        y = x + self._rows(x.shape[:-1], offset, positions)
        return nn.functional.dropout(y, self.dropout, self.training) if self.dropout else y

    def _rows(self, token_shape: torch.Size, offset: int, positions: Tensor | None) -> Tensor:
        if positions is not None:
            if positions.dtype not in (torch.int64, torch.int32):
                raise TypeError(
                    "posenc_ext.LearnedPositionalEmbedding: positions must have dtype int64 or int32, "
                    f"got {positions.dtype}"
                )
            # A sum past int64 would wrap to a row. With half of the range for the offset, it cannot get back to one.
            if not -(2**62) < offset < 2**62:
                raise ValueError(
                    f"posenc_ext.LearnedPositionalEmbedding: offset must lie between -2**62 and 2**62, got {offset}"
                )
            positions = functional.broadcast_positions(
                positions, token_shape, batch_first=self.batch_first, op="learned_positional_embedding"
            )
            try:
                return nn.functional.embedding(positions.long() + offset, self.weight)
            except IndexError:
                raise self._beyond(int(positions.min()) + offset, int(positions.max()) + offset) from None
        rank = len(token_shape)
        length = 1 if rank == 0 else token_shape[-1 if self.batch_first else 0]
        if offset < 0 or offset + length > self.max_len:
            raise self._beyond(offset, offset + length - 1)
        rows = self.weight[offset : offset + length]
        if rank == 0:
            return rows[0]
        return rows if self.batch_first else rows.reshape([length] + [1] * (rank - 1) + [self.d_model])

    def _beyond(self, first: int, last: int) -> IndexError:
        return IndexError(
            f"posenc_ext.LearnedPositionalEmbedding: positions must lie in [0, {self.max_len}), "
            f"the trained length, got {first} to {last}"
        )

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.max_len}, {self.d_model}, dropout={self.dropout}, batch_first={self.batch_first}"
