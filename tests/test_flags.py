"""Specs as numbers: those that programs of 0.1 hold, what is refused, and the ops that take them."""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
from pathlib import Path
from typing import Any

import make
import pytest
import torch
from helpers import as_array, assert_refused, assert_same_bits
from make import D, V
from torch import Tensor

from posenc_ext import _C, CONVENTIONS, Convention
from posenc_ext.conventions import DIVISORS, LAYOUTS, ODD_RULES, PRECISIONS
from posenc_ext.functional import embed, positional_encoding
from posenc_ext.ops import embed as embed_op
from posenc_ext.ops.call import EmbedCall

ops = torch.ops.posenc_ext

IDS, WEIGHT = make.ids((2, 3), seed=1), make.table(width=7, seed=1)

# ---- the numbers of 0.1 ----------------------------------------------------------------------------------------------

# They had two bits a field, sequence-first at bit 8, and the fourth layout for no encoding. Names are written out:
# what was added later has no such number.
FIELDS_OF_0_1 = {
    "divisor": ("d", "half_minus_1"),
    "layout": ("interleaved", "sin_cos", "cos_sin"),
    "odd": ("sine", "zero", "round_up"),
    "precision": ("exact", "reference"),
}
NONE_OF_0_1 = 3 << 2


def flags_of_0_1(convention: Convention, precision: str, batch_first: bool) -> int:
    chosen = dataclasses.replace(convention, precision=precision)
    codes = [names.index(getattr(chosen, field)) for field, names in FIELDS_OF_0_1.items()]
    return sum(code << 2 * place for place, code in enumerate(codes)) | (0 if batch_first else 1 << 8)


def all_results(base: float, flags: int) -> list[Tensor]:
    """What each op makes of a spec, at an odd width, where every field of it shows."""
    rows = WEIGHT[IDS]
    results = [
        ops.embed(WEIGHT, IDS, None, 5, 1.5, base, flags),
        ops.add_positional_encoding(rows, None, 5, base, flags),
        ops.positional_encoding(IDS, 7, 5, base, flags, torch.float32),
        torch.empty_like(rows),
        torch.empty_like(rows),
    ]
    ops.embed_out(WEIGHT, IDS, None, 5, 1.5, base, flags, results[3])
    ops.add_positional_encoding_out(rows, None, 5, base, flags, results[4])
    return results


@make.each("convention", {c.name: c for c in (*make.every_combination(), *CONVENTIONS.values())})
def test_numbers_of_0_1_mean_what_they_meant(convention):
    if any(getattr(convention, field) not in names for field, names in FIELDS_OF_0_1.items()):
        pytest.skip("0.1 did not know it")
    for precision, batch_first in itertools.product(PRECISIONS, (True, False)):
        base, flags = make.spec(convention, precision, batch_first)
        old = flags_of_0_1(convention, precision, batch_first)
        assert flags & make.VERSION
        assert old < make.VERSION
        for got, want in zip(all_results(base, old), all_results(base, flags), strict=True):
            assert_same_bits(got, want, f"{precision}, batch_first={batch_first}")


def test_no_encoding_by_its_old_and_its_new_number():
    base, flags = make.NONE
    want = WEIGHT[IDS] * 1.5
    for number in (flags, NONE_OF_0_1, NONE_OF_0_1 | 1 << 8 | 1):  # the other fields say nothing then
        assert_same_bits(ops.embed(WEIGHT, IDS, None, 5, 1.5, base, number), want, f"{number}")


def test_specs_differ():
    """No two of them share a number."""
    numbers = [
        make.spec(convention, precision, batch_first)
        for convention in make.every_combination()
        for precision in PRECISIONS
        for batch_first in (True, False)
    ]
    assert len({*numbers, make.NONE}) == len(numbers) + 1


# With 0.1 and torch 2.13, of a module that holds two tables, `even` [11, 6] and `odd` [11, 7], and returns for each
#
#     found = [scaled_embedding(ids, weight)]
#     for name, precision, batch_first in product(CONVENTIONS, (None, "exact"), (True, False)):
#         options = {"convention": name, "precision": precision, "batch_first": batch_first, "offset": 5}
#         found += [embed(ids, weight, **options), add_positional_encoding(weight[ids], **options)]
#     torch.stack(found)
#
# the program of torch.export.save(torch.export.export(module, (ids,))), put through gzip, and its outputs.
def test_a_program_exported_by_0_1():
    """It runs, with the same bits, and can still be trained."""
    pytest.importorskip("torch", minversion="2.13")  # an older one need not read what a newer one saved
    data = Path(__file__).with_name("data")
    with gzip.open(data / "program_of_0.1.pt2.gz") as file:
        module = torch.export.load(io.BytesIO(file.read())).module()
    given = torch.tensor([[1, 10, 1], [0, 4, 7]])
    results = module(given)
    for got, want in zip(results, torch.load(data / "outputs_of_0.1.pt"), strict=True):
        assert_same_bits(got, want)
    # The gradients of embed, and of the rows that were added to, written out.
    probes = [make.x(tuple(result.shape)) for result in results]
    torch.autograd.backward(results, probes)
    for parameter, probe in zip(module.parameters(), probes, strict=True):
        scale = parameter.shape[1] ** 0.5
        per_token = probe[0] * scale + (probe[1::2] * scale + probe[2::2]).sum(0)
        want = torch.zeros_like(parameter).index_add(0, given.flatten(), per_token.flatten(0, 1))
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-4)


# ---- what no number means --------------------------------------------------------------------------------------------

FIELDS = {"divisor": DIVISORS, "layout": LAYOUTS, "odd": ODD_RULES, "precision": PRECISIONS}
KNOWN_BITS = 0xFFFF | 1 << 16 | 1 << 17 | 1 << 18 | make.VERSION

UNKNOWN = {
    # New numbers: four bits a field.
    **{
        f"new {name}": [make.VERSION | code << 4 * place for code in range(16) if code not in codes.values()]
        for place, (name, codes) in enumerate(FIELDS.items())
    },
    "new bits": [make.VERSION | 1 << bit for bit in range(63) if not KNOWN_BITS >> bit & 1],
    "new, without an encoding": [make.NONE[1] | make.VERSION | 15],
    # Numbers of 0.1: two bits a field, nine bits in all. What came later has no such number.
    "old divisor": [2, 3],
    "old odd rule": [3 << 4],
    "old precision": [2 << 6, 3 << 6],
    "old bits": [1 << bit for bit in range(9, 63) if bit != 20],
    "negative": [-1, make.VERSION - 2**63],
}


@make.each("numbers", UNKNOWN)
def test_unknown_flags_are_refused(numbers):
    """By every op, whichever the field: a program of a later version must not run with another encoding."""
    rows, base = WEIGHT[IDS], 10000.0
    for flags in numbers:
        for op, call in {
            "embed": lambda f=flags: ops.embed(WEIGHT, IDS, None, 0, 1.0, base, f),
            "add_positional_encoding": lambda f=flags: ops.add_positional_encoding(rows, None, 0, base, f),
            "positional_encoding": lambda f=flags: ops.positional_encoding(IDS, 7, 0, base, f, torch.float32),
            "embed_general": lambda f=flags: ops.embed_general(WEIGHT, IDS, flags=f),
            "add_general": lambda f=flags: ops.add_general(rows, flags=f),
        }.items():
            assert_refused(call, f"posenc_ext::{op}: flags must be those of a Convention, got ", flags)


# ---- embed_general ---------------------------------------------------------------------------------------------------


def gradients_of(results: list[Tensor], weight: Tensor) -> list[Tensor]:
    """For one gradient of the output."""
    probe = torch.randn(results[0].shape).to(weight.dtype)
    return [torch.autograd.grad(result, weight, probe)[0] for result in results]


@make.each_dtype
def test_embed_general_is_embed(dtype):
    """For the arguments that both have: the bits of the output and of the gradient."""
    for sample in make.samples("cpu", dtype, requires_grad=True):
        calls = make.op_calls(sample)
        results = [calls["embed_general"](), calls["embed"]()]
        assert_same_bits(*results, sample.name)
        assert_same_bits(*gradients_of(results, sample.weight), sample.name)


# Keywords as a caller may write them: any order, any of them left out.
KEYWORDS: dict[str, Any] = {
    "positions": IDS * 3 - 1,
    "scale_grad_by_freq": True,
    "token_scale": 2.5,
    "padding_idx": int(IDS[0, 0]),
    "offset": 4,
}


# In the order of `embed`, which has the spec after the first three.
DEFAULTS = dict(positions=None, offset=0, token_scale=1.0, padding_idx=-1, scale_grad_by_freq=False, sparse=False)


@make.each("count", range(len(KEYWORDS) + 1))
@make.dense_and_sparse
def test_arguments_reach_autograd_by_name(count, sparse):
    """In any order, with the others left out; without any, the spec is that of the paper."""
    weight = WEIGHT.clone().requires_grad_()
    for names in itertools.islice(itertools.permutations(KEYWORDS, count), 12):
        given = {name: KEYWORDS[name] for name in names} | ({"sparse": True} if sparse else {})
        ordered = [*(DEFAULTS | given).values()]
        want = ops.embed(weight, IDS, *ordered[:3], *make.spec(), *ordered[3:])
        results = [ops.embed_general(weight, IDS, **given), want]
        assert_same_bits(*results, f"{names}")
        gradients = gradients_of(results, weight)
        assert gradients[0].is_sparse == sparse
        parts = [(g._indices(), g._values()) if sparse else (g,) for g in gradients]
        for mine, other in zip(*parts, strict=True):
            assert_same_bits(mine, other, f"{names}")


@make.each("names", {", ".join(n) or "none": n for n in (tuple(KEYWORDS), tuple(KEYWORDS)[::-1], ("padding_idx",), ())})
def test_compiled_gradients_of_embed_general(names):
    """The traced formula finds its arguments by name as well: a default left out must not move the others."""
    given = {name: KEYWORDS[name] for name in names}
    weight = WEIGHT.clone().requires_grad_()

    def function(w: Tensor) -> Tensor:
        return ops.embed_general(w, IDS, **given) * 2

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = [compiled(weight), function(weight)]
    assert_same_bits(*results)
    gradients = gradients_of(results, weight)
    assert_same_bits(*gradients)
    assert gradients[0].count_nonzero() > 0


# What it cannot do yet, or cannot do alone.
NOT_YET: dict[str, Any] = {
    "position_table": torch.zeros(9, 7),
    "at_padding": 1,  # without a padding_idx
    "dropout_p": 0.1,  # without a seed
    "seed": torch.tensor(3),  # without a probability
}


@make.each("name", NOT_YET.keys())
@make.each("grad", {"no gradient": False, "gradient": True})
def test_embed_general_refuses_by_name_what_it_cannot_do(name, grad):
    weight = WEIGHT.clone().requires_grad_(grad)
    with pytest.raises((ValueError, NotImplementedError), match=rf"posenc_ext::embed_general: .*\b{name}\b"):
        ops.embed_general(weight, IDS, **{name: NOT_YET[name]})
    with pytest.raises(Exception, match=rf"embed_general: .*\b{name}\b"):
        torch.compile(lambda w: ops.embed_general(w, IDS, **{name: NOT_YET[name]}), backend="aot_eager")(weight)


def test_embed_general_takes_the_neutral_value_of_what_it_cannot_do():
    neutral = {name: None if isinstance(value, Tensor) else type(value)(0) for name, value in NOT_YET.items()}
    assert_same_bits(ops.embed_general(WEIGHT, IDS, **neutral), ops.embed_general(WEIGHT, IDS))


def test_embed_general_checks_what_embed_checks():
    for call, words in (
        (lambda: ops.embed_general(WEIGHT[0], IDS), ("weight must have 2 dimensions",)),
        (lambda: ops.embed_general(WEIGHT, IDS.float()), ("input must have dtype int64 or int32",)),
        (lambda: ops.embed_general(WEIGHT, IDS, positions=IDS[0]), ("positions must have the shape of the tokens",)),
        (lambda: ops.embed_general(WEIGHT, IDS, offset=2**63 - 1), ("offset", "exceeds the int64 range")),
        (lambda: ops.embed_general(WEIGHT, IDS, base=0.5), ("base must be finite and at least 1, got ",)),
    ):
        assert_refused(call, "posenc_ext::embed_general: ", *words)
    assert_refused(lambda: ops.embed_general(WEIGHT, IDS + V), "posenc_ext::embed_general: ", "got", error=IndexError)


# ---- the raw kernel of the introspection module ----------------------------------------------------------------------


def embed_raw(weight: Tensor, ids: Tensor, offset: int, scale: float, spec: tuple[float, int]) -> Tensor:
    out = weight.new_empty(*ids.shape, weight.shape[1])
    _C.embed_raw(*map(as_array, (weight, ids, out)), offset, scale, *spec)
    return out


@make.each("convention", make.every_combination())
def test_embed_raw_honours_every_field(convention):
    """Odd rules among them: at an odd width round_up has other frequencies in every column."""
    for width, dtype in itertools.product((D, 5, 7), make.DTYPES):
        weight, ids = make.table(width=width, dtype=dtype), make.ids((2, 9))
        for precision in PRECISIONS:
            got = embed_raw(weight, ids, 3, 1.5, make.spec(convention, precision))
            options = {"offset": 3, "token_scale": 1.5, "convention": convention, "precision": precision}
            assert_same_bits(got, embed(ids, weight, **options), f"width {width}, {dtype}, {precision}")
    assert_same_bits(embed_raw(weight, ids, 3, 1.5, make.NONE), (weight[ids].float() * 1.5).half())


def test_round_up_differs_at_odd_widths():
    """So that the test above means something."""
    narrow, up = (positional_encoding(5, 5, convention=name) for name in ("vaswani", "positional_encodings"))
    assert (narrow - up)[1:].abs().max() > 0.01


def test_a_call_with_general_arguments_goes_to_embed_general():
    """What later arguments will travel by: with none of them, values and gradients are those of embed."""
    weight = make.table().requires_grad_()
    call = EmbedCall(weight, make.ids((2, 5)), None, 3, 1.5, *make.spec("tensor2tensor"), 1)
    general, plain = embed_op.run(call, {}), embed_op.run(call)
    assert torch.equal(general, plain)
    (expected,), (got,) = (torch.autograd.grad(y.square().sum(), weight) for y in (plain, general))
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="embed_general: frequencies must have shape"):
        embed_op.run(call, {"frequencies": torch.ones(D)})
