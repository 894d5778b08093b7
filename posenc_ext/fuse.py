"""One layer in place of the textbook's pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

from posenc_ext import reference
from posenc_ext.checkpoints import matches
from posenc_ext.conventions import CONVENTIONS
from posenc_ext.modules import Embeddings, PositionalEncoding, TransformerEmbedding

_EMBEDDINGS = (Embeddings, reference.Embeddings)
_ENCODINGS = (PositionalEncoding, reference.PositionalEncoding)
_KNOWN = {*_EMBEDDINGS, *_ENCODINGS, nn.Embedding, nn.Dropout}


def fuse(module: nn.Module) -> nn.Module:
    """Replace `Sequential(Embeddings, PositionalEncoding[, Dropout])` by one `TransformerEmbedding`.

    The fused modules and their textbook twins in `posenc_ext.reference` are recognised. The weight is the same
    Parameter, so tied layers and optimizers keep it. A sequence nested in a larger model is replaced in place.

    Args:
        module: such a sequence, or a model that holds some.

    Returns:
        The new layer, or `module` with its sequences replaced.

    Raises:
        ValueError: there is no such sequence, or none that computes what one layer can; the message says why.
    """
    layers: dict[int, nn.Module] = {}  # by sequence: one that is used twice stays one
    refusals: list[str] = []
    for path, child in module.named_modules():
        if (pair := _pair(child)) is None:
            continue
        reason = next((reason.format(found) for find, reason in _REFUSALS if (found := find(pair))), None)
        if reason is None:
            layers[id(child)] = _layer(pair)
        else:
            refusals.append(f"{path!r} cannot be fused: {reason}" if path else f"it cannot be fused: {reason}")
    if not layers:
        wanted = "module must be or hold Sequential(Embeddings, PositionalEncoding[, Dropout])"
        raise ValueError("; ".join((f"posenc_ext.fuse: {wanted}, got {type(module).__name__}", *refusals)))
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = layers.get(id(child), child)
    return layers.get(id(module), module)


class _Pair(NamedTuple):
    sequence: nn.Sequential
    embeddings: Embeddings | reference.Embeddings
    encoding: PositionalEncoding | reference.PositionalEncoding
    rest: list[nn.Module]

    @property
    def parts(self) -> list[nn.Module]:
        return [self.embeddings, self.embeddings.lut, self.encoding, *self.rest]

    @property
    def dropouts(self) -> list[float]:
        own = [self.encoding.dropout] if isinstance(self.encoding, PositionalEncoding) else []
        return [m.p for m in (*own, *self.rest) if isinstance(m, nn.Dropout) and m.p]


def _pair(module: nn.Module) -> _Pair | None:
    if not isinstance(module, nn.Sequential) or len(module) < 2:
        return None
    embeddings, encoding, *rest = module
    if not isinstance(embeddings, _EMBEDDINGS) or not isinstance(encoding, _ENCODINGS):
        return None
    return _Pair(module, embeddings, encoding, rest)


def _names(modules: Iterable[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _widths(pair: _Pair) -> str:
    own, width = pair.encoding, pair.embeddings.lut.embedding_dim
    encoded = own.d_model if isinstance(own, PositionalEncoding) else own.pe.shape[-1]
    return f"{width} and {encoded}" if width != encoded else ""


def _edited(pair: _Pair) -> str:
    textbook = isinstance(pair.encoding, reference.PositionalEncoding)
    return _names([pair.encoding]) if textbook and not matches(pair.encoding.pe[0], CONVENTIONS["vaswani"]) else ""


# What one layer cannot compute: what is found in a pair, and the reason against it. The first one found is reported.
_REFUSALS: tuple[tuple[Callable[[_Pair], str], str], ...] = (
    (lambda pair: _names(pair.rest[1:]), "only a Dropout may follow the pair, and {} comes after"),
    (
        lambda pair: _names(m for m in pair.rest if not isinstance(m, nn.Dropout)),
        "{} follows the pair, and is no Dropout",
    ),
    (lambda pair: _names(m for m in pair.parts if type(m) not in _KNOWN), "{} may compute something else"),
    (lambda pair: _names(filter(_hooked, (pair.sequence, *pair.parts))), "{} has hooks"),
    (_widths, "the widths {} differ"),
    (_edited, "the table of {} was edited"),
    (lambda pair: " and ".join(map(str, pair.dropouts[1:] and pair.dropouts)), "two dropouts, {}, are not one"),
)


def _layer(pair: _Pair) -> TransformerEmbedding:
    embeddings, lut = pair.embeddings, pair.embeddings.lut
    # The textbook's twins have no options.
    own = pair.encoding if isinstance(pair.encoding, PositionalEncoding) else PositionalEncoding(lut.embedding_dim)
    layer = TransformerEmbedding(
        lut.num_embeddings,
        lut.embedding_dim,
        convention=own.convention,
        precision=own.precision,
        dropout=pair.dropouts[0] if pair.dropouts else 0.0,
        token_scale=embeddings.token_scale if isinstance(embeddings, Embeddings) else None,
        batch_first=own.batch_first,
        device="meta",
    )
    layer.lut = lut
    layer.train(pair.sequence.training)
    return layer
