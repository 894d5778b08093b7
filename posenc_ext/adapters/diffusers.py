"""Hugging Face diffusers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from posenc_ext.adapters.twins import Added, Computed, Probe, Recipe, Refused, Row, Twin
from posenc_ext.conventions import CONVENTIONS, Convention
from posenc_ext.functional import add_positional_encoding_nd, positional_encoding


class OfTimes(Twin):
    """Called with one time for each row of the batch."""

    num_channels: int

    def compute(self, timesteps: Tensor) -> Computed:
        """[batch, num_channels], float32."""
        if timesteps.dim() != 1:
            return NotImplemented
        recipe: Any = self._posenc
        if recipe.frequencies.device != timesteps.device:  # no parameter tells it where the model is
            recipe.move(timesteps.device)
        return positional_encoding(
            timesteps.float(),
            self.num_channels,
            convention=recipe.convention,
            frequencies=recipe.frequencies,
            dtype=torch.float32,
        )

    def probes(self) -> Iterator[Probe]:
        """Whole steps and others."""
        yield (torch.arange(0, 1000, 37),), {}
        yield (torch.tensor([0.0, 0.25, 17.5, 999.125]),), {}


def _timesteps(module: Any) -> Recipe:
    if module.scale != 1:
        raise Refused(f"it multiplies each angle by a scale of {module.scale}, which rounds once more")
    half = module.num_channels // 2
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device="cpu")
    frequencies = torch.exp(exponent / (half - module.downscale_freq_shift))
    layout = "cos_sin" if module.flip_sin_to_cos else "sin_cos"
    return Recipe(Convention("half", layout=layout, odd="zero"), frequencies)


class Patches(Twin):
    """Cuts an image into patches and adds the sinusoids of their places.

    The table of the size that the model was made for is added as it is. Of any other size the original computes one in
    fp64 in each call.
    """

    posenc_ulps = 8.0

    def compute(self, latent: Tensor) -> Computed:
        """[batch, patches, D]."""
        module: Any = self
        height, width = (size // module.patch_size for size in latent.shape[-2:])
        if (height, width) == (module.height, module.width) or module.pos_embed.dtype != torch.float32:
            return NotImplemented
        y = module.proj(latent).flatten(2).transpose(1, 2).contiguous()
        if module.layer_norm:
            y = module.norm(y)
        along = [
            torch.arange(size, device=y.device, dtype=torch.float32)
            / (size / module.base_size)
            / module.interpolation_scale
            for size in (width, height)
        ]
        places = torch.stack(torch.meshgrid(*along, indexing="xy"), dim=-1).flatten(0, 1)
        return add_positional_encoding_nd(y, places, convention=self._posenc.convention)

    def check(self) -> None:
        """Only what computes its positions anew."""
        module: Any = self
        if module.pos_embed is None:
            raise Refused("it adds no positions")
        if module.pos_embed_max_size or not module.flatten:
            raise Refused("it cuts its positions out of a stored table, which is one sum")

    def probes(self) -> Iterator[Probe]:
        """Images of another size."""
        module: Any = self
        weight, size = module.proj.weight, module.patch_size
        for height, width in ((1, 3), (module.height + 1, module.width), (2, module.width + 2)):
            image = torch.zeros(1, weight.shape[1], height * size, width * size, dtype=weight.dtype)
            yield (image.to(weight.device),), {}


def _patches(module: Any) -> Recipe:
    return Recipe(CONVENTIONS["marian"])


def _added(module: Any) -> Recipe:
    width = module.pe.shape[2]
    frequencies = torch.exp(torch.arange(0, width, 2, device="cpu") * (-math.log(10000.0) / width))
    return Recipe(CONVENTIONS["vaswani"], frequencies)


_PATH = "diffusers.models.embeddings."

ROWS = (
    Row(_PATH + "Timesteps", OfTimes, _timesteps, "", "the times given, fractions too", "none"),
    Row(_PATH + "SinusoidalPositionalEmbedding", Added, _added, "pe", "x + encoding in one pass; from 0", "pe"),
    Row(
        _PATH + "PatchEmbed",
        Patches,
        _patches,
        "pos_embed",
        "x + encoding of the cells of a grid in one pass, where the image has another size than the model",
        "those of proj",
    ),
)
