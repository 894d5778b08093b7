"""Equal bits: a value depends on its id, position, column and spec, and on nothing about how it was computed."""

import os
from pathlib import Path

import make
import pytest
import torch
from helpers import assert_same_bits, bits, in_every_isa, message

from posenc_ext import _C, Convention
from posenc_ext.conventions import LAYOUTS
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

THREADS = (1, 2, 3, 7)
STREAM_BYTES = 4 << 20  # from this size on, stores bypass the cache


# ---- what is computed ------------------------------------------------------------------------------------------------


def forward_cases(dtype, large):
    """(name, call): all sources, positions shared by a batch or not, layouts; below or above the size for streaming."""
    width, length = 515, 30
    batch = STREAM_BYTES // (length * width * dtype.itemsize) + 1 if large else 9
    rows = torch.randn(50, width).to(dtype)
    ids = torch.randint(50, (batch, length))
    x = torch.randn(length, width).to(dtype)[torch.randint(length, (batch, length))]
    positions = torch.randint(-(2**40), 2**40, (batch, length))
    assert large == (x.numel() * x.element_size() >= STREAM_BYTES)
    size = {"dtype": dtype}
    cases = [
        ("embed", lambda: embed(ids, rows)),
        ("embed, positions, tensor2tensor", lambda: embed(ids, rows, positions=positions, convention="tensor2tensor")),
        ("embed, positions that repeat", lambda: embed(ids, rows, positions=positions % 50)),
        ("embed, sequence first, exact", lambda: embed(ids, rows, batch_first=False, precision="exact", offset=2**33)),
        ("add, musicgen", lambda: add_positional_encoding(x, convention="musicgen", offset=-3)),
        ("add, positions", lambda: add_positional_encoding(x, positions=positions, precision="exact")),
        ("PE", lambda: positional_encoding(positions, width, **size)),
        ("PE, exact", lambda: positional_encoding(positions, width, precision="exact", **size)),
        ("rows", lambda: scaled_embedding(ids, rows)),
    ]
    return [cases[0], cases[2], cases[4], cases[6]] if large else cases


def backward_cases(dtype):
    """(name, call): spread ids, hot ones, both, few rows and many; more and less than the size for streaming."""

    def case(name, ids, rows, width, **kwargs):
        grad = torch.randn(len(ids), width).to(dtype)

        def call(sparse):
            weight = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
            out = embed(ids, weight, sparse=sparse, **kwargs)
            (got,) = torch.autograd.grad(out, weight, grad)
            return got._values() if sparse else got

        return [(name, lambda: call(False)), (f"{name}, sparse", lambda: call(True))]

    mixed = torch.randint(1000, (3000,))
    mixed[torch.randperm(3000)[:1500]] = 17
    large = STREAM_BYTES // (67 * dtype.itemsize) + 1
    return [
        *case("uniform", torch.randint(1000, (3000,)), 1000, 130),
        *case("half hot", mixed, 1000, 130),
        *case("all hot", torch.full((1000,), 5), 9, 515, scale_grad_by_freq=True),
        *case("four hot", torch.randint(4, (3000,)), 4, 67, padding_idx=1),
        case("large table", torch.cat([torch.randint(large, (500,)), torch.tensor([0, large - 1])]), large, 67)[0],
    ]


def computed(cases):
    return [(name, call().detach().clone()) for name, call in cases]


def assert_all_same(cases, want, what):
    for (name, call), (_, expected) in zip(cases, want, strict=True):
        assert_same_bits(call(), expected, f"{name}, {what}")


# ---- threads, instruction sets, repeats ------------------------------------------------------------------------------


@make.each_dtype
@pytest.mark.parametrize("what", ["forward", "forward, large", "backward"])
def test_threads_and_instruction_sets(what, dtype, threads, force_isa):
    cases = backward_cases(dtype) if what == "backward" else forward_cases(dtype, large=what != "forward")
    threads(1)
    force_isa("baseline")
    want = computed(cases)
    for isa in _C.available_isas():
        force_isa(isa)
        assert _C.active_isa() == isa
        assert_all_same(cases, want, f"1 thread, {isa}")
    force_isa(_C.available_isas()[0])
    for count in (*THREADS[1:], THREADS[1]):  # the last one repeats
        threads(count)
        assert_all_same(cases, want, f"{count} threads")


def test_cases_are_worth_comparing():
    """Their results are finite and not all alike; the sizes are those that the cases are named for."""
    results = computed(forward_cases(torch.bfloat16, large=False) + backward_cases(torch.bfloat16))
    for name, result in results:
        assert result.isfinite().all(), name
        assert result.reshape(-1)[:: max(1, result.numel() // 1000)].unique().numel() > 5, name
    assert dict(results)["large table"].nbytes >= STREAM_BYTES


@make.each_precision
@make.each_layout
def test_encoding_in_every_instruction_set(precision, layout, force_isa):
    """Each way of reducing an angle, in each place of a vector."""
    options = {"precision": precision, "convention": Convention(layout=layout)}
    for width in (1, 2, 3, 30, 33, 67):
        positions = make.positions_of_every_size()
        in_every_isa(force_isa, lambda w=width, p=positions: positional_encoding(p, w, **options), f"width {width}")


@make.each_half
@pytest.mark.parametrize("isa", _C.available_isas())
@make.each("scale", [1.0, 1.5 * 2.0**-14, *(pytest.param(s, marks=pytest.mark.slow) for s in (-0.3, 1e-5, 2.0**100))])
def test_every_16_bit_number_is_read_and_rounded_as_torch_does_it(isa, dtype, scale, force_isa):
    force_isa(isa)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    nan = every.isnan()
    want = (every.float() * scale).to(dtype)
    # In vectors, and in rows that fill none.
    for table in (every.view(64, 1024), every[:-1].view(-1, 3)):
        got = scaled_embedding(torch.arange(len(table)), table, token_scale=scale).view(-1)
        number = ~nan[: len(got)]
        assert_same_bits(got[number], want[: len(got)][number], f"width {table.shape[1]}")
        assert got[~number].isnan().all()


@make.each_half
def test_nans_have_one_pattern_in_every_instruction_set(dtype, force_isa):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    table = every[every.isnan()].view(-1, 1)
    for view in (table, table[:64].view(2, 32), table[: 7 * 9].view(9, 7)):
        in_every_isa(force_isa, lambda v=view: scaled_embedding(torch.arange(len(v)), v, token_scale=1.0))


@pytest.mark.parametrize("base", [1e4, 1e30, 1e42])
@make.each_precision
@pytest.mark.parametrize("batch", [1, 3])
def test_subnormal_sums(base, precision, batch, force_isa):
    """Where a sine is 0 or smaller than any normal number, what is left is the row, down to the last subnormal one."""
    tiny = torch.arange(1, 97, dtype=torch.int16).view(torch.bfloat16)
    table = torch.cat([tiny, -tiny, tiny * 2.0**100]).view(3, 96)
    ids = torch.arange(12).remainder(3).repeat(batch, 1)
    for layout in LAYOUTS:
        options = {"convention": Convention(layout=layout, base=base, precision=precision), "token_scale": 1.0}
        want = in_every_isa(force_isa, lambda o=options: embed(ids, table, **o), layout)
        assert (want.float().abs() < 2.0**-126).logical_and(want != 0).any()


@make.each_dtype
@make.each_precision
@pytest.mark.parametrize("width", [32, 96, pytest.param(2048, marks=pytest.mark.slow), 2112])
def test_one_sequence_is_what_its_positions_say(dtype, precision, width, threads):
    """Positions that follow one another may be reached step by step, others are not."""
    rows = torch.randn(7, width).to(dtype)
    for length in (3, 8, 65, 200):
        ids = torch.randint(7, (1, length))
        for offset in (0, 5, -4, 2**31 - 3, 2**32 - 100, 2**32 - 8, 2**32 + 1):
            positions = torch.arange(length) + offset
            want = embed(ids.view(length, 1), rows, positions=positions.view(length, 1), precision=precision)
            for count in (1, 2):
                threads(count)
                got = embed(ids, rows, offset=offset, precision=precision)
                assert_same_bits(got.view_as(want), want, f"{length} from {offset}")


@pytest.mark.parametrize("isa", _C.available_isas())
def test_subnormal_halves_where_subnormal_floats_are_flushed(isa, force_isa):
    """torch.set_flush_denormal is about fp32; a half below 2^-14 is a normal fp32 number and must not be lost."""
    force_isa(isa)
    halves = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormal numbers")
    try:
        got = scaled_embedding(torch.tensor([0]), halves[None], token_scale=1.0)[0]
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, halves, isa)


# ---- batches and steps -----------------------------------------------------------------------------------------------


@make.each_dtype
@make.each_precision
def test_a_batch_is_its_rows_and_a_sequence_its_steps(dtype, precision):
    weight = torch.randn(50, 131).to(dtype)
    ids = torch.randint(50, (4, 9))
    options = {"precision": precision, "convention": "fairseq"}

    def results(part, offset):
        encoding = positional_encoding(part.shape[-1], 131, offset=offset, dtype=dtype, **options)
        added = add_positional_encoding(weight[part], offset=offset, **options)
        return embed(part, weight, offset=offset, **options), added, encoding.expand_as(added)

    whole = results(ids, 5)
    parts = {f"row {row}": (ids[row], 5, row) for row in range(4)}
    parts.update({f"step {i}": (ids[:, i : i + 1], 5 + i, (slice(None), slice(i, i + 1))) for i in range(9)})
    for name, (part, offset, place) in parts.items():
        for source, got, want in zip(("embed", "add", "PE"), results(part, offset), whole, strict=True):
            assert_same_bits(got, want[place], f"{source}, {name}")
    token = embed(ids[2, 3], weight, positions=torch.tensor(5 + 3 + 2), **options)
    assert_same_bits(token, whole[0][2, 3], "one token")


@make.each_dtype
@make.each_precision
def test_any_part_of_a_batch_may_be_a_threads(dtype, precision, threads):
    """Parts that begin and end within rows, of one row or of several; rows in one part, and alone."""
    width, weight = 2050, torch.randn(50, 2050).to(dtype)
    for shape in ((2, 90), (3, 47), (5, 30), (11, 9), (40, 3), (150, 1)):
        ids = torch.randint(50, shape)
        options = {"offset": 3, "precision": precision}
        want = torch.stack([embed(row, weight, **options) for row in ids])
        for count in (1, 2, 3, 5):
            threads(count)
            assert_same_bits(embed(ids, weight, **options), want, f"{shape}, {count} threads")
            added = add_positional_encoding(torch.zeros(*shape, width, dtype=dtype), **options)
            assert_same_bits(added[-1], added[0], f"{shape}, {count} threads, rows")
            transposed = embed(ids.t(), weight, batch_first=False, **options)
            assert_same_bits(transposed.transpose(0, 1), want, f"{shape}, {count} threads, sequence first")


def repeated_positions(batch, length):
    """Positions of which many are alike: name, positions. Each is met by several rows, or by one more than once."""
    index = torch.arange(length)
    pads = torch.randint(length // 2, (batch, 1))
    return {
        "alike": index.repeat(batch, 1),
        "padded on the left": (index - pads).clamp(min=-1),
        "packed": (index % (length // 3)).repeat(batch, 1),
        "offsets": torch.arange(batch).unsqueeze(1) + index - 2,
        "far ones": torch.randint(5, (batch, length)) * 2**40 - 2**41,
        "fractions": torch.randint(9, (batch, length)) * 0.37 - 1,
        "one": torch.full((batch, length), 7),
        "half are alike": torch.randint(batch * length // 2 - 20, (batch, length)),
    }


@make.each_dtype
@pytest.mark.parametrize("width", [258, 515, 1200, 4500])
def test_positions_that_repeat(dtype, width, threads):
    """Tokens that share a position share its encoding, whatever their order; each has what it has alone."""
    weight = torch.randn(50, width).to(dtype)
    shape = (8, 18 if width > 1000 else 40)
    ids = torch.randint(50, shape)
    for convention in ("vaswani", "fairseq"):
        for name, positions in repeated_positions(*shape).items():
            options = {"convention": convention, "padding_idx": 3, "at_padding": "no_encoding"}
            alone = [
                [embed(ids[b, t], weight, positions=positions[b, t], **options) for t in range(shape[1])]
                for b in range(shape[0])
            ]
            want = torch.stack([torch.stack(row) for row in alone])
            for count in (1, 3):
                threads(count)
                assert_same_bits(embed(ids, weight, positions=positions, **options), want, f"{name}, {count}")
                flat = embed(ids.flatten(), weight, positions=positions.flatten(), **options)
                assert_same_bits(flat.view_as(want), want, f"{name}, in one row, {count}")
                turned = embed(ids.t(), weight, positions=positions.t(), batch_first=False, **options)
                assert_same_bits(turned.transpose(0, 1), want, f"{name}, sequence first, {count}")


@pytest.mark.parametrize("width", [64, 131])
def test_the_place_in_a_batch_does_not_matter(width):
    """One token at every place of a flat batch, whatever stands around it."""
    weight = torch.randn(50, width)
    positions, ids = torch.randint(3000, (200,)), torch.randint(50, (200,))
    want = embed(ids, weight, positions=positions)
    order = torch.randperm(200)
    assert_same_bits(embed(ids[order], weight, positions=positions[order]), want[order], "reordered")
    one = torch.stack([embed(i, weight, positions=p) for i, p in zip(ids, positions, strict=True)])
    assert_same_bits(one, want, "alone")


@make.each_dtype
def test_columns_do_not_depend_on_where_the_output_lies(dtype):
    """Outputs that start anywhere in a line of memory, in plain stores and in those that bypass the cache."""
    weight = torch.randn(50, 101).to(dtype)
    for tokens in (30, 22_000):
        ids = torch.randint(50, (tokens,))
        want = embed(ids, weight)
        buffer = torch.empty(tokens * 101 + 64, dtype=dtype)
        for start in (0, 1, 3, 7, 32) if tokens == 30 else (1, 7):
            view = buffer[start : start + tokens * 101].view(tokens, 101)
            assert_same_bits(embed(ids, weight, out=view), want, f"{tokens} tokens from {start}")


@make.each_dtype
@pytest.mark.parametrize("source", ["embed", "embed, positions", "add", "PE"])
def test_streaming_stores_and_plain_ones(source, dtype):
    """The whole, above 4 MiB, against parts far below it; the last sequence and the first are in other parts."""
    length, width = 60, 517  # odd: rows start at every alignment
    weight = torch.randn(50, width).to(dtype)
    batch = STREAM_BYTES // (length * width * weight.element_size()) + 1
    ids = torch.randint(50, (batch, length))
    positions = torch.randint(5000, (batch, length)) if source != "embed" else None
    x = weight[ids[:, :1]].expand(batch, length, width)

    def call(rows):
        if source == "PE":
            return positional_encoding(positions[rows], width, dtype=dtype)
        if source == "add":
            return add_positional_encoding(x[rows])
        return embed(ids[rows], weight, positions=None if positions is None else positions[rows])

    whole = call(slice(None))
    assert whole.numel() * whole.element_size() >= STREAM_BYTES
    for first in range(0, batch, 5):
        part = call(slice(first, first + 5))
        assert part.numel() * part.element_size() < STREAM_BYTES
        assert_same_bits(whole[first : first + 5], part, f"sequences from {first}")


@make.each_dtype
def test_gradients_of_a_large_table_and_of_a_small_one(dtype):
    """Rows of a gradient above 4 MiB, and the same rows in one below it."""
    ids, width = torch.randint(40, (400,)), 131
    grad = torch.randn(400, width).to(dtype)
    small = torch.ops.posenc_ext.embed_backward(grad, ids, 40, 1.5, -1, False)
    rows = STREAM_BYTES // (width * grad.element_size()) + 41
    large = torch.ops.posenc_ext.embed_backward(grad, ids, rows, 1.5, -1, False)
    assert large.nbytes >= STREAM_BYTES
    assert_same_bits(large[:40], small, "first rows")
    moved = torch.ops.posenc_ext.embed_backward(grad, ids + rows - 40, rows, 1.5, -1, False)
    assert_same_bits(moved[-40:], small, "last rows")
    assert (bits(large[40:]) == 0).all()
    assert (bits(moved[:-40]) == 0).all()


# ---- threads are those of torch --------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_calls_start_no_threads_of_their_own(threads):
    threads(3)
    weight = torch.randn(2000, 256, requires_grad=True)
    ids = torch.randint(2000, (8, 100))

    def step():
        embed(ids, weight).sum().backward()
        add_positional_encoding(torch.zeros(8, 100, 256))
        positional_encoding(1000, 256)

    for _ in range(3):
        step()
    before = len(os.listdir("/proc/self/task"))
    for _ in range(100):
        step()
    assert len(os.listdir("/proc/self/task")) <= before


def test_an_unknown_instruction_set_is_refused():
    before = _C.active_isa()
    with pytest.raises(ValueError, match=message("available_isas()", "'sse9'")):
        _C.force_isa("sse9")
    assert _C.active_isa() == before
    assert before in _C.available_isas()
    assert _C.available_isas()[-1] == "baseline"
