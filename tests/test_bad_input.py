"""Bad input: the exception, its message (op, argument, requirement, value), and that nothing was written before."""

import dataclasses
import math

import pytest
import torch
from helpers import make.DTYPES, assert_same_bits, message, make.name_of

from posenc_ext import CONVENTIONS, Convention
from posenc_ext.conventions import NO_WAVES
from posenc_ext.functional import (
    add_positional_encoding,
    angular_frequencies,
    embed,
    positional_encoding,
    scaled_embedding,
)

TOP = 2**63 - 1
VASWANI = CONVENTIONS["vaswani"].recipe()


def ids(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


GOOD = ids([0, 1, 2], [3, 4, 5])


def table(rows=10, width=8, dtype=torch.float32):
    return torch.randn(rows, width).to(dtype)


def cases(*rows):
    """Rows of (name, call, words of the message of the ValueError it must end in)."""
    return pytest.mark.parametrize(("call", "words"), [pytest.param(*row[1:], id=row[0]) for row in rows])


def assert_refused(call, error, words):
    with pytest.raises(error, match=message(*words)):
        call()


# ---- ids -------------------------------------------------------------------------------------------------------------

BAD_IDS = [
    ("first past the end", ids([0, 1, 2], [3, 4, 10]), ["input must hold ids in [0, 10)", "got 10 at input[1, 2]"]),
    ("negative", ids([0, -1, 2], [3, 4, 5]), ["input must hold ids in [0, 10)", "got -1 at input[0, 1]"]),
    ("largest", ids([TOP, 1, 2], [3, 4, 5]), ["input must hold ids in [0, 10)", f"got {TOP} at input[0, 0]"]),
    (
        "smallest",
        ids([0, 1, 2], [-TOP - 1, 4, 5]),
        ["input must hold ids in [0, 10)", f"got {-TOP - 1} at input[1, 0]"],
    ),
    ("the first of two", ids([0, 11, 2], [12, 4, 5]), ["got 11 at input[0, 1]"]),
    ("low word in range", ids([0, 2**32, 2], [3, 4, 5]), [f"got {2**32} at input[0, 1]"]),
    (
        "int32",
        ids([0, 1, 2], [3, 10, 5], dtype=torch.int32),
        ["input must hold ids in [0, 10)", "got 10 at input[1, 1]"],
    ),
    ("negative int32", ids([0, 1, -7], [3, 4, 5], dtype=torch.int32), ["got -7 at input[0, 2]"]),
    ("transposed", ids([0, 1, 2], [3, 10, 5]).t(), ["got 10 at input[1, 1]"]),
    ("expanded", ids([10]).expand(2, 3), ["got 10 at input[0, 0]"]),
    ("one token", torch.tensor(10), ["input must hold ids in [0, 10)", "got 10 at input["]),
]

# Every way from ids to rows.
PATHS = {
    "embed": lambda i, w: embed(i, w),
    "with padding_idx": lambda i, w: embed(i, w, padding_idx=3),
    "bad id is not the padding": lambda i, w: embed(i, w, padding_idx=-1),
    "no encoding": lambda i, w: scaled_embedding(i, w),
    "positions": lambda i, w: embed(i, w, positions=torch.zeros_like(i)),
    "sequence first": lambda i, w: embed(i, w, batch_first=False),
    "needs a gradient": lambda i, w: embed(i, w.requires_grad_()),
    "needs a sparse gradient": lambda i, w: embed(i, w.requires_grad_(), sparse=True),
    "max_norm": lambda i, w: embed(i, w, max_norm=0.1),
    "out": lambda i, w: embed(i, w, out=torch.empty(*i.shape, 8)),
    "op": lambda i, w: torch.ops.posenc_ext.embed(w, i, None, 0, 1.0, *VASWANI),
    "raw op": lambda i, w: torch.ops.posenc_ext._embed_fwd(w, i, None, 0, 1.0, *NO_WAVES),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "bad", "words"), BAD_IDS, ids=lambda v: v if isinstance(v, str) else "")
def test_ids_out_of_range(path, name, bad, words):
    weight = table()
    before = weight.clone()
    assert_refused(lambda: PATHS[path](bad, weight), IndexError, ["posenc_ext::embed: ", *words])
    assert_same_bits(weight, before, "weight")


@make.each_dtype
def test_ids_out_of_range_for_every_dtype_of_the_table(dtype):
    assert_refused(lambda: embed(ids(0, 10), table(dtype=dtype)), IndexError, ["ids in [0, 10)", "got 10 at input[1]"])


def test_an_id_far_into_a_batch():
    """Ids are looked through in blocks; the last one of a batch is as bad as the first."""
    for count in (1, 4095, 4096, 4097, 10_000):
        for dtype in (torch.int64, torch.int32):
            batch = torch.zeros(count, dtype=dtype)
            batch[-1] = 10
            assert_refused(lambda b=batch: embed(b, table()), IndexError, [f"got 10 at input[{len(batch) - 1}]"])


def test_a_table_without_rows_has_no_ids():
    assert_refused(lambda: embed(GOOD, table(rows=0)), IndexError, ["ids in [0, 0)", "got 0 at input[0, 0]"])


@pytest.mark.parametrize("op", ["embed_backward", "_embed_bwd", "embed_backward_sparse", "_embed_bwd_sparse"])
@pytest.mark.parametrize("bad", [ids(0, 10), ids(-1, 3), ids(10, 0, dtype=torch.int32)], ids=str)
def test_ids_out_of_range_backward(op, bad):
    words = [f"posenc_ext::{op.replace('_embed_bwd', 'embed_backward')}: input must hold ids in [0, 10), got "]
    call = getattr(torch.ops.posenc_ext, op)
    assert_refused(lambda: call(torch.ones(2, 8), bad, 10, 1.0, -1, False), IndexError, words)
    assert_refused(lambda: call(torch.ones(2, 8), bad, 10, 1.0, 0, True), IndexError, words)


def test_ids_out_of_range_compiled():
    """The traced program holds the op with its checks; nothing is looked up before they pass."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(input, weight):
        return embed(input, weight, padding_idx=3).sum()

    weight = table().requires_grad_()
    assert layer(GOOD, weight).isfinite()
    for bad, text in (
        (ids([0, 1, 2], [3, 4, 10]), "got 10 at input[1, 2]"),
        (ids([0, 1, 2], [-4, 4, 5]), "got -4 at input[1, 0]"),
    ):
        assert_refused(
            lambda b=bad: layer(b, weight), IndexError, ["posenc_ext::embed: input must hold ids in [0, 10)", text]
        )
    assert weight.grad is None
    narrow = ids([0, 1, 2], [3, 4, 10], dtype=torch.int32)
    assert_refused(lambda: layer(narrow, weight), IndexError, ["got 10 at input[1, 2]"])


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float32, "Float"),
        (torch.bool, "Bool"),
        (torch.uint8, "Byte"),
        (torch.int16, "Short"),
        (torch.int8, "Char"),
    ],
    ids=make.name_of,
)
def test_ids_of_another_dtype(dtype, text):
    bad = torch.ones(2, 3).to(dtype)
    for path in ("embed", "no encoding", "needs a gradient", "max_norm", "out"):
        weight = table()
        before = weight.clone()
        words = ["posenc_ext::embed: input must have dtype int64 or int32, got ", text]
        assert_refused(lambda p=path, w=weight: PATHS[p](bad, w), ValueError, words)
        assert_same_bits(weight, before, path)
    call = torch.ops.posenc_ext.embed_backward
    words = ["posenc_ext::embed_backward: input must have dtype int64 or int32, got ", text]
    assert_refused(lambda: call(torch.ones(2, 3, 8), bad, 10, 1.0, -1, False), ValueError, words)
    words = ["posenc_ext::positional_encoding: positions must have dtype int64 or int32, got ", text]
    assert_refused(lambda: positional_encoding(bad, 8), ValueError, words)
    words = ["posenc_ext::embed: positions must have dtype int64 or int32, got ", text]
    assert_refused(lambda: embed(GOOD, table(), positions=bad), ValueError, words)
    words = ["posenc_ext::add_positional_encoding: positions must have dtype int64 or int32, got ", text]
    assert_refused(lambda: add_positional_encoding(torch.zeros(2, 3, 8), positions=bad), ValueError, words)


# ---- tables and activations ------------------------------------------------------------------------------------------

FOUR = "must have dtype float32, float64, bfloat16 or float16, got "
TWO_AXES = "weight must have 2 dimensions [vocab_size, d_model], got shape "
WIDTH = "the width (d_model) must be positive, got "
INT64 = "exceeds the int64 range"


@cases(
    ("int64", lambda: embed(GOOD, table().long()), ["embed: weight ", FOUR, "Long"]),
    ("bool", lambda: embed(GOOD, table().bool()), ["embed: weight ", FOUR, "Bool"]),
    ("complex", lambda: embed(GOOD, table().cfloat()), ["embed: weight ", FOUR, "ComplexFloat"]),
    ("float8", lambda: embed(GOOD, table().to(torch.float8_e5m2)), ["embed: weight ", FOUR, "Float8_e5m2"]),
    ("no encoding", lambda: scaled_embedding(GOOD, table().int()), ["embed: weight ", FOUR, "Int"]),
    ("one axis", lambda: embed(GOOD, table()[0]), [TWO_AXES + "[8]"]),
    ("no axis", lambda: embed(GOOD, torch.tensor(1.0)), [TWO_AXES + "[]"]),
    ("three axes", lambda: embed(GOOD, table()[None]), [TWO_AXES + "[1, 10, 8]"]),
    ("one axis, no encoding", lambda: scaled_embedding(GOOD, table()[0]), [TWO_AXES + "[8]"]),
    (
        "one axis, op",
        lambda: torch.ops.posenc_ext._embed_fwd(table()[0], GOOD, None, 0, 1.0, *VASWANI),
        [TWO_AXES + "[8]"],
    ),
    ("no columns", lambda: embed(GOOD, table(width=0)), ["posenc_ext::embed: " + WIDTH + "0"]),
    ("no columns, no encoding", lambda: scaled_embedding(GOOD, table(width=0)), [WIDTH + "0"]),
    (
        "x int64",
        lambda: add_positional_encoding(torch.ones(3, 8).long()),
        ["add_positional_encoding: x ", FOUR, "Long"],
    ),
    ("x complex", lambda: add_positional_encoding(torch.ones(3, 8).cfloat()), ["x ", FOUR, "ComplexFloat"]),
    (
        "x scalar",
        lambda: add_positional_encoding(torch.tensor(1.0)),
        ["x must have at least 1 dimension", "got a scalar"],
    ),
    ("x no columns", lambda: add_positional_encoding(torch.ones(3, 0)), [WIDTH + "0"]),
    (
        "dtype of PE",
        lambda: positional_encoding(3, 8, dtype=torch.int32),
        ["posenc_ext::positional_encoding: dtype must", "float32, float64, bfloat16 or float16, got Int"],
    ),
)
def test_tables_and_activations(call, words):
    assert_refused(call, ValueError, words)


# ---- positions and offsets -------------------------------------------------------------------------------------------


def wrong_positions(shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("shape", [(4,), (2,), (0,), (3, 2), (2, 4), (1, 2, 3), (2, 3, 1)], ids=str)
def test_positions_that_do_not_fit(shape):
    words = ["positions must be broadcastable to the tokens [2, 3]", f"got shape {list(shape)}"]
    assert_refused(
        lambda: embed(GOOD, table(), positions=wrong_positions(shape)), ValueError, ["posenc_ext::embed: ", *words]
    )
    x = torch.zeros(2, 3, 8)
    words = ["posenc_ext::add_positional_encoding: ", *words]
    assert_refused(lambda: add_positional_encoding(x, positions=wrong_positions(shape)), ValueError, words)
    words = ["positions must have the shape of the tokens [2, 3]", f"got {list(shape)}"]
    call = torch.ops.posenc_ext._embed_fwd
    assert_refused(lambda: call(table(), GOOD, wrong_positions(shape), 0, 1.0, *VASWANI), ValueError, words)


def test_positions_along_the_wrong_axis():
    """Three positions for two steps of three sequences, sequence first."""
    words = ["positions must be broadcastable to the tokens [2, 3]", "1-D along the sequence", "got shape [3]"]
    assert_refused(lambda: embed(GOOD, table(), positions=torch.arange(3), batch_first=False), ValueError, words)


@cases(
    ("ids", lambda: embed(GOOD.to("meta"), table()), ["input must be on the device of weight (cpu)"]),
    (
        "positions",
        lambda: embed(GOOD, table(), positions=GOOD.to("meta")),
        ["positions must be on the device of weight (cpu)"],
    ),
    (
        "positions of add",
        lambda: add_positional_encoding(torch.zeros(2, 3, 8), positions=GOOD.to("meta")),
        ["positions must be on the device of x (cpu)"],
    ),
    (
        "out",
        lambda: embed(GOOD, table(), out=torch.empty(2, 3, 8, device="meta")),
        ["out must be on the device of weight (cpu)"],
    ),
    (
        "device",
        lambda: positional_encoding(GOOD, 8, device="meta"),
        ["device must be that of", "positions (cpu), got meta"],
    ),
)
def test_another_device(call, words):
    """A tensor on the meta device stands for one on any other: it must not get memory that nobody has written."""
    assert_refused(call, ValueError, words)


@cases(
    (
        "embed",
        lambda: embed(GOOD, table(), offset=TOP),
        [f"posenc_ext::embed: offset {TOP} + length 3 exceeds the int64 range"],
    ),
    ("embed, one short", lambda: embed(GOOD, table(), offset=TOP - 1), [f"offset {TOP - 1} + length 3 exceeds"]),
    (
        "sequence first",
        lambda: embed(GOOD, table(), offset=TOP, batch_first=False),
        [f"offset {TOP} + length 2 exceeds"],
    ),
    (
        "add",
        lambda: add_positional_encoding(torch.zeros(3, 8), offset=TOP),
        ["posenc_ext::add_positional_encoding: offset"],
    ),
    ("first position", lambda: embed(GOOD, table(), offset=TOP - 2, convention="fairseq"), ["offset", INT64]),
    ("past int64", lambda: embed(GOOD, table(), offset=2**63), ["offset", INT64]),
    ("past int64, add", lambda: add_positional_encoding(torch.zeros(3, 8), offset=2**63), ["offset", INT64]),
    ("past int64, PE", lambda: positional_encoding(3, 8, offset=2**63), ["offset", INT64]),
    ("below int64", lambda: embed(GOOD, table(), offset=-(2**63) - 1), ["offset", INT64]),
    ("PE of a length", lambda: positional_encoding(3, 8, offset=TOP), ["offset", INT64]),
)
def test_offsets_past_the_last_position(call, words):
    assert_refused(call, ValueError, words)


def test_the_last_offsets_that_fit():
    last = embed(GOOD, table(), offset=TOP - 2)
    assert last.isfinite().all()
    assert embed(GOOD, table(), offset=-(2**63)).isfinite().all()
    assert embed(GOOD[:, :0], table(), offset=TOP).shape == (2, 0, 8)
    want = positional_encoding(torch.tensor([TOP - 2, TOP - 1, TOP]), 8)
    assert_same_bits(add_positional_encoding(torch.zeros(3, 8), offset=TOP - 2), want, "add")


# ---- recipes ---------------------------------------------------------------------------------------------------------


@cases(
    ("width 0", lambda: positional_encoding(3, 0), ["posenc_ext::positional_encoding: " + WIDTH + "0"]),
    ("width -1", lambda: positional_encoding(GOOD, -1), [WIDTH + "-1"]),
    (
        "width 0 of frequencies",
        lambda: angular_frequencies(0),
        ["angular_frequencies: d_model must be positive, got 0"],
    ),
    (
        "length -1",
        lambda: positional_encoding(-1, 8),
        ["posenc_ext::positional_encoding: length must not be negative, got -1"],
    ),
    ("base 0.5", lambda: Convention(base=0.5), ["Convention: base must be finite and at least 1, got 0.5"]),
    ("base 0", lambda: Convention(base=0.0), ["base must be finite and at least 1, got 0"]),
    ("base -1", lambda: Convention(base=-1.0), ["base must be finite and at least 1, got -1"]),
    ("base nan", lambda: Convention(base=math.nan), ["base must be finite and at least 1, got nan"]),
    ("base inf", lambda: Convention(base=math.inf), ["base must be finite and at least 1, got inf"]),
    ("base replaced", lambda: dataclasses.replace(CONVENTIONS["xlm"], base=0.9), ["base must be", "got 0.9"]),
    ("divisor", lambda: Convention(divisor="half"), ["divisor must be one of 'd', 'half_minus_1', got 'half'"]),
    (
        "layout",
        lambda: Convention(layout="sincos"),
        ["layout must be one of 'interleaved', 'sin_cos', 'cos_sin', got 'sincos'"],
    ),
    ("odd", lambda: Convention(odd="cosine"), ["odd must be one of 'sine', 'zero', 'round_up', got 'cosine'"]),
    (
        "precision of one",
        lambda: Convention(precision="fast"),
        ["precision must be one of 'exact', 'reference', got 'fast'"],
    ),
    (
        "convention",
        lambda: embed(GOOD, table(), convention="bert"),
        ["convention must be", "'vaswani'", "'xlm'", "got 'bert'"],
    ),
    (
        "convention of add",
        lambda: add_positional_encoding(torch.zeros(3, 8), convention=""),
        ["convention must be", "got ''"],
    ),
    ("convention of PE", lambda: positional_encoding(3, 8, convention="bert"), ["convention must be", "got 'bert'"]),
    (
        "precision",
        lambda: embed(GOOD, table(), precision="fast"),
        ["precision must be one of 'exact', 'reference', got 'fast'"],
    ),
    (
        "precision of add",
        lambda: add_positional_encoding(torch.zeros(3, 8), precision=""),
        ["precision must be one of", "got ''"],
    ),
    (
        "precision of PE",
        lambda: positional_encoding(3, 8, precision="fast"),
        ["precision must be one of", "got 'fast'"],
    ),
    (
        "precision of frequencies",
        lambda: angular_frequencies(8, precision="fast"),
        ["precision must be one of", "got 'fast'"],
    ),
)
def test_recipes(call, words):
    assert_refused(call, ValueError, words)


@pytest.mark.parametrize("base", [0.5, 0.0, -1.0, math.nan, math.inf, -math.inf])
def test_ops_check_the_base_too(base):
    ops, flags = torch.ops.posenc_ext, VASWANI[1]
    words = ["base must be finite and at least 1, got "]
    for op, call in {
        "embed": lambda: ops._embed_fwd(table(), GOOD, None, 0, 1.0, base, flags),
        "add_positional_encoding": lambda: ops._add_positional_encoding_fwd(torch.zeros(3, 8), None, 0, base, flags),
        "positional_encoding": lambda: ops.positional_encoding(GOOD, 8, 0, base, flags, torch.float32),
    }.items():
        assert_refused(call, ValueError, [f"posenc_ext::{op}: ", *words])


@pytest.mark.parametrize("flags", [-1, 2, 3 << 4, 2 << 6, 1 << 9, 2**62])
def test_ops_refuse_flags_that_no_convention_has(flags):
    call = torch.ops.posenc_ext.positional_encoding
    words = ["posenc_ext::positional_encoding: flags must be those of a Convention, got ", flags]
    assert_refused(lambda: call(GOOD, 8, 0, 10000.0, flags, torch.float32), ValueError, words)


# ---- flags of nn.Embedding -------------------------------------------------------------------------------------------


@cases(
    (
        "padding_idx == V",
        lambda: embed(GOOD, table(), padding_idx=10),
        ["posenc_ext::embed: padding_idx must lie in [-10, 10), got 10"],
    ),
    ("padding_idx < -V", lambda: embed(GOOD, table(), padding_idx=-11), ["padding_idx must lie in [-10, 10), got -11"]),
    (
        "padding_idx, no encoding",
        lambda: scaled_embedding(GOOD, table(), padding_idx=99),
        ["padding_idx must lie in [-10, 10), got 99"],
    ),
    (
        "max_norm 0",
        lambda: embed(GOOD, table(), max_norm=0.0),
        ["posenc_ext::embed: max_norm must be positive, got 0.0"],
    ),
    ("max_norm -1", lambda: embed(GOOD, table(), max_norm=-1.0), ["max_norm must be positive, got -1.0"]),
    ("max_norm nan", lambda: embed(GOOD, table(), max_norm=math.nan), ["max_norm must be positive, got nan"]),
    (
        "max_norm, no encoding",
        lambda: scaled_embedding(GOOD, table(), max_norm=0),
        ["max_norm must be positive, got 0"],
    ),
    (
        "padding_idx of the backward op",
        lambda: torch.ops.posenc_ext.embed_backward(torch.ones(2, 3, 8), GOOD, 10, 1.0, 10, False),
        ["posenc_ext::embed_backward: padding_idx must be below num_weights (10), got 10"],
    ),
)
def test_flags(call, words):
    assert_refused(call, ValueError, words)


# ---- nothing is written before all checks have passed ----------------------------------------------------------------

# Bad arguments of embed(GOOD, table(), max_norm=0.5, out=...), by name.
LATE = {
    "id": {"input": ids([0, 1, 2], [3, 4, 10])},
    "dtype of ids": {"input": GOOD.float()},
    "shape of positions": {"positions": wrong_positions((2, 4))},
    "dtype of positions": {"positions": GOOD.float()},
    "offset": {"offset": TOP},
    "convention": {"convention": "bert"},
    "precision": {"precision": "fast"},
    "padding_idx": {"padding_idx": 10},
    "shape of out": {"out": torch.full((2, 3, 9), 7.0)},
    "dtype of out": {"out": torch.full((2, 3, 8), 7.0, dtype=torch.float64)},
    "out that overlaps itself": {"out": torch.full((1, 3, 8), 7.0).expand(2, 3, 8)},
    "max_norm": {"max_norm": -1.0},
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_nothing_is_written_before_the_checks(name, max_norm):
    weight, arguments = table(), {"input": GOOD, "out": torch.full((2, 3, 8), 7.0), "max_norm": max_norm} | LATE[name]
    before, out = weight.clone(), arguments["out"]
    with pytest.raises((ValueError, IndexError)):
        embed(arguments.pop("input"), weight, **arguments)
    assert (out == 7).all()
    assert_same_bits(weight, before, "weight")


@pytest.mark.parametrize("name", ["needs a gradient", "max_norm needs one"])
def test_nothing_is_written_where_out_cannot_be_differentiated(name):
    weight, out = table().requires_grad_(), torch.full((2, 3, 8), 7.0)
    before = weight.detach().clone()
    with pytest.raises(ValueError, match="out= is not differentiable"):
        embed(GOOD, weight, out=out, max_norm=0.5 if name != "needs a gradient" else None)
    assert (out == 7).all()
    assert_same_bits(weight, before, "weight")


@cases(
    ("positions", lambda out: add_positional_encoding(out, positions=wrong_positions((4,)), out=out), ["positions"]),
    ("offset", lambda out: add_positional_encoding(out, offset=TOP, out=out), ["offset"]),
    ("convention", lambda out: add_positional_encoding(out, convention="bert", out=out), ["convention"]),
    ("PE positions", lambda out: positional_encoding(GOOD.float(), 8, out=out), ["positions"]),
    ("PE shape", lambda out: positional_encoding(3, 8, out=out), ["out must have shape [3, 8]"]),
    ("PE width", lambda out: positional_encoding(GOOD, 7, out=out), ["out must have shape [2, 3, 7]"]),
    ("PE precision", lambda out: positional_encoding(GOOD, 8, precision="fast", out=out), ["precision"]),
)
def test_nothing_is_written_by_the_others(call, words):
    out = torch.full((2, 3, 8), 7.0)
    assert_refused(lambda: call(out), ValueError, words)
    assert (out == 7).all()
