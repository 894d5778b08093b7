"""out=: the same values, written where they are wanted, and refusals that leave everything as it was."""

import functools
import math

import pytest
import torch
from helpers import DTYPES, assert_same_bits, message, name_of

from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

SHAPE = (3, 5)


def arguments(source, dtype, width=37):
    """(function taking out=, its result without)."""
    if source == "embed":
        ids, weight = torch.randint(9, SHAPE), torch.randn(9, width).to(dtype)
        return lambda **kwargs: embed(ids, weight, offset=2, **kwargs)
    if source == "add":
        x = torch.randn(*SHAPE, width).to(dtype)
        return lambda **kwargs: add_positional_encoding(x, offset=2, **kwargs)
    positions = torch.randint(-9, 99, SHAPE)
    return lambda **kwargs: positional_encoding(positions, width, **({"dtype": dtype} | kwargs))


SOURCES = ("embed", "add", "PE")


def buffers(width, dtype):
    """(name, a whole buffer, the view of it that is written)."""

    def whole(*shape):
        return torch.full(shape, 7.0, dtype=dtype)

    result = []
    for name, buffer, view in (
        ("packed", whole(*SHAPE, width), lambda b: b),
        ("columns of a wider one", whole(*SHAPE, width + 13), lambda b: b[..., 4 : 4 + width]),
        ("tokens of a longer one", whole(SHAPE[0], SHAPE[1] + 4, width), lambda b: b[:, 2 : 2 + SHAPE[1]]),
        ("every second token", whole(SHAPE[0], 2 * SHAPE[1], width), lambda b: b[:, ::2]),
        ("every second sequence", whole(2 * SHAPE[0], SHAPE[1], width), lambda b: b[1::2]),
        ("sequence first under it", whole(SHAPE[1], SHAPE[0], width), lambda b: b.transpose(0, 1)),
        ("offset by one", whole(SHAPE[0] * SHAPE[1] * width + 1), lambda b: b[1:].view(*SHAPE, width)),
    ):
        result.append((name, buffer, view(buffer)))
    return result


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("width", [1, 8, 37])
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


@pytest.mark.parametrize("convention", ["vaswani", "tensor2tensor", "musicgen"])
def test_values_of_many_tiles_and_odd_widths(convention):
    ids, weight = torch.randint(9, (2, 3)), torch.randn(9, 1035)
    want = embed(ids, weight, convention=convention)
    buffer = torch.full((2, 3, 1040), 7.0)
    embed(ids, weight, convention=convention, out=buffer[..., 2:1037])
    assert_same_bits(buffer[..., 2:1037], want, "embed")
    assert (buffer[..., :2] == 7).all()
    assert (buffer[..., 1037:] == 7).all()


def test_sequence_first():
    ids, weight = torch.randint(9, (5, 3)), torch.randn(9, 6)
    want = embed(ids, weight, batch_first=False)
    for view in (torch.empty(5, 3, 6), torch.empty(3, 5, 6).transpose(0, 1), torch.empty(5, 8, 6)[:, 1:4]):
        assert_same_bits(embed(ids, weight, batch_first=False, out=view), want, "embed")
        x = weight[ids]
        got = add_positional_encoding(x, batch_first=False, out=view)
        assert_same_bits(got, add_positional_encoding(x, batch_first=False), "add")


def test_other_forms():
    weight = torch.randn(9, 6)
    for ids in (
        torch.tensor(4),
        torch.randint(9, (7,)),
        torch.randint(9, (2, 2, 3)),
        torch.zeros(0, 3, dtype=torch.int64),
    ):
        out = torch.empty(*ids.shape, 6)
        assert_same_bits(scaled_embedding(ids, weight, out=out), scaled_embedding(ids, weight), "rows")
        assert_same_bits(embed(ids, weight, out=out), embed(ids, weight), "embed")
        assert_same_bits(positional_encoding(ids, 6, out=out), positional_encoding(ids, 6), "PE")
    nothing = torch.empty(40).as_strided((0, 3, 0, 6), (1, 1, 1, 1))  # any strides will do for no elements
    assert embed(torch.zeros(0, 3, 0, dtype=torch.int64), weight, out=nothing) is nothing
    out = torch.empty(5, 6, dtype=torch.float64)
    assert_same_bits(positional_encoding(5, 6, out=out), positional_encoding(5, 6, dtype=torch.float64), "length")


def x_in_place():
    return {
        "packed": torch.randn(3, 5, 37),
        "columns": torch.randn(3, 5, 80)[..., 3:40],
        "transposed": torch.randn(5, 3, 37).transpose(0, 1),
        "every second token": torch.randn(3, 10, 37)[:, ::2],
        "many tiles": torch.randn(2, 3, 1035),
        "large": torch.randn(4, 300, 1030),  # above 4 MiB
    }


@pytest.mark.parametrize("name", x_in_place())
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_in_place(name, dtype):
    start = x_in_place()[name].to(dtype)
    for batch_first in (True, False):
        want = add_positional_encoding(start, batch_first=batch_first)
        x = torch.empty_strided(start.shape, x_in_place()[name].stride(), dtype=dtype).copy_(start)
        address = x.data_ptr()
        assert add_positional_encoding(x, batch_first=batch_first, out=x) is x
        assert x.data_ptr() == address
        assert_same_bits(x, want, name)


def test_a_gradient_is_wanted_elsewhere_only():
    """A tensor that needs a gradient may take part where none is recorded."""
    weight = torch.randn(9, 6, requires_grad=True)
    ids, out = torch.randint(9, (2, 3)), torch.empty(2, 3, 6)
    with torch.no_grad():
        assert_same_bits(embed(ids, weight, out=out), embed(ids, weight), "embed")
    assert not out.requires_grad


@pytest.mark.parametrize("source", SOURCES)
def test_writing_is_seen_by_autograd(source):
    """What was saved for a backward pass and then overwritten must be noticed, as with every in-place operation."""
    leaf, saved = torch.randn(*SHAPE, 6, requires_grad=True), torch.randn(*SHAPE, 6)
    loss = (leaf * saved).sum()
    arguments(source, torch.float32, 6)(out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- refusals --------------------------------------------------------------------------------------------------------


def bad_outs():
    """(name, out for a result [3, 5, 8] in fp32, what the message says of it)."""
    return [
        ("too short", torch.full((3, 4, 8), 7.0), ["out", "must have shape [3, 5, 8]", "got [3, 4, 8]"]),
        ("too wide", torch.full((3, 5, 9), 7.0), ["out", "must have shape [3, 5, 8]", "got [3, 5, 9]"]),
        ("too flat", torch.full((15, 8), 7.0), ["out", "must have shape [3, 5, 8]", "got [15, 8]"]),
        ("too deep", torch.full((1, 3, 5, 8), 7.0), ["out", "must have shape [3, 5, 8]", "got [1, 3, 5, 8]"]),
        ("broadcastable", torch.full((1, 1, 8), 7.0), ["out", "must have shape [3, 5, 8]", "got [1, 1, 8]"]),
        ("empty", torch.full((0,), 7.0), ["out", "must have shape [3, 5, 8]", "got [0]"]),
        ("expanded", torch.full((1, 5, 8), 7.0).expand(3, 5, 8), ["out", "must not overlap itself", "[0, 8, 1]"]),
        ("one token", torch.full((3, 1, 8), 7.0).expand(3, 5, 8), ["out", "must not overlap itself", "[8, 0, 1]"]),
        ("one column", torch.full((3, 5, 1), 7.0).expand(3, 5, 8), ["out", "contiguous columns", "[5, 1, 0]"]),
        ("every second column", torch.full((3, 5, 16), 7.0)[..., ::2], ["out", "contiguous columns", "[80, 16, 2]"]),
        ("columns first", torch.full((3, 8, 5), 7.0).transpose(1, 2), ["out", "contiguous columns", "[40, 1, 5]"]),
        (
            "rows that overlap",
            torch.full((200,), 7.0).as_strided((3, 5, 8), (20, 4, 1)),
            ["out", "must not overlap itself"],
        ),
        # Sequence 1 starts inside sequence 0.
        (
            "sequences that overlap",
            torch.full((200,), 7.0).as_strided((3, 5, 8), (8, 8, 1)),
            ["out", "must not overlap itself"],
        ),
    ]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("name", "out", "words"), bad_outs(), ids=lambda v: v if isinstance(v, str) else "")
def test_refuses(source, name, out, words):
    function = arguments(source, torch.float32, 8)
    before = out.untyped_storage().tolist()
    with pytest.raises(ValueError, match=message("posenc_ext::", *words)):
        function(out=out)
    assert out.untyped_storage().tolist() == before


def test_refuses_batch_axes_without_one_stride():
    """Two batch axes that no single stride walks along; the same with one of them is fine."""
    ids, weight, buffer = torch.randint(9, (2, 3, 4)), torch.randn(9, 8), torch.full((2, 5, 4, 8), 7.0)
    out = buffer[:, :3]
    with pytest.raises(
        ValueError, match=message("batch axes of out must be walkable with one stride", "[160, 32, 8, 1]")
    ):
        embed(ids, weight, out=out)
    assert (buffer == 7).all()
    assert_same_bits(embed(ids[0], weight, out=out[0]), embed(ids[0], weight), "one batch axis")


@pytest.mark.parametrize("source", ["embed", "add"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_refuses_another_dtype(source, dtype):
    function = arguments(source, dtype, 8)
    other = torch.float64 if dtype == torch.float32 else torch.float32
    words = {torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16", torch.float16: "Half"}
    out = torch.full((*SHAPE, 8), 7.0, dtype=other)
    with pytest.raises(ValueError, match=message("out must have dtype", words[dtype], "got", words[other])):
        function(out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool], ids=name_of)
def test_refuses_a_dtype_that_holds_no_waves(dtype):
    for source in SOURCES:
        out = torch.ones((*SHAPE, 8), dtype=dtype)
        with pytest.raises(ValueError, match=message("out", "dtype", "got")):
            arguments(source, torch.float32, 8)(out=out)
        assert (out == 1).all()


def overlapping():
    """(name, call, tensors that must stay as they are, the input named)."""
    table, line = torch.randn(16, 8), torch.randn(15)
    ids = torch.zeros(3, 5, dtype=torch.int64)
    numbers = torch.randint(4, (3, 5, 8))
    x = torch.randn(4, 5, 8)
    wide_x = torch.randn(3, 5, 20)
    as_floats = numbers.view(torch.float64)
    same_bytes = numbers[..., 0].contiguous()
    column = torch.zeros(3, 5, 1, dtype=torch.int64)
    return [
        ("its table", lambda: embed(ids[:, :2], table, out=table[4:10].view(3, 2, 8)), table, "weight"),
        (
            "its first number",
            lambda: scaled_embedding(ids[0, :1], line[7:15].view(1, 8), out=line[:8].view(1, 8)),
            line,
            "weight",
        ),
        (
            "its last number",
            lambda: scaled_embedding(ids[0, :1], line[:8].view(1, 8), out=line[7:15].view(1, 8)),
            line,
            "weight",
        ),
        ("a row of its table", lambda: embed(ids[0, :1], table[:1], out=table[:1]), table, "weight"),
        ("all but the last byte", lambda: scaled_embedding(ids[0, :1], table[:2], out=table[1:2]), table, "weight"),
        ("its ids", lambda: embed(numbers[..., 0], torch.randn(9, 8).double(), out=as_floats), numbers, "input"),
        (
            "its positions",
            lambda: embed(same_bytes, torch.randn(9, 8).double(), positions=numbers[..., 1], out=as_floats),
            numbers,
            "positions",
        ),
        ("positions of PE", lambda: positional_encoding(numbers[..., 1], 8, out=as_floats), numbers, "positions"),
        (
            "positions of width 1",
            lambda: positional_encoding(column[..., 0], 1, out=column.view(torch.float64)),
            column,
            "positions",
        ),
        (
            "positions of add",
            lambda: add_positional_encoding(as_floats.clone(), positions=numbers[..., 1], out=as_floats),
            numbers,
            "positions",
        ),
        ("x moved by a row", lambda: add_positional_encoding(x[:3], out=x[1:]), x, "x"),
        ("x of other strides", lambda: add_positional_encoding(x[:, :4, :4].transpose(0, 1), out=x[:, :4, :4]), x, "x"),
        ("x moved by a column", lambda: add_positional_encoding(wide_x[..., :8], out=wide_x[..., 1:9]), wide_x, "x"),
    ]


@pytest.mark.parametrize(
    ("name", "call", "tensor", "word"), overlapping(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_refuses_to_overwrite(name, call, tensor, word):
    before = tensor.clone()
    with pytest.raises(ValueError, match=message("out must not share memory with", word)):
        call()
    assert_same_bits(tensor, before, name)


@pytest.mark.parametrize("source", ["embed", "add"])
def test_refuses_where_a_gradient_is_needed(source):
    out = torch.full((*SHAPE, 8), 7.0)
    if source == "embed":
        call = functools.partial(embed, torch.randint(9, SHAPE), torch.randn(9, 8, requires_grad=True))
    else:
        call = functools.partial(add_positional_encoding, torch.randn(*SHAPE, 8, requires_grad=True))
    with pytest.raises(ValueError, match=message("out= is not differentiable", "requires a gradient", "no_grad")):
        call(out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("source", SOURCES)
def test_refuses_an_out_that_needs_a_gradient(source):
    """As every out= of torch does: what is written there has no history, and what was there had."""
    out = torch.full((*SHAPE, 8), 7.0, requires_grad=True)
    with pytest.raises((ValueError, RuntimeError), match=r"gradient|requires.grad"):
        arguments(source, torch.float32, 8)(out=out)
    assert (out == 7).all()


def test_bad_ids_leave_out_as_it_was():
    out = torch.full((2, 3, 8), 7.0)
    with pytest.raises(
        IndexError, match=message("posenc_ext::embed: input must hold ids in [0, 9)", "got 9 at input[1, 2]")
    ):
        embed(torch.tensor([[0, 1, 2], [3, 4, 9]]), torch.randn(9, 8), out=out)
    assert (out == 7).all()


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
    assert math.isfinite(x.sum())
