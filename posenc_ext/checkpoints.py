"""Old checkpoints: tables are found by name, checked against the module's formula and dropped; weights are renamed.

The textbook modules save their table. A module without one consumes it, but only if it holds the numbers the module
would compute: a table of another convention means a model that was trained with other positions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from posenc_ext import functional
from posenc_ext.conventions import CONVENTIONS, Convention
from posenc_ext.identify import alike, distance, identify, is_table, unit_of

# Names under which projects save a table of encodings: the Annotated Transformer and ESPnet; PyTorch's tutorials;
# fairseq and old M2M100; NeMo; Whisper; CTranslate2; HuggingFace's Wav2Vec2-Conformer; fairseq2;
# positional-encodings 6.0.2.
TABLE_KEYS = (
    "pe",
    "pos_embedding",
    "weights",
    "pos_enc",
    "positional_embedding",
    "encodings",
    "pos_encoding",
    "freqs",
    "cached_penc",
)
# Their frequencies: positional-encodings, SpeechBrain and x-transformers; TimesFM; PyG.
FREQUENCY_KEYS = ("inv_freq", "freqs", "inv_timescales", "frequency")
# A trained factor of the encoding: ESPnet and SpeechT5; x-transformers.
SCALE_KEYS = ("alpha", "scale")
# Saved beside a table, and empty of information: fairseq's dtype marker.
MARKER_KEYS = ("_float_tensor",)
# The weight of a TransformerEmbedding: today's name, that of version 0.1, and those of the pair in an nn.Sequential.
WEIGHT_KEYS = ("lut.weight", "weight", "0.lut.weight", "0.weight")
# Of a position module alone: Pegasus, Marian, FSMT and HuggingFace's Whisper keep a table in an nn.Embedding.
_OF_POSITIONS = ("weight", *SCALE_KEYS)


def consume_tables(
    module: nn.Module, convention: Convention, state_dict: dict[str, Any], prefixes: list[str], errors: list[str]
) -> None:
    """Drop what is below `prefixes` of an encoding from `state_dict`, or append to `errors` what is wrong with it.

    That is tables, frequencies and factors; a factor becomes the module's `encoding_scale` where that is trained. The
    first prefix is the module's. What the module has under one of the names, as a subclass may, is its own.
    """
    own = _own(module, prefixes[0])
    below = [prefix for prefix in prefixes if prefix not in own]
    names = dict.fromkeys((*MARKER_KEYS, *TABLE_KEYS, *FREQUENCY_KEYS, *_OF_POSITIONS))
    for prefix, name in ((prefix, name) for prefix in below for name in names):
        key = prefix + name
        of_lookup = name in _OF_POSITIONS and prefix == prefixes[0] and "lut" in module._modules
        if key not in state_dict or key in own or of_lookup:
            continue
        value = state_dict.pop(key)
        if name in MARKER_KEYS:
            continue
        if name in SCALE_KEYS:
            wrong = _take_scale(value, module, state_dict, prefixes[0])
        elif name in FREQUENCY_KEYS and isinstance(value, Tensor) and value.dim() == 1:
            wrong = _take_frequencies(value, module, convention, state_dict, prefixes[0])
        else:
            wrong = _wrong_table(value, name, module, convention)
        if wrong:
            kind = "factor" if name in SCALE_KEYS else "table"
            errors.append(f"posenc_ext.{type(module).__name__}: the {kind} {key!r} in the checkpoint {wrong}")


def rename_weight(module: nn.Module, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Give the weight of a `TransformerEmbedding` its name of today, or append to `errors` that it has several."""
    of_pair = "0" not in module._modules  # a subclass may have a child of that name
    names = [name for name in WEIGHT_KEYS if of_pair or not name.startswith("0.")]
    keys = [prefix + name for name in names if prefix + name in state_dict]
    if len(keys) > 1:
        found = " and ".join(map(repr, keys))
        errors.append(
            f"posenc_ext.{type(module).__name__}: {found} are in the checkpoint together, and name one weight"
        )
    values = [state_dict.pop(key) for key in keys]
    if values:
        state_dict[prefix + WEIGHT_KEYS[0]] = values[0]
    # The rest of a `lut` in the pair, which has other names where it is parametrised.
    pair = prefix + "0.lut."
    for key in [key for key in state_dict if of_pair and key.startswith(pair)]:
        state_dict.setdefault(prefix + "lut." + key.removeprefix(pair), state_dict.pop(key))


def _own(module: nn.Module, prefix: str) -> set[str]:
    """The keys of a module's own parameters and buffers, and the prefixes of its children."""
    kept = set(module._parameters) | set(module._buffers) - module._non_persistent_buffers_set
    return {prefix + name for name in kept} | {prefix + name + "." for name in module._modules}


def _take_scale(value: Any, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> str:
    """Hand a factor to the module's own, if that is trained. What is wrong with it, if anything."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else _kind(value)
        return f"must hold one floating number, got {got}"
    scale: Any = module.encoding_scale
    key = prefix + "encoding_scale"
    if isinstance(scale, nn.Parameter):
        if key in state_dict:
            return f"and {key!r} are there together, and name one number"
        state_dict[key] = value.reshape(scale.shape)
        return ""
    if value.is_meta or isinstance(value, FakeTensor) or math.isclose(float(value), float(scale), rel_tol=1e-6):
        return ""
    return (
        f"is {float(value):.9g}, and encoding_scale of this module {float(scale):.9g}: construct it with that number, "
        "or with an nn.Parameter as encoding_scale, which loads it"
    )


def _take_frequencies(
    value: Tensor, module: nn.Module, convention: Convention, state_dict: dict[str, Any], prefix: str
) -> str:
    """Hand frequencies [pairs] to the module's own, if these are trained. What is wrong with them, if anything."""
    own: Any = module.frequencies
    if isinstance(own, nn.Parameter) and own.shape == value.shape:
        state_dict.setdefault(prefix + "frequencies", value)
        return ""
    if value.numel() == 0 or value.is_meta or isinstance(value, FakeTensor):
        return ""

    width: int = module.d_model  # type: ignore[assignment]

    def are_of(convention: Convention) -> bool:
        want = functional.angular_frequencies(width, convention=convention, precision="exact")
        got = value.detach().cpu()
        return got.shape == want.shape and bool(((got.double() - want).abs() <= (2 * unit_of(got) + 4e-7) * want).all())

    if own is not None:
        got = value.detach().to(own)
        equal = own.is_meta or (
            got.shape == own.shape and torch.allclose(got, own, rtol=2 * unit_of(value) + 4e-7, atol=0)
        )
        return "" if equal else "does not hold the frequencies that this module was given"
    if are_of(convention):
        return ""
    names = " or ".join(repr(c.name) for c in CONVENTIONS.values() if are_of(c))
    return (
        f"does not hold the frequencies of convention {convention.name!r} at width {width}: they are those of "
        f"{names or 'no known convention'}"
    )


def _wrong_table(table: Any, name: str, module: nn.Module, convention: Convention) -> str:
    """What is wrong with a table for this module, if anything."""
    width: int = module.d_model  # type: ignore[assignment]
    batch_first: bool = module.batch_first  # type: ignore[assignment]
    if isinstance(table, np.ndarray) and table.dtype in (np.float16, np.float32, np.float64):
        table = torch.tensor(table)
    if type(table) not in (Tensor, nn.Parameter, FakeTensor) or table.layout != torch.strided or table.is_nested:
        return f"must be a dense tensor, got {_kind(table)}"
    if table.dim() == 1 and table.numel() == 0:
        return ""  # a placeholder
    if name == "cached_penc" and table.dim() == 3:
        table = table[:1]  # repeated for a batch
    if not is_table(table, width):
        return f"must hold encodings of width {width}, got {table.dtype} {list(table.shape)}"
    axes = [axis for axis, size in enumerate(table.shape[:-1]) if size != 1]
    if table.dim() == 3 and axes and axes != [1 if batch_first else 0] and name != "cached_penc":
        order = "sequence first" if batch_first else "batch first"
        return f"is {order}, {list(table.shape)}: construct the module with batch_first={not batch_first}"
    if table.is_meta or isinstance(table, FakeTensor):
        return ""  # no numbers to look at
    rows = table.detach().reshape(-1, width)
    # A trained factor is a tensor, and the table is kept without it; a constant one may be part of the table (NeMo).
    given: Any = module.encoding_scale
    scale = 1.0 if isinstance(given, Tensor) else float(given)
    for start in (0, convention.first_position):
        # In a table from position 0 the row before the first position may be zero: it is that of the padding id.
        padding = convention.first_position - 1 - start
        own: Any = module.frequencies
        if distance(rows, convention, start=start, scale=scale, padding=padding, frequencies=own)[0] < math.inf:
            return ""
    factor = "" if scale == 1 else f" times {scale:.9g}"
    return (
        f"is not that of convention {convention.name!r}{factor}: {recognise(rows)}. "
        "Construct the module with the convention that the model was trained with; a table that follows none is "
        "kept by posenc_ext.LearnedPositionalEmbedding.from_pretrained"
    )


def recognise(rows: Tensor) -> str:
    """What rows [length, D] hold, for a message."""
    found = identify(rows)
    if found is None:
        return "it follows no known convention"
    names = " or ".join(repr(convention.name) for convention in alike(found, rows.shape[1]))
    if not names:
        other = alike(found._replace(convention=dataclasses.replace(found.convention, base=10000.0)), rows.shape[1])
        recipe = f"divisor {found.divisor!r}, layout {found.layout!r}"
        names = f"{repr(other[0].name) if other else recipe} with base {found.base:g}"
    factor = "" if found.scale == 1 else f" times {found.scale:.6g}"
    start = "" if found.start == 0 else f" from position {found.start}"
    return f"it follows {names}{factor}{start}"


def _kind(value: Any) -> str:
    """What a value is, for a message."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype}"
    nested = "nested " if isinstance(value, Tensor) and value.is_nested else ""
    layout = f" of layout {value.layout}" if isinstance(value, Tensor) and value.layout != torch.strided else ""
    return f"a {nested}{type(value).__name__}{layout}"
