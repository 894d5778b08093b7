"""x-transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from posenc_ext.adapters.twins import Computed, Probe, Recipe, Refused, Row, Twin
from posenc_ext.conventions import CONVENTIONS
from posenc_ext.functional import positional_encoding


class ScaledRows(Twin):
    """Sinusoids times a learned scale. A cast rounds its frequencies: the twin has those of fp32."""

    scale: Tensor
    inv_freq: Tensor

    def compute(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        seq_start_pos: Tensor | None = None,
        offset: int | Tensor = 0,
    ) -> Computed:
        """[length, D]."""
        if seq_start_pos is not None or (pos is not None and pos.dim() != 1):
            return NotImplemented
        rows = positional_encoding(
            x.shape[1] if pos is None else pos,
            2 * len(self.inv_freq),
            offset=offset if pos is None else 0,
            convention=self._posenc.convention,
            frequencies=self._posenc.frequencies,
            dtype=self.inv_freq.dtype,
            device=x.device,
        )
        return rows * self.scale

    def probes(self) -> Iterator[Probe]:
        """Lengths, an offset, positions with fractions."""
        width, device = 2 * len(self.inv_freq), self.inv_freq.device
        for length in (1, 7, 600):
            x = torch.zeros(2, length, width, device=device)
            yield (x,), {}
            yield (x,), {"offset": 300}
            yield (x,), {"pos": torch.linspace(0, 100, length, device=device)}


def _scaled(module: Any) -> Recipe:
    if module.inv_freq.dtype != torch.float32:
        raise Refused(f"its frequencies were rounded to {module.inv_freq.dtype}: patch the model before it is cast")
    return Recipe(CONVENTIONS["sin_cos"], module.inv_freq.cpu().clone())


_PATH = "x_transformers.x_transformers."

ROWS = (
    Row(_PATH + "ScaledSinusoidalEmbedding", ScaledRows, _scaled, "", "from 0, + offset, or those given", "scale"),
    Row(_PATH + "AbsolutePositionalEmbedding", None, "is a learned table, scaled: a lookup of a few rows"),
)
