"""`posenc_ext.adapters` on small classes under the names of projects' own, as these write them.

What the projects themselves publish is patched in tests/test_adapters_transformers.py.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc_ext import adapters, reference
from posenc_ext.adapters import Entry, patch, unpatch

V, D, PAD = 20, 8, 1
IDS = torch.tensor([[1, 1, 5, 6, 7], [4, 9, 8, 1, 1], [4, 5, 6, 7, 8]])


class Positions(nn.Module):
    """Counts real tokens, as M2M100 does."""

    __module__ = "transformers.models.m2m_100.modeling_m2m_100"
    __qualname__ = "M2M100SinusoidalPositionalEmbedding"

    def __init__(self, num_positions: int, embedding_dim: int, padding_idx: int):
        super().__init__()
        self.embedding_dim, self.padding_idx = embedding_dim, padding_idx
        half = embedding_dim // 2
        w = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        angle = torch.arange(num_positions).float().unsqueeze(1) * w
        table = torch.cat([angle.sin(), angle.cos()], dim=1)
        table[padding_idx] = 0
        self.register_buffer("weights", table, persistent=False)

    def forward(self, input_ids=None, inputs_embeds=None, cache_length=0):
        if input_ids is None:
            batch, length = inputs_embeds.shape[:2]
            positions = torch.arange(length).expand(batch, length) + self.padding_idx + 1 + cache_length
        else:
            mask = input_ids.ne(self.padding_idx).long()
            positions = (mask.cumsum(1) + cache_length) * mask + self.padding_idx
        return self.weights[positions]


class Words(nn.Embedding):
    """Rows times a factor."""

    __module__ = "transformers.models.m2m_100.modeling_m2m_100"
    __qualname__ = "M2M100ScaledWordEmbedding"

    def __init__(self, rows: int, width: int, padding_idx: int, embed_scale: float = 1.0):
        super().__init__(rows, width, padding_idx)
        self.embed_scale = embed_scale

    def forward(self, input_ids: Tensor):
        return super().forward(input_ids) * self.embed_scale


class Frozen(nn.Embedding):
    """Looked up by shape, as in Marian, with the argument's name before transformers 5.24."""

    __module__ = "transformers.models.marian.modeling_marian"
    __qualname__ = "MarianSinusoidalPositionalEmbedding"

    def __init__(self, num_positions: int, embedding_dim: int):
        super().__init__(num_positions, embedding_dim, _freeze=True)
        rows = reference.get_sinusoidal_positional_encoding(num_positions, embedding_dim)
        self.weight.copy_(
            torch.from_numpy(rows.reshape(-1, embedding_dim // 2, 2).transpose(0, 2, 1).reshape(rows.shape))
        )

    def forward(self, input_ids_shape, past_key_values_length=0, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(past_key_values_length, past_key_values_length + input_ids_shape[1])
        return super().forward(position_ids)


class Model(nn.Module):
    def __init__(self, words: float = 2.0):
        super().__init__()
        self.embed_tokens = Words(V, D, PAD, words)
        self.embed_positions = Positions(30, D, PAD)
        self.other = Frozen(12, D)

    def forward(self, ids: Tensor, cache_length: Any = 0) -> Tensor:
        rows = self.embed_tokens(ids)
        y = rows + self.embed_positions(ids, rows, cache_length)
        return y + self.embed_positions(None, rows, cache_length) + self.other(ids.shape, cache_length)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def reason(model: nn.Module, path: str) -> str:
    return patch(model).left[path]


def test_numbers_keys_and_attributes_stay():
    model = Model()
    book, keys = copy.deepcopy(model), list(model.state_dict())
    report = patch(model)
    assert report.patched == ["embed_tokens", "embed_positions", "other"]
    assert not report.left
    for ids in (IDS, IDS[2:], IDS[:, :1]):
        for cached in (0, 3, torch.tensor(3)):
            assert_close(model(ids, cached), book(ids, int(cached)))
    assert list(model.state_dict()) == keys
    assert type(model.embed_positions) is not Positions
    assert isinstance(model.embed_positions, Positions)
    assert (model.embed_positions.padding_idx, model.other.num_embeddings) == (PAD, 12)
    assert_close(model.other(torch.Size([1, 2]), past_key_values_length=5), book.other.weight[5:7])
    assert_close(model.other(None, position_ids=torch.tensor([[3, 11]])), book.other.weight[torch.tensor([[3, 11]])])
    assert "(other): Frozen(12, 8)" in repr(model)


def test_numbers_are_computed():
    model = Model()
    patch(model)
    book = copy.deepcopy(model)
    for table in (model.embed_positions.weights, model.other.weight):
        table.data.zero_()
    assert_close(model(IDS), book(IDS))
    assert model.other((1, 20)).shape == (20, D)  # past the table


def test_gradients_of_rows():
    model = Model()
    book = copy.deepcopy(model)
    patch(model)
    for each in (model, book):
        each(IDS).square().sum().backward()
    torch.testing.assert_close(model.embed_tokens.weight.grad, book.embed_tokens.weight.grad)


def test_unpatch_keeps_what_was_trained():
    model = Model()
    patch(model)
    with torch.no_grad():
        model.embed_tokens.weight.add_(1)
    want = model(IDS)
    assert unpatch(model) == tuple(
        Entry(path, kind, "restored", "")
        for path, kind in (("embed_tokens", "Words"), ("embed_positions", "Positions"), ("other", "Frozen"))
    )
    assert [type(m) for m in model.children()] == [Words, Positions, Frozen]
    assert not [name for child in model.children() for name in vars(child) if "posenc" in name]
    assert_close(model(IDS), want)
    assert unpatch(model) == ()


@pytest.mark.parametrize("row", [PAD, 2, 29])
def test_a_difference_in_one_row_is_refused(row):
    model = Model()
    model.embed_positions.weights[row, 3] += 1e-3
    want = model(IDS)
    why = reason(model, "embed_positions")
    assert why == f"row {row} of its table 'weights' differs by 0.001 from the sinusoids"
    assert type(model.embed_positions) is Positions
    assert "_posenc" not in vars(model.embed_positions)
    unpatch(model)
    torch.testing.assert_close(model(IDS), want, atol=0, rtol=0)


@pytest.mark.parametrize("at", ["pads", "cache"])
def test_a_difference_in_a_call_is_refused(monkeypatch, at):
    def forward(self, input_ids=None, inputs_embeds=None, cache_length=0):
        y = plain(self, input_ids, inputs_embeds, cache_length)
        if at == "cache":
            return y + bool(cache_length)
        return y if input_ids is None else y + (input_ids == PAD).unsqueeze(-1)

    plain = Positions.forward
    monkeypatch.setattr(Positions, "forward", forward)
    model = Model()
    assert reason(model, "embed_positions") == "its results differ by 1 from those of a twin"
    assert type(model.embed_positions) is Positions


def test_other_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(Words, "forward", lambda self, input_ids, types=None: None)
    assert reason(Model(), "embed_tokens") == "its forward takes input_ids, types, and not input_ids"


def test_what_is_left_alone():
    class Mine(Positions):
        pass

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.position_embeddings = nn.Embedding(4, D)

    model = Model(words=1.0)
    model.other.weight.requires_grad_(True)
    model.mine, model.learned, model.linear = Mine(30, D, PAD), Learned(), nn.Linear(2, 2)
    model.embed_positions.forward = model.embed_positions.forward
    model.meta = Positions(30, D, PAD).to("meta")
    left = patch(model).left
    assert left == {
        "embed_tokens": "its embed_scale is 1, so there is no multiplication to save",
        "embed_positions": "another tool has put a forward of its own over that of its class",
        "other": "its table 'weight' is trainable: freeze it with requires_grad_(False) first",
        "mine": "is a subclass of Positions, whose forward may be another",
        "learned.position_embeddings": "there is no row for torch.nn.modules.sparse.Embedding",
        "meta": "it is on the meta device, so nothing can be compared: load it first",
    }


def test_report_is_a_table():
    model = Model()
    model.other.weight.requires_grad_(True)
    text = str(patch(model))
    lines = [re.split(r" {2,}", line) for line in text.splitlines()]
    assert [line[:3] for line in lines[1:]] == [
        ["embed_tokens", "Words", "patched"],
        ["embed_positions", "Positions", "patched"],
        ["other", "Frozen", "left"],
    ]
    assert str(patch(nn.Linear(1, 1))) == "no position module found"
    again = patch(model)
    assert again.left["embed_tokens"] == "is patched already"


def test_patched_models_are_copied():
    model = Model()
    patch(model)
    want = model(IDS)
    twin = copy.deepcopy(model)
    assert_close(twin(IDS), want)
    unpatch(twin)
    assert type(model.other) is not Frozen
    assert type(twin.other) is Frozen


def test_a_table_trained_later_is_used():
    model = Model()
    patch(model)
    model.other.weight.requires_grad_(True)
    with torch.no_grad():
        model.other.weight.zero_()
    y = model.other((1, 3))
    assert not y.any()
    assert y.requires_grad


def test_loading_another_table_is_refused():
    model = Model()
    state = model.state_dict()
    patch(model)
    model.load_state_dict(state)
    state["other.weight"] = state["other.weight"] + 0.5
    with pytest.raises(RuntimeError, match=r"other: row \d+ of the loaded table 'weight' differs by 0.5 .*unpatch"):
        model.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_once(dtype):
    model, book = Model(), Model().embed_positions
    patch(model)
    got = model.to(dtype).embed_positions(IDS)
    assert got.dtype == dtype
    torch.testing.assert_close(got, book(IDS).to(dtype), atol=torch.finfo(dtype).eps, rtol=0)
    patch(patched_late := Model().to(dtype))
    assert isinstance(patched_late.embed_positions, adapters.Twin)
    torch.testing.assert_close(patched_late.embed_positions(IDS), got, atol=0, rtol=0)


def test_frequencies_outlive_meta():
    model, book = Model(), Model().embed_positions
    patch(model)
    model.to("meta").to_empty(device="cpu")
    assert_close(model.embed_positions(IDS), book(IDS))


def test_documentation_has_each_row():
    page = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")
    lines = set(page.splitlines())
    for row in adapters.ROWS:
        cells = (row.path, row.positions, row.keys) if row.form else (row.path, f"left alone: {row.recipe}", "")
        assert "| `{}` | {} | {} |".format(*cells) in lines
