"""out=: the same values, written where they are wanted, and refusals that leave everything as it was."""

import functools

import make
import pytest
import torch
from helpers import assert_refused, assert_same_bits, message
from make import D
from torch.autograd import forward_ad

from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

SHAPE = (3, 5)


def arguments(source, dtype, width=37):
    """(function taking out=, its result without)."""
    if source == "embed":
        ids, weight = torch.randint(9, SHAPE), make.table(9, width, dtype=dtype)
        return lambda **kwargs: embed(ids, weight, offset=2, **kwargs)
    if source == "add":
        x = torch.randn(*SHAPE, width).to(dtype)
        return lambda **kwargs: add_positional_encoding(x, offset=2, **kwargs)
    positions = torch.randint(-9, 99, SHAPE)
    return lambda **kwargs: positional_encoding(positions, width, **({"dtype": dtype} | kwargs))


SOURCES = ("embed", "add", "PE")


def buffers(width, dtype):
    """(name, a whole buffer, the view of it that is written)."""
    b, t = SHAPE
    for name, shape, view in (
        ("packed", (b, t, width), lambda w: w),
        ("columns of a wider one", (b, t, width + 13), lambda w: w[..., 4 : 4 + width]),
        ("tokens of a longer one", (b, t + 4, width), lambda w: w[:, 2 : 2 + t]),
        ("every second token", (b, 2 * t, width), lambda w: w[:, ::2]),
        ("every second sequence", (2 * b, t, width), lambda w: w[1::2]),
        ("sequence first under it", (t, b, width), lambda w: w.transpose(0, 1)),
        ("offset by one", (b * t * width + 1,), lambda w: w[1:].view(b, t, width)),
    ):
        whole = torch.full(shape, 7.0, dtype=dtype)
        yield name, whole, view(whole)


@make.each("source", SOURCES)
@make.each_dtype
@pytest.mark.parametrize("width", [1, 8, 37, 1035])
def test_values(source, dtype, width):
    function = arguments(source, dtype, width)
    want = function()
    for name, buffer, view in buffers(width, dtype):
        around = buffer.clone()
        got = function(out=view)
        assert got is view, name
        assert_same_bits(view, want, name)
        view.fill_(7.0)
        assert_same_bits(buffer, around, f"around {name}")


def test_sequence_first():
    ids, weight = torch.randint(9, (5, 3)), torch.randn(9, 6)
    for view in (torch.empty(5, 3, 6), torch.empty(3, 5, 6).transpose(0, 1), torch.empty(5, 8, 6)[:, 1:4]):
        for function, arguments in ((embed, (ids, weight)), (add_positional_encoding, (weight[ids],))):
            want = function(*arguments, batch_first=False)
            assert_same_bits(function(*arguments, batch_first=False, out=view), want, function.__name__)


def test_other_forms():
    weight = torch.randn(9, 6)
    for shape in ((), (7,), (2, 2, 3), (0, 3)):
        ids, out = make.ids(shape, 9), torch.empty(*shape, 6)
        assert_same_bits(scaled_embedding(ids, weight, out=out), scaled_embedding(ids, weight), "rows")
        assert_same_bits(embed(ids, weight, out=out), embed(ids, weight), "embed")
        assert_same_bits(positional_encoding(ids, 6, out=out), positional_encoding(ids, 6), "PE")
    nothing = torch.empty(40).as_strided((0, 3, 0, 6), (1, 1, 1, 1))  # any strides will do for no elements
    assert embed(torch.zeros(0, 3, 0, dtype=torch.int64), weight, out=nothing) is nothing
    out = torch.empty(5, 6, dtype=torch.float64)
    assert_same_bits(positional_encoding(5, 6, out=out), positional_encoding(5, 6, dtype=torch.float64), "length")


IN_PLACE = {
    "packed": ((3, 5, 37), lambda x: x),
    "columns": ((3, 5, 80), lambda x: x[..., 3:40]),
    "transposed": ((5, 3, 37), lambda x: x.transpose(0, 1)),
    "every second token": ((3, 10, 37), lambda x: x[:, ::2]),
    "many tiles": ((2, 3, 1035), lambda x: x),
    "large": ((4, 300, 1030), lambda x: x),  # above 4 MiB
}


@make.each(("shape", "view"), IN_PLACE)
@make.each_dtype
def test_in_place(shape, view, dtype):
    for batch_first in (True, False):
        x = view(make.x(shape, dtype=dtype))
        want, address = add_positional_encoding(x, batch_first=batch_first), x.data_ptr()
        assert add_positional_encoding(x, batch_first=batch_first, out=x) is x
        assert x.data_ptr() == address
        assert_same_bits(x, want, f"batch_first={batch_first}")


@make.each("source", SOURCES)
def test_writing_is_seen_by_autograd(source):
    """What was saved for a backward pass and then overwritten must be noticed, as with every in-place operation."""
    leaf, saved = torch.randn(*SHAPE, 6, requires_grad=True), torch.randn(*SHAPE, 6)
    loss = (leaf * saved).sum()
    arguments(source, torch.float32, 6)(out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- refusals --------------------------------------------------------------------------------------------------------


def outs_refused():
    """Name -> out for a result [3, 5, 8] in fp32, what the message says of it."""

    def whole(*shape):
        return torch.full(shape, 7.0)

    shape, overlap, columns = "must have shape [3, 5, 8]", "must not overlap itself", "contiguous columns"
    return {
        "too short": (whole(3, 4, 8), shape, "got [3, 4, 8]"),
        "too wide": (whole(3, 5, 9), shape, "got [3, 5, 9]"),
        "too flat": (whole(15, 8), shape, "got [15, 8]"),
        "too deep": (whole(1, 3, 5, 8), shape, "got [1, 3, 5, 8]"),
        "broadcastable": (whole(1, 1, 8), shape, "got [1, 1, 8]"),
        "empty": (whole(0), shape, "got [0]"),
        "expanded": (whole(1, 5, 8).expand(3, 5, 8), overlap, "[0, 8, 1]"),
        "one token": (whole(3, 1, 8).expand(3, 5, 8), overlap, "[8, 0, 1]"),
        "one column": (whole(3, 5, 1).expand(3, 5, 8), columns, "[5, 1, 0]"),
        "every second column": (whole(3, 5, 16)[..., ::2], columns, "[80, 16, 2]"),
        "columns first": (whole(3, 8, 5).transpose(1, 2), columns, "[40, 1, 5]"),
        "rows that overlap": (whole(200).as_strided((3, 5, 8), (20, 4, 1)), overlap, ""),
        # Sequence 1 starts inside sequence 0.
        "sequences that overlap": (whole(200).as_strided((3, 5, 8), (8, 8, 1)), overlap, ""),
    }


@make.each("source", SOURCES)
@make.each(("out", "requirement", "value"), outs_refused())
def test_refuses(source, out, requirement, value):
    before = out.untyped_storage().tolist()
    assert_refused(lambda: arguments(source, torch.float32, 8)(out=out), "posenc_ext::", "out", requirement, value)
    assert out.untyped_storage().tolist() == before


def test_refuses_batch_axes_without_one_stride():
    """Two batch axes that no single stride walks along; the same with one of them is fine."""
    ids, weight, buffer = torch.randint(9, (2, 3, 4)), torch.randn(9, 8), torch.full((2, 5, 4, 8), 7.0)
    out = buffer[:, :3]
    words = ("batch axes of out must be reachable with one stride", "[160, 32, 8, 1]")
    assert_refused(lambda: embed(ids, weight, out=out), *words)
    assert (buffer == 7).all()
    assert_same_bits(embed(ids[0], weight, out=out[0]), embed(ids[0], weight), "one batch axis")


@pytest.mark.parametrize("source", ["embed", "add"])
@make.each_dtype
def test_refuses_another_dtype(source, dtype):
    function = arguments(source, dtype, 8)
    other = torch.float64 if dtype == torch.float32 else torch.float32
    words = {torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16", torch.float16: "Half"}
    out = torch.full((*SHAPE, 8), 7.0, dtype=other)
    assert_refused(lambda: function(out=out), "out must have dtype", words[dtype], "got", words[other])
    assert (out == 7).all()


@make.each("dtype", [torch.int64, torch.complex64, torch.bool])
def test_refuses_a_dtype_that_holds_no_encoding(dtype):
    for source in SOURCES:
        out = torch.ones((*SHAPE, 8), dtype=dtype)
        assert_refused(lambda s=source, o=out: arguments(s, torch.float32, 8)(out=o), "out", "dtype", "got")
        assert (out == 1).all()


def overlapping():
    """Name -> call, tensor that must stay as it is, the input named."""
    table, line, x, wide_x = make.table(16), make.x((15,)), make.x((4, 5, 8)), make.x((3, 5, 20))
    ids, numbers = torch.zeros(3, 5, dtype=torch.int64), make.ids((3, 5, 8), 4)
    first, second, column = numbers[..., 0].contiguous(), numbers[..., 1], torch.zeros(3, 5, 1, dtype=torch.int64)
    floats, double = numbers.view(torch.float64), make.table(9, dtype=torch.float64)
    one, rows = ids[0, :1], scaled_embedding
    embed_calls = {
        "its table": (lambda: embed(ids[:, :2], table, out=table[4:10].view(3, 2, 8)), table, "weight"),
        "its first number": (lambda: rows(one, line[7:15].view(1, 8), out=line[:8].view(1, 8)), line, "weight"),
        "its last number": (lambda: rows(one, line[:8].view(1, 8), out=line[7:15].view(1, 8)), line, "weight"),
        "a row of its table": (lambda: embed(one, table[:1], out=table[:1]), table, "weight"),
        "all but the last byte": (lambda: rows(one, table[:2], out=table[1:2]), table, "weight"),
        "its ids": (lambda: embed(numbers[..., 0], double, out=floats), numbers, "input"),
        "its positions": (lambda: embed(first, double, positions=second, out=floats), numbers, "positions"),
    }
    add, pe = add_positional_encoding, positional_encoding
    return {
        **embed_calls,
        "positions of PE": (lambda: pe(second, 8, out=floats), numbers, "positions"),
        "positions of width 1": (lambda: pe(column[..., 0], 1, out=column.view(torch.float64)), column, "positions"),
        "positions of add": (lambda: add(floats.clone(), positions=second, out=floats), numbers, "positions"),
        "x moved by a row": (lambda: add(x[:3], out=x[1:]), x, "x"),
        "x of other strides": (lambda: add(x[:, :4, :4].transpose(0, 1), out=x[:, :4, :4]), x, "x"),
        "x moved by a column": (lambda: add(wide_x[..., :8], out=wide_x[..., 1:9]), wide_x, "x"),
    }


@make.each(("call", "tensor", "word"), overlapping())
def test_refuses_to_overwrite(call, tensor, word):
    before = tensor.clone()
    assert_refused(call, "out must not share memory with", word)
    assert_same_bits(tensor, before, word)


def test_refuses_where_a_gradient_is_needed():
    """And only there: where no gradient is recorded, a tensor that needs one may take part."""
    embedded = functools.partial(embed, make.ids(SHAPE), make.table(grad=True))
    for call in (embedded, functools.partial(add_positional_encoding, make.x((*SHAPE, D), grad=True))):
        out = torch.full((*SHAPE, D), 7.0)
        words = ("out= is not differentiable", "requires a gradient", "no_grad")
        assert_refused(functools.partial(call, out=out), *words)
        assert (out == 7).all()
        with torch.no_grad():
            assert_same_bits(call(out=out), call(), "no gradient")
        assert not out.requires_grad


@make.each("source", SOURCES)
def test_refuses_an_out_that_needs_a_gradient(source):
    """As every out= of torch does: what is written there has no history, and what was there had."""
    out = torch.full((*SHAPE, 8), 7.0, requires_grad=True)
    with pytest.raises((ValueError, RuntimeError), match=r"gradient|requires.grad"):
        arguments(source, torch.float32, 8)(out=out)
    assert (out == 7).all()


def differentiated(source):
    """Calls that take (tensor to follow, out), by the name of the tensor."""
    ids, table, x = make.ids(SHAPE), make.table(), make.x((*SHAPE, D))
    calls = {
        "embed": {"weight": (lambda t, out: embed(ids, t, out=out), table)},
        "add": {"x": (lambda t, out: add_positional_encoding(t, out=out), x)},
        "PE": {},
    }[source]
    plain = arguments(source, torch.float32, D)
    return calls | {"out": (lambda t, out: plain(out=t), torch.full_like(x, 7.0))}


@make.each("source", SOURCES)
def test_refuses_forward_mode(source):
    """Where torch refuses its own out= functions: the tangent would be lost."""
    for name, (call, tensor) in differentiated(source).items():
        out, words = torch.full((*SHAPE, D), 7.0), (f"out= does not support forward-mode AD, but {name} takes part",)
        with forward_ad.dual_level():
            followed = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            assert_refused(functools.partial(call, followed, out), *words, error=NotImplementedError)
        for transform in (
            lambda f, t: torch.func.jvp(f, (t,), (t,)),
            lambda f, t: torch.func.jacfwd(f)(t),
            # Inside of another jvp that follows something else.
            lambda f, t: torch.func.jvp(lambda a: torch.func.jvp(lambda b: f(a) + b, (t,), (t,))[1], (t,), (t,)),
        ):
            function = functools.partial(transform, functools.partial(call, out=out.clone()), tensor)
            assert_refused(function, *words, error=NotImplementedError)
        assert (out == 7).all()
        assert name != "out" or (tensor == 7).all()


@make.each("source", SOURCES)
def test_writes_beside_forward_mode(source):
    """What has no tangent may be written while others have one."""
    plain, x = arguments(source, torch.float32, D), make.x((*SHAPE, D))
    want = plain()
    with forward_ad.dual_level():
        forward_ad.make_dual(x, x)
        assert_same_bits(plain(out=torch.empty_like(x)), want, "dual level")
    got, tangent = torch.func.jvp(lambda t: plain(out=torch.empty_like(x)) + 0 * t, (x,), (x,))
    assert_same_bits(got, want, "jvp")
    assert not tangent.any()


@make.each("source", SOURCES)
def test_refuses_inference_tensors(source):
    """Outside inference mode, as every in-place operation does."""
    plain = arguments(source, torch.float32, D)
    with torch.inference_mode():
        out, want = torch.full((*SHAPE, D), 7.0), plain()
    words = "out is an inference tensor", "Inplace update to inference tensor outside InferenceMode is not allowed"
    assert_refused(lambda: plain(out=out), *words, error=RuntimeError)
    assert (out == 7).all()
    with torch.inference_mode():
        for tensor in (out, torch.empty_like(want), torch.empty(1).new_empty(*SHAPE, D)):
            assert_same_bits(plain(out=tensor), want, "in inference mode")


@make.each("source", SOURCES)
def test_refuses_negated_views(source):
    out = torch.full((*SHAPE, D), 7.0)
    assert_refused(
        lambda: arguments(source, torch.float32, D)(out=torch._neg_view(out)), "out must not be a negated view"
    )
    assert (out == 7).all()


# Functions of ids [3, 5] and a table [16, 8] that write where they must not, and what they overlap.
COMPILED = {
    "itself": (lambda i, t: embed(i, t, out=torch.zeros(1, 1, 8).expand(3, 5, 8)), "overlap itself"),
    "its rows": (lambda i, t: embed(i, t, out=t.new_zeros(99).as_strided((3, 5, 8), (20, 4, 1))), "overlap itself"),
    "its table": (lambda i, t: embed(i, t, out=t[1:].view(3, 5, 8)), "share memory with weight"),
    "x moved by a row": (lambda _, t: add_positional_encoding(t[1:], out=t[:-1]), "share memory with x"),
    "its positions": (
        lambda i, _: positional_encoding(i, 1, out=i[..., None].view(torch.float64)),
        "share memory with",
    ),
}


@make.each(("function", "words"), COMPILED)
@make.each("backend", ["eager", "aot_eager"])
def test_refuses_in_a_compiled_program(function, words, backend):
    """Where the op would get a copy of out, which overlaps nothing."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    table, ids = make.table(16), torch.zeros(3, 5, dtype=torch.int64)
    before = table.clone()
    for call in (function, compiled):
        with pytest.raises(Exception, match=message("posenc_ext::", "out must not ", words)):
            call(ids, table)
    assert_same_bits(table, before, "table")
    assert not ids.any()


def test_compiled_programs_write_in_place():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: add_positional_encoding(x, out=x), backend="aot_eager", fullgraph=True)
    whole = make.x((6, D))
    want = add_positional_encoding(whole[1:4])
    compiled(whole[1:4])
    assert_same_bits(whole[1:4], want)


def test_memory_next_to_an_input_is_free():
    """The first and the last element of a buffer shared with an input may be written."""
    buffer = torch.randn(40)
    weight = buffer[8:32].view(3, 8)
    ids = torch.tensor([2])
    want = embed(ids, weight)
    assert_same_bits(embed(ids, weight, out=buffer[:8].view(1, 8)), want, "before")
    assert_same_bits(embed(ids, weight, out=buffer[32:].view(1, 8)), want, "after")
    x = torch.randn(6, 8)
    want = x[:3] + positional_encoding(3, 8)
    assert_same_bits(add_positional_encoding(x[:3], out=x[3:]), want, "other rows")
