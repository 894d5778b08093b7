"""Tables in parts: the ops that take one in a single process, and the forms and layers on several.

The checks of several processes are in distributed_checks.py. One job runs all of them, since its start takes longer.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import make
import pytest
import torch
from helpers import assert_refused, assert_same_bits, child, run_code
from make import V
from torch.autograd import forward_ad

from posenc_ext.functional import embed
from posenc_ext.ops import add, compose
from posenc_ext.ops import embed as embed_op
from posenc_ext.ops.call import EmbedCall

ops = torch.ops.posenc_ext

# ---- the ops ---------------------------------------------------------------------------------------------------------


def slices(width: int) -> list[tuple[int, int]]:
    """Columns [a, b), of none to all, that begin and end at every kind of place."""
    places = sorted({0, 1, 2, width // 2, width // 2 + 1, width - 1, width} & set(range(width + 1)))
    return list(itertools.combinations_with_replacement(places, 2))


@make.each("convention", make.every_combination())
@make.each_precision
def test_columns(convention, precision):
    """A slice of the columns is that slice of the result, whichever sines and cosines it cuts apart."""
    ids, spec = make.ids((2, 3)), convention.spec(precision)
    for dtype, width in itertools.product(make.DTYPES, (1, 2, 7, 8, 70)):
        table = make.table(V, width, dtype=dtype)
        rows = table[ids]
        wants = embed_op.run(EmbedCall(table, ids, None, -2, 1.5, *spec)), add.run(rows, None, -2, spec, 1.5)
        for a, b in slices(width):
            part, what = {"first_column": a, "d_model": width}, f"{dtype}, {a}:{b} of {width}"
            call = EmbedCall(table[:, a:b], ids, None, -2, 1.5, *spec)
            assert_same_bits(embed_op.run(call, part), wants[0][..., a:b], what)
            assert_same_bits(compose.embed(call, **part), wants[0][..., a:b], what)
            assert_same_bits(add.run(rows[..., a:b], None, -2, spec, 1.5, **part), wants[1][..., a:b], what)


ROWS = ((0, 4), (4, 4), (4, V), (V, V), (0, V), (V - 1, V))


@make.each_dtype
@make.each("width", [7, 64])
@make.each("shape", [(), (9,), (3, 5), (4, 80)])
def test_rows(dtype, width, shape):
    """Ids of other rows give -0, wherever the encoding comes from and however it is stored."""
    ids, table = make.ids(shape), make.table(V, width, dtype=dtype)
    positions = make.ids(shape, 90)
    conventions = ("vaswani", "marian", "tensor2tensor")
    for name, (first, end), given in itertools.product(conventions, ROWS, (None, positions)):
        spec = make.spec(name)
        call = EmbedCall(table, ids, given, 5, 1.5, *spec)
        want = embed_op.run(call).masked_fill(((ids < first) | (ids >= end)).unsqueeze(-1), -0.0)
        part = {"first_row": first, "total_rows": V}
        for form in (embed_op.run, lambda c, p: compose.embed(c, **p)):
            assert_same_bits(form(call._replace(weight=table[first:end]), part), want, f"{name}, {first}:{end}")


def test_rows_in_every_instruction_set(force_isa):
    """And stored past the cache."""
    from posenc_ext import _C

    ids, spec = make.ids((8, 1100)), make.spec()
    for dtype, isa in itertools.product(make.DTYPES, _C.available_isas()):
        force_isa(isa)
        table = make.table(V, 256, dtype=dtype)
        for given in (ids, ids.view(1, -1)) if isa != "baseline" else (ids[:1, :50],):
            call = EmbedCall(table, given, None, 0, 1.5, *spec)
            want = embed_op.run(call).masked_fill((given >= 6).unsqueeze(-1), -0.0)
            got = embed_op.run(call._replace(weight=table[:6]), {"first_row": 0, "total_rows": V})
            assert_same_bits(got, want, f"{dtype}, {isa}")


@make.each("padding_idx", [-1, 3])
@make.each("dtype", [torch.float32, torch.float64])
def test_gradients_of_rows(padding_idx, dtype):
    """The rows of the whole gradient; of a shard without any, none."""
    ids, table = make.ids((3, 5)), make.table(V, 6, dtype=dtype, grad=True)
    probe = make.x((3, 5, 6), dtype=dtype)
    spec = make.spec()
    (want,) = torch.autograd.grad(ops.embed(table, ids, None, 0, 1.5, *spec, padding_idx), table, probe)
    for first, end in ROWS:
        weight = table.detach()[first:end].requires_grad_()
        call = EmbedCall(weight, ids, None, 0, 1.5, *spec, padding_idx)
        result = embed_op.run(call, {"first_row": first, "total_rows": V})
        (got,) = torch.autograd.grad(result, weight, probe)
        assert_same_bits(got, want[first:end], f"{first}:{end}")
    empty = table.detach()[:, :0].requires_grad_()
    result = ops.embed_general(empty, ids, d_model=6)
    assert result.shape == (3, 5, 0)
    assert torch.autograd.grad(result, empty, probe[..., :0])[0].shape == (V, 0)


def test_derivatives_of_shards():
    ids, spec = make.ids((3, 5)), make.spec()
    part = {"first_row": 2, "total_rows": V, "first_column": 1, "d_model": 9}

    def function(weight: torch.Tensor) -> torch.Tensor:
        return embed_op.run(EmbedCall(weight, ids, None, 4, 1.5, *spec), part)

    weight = make.table(5, 4, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(function, weight, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, weight)
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(weight.detach(), torch.ones(5, 4, dtype=torch.float64)))
        tangent = forward_ad.unpack_dual(dual).tangent
    assert_same_bits(tangent, ((ids >= 2) & (ids < 7)).unsqueeze(-1).expand(3, 5, 4) * torch.tensor(1.5).double())


WEIGHT, IDS, X = make.table(5, 4), make.ids((2, 3), 5), make.x((2, 3, 4))
REFUSED: dict[str, tuple[Any, ...]] = {
    "rows past the end": (WEIGHT, IDS, {"first_row": 3, "total_rows": 7}, "first_row must lie in [0, 2], got 3"),
    "rows before the start": (WEIGHT, IDS, {"first_row": -1, "total_rows": 7}, "first_row must lie in [0, 2], got -1"),
    "rows of no whole": (WEIGHT, IDS, {"first_row": 1}, "first_row must lie in [0, 0], got 1"),
    "more rows than all": (WEIGHT, IDS, {"total_rows": 4}, "total_rows must be at least the 5 of this shard, got 4"),
    "columns past the end": (WEIGHT, IDS, {"first_column": 6, "d_model": 9}, "first_column must lie in [0, 5], got 6"),
    "columns of no whole": (WEIGHT, IDS, {"first_column": 1}, "first_column must lie in [0, 0], got 1"),
    "more columns than all": (WEIGHT, IDS, {"d_model": 3}, "d_model must be at least the 4 of this shard, got 3"),
    "no columns of none": (WEIGHT[:, :0], IDS, {"d_model": 0}, "the width (d_model) must be positive, got 0"),
    "sparse": (WEIGHT, IDS, {"total_rows": 7, "sparse": True}, "sparse is not supported for a shard (total_rows 7)"),
    "x, columns past the end": (X, {"first_column": 6, "d_model": 9}, "first_column must lie in [0, 5], got 6"),
    "x, more columns than all": (X, {"d_model": 3}, "d_model must be at least the 4 of this shard, got 3"),
}


@make.each("case", REFUSED)
def test_parts_of_nothing_are_refused(case):
    *tensors, keywords, words = case
    op = ops.embed_general if len(tensors) == 2 else ops.add_general
    assert_refused(lambda: op(*tensors, **keywords), f"posenc_ext::{op.__name__}: {words}")


@make.each("bad", [-1, V, 2**40, -(2**63)])
def test_ids_that_no_shard_has_are_refused(bad):
    given = torch.tensor([[1, bad], [2, 0]])
    for first, end in ROWS:
        part = {"first_row": first, "total_rows": V}
        call = EmbedCall(make.table()[first:end], given)
        words = f"embed_general: input must hold ids in [0, {V}), got {bad} at input[0, 1]"
        assert_refused(lambda c=call, p=part: embed_op.run(c, p), words, error=IndexError)
        assert_refused(lambda c=call, p=part: compose.embed(c, **p), "index out of range", error=IndexError)


def test_a_shard_under_compile():
    """What is asked of the op goes into the program."""
    ids = make.ids((2, 3))
    part = {"first_row": 2, "total_rows": V, "first_column": 3, "d_model": 12}

    def function(weight: torch.Tensor) -> torch.Tensor:
        return ops.embed_general(weight, ids, offset=3, **part) * 2

    weight = make.table(5, 6, grad=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(weight).detach(), function(weight).detach())
    probe = make.x((2, 3, 6))
    got, want = (torch.autograd.grad(f(weight), weight, probe)[0] for f in (compiled, function))
    assert_same_bits(got, want)


# ---- what other threads may see --------------------------------------------------------------------------------------


def test_a_sparse_gradient_is_marked_before_others_work_on_it():
    """DistributedDataParallel gives it to another thread in a hook of autograd's node, and coalesces it there."""
    weight, seen = make.table(grad=True), []
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(weight.grad.is_coalesced()))
    for _ in range(2):
        weight.grad = None
        embed(make.ids(), weight, sparse=True).sum().backward()
    assert seen == [True, True]
    assert not weight._post_accumulate_grad_hooks  # none of ours is left


# ---- several processes -----------------------------------------------------------------------------------------------

FILE = Path(__file__).with_name("distributed_checks.py")
NAMES = [line.split()[1].partition("(")[0] for line in FILE.read_text().split("@check\n")[1:]]


def run_job(processes: int, folder: Path) -> dict[str, list[str]]:
    """How each check ended in each process."""
    settings = child(folder)
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, str(FILE), str(rank), str(processes), str(folder)], stdout=log, stderr=log, **settings
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in running:
            process.wait(timeout=600)
    finally:
        for process, log in zip(running, logs, strict=True):
            process.kill()
            log.close()
    ended: dict[str, list[str]] = {name: [] for name in NAMES}
    for rank in range(processes):
        text, path = (folder / f"{rank}.log").read_text()[-3000:], folder / f"{rank}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for name in NAMES:
            ended[name].append(found.get(name, f"process {rank} did not come to it\n{text}"))
    return ended


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Call it with a number of processes."""
    done: dict[int, dict[str, list[str]]] = {}

    def job(processes: int) -> dict[str, list[str]]:
        if processes not in done:
            done[processes] = run_job(processes, tmp_path_factory.mktemp(f"of_{processes}"))
        return done[processes]

    return job


needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)


@needs_gloo
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@make.each("name", NAMES)
def test_on(processes, name, jobs):
    failures = [text for text in jobs(processes)[name] if text]
    assert not failures, "\n".join(failures)


def test_import_leaves_dtensor_alone(tmp_path):
    """It takes a second, and most programs have none."""
    code = "import sys, posenc_ext; print('torch.distributed.tensor' in sys.modules)"
    assert run_code(code, tmp_path) == "False\n"


def test_a_dtensor_needs_no_import_of_ours():
    """Plain tensors are plain in a process that has DTensors, too."""
    pytest.importorskip("torch.distributed.tensor")
    table, ids = make.table(), make.ids()
    assert type(embed(ids, table)) is torch.Tensor
