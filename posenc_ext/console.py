"""How the command line speaks: headings, rows, vectors, and the one line of a refusal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from torch import Tensor

# What of a large table is printed.
SHOWN_ROWS = 24
SHOWN_COLUMNS = 8


class UsageError(Exception):
    """A request that cannot be met; its text is the one line the user sees."""


def heading(text: str) -> None:
    """Print a heading, underlined."""
    print(f"\n{text}\n{'-' * display_width(text)}")


def print_vectors(labels: Sequence[str], vectors: Tensor, group: int = 0) -> None:
    """Rows of ``vectors [n, d]`` with a label each; a blank line after every ``group`` of them."""
    cut = " ..." if vectors.size(1) > SHOWN_COLUMNS else ""
    lines = [" ".join(f"{value:8.4f}" for value in row) + cut for row in vectors[:, :SHOWN_COLUMNS].tolist()]
    print_rows(list(zip(labels, lines, strict=True)), group=group)


def print_rows(rows: Sequence[tuple[str, str]], indent: str = "  ", group: int = 0) -> None:
    """Two columns, the second one aligned after wide letters too; no more rows than a reader takes in."""
    shown = rows[:SHOWN_ROWS]
    width = max((display_width(label) for label, _ in shown), default=0)
    for i, (label, text) in enumerate(shown):
        if group and i and i % group == 0:
            print()
        print(f"{indent}{label}{' ' * (width - display_width(label))}  {text}")
    if len(rows) > len(shown):
        print(f"{indent}... and {len(rows) - len(shown)} more")


def display_width(text: str) -> int:
    """Columns of a terminal that the text takes: two for a Korean, Chinese or Japanese letter, none for an accent."""
    letters = unicodedata.normalize("NFC", text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in letters)


def shape(tensor: Tensor) -> str:
    """The shape of a tensor as a list."""
    return str(list(tensor.shape))


def yes(value: bool) -> str:
    """Yes or no."""
    return "yes" if value else "no"
