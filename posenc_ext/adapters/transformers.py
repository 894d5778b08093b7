"""Hugging Face transformers, 5.x."""

from __future__ import annotations

import math
from typing import Any

import torch

from posenc_ext.adapters import twins
from posenc_ext.adapters.twins import Recipe, Refused, Row
from posenc_ext.conventions import CONVENTIONS

_MODELS = "transformers.models."


def _path(model: str, name: str) -> str:
    return f"{_MODELS}{model}.modeling_{model}.{name}"


def half_minus_1(width: int, base: float = 10000.0) -> torch.Tensor:
    """The frequencies of fairseq's and tensor2tensor's tables, by the same ops."""
    half = width // 2
    return torch.exp(torch.arange(half, dtype=torch.int64, device="cpu").float() * -(math.log(base) / (half - 1)))


def _fairseq(module: Any) -> Recipe:
    padding = getattr(module, "padding_idx", None)
    return Recipe(CONVENTIONS["tensor2tensor"], half_minus_1(module.embedding_dim), padding)


def _whisper(module: Any) -> Recipe:
    return Recipe(CONVENTIONS["tensor2tensor"], half_minus_1(module.embedding_dim))


def _musicgen(module: Any) -> Recipe:
    return Recipe(CONVENTIONS["musicgen"], half_minus_1(module.embedding_dim))


def _pegasus_x(module: Any) -> Recipe:
    return Recipe(CONVENTIONS["tensor2tensor"], half_minus_1(module.embed_dim, float(module.max_scale)))


def _marian(module: Any) -> Recipe:
    return Recipe(CONVENTIONS["marian"])


def _xlm(module: Any) -> Recipe:
    return Recipe(CONVENTIONS["xlm"])


def _speecht5(module: Any) -> Recipe:
    # As `half_minus_1`, with the paper's divisor.
    steps = torch.arange(0, module.dim, 2, dtype=torch.int64, device="cpu").float()
    return Recipe(CONVENTIONS["vaswani"], torch.exp(steps * -(math.log(10000.0) / module.dim)))


def _scaled(module: Any) -> Recipe:
    if module.embed_scale == 1:
        raise Refused("its embed_scale is 1, so there is no multiplication to save")
    return Recipe()


def _layer(module: Any) -> Recipe:
    return Recipe()


_RUNNING = "from 0, + cache_length, or those given"
_COUNTED = "real tokens from padding_idx + 1, + cache_length; zeros at pads"


def _counted(model: str, name: str, form: type[twins.Twin] = twins.Counted) -> Row:
    return Row(_path(model, name), form, _fairseq, "weights", _COUNTED, "none")


def _words(model: str, name: str) -> Row:
    return Row(_path(model, name), twins.ScaledLookup, _scaled, "", "none: rows * embed_scale in one pass", "weight")


def _learned(path: str, why: str) -> Row:
    return Row(path, None, why, "", "", "weight")


_IN_FORWARD = "is a learned table: looking it up is one call, and the model's forward adds it to the tokens"

ROWS = (
    Row(
        _path("marian", "MarianSinusoidalPositionalEmbedding"),
        twins.OfShape,
        _marian,
        "weight",
        _RUNNING,
        "weight, not in files",
    ),
    Row(_path("pegasus", "PegasusSinusoidalPositionalEmbedding"), twins.OfShape, _marian, "weight", _RUNNING, "weight"),
    Row(
        _path("pegasus_x", "PegasusXSinusoidalPositionalEmbedding"),
        twins.OfActivations,
        _pegasus_x,
        "",
        _RUNNING,
        "none",
    ),
    _counted("m2m_100", "M2M100SinusoidalPositionalEmbedding"),
    _counted("nllb_moe", "NllbMoeSinusoidalPositionalEmbedding"),
    _counted("seamless_m4t", "SeamlessM4TSinusoidalPositionalEmbedding"),
    _counted("seamless_m4t_v2", "SeamlessM4Tv2SinusoidalPositionalEmbedding"),
    _counted("speech_to_text", "Speech2TextSinusoidalPositionalEmbedding", twins.CountedIds),
    _counted("speecht5", "SpeechT5SinusoidalPositionalEmbedding", twins.CountedIds),
    _counted("trocr", "TrOCRSinusoidalPositionalEmbedding", twins.CountedIds),
    _counted("kosmos2", "Kosmos2TextSinusoidalPositionalEmbedding", twins.CountedOrGiven),
    Row(
        _path("fsmt", "SinusoidalPositionalEmbedding"),
        twins.CountedWithCacheAtPads,
        _fairseq,
        "weight",
        "real tokens from padding_idx + 1, + cache_length, at pads too",
        "weight",
    ),
    Row(
        _path("xglm", "XGLMSinusoidalPositionalEmbedding"),
        twins.AtPositions,
        _fairseq,
        "weights",
        "position_ids + offset",
        "none",
    ),
    Row(
        _path("musicgen", "MusicgenSinusoidalPositionalEmbedding"),
        twins.OfCodes,
        _musicgen,
        "weights",
        "from 0, + cache_length",
        "none",
    ),
    Row(
        _path("whisper", "WhisperEncoder.embed_positions"),
        twins.Lookup,
        _whisper,
        "weight",
        "those given",
        "weight",
    ),
    Row(_path("xlm", "XLMModel.position_embeddings"), twins.Lookup, _xlm, "weight", "those given", "weight"),
    Row(
        _path("speecht5", "SpeechT5ScaledPositionalEncoding"),
        twins.Scaled,
        _speecht5,
        "pe",
        "x + alpha * encoding and dropout in one pass; from 0",
        "alpha",
    ),
    Row(
        _path("bert", "BertEmbeddings"),
        twins.TokensTypesAndTable,
        _layer,
        "",
        "tokens and learned table in one pass; from 0, + cache_length, or those given",
        "those of its children",
    ),
    Row(
        _path("distilbert", "Embeddings"),
        twins.TokensAndTable,
        _layer,
        "",
        "tokens and table, which stays trainable, in one pass; from 0, or those given",
        "those of its children",
    ),
    *(
        _words(model, name)
        for model, name in (
            ("bart", "BartScaledWordEmbedding"),
            ("m2m_100", "M2M100ScaledWordEmbedding"),
            ("nllb_moe", "NllbMoeScaledWordEmbedding"),
            ("pegasus_x", "PegasusXScaledWordEmbedding"),
            ("seamless_m4t", "SeamlessM4TScaledWordEmbedding"),
            ("seamless_m4t_v2", "SeamlessM4Tv2ScaledWordEmbedding"),
            ("trocr", "TrOCRScaledWordEmbedding"),
            ("xglm", "XGLMScaledWordEmbedding"),
        )
    ),
    _learned(_path("gpt2", "GPT2Model.wpe"), _IN_FORWARD),
    _learned(_path("opt", "OPTLearnedPositionalEmbedding"), _IN_FORWARD),
    _learned(_path("bart", "BartLearnedPositionalEmbedding"), _IN_FORWARD),
    _learned(_path("trocr", "TrOCRLearnedPositionalEmbedding"), _IN_FORWARD),
    _learned(_path("whisper", "WhisperPositionalEmbedding"), _IN_FORWARD),
)
