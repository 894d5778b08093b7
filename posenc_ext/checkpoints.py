"""Tables in old checkpoints: found by name, checked against the module's formula, then dropped.

The textbook modules save their table. A module without one consumes it, but only if it holds the numbers the module
would compute: a table of another convention means a model that was trained with other positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posenc_ext import ops
from posenc_ext.conventions import CONVENTIONS, Convention

# Names under which projects save a table of encodings: the Annotated Transformer and ESPnet; PyTorch's tutorials;
# fairseq and old M2M100; NeMo; Whisper; CTranslate2.
TABLE_KEYS = ("pe", "pos_embedding", "weights", "pos_enc", "positional_embedding", "encodings")
# Saved beside a table, and empty of information: fairseq's dtype marker.
MARKER_KEYS = ("_float_tensor",)


def matches(table: Tensor, convention: Convention) -> bool:
    """Whether rows [length, D] of `table` are encodings of this convention, from position 0 or its first one.

    Rows of zeros (padding) are passed over. The tolerance is what fp32 builders differ by, which grows with the
    position since their frequencies differ in the last bit, and the rounding of the table's dtype.
    """
    rows = table.double()
    kept = rows.abs().sum(dim=1) > 0
    for first in {0, convention.first_position}:
        positions = torch.arange(first, first + rows.shape[0], device=table.device)
        expected = ops.positional_encoding(positions, rows.shape[1], 0, convention.recipe(), torch.float64)
        tolerance = 2 * torch.finfo(table.dtype).eps + 1e-6 + 4e-7 * positions.unsqueeze(1)
        if bool(((rows - expected).abs() <= tolerance)[kept].all()):
            return True
    return False


def recognise(table: Tensor) -> str:
    """The names of the conventions that a table follows, for a message."""
    names = [repr(name) for name, convention in CONVENTIONS.items() if matches(table, convention)]
    return "it follows " + " or ".join(names) if names else "it follows no known convention"


def consume_tables(
    module: nn.Module, convention: Convention, state_dict: dict[str, Any], keys: list[str], errors: list[str]
) -> None:
    """Drop the tables at `keys` from `state_dict`, or append to `errors` what is wrong with them."""
    width: int = module.d_model  # type: ignore[assignment]
    owner = type(module).__name__
    for key in keys:
        table = state_dict.pop(key, None)
        if table is None or table.numel() == 0:
            continue
        if not table.is_floating_point() or table.shape[-1] != width or table.numel() // width != max(table.shape[:-1]):
            errors.append(
                f"posenc_ext.{owner}: {key!r} in the checkpoint must be a table of encodings of width {width}, "
                f"got {table.dtype} {list(table.shape)}"
            )
            continue
        rows = table.reshape(-1, width)
        if not rows.is_meta and not matches(rows, convention):
            errors.append(
                f"posenc_ext.{owner}: the table {key!r} in the checkpoint is not that of convention "
                f"{convention.name!r}: {recognise(rows)}. "
                "Construct the module with the convention that the model was trained with"
            )
