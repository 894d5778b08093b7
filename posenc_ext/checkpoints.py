"""Tables in old checkpoints: found by name, checked against the module's formula, then dropped.

The textbook modules save their table. A module without one consumes it, but only if it holds the numbers the module
would compute: a table of another convention means a model that was trained with other positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posenc_ext import functional
from posenc_ext.conventions import CONVENTIONS, Convention

# Names under which projects save a table of encodings: the Annotated Transformer and ESPnet; PyTorch's tutorials;
# fairseq and old M2M100; NeMo; Whisper; CTranslate2.
TABLE_KEYS = ("pe", "pos_embedding", "weights", "pos_enc", "positional_embedding", "encodings")
# Saved beside a table, and empty of information: fairseq's dtype marker.
MARKER_KEYS = ("_float_tensor",)


def matches(table: Tensor, convention: Convention) -> bool:
    """Whether rows [length, D] of `table` are encodings of this convention, from position 0 or its first one.

    In a table from position 0 the row before the first position may be zero: it is that of the padding id, in fairseq.
    The tolerance is what fp32 builders differ by, which grows with the position since their frequencies differ in the
    last bit, and the rounding of the table's dtype.
    """
    rows = table.double()
    for start in {0, convention.first_position}:
        positions = torch.arange(start, start + rows.shape[0], device=table.device)
        expected = functional.positional_encoding(positions, rows.shape[1], convention=convention, dtype=torch.float64)
        tolerance = 2 * torch.finfo(table.dtype).eps + 1e-6 + 4e-7 * positions.unsqueeze(1)
        right = ((rows - expected).abs() <= tolerance).all(dim=1)
        padding = convention.first_position - 1 - start
        if 0 <= padding < rows.shape[0]:
            right[padding] |= bool((rows[padding] == 0).all())
        if bool(right.all()):
            return True
    return False


def recognise(table: Tensor) -> str:
    """The names of the conventions that a table follows, for a message."""
    names = [repr(name) for name, convention in CONVENTIONS.items() if matches(table, convention)]
    return "it follows " + " or ".join(names) if names else "it follows no known convention"


def consume_tables(
    module: nn.Module, convention: Convention, state_dict: dict[str, Any], prefixes: list[str], errors: list[str]
) -> None:
    """Drop the tables below `prefixes` from `state_dict`, or append to `errors` what is wrong with them."""
    width: int = module.d_model  # type: ignore[assignment]
    owner = type(module).__name__
    for prefix in prefixes:
        for key in MARKER_KEYS:
            state_dict.pop(prefix + key, None)
    for key in [prefix + name for prefix in prefixes for name in TABLE_KEYS if prefix + name in state_dict]:
        table = state_dict.pop(key)
        if table.dim() == 1 and table.numel() == 0:
            continue  # a placeholder
        if not _is_table(table, width):
            errors.append(
                f"posenc_ext.{owner}: {key!r} in the checkpoint must be a table of encodings of width {width}, "
                f"got {table.dtype} {list(table.shape)}"
            )
        elif not table.is_meta and not matches(table.reshape(-1, width), convention):
            errors.append(
                f"posenc_ext.{owner}: the table {key!r} in the checkpoint is not that of convention "
                f"{convention.name!r}: {recognise(table.reshape(-1, width))}. "
                "Construct the module with the convention that the model was trained with"
            )


def _is_table(table: Tensor, width: int) -> bool:
    """[length, D], with any number of axes of size 1 among them."""
    sizes = [size for size in table.shape[:-1] if size != 1]
    return table.is_floating_point() and table.dim() >= 2 and table.shape[-1] == width and len(sizes) <= 1
