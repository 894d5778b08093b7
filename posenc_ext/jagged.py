"""Nested jagged tensors: the tokens of all rows behind one another, positions from the start in each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import resolve
from posenc_ext.ops.call import check_integer


def apply(function: Callable[..., Tensor], op: str, tokens: str, arguments: Mapping[str, Any]) -> Tensor:
    """Call `function` with the values of a nested tensor; its result, in the same rows.

    Args:
        function: a functional form, or the sum of a layer.
        op: its name, for messages.
        tokens: which argument is nested: [B, length, ...], layout torch.jagged, without holes between the rows.
        arguments: all of the function's. A tensor as `offset` is 0-d or [B]; `positions` are nested, in the same rows.

    Raises:
        ValueError: a nested tensor of another kind, or arguments that do not go with one.
    """
    rest = dict(arguments)
    nested: Any = rest.pop(tokens)

    def require(good: bool, text: str) -> None:
        if not good:
            raise ValueError(f"posenc_ext::{op}: {text}")

    require(nested.layout == torch.jagged, f"a nested {tokens} must have layout torch.jagged, got {nested.layout}")
    require(nested._ragged_idx == 1, f"a nested {tokens} must be jagged in axis 1, got axis {nested._ragged_idx}")
    require(nested.lengths() is None, f"a nested {tokens} must have no holes between its rows, got one with lengths")
    require(rest.pop("batch_first", True), f"a nested {tokens} is batch-first, got batch_first=False")
    require(rest.pop("out", None) is None, f"out= cannot be combined with a nested {tokens}")
    values, starts = nested.values(), nested.offsets()

    def at_each_token(of_row: Tensor) -> Tensor:
        # Values past the last row's end may be spare: they count on in that row.
        row = torch.searchsorted(starts, torch.arange(values.shape[0], device=values.device), right=True) - 1
        return of_row[row.clamp(0, nested.shape[0] - 1)]

    if "positions" in rest:
        given, offset = rest["positions"], rest["offset"]
        axes = ["B", "length"] if tokens == "input" else ["B", "length", "d_model"]
        require(nested.dim() == len(axes), f"a nested {tokens} must be [{', '.join(axes)}], got {list(nested.shape)}")
        if given is None:
            first = resolve(rest["convention"]).first_position if "convention" in rest else 0
            rest["positions"] = torch.arange(first, first + values.shape[0], device=values.device)
            rest["positions"] -= at_each_token(starts[:-1])
        else:
            good = isinstance(given, Tensor) and given.is_nested and given.shape == nested.shape[:2]
            require(
                good, f"positions must be nested in the rows of {tokens} {list(nested.shape[:2])}, got {_text(given)}"
            )
            rest["positions"] = given.values()
        if isinstance(offset, Tensor) and offset.dim() == 1:
            check_integer(op, "offset", offset)
            good = offset.shape[0] == nested.shape[0]
            require(good, f"offset must be 0-d or have shape [{nested.shape[0]}], got {list(offset.shape)}")
            rest["positions"], rest["offset"] = rest["positions"] + at_each_token(offset), 0
    # With what is known of the rows' lengths, which attention would otherwise have to find out.
    return torch.nested.nested_tensor_from_jagged(
        function(values, **rest), starts, min_seqlen=nested._maybe_min_seqlen, max_seqlen=nested._maybe_max_seqlen
    )


def _text(given: Any) -> str:
    return f"shape {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
