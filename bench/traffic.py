"""The byte models: what a call has to move, however it is written.

Every looked-up row is counted once per token, as if no cache held it; the line that a store first reads is not counted,
since a store may bypass the cache. Temporaries are not counted: whoever makes some shows a lower bandwidth for it.
"""

from __future__ import annotations

ID_BYTES = 8


def forward(tokens: int, width: int, element: int, positions: bool = False) -> int:
    """Ids (and positions) and rows read, output written."""
    return tokens * ID_BYTES * (2 if positions else 1) + 2 * tokens * width * element


def backward(tokens: int, rows: int, width: int, element: int) -> int:
    """Ids and output gradient read, `rows` rows of weight gradient written."""
    return tokens * ID_BYTES + (tokens + rows) * width * element


def sparse_adam(rows: int, width: int, element: int) -> int:
    """For each row: gradient read; weight and both moments read and written."""
    return 7 * rows * width * element


def copy(elements: int, element: int) -> int:
    """Everything read once and written once."""
    return 2 * elements * element
