"""The calls of docs/recipes.md against the classes of the projects they stand for.

Each row needs its project, and is skipped without it: `pip install '.[peers]'` brings all.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make
import pytest
import torch
from torch import Tensor

from posenc_ext import Convention, TransformerEmbedding, functional, identify_convention, reference

RECIPES = Path(__file__).parents[1] / "docs" / "recipes.md"
T, D, H, W, MODELS = 40, 64, 3, 5, "transformers.models."

IDS = torch.tensor([[1, 1, 5, 6, 7], [4, 9, 8, 1, 1], [4, 5, 6, 7, 8]])
GRID = functional.grid_positions(H, W)
CELLS = functional.grid_positions(4, H, W)
NAMES: dict[str, Any] = {
    "torch": torch,
    "math": math,
    "F": functional,
    "Convention": Convention,
    "T": T,
    "D": D,
    "H": H,
    "W": W,
    "x": make.x((2, T, D)),
    "ids": IDS,
    "p": torch.tensor([[0, 3, 9]]),
    "t": torch.tensor([0.0, 0.25, 17.5, 39.125]),
    "alpha": torch.tensor(0.7),
    "boxes": make.x((3, 3, 2, 4)).abs(),
    "grid": GRID,
    "cells": CELLS,
    "counted": lambda ids: functional.positions_from_padding(ids, 1, first_position=2, padding_position=1),
    "masked": lambda y: y.masked_fill((IDS == 1).unsqueeze(-1), 0),
}
x, t = NAMES["x"], NAMES["t"]


def need(module: str, name: str) -> Any:
    """Something of a project that may not be installed, or not with all that it imports."""
    project = module.partition(".")[0]
    if project == "timm":
        try:
            importlib.import_module(module)
        except (
            Exception
        ) as error:  # torchvision for CUDA, as the package index has it, does not load beside torch for CPU
            pytest.skip(f"timm does not load, which imports torchvision: {error}")
    pytest.importorskip(project)
    return getattr(pytest.importorskip(module), name)


def of_transformers(model: str, name: str) -> Any:
    return need(f"{MODELS}{model}.modeling_{model}", name)


def filled(model: str, name: str) -> Callable[[], Tensor]:
    """The weight of a layer that makes it when it is initialised."""

    def peer() -> Tensor:
        layer = of_transformers(model, name)(T, D)
        return layer.create_weight()

    return peer


def written(model: str, name: str = "create_sinusoidal_embeddings") -> Callable[[], Tensor]:
    """What a function writes into a table."""

    def peer() -> Tensor:
        out = torch.empty(T, D)
        of_transformers(model, name)(T, D, out)
        return out.detach()

    return peer


def table_of(model: str, name: str) -> Callable[[], Tensor]:
    return lambda: of_transformers(model, name).get_embedding(T, D)


def counting(model: str, name: str) -> Callable[[], Tensor]:
    return lambda: of_transformers(model, name)(T, D, 1)(IDS)


def fsmt() -> Tensor:
    layer = of_transformers("fsmt", "SinusoidalPositionalEmbedding")(T, D, 1)
    layer.make_weight(T, D, 1)
    return layer(IDS)


def relative(model: str, name: str, **config: Any) -> Callable[[], Tensor]:
    config = SimpleNamespace(hidden_size=D, **config)
    return lambda: of_transformers(model, name)(config)(x)[0]


def timestep(times: Tensor, width: int, **options: Any) -> Callable[[], Tensor]:
    return lambda: need("diffusers.models.embeddings", "get_timestep_embedding")(times, width, **options)


def of_diffusers(name: str, *arguments: Any, **options: Any) -> Callable[[], Tensor]:
    return lambda: need("diffusers.models.embeddings", name)(*arguments, output_type="pt", **options)


def detr(normalize: bool) -> Callable[[], Tensor]:
    def peer() -> Tensor:
        layer = of_transformers("detr", "DetrSinePositionEmbedding")(D // 2, normalize=normalize)
        return layer(torch.Size([1, 1, H, W]), "cpu", torch.float32)[0].permute(1, 2, 0)

    return peer


def mask2former() -> Tensor:
    layer = of_transformers("mask2former", "Mask2FormerSinePositionEmbedding")(D // 2, normalize=True)
    return layer(torch.Size([1, 1, H, W]), "cpu", torch.float32)[0].permute(1, 2, 0)


def of_positional_encodings(name: str, *shape: int) -> Callable[[], Tensor]:
    def peer() -> Tensor:
        return need("positional_encodings.torch_encodings", name)(shape[-1])(torch.zeros(1, *shape))[0]

    return peer


def speecht5() -> Tensor:
    layer = of_transformers("speecht5", "SpeechT5ScaledPositionalEncoding")(0.0, D, T)
    layer.alpha.data.fill_(0.7)
    return layer(x).detach()


def florence() -> Tensor:
    vision = SimpleNamespace(embed_dim=[D], max_temporal_embeddings=T)
    layer = of_transformers("florence2", "Florence2VisionPositionalEmbeddingCosine1D")
    return layer(SimpleNamespace(vision_config=vision))(x)


def of_vibevoice() -> Tensor:
    config = SimpleNamespace(frequency_embedding_size=D, diffusion_max_period=10000)
    return of_transformers("vibevoice", "VibeVoiceDiffusionHeadSinusoidalEmbedding")(config)(t)


def timm(interleave: bool) -> Callable[[], Tensor]:
    def peer() -> Tensor:
        build = need("timm.layers.pos_embed_sincos", "build_sincos2d_pos_embed")
        return build([H, W], D, interleave_sin_cos=interleave)

    return peer


def timesfm() -> Tensor:
    config = SimpleNamespace(min_timescale=1, max_timescale=10000, hidden_size=D)
    return of_transformers("timesfm", "TimesFmPositionalEmbedding")(config)(position=t[None])[0]


# What the project computes, under the name it has in docs/recipes.md.
PEERS: dict[str, Callable[[], Tensor]] = {
    "transformers: Marian": filled("marian", "MarianSinusoidalPositionalEmbedding"),
    "transformers: Pegasus": filled("pegasus", "PegasusSinusoidalPositionalEmbedding"),
    "transformers: RoFormer": filled("roformer", "RoFormerSinusoidalPositionalEmbedding"),
    "transformers: Informer": filled("informer", "InformerSinusoidalPositionalEmbedding"),
    "transformers: Autoformer": filled("autoformer", "AutoformerSinusoidalPositionalEmbedding"),
    "transformers: TimeSeriesTransformer": filled("time_series_transformer", "TimeSeriesSinusoidalPositionalEmbedding"),
    "transformers: XLM": written("xlm"),
    "transformers: Flaubert": written("flaubert"),
    "transformers: DistilBERT": written("distilbert"),
    "transformers: VideoMAE": lambda: of_transformers("videomae", "get_sinusoid_encoding_table")(T, D)[0],
    "transformers: M2M100": counting("m2m_100", "M2M100SinusoidalPositionalEmbedding"),
    "transformers: NLLB-MoE": counting("nllb_moe", "NllbMoeSinusoidalPositionalEmbedding"),
    "transformers: Speech2Text": counting("speech_to_text", "Speech2TextSinusoidalPositionalEmbedding"),
    "transformers: SpeechT5 text": counting("speecht5", "SpeechT5SinusoidalPositionalEmbedding"),
    "transformers: Seamless": counting("seamless_m4t", "SeamlessM4TSinusoidalPositionalEmbedding"),
    "transformers: Seamless v2": counting("seamless_m4t_v2", "SeamlessM4Tv2SinusoidalPositionalEmbedding"),
    "transformers: Kosmos-2": counting("kosmos2", "Kosmos2TextSinusoidalPositionalEmbedding"),
    "transformers: Kosmos-2.5": counting("kosmos2_5", "Kosmos2_5TextSinusoidalPositionalEmbedding"),
    "transformers: TrOCR": counting("trocr", "TrOCRSinusoidalPositionalEmbedding"),
    "transformers: FSMT": fsmt,
    "transformers: XGLM": lambda: of_transformers("xglm", "XGLMSinusoidalPositionalEmbedding")(T, D, 1)(NAMES["p"]),
    "transformers: Whisper's encoder": lambda: of_transformers("whisper", "sinusoids")(T, D),
    "transformers: Qwen2.5-Omni audio": lambda: of_transformers("qwen2_5_omni", "SinusoidsPositionEmbedding")(T, D)(T),
    "transformers: Tipsv2": table_of("tipsv2", "Tipsv2SinusoidalPositionalEmbedding"),
    "transformers: Pegasus-X": lambda: of_transformers("pegasus_x", "PegasusXSinusoidalPositionalEmbedding")(D)(x)[0],
    "transformers: TimesFM": timesfm,
    "transformers: Qwen2.5-Omni DiT time": lambda: of_transformers("qwen2_5_omni", "SinusPositionEmbedding")(D)(t),
    "transformers: MusicGen": table_of("musicgen", "MusicgenSinusoidalPositionalEmbedding"),
    "transformers: CTRL": lambda: of_transformers("ctrl", "positional_encoding")(T, D, torch.float32),
    "transformers: VideoPrism": lambda: of_transformers("videoprism", "create_sinusoidal_positions")(T, D),
    "transformers: Canary": lambda: of_transformers("canary", "CanaryPositionalEmbedding")(T, D)(torch.arange(T)),
    "transformers: Florence-2": florence,
    "transformers: VibeVoice": of_vibevoice,
    "transformers: SpeechT5 scaled": speecht5,
    "transformers: Wav2Vec2-Conformer": relative(
        "wav2vec2_conformer", "Wav2Vec2ConformerRelPositionalEmbedding", max_source_positions=T
    ),
    "transformers: Parakeet": relative("parakeet", "ParakeetEncoderRelPositionalEncoding", max_position_embeddings=T),
    "diffusers: timesteps, shift 1": timestep(t, D),
    "diffusers: timesteps, shift 1, flipped": timestep(t, D + 1, flip_sin_to_cos=True, scale=2),
    "diffusers: timesteps, shift 0": timestep(t, D, downscale_freq_shift=0),
    "diffusers: timesteps, shift 0, odd": timestep(t, D + 1, downscale_freq_shift=0, flip_sin_to_cos=True),
    "diffusers: SinusoidalPositionalEmbedding": lambda: need(
        "diffusers.models.embeddings", "SinusoidalPositionalEmbedding"
    )(D, T)(x),
    "diffusers: 1-D sincos": of_diffusers("get_1d_sincos_pos_embed_from_grid", D, t),
    "x-transformers: ScaledSinusoidalEmbedding": lambda: need(
        "x_transformers.x_transformers", "ScaledSinusoidalEmbedding"
    )(D)(x).detach(),
    "positional-encodings: 1-D": of_positional_encodings("PositionalEncoding1D", T, D),
    "positional-encodings: 1-D, odd": of_positional_encodings("PositionalEncoding1D", T, D + 1),
    "The Annotated Transformer": lambda: reference.PositionalEncoding(D, T)(x),
    "diffusers: 2-D sincos": of_diffusers("get_2d_sincos_pos_embed", D, (16, 16)),
    "diffusers: 2-D sincos, interpolated": of_diffusers("get_2d_sincos_pos_embed", D, (H, W), interpolation_scale=2),
    "diffusers: 3-D sincos": of_diffusers("get_3d_sincos_pos_embed", D, (W, H), 4),
    "timm: build_sincos2d_pos_embed": timm(False),
    "timm: build_sincos2d_pos_embed, interleaved": timm(True),
    "transformers: DETR": detr(False),
    "transformers: DETR, normalized": detr(True),
    "transformers: Mask2Former": mask2former,
    "transformers: RT-DETR": lambda: of_transformers("rt_detr", "RTDetrSinePositionEmbedding")(D)(
        W, H, torch.device("cpu"), torch.float32
    ),
    "transformers: BROS": lambda: of_transformers("bros", "BrosPositionalEmbedding2D")(
        SimpleNamespace(dim_bbox=4, dim_bbox_sinusoid_emb_1d=D // 4)
    )(NAMES["boxes"]),
    "positional-encodings: 2-D": of_positional_encodings("PositionalEncoding2D", H, W, D),
    "positional-encodings: 2-D, cut": of_positional_encodings("PositionalEncoding2D", H, W, 10),
    "positional-encodings: 3-D": of_positional_encodings("PositionalEncoding3D", 4, H, W, D),
}
# Cells of one row each where the project's are, and the side that diffusers takes for that of 16 cells.
OTHER = {"diffusers: 2-D sincos": {"grid": functional.grid_positions(16, 16)}}

CALLS = dict(re.findall(r"^\| ([^|]+?) \| `(.+)` \|$", RECIPES.read_text(encoding="utf-8"), re.M))


def test_every_recipe_has_a_peer():
    assert CALLS.keys() == PEERS.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of these projects about one another
@pytest.mark.parametrize("name", PEERS)
def test_recipe(name):
    want = PEERS[name]()
    got = eval(CALLS[name], {**NAMES, **OTHER.get(name, {})})
    # Those in fp64 hold fp32 numbers that are rounded once; the others have frequencies that differ in the last bit.
    farthest = 0 if "marian" in CALLS[name] or "xlm" in CALLS[name] else 250 * 17.5 if "1000" in CALLS[name] else 80
    torch.testing.assert_close(got.reshape(want.shape), want.float(), atol=3e-7 + 2.4e-7 * farthest, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "(T, D," in call and "zeros" not in call])
def test_tables_are_identified(name):
    """A project's table leads to a layer that encodes likewise."""
    table = PEERS[name]()[: T if PEERS[name]().dim() == 2 else None]
    found = identify_convention(table)
    assert found is not None
    got = found.scale * functional.positional_encoding(T, D, convention=found.convention)
    torch.testing.assert_close(got, table.reshape(T, D).float(), atol=1e-5, rtol=0)
    named = re.search(r'convention="(\w+)"', CALLS[name])
    want = functional.resolve(named[1]) if named else Convention()
    assert (found.divisor, found.layout, found.base) == (want.divisor, want.layout, 10000)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_padded_layer_of_m2m100():
    layer = TransformerEmbedding(
        10, D, padding_idx=1, convention="fairseq", count_padding=False, at_padding="no_encoding"
    )
    positions = of_transformers("m2m_100", "M2M100SinusoidalPositionalEmbedding")(T, D, 1)
    want = layer.lut(IDS) * math.sqrt(D) + positions(IDS)
    torch.testing.assert_close(layer(IDS), want, atol=3e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_frequencies_of_a_project():
    """With its own fp32 frequencies only the sine and the cosine are left to differ."""
    frequencies = need("x_transformers.x_transformers", "ScaledSinusoidalEmbedding")(D).inv_freq
    layer = need("x_transformers.x_transformers", "ScaledSinusoidalEmbedding")(D)
    layer.scale.data.fill_(1)
    want = layer(torch.zeros(1, 5000, D)).detach()
    got = functional.positional_encoding(5000, D, convention="sin_cos", frequencies=frequencies)
    torch.testing.assert_close(got, want, atol=1.3e-7, rtol=0)
