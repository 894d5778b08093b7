"""The modules against their textbook twins and against `nn.Embedding`."""

from __future__ import annotations

import copy
import functools
import math

import make
import numpy as np
import pytest
import torch
from helpers import assert_refused, assert_same_bits, fields, true_encoding
from make import B, D, T, V, argument, layer
from torch import Tensor, nn
from torch.nn import functional as F

import posenc_ext
from posenc_ext import CONVENTIONS, functional, reference

SCALE = math.sqrt(D)
POSITIONAL = "PositionalEncoding"


def table32(positions: range, d_model: int) -> Tensor:
    """The sines and cosines of the fp32 angles that an fp32 table is built from, float64 [positions, d_model]."""
    return torch.from_numpy(true_encoding(positions, d_model, CONVENTIONS["vaswani"], "reference"))


def assert_same_gradients(got: Tensor, want: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Of pairs of leaves, for one output gradient; sums may be in another order."""
    probe = torch.randn_like(want)
    for result in (got, want):
        (result * probe).sum().backward()
    for mine, other in pairs:
        assert mine.grad.layout == other.grad.layout
        torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense(), atol=1e-5, rtol=1e-6)


@pytest.fixture
def ids() -> Tensor:
    return argument("TransformerEmbedding")


@pytest.fixture
def x() -> Tensor:
    return argument(POSITIONAL)


# ---- initial numbers -------------------------------------------------------------------------------------------------


@make.each("dtype", [torch.float32, torch.float64, torch.bfloat16])
@make.each("padding_idx", [None, 0, -1])
@make.each_layer_of_ids
def test_draws_what_nn_embedding_draws(kind, padding_idx, dtype):
    torch.manual_seed(3)
    expected, following = nn.Embedding(V, D, padding_idx=padding_idx, dtype=dtype).weight, torch.rand(1)
    module = layer(kind, padding_idx=padding_idx, dtype=dtype)
    assert not isinstance(module, nn.Embedding)  # its forward is more than a lookup
    assert_same_bits(make.weight_of(module), expected)
    assert torch.equal(torch.rand(1), following)  # and not one number more


# ---- against the twins -----------------------------------------------------------------------------------------------


TEXTBOOK = {
    "Embeddings": lambda: reference.Embeddings(D, V),
    "TransformerEmbedding": lambda: nn.Sequential(reference.Embeddings(D, V), reference.PositionalEncoding(D)),
    "PositionalEncoding": lambda: reference.PositionalEncoding(D),
    "LearnedPositionalEmbedding": lambda: reference.LearnedPositionalEmbedding(40, D),
}


@make.each_layer
def test_layers_equal_the_reference(kind):
    """From the numbers drawn at construction to the gradients."""
    fused = layer(kind)
    torch.manual_seed(3)
    twin = TEXTBOOK[kind]()
    pairs = list(zip(fused.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(mine, other) for mine, other in pairs)
    value, same = argument(kind), argument(kind)
    if value.is_floating_point():
        pairs.append((value.requires_grad_(), same.requires_grad_()))
    got, expected = fused(value), twin(same)
    # One product or one sum leaves nothing to differ by; a sine of the textbook table may be off in the last bit.
    sines = kind in ("TransformerEmbedding", POSITIONAL)
    torch.testing.assert_close(got, expected, atol=4e-6 if sines else 0, rtol=0)
    assert_same_gradients(got, expected, *pairs)


@pytest.mark.parametrize("d_model", [1, 2, 3, 6, 7, 64])
def test_pe_is_the_table_of_the_reference(d_model):
    fused, twin = posenc_ext.PositionalEncoding(d_model, 300), reference.PositionalEncoding(d_model, 300)
    assert fused.pe.shape == twin.pe.shape == (1, 300, d_model)
    assert fused.pe.dtype == torch.float32
    torch.testing.assert_close(fused.pe[0].double(), table32(range(300), d_model), atol=2e-7, rtol=0)
    # The exp of the twin may be off in the last bit, and the position multiplies that.
    far = torch.arange(300).unsqueeze(1) * 6e-8 + 3e-7
    assert ((fused.pe - twin.pe)[0].abs() <= far).all()


@make.each(("options", "shape"), {"default": ({}, (1, 5000, D)), "sequence first": ({"batch_first": False}, (9, 1, D))})
def test_pe_has_the_rows_asked_for(options, shape):
    assert posenc_ext.PositionalEncoding(D, 9 if options else None, **options).pe.shape == shape


@pytest.mark.parametrize("length", [1, 5000, 5001, 200_000])
@pytest.mark.parametrize("max_len", [None, 4])
def test_max_len_never_limits(length, max_len):
    got = layer(POSITIONAL, max_len=max_len)(torch.zeros(1, length, D))[0]
    rows = range(max(length - 50, 0), length)
    torch.testing.assert_close(got[rows.start :].double(), table32(rows, D), atol=2e-7, rtol=0)
    embedded = layer()
    nn.init.zeros_(make.weight_of(embedded))
    assert torch.equal(embedded(torch.zeros(1, length, dtype=torch.long))[0], got)


@make.each_convention
@pytest.mark.parametrize("d_model", [1, 2, 3, 16, 17])
def test_every_convention_against_the_double_precision_table(convention, d_model):
    positions = np.arange(40) + convention.first_position
    expected = torch.from_numpy(reference.sinusoid_table(positions, d_model, **fields(convention)))
    module = posenc_ext.PositionalEncoding(d_model, 40, convention=convention.name)
    # The fp32 angle of a reference table is off by half a unit of it: 40 * 2^-24 at most, twice for the frequency.
    atol = 6e-6 if module.precision == "reference" else 2.5e-7
    torch.testing.assert_close(module.pe[0].double(), expected, atol=atol, rtol=0)
    assert torch.equal(module(torch.zeros(1, 40, d_model)), module.pe)
    embedding = layer(width=d_model, convention=convention)
    nn.init.zeros_(make.weight_of(embedding))
    assert torch.equal(embedding(make.ids((1, 40))), module.pe)
    exact = posenc_ext.PositionalEncoding(d_model, 40, convention=convention.name, precision="exact")
    torch.testing.assert_close(exact.pe[0].double(), expected, atol=2.5e-7, rtol=0)


# ---- sequence first --------------------------------------------------------------------------------------------------


@make.each("options", {"none": {}, "offset": {"offset": 5}, "positions": {"positions": torch.arange(T) * 3}})
@make.each_layer_with_positions
def test_sequence_first_is_the_transpose(kind, options):
    swapped = {k: v.unsqueeze(0).expand(B, T).t() if k == "positions" else v for k, v in options.items()}
    value, other = argument(kind), layer(kind, batch_first=False)
    expected = layer(kind)(value, **options).transpose(0, 1)
    assert torch.equal(other(value.transpose(0, 1), **swapped), expected)
    # 1-D positions run along the sequence in either order.
    assert torch.equal(other(value.transpose(0, 1).contiguous(), **options), expected)


# ---- where positions start -------------------------------------------------------------------------------------------


@make.each_convention
def test_the_running_index_starts_at_the_first_position_of_the_convention(convention, x, ids):
    name, first = convention.name, {"opennmt_tf": 1, "fairseq": 2}.get(convention.name, 0)
    rows = functional.positional_encoding(torch.arange(first, first + T), D, convention=name)
    module = layer(POSITIONAL, max_len=T, convention=name)
    assert torch.equal(module(x), x + rows)
    assert torch.equal(module.pe[0], rows)
    embedding = layer(convention=name)
    assert torch.equal(embedding(ids), make.weight_of(embedding)[ids] * embedding.token_scale + rows)
    for each, value in ((module, x), (embedding, ids)):
        # Explicit positions are taken as they are.
        assert torch.equal(each(value, positions=torch.arange(first, first + T)), each(value))
        # An offset moves both.
        assert torch.equal(each(value, offset=4), each(value, positions=torch.arange(T), offset=first + 4))


PLACES = {"none": {}, "offset": {"offset": 9}, "positions": {"positions": torch.tensor([4, -2, 7, 0, 1, 9, 9])}}


@make.each_convention
@make.each("precision", [None, "exact"])
@make.each("place", PLACES)
def test_the_functional_forms_are_the_modules(convention, precision, place, ids, x):
    options = {"convention": convention.name, "precision": precision}
    module = layer(**options)
    got = functional.embed(ids, make.weight_of(module), **place, **options)
    assert torch.equal(got, module(ids, **place))
    rows = functional.scaled_embedding(ids, make.weight_of(module))
    assert torch.equal(functional.add_positional_encoding(rows, **place, **options), got)
    added = functional.add_positional_encoding(x, **place, **options)
    assert torch.equal(added, layer(POSITIONAL, **options)(x, **place))
    pe = functional.positional_encoding(place.get("positions", T), D, offset=place.get("offset", 0), **options)
    assert torch.equal(rows + pe, got)


POSITION_FORMS = {
    "1d": lambda p: p,
    "row": lambda p: p.unsqueeze(0),
    "full": lambda p: p.expand(B, T).contiguous(),
    "expanded": lambda p: p.expand(B, T),
    "int32": lambda p: p.int(),
}


@make.each("form", POSITION_FORMS)
@make.each_layer_with_positions
def test_offset_equals_explicit_positions(form, kind):
    positions, module, value = form(torch.arange(5, 5 + T)), layer(kind), argument(kind)
    assert torch.equal(module(value, positions=positions), module(value, offset=5))
    assert torch.equal(module(value, positions=positions, offset=2), module(value, offset=7))
    assert not torch.equal(module(value, offset=5), module(value))


def test_a_later_token_does_not_depend_on_those_before_it():
    """Whatever stands before it, padding too: nothing is carried from token to token, in any convention."""
    for options in ({"precision": p, "convention": c} for p in ("exact", "reference") for c in CONVENTIONS):
        module = layer(width=64, padding_idx=0, **options)
        ids = make.ids((1, 40))
        skipped = ids.masked_fill(torch.arange(40) % 3 == 0, 0)
        kept = ids == skipped
        assert_same_bits(module(skipped)[kept], module(ids)[kept], f"{options}")


@make.each("convention", ["vaswani", "fairseq", "marian"])
@make.each_layer_with_positions
def test_decoding_step_by_step_equals_the_full_pass(kind, convention):
    module = layer(kind, **({} if kind.startswith("Learned") else {"convention": convention}))
    value = argument(kind)
    steps = [module(value[:, t : t + 1], offset=t) for t in range(T)]
    assert torch.equal(torch.cat(steps, dim=1), module(value))


def test_left_padding_with_explicit_positions_keeps_the_values():
    sequences = [torch.tensor([3, 4, 5, 6]), torch.tensor([7, 8]), torch.tensor([9])]
    width = max(map(len, sequences))
    padded = torch.stack([F.pad(s, (width - len(s), 0), value=0) for s in sequences])
    positions = ((padded != 0).long().cumsum(dim=1) - 1).clamp(min=0)
    module = layer(padding_idx=0)
    got = module(padded, positions=positions)
    for row, sequence in zip(got, sequences, strict=True):
        assert torch.equal(row[width - len(sequence) :], module(sequence.unsqueeze(0))[0])
    # Without them the padding shifts the encoding, which is why positions is there.
    assert not torch.equal(module(padded)[1, -2:], module(sequences[1]))


@make.each_layer_with_positions
def test_positions_of_another_shape_are_refused(kind):
    with pytest.raises(ValueError, match=rf"positions must .*\[{T + 1}\]"):
        layer(kind)(argument(kind), positions=torch.arange(T + 1))


@make.each("kind", [POSITIONAL, "LearnedPositionalEmbedding"])
def test_x_of_another_width_is_refused(kind, x):
    with pytest.raises(ValueError, match=f"width {D + 1}"):
        layer(kind, width=D + 1)(x)


# ---- learned positions end -------------------------------------------------------------------------------------------


def test_learned_positions_end_where_sinusoids_go_on():
    trained, longer = layer("LearnedPositionalEmbedding", max_len=5), torch.zeros(1, 6, D)
    for given, options, found in (
        (longer, {}, r"5 at token\[0, 5\]"),
        (longer[:, :3], {"offset": 3}, r"5 at token\[0, 2\]"),
        (longer[:, :2], {"offset": -1}, r"-1 at token\[0, 0\]"),
        (longer[:, :2], {"positions": torch.tensor([0, -1])}, r"-1 at token\[0, 1\]"),
        (longer[:, :2], {"positions": torch.tensor([0, 5])}, r"5 at token\[0, 1\]"),
    ):
        with pytest.raises(IndexError, match=rf"positions must lie in \[0, 5\), .*position_table, got {found}"):
            trained(given, **options)
    assert trained(longer[:, :5]).shape == (1, 5, D)
    assert layer(POSITIONAL, max_len=5)(longer).shape == (1, 6, D)


def test_learned_positions_do_not_wrap():
    """A sum past int32, or past int64, is no row."""
    trained, top, far = layer("LearnedPositionalEmbedding", max_len=5), 2**31 - 1, 2**63 - 1

    def rows(offset, given, dtype=torch.int64):
        return trained(torch.zeros(1, 2, D), offset=offset, positions=torch.tensor(given, dtype=dtype))

    for offset, given, dtype in (
        (top, (1, 2), torch.int32),
        (2**32, (0, 1), torch.int32),
        (-top, (-4, -3), torch.int32),
        (2**61, (far - 1, far), torch.int64),
        (-(2**61), (-far, 1 - far), torch.int64),
    ):
        wrapped = (given[0] + offset + 2**63) % 2**64 - 2**63
        words = "positions must lie in [0, 5)", f"got {wrapped} at token[0, 0]"
        assert_refused(functools.partial(rows, offset, given, dtype), *words, error=IndexError)
    for offset in (far, -far, 2**62, -(2**62)):
        words = "offset must lie between -2**62 and 2**62", f"got {offset}"
        assert_refused(functools.partial(rows, offset, (-far, 3 - far)), *words)
    assert torch.equal(rows(top, (2 - top, 3 - top)), rows(2, (0, 1)))


@make.each("dtype", [torch.bool, torch.uint8, torch.int16, torch.float32])
def test_learned_positions_are_int32_or_int64(dtype):
    trained, bad = layer("LearnedPositionalEmbedding"), torch.ones(2).to(dtype)
    words = "positions must have dtype int64 or int32, got ", dtype
    assert_refused(lambda: trained(torch.zeros(1, 2, D), positions=bad), *words, error=TypeError)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@make.each_layer_with_positions
@make.each("p", [0.0, 0.3, 1.0])
def test_dropout(kind, p):
    module, value = layer(kind, dropout=p), argument(kind)
    plain = module.eval()(value)
    assert torch.equal(plain, layer(kind)(value))
    module.train()
    torch.manual_seed(5)
    got, following = module(value), torch.rand(1)
    torch.manual_seed(5)
    kept = got != 0
    want = plain * kept / (kept.double().mean() if p == 1 else 1 - round(p * 2**16) / 2**16)
    if p:  # in the pass: one draw seeds it
        torch.randint(0, 2**62, ())
    torch.testing.assert_close(got, want.nan_to_num(0).to(got.dtype), rtol=1e-5, atol=1e-5)
    assert p < 1 or not got.any()
    assert torch.equal(torch.rand(1), following)
    if 0 < p < 1:
        assert not torch.equal(module(value), got)  # another draw


def test_gradient_goes_through_the_same_dropout_mask(ids):
    module = layer(dropout=0.5)
    got = module(ids)
    got.sum().backward()
    kept = (got != 0).float() * 2 * module.token_scale
    expected = torch.zeros(V, D).index_add_(0, ids.flatten(), kept.reshape(-1, D))
    torch.testing.assert_close(make.weight_of(module).grad, expected)


# ---- the scale of tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_scale", [None, 1.0, 0.5, 3])
def test_token_scale(token_scale, ids):
    module = layer(token_scale=token_scale)
    scale, weight = SCALE if token_scale is None else token_scale, make.weight_of(module)
    assert module.token_scale == scale
    assert torch.equal(module(ids), weight[ids] * scale + layer(POSITIONAL, max_len=T).pe[0])
    module(ids).sum().backward()
    counts = torch.bincount(ids.flatten(), minlength=V).unsqueeze(1)
    torch.testing.assert_close(weight.grad, (counts * scale).expand(V, D).float(), atol=1e-5, rtol=1e-6)


# ---- tools that look at the weight -----------------------------------------------------------------------------------


def test_embeddings_follow_their_lut(ids):
    """Replacing or resizing the inner table is common practice."""
    module = layer("Embeddings")
    assert (type(module.lut), module.token_scale) == (nn.Embedding, SCALE)
    module.lut = nn.Embedding.from_pretrained(torch.randn(V + 5, D), freeze=True, padding_idx=2)
    assert torch.equal(module(ids + 5), module.lut(ids + 5) * SCALE)
    assert not module(ids).requires_grad


@make.each_layer
def test_forward_changes_nothing_in_the_module(kind):
    module, value = layer(kind, **({} if kind == "Embeddings" else {"dropout": 0.1})), argument(kind)
    before = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    state, original = copy.deepcopy(module.state_dict()), value.clone()
    assert module(value).data_ptr() != value.data_ptr()
    assert {k: v for k, v in vars(module).items() if not k.startswith("_")} == before
    assert all(torch.equal(module.state_dict()[k], v) for k, v in state.items())
    assert torch.equal(value, original)


REPR = {
    "PositionalEncoding": ({"max_len": 9, "convention": "marian"}, ["8", "max_len=9", "'marian'", "'exact'"]),
    "TransformerEmbedding": ({"padding_idx": -1}, ["11, 8", "'vaswani'", "padding_idx=10", "2.82843"]),
    "LearnedPositionalEmbedding": ({"max_len": 9}, ["9, 8"]),
}


@make.each("kind", REPR.keys())
def test_repr_tells_the_spec(kind):
    options, words = REPR[kind]
    assert all(word in repr(layer(kind, **options)) for word in words)


# ---- refused at construction -----------------------------------------------------------------------------------------

SIZES = {
    "Embeddings": {"d_model": D, "vocab_size": V},
    "TransformerEmbedding": {"d_model": D, "vocab_size": V},
    "PositionalEncoding": {"d_model": D, "max_len": T},
    "LearnedPositionalEmbedding": {"d_model": D, "max_len": T},
}


@pytest.mark.parametrize("size", [0, -2])
@make.each_layer
def test_sizes_must_be_positive(kind, size):
    for name in SIZES[kind]:
        words = f"{kind}: {name} must be positive, got {size}"
        assert_refused(lambda n=name: getattr(posenc_ext, kind)(**SIZES[kind] | {n: size}), words)


DROPOUT = r"dropout must lie in \[0, 1\], got "


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("TransformerEmbedding", {"padding_idx": V}, rf"padding_idx must lie in \[-{V}, {V}\), got {V}"),
        ("Embeddings", {"padding_idx": -V - 1}, rf"padding_idx must lie in .* got -{V + 1}"),
        ("TransformerEmbedding", {"max_norm": 0.0}, "max_norm must be positive, got 0.0"),
        ("Embeddings", {"max_norm": -1.0}, "max_norm must be positive, got -1.0"),
        ("TransformerEmbedding", {"max_norm": math.nan}, "max_norm must be positive, got nan"),
        ("TransformerEmbedding", {"dropout": 1.5}, DROPOUT + "1.5"),
        ("PositionalEncoding", {"dropout": -0.1}, DROPOUT + "-0.1"),
        ("LearnedPositionalEmbedding", {"dropout": 2}, DROPOUT + "2"),
        ("TransformerEmbedding", {"convention": "nobody"}, "convention must be .*'vaswani'.* got 'nobody'"),
        ("PositionalEncoding", {"convention": "nobody"}, "convention must be .* got 'nobody'"),
        ("TransformerEmbedding", {"precision": "double"}, "precision must be one of .* got 'double'"),
        ("PositionalEncoding", {"precision": "half"}, "precision must be one of .* got 'half'"),
    ],
)
def test_options_are_checked_at_construction(kind, options, message):
    with pytest.raises(ValueError, match=message):
        layer(kind, **options)


@make.each("shape", [(0,), (0, T), (B, 0)])
@make.each_layer
def test_empty_input(kind, shape):
    module = layer(kind)
    value = torch.empty(shape, dtype=torch.long) if kind in make.OF_IDS else torch.empty(*shape, D)
    got = module(value)
    assert got.shape == (*shape, D)
    if kind in make.OF_IDS:
        got.sum().backward()
        assert torch.equal(make.weight_of(module).grad, torch.zeros(V, D))


# ---- the options of nn.Embedding -------------------------------------------------------------------------------------

FLAGS = {
    "none": {},
    "padding": {"padding_idx": 0},
    "negative padding": {"padding_idx": -3},
    "max_norm": {"max_norm": 1.0},
    "max_norm 1": {"max_norm": 2.0, "norm_type": 1.0},
    "max_norm inf": {"max_norm": 0.5, "norm_type": math.inf},
    "frequency": {"scale_grad_by_freq": True},
    "frequency, padding": {"scale_grad_by_freq": True, "padding_idx": 2},
    "sparse": {"sparse": True},
    "sparse, padding": {"sparse": True, "padding_idx": 2},
    "sparse, max_norm": {"sparse": True, "max_norm": 1.0},
    "max_norm, padding, frequency": {"max_norm": 1.0, "padding_idx": 2, "scale_grad_by_freq": True},
}


def with_flags(kind: str, flags: dict) -> tuple[nn.Module, nn.Parameter, nn.Embedding]:
    """A module, its weight, and nn.Embedding of the same numbers."""
    module = layer(kind, **flags)
    torch.manual_seed(3)
    return module, make.weight_of(module), nn.Embedding(V, D, **flags)


@make.each_layer_of_ids
@make.each("flags", FLAGS)
def test_flags_act_as_in_nn_embedding(kind, flags, ids):
    module, weight, embedding = with_flags(kind, flags)
    untouched = weight.detach().clone()
    got, expected = module(ids), embedding(ids) * SCALE
    if kind == "TransformerEmbedding":
        expected = expected + layer(POSITIONAL, max_len=T).pe
    assert torch.equal(got, expected)
    assert torch.equal(weight, embedding.weight)
    assert ("max_norm" in flags) == (not torch.equal(weight, untouched))
    assert_same_gradients(got, expected, (weight, embedding.weight))
    assert weight.grad.is_sparse == flags.get("sparse", False)
    if (padding := flags.get("padding_idx")) is not None:
        assert weight.grad.to_dense()[padding].count_nonzero() == 0


# For each backward pass, by how much the ids of each use are moved.
@make.each("passes", {"one use": [[0]], "two uses": [[0, 1]], "two backward passes": [[0], [0]]})
def test_stored_sparse_gradients_are_called_coalesced_only_if_they_are(ids, passes):
    module, dense = layer(sparse=True), layer()
    for part in (module, dense):
        for uses in passes:
            sum(part(ids.roll(k, 0)).sum() for k in uses).backward()
    stored = make.weight_of(module).grad
    rows = stored._indices()[0]
    assert not stored.is_coalesced() or torch.equal(rows, ids.unique())
    assert stored.is_coalesced() or passes != [[0]]
    assert torch.equal(stored.coalesce().to_dense(), make.weight_of(dense).grad)


def other_rows(gradient: Tensor) -> Tensor:
    """The same values, in one row."""
    rows = torch.zeros_like(gradient._indices())
    return torch.sparse_coo_tensor(rows, gradient._values(), gradient.shape, check_invariants=True)


def rows_in_place(gradient: Tensor) -> Tensor:
    gradient._indices().zero_()
    return gradient


@make.each("hook", {"other rows": other_rows, "rows in place": rows_in_place})
def test_a_gradient_that_a_hook_has_changed_is_not_called_coalesced(hook, ids):
    module = layer(sparse=True)
    weight = make.weight_of(module)
    weight.register_hook(hook)
    module(ids).sum().backward()
    assert not weight.grad.is_coalesced()
    assert weight.grad.coalesce()._nnz() == 1


@make.each_layer_of_ids
def test_sparse_adam_trains(kind, ids):
    module, weight, embedding = with_flags(kind, {"sparse": True})
    optimizers = [torch.optim.SparseAdam([w], lr=0.1) for w in (weight, embedding.weight)]
    pe = layer(POSITIONAL, max_len=T).pe if kind == "TransformerEmbedding" else 0
    for _ in range(3):
        for optimizer, output in zip(optimizers, (module(ids), embedding(ids) * SCALE + pe), strict=True):
            optimizer.zero_grad()
            output.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(weight, embedding.weight, atol=1e-5, rtol=1e-5)


@make.each_layer_of_ids
def test_max_norm_tells_autograd_about_its_edit(kind, ids):
    """A gradient through a use of the weight from before the rescaling is refused."""
    module, weight, embedding = with_flags(kind, {"max_norm": 1.0})
    for used, call in ((embedding.weight, embedding), (weight, module)):
        before = used.square().sum()
        call(ids)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()


def test_max_norm_of_a_view_of_a_larger_tensor():
    """Replicas of a module hold views; only the rows looked up may change, and in the storage they belong to."""
    storage = torch.randn(V, 2 * D)
    weight = storage[:, D:]
    before = storage.clone()
    got = functional.scaled_embedding(torch.tensor([1, 1, 4]), weight, max_norm=0.5)
    assert torch.equal(storage[:, :D], before[:, :D])
    assert torch.equal(got, weight[[1, 1, 4]] * SCALE)
    norms = weight.norm(dim=1)
    torch.testing.assert_close(norms[[1, 4]], torch.tensor([0.5, 0.5]), atol=1e-4, rtol=0)
    others = [i for i in range(V) if i not in (1, 4)]
    assert torch.equal(weight[others], before[others, D:])
