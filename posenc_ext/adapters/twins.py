"""The few ways in which projects call their position modules, each with the same numbers from the ops.

A twin is the module itself with another class, a subclass of its own that overrides `forward`; FSDP2 and
`torch.nn.utils.parametrize` do likewise. So constructor, attributes, parameters, hooks, state keys and `isinstance` are
those of the module, whatever is trained or loaded is in it, and the way back is its first class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from posenc_ext.conventions import Convention
from posenc_ext.functional import (
    add_positional_encoding,
    embed,
    positional_encoding,
    positions_from_padding,
    scaled_embedding,
)
from posenc_ext.ops import compose
from posenc_ext.ops.tracing import in_onnx_export, is_traced
from posenc_ext.plain import is_dtensor, plain_weight, probability_in_pass

# What a `compute` returns for a call that it leaves to the module's own forward.
Computed = Any
Probe = tuple[tuple[Any, ...], dict[str, Any]]

# transformers before 5.24 calls them so.
_FORMER_NAMES = {"past_key_values_length": "cache_length", "past_key_values": "cache"}
_ROWS = 2**31 - 1


class Refused(Exception):
    """Why a module is left alone."""


class Row(NamedTuple):
    """How one class of a project is replaced.

    Attributes:
        path: the qualified name of the class; of an `nn.Embedding` that of its parent's class and its name there.
        form: the twin; None where there is nothing to be gained.
        recipe: what an instance computes; it raises `Refused` for one that the form cannot be. Without a form, why.
        table: the attribute that holds the sinusoids, where there is one.
        positions: which positions tokens get, in words.
        keys: what its state holds, in words.
    """

    path: str
    form: type[Twin] | None
    recipe: Callable[[Any], Recipe] | str
    table: str = ""
    positions: str = ""
    keys: str = ""


class Recipe:
    """What an instance computes.

    Attributes:
        convention: its columns, and its precision.
        frequencies: those of its table, where it is made in fp32; None for the convention's own.
        padding: the row of its table that is zero.
    """

    def __init__(
        self, convention: Convention | None = None, frequencies: Tensor | None = None, padding: int | None = None
    ) -> None:
        self.convention: Any = convention
        self.frequencies = frequencies
        self.padding = padding
        self._kept = frequencies

    def move(self, device: torch.device) -> None:
        """Follow a module to its device, from what was taken first: a cast and `to_empty` harm no frequency."""
        if self._kept is not None and device.type != "meta":
            self.frequencies = self._kept.to(device)


class Twin(nn.Module):
    """Comes before a project's class in the bases of a twin, see `twin_class`."""

    posenc_row: ClassVar[Row]
    posenc_original: ClassVar[type[nn.Module]]
    _posenc: Recipe
    # How far a twin may be from the original at a probe, in units of the last place of its dtype at 1.
    posenc_ulps = 4.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._posenc = self.posenc_row.recipe(self)  # type: ignore[operator]

    def compute(self, *args: Any, **options: Any) -> Computed:
        """The forward of a twin; `NotImplemented` for a call that it leaves to the original."""
        raise NotImplementedError

    def probes(self) -> Iterator[Probe]:
        """Calls that tell a difference."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `Refused` where an instance cannot be replaced, or by something else than its calls."""

    def stands_aside(self) -> bool:
        """Whether the original's forward is to be called, since something about the module has changed."""
        return in_onnx_export()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (self.posenc_original, self.posenc_row.path), self.__dict__

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.follow()
        return self

    def follow(self) -> None:
        """Bring the recipe to the device of the module."""
        placed = next((t for t in (*self.parameters(), *self.buffers())), None)
        if placed is not None:
            self._posenc.move(placed.device)


def _unpickled(original: type[nn.Module], path: str) -> nn.Module:
    from posenc_ext.adapters import ROWS

    kind = twin_class(original, next(row for row in ROWS if row.path == path))
    module: nn.Module = kind.__new__(kind)
    return module


def qualified(kind: type) -> str:
    """The name of a class by which rows are found."""
    return f"{kind.__module__}.{kind.__qualname__}"


def twin_class(original: type[nn.Module], row: Row) -> type[Twin]:
    """The subclass of a project's class that a row puts in its place."""
    return _twin_class(original, row, original.forward)  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _twin_class(original: type[nn.Module], row: Row, forward: Any) -> type[Twin]:
    form: Any = row.form
    names = [_FORMER_NAMES.get(name, name) for name in inspect.signature(forward).parameters]
    known = list(inspect.signature(form.compute).parameters)
    if names != known:
        raise Refused(f"its forward takes {', '.join(names[1:])}, and not {', '.join(known[1:])}")

    @functools.wraps(forward)  # its signature, too
    def twin_forward(self: Any, *args: Any, **options: Any) -> Any:
        if not self.stands_aside():
            renamed = {_FORMER_NAMES.get(name, name): value for name, value in options.items()}
            y = form.compute(self, *args, **renamed)
            if y is not NotImplemented:
                return y
        return forward(self, *args, **options)

    own = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": twin_forward,
        "posenc_row": row,
        "posenc_original": original,
    }
    return type(original.__name__, (form, original), own)


# ---- rows of sinusoids -----------------------------------------------------------------------------------------------


class SinusoidTable(Twin):
    """A module that looks rows of sinusoids up in a table, which it need not read."""

    @property
    def posenc_table(self) -> Tensor:
        """The table [length, D], for its dtype, its width and its device."""
        table: Tensor = getattr(self, self.posenc_row.table)
        return table

    def stands_aside(self) -> bool:
        """Whether the table is trained since."""
        return self.posenc_table.requires_grad or in_onnx_export()

    def check(self) -> None:
        """All rows of the table, and that it is not trained."""
        table = self.posenc_table
        if table.requires_grad:
            name = self.posenc_row.table
            raise Refused(f"its table {name!r} is trainable: freeze it with requires_grad_(False) first")
        if (found := self._differing_row()) is not None:
            raise Refused("row {} of its table {!r} differs by {:.3g} from the sinusoids".format(*found))

    def _differing_row(self) -> tuple[int, str, float] | None:
        with torch.no_grad():
            table = self.posenc_table
            rows = self._rows(torch.arange(len(table), device=table.device))
            far = (rows.double() - table.double()).abs().amax(1)
            worst = far.nan_to_num(float("inf")).argmax() if len(far) else None
            if worst is None or far[worst] <= self.posenc_ulps * torch.finfo(table.dtype).eps:
                return None
            return int(worst), self.posenc_row.table, float(far[worst])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        loaded = prefix + self.posenc_row.table in state_dict and not self.posenc_table.is_meta
        if loaded and (found := self._differing_row()) is not None:
            text = "row {} of the loaded table {!r} differs by {:.3g} from the sinusoids".format(*found)
            rest[-1].append(f"{prefix[:-1]}: {text} in its place; call posenc_ext.adapters.unpatch(model) first")

    def _running(self, length: int, offset: int | Tensor, device: torch.device) -> Tensor:
        """Rows [length, D] from position `offset` on."""
        table, recipe = self.posenc_table, self._posenc
        return positional_encoding(
            length,
            table.shape[-1],
            offset=offset,
            convention=recipe.convention,
            frequencies=self._frequencies(device),
            dtype=table.dtype,
            device=device,
        )

    def _rows(self, positions: Tensor) -> Tensor:
        """Rows [*positions.shape, D]; zeros at the position of pads."""
        table, recipe = self.posenc_table, self._posenc
        frequencies = self._frequencies(positions.device)
        if recipe.padding is None:
            return positional_encoding(
                positions, table.shape[-1], convention=recipe.convention, frequencies=frequencies, dtype=table.dtype
            )
        # One pass: what is looked up is zero everywhere, and its pads have no encoding.
        zeros = torch.zeros(1, table.shape[-1], dtype=table.dtype, device=positions.device)
        return embed(
            positions,
            zeros.expand(_ROWS, -1),
            positions=positions,
            token_scale=1.0,
            convention=recipe.convention,
            frequencies=frequencies,
            padding_idx=recipe.padding,
            at_padding="no_encoding",
        )

    def _frequencies(self, device: torch.device) -> Tensor | None:
        found = self._posenc.frequencies
        return found if found is None or found.device == device else found.to(device)


class OfShape(SinusoidTable):
    """Called with a shape, the length of the cache and, perhaps, positions (Marian)."""

    def compute(
        self, input_ids_shape: Any, cache_length: int | Tensor = 0, position_ids: Tensor | None = None
    ) -> Computed:
        """Rows [length, D] or [*position_ids.shape, D]."""
        if position_ids is not None:
            return self._rows(position_ids)
        return self._running(input_ids_shape[1], cache_length, self.posenc_table.device)

    def probes(self) -> Iterator[Probe]:
        """Lengths, a cache, and positions."""
        most = len(self.posenc_table)
        for length, cached in ((1, 0), (min(7, most), 0), (1, most - 1), (most // 2, most - most // 2)):
            yield (torch.Size([2, length]), cached), {}
        yield (torch.Size([2, 2]), 0), {"position_ids": torch.tensor([most - 1, 0], device=self.posenc_table.device)}


class Counted(SinusoidTable):
    """Called with ids or a mask, whose pads are not counted and get no encoding (M2M100)."""

    padding_idx: int

    def compute(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, cache_length: int | Tensor = 0
    ) -> Computed:
        """Rows [batch, length, D]."""
        if input_ids is None:
            shape, device = inputs_embeds.shape[:2], inputs_embeds.device  # type: ignore[union-attr]
            return self._running(shape[1], self.padding_idx + 1 + cache_length, device).expand(*shape, -1)
        return self._counted(input_ids, cache_length)

    def _counted(self, ids: Tensor, cache_length: int | Tensor) -> Tensor:
        first = self.padding_idx + 1
        if _has_none(ids, self.padding_idx):  # the rows of one sequence are those of all
            return self._running(ids.shape[1], first + cache_length, ids.device).expand(*ids.shape, -1)
        positions = positions_from_padding(
            ids, self.padding_idx, offset=cache_length, first_position=first, padding_position=self.padding_idx
        )
        return self._rows(positions)

    def probes(self) -> Iterator[Probe]:
        """Lengths with pads on either side, with a cache, and embeddings."""
        table, pad = self.posenc_table, self.padding_idx
        most = len(table) - pad - 1
        for length, cached in ((1, 0), (min(7, most), 0), (min(5, most - 3), 3), (1, most - 1)):
            if length > 0 and length + cached <= most:
                ids = torch.arange(3 * length, device=table.device).reshape(3, -1) + pad + 1
                yield self._probe(ids, cached)
                ids[0, : length // 2], ids[1, length // 2 :], ids[2] = pad, pad, pad
                yield self._probe(ids, cached)
                if "inputs_embeds" in inspect.signature(self.compute).parameters:
                    embeds = torch.zeros(3, length, table.shape[-1], dtype=table.dtype, device=table.device)
                    yield self._probe(None, cached, inputs_embeds=embeds)

    def _probe(self, ids: Tensor | None, cached: int, **embeds: Tensor) -> Probe:
        return (ids, *embeds.values(), cached) if embeds else (ids,), {} if embeds else self._cache(cached)

    def _cache(self, cached: int) -> dict[str, Any]:
        former = "past_key_values_length"
        names = inspect.signature(self.posenc_original.forward).parameters
        return {former if former in names else "cache_length": cached}


def _has_none(ids: Tensor, padding: int) -> bool:
    """Whether ids have no pad, where that can be asked without waiting for a device and without fixing a program."""
    if ids.device.type != "cpu" or is_traced(ids) or compose.needed():
        return False
    return not bool((ids == padding).any())


class CountedIds(Counted):
    """As `Counted`, but called with ids alone (Speech2Text)."""

    def compute(self, input_ids: Tensor, cache_length: int | Tensor = 0) -> Computed:  # type: ignore[override]
        """Rows [batch, length, D]."""
        return self._counted(input_ids, cache_length)


class CountedOrGiven(Counted):
    """As `Counted`, but positions may be given (Kosmos-2)."""

    def compute(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_length: int | Tensor = 0,
        position_ids: Tensor | None = None,
    ) -> Computed:
        """Rows [batch, length, D]."""
        if position_ids is None:
            return super().compute(input_ids, inputs_embeds, cache_length)
        like: Any = inputs_embeds if input_ids is None else input_ids
        return self._rows(position_ids.reshape(like.shape[:2]))

    def probes(self) -> Iterator[Probe]:
        """Those of ids, and positions."""
        yield from super().probes()
        positions = torch.tensor([[0, len(self.posenc_table) - 1, self.padding_idx]], device=self.posenc_table.device)
        yield (positions,), {"position_ids": positions}


class CountedWithCacheAtPads(Counted):
    """Called with ids, or with numbers that hold pads; what is cached counts at pads too (FSMT)."""

    def compute(self, input: Tensor, *, cache_length: int | Tensor = 0) -> Computed:  # type: ignore[override]
        """Rows [batch, length, D]."""
        pad = self.padding_idx
        if _has_none(input, pad):
            return self._running(input.shape[1], pad + 1 + cache_length, input.device).expand(*input.shape, -1)
        positions = positions_from_padding(input == pad, 1, first_position=pad + 1, padding_position=pad)
        return self._rows(positions + cache_length)


class AtPositions(SinusoidTable):
    """Called with positions, to which an offset is added (XGLM)."""

    offset: int

    def compute(self, position_ids: Tensor, cache_length: int | Tensor = 0) -> Computed:
        """Rows [*position_ids.shape, D]."""
        return self._rows(position_ids + self.offset)

    def probes(self) -> Iterator[Probe]:
        """Lengths, a cache, rows that differ."""
        device, most = self.posenc_table.device, len(self.posenc_table) - self.offset
        for length, start in ((1, 0), (min(7, most), 0), (1, most - 1)):
            yield (torch.arange(start, start + length, device=device).unsqueeze(0),), {}
        yield (torch.tensor([[0, most - 1], [1, 0]], device=device),), {}


class OfCodes(SinusoidTable):
    """Called with what has the length as its last axis, and the length of the cache (MusicGen)."""

    def compute(self, input_ids: Tensor, cache_length: int | Tensor = 0) -> Computed:
        """Rows [length, D]."""
        return self._running(input_ids.shape[-1], cache_length, input_ids.device)

    def probes(self) -> Iterator[Probe]:
        """Lengths, and a cache."""
        device, most = self.posenc_table.device, len(self.posenc_table)
        for length, cached in ((1, 0), (min(7, most), 0), (most // 2, most - most // 2)):
            yield (torch.zeros(2, 4, length, dtype=torch.int64, device=device), cached), {}


class OfEmbeddings(SinusoidTable):
    """As `OfCodes`, called with embeddings [batch, length, D] (MusicGen Melody)."""

    def compute(self, inputs_embeds: Tensor, cache_length: int | Tensor = 0) -> Computed:
        """Rows [length, D]."""
        return self._running(inputs_embeds.shape[1], cache_length, inputs_embeds.device)

    def probes(self) -> Iterator[Probe]:
        """Lengths, and a cache."""
        table, most = self.posenc_table, len(self.posenc_table)
        for length, cached in ((1, 0), (min(7, most), 0), (most // 2, most - most // 2)):
            yield (torch.zeros(2, length, table.shape[-1], device=table.device), cached), {}


class Lookup(SinusoidTable):
    """An `nn.Embedding` that holds sinusoids (Whisper's encoder, XLM)."""

    def compute(self, input: Tensor) -> Computed:
        """Rows [*input.shape, D]."""
        return self._rows(input)

    def probes(self) -> Iterator[Probe]:
        """A row of positions, and a table of them."""
        device, most = self.posenc_table.device, len(self.posenc_table)
        yield (torch.arange(most, device=device),), {}
        yield (torch.tensor([[0, most - 1], [most // 2, 0]], device=device),), {}


class OfActivations(Twin):
    """Computes sinusoids in the dtype of the embeddings that it is called with (Pegasus-X)."""

    embed_dim: int

    def compute(
        self, inputs_embeds: Tensor, cache_length: int | Tensor = 0, position_ids: Tensor | None = None
    ) -> Computed:
        """Rows [batch, length, D]."""
        batch, length = inputs_embeds.shape[:2]
        if position_ids is not None and position_ids.shape != (length, 1):
            return NotImplemented
        rows = positional_encoding(
            length if position_ids is None else position_ids[:, 0],
            self.embed_dim,
            offset=cache_length if position_ids is None else 0,
            convention=self._posenc.convention,
            frequencies=self._frequencies(inputs_embeds.device),
            dtype=inputs_embeds.dtype,
            device=inputs_embeds.device,
        )
        return rows.expand(batch, -1, -1)

    def _frequencies(self, device: torch.device) -> Tensor:
        found: Any = self._posenc.frequencies
        if found.device != device:  # no parameter tells it where the model is
            self._posenc.move(device)
            found = self._posenc.frequencies
        return found  # type: ignore[no-any-return]

    def probes(self) -> Iterator[Probe]:
        """In fp32: in less the original is far from what it means."""
        for length, cached in ((1, 0), (7, 0), (1, 40), (300, 700)):
            embeds = torch.zeros(2, length, self.embed_dim)
            yield (embeds, cached), {}
            yield (embeds, 0, torch.arange(cached, cached + length).unsqueeze(1)), {}


# ---- rows of tokens --------------------------------------------------------------------------------------------------


class ScaledLookup(Twin):
    """An `nn.Embedding` whose rows are multiplied by a factor: one pass in place of two."""

    embed_scale: float
    posenc_ulps = 0.0

    def compute(self, input_ids: Tensor) -> Computed:
        """Rows [*input_ids.shape, D]."""
        lut: Any = self
        if type(lut.weight) not in (nn.Parameter, Tensor) and not is_dtensor(lut.weight):
            return NotImplemented
        return scaled_embedding(input_ids, lut.weight, token_scale=float(self.embed_scale), **_flags(lut))

    def probes(self) -> Iterator[Probe]:
        """The first rows, the last one, and that of padding."""
        lut: Any = self
        rows = [0, 1, lut.num_embeddings - 1, lut.padding_idx or 0]
        yield (torch.tensor([rows, rows[::-1]], device=lut.weight.device) % lut.num_embeddings,), {}


def _flags(lut: Any) -> dict[str, Any]:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    return {name: getattr(lut, name) for name in names}


class _TokensAndTable(Twin):
    """A layer that holds tokens and a learned table of positions: both in one pass."""

    posenc_ulps = 32.0  # after a norm

    def check(self) -> None:
        """Children that are not looked into."""
        for name in ("word_embeddings", "position_embeddings"):
            if plain_weight(getattr(self, name)) is None:
                raise Refused(f"{name} is no plain nn.Embedding")

    def _sum(self, ids: Tensor, positions: Tensor | None, offset: int | Tensor = 0) -> Computed:
        tokens: Any = self._modules["word_embeddings"]
        table: Any = self._modules["position_embeddings"]
        weight, rows = plain_weight(tokens), plain_weight(table)
        if weight is None or rows is None or weight.dtype != rows.dtype or table.max_norm or table.sparse:
            return NotImplemented
        return embed(
            ids, weight, offset=offset, positions=positions, token_scale=1.0, position_table=rows, **_flags(tokens)
        )

    def probes(self) -> Iterator[Probe]:
        """Lengths, and positions."""
        tokens: Any = self.word_embeddings
        table: Any = self.position_embeddings
        for length in (1, min(7, table.num_embeddings)):
            ids = torch.arange(2 * length, device=tokens.weight.device).reshape(2, -1) % tokens.num_embeddings
            yield (ids,), {}
            yield (ids,), {"position_ids": ids.flip(1) % table.num_embeddings}


class TokensTypesAndTable(_TokensAndTable):
    """Tokens, types of tokens, a learned table of positions; norm; dropout (BERT)."""

    def compute(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_length: int = 0,
    ) -> Computed:
        """[batch, length, D]."""
        module: Any = self
        types: Any = self._modules["token_type_embeddings"]
        kinds = plain_weight(types)
        if input_ids is None or inputs_embeds is not None or kinds is None or types.max_norm or types.sparse:
            return NotImplemented
        y = self._sum(input_ids, position_ids, 0 if position_ids is not None else cache_length)
        if y is NotImplemented or kinds.dtype != y.dtype:
            return NotImplemented
        if token_type_ids is None:
            y = y + kinds[0]
        else:
            y = add_positional_encoding(y, positions=token_type_ids, position_table=kinds)
        return module.dropout(module.LayerNorm(y))

    def probes(self) -> Iterator[Probe]:
        """Those of tokens and positions, types, and a cache."""
        types: Any = self.token_type_embeddings
        for (ids,), options in super().probes():
            yield (ids,), options
            yield (ids, ids % types.num_embeddings), options
        table: Any = self.position_embeddings
        yield (ids[:, :1],), {"cache_length": table.num_embeddings - 1}


class TokensAndTable(_TokensAndTable):
    """Tokens and a table of positions; norm; dropout (DistilBERT)."""

    def compute(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Computed:
        """[batch, length, D]."""
        module: Any = self
        # As there, ids come before embeddings.
        y = NotImplemented if input_ids is None else self._sum(input_ids, position_ids)
        return y if y is NotImplemented else module.dropout(module.LayerNorm(y))


# ---- activations -----------------------------------------------------------------------------------------------------


class Scaled(Twin):
    """Adds scale * sinusoids to activations, and drops; the scale is learned (SpeechT5)."""

    dim: int
    max_len: int
    alpha: Tensor

    def compute(self, emb: Tensor) -> Computed:
        """The shape of `emb`."""
        dropout: Any = self._modules["dropout"]
        dropout_p = probability_in_pass(dropout, emb)
        if emb.dtype != self.alpha.dtype:
            return NotImplemented
        y = add_positional_encoding(
            emb,
            convention=self._posenc.convention,
            frequencies=self._posenc.frequencies,
            encoding_scale=self.alpha,
            dropout_p=dropout_p or 0.0,
        )
        return dropout(y) if dropout_p is None else y

    def probes(self) -> Iterator[Probe]:
        """Lengths."""
        for length in (1, min(7, self.max_len), self.max_len):
            like: Any = {"dtype": self.alpha.dtype, "device": self.alpha.device}
            yield (torch.linspace(-1, 1, 2 * length * self.dim, **like).reshape(2, length, -1),), {}


class Added(Twin):
    """Adds sinusoids, of which it has a table, to activations (diffusers)."""

    pe: Tensor

    def compute(self, x: Tensor) -> Computed:
        """The shape of `x`."""
        if x.dtype != self.pe.dtype:
            return NotImplemented
        recipe = self._posenc
        return add_positional_encoding(x, convention=recipe.convention, frequencies=recipe.frequencies)

    def probes(self) -> Iterator[Probe]:
        """Lengths up to that of the table."""
        for length in (1, min(7, self.pe.shape[1]), self.pe.shape[1]):
            yield (torch.zeros(2, length, self.pe.shape[2], dtype=self.pe.dtype, device=self.pe.device),), {}
