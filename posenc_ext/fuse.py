"""One layer in place of the textbook's pair, and the pair in place of one layer."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc_ext import functional, reference
from posenc_ext.identify import follows, is_table
from posenc_ext.modules import Embeddings, PositionalEncoding, TransformerEmbedding
from posenc_ext.plain import is_plain

# ---- fuse ------------------------------------------------------------------------------------------------------------


def fuse(module: nn.Module, *, probe: Tensor | None = None) -> nn.Module:
    """Replace each `nn.Sequential(embeddings, position encoding[, nn.Dropout])` by one `TransformerEmbedding`.

    Embeddings are `posenc_ext.Embeddings`, an `nn.Embedding`, or a class of yours that holds one and no other
    parameter. A position encoding is `posenc_ext.PositionalEncoding`, or a class of yours that holds a table of a known
    convention (a buffer, an attribute or a frozen parameter), no other parameter, and no child but `nn.Dropout`.

    A pair with a class of yours is called on a few ids, and so is the layer; it is replaced if they differ by rounding
    only, in evaluation and in training. That also tells the factor of the rows and the axis of the sequence. What is
    called is a copy around random rows, without gradients, and the state of the random generators is put back.

    The layer keeps the `nn.Embedding` and the `nn.Dropout` themselves. So the weight is the same Parameter, ties and
    optimizers stay, and so do hooks and flags of the two. Keys of the state become those of the layer (`lut.weight`):
    load old checkpoints before. A sequence inside a larger model is replaced in place.

    Args:
        module: such a sequence, or a model that holds some.
        probe: ids to call a pair with, int64 or int32 of any shape that it takes, instead of small ones of shapes [2,
            7] and [3, 5].

    Returns:
        The new layer, or `module` with its sequences replaced. A warning names the pairs that stay.

    Raises:
        ValueError: nothing can be replaced; the message names what was found, and why it stays.
        TypeError: `probe` is no tensor of ids.

    Examples:
        >>> import torch, posenc_ext
        >>> from posenc_ext.reference import Embeddings, PositionalEncoding
        >>> pair = torch.nn.Sequential(Embeddings(8, 100), PositionalEncoding(8))
        >>> layer = posenc_ext.fuse(pair)
        >>> type(layer).__name__, layer.weight is pair[0].lut.weight
        ('TransformerEmbedding', True)
    """
    if probe is not None and (not isinstance(probe, Tensor) or probe.dtype not in (torch.int64, torch.int32)):
        raise TypeError(f"posenc_ext.fuse: probe must be a tensor of ids, int64 or int32, got {_described(probe)}")
    layers: dict[int, nn.Module] = {}  # by sequence: one that is used twice stays one
    stays: list[str] = []
    for path, child in module.named_modules():
        if (pair := _find(child)) is None:
            stays += _siblings(path, child)
            continue
        try:
            layers[id(child)] = _fused(pair, probe)
        except _Refusal as reason:
            stays.append(f"{_place(path)} ({_names([pair.embeddings, pair.encoding])}) stays: {reason}")
    if not layers:
        wanted = "module must be or hold nn.Sequential(embeddings, position encoding[, nn.Dropout])"
        found = "; ".join(stays) or _nearby(module)
        raise ValueError(f"posenc_ext.fuse: {wanted}, got {_names([module])}. Found {found}")
    if stays:
        warnings.warn(f"posenc_ext.fuse: {'; '.join(stays)}", stacklevel=2)
    return _replaced(module, layers)


# What is known without a comparison; whatever `lut` is, the layer calls it.
_KNOWN = (nn.Sequential, nn.Dropout, Embeddings, PositionalEncoding)


class _Refusal(Exception):
    """Why a pair stays."""


class _Pair(NamedTuple):
    sequence: nn.Sequential
    start: int
    lut: Any  # an nn.Embedding, or what stands for it in `Embeddings`

    @property
    def embeddings(self) -> Any:
        return self.sequence[self.start]

    @property
    def encoding(self) -> Any:
        return self.sequence[self.start + 1]

    @property
    def others(self) -> list[nn.Module]:
        """What is in the sequence and may not be."""
        members = list(self.sequence)
        after = members[self.start + 2 :]
        return members[: self.start] + after[bool(after) and type(after[0]) is nn.Dropout :]

    @property
    def width(self) -> int:
        return int(getattr(self.lut, "embedding_dim", 0) or self.embeddings.d_model)

    @property
    def outer(self) -> list[nn.Module]:
        """All modules but those of `lut`."""
        inner = set(self.lut.modules())
        return [module for module in self.sequence.modules() if module not in inner]

    @property
    def dropouts(self) -> list[nn.Dropout]:
        """First those that act."""
        return sorted((m for m in self.outer if type(m) is nn.Dropout), key=lambda m: m.p == 0)

    @property
    def kept(self) -> list[nn.Module]:
        return [self.lut, *self.dropouts[:1]]

    @property
    def lost(self) -> list[nn.Module]:
        return [module for module in self.outer if module not in self.kept]


def _find(module: nn.Module) -> _Pair | None:
    for start, (first, second) in enumerate(itertools.pairwise(module if isinstance(module, nn.Sequential) else ())):
        if (lut := _lut(first)) is not None and _tabulates(second):
            return _Pair(module, start, lut)  # type: ignore[arg-type]
    return None


def _lut(module: nn.Module) -> nn.Module | None:
    """What an embeddings module looks its rows up in."""
    if isinstance(module, (Embeddings, reference.Embeddings)):
        return module.lut
    if isinstance(module, nn.Embedding):
        return module
    found = [child for child in module.children() if isinstance(child, nn.Embedding)]
    return found[0] if len(found) == 1 and set(module.parameters()) == set(found[0].parameters()) else None


def _tabulates(module: nn.Module) -> bool:
    """Whether a module looks like a position encoding; the numbers of its table are another question."""
    if isinstance(module, PositionalEncoding):
        return True
    return bool(_tables(module)) and all(isinstance(child, nn.Dropout) for child in module.children())


def _tables(module: nn.Module) -> dict[str, Tensor]:
    """What may be a table, as rows [length, D]. A frozen parameter must be one: linear layers have such shapes too."""
    own = {**module.__dict__, **module._buffers, **module._parameters}
    tables = {
        name: tensor.reshape(-1, tensor.shape[-1])
        for name, tensor in own.items()
        if type(tensor) in (Tensor, nn.Parameter) and not tensor.requires_grad and is_table(tensor) and tensor.numel()
    }
    return {name: rows for name, rows in tables.items() if name not in module._parameters or follows(rows)}


def _encodes(module: nn.Module) -> bool:
    """Whether a module is a position encoding, by its numbers."""
    known = isinstance(module, PositionalEncoding)
    return known or (_tabulates(module) and any(map(follows, _tables(module).values())))


def _fused(pair: _Pair, probe: Tensor | None) -> TransformerEmbedding:
    for find, reason in _REFUSALS:
        if found := find(pair):
            raise _Refusal(reason.format(found))
    if not all(type(module) in _KNOWN for module in pair.lost):
        return _layer(pair, **_compared(pair, probe))
    scale = pair.embeddings.token_scale if isinstance(pair.embeddings, Embeddings) else 1.0
    return _layer(pair, token_scale=scale, **_recipes(pair.encoding)[0])


def _layer(pair: _Pair, **recipe: Any) -> TransformerEmbedding:
    layer = TransformerEmbedding(1, pair.width, device="meta", **recipe).train(pair.sequence.training)
    layer.lut = pair.lut
    layer.dropout = next(iter(pair.dropouts), layer.dropout)
    return layer


def _replaced(module: nn.Module, others: dict[int, nn.Module]) -> nn.Module:
    """A module with those in place of its own that are given by the ids of these."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in others:
                parent._modules[name] = others[id(child)]
    return others.get(id(module), module)


# ---- what one layer cannot compute -----------------------------------------------------------------------------------


def _altered(modules: Iterable[nn.Module]) -> str:
    """Modules with hooks of any kind, or with a forward put over that of their class."""
    return _names(
        m for m in modules if any(v for name, v in vars(m).items() if name.endswith("_hooks") or name == "forward")
    )


def _parameters(pair: _Pair) -> str:
    """Those that neither belong to the table of tokens nor are frozen in that of positions."""
    kept = {*pair.lut.parameters(), *(p for p in pair.encoding.parameters() if not p.requires_grad)}
    return ", ".join(repr(name) for name, parameter in pair.sequence.named_parameters() if parameter not in kept)


def _widths(pair: _Pair) -> str:
    width = getattr(pair.encoding, "d_model", pair.width)
    return "" if width == pair.width else f"{pair.width} and {width}"


# What is found in a pair, and the reason against it. The first one found is reported.
_REFUSALS: tuple[tuple[Callable[[_Pair], str], str], ...] = (
    (lambda pair: _names(m for m in [pair.sequence] if type(m) is not nn.Sequential), "{} is no plain nn.Sequential"),
    (
        lambda pair: _names(pair.others),
        "{} is in the same nn.Sequential, where only an nn.Dropout may follow: give the pair one of its own",
    ),
    (lambda pair: _altered(pair.lost), "{} has hooks, or a forward of its own"),
    (
        lambda pair: " and ".join(acting) if len(acting := [str(m.p) for m in pair.dropouts if m.p]) > 1 else "",
        "two dropouts, {}, are not one",
    ),
    (_parameters, "the layer has no place for the parameter {}"),
    (_widths, "the widths {} differ"),
)


# ---- classes that are not ours ---------------------------------------------------------------------------------------


def _compared(pair: _Pair, probe: Tensor | None) -> dict[str, Any]:
    """The recipe of the layer that computes what a pair does, found by calling both."""
    if found := _altered(pair.kept):
        raise _Refusal(f"it cannot be called for a comparison, since {found} has hooks, or a forward of its own")
    weight = pair.lut._parameters.get("weight")
    tensors = (*pair.sequence.parameters(), *pair.sequence.buffers())
    if type(weight) is not nn.Parameter or any(tensor.is_meta for tensor in tensors):
        raise _Refusal("it cannot be called for a comparison, since its weight is no plain Parameter, or on meta")
    recipes = _recipes(pair.encoding)
    if not recipes:
        found = ", ".join(map(repr, _tables(pair.encoding)))
        raise _Refusal(f"the table {found} of {_names([pair.encoding])} follows no known convention")
    try:
        with torch.no_grad(), _kept_random_state(weight.device):
            return _fitting(pair, recipes, _default_probes(pair) if probe is None else [probe.to(weight.device)])
    except _Refusal:
        raise
    except Exception as error:
        raise _Refusal(f"copying and calling it raised {type(error).__name__}: {error}") from error


def _recipes(encoding: nn.Module) -> list[dict[str, Any]]:
    """What an encoding may be: for a table, first what it is nearest to."""
    if isinstance(encoding, PositionalEncoding):
        own = {"convention": encoding.convention, "precision": encoding._precision, "batch_first": encoding.batch_first}
        return [own]
    found = [pair for rows in _tables(encoding).values() for pair in follows(rows)]
    orders = (True, False)
    return [{"convention": c, "precision": p, "batch_first": order} for c, p in found for order in orders]


def _default_probes(pair: _Pair) -> list[Tensor]:
    """The first ids and the last ones, and that of padding."""
    rows, device = pair.lut.weight.shape[0], pair.lut.weight.device
    longest = min([7, *(len(table) for table in _tables(pair.encoding).values())])
    first = torch.arange(2 * longest, device=device).reshape(2, -1) % rows
    last = (rows - 1 - torch.arange(3 * max(longest - 2, 1), device=device).reshape(3, -1)) % rows
    last[-1, -1] = first[-1, -1] if pair.lut.padding_idx is None else pair.lut.padding_idx
    return [first, last]


def _fitting(pair: _Pair, recipes: list[dict[str, Any]], probes: list[Tensor]) -> dict[str, Any]:
    dtype = pair.lut.weight.dtype
    twin = _twin(pair, dtype, 1.0, probes)
    wide = _twin(pair, torch.float64, 1e6, probes)  # tells the factor, since nothing rounds there
    for ids in probes:
        got, shape = twin.sequence.eval()(ids), [*ids.shape, pair.width]
        if not isinstance(got, Tensor) or list(got.shape) != shape or got.dtype != dtype:
            raise _Refusal(f"it returns {_described(got)}, and a layer {dtype} {shape}")
    nearest = (True, math.inf, math.inf)
    for recipe in recipes:
        orders = [recipe, {**recipe, "batch_first": not recipe["batch_first"]}]
        scale = _scale(wide, recipe, probes[0])
        off = [_off(twin, {**each, "token_scale": scale}, probes) for each in orders]
        if off[0][1] <= 1:
            if off[1][1] <= 1 and orders[1] in recipes and probes[0].dim() > 1:
                raise _Refusal("these ids do not tell which axis is the sequence; give others as probe=")
            return {**recipe, "token_scale": scale}
        nearest = min(nearest, off[0])
    mode = "evaluation" if nearest[0] else "training"
    raise _Refusal(f"its results differ from those of the layer by {nearest[2]:.3g} in {mode}")


def _twin(pair: _Pair, dtype: torch.dtype, size: float, probes: list[Tensor]) -> _Pair:
    """A copy of a pair in another type around random rows of some size. Its dropout takes a half."""
    weight, used = pair.lut.weight, torch.cat([ids.flatten() for ids in probes]).long()
    rows = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    generator = torch.Generator().manual_seed(0)
    rows[used] = size * torch.randn(len(used), pair.width, generator=generator, device="cpu").to(rows)
    memo: dict[int, Any] = {id(weight): nn.Parameter(rows)}
    sequence = copy.deepcopy(pair.sequence, memo)
    twin = pair._replace(sequence=sequence if dtype == weight.dtype else sequence.to(dtype), lut=memo[id(pair.lut)])
    for dropout in twin.dropouts:
        dropout.p = 0.5 if dropout.p else 0.0
        dropout.register_forward_hook(lambda *_: None)  # so that the layer calls it too: both draw the same numbers
    return twin


def _scale(twin: _Pair, recipe: dict[str, Any], ids: Tensor) -> float:
    """The factor of the rows by least squares, or the number near it that was meant."""
    twin.sequence.eval()
    rows, scaled = twin.lut(ids), twin.sequence(ids) - _layer(twin, token_scale=0.0, **recipe)(ids)
    scale = float((scaled * rows).sum() / rows.square().sum())
    meant = [1.0, math.sqrt(twin.width), float(f"{scale:.7g}"), scale]
    return next(number for number in meant if math.isclose(scale, number, rel_tol=1e-9) or number is scale)


def _off(twin: _Pair, recipe: dict[str, Any], probes: list[Tensor]) -> tuple[bool, float, float]:
    """How far pair and layer are apart: already in evaluation; in units of what rounding explains; as it is."""
    eps = torch.finfo(twin.lut.weight.dtype).eps
    for training in (False, True):
        worst = (0.0, 0.0)
        for ids in probes:
            layer = _layer(twin, **recipe).train(training)
            got, want = (_called(module, ids).double() for module in (twin.sequence.train(training), layer))
            error = (got - want).abs().nan_to_num(nan=math.inf)
            # The tolerance of a table is that of identify.distance. Dropout doubles it.
            rounding = 4 * eps + 2e-6 + 8e-7 * (max(ids.shape, default=1) + 2) + 2 * eps * want.abs()
            worst = max(worst, (float((error / rounding).max()), float(error.max())))
        if worst[0] > 1:
            break
    return not training, *worst


def _called(module: nn.Module, ids: Tensor) -> Any:
    with _kept_random_state(ids.device):
        return module(ids)


def _kept_random_state(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


# ---- what is said ----------------------------------------------------------------------------------------------------


def _names(modules: Iterable[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _place(path: str) -> str:
    return repr(path) if path else "module"


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _listed(modules: Iterable[tuple[str, nn.Module]]) -> tuple[str, str]:
    """The embeddings and the position encodings among modules."""
    named = list(modules)
    encodings = [module for _, module in named if _encodes(module)]
    embeddings = [module for _, module in named if _lut(module) is not None and module not in encodings]
    inner = [_lut(module) for module in embeddings if _lut(module) is not module]
    outer = [module for module in embeddings if module not in inner]
    first, second = (
        ", ".join(f"{_place(path)} ({_names([module])})" for path, module in named if module in found)
        for found in (outer, encodings)
    )
    return first, second


def _siblings(path: str, module: nn.Module) -> list[str]:
    """Pairs in one module that does not say which of the two comes first."""
    first, second = _listed(module.named_children())
    if not first or not second:
        return []
    if isinstance(module, nn.Sequential):
        why = "they do not follow each other"
    else:
        why = f"their order is in the forward of {_names([module])}; use posenc_ext.TransformerEmbedding there"
    return [f"{_place(path)} holds embeddings {first} and position encoding {second} as siblings: {why}"]


def _nearby(module: nn.Module) -> str:
    """What there is, where there is no pair."""
    first, second = _listed(module.named_modules())
    return f"embeddings: {first or 'none'}; position encodings with a table of a known convention: {second or 'none'}"


# ---- unfuse ----------------------------------------------------------------------------------------------------------


def unfuse(module: nn.Module, *, max_len: int = 5000) -> nn.Module:
    """Replace the layers of this package by the textbook's modules of `posenc_ext.reference`, which are plain PyTorch.

    `TransformerEmbedding` becomes `nn.Sequential(Embeddings, PositionalEncoding[, nn.Dropout])`; `Embeddings` and
    `PositionalEncoding` become their twins. `lut` and `dropout` are the same modules, and the table `pe` holds what the
    layer adds: in fp32 and fp64 the results are the same bits. In 16-bit types they differ by rounding, since the
    textbook rounds product, table and sum. `fuse` is the way back; it finds the convention in the table.

    What is lost: `offset=` and `positions=` cannot be given; ids must be [batch, length], or [length, batch] where the
    layer is sequence-first; positions end at `max_len`. A `LearnedPositionalEmbedding` stays as it is.

    Args:
        module: a layer, or a model that holds some: they are replaced in place.
        max_len: rows of each table.

    Returns:
        The plain modules, or `module` with its layers replaced.

    Raises:
        ValueError: `max_len` is not positive, or a layer does more than its class: it has hooks, a forward of its own,
            or is of a subclass; or it has `count_padding=False`. Nothing has been replaced then.

    Examples:
        >>> import posenc_ext
        >>> pair = posenc_ext.unfuse(posenc_ext.TransformerEmbedding(100, 8), max_len=50)
        >>> {name: list(tensor.shape) for name, tensor in pair.state_dict().items()}
        {'0.lut.weight': [100, 8], '1.pe': [1, 50, 8]}
    """
    if type(max_len) is not int or max_len <= 0:
        raise ValueError(f"posenc_ext.unfuse: max_len must be a positive int, got {max_len!r}")
    plain: dict[int, nn.Module] = {}
    for path, child in module.named_modules():
        if isinstance(child, kinds := (Embeddings, PositionalEncoding, TransformerEmbedding)):
            if type(child) not in kinds or _altered([child]):
                text = f"{_place(path)} ({_names([child])}) has a class, hooks or a forward of its own"
                raise ValueError(f"posenc_ext.unfuse: {text}, so it may do more than a plain module")
            if getattr(child, "at_padding", "embed") != "embed":
                text = f"{_place(path)} ({_names([child])}) has at_padding={child.at_padding!r}"
                raise ValueError(f"posenc_ext.unfuse: {text}, and the textbook's modules treat pads like other tokens")
            if not getattr(child, "count_padding", True):
                text = f"{_place(path)} ({_names([child])}) has count_padding=False"
                raise ValueError(f"posenc_ext.unfuse: {text}, and the textbook's modules count pads")
            plain[id(child)] = _textbook(child, max_len)
    return _replaced(module, plain)


def _textbook(layer: Embeddings | PositionalEncoding | TransformerEmbedding, max_len: int) -> nn.Module:
    parts: list[nn.Module] = []
    if not isinstance(layer, PositionalEncoding):
        with torch.random.fork_rng([]), torch.device("cpu"):  # a row is drawn, and thrown away
            embeddings = reference.Embeddings(layer.d_model, 1, layer.token_scale)
        embeddings.lut = layer.lut
        parts.append(embeddings)
    if (position := layer._modules.get("position")) is not None and isinstance(layer, TransformerEmbedding):
        parts.append(position)
        if layer.dropout.p or not is_plain(layer.dropout, nn.Dropout):
            parts.append(layer.dropout)
    elif not isinstance(layer, Embeddings):
        encoding = reference.PositionalEncoding(layer.d_model, 1, batch_first=layer.batch_first)
        like = layer._placement if isinstance(layer, PositionalEncoding) else next(layer.lut.parameters())
        table = functional.positional_encoding(
            max_len,
            layer.d_model,
            convention=layer.convention,
            precision=layer.precision,
            frequencies=layer.frequencies,
            dtype=like.dtype,
            device=like.device,
        )
        table = (table * layer.encoding_scale).to(table.dtype)
        encoding.pe = table.unsqueeze(0 if layer.batch_first else 1).detach()
        parts.append(encoding)
        if layer.dropout.p or not is_plain(layer.dropout, nn.Dropout):
            if isinstance(layer, PositionalEncoding):
                encoding.dropout = layer.dropout
            else:
                parts.append(layer.dropout)
    plain = parts[0] if len(parts) == 1 else nn.Sequential(*parts)
    for part in (plain, *parts[:2]):
        part.training = layer.training
    return plain
