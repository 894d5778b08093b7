"""Modules with the textbook's names and arguments; none keeps a table."""

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posenc_ext.checkpoints import consume_tables, rename_weight
from posenc_ext.conventions import CONVENTIONS, Convention, resolve
from posenc_ext.functional import (
    add_positional_encoding,
    add_sinusoids,
    check_integer,
    embed,
    positional_encoding,
    positions_from_padding,
    scaled_embedding,
)
from posenc_ext.plain import drop, may_be_left_out, plain_weight, probability_in_pass

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Embeddings", "LearnedPositionalEmbedding", "PositionalEncoding", "TransformerEmbedding"]

_DEFAULT_TABLE_ROWS = 5000  # the textbook's max_len


def _size(owner: str, name: str, value: Any) -> int:
    """A positive integer, or what is wrong with it."""
    try:
        size = operator.index(value)
    except TypeError:
        hint = "; dropout is a keyword argument here, as in dropout=0.1" if name == "max_len" else ""
        raise TypeError(f"posenc_ext.{owner}: {name} must be an int, got {value!r}{hint}") from None
    if size <= 0:
        raise ValueError(f"posenc_ext.{owner}: {name} must be positive, got {value}")
    return size


def _no_more(owner: str, rest: tuple[Any, ...]) -> None:
    """Refuse a third positional argument: the tutorials' order is (d_model, dropout, max_len)."""
    if rest:
        raise TypeError(
            f"posenc_ext.{owner}: only d_model and max_len may be given without a keyword, got {rest[0]!r} as a third; "
            f"the tutorials' {owner}(d_model, dropout, max_len) is {owner}(d_model, max_len, dropout=...) here"
        )


def _row(owner: str, padding_idx: int | None, vocab_size: int) -> None:
    if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
        raise ValueError(
            f"posenc_ext.{owner}: padding_idx must lie in [{-vocab_size}, {vocab_size}), got {padding_idx}"
        )


def _dropout(owner: str, p: float) -> nn.Dropout:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"posenc_ext.{owner}: dropout must lie in [0, 1], got {p}")
    return nn.Dropout(p)


def _of_lut(name: str) -> Any:
    return property(
        lambda self: getattr(self.lut, name), lambda self, value: setattr(self.lut, name, value), doc=f"`lut.{name}`."
    )


# torch.fx.symbolic_trace takes a call of these as one node. What looks at a shape is done in them.
torch.fx.wrap("_checked_rows")
torch.fx.wrap("add_sinusoids")
torch.fx.wrap("_counted")
torch.fx.wrap("_embed_counted")
torch.fx.wrap("_add_learned")


def _checked_rows(rows: Tensor, x: Tensor, d_model: int, owner: str) -> Tensor:
    """What a lookup returned for the ids `x`."""
    # Tools that attribute to embeddings put a lut there that is given rows in place of ids.
    if rows.shape[-1:] != (d_model,) or x.shape not in (rows.shape[:-1], rows.shape):
        raise ValueError(
            f"posenc_ext.{owner}: lut must return shape {[*x.shape, d_model]} for ids of shape {list(x.shape)}, "
            f"got {list(rows.shape)}"
        )
    return rows


def _counted(
    x: Tensor,
    padding_idx: int | None,
    count_padding: bool,
    offset: int | Tensor,
    positions: Tensor | None,
    padding_mask: Tensor | None,
    convention: str | Convention,
    batch_first: bool,
) -> tuple[int | Tensor, Tensor | None]:
    """Offset and positions of a `TransformerEmbedding` whose pads are told apart."""

    def refuse(text: str) -> ValueError:
        return ValueError(f"posenc_ext.TransformerEmbedding: {text}")

    pads, mark = x, padding_idx
    if padding_mask is not None:
        if count_padding or positions is not None:
            beside = "count_padding=True" if count_padding else "positions"
            raise refuse(f"padding_mask cannot be combined with {beside}")
        if not isinstance(padding_mask, Tensor) or padding_mask.dtype != torch.bool or padding_mask.shape != x.shape:
            got = (
                f"{padding_mask.dtype} {list(padding_mask.shape)}" if isinstance(padding_mask, Tensor) else padding_mask
            )
            text = f"padding_mask must be a bool tensor of the shape of x {list(x.shape)}, True at pads"
            raise refuse(f"{text} (attention_mask == 0), got {got}")
        pads, mark = padding_mask, 1
    elif count_padding or positions is not None:
        return offset, positions
    if mark is None:
        raise refuse("count_padding=False needs padding_idx, or a padding_mask, got neither")
    first = resolve(convention).first_position  # a graph of torch.fx has its name
    return 0, positions_from_padding(pads, mark, offset=offset, first_position=first, batch_first=batch_first)


def _embed_counted(
    count_padding: bool,
    padding_mask: Tensor | None,
    x: Tensor,
    weight: Tensor,
    *,
    offset: int | Tensor,
    positions: Tensor | None,
    convention: str | Convention,
    padding_idx: int | None,
    batch_first: bool,
    **rest: Any,
) -> Tensor:
    """`embed` with pads told apart; also what a graph of torch.fx holds, which cannot know whether it gets a mask."""
    offset, positions = _counted(
        x, padding_idx, count_padding, offset, positions, padding_mask, convention, batch_first
    )
    return embed(
        x,
        weight,
        offset=offset,
        positions=positions,
        convention=convention,
        padding_idx=padding_idx,
        batch_first=batch_first,
        **rest,
    )


def _check_position(
    position: Any, d_model: int, convention: Convention | None = None, precision: str | None = None
) -> None:
    """Refuse what cannot be the `position` of a `TransformerEmbedding` with this convention and precision."""
    if position is None:
        return
    if not isinstance(position, nn.Module) or isinstance(position, nn.Embedding):
        hint = "; LearnedPositionalEmbedding.from_pretrained makes one of its weight" * isinstance(position, nn.Module)
        raise TypeError(
            "posenc_ext.TransformerEmbedding: position must be a LearnedPositionalEmbedding or be called like one, "
            f"got {type(position).__name__}{hint}"
        )
    if getattr(position, "d_model", d_model) != d_model:
        raise ValueError(f"posenc_ext.TransformerEmbedding: position must have width {d_model}, got {position.d_model}")
    if precision is not None or convention not in (None, CONVENTIONS["vaswani"]):
        given = f"convention {convention.name!r}" if convention and precision is None else f"precision {precision!r}"
        raise ValueError(f"posenc_ext.TransformerEmbedding: position takes the place of sinusoids, got {given} too")


def _plain_table(position: Any, rows: Any, batch_first: bool) -> Tensor | None:
    """The table of a `position` that need not be called for rows of this dtype."""
    table = plain_weight(position, LearnedPositionalEmbedding)
    if table is None or rows is None or isinstance(rows, torch.fx.Proxy) or table.dtype != rows.dtype:
        return None
    if position.batch_first != batch_first:
        raise ValueError(
            "posenc_ext.TransformerEmbedding: position must have the layer's batch_first "
            f"({batch_first}), got {position.batch_first}"
        )
    return table if probability_in_pass(position.dropout, rows) == 0 else None


class _Layer(nn.Module):
    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"posenc_ext.{type(self).__name__}: torch.jit.script is not supported; use torch.jit.trace, torch.export "
            "or torch.compile"
        )


class _Lookup(_Layer):
    """A layer around `lut`, an `nn.Embedding`: what can be read and set of it as if the layer were one itself."""

    lut: nn.Embedding
    token_scale: float
    weight = _of_lut("weight")
    num_embeddings = _of_lut("num_embeddings")
    embedding_dim = _of_lut("embedding_dim")
    padding_idx = _of_lut("padding_idx")
    max_norm = _of_lut("max_norm")
    norm_type = _of_lut("norm_type")
    scale_grad_by_freq = _of_lut("scale_grad_by_freq")
    sparse = _of_lut("sparse")

    def _make_lut(
        self,
        d_model: int,
        vocab_size: int,
        padding_idx: int | None,
        max_norm: float | None,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **rest: Any,
    ) -> None:
        owner = type(self).__name__
        self._d_model = _size(owner, "d_model", d_model)
        vocab_size = _size(owner, "vocab_size", vocab_size)
        _row(owner, padding_idx, vocab_size)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"posenc_ext.{owner}: max_norm must be positive, got {max_norm}")
        if device is not None and torch.device(device).type == "meta":
            # Nothing is drawn there, but trying to imports 800 modules of torch, a second of them.
            rest["_weight"] = torch.empty(vocab_size, self._d_model, device=device, dtype=dtype)
        self.lut = nn.Embedding(
            vocab_size, self._d_model, padding_idx, max_norm=max_norm, device=device, dtype=dtype, **rest
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module takes a Parameter for one of its own before it asks for a property.
        if name == "weight":
            self.lut.weight = value
            return
        if name == "lut" and getattr(value, "embedding_dim", self._d_model) != self._d_model:
            raise ValueError(
                f"posenc_ext.{type(self).__name__}: lut must have width {self._d_model}, got {value.embedding_dim}"
            )
        super().__setattr__(name, value)

    @property
    def d_model(self) -> int:
        """The width; fixed."""
        return self._d_model

    @property
    def vocab_size(self) -> int:
        """Rows of `lut`."""
        return self.lut.num_embeddings

    @property
    def embed_scale(self) -> float:
        """Another name of `token_scale`, under which other projects' layers have it."""
        return self.token_scale

    @embed_scale.setter
    def embed_scale(self, value: float) -> None:
        self.token_scale = value

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Embedding` does: N(0, 1), the padding row zero.

        Examples:
            >>> import posenc_ext
            >>> layer = posenc_ext.Embeddings(4, 10, padding_idx=0)
            >>> layer.reset_parameters()
            >>> layer.weight[0].tolist()
            [0.0, 0.0, 0.0, 0.0]
        """
        self.lut.reset_parameters()

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Self:
        """A layer around a given table, like `nn.Embedding.from_pretrained`.

        Args:
            embeddings: [vocab_size, d_model], float32, float64, bfloat16 or float16; not copied.
            freeze: whether the table is kept from training.
            **options: keyword arguments of the class.

        Returns:
            A layer of this class on the device and in the dtype of `embeddings`.

        Raises:
            TypeError: an option that the class does not have.
            ValueError: `embeddings` has not two dimensions, or an option is out of range.

        Examples:
            >>> import torch, posenc_ext
            >>> layer = posenc_ext.Embeddings.from_pretrained(torch.ones(10, 4))
            >>> layer.weight.shape, layer.weight.requires_grad
            (torch.Size([10, 4]), False)
        """
        if embeddings.dim() != 2:
            raise ValueError(
                f"posenc_ext.{cls.__name__}.from_pretrained: embeddings must have 2 dimensions [vocab_size, d_model], "
                f"got shape {list(embeddings.shape)}"
            )
        layer = cls(vocab_size=embeddings.shape[0], d_model=embeddings.shape[1], device="meta", **options)
        layer.lut.weight = nn.Parameter(embeddings, requires_grad=not freeze)
        return layer

    def _rows(self, x: Tensor) -> Tensor:
        """`lut(x)`, where it has to be called."""
        return _checked_rows(self.lut(x), x, self._d_model, type(self).__name__)


class _Encoded(_Layer):
    """The recipe of an encoding as attributes, which act as soon as they are set."""

    _precision: str | None
    _convention: Convention
    frequencies: Tensor | None
    encoding_scale: float | Tensor

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "frequencies" and value is not None:
            self._check_frequencies(value)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, value in (("frequencies", None), ("encoding_scale", 1.0)):  # of layers pickled without them
            if name not in self.__dict__ and name not in self._parameters:
                self.__dict__[name] = value

    def _check_frequencies(self, value: Any) -> None:
        d_model: int = self.d_model  # type: ignore[assignment]
        pairs = (d_model + (self.convention.odd != "zero")) // 2
        if not isinstance(value, Tensor):
            raise TypeError(
                f"posenc_ext.{type(self).__name__}: frequencies must be a torch.Tensor, got {type(value).__name__}"
            )
        if value.dtype not in (torch.float32, torch.float64) or value.shape != (pairs,):
            raise ValueError(
                f"posenc_ext.{type(self).__name__}: frequencies must be float32 or float64 [{pairs}], one for each "
                f"pair of columns, got {value.dtype} {list(value.shape)}"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # A cast would round the frequencies, and to_empty would lose them: they are moved, and nothing else.
        kept: Any = self.frequencies

        def moved(tensor: Tensor) -> Tensor:
            if kept is None or (tensor is not kept and tensor is not kept.grad):
                result: Tensor = fn(tensor)
                return result
            to = fn(tensor).device
            return torch.empty_like(tensor, device=to) if tensor.is_meta else tensor.to(to)

        if kept is not None and not isinstance(kept, nn.Parameter):
            if kept.is_meta and not fn(kept).is_meta:
                raise NotImplementedError(
                    f"posenc_ext.{type(self).__name__}: frequencies have no data on the meta device, and no checkpoint "
                    "holds them; set `frequencies` to a tensor with data first, or make them an nn.Parameter"
                )
            self.frequencies = moved(kept)
        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def convention(self) -> Convention:
        """Set by name or by a `Convention`."""
        return self._convention

    @convention.setter
    def convention(self, value: str | Convention) -> None:
        self._convention = resolve(value)

    @property
    def precision(self) -> str:
        """Set to None, that of the convention."""
        return self._precision or self._convention.precision

    @precision.setter
    def precision(self, value: str | None) -> None:
        self._convention.spec(value)  # refuses an unknown one
        self._precision = value


class Embeddings(_Lookup):
    """Token embeddings: `lut(x) * sqrt(d_model)` in one pass.

    The factor is that of Vaswani et al. 2017, "Attention Is All You Need", section 3.4.

    Args:
        d_model: width.
        vocab_size: number of rows.
        padding_idx: row that gets no gradient and starts as zeros; its lookup is not zeroed. May be negative, counting
            from the end.
        max_norm: rows looked up whose norm is larger are first scaled down to it, in place, in the weight; None for
            none.
        norm_type: p of that p-norm.
        scale_grad_by_freq: divide each row's gradient by the number of times it was looked up.
        sparse: give the weight a sparse gradient, coalesced.
        device: of the weight.
        dtype: of the weight, float32, float64, bfloat16 or float16.

    Attributes:
        lut: the `nn.Embedding` that holds the weight [vocab_size, d_model] and its options, initialised as ever. It is
            not called while it is plain: an `nn.Embedding` itself, without hooks or a forward of its own, its weight a
            Parameter or Tensor. Otherwise the layer is `lut(x) * token_scale`.
        token_scale: sqrt(d_model), a Python float: `F.embedding(x, m.weight) * m.token_scale` is `m(x)`. Its other name
            is `embed_scale`.
        weight: `lut.weight`, to read and to set. So are `num_embeddings`, `embedding_dim`, `padding_idx`, `max_norm`,
            `norm_type`, `scale_grad_by_freq` and `sparse`.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size that is not positive, or an option out of range.

    Examples:
        >>> import torch, posenc_ext
        >>> layer = posenc_ext.Embeddings(4, 10)
        >>> x = torch.tensor([[1, 2, 3]])
        >>> torch.equal(layer(x), layer.lut(x) * 2)
        True
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
        self._make_lut(
            d_model,
            vocab_size,
            padding_idx,
            max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            device=device,
            dtype=dtype,
        )
        self.token_scale = math.sqrt(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Look up ids and scale their rows.

        Args:
            x: ids of any shape, int64 or int32; also a nested jagged tensor.

        Returns:
            [*x.shape, d_model] in the dtype of the weight.

        Raises:
            IndexError: an id outside [0, vocab_size); nothing has been written. On CUDA it comes later, from a later
                call or from `posenc_ext.check_errors()`.
            TypeError: `x` is no tensor.
            ValueError: `x` is not int64 or int32.
            NotImplementedError: `sparse=True` inside torch.compile or torch.export.

        Examples:
            >>> import torch, posenc_ext
            >>> posenc_ext.Embeddings(4, 10)(torch.tensor([[1, 2, 3]])).shape
            torch.Size([1, 3, 4])
        """
        lut: Any = self._modules["lut"]
        weight = plain_weight(lut)
        if weight is None:
            return self._rows(x) * self.token_scale
        return scaled_embedding(
            x,
            weight,
            token_scale=self.token_scale,
            padding_idx=lut.padding_idx,
            max_norm=lut.max_norm,
            norm_type=lut.norm_type,
            scale_grad_by_freq=lut.scale_grad_by_freq,
            sparse=lut.sparse,
        )


class PositionalEncoding(_Encoded):
    """Sinusoidal positions: `x + PE` in one pass, for any length, without a table.

    The formula is that of Vaswani et al. 2017, "Attention Is All You Need", section 3.5; with the default convention
    PE(p, 2k) = sin(p * w_k) and PE(p, 2k + 1) = cos(p * w_k), where w_k = 10000^(-2k/d_model).

    Attributes that are set later act from the next call on. A table in a checkpoint (`pe`, `pos_embedding`, `weights`
    and the like) is checked against the formula and dropped; one of another convention is refused by name. The module
    saves nothing itself, but for an `nn.Parameter` that it was given.

    Args:
        d_model: width.
        max_len: rows of `.pe` (None: 5000, the textbook's). It limits nothing.
        *rest: nothing. A third positional argument is refused in words: the tutorials' order is another.
        convention: which encoding: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"`, angles as fp32 tables form them; `"exact"`, right to about 1e-7 at every position;
            None for the convention's own.
        frequencies: w_k of each pair of columns in radians per position, in place of the convention's base and divisor,
            float32 or float64 [pairs]. They keep their dtype when the layer is cast. An `nn.Parameter` is trained and
            saved; a tensor is not saved.
        encoding_scale: factor of the encoding, a number; an `nn.Parameter` that holds one is trained and saved.
        dropout: probability, applied to the sum in training by `.dropout`, an `nn.Dropout`: in the same pass while that
            is plain (no hooks, not replaced), with numbers of our own that torch's generators seed.
        batch_first: whether x is [..., length, d_model] or [length, ..., d_model].

    Raises:
        TypeError: a size that is no int, a third positional argument, or `frequencies` that are no tensor.
        ValueError: a size that is not positive, an unknown convention or precision, a probability outside [0, 1], or
            `frequencies` of another dtype or shape.

    Examples:
        >>> import torch, posenc_ext
        >>> layer = posenc_ext.PositionalEncoding(4)
        >>> layer(torch.zeros(1, 2, 4))
        tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
                 [0.8415, 0.5403, 0.0100, 0.9999]]])
        >>> layer.state_dict()
        OrderedDict()
    """

    _placement: Tensor

    def __init__(
        self,
        d_model: int,
        max_len: int | None = None,
        *rest: Any,
        convention: str | Convention = "vaswani",
        precision: str | None = None,
        frequencies: Tensor | None = None,
        encoding_scale: float | Tensor = 1.0,
        dropout: float = 0.0,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        _no_more("PositionalEncoding", rest)
        self.d_model = _size("PositionalEncoding", "d_model", d_model)
        self.max_len = None if max_len is None else _size("PositionalEncoding", "max_len", max_len)
        self.convention = resolve(convention)
        self.precision = precision
        self.frequencies = frequencies
        self.encoding_scale = encoding_scale
        self.dropout = _dropout("PositionalEncoding", dropout)
        self.batch_first = batch_first
        # Holds nothing; follows .to() and .half(), so that .pe knows where and in which dtype it is wanted.
        self.register_buffer("_placement", torch.empty(0), persistent=False)

    def forward(self, x: Tensor, *, offset: int | Tensor = 0, positions: Tensor | None = None) -> Tensor:
        """Add the encodings, and drop out in training.

        Args:
            x: [..., length, d_model], or [length, ..., d_model] with `batch_first=False`; float32, float64, bfloat16 or
                float16; also a nested jagged tensor.
            offset: added to every position, such as the number of tokens in a decoder's cache: an int, or an int64 or
                int32 tensor, 0-d or [batch], one number for each row. With `positions` a sum past int64 wraps.
            positions: positions in place of the running index, int64, int32, float32 or float64, broadcastable to the
                axes of `x` but the last, or 1-D along the sequence. They may be negative; floating ones may be trained.

        Returns:
            A tensor of the shape and dtype of `x`.

        Raises:
            TypeError: an argument of another Python type.
            ValueError: `x` of another width or dtype, positions of another shape or dtype.

        Examples:
            >>> import torch, posenc_ext
            >>> layer, x = posenc_ext.PositionalEncoding(8), torch.zeros(2, 5, 8)
            >>> torch.equal(layer(x)[:, 3:], layer(x[:, 3:], offset=3))
            True
        """
        dropout: Any = self._modules["dropout"]
        dropout_p = probability_in_pass(dropout, x)
        y = add_sinusoids(
            x,
            offset,
            positions,
            1.0,
            self._convention,
            self._precision,
            self.frequencies,
            self.encoding_scale,
            dropout_p or 0.0,
            self.batch_first,
            None,
            self.d_model,
        )
        return dropout(y) if dropout_p is None else y

    @property
    def pe(self) -> Tensor:
        """The table that the textbook module would hold, made when it is read.

        [1, max_len, d_model], or [max_len, 1, d_model] where the layer is sequence-first, on the device and in the
        dtype of the module.

        Examples:
            >>> import posenc_ext
            >>> posenc_ext.PositionalEncoding(4, max_len=2).pe
            tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
                     [0.8415, 0.5403, 0.0100, 0.9999]]])
        """
        rows = positional_encoding(
            self.max_len or _DEFAULT_TABLE_ROWS,
            self.d_model,
            convention=self._convention,
            precision=self._precision,
            frequencies=self.frequencies,
            dtype=self._placement.dtype,
            device=self._placement.device,
        )
        if not isinstance(self.encoding_scale, float) or self.encoding_scale != 1:
            rows = (rows * self.encoding_scale).to(rows.dtype)
        return rows.unsqueeze(0 if self.batch_first else 1)

    def extra_repr(self) -> str:
        """Size, convention and options."""
        return (
            f"{self.d_model}, max_len={self.max_len}, convention={self.convention.name!r}, "
            f"precision={self.precision!r}, batch_first={self.batch_first}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        error_msgs = rest[-1]
        consume_tables(self, self.convention, state_dict, [prefix], error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class TransformerEmbedding(_Lookup, _Encoded):
    """The whole input layer of a Transformer in one pass: `weight[x] * token_scale + PE`.

    The formula is that of Vaswani et al. 2017, "Attention Is All You Need", sections 3.4 and 3.5; with the default
    convention PE(p, 2k) = sin(p * w_k) and PE(p, 2k + 1) = cos(p * w_k), where w_k = 10000^(-2k/d_model).

    Attributes that are set later act from the next call on. Checkpoints of the textbook pair (`0.lut.weight`, or what a
    parametrised `lut` saves) and of version 0.1 (`weight`) load too. A table in one (`pe`, `1.pe` and the like) is
    checked against the formula and dropped; one of another convention is refused by name.

    Args:
        vocab_size: number of rows.
        d_model: width.
        padding_idx: row that gets no gradient and starts as zeros; its lookup is not zeroed. May be negative, counting
            from the end.
        count_padding: False: positions count real tokens only, so padding changes no position. Pads are the ids
            `padding_idx`, or what a `padding_mask` given to the call says.
        convention: which encoding: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.
        precision: `"reference"`, angles as fp32 tables form them; `"exact"`, right to about 1e-7 at every position;
            None for the convention's own.
        frequencies: w_k of each pair of columns in radians per position, in place of the convention's base and divisor,
            float32 or float64 [pairs]. They keep their dtype when the layer is cast. An `nn.Parameter` is trained and
            saved; a tensor is not saved.
        encoding_scale: factor of the encoding, a number; an `nn.Parameter` that holds one is trained and saved.
        position: a `LearnedPositionalEmbedding` in place of the sinusoids, of `convention` and of `precision`, or a
            module that is called like one. GPT-2's input layer is `TransformerEmbedding(50257, 768, token_scale=1,
            position=LearnedPositionalEmbedding(1024, 768))`.
        at_padding: what a token of `padding_idx` is: `"embed"`, a token like any other; `"no_encoding"`, its row alone
            (fairseq, M2M100); `"no_embedding"`, its encoding alone; `"zeros"`.
        dropout: probability, applied to the sum in training by `.dropout`, an `nn.Dropout`: in the same pass while that
            is plain (no hooks, not replaced), with numbers of our own that torch's generators seed.
        token_scale: factor of the looked-up row; None for sqrt(d_model). Never rounded to the dtype of the weight.
        max_norm: rows looked up whose norm is larger are first scaled down to it, in place, in the weight; None for
            none.
        norm_type: p of that p-norm.
        scale_grad_by_freq: divide each row's gradient by the number of times it was looked up.
        sparse: give the weight a sparse gradient, coalesced.
        batch_first: whether the sequence is the last axis of the ids, or the first one.
        device: of the weight.
        dtype: of the weight, float32, float64, bfloat16 or float16.

    Attributes:
        lut: the `nn.Embedding` that holds the weight [vocab_size, d_model] and its options, initialised as ever. It is
            not called while it is plain: an `nn.Embedding` itself, without hooks or a forward of its own, its weight a
            Parameter or Tensor. Otherwise it is called, and scale and encoding are added in one more pass.
        weight: `lut.weight`, to read and to set. So are `num_embeddings`, `embedding_dim`, `padding_idx`, `max_norm`,
            `norm_type`, `scale_grad_by_freq` and `sparse`.
        token_scale: as given, a Python float. Its other name is `embed_scale`.
        position: as given. Where it is not plain, drops by itself or has another dtype it is called, after the lookup.
        dropout: an `nn.Dropout`.

    Raises:
        TypeError: a size that is no int, `frequencies` that are no tensor, or a `position` that is no such module.
        ValueError: a size that is not positive, an option out of range, an unknown convention or precision,
            `frequencies` of another dtype or shape, a `position` of another width or together with a convention.

    Examples:
        >>> import torch, posenc_ext
        >>> layer = posenc_ext.TransformerEmbedding(vocab_size=100, d_model=8, padding_idx=0, dropout=0.1)
        >>> layer(torch.tensor([[5, 6, 7, 0]])).shape
        torch.Size([1, 4, 8])
        >>> list(layer.state_dict())
        ['lut.weight']
    """

    count_padding = True  # of layers that were pickled without it

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        padding_idx: int | None = None,
        count_padding: bool = True,
        convention: str | Convention = "vaswani",
        precision: str | None = None,
        frequencies: Tensor | None = None,
        encoding_scale: float | Tensor = 1.0,
        position: nn.Module | None = None,
        at_padding: str = "embed",
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
        self._make_lut(
            d_model,
            vocab_size,
            padding_idx,
            max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            device=device,
            dtype=dtype,
        )
        self.convention = resolve(convention)
        self.precision = precision
        self.frequencies = frequencies
        self.encoding_scale = encoding_scale
        self.at_padding = at_padding
        self.dropout = _dropout("TransformerEmbedding", dropout)
        self.token_scale = math.sqrt(d_model) if token_scale is None else float(token_scale)
        self.batch_first = batch_first
        self.count_padding = count_padding
        self.position = position

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("position", "_convention", "_precision"):
            later = {"_convention": None, "_precision": None, **self.__dict__, **self._modules, name: value}
            _check_position(later.get("position"), self._d_model, later["_convention"], later["_precision"])
        super().__setattr__(name, value)

    def forward(
        self,
        x: Tensor,
        *,
        offset: int | Tensor = 0,
        positions: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Look up ids, scale their rows, add the encodings, and drop out in training.

        Args:
            x: ids of any shape, int64 or int32; also a nested jagged tensor.
            offset: added to every position, such as the number of tokens in a decoder's cache: an int, or an int64 or
                int32 tensor, 0-d or [batch], one number for each row. With `positions` a sum past int64 wraps. With
                `count_padding=False` it is the number of real tokens before.
            positions: positions in place of the running index, int64, int32, float32 or float64, broadcastable to the
                shape of `x`, or 1-D along the sequence. They may be negative; floating ones may be trained. With a
                learned `position` integers only.
            padding_mask: bool, of the shape of `x`, True at pads (like `key_padding_mask` in `torch.nn`); needs
                `count_padding=False`, and takes the place of `padding_idx` there.

        Returns:
            [*x.shape, d_model] in the dtype of the weight.

        Raises:
            IndexError: an id outside [0, vocab_size), or a position past a learned table; nothing has been written. On
                CUDA it comes later, from a later call or from `posenc_ext.check_errors()`.
            TypeError: an argument of another Python type.
            ValueError: a tensor of another dtype or shape, an unknown `at_padding`, or a `padding_mask` together with
                `positions` or `count_padding=True`.
            NotImplementedError: `sparse=True` inside torch.compile or torch.export.

        Examples:
            >>> import torch, posenc_ext
            >>> layer = posenc_ext.TransformerEmbedding(100, 8, padding_idx=0, count_padding=False)
            >>> alone, padded = torch.tensor([[5, 6]]), torch.tensor([[0, 0, 5, 6]])
            >>> torch.equal(layer(alone), layer(padded)[:, 2:])
            True
            >>> torch.equal(layer(torch.tensor([[6]]), offset=1), layer(alone)[:, 1:])  # a decoder's step
            True
        """
        lut: Any = self._modules["lut"]
        counted = padding_mask is not None or not self.count_padding
        dropout: Any = self._modules["dropout"]
        weight, dropout_p = plain_weight(lut), probability_in_pass(dropout, x)
        position = self._modules.get("position")
        table = None if position is None else _plain_table(position, weight, self.batch_first)
        if weight is None or (position is not None and table is None):
            if counted:
                offset, positions = _counted(
                    x,
                    lut.padding_idx,
                    self.count_padding,
                    offset,
                    positions,
                    padding_mask,
                    self._convention,
                    self.batch_first,
                )
            return drop(dropout, self._add(self._rows(x), x, offset, positions))
        function = functools.partial(_embed_counted, self.count_padding, padding_mask) if counted else embed
        y = function(
            x,
            weight,
            offset=offset,
            positions=positions,
            token_scale=self.token_scale,
            convention=self._convention,
            precision=self._precision,
            frequencies=self.frequencies,
            encoding_scale=self.encoding_scale,
            position_table=table,
            at_padding=self.at_padding,
            dropout_p=dropout_p or 0.0,
            padding_idx=lut.padding_idx,
            max_norm=lut.max_norm,
            norm_type=lut.norm_type,
            scale_grad_by_freq=lut.scale_grad_by_freq,
            sparse=lut.sparse,
            batch_first=self.batch_first,
        )
        return dropout(y) if dropout_p is None else y

    def _add(self, rows: Tensor, x: Tensor, offset: int | Tensor, positions: Tensor | None) -> Tensor:
        """Scale and encoding for rows that `lut` has looked up."""
        position: Any = self._modules.get("position")
        table = None if position is None else _plain_table(position, rows, self.batch_first)

        def encoded(rows: Tensor) -> Tensor:
            if position is not None and table is None:
                scaled, scale = rows * self.token_scale, self.encoding_scale
                alone = isinstance(scale, Tensor) or scale != 1
                y: Tensor = position(torch.zeros_like(scaled) if alone else scaled, offset=offset, positions=positions)
                return scaled + scale * y if alone else y
            return add_positional_encoding(
                rows,
                offset=offset,
                positions=positions,
                token_scale=self.token_scale,
                convention=self._convention,
                precision=self._precision,
                frequencies=self.frequencies,
                encoding_scale=self.encoding_scale,
                position_table=table,
                batch_first=self.batch_first,
            )

        if self.at_padding == "embed":
            return encoded(rows)
        padding = (x == self.padding_idx).unsqueeze(-1)
        if self.at_padding == "no_encoding":
            return torch.where(padding, rows * self.token_scale, encoded(rows))
        y = encoded(rows.masked_fill(padding, -0.0))  # -0 + x is x
        return y.masked_fill(padding, 0.0) if self.at_padding == "zeros" else y

    def extra_repr(self) -> str:
        """Convention and options; `lut` tells the sizes."""
        sinusoids = f"convention={self.convention.name!r}, precision={self.precision!r}, "
        return (
            ("" if self._modules.get("position") is not None else sinusoids)
            + f"token_scale={self.token_scale:.6g}, batch_first={self.batch_first}"
            + ("" if self.count_padding else ", count_padding=False")
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        error_msgs = rest[-1]
        rename_weight(self, state_dict, prefix, error_msgs)
        if self._modules.get("position") is None:
            consume_tables(self, self.convention, state_dict, [prefix, prefix + "1."], error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@may_be_left_out
class LearnedPositionalEmbedding(_Layer):
    """Trained positions: `x + weight[position]`, called like `PositionalEncoding`, and as long as its table.

    In one pass where both have one dtype; `TransformerEmbedding(position=...)` puts it into the pass of the lookup. Its
    gradient is deterministic. The form is that of Gehring et al. 2017, "Convolutional Sequence to Sequence Learning",
    section 3.1, as BERT and GPT-2 have it.

    Args:
        max_len: number of positions.
        d_model: width.
        dropout: probability, applied to the sum in training by `.dropout`, an `nn.Dropout`: in the same pass while that
            is plain (no hooks, not replaced), with numbers of our own that torch's generators seed.
        batch_first: whether x is [..., length, d_model] or [length, ..., d_model].
        device: of the weight.
        dtype: of the weight, float32, float64, bfloat16 or float16.

    Attributes:
        weight: [max_len, d_model], drawn from N(0, 1) as `nn.Embedding` does.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size that is not positive, or a probability outside [0, 1].

    Examples:
        >>> import torch, posenc_ext
        >>> layer = posenc_ext.LearnedPositionalEmbedding(1024, 8)
        >>> torch.equal(layer(torch.zeros(1, 3, 8)), layer.weight[:3].unsqueeze(0))
        True
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
        max_len = _size("LearnedPositionalEmbedding", "max_len", max_len)
        d_model = _size("LearnedPositionalEmbedding", "d_model", d_model)
        self.dropout = _dropout("LearnedPositionalEmbedding", dropout)
        self.batch_first = batch_first
        self.weight = nn.Parameter(torch.empty(max_len, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def max_len(self) -> int:
        """Rows of `weight`."""
        return self.weight.shape[0]

    @property
    def d_model(self) -> int:
        """Columns of `weight`."""
        return self.weight.shape[1]

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1), as `nn.Embedding` does.

        Examples:
            >>> import posenc_ext
            >>> layer = posenc_ext.LearnedPositionalEmbedding(1024, 4)
            >>> layer.reset_parameters()
            >>> 0.8 < layer.weight.std().item() < 1.2
            True
        """
        nn.init.normal_(self.weight)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Self:
        """A layer around a given table, also one that no convention explains.

        Args:
            embeddings: [max_len, d_model], float32, float64, bfloat16 or float16; not copied.
            freeze: whether the table is kept from training.
            **options: keyword arguments of the class.

        Returns:
            A layer of this class on the device and in the dtype of `embeddings`.

        Raises:
            TypeError: an option that the class does not have.
            ValueError: `embeddings` has not two dimensions, or an option is out of range.

        Examples:
            >>> import torch, posenc_ext
            >>> layer = posenc_ext.LearnedPositionalEmbedding.from_pretrained(torch.ones(10, 4))
            >>> layer.weight.shape, layer.weight.requires_grad
            (torch.Size([10, 4]), False)
        """
        if embeddings.dim() != 2:
            raise ValueError(
                f"posenc_ext.{cls.__name__}.from_pretrained: embeddings must have 2 dimensions [max_len, d_model], "
                f"got shape {list(embeddings.shape)}"
            )
        layer = cls(embeddings.shape[0], embeddings.shape[1], device="meta", **options)
        layer.weight = nn.Parameter(embeddings, requires_grad=not freeze)
        return layer

    def forward(self, x: Tensor, *, offset: int | Tensor = 0, positions: Tensor | None = None) -> Tensor:
        """Add the rows of the positions, and drop out in training.

        Args:
            x: [..., length, d_model], or [length, ..., d_model] with `batch_first=False`; float32, float64, bfloat16 or
                float16; also a nested jagged tensor.
            offset: added to every position, such as the number of tokens in a decoder's cache: an int, or an int64 or
                int32 tensor, 0-d or [batch], one number for each row.
            positions: positions in place of the running index, int64 or int32, broadcastable to the axes of `x` but the
                last, or 1-D along the sequence.

        Returns:
            A tensor of the shape of `x`, in the wider of the dtypes of `x` and the weight.

        Raises:
            IndexError: a position outside [0, max_len): nothing was learned for it. On CUDA it comes later, from a
                later call or from `posenc_ext.check_errors()`.
            TypeError: positions that are not int64 or int32, or an argument of another Python type.
            ValueError: x of another width, positions of another shape.

        Examples:
            >>> import torch, posenc_ext
            >>> layer, x = posenc_ext.LearnedPositionalEmbedding(9, 8), torch.zeros(2, 5, 8)
            >>> torch.equal(layer(x)[:, 3:], layer(x[:, 3:], offset=3))
            True
        """
        dropout: Any = self._modules["dropout"]
        dropout_p = probability_in_pass(dropout, x)
        y = _add_learned(x, self.weight, offset, positions, dropout_p or 0.0, self.batch_first)
        return dropout(y) if dropout_p is None else y

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.max_len}, {self.d_model}, batch_first={self.batch_first}"


def _add_learned(
    x: Tensor, weight: Tensor, offset: int | Tensor, positions: Tensor | None, dropout_p: float, batch_first: bool
) -> Tensor:
    """`x + weight[position]`, in the wider of two dtypes."""
    op = "LearnedPositionalEmbedding"
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"posenc_ext.{op}: x must have width {weight.shape[1]} in its last axis, got {list(x.shape)}")
    if positions is not None:
        check_integer(op, "positions", positions)
    if x.dtype != weight.dtype:
        dtype = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(dtype), weight.to(dtype)
    return add_positional_encoding(
        x, offset=offset, positions=positions, position_table=weight, dropout_p=dropout_p, batch_first=batch_first
    )
