"""Old checkpoints: tables are found by name, checked against the module's formula and dropped; weights are renamed.

The textbook modules save their table. A module without one consumes it, but only if it holds the numbers the module
would compute: a table of another convention means a model that was trained with other positions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from posenc_ext import functional
from posenc_ext.conventions import CONVENTIONS, PRECISIONS, Convention
from posenc_ext.reference import sinusoid_columns, sinusoid_frequencies

# Names under which projects save a table of encodings: the Annotated Transformer and ESPnet; PyTorch's tutorials;
# fairseq and old M2M100; NeMo; Whisper; CTranslate2.
TABLE_KEYS = ("pe", "pos_embedding", "weights", "pos_enc", "positional_embedding", "encodings")
# Saved beside a table, and empty of information: fairseq's dtype marker.
MARKER_KEYS = ("_float_tensor",)
# The weight of a TransformerEmbedding: today's name, that of version 0.1, and those of the pair in an nn.Sequential.
WEIGHT_KEYS = ("lut.weight", "weight", "0.lut.weight", "0.weight")

# ---- what a table holds ----------------------------------------------------------------------------------------------


def is_table(table: Tensor, width: int | None = None) -> bool:
    """Whether a tensor is [length, D], of a width D if one is given, with any number of axes of size 1 among them."""
    lengths = [size for size in table.shape[:-1] if size != 1]
    return table.is_floating_point() and table.dim() >= 2 and len(lengths) <= 1 and width in (None, table.shape[-1])


def distance(table: Tensor, convention: Convention, precision: str | None = None) -> float:
    """How far rows [length, D] are from this convention on average; infinitely, if one of them is not of it.

    They may start from position 0 or from the convention's first one. In a table from position 0 the row before the
    first position may be zero: it is that of the padding id, in fairseq. The tolerance is what fp32 builders differ by,
    which grows with the position since their frequencies differ in the last bit, and the rounding of the table's dtype.
    """
    rows = table if table.dtype == torch.float64 else table.float()
    found = math.inf
    for start in sorted({0, convention.first_position}):
        positions = torch.arange(start, start + len(rows), device=rows.device)
        error = functional.positional_encoding(
            positions, rows.shape[1], convention=convention, precision=precision, dtype=rows.dtype
        )
        error.sub_(rows).abs_()
        padding = convention.first_position - 1 - start
        if 0 <= padding < len(rows) and not bool(rows[padding].any()):
            error[padding] = 0
        tolerance = 2 * torch.finfo(table.dtype).eps + 1e-6 + 4e-7 * positions
        if bool((error.amax(dim=1) <= tolerance).all()):
            found = min(found, float(error.mean()) if len(rows) else 0.0)
    return found


def follows(table: Tensor) -> list[tuple[Convention, str]]:
    """The named conventions and precisions that rows [length, D] follow, nearest first.

    Where there is none, those of the first convention that fits with another base. None for a table without numbers.
    """
    if table.is_meta or not len(table):
        return []
    head, width = table[:64], table.shape[1]  # it tells nearly all of them apart
    if not abs(float(head.double().square().sum(dim=1).max()) - width / 2) <= 1.5:
        return []  # sin^2 + cos^2 is 1
    found = _nearest(table, [c for c in CONVENTIONS.values() if distance(head, c) < math.inf])
    others = (c for c in _of_other_bases(head) if distance(table, c) < math.inf)
    return found or _nearest(table, list(itertools.islice(others, 1)))


def _nearest(table: Tensor, conventions: list[Convention]) -> list[tuple[Convention, str]]:
    pairs = [(c, precision) for c in conventions for precision in PRECISIONS]
    far = {pair: (distance(table, *pair), pair[1] != pair[0].precision) for pair in pairs}
    return sorted((pair for pair in pairs if far[pair][0] < math.inf), key=lambda pair: far[pair])


def _of_other_bases(head: Tensor) -> Iterator[Convention]:
    """The named conventions with the base that the slowest sine in the second row tells, fewest digits first.

    At an even width the two divisors give the same numbers for two bases, of which a person chose the round one.
    """
    bases: list[tuple[Convention, float]] = []
    for convention in CONVENTIONS.values():
        # The frequencies are base ** -exponent.
        exponents = -np.log(
            sinusoid_frequencies(head.shape[1], base=math.e, divisor=convention.divisor, odd=convention.odd)
        )
        column = sinusoid_columns(head.shape[1], convention.layout, sines=len(exponents))[0]
        sine = float(head[1, column[-1]]) if len(head) > 1 and len(exponents) > 1 else 0.0
        if 1e-30 < sine < 1:  # the powers below are finite
            starts = {0, convention.first_position}
            bases += [(convention, (math.asin(sine) / (p + 1)) ** (-1 / float(exponents[-1]))) for p in starts]
    for digits, (convention, base) in itertools.product(range(1, 8), bases):
        rounded = float(f"{base:.{digits}g}")
        if 1 <= rounded < math.inf:
            other = dataclasses.replace(convention, base=rounded, name=f"{convention.name!r} with base {rounded:g}")
            if distance(head, other) < math.inf:
                yield other


def recognise(table: Tensor) -> str:
    """The names of the conventions that rows [length, D] follow, for a message."""
    names = dict.fromkeys(repr(c.name) if c.name in CONVENTIONS else c.name for c, _ in follows(table))
    return "it follows " + " or ".join(names) if names else "it follows no known convention"


# ---- loading ---------------------------------------------------------------------------------------------------------


def consume_tables(
    module: nn.Module, convention: Convention, state_dict: dict[str, Any], prefixes: list[str], errors: list[str]
) -> None:
    """Drop the tables below `prefixes` from `state_dict`, or append to `errors` what is wrong with them.

    The first prefix is the module's. What the module has under the name of a table, as a subclass may, is its own.
    """
    own = _own(module, prefixes[0])
    below = [prefix for prefix in prefixes if prefix not in own]
    for key in [prefix + name for prefix in below for name in (*MARKER_KEYS, *TABLE_KEYS)]:
        if key in state_dict and key not in own:
            table = state_dict.pop(key)
            if not key.endswith(MARKER_KEYS) and (wrong := _complaint(table, module, convention)):
                errors.append(f"posenc_ext.{type(module).__name__}: the table {key!r} in the checkpoint {wrong}")


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


def _complaint(table: Any, module: nn.Module, convention: Convention) -> str:
    """What is wrong with a table for this module, if anything."""
    width: int = module.d_model  # type: ignore[assignment]
    batch_first: bool = module.batch_first  # type: ignore[assignment]
    if isinstance(table, np.ndarray) and table.dtype in (np.float16, np.float32, np.float64):
        table = torch.tensor(table)
    if type(table) not in (Tensor, nn.Parameter, FakeTensor) or table.layout != torch.strided or table.is_nested:
        return f"must be a dense tensor, got {_kind(table)}"
    if table.dim() == 1 and table.numel() == 0:
        return ""  # a placeholder
    if not is_table(table, width):
        return f"must hold encodings of width {width}, got {table.dtype} {list(table.shape)}"
    axes = [axis for axis, size in enumerate(table.shape[:-1]) if size != 1]
    if table.dim() == 3 and axes and axes != [1 if batch_first else 0]:
        order = "sequence first" if batch_first else "batch first"
        return f"is {order}, {list(table.shape)}: construct the module with batch_first={not batch_first}"
    if table.is_meta or isinstance(table, FakeTensor):
        return ""  # no numbers to look at
    rows = table.detach().reshape(-1, width)
    if distance(rows, convention) < math.inf:
        return ""
    return (
        f"is not that of convention {convention.name!r}: {recognise(rows)}. "
        "Construct the module with the convention that the model was trained with; a table that follows none is "
        "kept by posenc_ext.LearnedPositionalEmbedding.from_pretrained"
    )


def _kind(value: Any) -> str:
    """What a value is, for a message."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype}"
    nested = "nested " if isinstance(value, Tensor) and value.is_nested else ""
    layout = f" of layout {value.layout}" if isinstance(value, Tensor) and value.layout != torch.strided else ""
    return f"a {nested}{type(value).__name__}{layout}"
