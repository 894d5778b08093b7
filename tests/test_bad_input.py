"""Bad input: the exception, its message (op, argument, requirement, value), and that nothing was written before."""

import dataclasses
import math
import re

import make
import numpy as np
import pytest
import torch
from helpers import assert_refused, assert_same_bits, run_code
from make import ids as batch
from make import table
from torch import nn

from posenc_ext import _C, CONVENTIONS, Convention
from posenc_ext.functional import add_positional_encoding as add
from posenc_ext.functional import angular_frequencies, embed, scaled_embedding
from posenc_ext.functional import positional_encoding as encode

ops = torch.ops.posenc_ext

V, TOP = make.V, 2**63 - 1
SPEC = make.spec()
RANGE = f"input must hold ids in [0, {V})"


def ids(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


GOOD, X = ids([0, 1, 2], [3, 4, 5]), torch.zeros(2, 3, 8)
meta = GOOD.to("meta")


def refused(table):
    """Rows of name -> (call, words of the ValueError it must end in)."""
    return make.each(("call", "words"), {name: (call, words) for name, (call, *words) in table.items()})


# ---- ids -------------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = {
    "first past the end": (ids([0, 1, 2], [3, 4, V]), f"got {V} at input[1, 2]"),
    "negative": (ids([0, -1, 2], [3, 4, 5]), "got -1 at input[0, 1]"),
    "largest": (ids([TOP, 1, 2], [3, 4, 5]), f"got {TOP} at input[0, 0]"),
    "smallest": (ids([0, 1, 2], [-TOP - 1, 4, 5]), f"got {-TOP - 1} at input[1, 0]"),
    "the first of two": (ids([0, 12, 2], [13, 4, 5]), "got 12 at input[0, 1]"),
    "low word in range": (ids([0, 2**32, 2], [3, 4, 5]), f"got {2**32} at input[0, 1]"),
    "int32": (ids([0, 1, 2], [3, V, 5], dtype=torch.int32), f"got {V} at input[1, 1]"),
    "negative int32": (ids([0, 1, -7], [3, 4, 5], dtype=torch.int32), "got -7 at input[0, 2]"),
    "transposed": (ids([0, 1, 2], [3, V, 5]).t(), f"got {V} at input[1, 1]"),
    "expanded": (ids([V]).expand(2, 3), f"got {V} at input[0, 0]"),
    "one token": (torch.tensor(V), f"got {V} at input["),
}

# Every way from ids to rows.
PATHS = {
    "embed": embed,
    "with padding_idx": lambda i, w: embed(i, w, padding_idx=3),
    "the id is not the padding": lambda i, w: embed(i, w, padding_idx=-1),
    "no encoding": scaled_embedding,
    "positions": lambda i, w: embed(i, w, positions=torch.zeros_like(i)),
    "sequence first": lambda i, w: embed(i, w, batch_first=False),
    "needs a gradient": lambda i, w: embed(i, w.requires_grad_()),
    "needs a sparse gradient": lambda i, w: embed(i, w.requires_grad_(), sparse=True),
    "max_norm": lambda i, w: embed(i, w, max_norm=0.1),
    "out": lambda i, w: embed(i, w, out=torch.empty(*i.shape, 8)),
    "op": lambda i, w: ops.embed(w, i, None, 0, 1.0, *SPEC),
    "op, no encoding": lambda i, w: ops.embed(w, i, None, 0, 1.0, *make.NONE),
}


@make.each("path", PATHS)
@make.each(("bad", "place"), OUT_OF_RANGE)
def test_ids_out_of_range(path, bad, place):
    weight = table()
    before = weight.clone()
    assert_refused(lambda: path(bad, weight), "posenc_ext::embed: ", RANGE, place, error=IndexError)
    assert_same_bits(weight, before, "weight")


@make.each_dtype
def test_an_id_far_into_a_batch(dtype):
    """Ids are looked through in blocks; the last one of a batch is as bad as the first."""
    for count in (1, 4095, 4096, 4097, 10_000):
        for id_type in (torch.int64, torch.int32):
            given = torch.zeros(count, dtype=id_type)
            given[-1] = V
            call = lambda g=given: embed(g, table(dtype=dtype))  # noqa: E731
            assert_refused(call, RANGE, f"got {V} at input[{count - 1}]", error=IndexError)
    no_rows = table(0, dtype=dtype)
    assert_refused(lambda: embed(GOOD, no_rows), "ids in [0, 0)", "got 0 at input[0, 0]", error=IndexError)


@make.each("op", ["embed_backward", "embed_backward_sparse"])
@make.each("bad", [ids(0, V), ids(-1, 3), ids(V, 0, dtype=torch.int32)])
def test_ids_out_of_range_backward(op, bad):
    for flags in ((-1, False), (0, True)):
        call = lambda f=flags: getattr(ops, op)(torch.ones(2, 8), bad, V, 1.0, *f)  # noqa: E731
        assert_refused(call, f"posenc_ext::{op}: {RANGE}, got ", error=IndexError)


@make.each("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16, torch.int8])
def test_ids_of_another_dtype(dtype):
    text = {torch.uint8: "Byte", torch.int16: "Short", torch.int8: "Char"}.get(dtype, str(dtype)[6:10].title())
    bad, weight = torch.ones(2, 3).to(dtype), table()
    before = weight.clone()
    embed_input = "posenc_ext::embed: input"
    for argument, call in (
        *((embed_input, lambda p=PATHS[path]: p(bad, weight)) for path in ("embed", "no encoding", "max_norm", "out")),
        (embed_input, lambda: embed(bad, table(grad=True))),
        ("posenc_ext::embed_backward: input", lambda: ops.embed_backward(torch.ones(2, 3, 8), bad, V, 1.0, -1, False)),
    ):
        assert_refused(call, argument, " must have dtype int64 or int32, got ", text)
    bad, text = (bad.half(), "Half") if bad.is_floating_point() else (bad, text)
    for argument, call in (
        ("posenc_ext::positional_encoding", lambda: encode(bad, 8)),
        ("posenc_ext::embed", lambda: embed(GOOD, weight, positions=bad)),
        ("posenc_ext::add_", lambda: add(X, positions=bad)),
    ):
        assert_refused(call, argument, ": positions must have dtype int64, int32, float32 or float64, got ", text)
    assert_same_bits(weight, before, "weight")


# ---- the other arguments ---------------------------------------------------------------------------------------------

TYPES = "float32, float64, bfloat16 or float16, got "
FOUR = "must have dtype " + TYPES
TWO_AXES = "weight must have 2 dimensions [vocab_size, d_model], got shape "
WIDTH = "the width (d_model) must be positive, got "
INT64 = ("offset", "exceeds the int64 range")
FITS = "positions must be broadcastable to the tokens [2, 3]"
BASE = "base must be finite and at least 1, got "
LAYOUT = "layout must be one of 'interleaved', 'sin_cos', 'cos_sin', got "
PRECISION = "precision must be one of 'exact', 'reference', got "
PADDING = "padding_idx must lie in [-11, 11), got "
NORM = "max_norm must be positive, got "
OUT, LINE = torch.empty(2, 3, 8, device="meta"), torch.arange(3)


def embed_good(**options):
    return lambda: embed(GOOD, table(), **options)


@refused(
    {
        "int64": (lambda: embed(GOOD, table().long()), "embed: weight ", FOUR, "Long"),
        "bool": (lambda: embed(GOOD, table().bool()), "embed: weight ", FOUR, "Bool"),
        "complex": (lambda: embed(GOOD, table().cfloat()), "embed: weight ", FOUR, "ComplexFloat"),
        "float8": (lambda: embed(GOOD, table().to(torch.float8_e5m2)), "embed: weight ", FOUR, "Float8_e5m2"),
        "no encoding": (lambda: scaled_embedding(GOOD, table().int()), "embed: weight ", FOUR, "Int"),
        "one axis": (lambda: embed(GOOD, table()[0]), TWO_AXES + "[8]"),
        "no axis": (lambda: embed(GOOD, torch.tensor(1.0)), TWO_AXES + "[]"),
        "three axes": (lambda: embed(GOOD, table()[None]), TWO_AXES + "[1, 11, 8]"),
        "one axis, no encoding": (lambda: scaled_embedding(GOOD, table()[0]), TWO_AXES + "[8]"),
        "one axis, op": (lambda: ops.embed(table()[0], GOOD, None, 0, 1.0, *SPEC), TWO_AXES + "[8]"),
        "no columns": (lambda: embed(GOOD, table(width=0)), "posenc_ext::embed: " + WIDTH + "0"),
        "no columns, no encoding": (lambda: scaled_embedding(GOOD, table(width=0)), WIDTH + "0"),
        "x int64": (lambda: add(X.long()), "add_positional_encoding: x ", FOUR, "Long"),
        "x complex": (lambda: add(X.cfloat()), "x ", FOUR, "ComplexFloat"),
        "x scalar": (lambda: add(torch.tensor(1.0)), "x must have at least 1 dimension", "got a scalar"),
        "x no columns": (lambda: add(X[..., :0]), WIDTH + "0"),
        "dtype of PE": (lambda: encode(3, 8, dtype=torch.int32), "positional_encoding: dtype must", TYPES + "Int"),
        # A tensor on the meta device stands for one on any other: it must not get memory that nobody has written.
        "device of ids": (lambda: embed(meta, table()), "input must be on the device of weight (cpu)"),
        "device of positions": (embed_good(positions=meta), "positions must be on the device of weight (cpu)"),
        "device of out": (embed_good(out=OUT), "out must be on the device of weight (cpu)"),
        "device of add": (lambda: add(X, positions=meta), "positions must be on the device of x (cpu)"),
        "device of PE": (lambda: encode(GOOD, 8, device="meta"), "device must be that of", "positions (cpu), got meta"),
        # Three positions for two steps of three sequences, sequence first.
        "wrong axis": (embed_good(positions=LINE, batch_first=False), FITS, "1-D along the sequence", "got shape [3]"),
        "offset": (embed_good(offset=TOP), f"posenc_ext::embed: offset {TOP} + length 3 exceeds the int64 range"),
        "offset, one short": (embed_good(offset=TOP - 1), f"offset {TOP - 1} + length 3 exceeds"),
        "offset, sequence first": (embed_good(offset=TOP, batch_first=False), f"offset {TOP} + length 2 exceeds"),
        "offset of add": (lambda: add(X, offset=TOP), "posenc_ext::add_positional_encoding: offset"),
        "first position": (embed_good(offset=TOP - 2, convention="fairseq"), *INT64),
        "past int64": (embed_good(offset=2**63), *INT64),
        "past int64, add": (lambda: add(X, offset=2**63), *INT64),
        "past int64, PE": (lambda: encode(3, 8, offset=2**63), *INT64),
        "below int64": (embed_good(offset=-(2**63) - 1), *INT64),
        "PE of a length": (lambda: encode(3, 8, offset=TOP), *INT64),
        "width 0": (lambda: encode(3, 0), "posenc_ext::positional_encoding: " + WIDTH + "0"),
        "width -1": (lambda: encode(GOOD, -1), WIDTH + "-1"),
        "frequencies": (lambda: angular_frequencies(0), "angular_frequencies: d_model must be positive, got 0"),
        "many frequencies": (lambda: angular_frequencies(2**40), f"d_model must be at most {2**24}, got {2**40}"),
        "length -1": (lambda: encode(-1, 8), "posenc_ext::positional_encoding: length must not be negative, got -1"),
        "base replaced": (lambda: dataclasses.replace(CONVENTIONS["xlm"], base=0.9), BASE + "0.9"),
        "divisor": (lambda: Convention(divisor="D"), "divisor must be one of 'd', 'half_minus_1', 'half', got 'D'"),
        "layout": (lambda: Convention(layout="sincos"), LAYOUT + "'sincos'"),
        "odd": (lambda: Convention(odd="cosine"), "odd must be one of 'sine', 'zero', 'round_up', got 'cosine'"),
        "precision of one": (lambda: Convention(precision="fast"), PRECISION + "'fast'"),
        "convention": (embed_good(convention="bert"), "convention must be", "'vaswani'", "'xlm'", "got 'bert'"),
        "convention of add": (lambda: add(X, convention=""), "convention must be", "got ''"),
        "convention of PE": (lambda: encode(3, 8, convention="bert"), "convention must be", "got 'bert'"),
        "precision": (embed_good(precision="fast"), PRECISION + "'fast'"),
        "precision of add": (lambda: add(X, precision=""), PRECISION + "''"),
        "precision of PE": (lambda: encode(3, 8, precision="fast"), PRECISION + "'fast'"),
        "precision of frequencies": (lambda: angular_frequencies(8, precision="fast"), PRECISION + "'fast'"),
        # The flags of nn.Embedding.
        "padding_idx == V": (embed_good(padding_idx=11), "embed: " + PADDING + "11"),
        "padding_idx < -V": (embed_good(padding_idx=-12), PADDING + "-12"),
        "padding_idx, no encoding": (lambda: scaled_embedding(GOOD, table(), padding_idx=99), PADDING + "99"),
        "padding_idx of the backward op": (
            lambda: ops.embed_backward(X, GOOD, V, 1.0, V, False),
            "posenc_ext::embed_backward: padding_idx must be below num_weights (11), got 11",
        ),
        "max_norm 0": (embed_good(max_norm=0.0), "embed: " + NORM + "0.0"),
        "max_norm -1": (embed_good(max_norm=-1.0), NORM + "-1.0"),
        "max_norm nan": (embed_good(max_norm=math.nan), NORM + "nan"),
        "max_norm, no encoding": (lambda: scaled_embedding(GOOD, table(), max_norm=0), NORM + "0"),
    }
)
def test_arguments(call, words):
    assert_refused(call, *words)


NO_TENSORS = {"list": [[0, 1]], "string": "ids", "array": np.zeros((2, 3)), "None": None, "module": nn.Linear(2, 3)}
# Each public function with one tensor of it replaced.
TENSORS = {
    "embed, input": lambda bad: embed(bad, table()),
    "embed, input of a trained table": lambda bad: embed(bad, table(grad=True)),
    "embed, input beside positions": lambda bad: embed(bad, table(), positions=GOOD),
    "embed, weight": lambda bad: embed(GOOD, bad),
    "embed, weight and its scale": lambda bad: embed(GOOD, bad, token_scale=1.0, padding_idx=0),
    "embed, weight to be scaled": lambda bad: embed(GOOD, bad, max_norm=1.0),
    "embed, positions": lambda bad: embed(GOOD, table(), positions=bad),
    "embed, out": lambda bad: embed(GOOD, table(), out=bad),
    "embed, input alone": lambda bad: scaled_embedding(bad, table()),
    "embed, weight alone": lambda bad: scaled_embedding(GOOD, bad),
    "embed, out alone": lambda bad: scaled_embedding(GOOD, table(), out=bad),
    "add_positional_encoding, x": lambda bad: add(bad),
    "add_positional_encoding, x beside positions": lambda bad: add(bad, positions=GOOD),
    "add_positional_encoding, x written to": lambda bad: add(bad, out=X),
    "add_positional_encoding, positions": lambda bad: add(X, positions=bad),
    "add_positional_encoding, out": lambda bad: add(X, out=bad),
    "positional_encoding, positions_or_length": lambda bad: encode(bad, 8),
    "positional_encoding, out": lambda bad: encode(GOOD, 8, out=bad),
    "positional_encoding, out for a length": lambda bad: encode(np.int64(3), 8, out=bad),
}


@make.each("bad", NO_TENSORS)
@pytest.mark.parametrize("case", TENSORS)
def test_what_is_no_tensor_is_named(case, bad):
    op, argument = case.split(", ")
    argument = argument.split()[0]
    if bad is None and argument in ("positions", "out"):
        return  # may be left out
    words = f"posenc_ext::{op}: {argument} must be a torch.Tensor", f", got {type(bad).__name__}"
    assert_refused(lambda: TENSORS[case](bad), *words, error=TypeError)


@pytest.mark.parametrize("case", [case for case in TENSORS if ", out" not in case])
def test_sparse_tensors_are_named(case):
    """A sparse matrix may look like a table, and has no rows in memory."""
    op, argument = case.split(", ")
    argument = argument.split()[0].removesuffix("_or_length")
    bad = {"weight": table(), "x": X}.get(argument, GOOD).to_sparse()
    words = f"posenc_ext::{op}: {argument} must be a dense tensor, got layout torch.sparse_coo"
    assert_refused(lambda: TENSORS[case](bad), words)


# ---- positions and offsets -------------------------------------------------------------------------------------------


@make.each("shape", [(4,), (2,), (0,), (3, 2), (2, 4), (1, 2, 3), (2, 3, 1)])
def test_positions_that_do_not_fit(shape):
    wrong = batch(shape)
    words = (FITS, f"got shape {list(shape)}")
    assert_refused(lambda: embed(GOOD, table(), positions=wrong), "posenc_ext::embed: ", *words)
    assert_refused(lambda: add(X, positions=wrong), "posenc_ext::add_positional_encoding: ", *words)
    words = ("positions must have the shape of the tokens [2, 3]", f"got {list(shape)}")
    assert_refused(lambda: ops.embed(table(), GOOD, wrong, 0, 1.0, *SPEC), *words)


def test_the_last_offsets_that_fit():
    assert embed(GOOD, table(), offset=TOP - 2).isfinite().all()
    assert embed(GOOD, table(), offset=-(2**63)).isfinite().all()
    assert embed(GOOD[:, :0], table(), offset=TOP).shape == (2, 0, 8)
    want = encode(torch.tensor([TOP - 2, TOP - 1, TOP]), 8)
    assert_same_bits(add(torch.zeros(3, 8), offset=TOP - 2), want, "add")


@pytest.mark.parametrize("base", [0.5, 0.0, -1.0, math.nan, math.inf, -math.inf])
def test_bases(base):
    assert_refused(lambda: Convention(base=base), f"Convention: {BASE}{base}")
    flags = SPEC[1]
    for op, call in {
        "embed": lambda: ops.embed(table(), GOOD, None, 0, 1.0, base, flags),
        "add_positional_encoding": lambda: ops.add_positional_encoding(X, None, 0, base, flags),
        "positional_encoding": lambda: ops.positional_encoding(GOOD, 8, 0, base, flags, torch.float32),
    }.items():
        assert_refused(call, f"posenc_ext::{op}: ", BASE)


# ---- nothing is written before all checks have passed ----------------------------------------------------------------

# Bad arguments of embed(GOOD, table(), max_norm=0.5, out=...), by name.
LATE = {
    "id": {"input": ids([0, 1, 2], [3, 4, V])},
    "dtype of ids": {"input": GOOD.float()},
    "shape of positions": {"positions": batch((2, 4))},
    "dtype of positions": {"positions": GOOD.half()},
    "offset": {"offset": TOP},
    "convention": {"convention": "bert"},
    "precision": {"precision": "fast"},
    "padding_idx": {"padding_idx": V},
    "shape of out": {"out": torch.full((2, 3, 9), 7.0)},
    "dtype of out": {"out": torch.full((2, 3, 8), 7.0, dtype=torch.float64)},
    "out that overlaps itself": {"out": torch.full((1, 3, 8), 7.0).expand(2, 3, 8)},
    "max_norm": {"max_norm": -1.0},
}


@make.each("arguments", LATE)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_nothing_is_written_before_the_checks(arguments, max_norm):
    arguments = {"input": GOOD, "out": torch.full((2, 3, 8), 7.0), "max_norm": max_norm} | arguments
    weight = table()
    before, out = weight.clone(), arguments["out"]
    with pytest.raises((ValueError, IndexError)):
        embed(arguments.pop("input"), weight, **arguments)
    assert (out == 7).all()
    assert_same_bits(weight, before, "weight")


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_nothing_is_written_where_out_cannot_be_differentiated(max_norm):
    weight, out = table().requires_grad_(), torch.full((2, 3, 8), 7.0)
    before = weight.detach().clone()
    assert_refused(lambda: embed(GOOD, weight, out=out, max_norm=max_norm), "out= is not differentiable")
    assert (out == 7).all()
    assert_same_bits(weight, before, "weight")


@refused(
    {
        "positions": (lambda out: add(out, positions=batch(4), out=out), "positions"),
        "offset": (lambda out: add(out, offset=TOP, out=out), "offset"),
        "convention": (lambda out: add(out, convention="bert", out=out), "convention"),
        "PE positions": (lambda out: encode(GOOD.half(), 8, out=out), "positions"),
        "PE shape": (lambda out: encode(3, 8, out=out), "out must have shape [3, 8]"),
        "PE width": (lambda out: encode(GOOD, 7, out=out), "out must have shape [2, 3, 7]"),
        "PE precision": (lambda out: encode(GOOD, 8, precision="fast", out=out), "precision"),
    }
)
def test_nothing_is_written_by_the_others(call, words):
    out = torch.full((2, 3, 8), 7.0)
    assert_refused(lambda: call(out), *words)
    assert (out == 7).all()


# ---- widths ----------------------------------------------------------------------------------------------------------

MOST = 2**24
WIDER = torch.zeros(1, 1).expand(1, MOST + 1)
IN_ROW = torch.zeros(1, dtype=torch.int64)

# Every op with a row of more than MOST columns, on a device.
TOO_WIDE = {
    "embed": lambda d: ops.embed(WIDER.to(d), IN_ROW.to(d), None, 0, 1.0, *SPEC),
    "no encoding": lambda d: ops._embed_fwd(WIDER.to(d), IN_ROW.to(d), None, 0, 1.0, *make.NONE),
    "embed_general": lambda d: ops.embed_general(WIDER.to(d), IN_ROW.to(d)),
    "embed_out": lambda d: ops.embed_out(WIDER.to(d), IN_ROW.to(d), None, 0, 1.0, *SPEC, torch.empty(8, device=d)),
    "check_embed": lambda d: ops.check_embed(WIDER.to(d), IN_ROW.to(d), None, 0, *SPEC),
    "add": lambda d: ops.add_positional_encoding(WIDER.to(d), None, 0, *SPEC),
    "PE": lambda d: ops.positional_encoding(IN_ROW.to(d), MOST + 1, 0, *SPEC, torch.float32),
    "PE of nothing": lambda d: encode(IN_ROW.to(d)[:0], 10**9),
    "PE 2**62": lambda d: encode(IN_ROW.to(d), 2**62),
    "gradient": lambda d: ops.embed_backward(WIDER.to(d), IN_ROW.to(d), 1, 1.0, -1, False),
    "sparse gradient": lambda d: ops._embed_bwd_sparse(WIDER.to(d), IN_ROW.to(d), 1, 1.0, -1, False),
}


@make.each("device", ["cpu", "meta"])
@make.each("call", TOO_WIDE)
def test_widths(call, device):
    """Frequencies of 2**30 columns would take a minute, of 2**40 all memory. "meta": while a program is traced."""
    assert_refused(lambda: call(device), f"the width (d_model) must be at most {MOST}, got ")


# ---- the introspection module ----------------------------------------------------------------------------------------


@refused(
    {
        **{f"base {b}": (lambda b=b: _C.frequency_table(b, 0, 8, 4), BASE) for b in (0.9, -1, math.nan, math.inf)},
        **{f"divisor {d}": (lambda d=d: _C.frequency_table(1e4, d, 8, 4), "divisor must") for d in (-1, 3, TOP)},
        **{f"width {w}": (lambda w=w: _C.frequency_table(1e4, 0, w, 0), "width must") for w in (0, -1, MOST + 1, TOP)},
        **{f"pairs {p}": (lambda p=p: _C.frequency_table(1e4, 0, 8, p), "pairs must") for p in (-1, 5, 2**40, TOP)},
    }
)
def test_frequency_table(call, words):
    assert_refused(call, "posenc_ext::frequency_table: ", *words)


@make.each("angle", [-1.0, math.nan, math.inf, 2.0**87])
def test_angles(angle):
    """Out of the range in which an angle is reduced a number would come out, and not its sine."""
    words = "sincos_of_angle: angles must lie in [0, 2^87), got", "at flat index 1"
    assert_refused(lambda: _C.sincos_of_angle(np.array([1, angle], dtype=np.float32)), *words)
    for function in (_C.sincos_of_phase32, _C.sincos_of_phase64):
        assert_refused(lambda f=function: f(np.array([angle])), "incompatible", error=TypeError)


ROWS, IDS, RESULT = table().numpy(), GOOD.numpy(), torch.full((2, 3, 8), 7.0).numpy()
LOCKED = RESULT.copy()
LOCKED.flags.writeable = False


@refused(
    {
        "one axis": ({"weight": ROWS[0]}, "weight must have 2 axes, got 1"),
        "strides": ({"weight": ROWS[:, ::2]}, "weight must be contiguous"),
        "integers": ({"weight": ROWS.astype(np.int32)}, "weight must have dtype", "got int32"),
        "byte order": ({"weight": ROWS.astype(">f4")}, "weight must have dtype", "got >f4"),
        "no columns": ({"weight": ROWS[:, :0].copy()}, "width of weight must lie in [1, 16777216], got 0"),
        "ids in a row": ({"ids": IDS[0]}, "ids must have 2 axes, got 1"),
        "ids int32": ({"ids": IDS.astype(np.int32)}, "ids must have dtype int64, got int32"),
        "ids transposed": ({"ids": IDS.T}, "ids must be contiguous"),
        "another dtype": (
            {"out": RESULT.astype(np.float64)},
            "out must have the dtype of weight, float32, got float64",
        ),
        "another shape": ({"out": RESULT[:, :2].copy()}, "out must have shape [2, 3, 8], got [2, 2, 8]"),
        "locked": ({"out": LOCKED}, "out must be writeable"),
        "rows as out": ({"out": ROWS[:6].reshape(2, 3, 8)}, "out must not share memory"),
        "ids as out": ({"ids": RESULT.reshape(-1)[12:24].view(np.int64).reshape(2, 3)}, "out must not share memory"),
        "offset": ({"offset": TOP - 1}, f"offset {TOP - 1} + length 3 exceeds the int64 range"),
        "base": ({"base": math.inf}, BASE + "inf"),
        "flags": ({"flags": -1}, "flags must be those of a Convention, got -1"),
        "sequence first": ({"flags": make.spec(batch_first=False)[1]}, "flags must be those of batch_first=True"),
    }
)
def test_embed_raw(call, words):
    good = {"weight": ROWS, "ids": IDS, "out": RESULT, "offset": 0, "token_scale": 1.0, "base": 1e4, "flags": SPEC[1]}
    assert_refused(lambda: _C.embed_raw(**(good | call)), "posenc_ext::embed_raw: ", *words)
    for bad in (V, -1, TOP):
        call = lambda: _C.embed_raw(**(good | {"ids": np.where(IDS == 4, bad, IDS)}))  # noqa: B023, E731
        assert_refused(call, f"embed_raw: ids must lie in [0, {V}), got {bad} at ids[1, 1]", error=IndexError)
    assert (RESULT == 7).all()


# ---- values of every kind --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_calls(tmp_path_factory):
    """Every argument of every op in turn, and how the call ends; in a process of its own, which lives."""
    return run_code("import hostile; hostile.main()", tmp_path_factory.mktemp("hostile")).splitlines()


def test_no_value_ends_the_process(hostile_calls):
    """And an error says more than that a call has failed."""
    assert len(hostile_calls) > 1000
    assert not [line for line in hostile_calls if re.search("API call failed|bad_alloc|vector::", line)]


def test_storages_that_were_freed_or_cut(hostile_calls):
    """As sharding frees them between uses: every tensor of every op."""
    found = [re.match(r"(\w+) (\w+) with (\d+) of (\d+) bytes: (.*)", line) for line in hostile_calls]
    cut = [match.groups() for match in found if match]
    assert {op for op, *_ in cut} >= {"embed", "_embed_bwd_sparse", "positional_encoding_out"}
    for op, argument, left, needed, end in cut:
        assert re.fullmatch(
            rf"ValueError posenc_ext::\w+: {argument} must have its memory: "
            rf"shape \[.*\] needs a storage of {needed} bytes, got {left}",
            end,
        ), (op, argument, end)


# ---- memory ----------------------------------------------------------------------------------------------------------

FLAT, WIDE = torch.zeros(2**22, dtype=torch.int32), torch.zeros(1, 1).expand(1, 2**24)  # 2^48 bytes of rows
MANY = torch.tensor([1]).expand(2**45)


def backward_of(lookup):
    """To a table that is an expanded row, so that only its gradient is too large."""
    return lambda: lookup(GOOD, torch.zeros(1, 8, requires_grad=True).expand(2**44, 8)).sum().backward()


def gradient(op):
    return getattr(ops, op)(torch.zeros(1).expand(2**45, 8), MANY, V, 1.0, -1, False)


# Calls that need more memory than can be addressed, and what torch does that needs as much.
TOO_LARGE = {
    "rows": (lambda: scaled_embedding(FLAT, WIDE), lambda: nn.functional.embedding(FLAT, WIDE)),
    "copy of ids": (lambda: embed(MANY, table()), MANY.contiguous),
    "x": (lambda: add(torch.zeros(1).expand(2**45, 8)), lambda: torch.zeros(1).expand(2**45, 8) + 1),
    "PE": (lambda: encode(MANY, 8), lambda: torch.empty(2**45, 8)),
    "PE float64": (lambda: encode(MANY, 8, dtype=torch.float64), lambda: torch.empty(2**45, 8, dtype=torch.float64)),
    "PE bfloat16": (lambda: encode(MANY, 8, dtype=torch.bfloat16), lambda: torch.empty(2**45, 8, dtype=torch.half)),
    "more than can be counted": (lambda: encode(MANY, 2**20), lambda: torch.empty(2**45, 2**20)),
    "gradient": (backward_of(embed), backward_of(nn.functional.embedding)),
    "ids of a gradient": (lambda: gradient("embed_backward"), MANY.contiguous),
    "ids of a sparse gradient": (lambda: gradient("embed_backward_sparse"), MANY.contiguous),
}


def error_of(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return caught.value


@make.each(("call", "like"), TOO_LARGE)
def test_out_of_memory_is_the_error_that_torch_raises(call, like):
    """Of the same type and text: tools that try again with a smaller batch look for either."""
    got, want = error_of(call), error_of(like)
    assert type(got) is type(want)
    assert str(got) == str(want)


def test_the_type_of_an_error_of_memory_is_kept(monkeypatch):
    """The one that a GPU raises, which the allocator of the CPU does not."""

    def refuse(*_, **options):
        raise torch.OutOfMemoryError(f"CUDA out of memory: {options}")

    monkeypatch.setattr(torch, "empty", refuse)
    for call in (lambda: encode(MANY, 8), backward_of(embed)):
        assert_refused(call, "CUDA out of memory", "torch.float32", "cpu", error=torch.OutOfMemoryError)
    monkeypatch.setattr(torch, "empty", lambda *_, **options: None)
    assert_refused(lambda: encode(MANY, 8), "out of memory", f"[{2**45}, 8]", "Float on cpu", error=RuntimeError)


def test_too_little_memory_to_sort_ids(tmp_path):
    code = """
import resource, torch, posenc_ext
grad, ids = torch.zeros(1).expand(2**22, 2), torch.zeros(2**22, dtype=torch.int32)
calls = [getattr(torch.ops.posenc_ext, name) for name in ("embed_backward", "embed_backward_sparse")]
for call in calls:
    call(grad[:3], ids[:3], 3, 1.0, -1, False)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))
for call in calls:
    try:
        call(grad, ids, 3, 1.0, -1, False)
    except Exception as error:
        print(type(error).__name__, error)
"""
    lines = run_code(code, tmp_path).splitlines()
    assert len(lines) == 2
    assert all(re.match("RuntimeError .*DefaultCPUAllocator: can't allocate memory", line) for line in lines), lines


def test_no_element_needs_no_storage():
    nothing = torch.empty(0, 3, dtype=torch.int64)
    nothing.untyped_storage().resize_(0)
    assert embed(nothing, table()).shape == (0, 3, 8)
    assert encode(nothing, 8).shape == (0, 3, 8)
