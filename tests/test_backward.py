"""The weight gradient, dense and sparse."""

import functools
import json
import math
import operator

import make
import numpy as np
import pytest
import torch
from helpers import assert_close, assert_same_bits, dirty_memory, run_code, true_gradient, wide
from make import D, V

from posenc_ext.functional import add_positional_encoding, embed, scaled_embedding

ops = torch.ops.posenc_ext


def gradient(grad, ids, rows, *, sparse=False, **kwargs):
    """The gradient that a table of the dtype of `grad` gets through embed, out of memory that held NaNs before."""
    weight = torch.randn(rows, grad.shape[-1]).to(grad.dtype).requires_grad_()
    out = embed(ids, weight, sparse=sparse, **kwargs)
    dirty_memory(weight.numel(), weight.numel() // 2, weight.numel() * 2)
    (got,) = torch.autograd.grad(out, weight, grad)
    assert got.dtype == grad.dtype
    assert got.shape == weight.shape
    assert got.is_sparse == sparse
    if sparse:
        assert_coalesced(got)
        return got.to_dense()
    assert got.is_contiguous()
    return got


def assert_coalesced(sparse):
    assert sparse.is_coalesced()
    rows = sparse._indices()[0]
    assert (rows[1:] > rows[:-1]).all(), "rows must be sorted and unique"


def assert_right(got, grad, ids, rows, scale, padding_idx=-1, by_frequency=False, what=""):
    want, bound = true_gradient(grad, ids, rows, scale, padding_idx, by_frequency)
    assert_close(got, want, bound, what)
    used = torch.zeros(rows, dtype=torch.bool)
    used[ids.long().reshape(-1)] = True
    if padding_idx >= 0:
        used[padding_idx] = False
    assert_same_bits(got[~used], torch.zeros_like(got[~used]), f"{what}, rows not used")  # positive zeros


def assert_both_right(grad, ids, rows, scale, **kwargs):
    dense = gradient(grad, ids, rows, **kwargs)
    assert_right(dense, grad, ids, rows, scale, what=f"{rows} rows")
    assert_same_bits(gradient(grad, ids, rows, sparse=True, **kwargs), dense, f"{rows} rows, sparse")


# ---- against sums in double precision --------------------------------------------------------------------------------


@make.each_dtype
@make.each("width", make.WIDTHS)
def test_widths(dtype, width):
    ids = torch.randint(12, (4, 9))
    grad = torch.randn(4, 9, width).to(dtype)
    assert_both_right(grad, ids, 20, math.sqrt(width))


@make.each_dtype
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 129, 1000, 4097])
def test_token_counts(dtype, tokens):
    grad = torch.randn(tokens, 9).to(dtype)
    for rows in (1, 7, 300):
        assert_both_right(grad, torch.randint(rows, (tokens,)), rows, 0.7, token_scale=0.7)


def id_patterns(tokens, rows):
    half = torch.randint(rows, (tokens,))
    half[torch.randperm(tokens)[: tokens // 2]] = 5
    return {
        "all equal": torch.full((tokens,), 3),
        "all equal, last row": torch.full((tokens,), rows - 1),
        "half equal": half,
        "two by turns": torch.arange(tokens) % 2 * (rows - 1),
        "ascending": torch.arange(tokens) * rows // tokens,
        "descending": (torch.arange(tokens) * rows // tokens).flip(0),
        "a third hot, first row": torch.randint(rows, (tokens,)) * (torch.arange(tokens) % 3 != 0),
    }


@make.each_dtype
@pytest.mark.parametrize("pattern", id_patterns(10, 6))
@pytest.mark.parametrize("tokens", [100, 5000])
def test_hot_ids(dtype, pattern, tokens):
    """More than a chunk of 64 tokens, and more than 4096, on one id; 140 columns are more than a thread takes of it."""
    ids = id_patterns(tokens, 50)[pattern]
    grad = torch.randn(tokens, 140).to(dtype)
    assert_both_right(grad, ids, 50, 1.5, token_scale=1.5)


@pytest.mark.parametrize("rows", [70_000, 300_000])
def test_tables_with_more_rows_than_fit_in_two_digits_of_the_sort(rows):
    ids = torch.cat([torch.randint(rows, (500,)), torch.tensor([0, rows - 1, 65535, 65536, 255, 256, 0, rows - 1])])
    grad = torch.randn(len(ids), 3)
    assert_right(gradient(grad, ids, rows), grad, ids, rows, math.sqrt(3))


@make.each_dtype
def test_sums_are_made_in_chunks_in_token_order(dtype):
    """The order is part of the definition: chunks of 64 tokens, each from left to right, added from left to right."""
    real = np.float64 if dtype == torch.float64 else np.float32
    ids = torch.randint(3, (700,))
    grad = torch.randn(700, 21).to(dtype)
    got = gradient(grad, ids, 3, token_scale=1.7)
    for row in range(3):
        values = grad[ids == row].to(wide(dtype)).numpy()
        chunks = [values[start : start + 64] for start in range(0, len(values), 64)]
        total = functools.reduce(operator.add, [functools.reduce(operator.add, chunk) for chunk in chunks])
        assert total.dtype == real
        assert_same_bits(got[row], torch.from_numpy(total * real(1.7)).to(dtype), f"row {row}")


# ---- gradients of every layout ---------------------------------------------------------------------------------------


@make.each_dtype
@make.each("name", make.VIEWS)
def test_grad_of_any_strides(name, dtype):
    grad, ids = make.views((4, 30), 37, dtype)[name], make.ids((4, 30), 6)
    got = ops.embed_backward(grad, ids, 9, 2.5, -1, False)
    assert_same_bits(got, ops.embed_backward(grad.contiguous(), ids, 9, 2.5, -1, False), name)
    rows, values = ops.embed_backward_sparse(grad, ids, 9, 2.5, -1, False)
    assert torch.equal(rows, ids.unique())
    assert_same_bits(values, got[rows], f"{name}, sparse")
    assert_right(got, grad, ids, 9, 2.5)


@make.each("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_ids_of_any_shape(shape, dtype):
    ids = torch.randint(6, shape).to(dtype)
    grad = torch.randn(*shape, 8)
    for batch_first in (True, False):
        assert_right(gradient(grad, ids, 9, batch_first=batch_first), grad, ids, 9, math.sqrt(8))
    if len(shape) > 1:
        view = ids.transpose(0, -1)
        grad = torch.randn(*view.shape, 8)
        assert_right(gradient(grad, view, 9), grad, view, 9, math.sqrt(8), what="transposed")


@make.each_dtype
def test_every_sample(dtype):
    for sample in make.samples("cpu", dtype, requires_grad=True):
        out = embed(sample.input, sample.weight, **sample.kwargs)
        grad = torch.randn(out.shape).to(dtype)
        (got,) = torch.autograd.grad(out, sample.weight, grad)
        scale = sample.kwargs.get("token_scale", math.sqrt(sample.weight.shape[1]))
        pad, by_frequency = sample.kwargs.get("padding_idx", -1), sample.kwargs.get("scale_grad_by_freq", False)
        assert_right(got, grad, sample.input, len(sample.weight), scale, pad, by_frequency, sample.name)


@make.dense_and_sparse
def test_uses_and_backward_passes_add_up(sparse):
    weight, first, second = make.table(grad=True), make.ids(5), make.ids((2, 4))
    for _ in range(2):
        other = embed(second, weight, sparse=sparse, convention="tensor2tensor")
        (embed(first, weight, sparse=sparse).sum() + other.sum()).backward()
    every = torch.cat([first, second.reshape(-1)]).repeat(2)
    assert_right(weight.grad.to_dense(), torch.ones(len(every), D), every, V, math.sqrt(D))


def test_nothing_to_differentiate():
    ids = torch.randint(9, (5,))
    assert not embed(ids, torch.randn(9, 6)).requires_grad
    with torch.no_grad():
        assert not embed(ids, torch.randn(9, 6, requires_grad=True)).requires_grad
    assert not add_positional_encoding(torch.randn(5, 6)).requires_grad


# ---- x + PE ----------------------------------------------------------------------------------------------------------


@make.each_dtype
def test_add_passes_the_gradient_on(dtype):
    x, grad = make.x(dtype=dtype, grad=True), make.x(dtype=dtype)
    for y in (add_positional_encoding(x, offset=3), ops.add_positional_encoding(x, None, 0, *make.spec())):
        assert_same_bits(torch.autograd.grad(y, x, grad)[0], grad, "grad")


# ---- flags -----------------------------------------------------------------------------------------------------------


@make.dense_and_sparse
@make.each_dtype
@pytest.mark.parametrize("padding_idx", [0, 4, -1, -10])
def test_padding_idx(sparse, dtype, padding_idx):
    """Its row gets exactly nothing, and every other row what it would get anyway."""
    ids = torch.randint(10, (256, 3, 7))
    grad = torch.randn(256, 3, 7, 5).to(dtype)
    got = gradient(grad, ids, 10, sparse=sparse, padding_idx=padding_idx)
    row = padding_idx % 10
    assert_right(got, grad, ids, 10, math.sqrt(5), padding_idx=row)
    assert_same_bits(got[row], torch.zeros(5, dtype=dtype), "row of the padding")
    whole = gradient(grad, ids, 10, sparse=sparse)
    others = torch.arange(10) != row
    assert_same_bits(got[others], whole[others], "other rows")


@make.dense_and_sparse
@make.each_dtype
def test_scale_grad_by_freq(sparse, dtype):
    ids = torch.randint(20, (40, 50))
    ids[ids > 15] = 2
    grad = torch.randn(40, 50, 9).to(dtype)
    got = gradient(grad, ids, 20, sparse=sparse, scale_grad_by_freq=True, padding_idx=3)
    assert_right(got, grad, ids, 20, 3.0, padding_idx=3, by_frequency=True)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_agrees_with_torch(padding_idx, by_frequency):
    ids = torch.randint(10, (4, 50))
    ours, theirs = (torch.zeros(10, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grad = torch.randn(4, 50, 6, dtype=torch.float64)
    flags = {"padding_idx": padding_idx, "scale_grad_by_freq": by_frequency}
    scaled_embedding(ids, ours, **flags).backward(grad)
    (torch.nn.functional.embedding(ids, theirs, **flags) * math.sqrt(6)).backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)


# ---- rows nobody used ------------------------------------------------------------------------------------------------


@make.each_dtype
@pytest.mark.parametrize("rows", [1, 5, 1000, 70_000])
def test_untouched_rows_are_positive_zeros(dtype, rows):
    """Out of memory that held NaNs, below and above the size from which on zeros bypass the cache."""
    for used in ([], [0], [rows // 2], [rows - 1]) if rows < 70_000 else ([], [rows - 1]):
        ids = torch.tensor(used, dtype=torch.int64)
        grad = torch.full((len(ids), 33), -1.0, dtype=dtype)
        got = gradient(grad, ids, rows, token_scale=2.0)
        want = torch.zeros(rows, 33, dtype=dtype)
        want[ids] = -2
        assert_same_bits(got, want, f"{ids.tolist()}")


@make.dense_and_sparse
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_tokens(sparse, shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    for rows in (0, 4):
        got = gradient(torch.zeros(*shape, 6), ids, rows, sparse=sparse)
        assert_same_bits(got, torch.zeros(rows, 6), f"{rows} rows")


def test_nan_stays_in_its_row():
    grad = torch.ones(200, 37)
    grad[3] = math.nan
    got = gradient(grad, torch.arange(200) % 5, 7, token_scale=1.0)
    assert got[3].isnan().all()
    assert (got[[0, 1, 2, 4]] == 40).all()
    assert (got[5:] == 0).all()


# ---- sparse ----------------------------------------------------------------------------------------------------------


@make.each_dtype
def test_sparse_is_coalesced_and_holds_the_dense_values(dtype):
    weight = torch.randn(1000, 6).to(dtype).requires_grad_()
    ids = torch.randint(1000, (7, 30))
    ids[0, :9] = 998
    grad = torch.randn(7, 30, 6).to(dtype)
    (got,) = torch.autograd.grad(embed(ids, weight, sparse=True), weight, grad)
    assert_coalesced(got)
    assert got._indices()[0].tolist() == sorted(set(ids.reshape(-1).tolist()))
    assert_same_bits(got._values(), gradient(grad, ids, 1000)[got._indices()[0]], "values")
    # In weight.grad the same numbers arrive, without the mark that they are coalesced: autograd drops it.
    embed(ids, weight, sparse=True).backward(grad)
    again = weight.grad.coalesce()
    assert torch.equal(again.indices(), got.indices())
    assert_same_bits(again.values(), got.values(), "coalesced once more")


@make.dense_and_sparse
def test_a_batch_of_padding_and_an_optimiser(sparse):
    weight = torch.nn.Parameter(torch.randn(6, 4))
    before = weight.detach().clone()
    optimiser = (torch.optim.SparseAdam if sparse else torch.optim.Adam)([weight], lr=0.1)
    embed(torch.full((2, 3), 1), weight, padding_idx=1, sparse=sparse).sum().backward()
    if sparse:
        assert weight.grad._nnz() == 0
    optimiser.step()
    assert_same_bits(weight, before, "weight")
    optimiser.zero_grad()
    embed(torch.tensor([[1, 3, 5]]), weight, padding_idx=1, sparse=sparse).sum().backward()
    optimiser.step()
    assert (weight != before).any(1).tolist() == [False, False, False, True, False, True]


# ---- the ops, called with what no forward pass would send ------------------------------------------------------------

# Each line: a name, which starts with "id" where an id is out of range, then the arguments (grad, input, num_weights,
# token_scale, padding_idx, scale_grad_by_freq).
CHILD = """
import json, torch, posenc_ext
ones, zeros = torch.ones, lambda *shape: torch.zeros(shape, dtype=torch.int64)
big = torch.iinfo(torch.int64).max
calls = {
    "id == V": (ones(3, 4), torch.tensor([0, 1, 5]), 5),
    "id far out": (ones(3, 4), torch.tensor([0, 1, big]), 5),
    "id -1": (ones(3, 4), torch.tensor([0, -1, 2]), 5),
    "id -2^63": (ones(3, 4), torch.tensor([0, -big - 1, 2]), 5),
    "id of int32": (ones(3, 4), torch.tensor([0, 7, -2], dtype=torch.int32), 5),
    "id without rows": (ones(3, 4), zeros(3), 0),
    "negative rows": (ones(3, 4), zeros(3), -1),
    "id at padding_idx": (ones(3, 4), torch.tensor([0, 1, 5]), 5, 1.0, 1, False),
    "padding_idx == V": (ones(3, 4), zeros(3), 5, 1.0, 5, False),
    "token axis too short": (ones(2, 4), zeros(3), 5),
    "token axis too long": (ones(4, 4), zeros(3), 5),
    "no column axis": (ones(3), zeros(3), 5),
    "one axis too many": (ones(3, 4, 2), zeros(3), 5),
    "scalar grad": (ones(()), zeros(3), 5),
    "scalar grad and id": (ones(()), zeros(), 5),
    "no columns": (ones(3, 0), zeros(3), 5),
    "no tokens of grad": (ones(0, 4), zeros(3), 5),
    "no tokens of ids": (ones(3, 4), zeros(0), 5),
    "other empty shape": (ones(0, 3, 4), zeros(3, 0), 5),
    "empty grad": (ones(0), zeros(3), 5),
    "float ids": (ones(3, 4), ones(3), 5),
    "bool ids": (ones(3, 4), ones(3, dtype=torch.bool), 5),
    "int grad": (zeros(3, 4), zeros(3), 5),
    "complex grad": (ones(3, 4, dtype=torch.complex64), zeros(3), 5),
}
result = {}
for op in ("embed_backward", "embed_backward_sparse"):
    for name, call in calls.items():
        call = call if len(call) == 6 else (*call, 1.0, -1, False)
        try:
            getattr(torch.ops.posenc_ext, op)(*call)
            result[op + ": " + name] = ["nothing", ""]
        except Exception as error:
            result[op + ": " + name] = [type(error).__name__, str(error)]
print(json.dumps(result))
"""


def test_bad_calls_raise_and_do_not_crash(tmp_path):
    """In a process of its own: what they must not do is take the process with them."""
    result = json.loads(run_code(CHILD, tmp_path).splitlines()[-1])
    assert len(result) == 2 * 24
    for name, (error, text) in result.items():
        op, _, case = name.partition(": ")
        assert error == ("IndexError" if case.startswith("id ") else "ValueError"), (name, text)
        assert text.startswith(f"posenc_ext::{op}: "), (name, text)
        assert "got" in text, (name, text)
