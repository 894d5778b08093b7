"""positional-encodings, on PyPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from posenc_ext.adapters.twins import Computed, Probe, Recipe, Refused, Row, Twin, qualified
from posenc_ext.conventions import CONVENTIONS
from posenc_ext.functional import add_positional_encoding_nd, grid_positions

_PATH = "positional_encodings.torch_encodings."
_AXES = {f"{_PATH}PositionalEncoding{n}D": n for n in (1, 2, 3)}


class Sum(Twin):
    """x + encoding of one to three axes, in one pass and without a cache of the last one."""

    posenc_ulps = 64.0  # its frequencies are fp32 powers, so an angle is a few units of the last place off

    def compute(self, tensor: Tensor) -> Computed:
        """The shape of `tensor`."""
        axes, inner = _axes(self), self._modules["penc"]
        width: Any = inner.org_channels  # type: ignore[union-attr]
        if tensor.dim() != axes + 2 or tensor.shape[-1] != width or not tensor.is_floating_point():
            return NotImplemented
        positions = grid_positions(*tensor.shape[1:-1], device=tensor.device)
        widths = None if axes > 1 else [tensor.shape[-1]]
        return add_positional_encoding_nd(tensor, positions, widths=widths, convention=self._posenc.convention)

    def check(self) -> None:
        """What is in it."""
        if not _axes(self):
            raise Refused(f"there is no row for what it holds, {type(self._modules['penc']).__name__}")

    def probes(self) -> Iterator[Probe]:
        """Grids."""
        inner: Any = self._modules["penc"]
        for sizes in ((1, 1, 1), (3, 5, 2), (9, 4, 3)):
            yield (torch.zeros(2, *sizes[: _axes(self)], inner.org_channels, device=inner.inv_freq.device),), {}


def _axes(module: Any) -> int:
    return _AXES.get(qualified(type(module._modules["penc"])), 0)


def _sum(module: Any) -> Recipe:
    return Recipe(CONVENTIONS["positional_encodings"])


_CACHED = "gives its last result again while shapes stay: wrap it in its project's Summer, which is patched"

ROWS = (
    Row(_PATH + "Summer", Sum, _sum, "", "x + encoding in one pass; the cells of a grid from 0", "those of penc"),
    *(Row(path, None, _CACHED) for path in _AXES),
)
