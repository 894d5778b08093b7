"""Ids out of range on a GPU: no device assert, no silent value, no wait on the usual path.

A row of NaN stands in its place, and the next call, or `posenc_ext.check_errors()`, raises the IndexError that
the CPU raises at once. These tests hold on a CPU as well, but for those about what comes before the exception.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import make
import pytest
import torch
from cuda_helpers import DEVICE, assert_refused, forget, gpu_only, settle, sleep
from helpers import assert_same_bits, message, run_code
from torch import Tensor

import posenc_ext
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

pytestmark = pytest.mark.cuda

ops = torch.ops.posenc_ext

V, D = 10, 8
BAD = (V, -1, 2**31 - 1, 2**32, 2**63 - 1, -(2**63))
RANGE = f"ids in [0, {V})"


@pytest.fixture(autouse=True)
def _no_error_is_left(device):
    yield
    forget()  # before the fixture `device` asks


def table(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return make.table(V, D, dtype=dtype, device=device, seed=1)


def ids(device: str, bad: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
    """[2, 3], with one out of range at [1, 1]."""
    return torch.tensor([[0, 1, 2], [3, 4 if bad is None else bad, 5]], dtype=dtype, device=device)


def assert_usable(device: str) -> None:
    """The context is alive and the values are right."""
    assert_same_bits(embed(ids(device), table(device)).cpu(), embed(ids("cpu"), table("cpu")))
    settle()


# Every way from ids to rows.
PATHS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "embed": lambda i, w: embed(i, w),
    "with padding_idx": lambda i, w: embed(i, w, padding_idx=3),
    "no encoding": lambda i, w: scaled_embedding(i, w),
    "positions": lambda i, w: embed(i, w, positions=torch.zeros_like(i)),
    "sequence first": lambda i, w: embed(i, w, batch_first=False),
    "needs a gradient": lambda i, w: embed(i, w.requires_grad_()),
    "max_norm": lambda i, w: embed(i, w, max_norm=0.1),
    "out": lambda i, w: embed(i, w, out=torch.empty(*i.shape, D, device=i.device)),
    "strided table": lambda i, w: embed(i, w.repeat_interleave(2, dim=1)[:, ::2]),
    "op": lambda i, w: ops.embed(w, i, None, 0, 1.0, *make.spec()),
}


@make.each("path", PATHS)
def test_the_error_names_op_range_and_id(device, path):
    for given in (*(ids(device, bad) for bad in BAD), *(ids(device, bad, torch.int32) for bad in (V, -1, -(2**31)))):
        words = "posenc_ext::embed: ", RANGE, given[1, 1].item()
        assert_refused(lambda i=given: path(i, table(device)), *words)
        assert_usable(device)


@make.each_dtype
@gpu_only
def test_the_row_is_nan_and_the_others_are_right(device, dtype):
    weight = table(device, dtype)
    for name in ("embed", "with padding_idx", "positions", "no encoding"):
        got, want = PATHS[name](ids(device, V), weight).cpu(), PATHS[name](ids("cpu"), table("cpu", dtype))
        assert got[1, 1].isnan().all(), name
        got[1, 1] = want[1, 1]
        assert_same_bits(got, want, name)
        forget()
    out = torch.zeros(2, 3, D, dtype=dtype, device=device)
    embed(ids(device, -1), weight, out=out)
    assert out[1, 1].isnan().all()
    assert not out[0].isnan().any()


@gpu_only
def test_the_next_call_raises(device):
    """Whichever op it is of; once, and then all is well again."""
    weight, x = table(device), torch.randn(2, 3, D, device=device)
    for call in (
        lambda: embed(ids(device), weight),
        lambda: embed(ids(device), weight, out=x),
        lambda: ops.embed_backward(x, ids(device), V, 1.0, -1, False),
        lambda: add_positional_encoding(x),
        lambda: positional_encoding(ids(device), D),
        posenc_ext.check_errors,
    ):
        embed(ids(device, V), weight)
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match=message("posenc_ext::embed: ", RANGE, V)):
            call()
        call()
        assert_usable(device)


@gpu_only
def test_a_forked_child(device):
    """It has no part in what its parent left."""
    embed(torch.tensor([V], device=device), torch.zeros(V, D, device=device))
    child = os.fork()
    if child == 0:
        try:
            posenc_ext.check_errors()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(IndexError, match=f"got {V}"):
        posenc_ext.check_errors()


@gpu_only
def test_check_errors_waits_for_what_is_queued(device):
    """The call itself does not: the kernel has not even started when it is asked."""
    given, weight, done = ids(device, V), table(device), torch.cuda.Event()
    embed(ids(device), weight)  # so that nothing is set up behind the sleep
    sleep()
    embed(given, weight)
    done.record()
    assert not done.query()
    with pytest.raises(IndexError, match=message("posenc_ext::embed: ", RANGE, V)):
        posenc_ext.check_errors()


def test_ids_out_of_range_in_a_long_batch(device):
    """One of them, or all, from every block at once: one is named."""
    weight = torch.randn(V, 64, device=device)
    for place in (0, 4095, 99_999, slice(None)):
        given = torch.zeros(100_000, dtype=torch.int64, device=device)
        given[place] = V + 5
        assert_refused(lambda g=given: embed(g, weight), "posenc_ext::embed: ", RANGE, V + 5)
        assert_usable(device)


def test_a_table_without_rows_has_no_ids(device):
    assert_refused(lambda: embed(ids(device), table(device)[:0]), "posenc_ext::embed: ", "ids in [0, 0)")


@make.each("op", ["embed_backward", "embed_backward_sparse"])
def test_backward(device, op):
    """Called with ids that no forward pass let through: nothing is written past the gradient's end."""
    call = getattr(ops, op)
    grad = torch.ones(2, 3, D, device=device)
    for bad in BAD:
        for flags in ((-1, False), (0, True)):
            words = (f"posenc_ext::{op}: ", RANGE, bad)
            assert_refused(lambda b=bad, f=flags: call(grad, ids(device, b), V, 1.0, *f), *words)
    assert_refused(lambda: call(grad, ids(device, V, torch.int32), V, 1.0, -1, False), f"posenc_ext::{op}: ", V)
    assert_refused(lambda: call(grad, ids(device), 0, 1.0, -1, False), f"posenc_ext::{op}: ", "ids in [0, 0)")
    assert_usable(device)


@make.dense_and_sparse
def test_a_training_step(device, sparse):
    """A loop ends in an IndexError, not in a wrong weight. Once the error is out, the next gradient is right."""

    def gradient(given: Tensor) -> Tensor:
        weight = table(given.device.type).requires_grad_()
        embed(given, weight, sparse=sparse).sum().backward()
        return weight.grad

    assert_refused(lambda: gradient(ids(device, V)), "posenc_ext::embed", RANGE, V)
    assert_usable(device)
    assert_same_bits(gradient(ids(device)).to_dense().cpu(), gradient(ids("cpu")).to_dense())


def test_max_norm_leaves_the_table_alone(device):
    """Torch's own kernel scales its rows, and would end the process with a device assert: ids are checked first."""
    for bad in BAD:
        weight = table(device)
        before = weight.clone()
        assert_refused(lambda b=bad, w=weight: embed(ids(device, b), w, max_norm=0.1), "posenc_ext::embed: ", RANGE)
        assert_same_bits(weight, before, "weight")
    module = posenc_ext.TransformerEmbedding(V, D, max_norm=0.1).to(device)
    assert_refused(lambda: module(ids(device, -1)), "posenc_ext::embed: ", RANGE, -1)
    assert_usable(device)


def test_compiled(device):
    torch.compiler.reset()
    compiled = torch.compile(lambda i, w: embed(i, w, padding_idx=3) * 2, backend="aot_eager", fullgraph=True)
    compiled(ids(device), table(device))
    for bad in (V, -4):
        assert_refused(lambda b=bad: compiled(ids(device, b), table(device)), "posenc_ext::embed: ", RANGE, bad)
    torch.compiler.reset()


@gpu_only
def test_replayed(device):
    """A graph that was captured with good ids and is fed one out of range."""
    given, weight = ids(device), table(device)
    embed(given, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = embed(given, weight)
    given.copy_(ids(device, V))
    graph.replay()
    with pytest.raises(IndexError, match=message("posenc_ext::embed: ", RANGE, V)):
        settle()
    assert out[1, 1].isnan().all()
    given.copy_(ids(device))
    graph.replay()
    settle()
    assert_same_bits(out.cpu(), embed(ids("cpu"), table("cpu")))


# ---- the synchronous mode --------------------------------------------------------------------------------------------

CHILD = f"""
import posenc_ext, torch
from posenc_ext.functional import embed
ops, device = torch.ops.posenc_ext, {DEVICE!r}
weight, good = torch.randn({V}, {D}, device=device), torch.tensor([1, 2], device=device)
bad, grad = torch.tensor([1, {V}], device=device), torch.ones(2, {D}, device=device)
for name, call in {{
    "embed": lambda: embed(bad, weight),
    "out": lambda: embed(bad, weight, out=grad.clone()),
    "max_norm": lambda: embed(bad, weight, max_norm=0.1),
    "embed_backward": lambda: ops.embed_backward(grad, bad, {V}, 1.0, -1, False),
    "embed_backward_sparse": lambda: ops.embed_backward_sparse(grad, bad, {V}, 1.0, -1, False),
}}.items():
    try:
        call()
        print(name, "nothing")
    except IndexError as error:
        print(name, error)
print("after", embed(good, weight).isfinite().all().item())
"""


def test_synchronous_mode(device, tmp_path):
    """POSENC_EXT_SYNC_ERRORS=1: the call itself raises, for those who look for the line that did it."""
    lines = run_code(CHILD, tmp_path, POSENC_EXT_SYNC_ERRORS="1").splitlines()
    found = dict(line.split(" ", 1) for line in lines)
    assert found.pop("after") == "True"
    assert set(found) == {"embed", "out", "max_norm", "embed_backward", "embed_backward_sparse"}
    for name, text in found.items():
        op = name if name.startswith("embed") else "embed"
        assert re.match(message(f"posenc_ext::{op}: ", RANGE, V), text), (name, text)
