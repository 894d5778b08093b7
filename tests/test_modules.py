"""The modules against their textbook twins, against `nn.Embedding`, and what `fuse` may and may not replace."""

from __future__ import annotations

import copy
import itertools
import math

import make
import numpy as np
import pytest
import torch
from helpers import assert_same_bits, fields, true_encoding
from make import B, D, T, V, argument, layer, pair
from torch import Tensor, nn
from torch.nn import functional as F

import posenc_ext
from posenc_ext import CONVENTIONS, functional, reference

SCALE = math.sqrt(D)
POSITIONAL = "PositionalEncoding"
PADDING = [None, 0, -1]


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


@pytest.mark.parametrize("module", [posenc_ext.Embeddings, reference.Embeddings], ids=["fused", "reference"])
def test_published_numbers(module):
    torch.manual_seed(0)
    got = module(6, 9)(torch.tensor(1))
    torch.testing.assert_close(
        got, torch.tensor([-0.7741, -5.1812, 0.7894, -3.0945, 0.8573, 0.7548]), atol=5e-5, rtol=0
    )


@make.each("dtype", [torch.float32, torch.float64, torch.bfloat16])
@make.each("padding_idx", PADDING)
@make.each_layer_of_ids
def test_draws_what_nn_embedding_draws(kind, padding_idx, dtype):
    torch.manual_seed(3)
    expected, following = nn.Embedding(V, D, padding_idx=padding_idx, dtype=dtype).weight, torch.rand(1)
    weight = make.weight_of(layer(kind, padding_idx=padding_idx, dtype=dtype))
    assert weight.dtype == dtype
    assert torch.equal(weight, expected)
    assert torch.equal(torch.rand(1), following)  # and not one number more


def test_learned_positions_draw_what_the_reference_draws():
    torch.manual_seed(3)
    expected = reference.LearnedPositionalEmbedding(T, D).weight
    assert torch.equal(layer("LearnedPositionalEmbedding", max_len=T).weight, expected)


# ---- against the twins -----------------------------------------------------------------------------------------------


def test_embeddings_equal_the_reference(ids):
    fused = layer("Embeddings")
    torch.manual_seed(3)
    twin = reference.Embeddings(D, V)
    got, expected = fused(ids), twin(ids)
    assert torch.equal(got, expected)  # one fp32 product: nothing to differ by
    assert_same_gradients(got, expected, (fused.lut.weight, twin.lut.weight))


@make.each_half
@make.each_layer_of_ids
def test_16_bit_layers_are_rounded_once(kind, ids, dtype):
    module = layer(kind, dtype=dtype)
    pe = layer(POSITIONAL, max_len=T).pe[0] if kind == "TransformerEmbedding" else 0
    rows = make.weight_of(module)[ids]
    expected = (rows.float() * SCALE + pe).to(dtype)
    assert torch.equal(module(ids), expected)
    # A scale rounded to the type of the weight would be another factor: the test tells them apart.
    assert not torch.equal((rows * torch.tensor(SCALE, dtype=dtype) + pe).to(dtype), expected)


def test_positional_encoding_equals_the_reference(x):
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = layer(POSITIONAL, max_len=50)(a), reference.PositionalEncoding(D, 50)(b)
    torch.testing.assert_close(got, expected, atol=4e-6, rtol=0)
    assert_same_gradients(got, expected, (a, b))


def test_transformer_embedding_equals_the_reference(ids):
    fused, twin = layer(), pair(reference)
    twin[0].lut.weight = nn.Parameter(make.weight_of(fused).detach().clone())
    got, expected = fused(ids), twin(ids)
    torch.testing.assert_close(got, expected, atol=4e-6, rtol=0)
    assert_same_gradients(got, expected, (make.weight_of(fused), twin[0].lut.weight))


def test_transformer_embedding_is_its_two_halves_bit_for_bit(ids):
    fused, embeddings = layer(), layer("Embeddings")
    embeddings.lut.weight = make.weight_of(fused)
    assert torch.equal(fused(ids), layer(POSITIONAL)(embeddings(ids)))


def test_learned_positions_equal_the_reference(x):
    twin, fused = reference.LearnedPositionalEmbedding(40, D), layer("LearnedPositionalEmbedding")
    fused.load_state_dict(twin.state_dict())
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = fused(a), twin(b)
    assert torch.equal(got, expected)
    assert_same_gradients(got, expected, (a, b), (fused.weight, twin.weight))
    assert fused.weight.grad[T:].count_nonzero() == 0  # no token was there


@pytest.mark.parametrize("d_model", [1, 2, 3, 6, 7, 64])
def test_pe_is_the_table_of_the_reference(d_model):
    fused, twin = posenc_ext.PositionalEncoding(d_model, 300), reference.PositionalEncoding(d_model, 300)
    assert fused.pe.shape == twin.pe.shape == (1, 300, d_model)
    assert fused.pe.dtype == torch.float32
    torch.testing.assert_close(fused.pe[0].double(), table32(range(300), d_model), atol=2e-7, rtol=0)
    # The exp of the twin may be off in the last bit, and the position multiplies that.
    far = torch.arange(300).unsqueeze(1) * 6e-8 + 3e-7
    assert ((fused.pe - twin.pe)[0].abs() <= far).all()


def test_pe_is_what_forward_adds(x):
    module = layer(POSITIONAL)
    assert torch.equal(module(x), x + module.pe[:, :T])


def test_pe_has_the_rows_asked_for():
    assert posenc_ext.PositionalEncoding(4).pe.shape == (1, 5000, 4)
    assert posenc_ext.PositionalEncoding(4, 9).pe.shape == (1, 9, 4)
    assert posenc_ext.PositionalEncoding(4, 9, batch_first=False).pe.shape == (9, 1, 4)


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
@pytest.mark.parametrize("d_model", [2, 3, 16, 17])
def test_every_convention_against_the_double_precision_table(convention, d_model):
    positions = np.arange(40) + convention.first_position
    expected = torch.from_numpy(reference.sinusoid_table(positions, d_model, **fields(convention)))
    module = posenc_ext.PositionalEncoding(d_model, 40, convention=convention.name)
    # The fp32 angle of a reference table is off by half a unit of it: 40 * 2^-24 at most, twice for the frequency.
    atol = 6e-6 if module.precision == "reference" else 2.5e-7
    torch.testing.assert_close(module.pe[0].double(), expected, atol=atol, rtol=0)
    assert torch.equal(module(torch.zeros(1, 40, d_model)), module.pe)
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


@make.each("shape", [(), (T,), (2, B, T)])
def test_ids_of_any_rank(shape):
    values, module = make.ids(shape), layer()
    got = module(values)
    assert got.shape == (*shape, D)
    pe = layer(POSITIONAL, max_len=shape[-1] if shape else 1).pe[0]
    assert torch.equal(got, make.weight_of(module)[values] * module.token_scale + (pe if shape else pe[0]))


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


def test_one_position_per_row_of_the_batch(ids):
    """[B, 1] positions: every row of a batch at its own place, as in decoding."""
    module, step = layer(), ids[:, :1]
    starts = torch.tensor([[4], [0], [9]])
    expected = torch.cat([module(step[i : i + 1], offset=int(starts[i])) for i in range(B)])
    assert torch.equal(module(step, positions=starts), expected)


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
        (longer, {}, "0 to 5"),
        (longer[:, :3], {"offset": 3}, "3 to 5"),
        (longer[:, :2], {"offset": -1}, "-1 to 0"),
        (longer[:, :2], {"positions": torch.tensor([0, -1])}, "-1"),
        (longer[:, :2], {"positions": torch.tensor([0, 5])}, "5"),
    ):
        with pytest.raises(IndexError, match=rf"LearnedPositionalEmbedding.*\[0, 5\).*got.*{found}"):
            trained(given, **options)
    assert trained(longer[:, :5]).shape == (1, 5, D)
    assert layer(POSITIONAL, max_len=5)(longer).shape == (1, 6, D)


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
    assert torch.equal(got, F.dropout(plain, p, training=True))
    if p == 0.0:  # nothing to draw
        torch.manual_seed(5)
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


def test_the_weight_and_the_scale_explain_the_output(ids):
    """Tools that call `F.embedding` on the weight find the scale as a public attribute."""
    embeddings, whole = layer("Embeddings"), layer()
    assert isinstance(embeddings.lut, nn.Embedding)
    # Not embeddings themselves: their forward is more than a lookup.
    assert not isinstance(embeddings, nn.Embedding)
    assert not isinstance(whole, nn.Embedding)
    assert torch.equal(F.embedding(ids, embeddings.lut.weight) * embeddings.token_scale, embeddings(ids))
    pe = layer(POSITIONAL, max_len=T).pe[0]
    assert torch.equal(F.embedding(ids, make.weight_of(whole)) * whole.token_scale + pe, whole(ids))


def test_embeddings_follow_their_lut(ids):
    """Replacing or resizing the inner table is common practice."""
    module = layer("Embeddings")
    module.lut = nn.Embedding.from_pretrained(torch.randn(V + 5, D), freeze=True, padding_idx=2)
    assert torch.equal(module(ids + 5), module.lut(ids + 5) * SCALE)
    assert not module(ids).requires_grad


@make.each_layer
def test_forward_changes_nothing_in_the_module(kind):
    module, value = layer(kind, **({} if kind == "Embeddings" else {"dropout": 0.1})), argument(kind)
    before = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    state, original = copy.deepcopy(module.state_dict()), value.clone()
    module(value)
    assert {k: v for k, v in vars(module).items() if not k.startswith("_")} == before
    assert all(torch.equal(module.state_dict()[k], v) for k, v in state.items())
    assert torch.equal(value, original)


def test_the_result_is_never_an_input(ids, x):
    whole = layer()
    nn.init.ones_(make.weight_of(whole))
    one = layer(rows=1, token_scale=1.0)  # the one row is the whole of its weight
    row, first = make.weight_of(one), torch.zeros(1, dtype=torch.long)
    for got, given in (
        (whole(ids), (ids, make.weight_of(whole))),
        (one(first), (row,)),
        (functional.scaled_embedding(first, row, token_scale=1.0), (row,)),
        (layer(POSITIONAL)(x), (x,)),
        (layer("LearnedPositionalEmbedding")(x), (x,)),
    ):
        assert got.data_ptr() not in [t.data_ptr() for t in given]


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
    (posenc_ext.Embeddings, "d_model"): {"vocab_size": V},
    (posenc_ext.Embeddings, "vocab_size"): {"d_model": D},
    (posenc_ext.TransformerEmbedding, "d_model"): {"vocab_size": V},
    (posenc_ext.TransformerEmbedding, "vocab_size"): {"d_model": D},
    (posenc_ext.PositionalEncoding, "d_model"): {},
    (posenc_ext.PositionalEncoding, "max_len"): {"d_model": D},
    (posenc_ext.LearnedPositionalEmbedding, "d_model"): {"max_len": T},
    (posenc_ext.LearnedPositionalEmbedding, "max_len"): {"d_model": D},
}


@pytest.mark.parametrize("size", [0, -2])
@pytest.mark.parametrize("case", SIZES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_sizes_must_be_positive(case, size):
    cls, argument = case
    with pytest.raises(ValueError, match=f"{cls.__name__}: {argument} must be positive, got {size}"):
        cls(**SIZES[case], **{argument: size})


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


@pytest.mark.parametrize("d_model", [1, 2, 3])
@make.each_convention
@make.each("kind", ["TransformerEmbedding", POSITIONAL])
def test_tiny_widths(kind, d_model, convention):
    got = layer(kind, width=d_model, convention=convention)(argument(kind, width=d_model))
    assert got.shape == (B, T, d_model)
    assert got.isfinite().all()


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


def test_sparse_with_frequency_scaling_divides_too(ids):
    """nn.Embedding refuses the pair; here the counts are known."""
    weights = []
    for options in ({}, {"sparse": True}):
        module = layer(scale_grad_by_freq=True, **options)
        module(ids).sum().backward()
        weights.append(make.weight_of(module))
    dense, sparse = (weight.grad for weight in weights)
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), dense)
    used = torch.bincount(ids.flatten(), minlength=V).gt(0).float().unsqueeze(1)
    torch.testing.assert_close(dense, (used * SCALE).expand(V, D))


def test_sparse_gradient_is_coalesced_and_stays_so_when_it_is_stored(ids):
    module = layer(sparse=True)
    weight = make.weight_of(module)
    (gradient,) = torch.autograd.grad(module(ids).sum(), weight)
    module(ids).sum().backward()
    for found in (gradient, weight.grad):
        assert found.is_coalesced()
        assert torch.equal(found.indices()[0], ids.unique())


@make.each("how", ["two backward passes", "two uses"])
def test_sums_of_sparse_gradients_are_not_called_coalesced_if_they_are_not(ids, how):
    module, dense = layer(sparse=True), layer()
    for part in (module, dense):
        if how == "two uses":
            (part(ids).sum() + part(ids.flip(0)).sum()).backward()
        else:
            part(ids).sum().backward()
            part(ids).sum().backward()
    stored = make.weight_of(module).grad
    rows = stored._indices()[0]
    assert not stored.is_coalesced() or torch.equal(rows, rows.unique())
    assert torch.equal(stored.coalesce().to_dense(), make.weight_of(dense).grad)


@make.each_layer_of_ids
def test_sparse_batch_of_only_padding(kind):
    module, weight, _ = with_flags(kind, {"sparse": True, "padding_idx": 4})
    before = weight.detach().clone()
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    module(torch.full((2, 3), 4)).sum().backward()
    assert weight.grad._nnz() == 0
    optimizer.step()
    assert torch.equal(weight, before)


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


def after_max_norm(embedding, weight, ids):
    """A gradient taken through a use of the weight from before the rescaling."""
    before = weight.square().sum()
    embedding(ids)
    before.backward()


@make.each_layer_of_ids
def test_max_norm_tells_autograd_about_its_edit(kind, ids):
    module, weight, embedding = with_flags(kind, {"max_norm": 1.0})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after_max_norm(embedding, embedding.weight, ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after_max_norm(module, weight, ids)


@pytest.mark.parametrize("bad", [V, -1])
@make.each_layer_of_ids
def test_out_of_range_ids_leave_the_weight_alone_under_max_norm(kind, bad):
    module, weight, _ = with_flags(kind, {"max_norm": 0.1})
    before = weight.detach().clone()
    with pytest.raises(IndexError, match=rf"\[0, {V}\), got {bad} at input\[2\]"):
        module(torch.tensor([0, 1, bad]))
    assert torch.equal(weight, before)


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


def test_frozen_weight_gets_no_gradient(ids):
    module = layer()
    make.weight_of(module).requires_grad_(False)
    assert not module(ids).requires_grad


# ---- fuse ------------------------------------------------------------------------------------------------------------


def sequence(kind: str, dropout: float | None = None) -> nn.Sequential:
    """What fuse takes, of the package's modules, of the textbook's, or of one each."""
    parts = list(pair(posenc_ext if kind == "fused" else reference))
    if kind == "mixed":
        parts[1] = posenc_ext.PositionalEncoding(D)
    return nn.Sequential(*parts, *([] if dropout is None else [nn.Dropout(dropout)]))


KINDS = ["fused", "reference", "mixed"]


def close_to(kind: str, got: Tensor, expected: Tensor) -> bool:
    # The textbook table may be off in the last bit of a frequency; between fused modules nothing may differ.
    return torch.allclose(got, expected, atol=4e-6, rtol=0) if kind == "reference" else torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [None, 0.0, 0.4])
def test_fuse(kind, dropout, ids):
    module = sequence(kind, dropout)
    fused = posenc_ext.fuse(module)
    assert type(fused) is posenc_ext.TransformerEmbedding
    assert make.weight_of(fused) is module[0].lut.weight
    assert not make.weight_of(fused).is_meta
    assert fused.dropout == (dropout or 0.0)
    assert fused.training
    torch.manual_seed(8)
    expected = module(ids)
    torch.manual_seed(8)
    assert close_to(kind, fused(ids), expected)
    assert close_to(kind, posenc_ext.fuse(module.eval())(ids), module(ids))  # the mode goes over too


def test_fuse_takes_the_spec_over(ids):
    module = nn.Sequential(
        posenc_ext.Embeddings(D, V),
        posenc_ext.PositionalEncoding(D, convention="fairseq", precision="exact", dropout=0.3, batch_first=False),
    )
    fused = posenc_ext.fuse(module)
    found = (fused.convention.name, fused.precision, fused.dropout, fused.batch_first)
    assert found == ("fairseq", "exact", 0.3, False)
    assert torch.equal(fused.eval()(ids), module.eval()(ids))


@make.each("flags", FLAGS)
def test_fuse_takes_the_flags_over(flags, ids):
    module, twin = pair(**flags), pair(**flags)
    fused = posenc_ext.fuse(module)
    assert torch.equal(fused(ids), twin(ids))
    assert torch.equal(make.weight_of(fused), twin[0].lut.weight)
    assert_same_gradients(fused(ids), twin(ids), (make.weight_of(fused), twin[0].lut.weight))


@pytest.mark.parametrize("kind", KINDS)
def test_fuse_inside_a_model(kind, ids):
    """Encoder and decoder inputs of a larger model, one deep inside, and an output layer tied to the table."""
    model = nn.ModuleDict(
        {"source": sequence(kind), "decoder": nn.ModuleList([nn.ModuleDict({"target": sequence(kind, 0.1)})])}
    )
    model["output"] = nn.Linear(D, V, bias=False)
    model["output"].weight = model["source"][0].lut.weight
    model.eval()
    expected = [model["source"](ids), model["decoder"][0]["target"](ids)]
    parameters = set(model.parameters())
    assert posenc_ext.fuse(model) is model
    assert type(model["source"]) is posenc_ext.TransformerEmbedding
    assert set(model.parameters()) == parameters
    for got, value in zip((model["source"](ids), model["decoder"][0]["target"](ids)), expected, strict=True):
        assert close_to(kind, got, value)
    assert model["output"].weight is make.weight_of(model["source"])


def test_tied_output_layer_trains_as_before_fusing(ids):
    def model() -> nn.ModuleDict:
        result = nn.ModuleDict({"input": pair(reference), "output": nn.Linear(D, V, bias=False)})
        result["output"].weight = result["input"][0].lut.weight
        return result

    plain, fused = model(), posenc_ext.fuse(model())
    for each in (plain, fused):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(each["output"](each["input"](ids)).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        assert len(list(each.parameters())) == 1
    torch.testing.assert_close(fused["output"].weight, plain["output"].weight, atol=1e-5, rtol=1e-5)


def test_optimizers_keep_working_after_fuse(ids):
    module = pair()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fused = posenc_ext.fuse(module)
    before = make.weight_of(fused).detach().clone()
    fused(ids).sum().backward()
    optimizer.step()
    assert not torch.equal(make.weight_of(fused), before)


def test_fuse_keeps_a_frozen_table_frozen():
    module = pair()
    module.requires_grad_(False)
    assert not make.weight_of(posenc_ext.fuse(module)).requires_grad


class Louder(posenc_ext.Embeddings):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Quieter(posenc_ext.PositionalEncoding):
    def forward(self, x: Tensor, **options) -> Tensor:
        return super().forward(x, **options) / 2


class Counting(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def edited(module: nn.Sequential, edit) -> nn.Sequential:
    edit(module)
    return module


# What looks like the pair and computes something else, or is no pair at all.
NOT_FUSIBLE = {
    "nothing": lambda: nn.Linear(2, 2),
    "embeddings alone": lambda: nn.Sequential(posenc_ext.Embeddings(D, V)),
    "embeddings, no container": lambda: posenc_ext.Embeddings(D, V),
    "already fused": lambda: layer(),
    "other order": lambda: nn.Sequential(posenc_ext.PositionalEncoding(D), posenc_ext.Embeddings(D, V)),
    "learned positions": lambda: nn.Sequential(
        posenc_ext.Embeddings(D, V), posenc_ext.LearnedPositionalEmbedding(50, D)
    ),
    "bare lookup": lambda: nn.Sequential(nn.Embedding(V, D), posenc_ext.PositionalEncoding(D)),
    "norm after": lambda: nn.Sequential(*pair(), nn.LayerNorm(D)),
    "dropout by channel": lambda: nn.Sequential(*pair(), nn.Dropout1d(0.1)),
    "more after": lambda: nn.Sequential(*sequence("fused", 0.1), nn.Identity()),
    "subclass of embeddings": lambda: nn.Sequential(Louder(D, V), posenc_ext.PositionalEncoding(D)),
    "subclass of encoding": lambda: nn.Sequential(posenc_ext.Embeddings(D, V), Quieter(D)),
    "two dropouts": lambda: nn.Sequential(
        posenc_ext.Embeddings(D, V), posenc_ext.PositionalEncoding(D, dropout=0.1), nn.Dropout(0.1)
    ),
    "two widths": lambda: nn.Sequential(posenc_ext.Embeddings(D, V), posenc_ext.PositionalEncoding(D + 2)),
    "another kind of lookup": lambda: edited(pair(reference), lambda m: setattr(m[0], "lut", Counting(V, D))),
    "an edited table": lambda: edited(pair(reference), lambda m: m[1].pe.mul_(0.5)),
    "hook on the embeddings": lambda: edited(pair(), lambda m: m[0].register_forward_hook(lambda *a: a[2] * 2)),
    "hook on the encoding": lambda: edited(
        pair(), lambda m: m[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    ),
    "hook on the whole": lambda: edited(pair(), lambda m: m.register_forward_hook(lambda *a: a[2] * 2)),
}


@pytest.mark.parametrize("case", NOT_FUSIBLE)
def test_fuse_refuses_what_computes_something_else(case):
    module = NOT_FUSIBLE[case]()
    with pytest.raises(ValueError, match=rf"posenc_ext\.fuse: module must .* got {type(module).__name__}"):
        posenc_ext.fuse(module)
    # Inside a model it is left as it is.
    model = nn.Sequential(nn.Sequential(pair(), nn.Identity()), module)
    assert posenc_ext.fuse(model)[1] is module


def test_fuse_keeps_a_scale_that_was_changed(ids):
    """token_scale is a public attribute; models without the factor set it to 1."""
    module = pair()
    module[0].token_scale = 1.0
    assert torch.equal(posenc_ext.fuse(module)(ids), module(ids))


def test_fuse_keeps_sharing_a_layer_used_twice(ids):
    """Encoder and decoder that share one input layer still share one after fusing."""
    shared = pair()
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"embed": shared}), "decoder": nn.ModuleDict({"embed": shared})})
    model["again"] = shared
    expected = shared(ids)
    posenc_ext.fuse(model)
    layers = [model["encoder"]["embed"], model["decoder"]["embed"], model["again"]]
    assert [type(m) for m in layers] == [posenc_ext.TransformerEmbedding] * 3
    assert all(a is b for a, b in itertools.pairwise(layers))
    assert torch.equal(layers[0](ids), expected)


def test_fused_layer_loads_the_checkpoint_of_what_it_replaced(ids):
    model = nn.ModuleDict({"embed": sequence("reference", 0.1)}).eval()
    checkpoint = copy.deepcopy(model.state_dict())
    expected = model["embed"](ids)
    posenc_ext.fuse(model)
    nn.init.zeros_(make.weight_of(model["embed"]))
    assert model.load_state_dict(checkpoint, strict=True).missing_keys == []
    torch.testing.assert_close(model["embed"](ids), expected, atol=4e-6, rtol=0)
