"""Other projects' tools, used on a layer and on the textbook's modules: what comes out is the same.

Each test needs what it is about, and is skipped without it: `pip install '.[tools]'` brings all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import make
import pytest
import torch
from alike import Model, assert_alike, part
from helpers import assert_same_bits, is_fused
from make import D, V, argument, twins
from torch import Tensor, nn

IDS = argument("Embeddings")
pytestmark = [
    pytest.mark.usefixtures("torchs_dropout"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]  # warnings of these projects about one another


def need(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(autouse=True)
def _one_thread(threads):
    threads(1)  # models this small only wait for the others, long so on a busy machine


def models(kind: str) -> list[Model]:
    """With a layer, and with the textbook's modules."""
    return [Model(module) for module in twins(kind)]


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


# ---- peft ------------------------------------------------------------------------------------------------------------

ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "LoRA": lambda peft: peft.LoraConfig(r=2, target_modules=["lut"], init_lora_weights=False),
    "DoRA": lambda peft: peft.LoraConfig(r=2, target_modules=["lut"], init_lora_weights=False, use_dora=True),
    "LoRA, tokens": lambda peft: peft.LoraConfig(r=2, target_modules=["head"], trainable_token_indices={"lut": [1, 3]}),
    "tokens": lambda peft: peft.TrainableTokensConfig(target_modules=["lut"], token_indices=[1, 3]),
    "saved": lambda peft: peft.LoraConfig(r=2, target_modules=["head"], modules_to_save=["lut"]),
}


@make.each("config", ADAPTERS)
@make.each_layer_of_ids
def test_adapters(kind, config, tmp_path):
    peft = need("peft")
    plain, adapted = models(kind), []
    before = plain[0](IDS)
    for model in plain:
        torch.manual_seed(2)
        adapted.append(peft.get_peft_model(model, config(peft)))
    assert_alike(*adapted, IDS)
    mine, book = adapted
    got = mine.eval()(IDS)
    assert not torch.allclose(got, before)
    with mine.disable_adapter():
        assert_close(mine(IDS), before)
    mine.save_pretrained(tmp_path)
    assert_close(peft.PeftModel.from_pretrained(models(kind)[0], tmp_path).eval()(IDS), got)
    merged = mine.merge_and_unload()
    assert_close(merged(IDS), got)
    assert_close(book.eval().merge_and_unload()(IDS), got)
    assert is_fused(merged.layer, IDS)


# ---- accelerate ------------------------------------------------------------------------------------------------------


def spread(accelerate: Any, kind: str, which: int, folder: Path) -> nn.Module:
    places = {"layer": "disk", "norm": "cpu", "head": "disk"}
    model = models(kind)[which]
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def loaded(accelerate: Any, kind: str, which: int, folder: Path) -> nn.Module:
    """From a file, into a model made without memory."""
    torch.save(models(kind)[which].state_dict(), file := str(folder / "model.bin"))
    with accelerate.init_empty_weights():
        empty = models(kind)[which]
    assert all(p.is_meta for p in empty.parameters())
    places = {"layer": "disk", "norm": "cpu", "head": "cpu"}
    return accelerate.load_checkpoint_and_dispatch(
        empty, file, device_map=places, offload_folder=folder / "parts", force_hooks=True
    )


PLACES: dict[str, Callable[[Any, str, int, Path], nn.Module]] = {
    "cpu_offload": lambda accelerate, kind, i, _: accelerate.cpu_offload(models(kind)[i], "cpu"),
    "disk_offload": lambda accelerate, kind, i, folder: accelerate.disk_offload(models(kind)[i], folder, "cpu"),
    "dispatch_model": spread,
    "load_checkpoint": loaded,
}


@make.each("place", PLACES)
@make.each_layer_of_ids
@torch.no_grad()
def test_offloading(kind, place, tmp_path):
    accelerate = need("accelerate")
    for i, model in enumerate(models(kind)):
        (folder := tmp_path / str(i)).mkdir()
        moved = place(accelerate, kind, i, folder)
        for _ in range(2):
            assert part(moved, "lut").weight.is_meta
            assert_close(moved(IDS), model(IDS))


# ---- transformers ----------------------------------------------------------------------------------------------------


def pretrained(kind: str, which: int = 0, **options: Any) -> Any:
    """A model of that library around a layer or the pair of them, or around the textbook's modules (1)."""
    transformers = need("transformers")
    from transformers.modeling_layers import GradientCheckpointingLayer

    layer = (lambda rows: make.pair(rows=rows)) if kind == "pair" else lambda rows: twins(kind, rows=rows)[which]
    path = "layer.0.lut" if isinstance(layer(V), nn.Sequential) else "layer.lut"

    class Config(transformers.PretrainedConfig):
        model_type = "posenc-ext-test"

        def __init__(self, vocab_size: int = V, tie_word_embeddings: bool = False, **rest: Any) -> None:
            super().__init__(**rest)
            self.vocab_size, self.tie_word_embeddings = vocab_size, tie_word_embeddings
            self.initializer_range = 0.02

    class Block(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(D, D), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x).tanh()

    class Tiny(transformers.PreTrainedModel):
        config_class = Config
        supports_gradient_checkpointing = True
        _tied_weights_keys = {"head.weight": f"{path}.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = layer(config.vocab_size)
            self.block, self.head = Block(), nn.Linear(D, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(self.layer(ids)))

        def get_input_embeddings(self) -> nn.Module:
            return self.get_submodule(path)

        def set_input_embeddings(self, new: nn.Module) -> None:
            self.set_submodule(path, new)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def set_output_embeddings(self, new: nn.Module) -> None:
            self.head = new

    torch.manual_seed(3)
    return Tiny(Config(**options))


def grow(model: Any) -> None:
    torch.manual_seed(4)
    model.resize_token_embeddings(V + 5)


def shrink(model: Any) -> None:
    model.resize_token_embeddings(int(IDS.max()))


def train_behind_a_checkpoint(model: Any) -> None:
    """As adapters in a frozen model do, which get no gradient unless the input embeddings are hooked."""
    part(model, "lut").requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


CHANGES = {"as made": lambda model: None, "grown": grow, "shrunk": shrink, "checkpoint": train_behind_a_checkpoint}


@make.each("tied", {"untied": False, "tied": True})
@make.each("change", CHANGES)
@make.each_layer_of_ids
def test_pretrained_models(kind, change, tied):
    mine, book = (pretrained(kind, which, tie_word_embeddings=tied) for which in (0, 1))
    assert float(mine.layer.weight.detach().std()) < 0.03  # initialised by type
    for model in (mine, book):
        change(model)
    assert (mine.head.weight is mine.layer.weight) == tied
    assert mine.layer.vocab_size == mine.config.vocab_size
    ids = IDS % mine.layer.vocab_size
    assert_alike(mine.train(), book.train(), ids)
    calls = mine.block.calls
    assert calls == book.block.calls
    assert is_fused(mine.layer, ids) == (change is not train_behind_a_checkpoint)


LOADING: dict[str, dict[str, Any]] = {
    "plain": {},
    "low memory": {"low_cpu_mem_usage": True},
    "device_map cpu": {"device_map": "cpu"},
    "device_map auto": {"device_map": "auto"},
    "bfloat16": {"dtype": torch.bfloat16},
}


@make.each("options", LOADING)
@make.each("kind", [*make.OF_IDS, "pair"])
def test_saved_and_loaded_models(kind, options, tmp_path):
    need("accelerate")
    model = pretrained(kind).eval()
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True, **options)
    assert not any(info.values()), info
    model = model.to(options.get("dtype", torch.float32))
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert_same_bits(a, b)
    assert_same_bits(loaded(IDS), model(IDS))


# ---- torchao ---------------------------------------------------------------------------------------------------------


@make.each_layer_of_ids
@torch.no_grad()
def test_quantised_rows(kind):
    """One int8 row and one scale for each id."""
    torchao = need("torchao.quantization")
    config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=torchao.PerAxis(0))
    mine, book = modules = [nn.Sequential(module) for module in twins(kind, rows=30, width=64)]
    ids = torch.arange(30).unsqueeze(0)
    before = mine(ids)
    for module in modules:
        torchao.quantize_(module, config, filter_fn=lambda m, *_: isinstance(m, nn.Embedding))
    got = mine(ids)
    assert 0 < (got - before).abs().max() < 0.02 * before.abs().max()
    assert_close(got, book(ids))
    assert not is_fused(mine, ids)


# ---- captum ----------------------------------------------------------------------------------------------------------


@make.each_layer_of_ids
def test_attributions_to_embeddings(kind):
    captum = need("captum.attr")
    results = []
    for model in models(kind):
        model.eval()
        method = captum.LayerIntegratedGradients(lambda ids, model=model: model(ids).sum((1, 2)), part(model, "lut"))
        found, delta = method.attribute(IDS, torch.zeros_like(IDS), n_steps=7, return_convergence_delta=True)
        path = next(name for name, module in model.named_modules() if module is part(model, "lut"))
        rows = captum.configure_interpretable_embedding_layer(model, path)
        embedded = rows.indices_to_embeddings(IDS)
        gradients = captum.IntegratedGradients(lambda x, model=model: model(x).sum((1, 2)))
        direct = gradients.attribute(embedded, torch.zeros_like(embedded), n_steps=7)
        captum.remove_interpretable_embedding_layer(model, rows)
        results.append([found, delta, direct, model(IDS)])
        assert found.count_nonzero() > 0
    for got, want in zip(*results, strict=True):
        assert_close(got, want)
