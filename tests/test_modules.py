"""The modules against their textbook twins, against `nn.Embedding`, and what `fuse` may and may not replace."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from helpers import true_waves
from torch import Tensor, nn
from torch.nn import functional as F

import posenc_ext
from posenc_ext import functional, reference

V, D, B, T = 11, 8, 3, 7
SCALE = math.sqrt(D)


def table32(positions: range, d_model: int) -> Tensor:
    """The true waves of the fp32 angles that an fp32 table is built from, float64 [positions, d_model]."""
    return torch.from_numpy(true_waves(positions, d_model, posenc_ext.CONVENTIONS["vaswani"], "reference"))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(2))


def layer(**options) -> posenc_ext.TransformerEmbedding:
    torch.manual_seed(3)
    return posenc_ext.TransformerEmbedding(V, D, **options)


# ---- initial numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [posenc_ext.Embeddings, reference.Embeddings], ids=["fused", "reference"])
def test_published_numbers(module):
    torch.manual_seed(0)
    got = module(6, 9)(torch.tensor(1))
    torch.testing.assert_close(
        got, torch.tensor([-0.7741, -5.1812, 0.7894, -3.0945, 0.8573, 0.7548]), atol=5e-5, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("kind", ["Embeddings", "TransformerEmbedding"])
def test_draws_what_nn_embedding_draws(kind, padding_idx, dtype):
    torch.manual_seed(0)
    expected, following = nn.Embedding(V, D, padding_idx=padding_idx, dtype=dtype).weight, torch.rand(1)
    torch.manual_seed(0)
    if kind == "Embeddings":
        weight = posenc_ext.Embeddings(D, V, padding_idx=padding_idx, dtype=dtype).lut.weight
    else:
        weight = posenc_ext.TransformerEmbedding(V, D, padding_idx=padding_idx, dtype=dtype).weight
    assert weight.dtype == dtype
    assert torch.equal(weight, expected)
    assert torch.equal(torch.rand(1), following)  # and not one number more


def test_learned_positions_draw_what_the_reference_draws():
    torch.manual_seed(0)
    expected = reference.LearnedPositionalEmbedding(T, D).weight
    torch.manual_seed(0)
    assert torch.equal(posenc_ext.LearnedPositionalEmbedding(T, D).weight, expected)


# ---- against the twins -----------------------------------------------------------------------------------------------


def test_embeddings_equal_the_reference(ids):
    torch.manual_seed(0)
    twin = reference.Embeddings(D, V)
    torch.manual_seed(0)
    fused = posenc_ext.Embeddings(D, V)
    assert torch.equal(fused(ids), twin(ids))  # one fp32 product: nothing to differ by
    weight = torch.randn(B, T, D)
    (fused(ids) * weight).sum().backward()
    (twin(ids) * weight).sum().backward()
    torch.testing.assert_close(fused.lut.weight.grad, twin.lut.weight.grad, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_embeddings_are_rounded_once(ids, dtype):
    fused = posenc_ext.Embeddings(D, V, dtype=dtype)
    expected = (fused.lut.weight.float()[ids] * SCALE).to(dtype)
    assert torch.equal(fused(ids), expected)
    # A scale rounded to the type of the weight would be another factor: the test tells them apart.
    assert not torch.equal(fused.lut(ids) * torch.tensor(SCALE, dtype=dtype), expected)


def test_positional_encoding_equals_the_reference(x):
    twin, fused = reference.PositionalEncoding(D, 50), posenc_ext.PositionalEncoding(D, 50)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = fused(a), twin(b)
    torch.testing.assert_close(got, expected, atol=4e-6, rtol=0)
    weight = torch.randn_like(x)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_transformer_embedding_equals_the_reference(ids):
    fused = layer()
    twin = nn.Sequential(reference.Embeddings(D, V), reference.PositionalEncoding(D, 50))
    twin[0].lut.weight = nn.Parameter(fused.weight.detach().clone())
    got, expected = fused(ids), twin(ids)
    torch.testing.assert_close(got, expected, atol=4e-6, rtol=0)
    weight = torch.randn(B, T, D)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(fused.weight.grad, twin[0].lut.weight.grad, atol=1e-5, rtol=1e-6)


def test_transformer_embedding_is_its_two_halves_bit_for_bit(ids):
    fused = layer()
    embeddings = posenc_ext.Embeddings(D, V)
    embeddings.lut.weight = fused.weight
    assert torch.equal(fused(ids), posenc_ext.PositionalEncoding(D)(embeddings(ids)))


def test_learned_positions_equal_the_reference(x):
    twin, fused = reference.LearnedPositionalEmbedding(20, D), posenc_ext.LearnedPositionalEmbedding(20, D)
    fused.load_state_dict(twin.state_dict())
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert torch.equal(fused(a), twin(b))
    weight = torch.randn_like(x)
    (fused(a) * weight).sum().backward()
    (twin(b) * weight).sum().backward()
    assert torch.equal(a.grad, b.grad)
    torch.testing.assert_close(fused.weight.grad, twin.weight.grad)
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
    module = posenc_ext.PositionalEncoding(D, 50)
    assert torch.equal(module(x), x + module.pe[:, :T])


def test_pe_has_the_rows_asked_for():
    assert posenc_ext.PositionalEncoding(4).pe.shape == (1, 5000, 4)
    assert posenc_ext.PositionalEncoding(4, 9).pe.shape == (1, 9, 4)
    assert posenc_ext.PositionalEncoding(4, 9, batch_first=False).pe.shape == (9, 1, 4)


@pytest.mark.parametrize("length", [1, 5000, 5001, 200_000])
@pytest.mark.parametrize("max_len", [None, 4])
def test_max_len_never_limits(length, max_len):
    module = posenc_ext.PositionalEncoding(8, max_len)
    got = module(torch.zeros(1, length, 8))[0]
    rows = range(max(length - 50, 0), length)
    torch.testing.assert_close(got[rows.start :].double(), table32(rows, 8), atol=2e-7, rtol=0)
    embedded = posenc_ext.TransformerEmbedding(V, 8)
    nn.init.zeros_(embedded.weight)
    assert torch.equal(embedded(torch.zeros(1, length, dtype=torch.long))[0], got)


@pytest.mark.parametrize("name", sorted(posenc_ext.CONVENTIONS))
@pytest.mark.parametrize("d_model", [2, 3, 16, 17])
def test_every_convention_against_the_double_precision_table(name, d_model):
    convention = posenc_ext.CONVENTIONS[name]
    positions = np.arange(convention.first_position, convention.first_position + 40)
    expected = reference.sinusoid_table(
        positions,
        d_model,
        base=convention.base,
        divisor=convention.divisor,
        layout=convention.layout,
        odd=convention.odd,
    )
    module = posenc_ext.PositionalEncoding(d_model, 40, convention=name)
    # The fp32 angle of a reference table is off by half a unit of it: 40 * 2^-24 at most, twice for the frequency.
    atol = 6e-6 if module.precision == "reference" else 2.5e-7
    torch.testing.assert_close(module.pe[0].double(), torch.from_numpy(expected), atol=atol, rtol=0)
    assert torch.equal(module(torch.zeros(1, 40, d_model)), module.pe)
    exact = posenc_ext.PositionalEncoding(d_model, 40, convention=name, precision="exact")
    torch.testing.assert_close(exact.pe[0].double(), torch.from_numpy(expected), atol=2.5e-7, rtol=0)


# ---- sequence first --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"offset": 5}, {"positions": torch.arange(T) * 3}])
def test_sequence_first_is_the_transpose(ids, x, options):
    swapped = {k: v.unsqueeze(0).expand(B, T).t() if k == "positions" else v for k, v in options.items()}
    for module, other, value in (
        (layer(), layer(batch_first=False), ids),
        (posenc_ext.PositionalEncoding(D), posenc_ext.PositionalEncoding(D, batch_first=False), x),
        (learned(), learned(batch_first=False), x),
    ):
        expected = module(value, **options).transpose(0, 1)
        assert torch.equal(other(value.transpose(0, 1), **swapped), expected)
        # 1-D positions run along the sequence in either order.
        assert torch.equal(other(value.transpose(0, 1).contiguous(), **options), expected)


def learned(**options) -> posenc_ext.LearnedPositionalEmbedding:
    torch.manual_seed(4)
    return posenc_ext.LearnedPositionalEmbedding(40, D, **options)


@pytest.mark.parametrize("shape", [(), (T,), (2, B, T)])
def test_ids_of_any_rank(shape):
    values = torch.randint(V, shape)
    module = layer()
    got = module(values)
    assert got.shape == (*shape, D)
    rows = module.weight[values] * module.token_scale
    length = shape[-1] if shape else 1
    pe = posenc_ext.PositionalEncoding(D, length).pe[0]
    assert torch.equal(got, rows + (pe if shape else pe[0]))


# ---- where positions start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vaswani", "opennmt_tf", "fairseq"])
def test_the_running_index_starts_at_the_first_position_of_the_convention(name, x, ids):
    first = {"vaswani": 0, "opennmt_tf": 1, "fairseq": 2}[name]
    rows = functional.positional_encoding(torch.arange(first, first + T), D, convention=name)
    module = posenc_ext.PositionalEncoding(D, T, convention=name)
    assert torch.equal(module(x), x + rows)
    assert torch.equal(module.pe[0], rows)
    embedding = layer(convention=name)
    assert torch.equal(embedding(ids), embedding.weight[ids] * embedding.token_scale + rows)
    # Explicit positions are taken as they are.
    assert torch.equal(module(x, positions=torch.arange(first, first + T)), module(x))
    # An offset moves both.
    assert torch.equal(module(x, offset=4), module(x, positions=torch.arange(T), offset=first + 4))
    assert torch.equal(embedding(ids, offset=4), embedding(ids, positions=torch.arange(T), offset=first + 4))


@pytest.mark.parametrize("name", ["vaswani", "fairseq", "marian"])
@pytest.mark.parametrize("precision", [None, "exact"])
@pytest.mark.parametrize("placing", [{}, {"offset": 9}, {"positions": torch.tensor([4, -2, 7, 0, 1, 9, 9])}])
def test_the_functional_forms_are_the_modules(name, precision, placing, ids, x):
    options = {"convention": name, "precision": precision}
    module = layer(**options)
    got = functional.embed(ids, module.weight, **placing, **options)
    assert torch.equal(got, module(ids, **placing))
    rows = functional.scaled_embedding(ids, module.weight)
    assert torch.equal(functional.add_positional_encoding(rows, **placing, **options), got)
    assert torch.equal(
        functional.add_positional_encoding(x, **placing, **options),
        posenc_ext.PositionalEncoding(D, **options)(x, **placing),
    )
    pe = functional.positional_encoding(placing.get("positions", T), D, offset=placing.get("offset", 0), **options)
    assert torch.equal(rows + pe, got)


POSITION_FORMS = {
    "1d": lambda p: p,
    "row": lambda p: p.unsqueeze(0),
    "full": lambda p: p.expand(B, T).contiguous(),
    "expanded": lambda p: p.expand(B, T),
    "int32": lambda p: p.int(),
}


@pytest.mark.parametrize("form", POSITION_FORMS)
def test_offset_equals_explicit_positions(form, ids, x):
    positions = POSITION_FORMS[form](torch.arange(5, 5 + T))
    for module, value in ((layer(), ids), (posenc_ext.PositionalEncoding(D), x), (learned(), x)):
        assert torch.equal(module(value, positions=positions), module(value, offset=5))
        assert torch.equal(module(value, positions=positions, offset=2), module(value, offset=7))
        assert not torch.equal(module(value, offset=5), module(value))


def test_one_position_per_row_of_the_batch(ids):
    """[B, 1] positions: every row of a batch at its own place, as in decoding."""
    module = layer()
    step = ids[:, :1]
    starts = torch.tensor([[4], [0], [9]])
    expected = torch.cat([module(step[i : i + 1], offset=int(starts[i])) for i in range(B)])
    assert torch.equal(module(step, positions=starts), expected)


@pytest.mark.parametrize("convention", ["vaswani", "fairseq", "marian"])
def test_decoding_step_by_step_equals_the_full_pass(ids, x, convention):
    for module, value in (
        (layer(convention=convention), ids),
        (posenc_ext.PositionalEncoding(D, convention=convention), x),
        (learned(), x),
    ):
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


def test_positions_of_another_shape_are_refused(ids, x):
    wrong = torch.arange(T + 1)
    for module, value in ((layer(), ids), (posenc_ext.PositionalEncoding(D), x), (learned(), x)):
        with pytest.raises(ValueError, match=rf"positions must .*\[{T + 1}\]"):
            module(value, positions=wrong)


def test_x_of_another_width_is_refused(x):
    for module in (posenc_ext.PositionalEncoding(D + 1), posenc_ext.LearnedPositionalEmbedding(40, D + 1)):
        with pytest.raises(ValueError, match=f"width {D + 1}"):
            module(x)


# ---- learned positions end -------------------------------------------------------------------------------------------


def test_learned_positions_end_where_sinusoids_go_on():
    trained = posenc_ext.LearnedPositionalEmbedding(5, D)
    longer = torch.zeros(1, 6, D)
    with pytest.raises(IndexError, match=r"\[0, 5\).*got 0 to 5"):
        trained(longer)
    with pytest.raises(IndexError, match=r"\[0, 5\).*got 3 to 5"):
        trained(longer[:, :3], offset=3)
    with pytest.raises(IndexError, match=r"\[0, 5\).*got -1 to 0"):
        trained(longer[:, :2], offset=-1)
    assert trained(longer[:, :5]).shape == (1, 5, D)
    assert posenc_ext.PositionalEncoding(D, 5)(longer).shape == (1, 6, D)


@pytest.mark.parametrize("position", [-1, 5])
def test_learned_positions_refuse_explicit_ones_outside_by_name(position):
    trained = posenc_ext.LearnedPositionalEmbedding(5, D)
    with pytest.raises(IndexError, match=rf"LearnedPositionalEmbedding.*\[0, 5\).*{position}"):
        trained(torch.zeros(1, 2, D), positions=torch.tensor([0, position]))


# ---- dropout ---------------------------------------------------------------------------------------------------------

DROPPING = {
    "TransformerEmbedding": lambda p: layer(dropout=p),
    "PositionalEncoding": lambda p: posenc_ext.PositionalEncoding(D, dropout=p),
    "LearnedPositionalEmbedding": lambda p: learned(dropout=p),
}


@pytest.mark.parametrize("kind", DROPPING)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout(kind, p, ids, x):
    module = DROPPING[kind](p)
    value = ids if kind == "TransformerEmbedding" else x
    plain = module.eval()(value)
    assert torch.equal(plain, DROPPING[kind](0.0)(value))
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
    torch.testing.assert_close(module.weight.grad, expected)


# ---- the scale of tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_scale", [None, 1.0, 0.5, 3])
def test_token_scale(token_scale, ids):
    module = layer(token_scale=token_scale)
    scale = SCALE if token_scale is None else token_scale
    assert module.token_scale == scale
    pe = posenc_ext.PositionalEncoding(D, T).pe[0]
    assert torch.equal(module(ids), module.weight[ids] * scale + pe)
    module(ids).sum().backward()
    counts = torch.bincount(ids.flatten(), minlength=V).unsqueeze(1)
    torch.testing.assert_close(module.weight.grad, (counts * scale).expand(V, D).float(), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_layers_are_rounded_once(dtype, ids):
    module = layer(dtype=dtype)
    pe = posenc_ext.PositionalEncoding(D, T).pe[0]
    assert torch.equal(module(ids), (module.weight.float()[ids] * SCALE + pe).to(dtype))


# ---- tools that look at the weight -----------------------------------------------------------------------------------


def test_the_weight_and_the_scale_explain_the_output(ids):
    """Tools that call `F.embedding` on the weight find the scale as a public attribute."""
    embeddings, whole = posenc_ext.Embeddings(D, V), layer()
    assert isinstance(embeddings.lut, nn.Embedding)
    # Not embeddings themselves: their forward is more than a lookup.
    assert not isinstance(embeddings, nn.Embedding)
    assert not isinstance(whole, nn.Embedding)
    assert torch.equal(F.embedding(ids, embeddings.lut.weight) * embeddings.token_scale, embeddings(ids))
    pe = posenc_ext.PositionalEncoding(D, T).pe[0]
    assert torch.equal(F.embedding(ids, whole.weight) * whole.token_scale + pe, whole(ids))


def test_embeddings_follow_their_lut(ids):
    """Replacing or resizing the inner table is common practice."""
    module = posenc_ext.Embeddings(D, V)
    module.lut = nn.Embedding.from_pretrained(torch.randn(V + 5, D), freeze=True, padding_idx=2)
    assert torch.equal(module(ids + 5), module.lut(ids + 5) * SCALE)
    assert not module(ids).requires_grad


def test_forward_changes_nothing_in_the_module(ids, x):
    for module, value in (
        (layer(dropout=0.1), ids),
        (posenc_ext.Embeddings(D, V), ids),
        (posenc_ext.PositionalEncoding(D), x),
        (learned(), x),
    ):
        before = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        state = copy.deepcopy(module.state_dict())
        original = value.clone()
        module(value)
        assert {k: v for k, v in vars(module).items() if not k.startswith("_")} == before
        assert all(torch.equal(module.state_dict()[k], v) for k, v in state.items())
        assert torch.equal(value, original)


def test_the_result_is_never_an_input(ids, x):
    whole = layer()
    nn.init.ones_(whole.weight)
    one = posenc_ext.TransformerEmbedding(1, D, token_scale=1.0)  # the one row is the whole of its weight
    for got, given in (
        (whole(ids), (ids, whole.weight)),
        (one(torch.zeros(1, dtype=torch.long)), (one.weight,)),
        (functional.scaled_embedding(torch.zeros(1, dtype=torch.long), one.weight, token_scale=1.0), (one.weight,)),
        (posenc_ext.PositionalEncoding(D)(x), (x,)),
        (learned()(x), (x,)),
    ):
        assert got.data_ptr() not in [t.data_ptr() for t in given]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            posenc_ext.PositionalEncoding(D, 9, convention="marian", dropout=0.1),
            ["8", "max_len=9", "'marian'", "'exact'"],
        ),
        (posenc_ext.TransformerEmbedding(V, D, padding_idx=-1), ["11, 8", "'vaswani'", "padding_idx=10", "2.82843"]),
        (posenc_ext.LearnedPositionalEmbedding(9, D), ["9, 8"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repr_tells_the_recipe(module, words):
    assert all(word in repr(module) for word in words)


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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layer(padding_idx=V), rf"padding_idx must lie in \[-{V}, {V}\), got {V}"),
        (lambda: posenc_ext.Embeddings(D, V, padding_idx=-V - 1), rf"padding_idx must lie in .* got -{V + 1}"),
        (lambda: layer(max_norm=0.0), "max_norm must be positive, got 0.0"),
        (lambda: posenc_ext.Embeddings(D, V, max_norm=-1.0), "max_norm must be positive, got -1.0"),
        (lambda: layer(max_norm=math.nan), "max_norm must be positive, got nan"),
        (lambda: layer(dropout=1.5), r"dropout must lie in \[0, 1\], got 1.5"),
        (lambda: posenc_ext.PositionalEncoding(D, dropout=-0.1), r"dropout must lie in \[0, 1\], got -0.1"),
        (lambda: learned(dropout=2), r"dropout must lie in \[0, 1\], got 2"),
        (lambda: layer(convention="nobody"), "convention must be .*'vaswani'.* got 'nobody'"),
        (lambda: posenc_ext.PositionalEncoding(D, convention="nobody"), "convention must be .* got 'nobody'"),
        (lambda: layer(precision="double"), "precision must be one of .* got 'double'"),
        (lambda: posenc_ext.PositionalEncoding(D, precision="half"), "precision must be one of .* got 'half'"),
        (lambda: posenc_ext.Convention(base=0.5), "base must be finite and at least 1, got 0.5"),
        (lambda: posenc_ext.Convention(layout="rows"), "layout must be one of .* got 'rows'"),
    ],
)
def test_options_are_checked_at_construction(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("d_model", [1, 2, 3])
@pytest.mark.parametrize("convention", sorted(posenc_ext.CONVENTIONS))
def test_tiny_widths(d_model, convention, ids):
    for module, value in (
        (posenc_ext.TransformerEmbedding(V, d_model, convention=convention), ids),
        (posenc_ext.PositionalEncoding(d_model, convention=convention), torch.zeros(B, T, d_model)),
    ):
        got = module(value)
        assert got.shape == (B, T, d_model)
        assert got.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, T), (B, 0)])
def test_empty_input(shape):
    for module, value in (
        (layer(), torch.empty(shape, dtype=torch.long)),
        (posenc_ext.Embeddings(D, V), torch.empty(shape, dtype=torch.long)),
        (posenc_ext.PositionalEncoding(D), torch.empty(*shape, D)),
        (learned(), torch.empty(*shape, D)),
    ):
        assert module(value).shape == (*shape, D)
    whole = layer()
    whole(torch.empty(shape, dtype=torch.long)).sum().backward()
    assert torch.equal(whole.weight.grad, torch.zeros(V, D))


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
    torch.manual_seed(6)
    expected = nn.Embedding(V, D, **flags)
    torch.manual_seed(6)
    if kind == "Embeddings":
        module = posenc_ext.Embeddings(D, V, **flags)
        return module, module.lut.weight, expected
    module = posenc_ext.TransformerEmbedding(V, D, **flags)
    return module, module.weight, expected


@pytest.mark.parametrize("kind", ["Embeddings", "TransformerEmbedding"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_flags_act_as_in_nn_embedding(kind, flags, ids):
    module, weight, embedding = with_flags(kind, flags)
    untouched = weight.detach().clone()
    got, expected = module(ids), embedding(ids) * SCALE
    if kind == "TransformerEmbedding":
        expected = expected + posenc_ext.PositionalEncoding(D, T).pe
    assert torch.equal(got, expected)
    assert torch.equal(weight, embedding.weight)
    assert ("max_norm" in flags) == (not torch.equal(weight, untouched))
    factor = torch.randn(B, T, D)
    (got * factor).sum().backward()
    (expected * factor).sum().backward()
    assert weight.grad.layout == embedding.weight.grad.layout
    assert weight.grad.is_sparse == flags.get("sparse", False)
    torch.testing.assert_close(weight.grad.to_dense(), embedding.weight.grad.to_dense(), atol=1e-5, rtol=1e-6)
    if (padding := flags.get("padding_idx")) is not None:
        assert weight.grad.to_dense()[padding].count_nonzero() == 0


def test_sparse_with_frequency_scaling_divides_too(ids):
    """nn.Embedding refuses the pair; here the counts are known."""
    dense, sparse = layer(scale_grad_by_freq=True), layer(scale_grad_by_freq=True, sparse=True)
    for module in (dense, sparse):
        module(ids).sum().backward()
    assert sparse.weight.grad.is_sparse
    assert torch.equal(sparse.weight.grad.to_dense(), dense.weight.grad)
    used = torch.bincount(ids.flatten(), minlength=V).gt(0).float().unsqueeze(1)
    torch.testing.assert_close(dense.weight.grad, (used * SCALE).expand(V, D))


def test_sparse_gradient_is_coalesced(ids):
    module = layer(sparse=True)
    (gradient,) = torch.autograd.grad(module(ids).sum(), module.weight)
    assert gradient.is_coalesced()
    rows = gradient.indices()[0]
    assert torch.equal(rows, ids.unique())


def test_sparse_gradient_stays_coalesced_when_it_is_stored(ids):
    module = layer(sparse=True)
    module(ids).sum().backward()
    stored = module.weight.grad
    assert stored.is_coalesced()
    assert torch.equal(stored.indices()[0], ids.unique())


@pytest.mark.parametrize("how", ["two backward passes", "two uses"])
def test_sums_of_sparse_gradients_are_not_called_coalesced_if_they_are_not(ids, how):
    module, dense = layer(sparse=True), layer()
    for part in (module, dense):
        if how == "two uses":
            (part(ids).sum() + part(ids.flip(0)).sum()).backward()
        else:
            part(ids).sum().backward()
            part(ids).sum().backward()
    stored = module.weight.grad
    rows = stored._indices()[0]
    assert not stored.is_coalesced() or torch.equal(rows, rows.unique())
    assert torch.equal(stored.coalesce().to_dense(), dense.weight.grad)


@pytest.mark.parametrize("kind", ["Embeddings", "TransformerEmbedding"])
def test_sparse_batch_of_only_padding(kind):
    module, weight, _ = with_flags(kind, {"sparse": True, "padding_idx": 4})
    before = weight.detach().clone()
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    module(torch.full((2, 3), 4)).sum().backward()
    assert weight.grad._nnz() == 0
    optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("kind", ["Embeddings", "TransformerEmbedding"])
def test_sparse_adam_trains(kind, ids):
    module, weight, embedding = with_flags(kind, {"sparse": True})
    optimizers = [torch.optim.SparseAdam([w], lr=0.1) for w in (weight, embedding.weight)]
    pe = posenc_ext.PositionalEncoding(D, T).pe if kind == "TransformerEmbedding" else 0
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


@pytest.mark.parametrize("kind", ["Embeddings", "TransformerEmbedding"])
def test_max_norm_tells_autograd_about_its_edit(kind, ids):
    module, weight, embedding = with_flags(kind, {"max_norm": 1.0})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after_max_norm(embedding, embedding.weight, ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after_max_norm(module, weight, ids)


@pytest.mark.parametrize("bad", [V, -1])
@pytest.mark.parametrize("kind", ["Embeddings", "TransformerEmbedding"])
def test_bad_ids_leave_the_weight_alone_under_max_norm(kind, bad):
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
    module.weight.requires_grad_(False)
    assert not module(ids).requires_grad


# ---- fuse ------------------------------------------------------------------------------------------------------------


def pair(kind: str, dropout: float | None = None, **flags) -> nn.Sequential:
    torch.manual_seed(7)
    if kind == "reference":
        parts: list[nn.Module] = [reference.Embeddings(D, V), reference.PositionalEncoding(D, 50)]
    elif kind == "mixed":
        parts = [reference.Embeddings(D, V), posenc_ext.PositionalEncoding(D)]
    else:
        parts = [posenc_ext.Embeddings(D, V, **flags), posenc_ext.PositionalEncoding(D)]
    return nn.Sequential(*parts, *([] if dropout is None else [nn.Dropout(dropout)]))


KINDS = ["fused", "reference", "mixed"]


def close_to(kind: str, got: Tensor, expected: Tensor) -> bool:
    # The textbook table may be off in the last bit of a frequency; between fused modules nothing may differ.
    return torch.allclose(got, expected, atol=4e-6, rtol=0) if kind == "reference" else torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [None, 0.0, 0.4])
def test_fuse(kind, dropout, ids):
    module = pair(kind, dropout)
    fused = posenc_ext.fuse(module)
    assert type(fused) is posenc_ext.TransformerEmbedding
    assert fused.weight is module[0].lut.weight
    assert not fused.weight.is_meta
    assert fused.dropout == (dropout or 0.0)
    assert fused.training
    torch.manual_seed(8)
    expected = module(ids)
    torch.manual_seed(8)
    assert close_to(kind, fused(ids), expected)
    assert close_to(kind, posenc_ext.fuse(module.eval())(ids), module(ids))  # the mode goes over too


def test_fuse_takes_the_recipe_over(ids):
    module = nn.Sequential(
        posenc_ext.Embeddings(D, V),
        posenc_ext.PositionalEncoding(D, convention="fairseq", precision="exact", dropout=0.3, batch_first=False),
    )
    fused = posenc_ext.fuse(module)
    assert (fused.convention.name, fused.precision, fused.dropout, fused.batch_first) == (
        "fairseq",
        "exact",
        0.3,
        False,
    )
    assert torch.equal(fused.eval()(ids), module.eval()(ids))


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_fuse_takes_the_flags_over(flags, ids):
    module, twin = pair("fused", **flags), pair("fused", **flags)
    fused = posenc_ext.fuse(module)
    assert torch.equal(fused(ids), twin(ids))
    assert torch.equal(fused.weight, twin[0].lut.weight)
    fused(ids).square().sum().backward()
    twin(ids).square().sum().backward()
    torch.testing.assert_close(fused.weight.grad.to_dense(), twin[0].lut.weight.grad.to_dense(), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_fuse_inside_a_model(kind, ids):
    """Encoder and decoder inputs of a larger model, one deep inside, and an output layer tied to the table."""
    model = nn.ModuleDict(
        {"source": pair(kind), "decoder": nn.ModuleList([nn.ModuleDict({"target": pair(kind, 0.1)})])}
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
    assert model["output"].weight is model["source"].weight


def test_tied_output_layer_trains_as_before_fusing(ids):
    def model() -> nn.ModuleDict:
        result = nn.ModuleDict({"input": pair("reference"), "output": nn.Linear(D, V, bias=False)})
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
    module = pair("fused")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fused = posenc_ext.fuse(module)
    before = fused.weight.detach().clone()
    fused(ids).sum().backward()
    optimizer.step()
    assert not torch.equal(fused.weight, before)


def test_fuse_keeps_a_frozen_table_frozen():
    module = pair("fused")
    module.requires_grad_(False)
    assert not posenc_ext.fuse(module).weight.requires_grad


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
    "already fused": lambda: posenc_ext.TransformerEmbedding(V, D),
    "other order": lambda: nn.Sequential(posenc_ext.PositionalEncoding(D), posenc_ext.Embeddings(D, V)),
    "learned positions": lambda: nn.Sequential(
        posenc_ext.Embeddings(D, V), posenc_ext.LearnedPositionalEmbedding(50, D)
    ),
    "bare lookup": lambda: nn.Sequential(nn.Embedding(V, D), posenc_ext.PositionalEncoding(D)),
    "norm after": lambda: nn.Sequential(*pair("fused"), nn.LayerNorm(D)),
    "dropout by channel": lambda: nn.Sequential(*pair("fused"), nn.Dropout1d(0.1)),
    "more after": lambda: nn.Sequential(*pair("fused", 0.1), nn.Identity()),
    "subclass of embeddings": lambda: nn.Sequential(Louder(D, V), posenc_ext.PositionalEncoding(D)),
    "subclass of encoding": lambda: nn.Sequential(posenc_ext.Embeddings(D, V), Quieter(D)),
    "two dropouts": lambda: nn.Sequential(
        posenc_ext.Embeddings(D, V), posenc_ext.PositionalEncoding(D, dropout=0.1), nn.Dropout(0.1)
    ),
    "two widths": lambda: nn.Sequential(posenc_ext.Embeddings(D, V), posenc_ext.PositionalEncoding(D + 2)),
    "another kind of lookup": lambda: edited(pair("reference"), lambda m: setattr(m[0], "lut", Counting(V, D))),
    "an edited table": lambda: edited(pair("reference"), lambda m: m[1].pe.mul_(0.5)),
    "hook on the embeddings": lambda: edited(pair("fused"), lambda m: m[0].register_forward_hook(lambda *a: a[2] * 2)),
    "hook on the encoding": lambda: edited(
        pair("fused"), lambda m: m[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    ),
    "hook on the whole": lambda: edited(pair("fused"), lambda m: m.register_forward_hook(lambda *a: a[2] * 2)),
}


@pytest.mark.parametrize("case", NOT_FUSIBLE)
def test_fuse_refuses_what_computes_something_else(case):
    module = NOT_FUSIBLE[case]()
    with pytest.raises(ValueError, match=rf"posenc_ext\.fuse: module must .* got {type(module).__name__}"):
        posenc_ext.fuse(module)
    # Inside a model it is left as it is.
    model = nn.Sequential(nn.Sequential(pair("fused"), nn.Identity()), module)
    assert posenc_ext.fuse(model)[1] is module


def test_fuse_keeps_a_scale_that_was_changed(ids):
    """token_scale is a public attribute; models without the factor set it to 1."""
    module = pair("fused")
    module[0].token_scale = 1.0
    assert torch.equal(posenc_ext.fuse(module)(ids), module(ids))


def test_fuse_keeps_sharing_a_layer_used_twice(ids):
    """Encoder and decoder that share one input layer still share one after fusing."""
    shared = pair("fused")
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"embed": shared}), "decoder": nn.ModuleDict({"embed": shared})})
    model["again"] = shared
    expected = shared(ids)
    posenc_ext.fuse(model)
    layers = [model["encoder"]["embed"], model["decoder"]["embed"], model["again"]]
    assert [type(m) for m in layers] == [posenc_ext.TransformerEmbedding] * 3
    assert all(a is b for a, b in itertools.pairwise(layers))
    assert torch.equal(layers[0](ids), expected)


def test_fused_layer_loads_the_checkpoint_of_what_it_replaced(ids):
    model = nn.ModuleDict({"embed": pair("reference", 0.1)}).eval()
    checkpoint = copy.deepcopy(model.state_dict())
    expected = model["embed"](ids)
    posenc_ext.fuse(model)
    nn.init.zeros_(model["embed"].weight)
    assert model.load_state_dict(checkpoint, strict=True).missing_keys == []
    torch.testing.assert_close(model["embed"](ids), expected, atol=4e-6, rtol=0)
