"""`posenc_ext.adapters` on what projects publish: small models with random weights, patched and as they were."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import make
import pytest
import torch
from torch import Tensor, nn

from posenc_ext.adapters import patch, unpatch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAD, V = 1, 60
IDS = torch.tensor([[1, 1, 5, 6, 7, 9], [14, 19, 8, 31, 22, 3], [4, 45, 46, 7, 8, 50]])
MASK = (IDS != PAD).long()
NAMES = {"d_model": 16, "vocab_size": V, "max_position_embeddings": 40}
LAYERS: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
LAYERS |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
TOKENS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
SEQUENCE = {**NAMES, **LAYERS, **TOKENS, "decoder_start_token_id": 2, "scale_embedding": True}


@pytest.fixture(autouse=True)
def _one_thread(threads):
    threads(1)


def of_transformers(name: str) -> Any:
    package = pytest.importorskip("transformers")
    if name.startswith("Kosmos2Text"):
        kind = "configuration" if name.endswith("Config") else "modeling"
        package = importlib.import_module(f"transformers.models.kosmos2.{kind}_kosmos2")
    return getattr(package, name)


class Case(NamedTuple):
    """A model, how it is called, and what of it is replaced."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    patched: list[str]
    generates: bool = True
    frozen: bool = False
    whole: bool = True  # whether the original can be cast, and loaded from a file

    def make(self) -> Any:
        torch.manual_seed(0)
        model = of_transformers(self.model)(of_transformers(self.config)(**self.options)).eval()
        return model.requires_grad_(False) if self.frozen else model


def encoder_decoder() -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS.flip(0)}


def decoder() -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": MASK}


def features(width: int, length: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_features": make.x((3, length, width)), "decoder_input_ids": IDS}


def whisper() -> dict[str, Any]:
    return {"input_features": make.x((2, 8, 20)), "decoder_input_ids": IDS[1:]}


BOTH = ["model.encoder.embed_positions", "model.decoder.embed_positions"]
WORDS = ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"]
ALL = sorted([*BOTH, *WORDS])

CASES = {
    "Marian": Case("MarianMTModel", "MarianConfig", SEQUENCE, encoder_decoder, BOTH),
    "Pegasus": Case("PegasusForConditionalGeneration", "PegasusConfig", SEQUENCE, encoder_decoder, BOTH),
    "Pegasus-X": Case(
        "PegasusXForConditionalGeneration",
        "PegasusXConfig",
        {**SEQUENCE, "num_global_tokens": 4, "block_size": 8, "stagger_local_blocks": False},
        encoder_decoder,
        ALL,
    ),
    "M2M100": Case("M2M100ForConditionalGeneration", "M2M100Config", SEQUENCE, encoder_decoder, ALL),
    "NLLB-MoE": Case(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {**SEQUENCE, "num_experts": 2, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
        encoder_decoder,
        ALL,
    ),
    "XGLM": Case(
        "XGLMForCausalLM",
        "XGLMConfig",
        {**NAMES, **TOKENS, "num_layers": 1, "attention_heads": 2, "ffn_dim": 16, "scale_embedding": True},
        decoder,
        ["model.embed_tokens", "model.embed_positions"],
    ),
    "TrOCR": Case(
        "TrOCRForCausalLM",
        "TrOCRConfig",
        {**SEQUENCE, "use_learned_position_embeddings": False, "is_decoder": True},
        decoder,
        ["model.decoder.embed_tokens", "model.decoder.embed_positions"],
        whole=False,  # its table is no buffer: a cast does not reach it, and loading leaves it on the meta device
    ),
    "Speech2Text": Case(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {
            **{k: v for k, v in SEQUENCE.items() if k != "max_position_embeddings"},
            "max_source_positions": 40,
            "max_target_positions": 40,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
        },
        features(8, 24),
        BOTH,
        generates=False,
    ),
    "SpeechT5": Case(
        "SpeechT5ForSpeechToText",
        "SpeechT5Config",
        {
            **LAYERS,
            "vocab_size": V,
            "hidden_size": 16,
            "pad_token_id": PAD,
            "conv_dim": (8,),
            "conv_stride": (4,),
            "conv_kernel": (4,),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "max_text_positions": 40,
            "max_speech_positions": 60,
        },
        lambda: {"input_values": make.x((3, 80)), "decoder_input_ids": IDS},
        ["speecht5.encoder.prenet.pos_sinusoidal_embed", "speecht5.decoder.prenet.embed_positions"],
        generates=False,
    ),
    "Kosmos-2": Case(
        "Kosmos2TextForCausalLM",
        "Kosmos2TextConfig",
        {
            "vocab_size": V,
            "embed_dim": 16,
            "layers": 1,
            "attention_heads": 2,
            "ffn_dim": 16,
            "max_position_embeddings": 40,
            **TOKENS,
        },
        decoder,
        ["model.embed_positions"],
        generates=False,
    ),
    "Whisper": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{k: v for k, v in SEQUENCE.items() if k != "max_position_embeddings"},
            "max_source_positions": 10,
            "max_target_positions": 40,
            "num_mel_bins": 8,
        },
        whisper,
        BOTH[:1],
        generates=False,
    ),
    "FSMT": Case(
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        {
            **SEQUENCE,
            "langs": ["en", "ru"],
            "src_vocab_size": V,
            "tgt_vocab_size": V,
        },
        encoder_decoder,
        BOTH,
        frozen=True,
    ),
    "MusicGen": Case(
        "MusicgenForCausalLM",
        "MusicgenDecoderConfig",
        {
            "vocab_size": V,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 16,
            "num_codebooks": 2,
            "max_position_embeddings": 40,
            "pad_token_id": PAD,
        },
        lambda: {"input_ids": IDS[[1, 2]]},
        ["model.decoder.embed_positions"],
        generates=False,
    ),
    "XLM": Case(
        "XLMModel",
        "XLMConfig",
        {
            "vocab_size": V,
            "emb_dim": 16,
            "n_layers": 1,
            "n_heads": 2,
            "max_position_embeddings": 40,
            "sinusoidal_embeddings": True,
            "pad_index": PAD,
        },
        decoder,
        ["position_embeddings"],
        generates=False,
        frozen=True,
    ),
    "DistilBERT": Case(
        "DistilBertModel",
        "DistilBertConfig",
        {
            "vocab_size": V,
            "dim": 16,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 16,
            "max_position_embeddings": 40,
            "sinusoidal_pos_embds": True,
            "pad_token_id": PAD,
        },
        decoder,
        ["embeddings"],
        generates=False,
    ),
    "BERT": Case(
        "BertModel",
        "BertConfig",
        {
            "vocab_size": V,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "max_position_embeddings": 40,
            "pad_token_id": PAD,
        },
        lambda: {**decoder(), "token_type_ids": IDS % 2},
        ["embeddings"],
        generates=False,
    ),
    "BART": Case("BartForConditionalGeneration", "BartConfig", SEQUENCE, encoder_decoder, WORDS),
    "Seamless": Case(
        "SeamlessM4TForTextToText",
        "SeamlessM4TConfig",
        {
            "vocab_size": V,
            "hidden_size": 16,
            "max_position_embeddings": 40,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "pad_token_id": PAD,
            "speech_encoder_layers": 1,
        },
        encoder_decoder,
        [f"text_{side}.embed_{what}" for side in ("encoder", "decoder") for what in ("tokens", "positions")],
        generates=False,
    ),
}
CASES["Seamless v2"] = CASES["Seamless"]._replace(model="SeamlessM4Tv2ForTextToText", config="SeamlessM4Tv2Config")

each_case = make.each("case", CASES)


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    y = model(**inputs)
    found: Tensor = y.logits if hasattr(y, "logits") else y.last_hidden_state
    return found


def assert_as_near_in_half_precision(book: nn.Module, model: nn.Module, inputs: dict[str, Any], want: Tensor) -> None:
    """To the model in fp32. One that rounds as often as the original is nearer or farther by chance."""
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    halves = (output(copy.deepcopy(each).bfloat16(), half).float() for each in (book, model))
    theirs, ours = (float((y - want).abs().mean()) for y in halves)
    assert ours <= 1.1 * theirs


@each_case
def test_numbers(case, tmp_path):
    """Logits, gradients, bf16, files, and the way back."""
    book = case.make()
    model = copy.deepcopy(book)
    inputs = case.inputs()
    want = output(book, inputs)
    report = patch(model)
    assert sorted(report.patched) == sorted(case.patched), str(report)
    torch.testing.assert_close(output(model, inputs), want, atol=1e-5, rtol=0)
    if "input_ids" in inputs and case.model != "MusicgenForCausalLM":
        for each in ({**inputs, "attention_mask": None}, {k: v[1:] for k, v in inputs.items()}):
            torch.testing.assert_close(output(model, each), output(book, each), atol=1e-5, rtol=0)

    if not case.frozen:
        for each in (book, model):
            output(each, inputs).square().mean().backward()
        got = dict(model.named_parameters())
        for name, parameter in book.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(got[name].grad, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)

    model.zero_grad(set_to_none=True)
    if case.whole:
        assert_as_near_in_half_precision(book, model, inputs, want)
        model.save_pretrained(tmp_path)
        again, info = type(book).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert set(again.state_dict()) == set(model.state_dict())
        torch.testing.assert_close(output(again, inputs), want, atol=1e-5, rtol=0)
        # from_pretrained leaves some tables of sinusoids trainable, which patch does not touch.
        assert patch(again.requires_grad_(False)).patched == report.patched

    for path in report.patched:
        twin = model.get_submodule(path)
        assert type(pickle.loads(pickle.dumps(twin))) is type(twin)
    unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in book.modules()]
    torch.testing.assert_close(output(model, inputs), want, atol=0, rtol=0)


GENERATED = {
    "greedy": {},
    "beam": {"num_beams": 2},
    "static": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False},
}


@make.each("options", GENERATED)
@make.each("case", {name: case for name, case in CASES.items() if case.generates})
def test_generated_ids(case, options):
    book = case.make()
    model = copy.deepcopy(book)
    patch(model)
    inputs: list[dict[str, Any]] = [decoder()]
    if not case.model.startswith("FSMT"):
        inputs.append({"inputs_embeds": book.get_input_embeddings()(IDS), "attention_mask": MASK})
    for each in inputs:
        try:
            want = book.generate(**each, **options, max_new_tokens=5, do_sample=False)
        except Exception as error:  # what the project itself cannot
            with pytest.raises(type(error)):
                model.generate(**each, **options, max_new_tokens=5, do_sample=False)
            continue
        got = model.generate(**each, **options, max_new_tokens=5, do_sample=False)
        assert got.tolist() == want.tolist()


def test_trainable_sinusoids_are_refused():
    for name, path in (("XLM", "position_embeddings"), ("FSMT", "model.encoder.embed_positions")):
        model = CASES[name]._replace(frozen=False).make()
        assert "is trainable" in patch(model).left[path]


def test_learned_tables_are_left_alone():
    learned = CASES["XLM"].options | {"sinusoidal_embeddings": False}
    model = CASES["XLM"]._replace(options=learned).make()
    assert "differs" in patch(model).left["position_embeddings"]
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    assert "is a learned table" in patch(gpt2).left["transformer.wpe"]


def test_cache_lengths():
    """A decoder that is asked for one token more at a time."""
    model = CASES["M2M100"].make()
    book = copy.deepcopy(model)
    patch(model)
    encoded = book.model.encoder(IDS).last_hidden_state
    caches = [None, None]
    for t in range(6):
        rows = []
        for i, each in enumerate((book, model)):
            y = each.model.decoder(
                IDS[:, t : t + 1], encoder_hidden_states=encoded, use_cache=True, **{"cache": caches[i]}
            )
            caches[i] = y.cache
            rows.append(y.last_hidden_state)
        torch.testing.assert_close(rows[1], rows[0], atol=1e-5, rtol=0)


@make.each("name", ["Marian", "M2M100", "XGLM", "BERT"])
def test_compiled_as_one_graph(name):
    case = CASES[name]
    model = case.make()
    patch(model)
    inputs = case.inputs()
    want = output(model, inputs)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(output(compiled, inputs), want, atol=1e-5, rtol=0)


# ---- other projects --------------------------------------------------------------------------------------------------


def made(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        pytest.importorskip(module.partition(".")[0])
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    return layer


MODELS = "transformers.models."
DIFFUSERS, X, AXES = (
    "diffusers.models.embeddings",
    "x_transformers.x_transformers",
    "positional_encodings.torch_encodings",
)
TIMES = torch.tensor([0.0, 0.25, 17.5, 999.125])
LAYERS_ALONE: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "timesteps, shift 1": (made(DIFFUSERS, "Timesteps", 32, False, 1), lambda: (TIMES,)),
    "timesteps, shift 0, flipped, odd": (made(DIFFUSERS, "Timesteps", 33, True, 0), lambda: (TIMES,)),
    "diffusers: positions": (made(DIFFUSERS, "SinusoidalPositionalEmbedding", 16, 20), lambda: (make.x((2, 9, 16)),)),
    "diffusers: patches": (
        made(DIFFUSERS, "PatchEmbed", 8, 8, 2, 3, 16),
        lambda: (make.x((2, 3, 12, 6)),),
    ),
    "x-transformers": (made(X, "ScaledSinusoidalEmbedding", 16), lambda: (make.x((2, 50, 16)),)),
    "SpeechT5: scaled": (
        made(f"{MODELS}speecht5.modeling_speecht5", "SpeechT5ScaledPositionalEncoding", 0.0, 16, 40),
        lambda: (make.x((2, 9, 16)),),
    ),
    "Kosmos-2": (
        made(f"{MODELS}kosmos2.modeling_kosmos2", "Kosmos2TextSinusoidalPositionalEmbedding", 40, 16, PAD),
        lambda: (IDS,),
    ),
    "SpeechT5: text": (
        made(f"{MODELS}speecht5.modeling_speecht5", "SpeechT5SinusoidalPositionalEmbedding", 40, 16, PAD),
        lambda: (IDS, 3),
    ),
}


def summed(axes: int, width: int) -> tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]:
    inner = made(AXES, f"PositionalEncoding{axes}D", width)
    return lambda: made(AXES, "Summer", inner())(), lambda: (make.x((2, *(5, 4, 3)[:axes], width)),)


for n, width in ((1, 7), (2, 10), (3, 14)):
    LAYERS_ALONE[f"positional-encodings: {n}-D"] = summed(n, width)


@make.each("layer", LAYERS_ALONE)
def test_layers_alone(layer):
    make_layer, arguments = layer
    torch.manual_seed(0)
    book = make_layer()
    given = [v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in arguments()]
    model = copy.deepcopy(book)
    report = patch(model)
    assert report.patched == [""], str(report)
    outputs, gradients = [], []
    leaves = [v for v in given if isinstance(v, Tensor) and v.requires_grad]
    for each in (book, model):
        y = each(*given)
        outputs.append(y.detach())
        parameters = [p for p in each.parameters() if p.requires_grad]
        if y.requires_grad:
            gradients.append(torch.autograd.grad(y.square().sum(), [*leaves, *parameters], allow_unused=True))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
    for theirs, ours in zip(*gradients, strict=True) if gradients else ():
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert model.state_dict().keys() == book.state_dict().keys()
    unpatch(model)
    assert type(model) is type(book)


@make.each(
    "layer",
    {
        "Pegasus-X": made(f"{MODELS}pegasus_x.modeling_pegasus_x", "PegasusXSinusoidalPositionalEmbedding", 16),
        "x-transformers": made(X, "ScaledSinusoidalEmbedding", 16),
    },
)
def test_a_cast_rounds_no_frequency(layer):
    book = layer()
    model = copy.deepcopy(book)
    patch(model)
    want = book(torch.zeros(1, 300, 16)).detach()
    theirs, ours = (each.bfloat16()(torch.zeros(1, 300, 16).bfloat16()).float().detach() for each in (book, model))
    assert (theirs - want).abs().max() > 0.5 * want.abs().max()
    assert (ours - want).abs().max() < 0.01 * want.abs().max()
