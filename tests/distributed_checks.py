"""What the processes of tests/test_distributed.py run: checks of shards, each beside the same in one process.

    python distributed_checks.py RANK WORLD FOLDER

Every check runs in all processes at the same time. The first one that fails ends them all, since the others would wait
for what never comes. FOLDER/RANK.json says how each ended.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import make
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from helpers import assert_refused, assert_same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import posenc_ext
from posenc_ext import reference
from posenc_ext.functional import (
    add_positional_encoding,
    embed,
    positions_from_cu_seqlens,
    positions_from_padding,
    positions_from_sequence_ids,
    scaled_embedding,
)

V, D, B, T = 11, 7, 3, 5  # no multiple of the processes; B is less than four of them
PLACEMENTS = (Replicate(), Shard(0), Shard(1))
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def meshes() -> Iterator[DeviceMesh]:
    world = dist.get_world_size()
    yield init_device_mesh("cpu", (world,))
    if world == 4:
        yield init_device_mesh("cpu", (2, 2))


def placed(mesh: DeviceMesh, kinds: tuple[Any, ...] = PLACEMENTS) -> Iterator[tuple[Any, ...]]:
    """Every placement of each mesh dimension."""
    return itertools.product(kinds, repeat=mesh.ndim)


def leaf(whole: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    return distribute_tensor(whole.detach().clone(), mesh, placements).requires_grad_(whole.requires_grad)


def gradient(result: Tensor, tensor: Tensor, again: bool = False) -> Any:
    """For an output gradient of small whole numbers: sums of them are exact in any order."""
    whole = result.full_tensor() if isinstance(result, DTensor) else result
    probe = torch.randint(-3, 4, whole.shape, generator=make.random(4)).to(whole.dtype)
    return torch.autograd.grad(whole, tensor, probe, retain_graph=again)[0]


def assert_same(got: Any, want: Tensor, placements: tuple[Any, ...] | None = None, what: str = "") -> None:
    assert isinstance(got, DTensor), what
    assert placements is None or got.placements == placements, f"{what}: {got.placements}"
    assert_same_bits(got.full_tensor(), want, what)


# ---- the functional forms --------------------------------------------------------------------------------------------


@check
def every_layout_and_dtype() -> None:
    """A table in parts of its rows or columns: the bits of one process."""
    ids = make.ids((B, T), V, seed=1)
    for mesh, convention, dtype in itertools.product(meshes(), make.every_combination(), make.DTYPES):
        table = make.table(V, D, dtype=dtype, seed=2)
        options = {"convention": convention, "offset": 3, "precision": "exact" if dtype.itemsize == 2 else "reference"}
        want = embed(ids, table, **options)
        for placements in placed(mesh):
            got = embed(ids, leaf(table, mesh, placements), **options)
            result = tuple({Shard(0): Partial(), Shard(1): Shard(2)}.get(p, p) for p in placements)
            assert_same(got, want, result, f"{convention.name}, {dtype}, {placements}")


@check
def shapes() -> None:
    """Fewer rows or columns than processes, one column for each, tiles that end inside a shard; ids of any shape."""
    for mesh, (rows, width) in itertools.product(meshes(), ((1, 1), (2, 5), (300, 2), (3, 1100))):
        table = make.table(rows, width, seed=2)
        for shape, placements in itertools.product(((), (6,), (2, 0), (2, 1, 3)), placed(mesh)):
            ids = make.ids(shape, rows, seed=1, dtype=torch.int32)
            for name in ("vaswani", "tensor2tensor"):
                options = {"convention": name, "positions": ids * 3}
                got = embed(ids, leaf(table, mesh, placements), **options)
                assert_same(got, embed(ids, table, **options), what=f"{rows}, {width}, {shape}, {placements}")


@check
def zeros_keep_their_sign() -> None:
    """So rows of other shards are -0: a sum with +0 would turn -0 into +0."""
    ids = torch.arange(4).view(2, 2)
    for mesh, dtype in itertools.product(meshes(), make.DTYPES):
        table = torch.tensor([[0.0], [-0.0], [1.0], [-1e-7]], dtype=dtype).expand(4, 8).contiguous()
        got = scaled_embedding(ids, leaf(table, mesh, (Shard(0),) * mesh.ndim), token_scale=0.1)
        assert_same(got, scaled_embedding(ids, table, token_scale=0.1), what=f"{dtype}")


@check
def large_batches() -> None:
    """Those that are stored past the cache, and those of one sequence."""
    (mesh, *_) = meshes()
    for shape, dtype in itertools.product(((1, 9000), (9, 1000)), (torch.float32, torch.bfloat16)):
        ids, table = make.ids(shape, V, seed=1), make.table(V, 128, dtype=dtype, seed=2)
        for placements in ((Shard(0),), (Shard(1),)):
            assert_same(embed(ids, leaf(table, mesh, placements)), embed(ids, table), what=f"{shape}, {placements}")


@check
def sharded_ids() -> None:
    """Shards of the batch and of the sequence, whose positions go on; with a table in parts as well."""
    ids, table = make.ids((B, T), V, seed=1), make.table(V, D, seed=2)
    positions = make.ids((T,), 90, seed=3)
    for mesh in meshes():
        for of_ids, of_table, batch_first in itertools.product(placed(mesh), placed(mesh), (True, False)):
            given, weight = distribute_tensor(ids, mesh, of_ids), leaf(table, mesh, of_table)
            rows = positions if batch_first else positions[:B]
            for options in ({}, {"offset": 4}, {"positions": rows}):
                options = {**options, "batch_first": batch_first}
                got = embed(given, weight, **options)
                assert_same(got, embed(ids, table, **options), what=f"{of_ids}, {of_table}, {options}")
        if mesh.ndim == 1:
            given = {"positions": distribute_tensor(ids * 2, mesh, (Shard(1),))}
            got = embed(distribute_tensor(ids, mesh, (Shard(0),)), weight, **given)
            assert_same(got, embed(ids, table, positions=ids * 2), what="positions")
            got = embed(distribute_tensor(ids, mesh, (Shard(0),)), leaf(table, mesh, (Replicate(),)))
            assert got.placements == (Shard(0),)


@check
def counted_positions() -> None:
    """Of ids in parts, placed as they are: shards of the batch know their offsets, those of a sequence count on."""
    ids, offsets = make.ids((B, T), 3, seed=1), make.ids((B,), 90, seed=2)
    for mesh in meshes():
        for placements, batch_first in itertools.product(placed(mesh), (True, False)):
            rows = ids if batch_first else ids.t().contiguous()
            given, what = distribute_tensor(rows, mesh, placements), f"{placements}, {batch_first}"
            for offset in (0, 4, torch.tensor(7), offsets, distribute_tensor(offsets, mesh, [Replicate()] * mesh.ndim)):
                got = positions_from_padding(given, 1, offset=offset, batch_first=batch_first)
                whole = offset.full_tensor() if isinstance(offset, DTensor) else offset
                want = positions_from_padding(rows, 1, offset=whole, batch_first=batch_first)
                assert_same(got, want, placements, what)
            got = positions_from_sequence_ids(given, batch_first=batch_first)
            assert_same(got, positions_from_sequence_ids(rows, batch_first=batch_first), placements, what)
        layer = make.layer(rows=V, width=D, padding_idx=1, count_padding=False)
        want = layer(ids)
        layer.lut.weight = nn.Parameter(leaf(layer.lut.weight, mesh, (Shard(0),) * mesh.ndim))
        assert_same(layer(ids), want.detach(), what="layer")
        starts = distribute_tensor(torch.tensor([0, 2, 5]), mesh, [Replicate()] * mesh.ndim)
        assert_refused(lambda s=starts: positions_from_cu_seqlens(s, 5), "cu_seqlens cannot be combined with a DTensor")


@check
def gradients() -> None:
    """They have the placements of the table, and are summed where ids are sharded."""
    ids, table = make.ids((B, T), V, seed=1), make.table(V, D, seed=2, grad=True)
    for mesh, padding_idx in itertools.product(meshes(), (None, int(ids[0, 0]), -1)):
        options = {"padding_idx": padding_idx, "token_scale": 2.0}
        want = gradient(embed(ids, table, **options), table)
        for of_ids, of_table in itertools.product(placed(mesh), placed(mesh)):
            weight = leaf(table, mesh, of_table)
            got = gradient(embed(distribute_tensor(ids, mesh, of_ids), weight, **options), weight)
            assert_same(got, want, of_table, f"{of_ids}, {of_table}, {padding_idx}")
            assert got.to_local().shape == weight.to_local().shape


@check
def gradients_of_gradients() -> None:
    (mesh, *_) = meshes()
    ids, table = make.ids((B, T), V, seed=1), make.table(V, D, dtype=torch.float64, seed=2, grad=True)

    def second(weight: Tensor) -> Any:
        result = embed(ids, weight, padding_idx=2)
        whole = result.full_tensor() if isinstance(result, DTensor) else result
        (first,) = torch.autograd.grad(whole.sin().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    for placements in ((Shard(0),), (Shard(1),)):
        got = second(leaf(table, mesh, placements)).full_tensor()
        torch.testing.assert_close(got, second(table))


@check
def dense_rows() -> None:
    """x * token_scale + encoding for x in parts of any axis, and as a sum that is still to be made."""
    x = make.x((B, T, D), seed=1, grad=True)
    kinds = (*PLACEMENTS, Shard(2))
    for mesh, scale in itertools.product(meshes(), (1.0, 2.0)):
        for placements, batch_first in itertools.product(placed(mesh, kinds), (True, False)):
            for given in ({}, {"positions": make.ids((B, T), 90, seed=3)}):
                options = {**given, "offset": 4, "token_scale": scale, "batch_first": batch_first}
                part, want = leaf(x, mesh, placements), add_positional_encoding(x, **options)
                got = add_positional_encoding(part, **options)
                assert_same(got, want.detach(), placements, f"{placements}, {options}")
                assert_same(gradient(got, part), gradient(want, x), placements, f"{placements}, {options}")
    summand = DTensor.from_local(x.detach(), init_device_mesh("cpu", (dist.get_world_size(),)), (Partial(),))
    got = add_positional_encoding(summand, token_scale=0.5)
    assert_same(got, add_positional_encoding(x.detach() * dist.get_world_size(), token_scale=0.5))


@check
def tables_of_positions() -> None:
    """Whole on each process or in parts of any axis; the gradients of both tables are placed as they are."""
    ids, given = make.ids((B, T), V, seed=1), make.ids((B, T), 9, seed=3)
    table, positions = make.table(V, D, seed=2, grad=True), make.table(9, D, seed=5, grad=True)
    x = make.x((B, T, D), seed=1, grad=True)
    for mesh, options in itertools.product(meshes(), ({"offset": 3}, {"positions": given})):
        want, dense = (
            embed(ids, table, token_scale=2.0, position_table=positions, **options),
            add_positional_encoding(x, position_table=positions, **options),
        )
        of_table, of_positions = gradient(want, table, again=True), gradient(want, positions)
        of_dense = gradient(dense, positions)
        for placements, of_ids in itertools.product(placed(mesh), placed(mesh)):
            weight, tokens, what = (
                leaf(table, mesh, placements),
                distribute_tensor(ids, mesh, of_ids),
                f"{placements}, {of_ids}",
            )
            for second in (placements, of_ids):
                part = leaf(positions, mesh, second)
                got = embed(tokens, weight, token_scale=2.0, position_table=part, **options)
                assert_same(got, want.detach(), what=what)
                assert_same(gradient(got, weight, again=True), of_table, placements, what)
                assert_same(gradient(got, part), of_positions, second, what)
            got = embed(tokens, weight, token_scale=2.0, position_table=positions, **options)
            assert_same_bits(gradient(got, positions), of_positions, what)
            part, rows = leaf(positions, mesh, placements), leaf(x, mesh, of_ids)
            got = add_positional_encoding(rows, position_table=part, **options)
            assert_same(got, dense.detach(), of_ids, what)
            assert_same(gradient(got, part), of_dense, placements, what)
    words = "embed: position_table must be a Tensor where the rows are one, got a DTensor"
    assert_refused(lambda: embed(ids, table, position_table=part), words)
    assert_refused(
        lambda: embed(ids, leaf(table, mesh, (Shard(0),) * mesh.ndim), position_table=part, offset=7),
        "positions must lie in [0, 9)",
        error=IndexError,
    )


@check
def layouts_of_dense_rows() -> None:
    for mesh, convention, dtype in itertools.product(meshes(), make.every_combination(), make.DTYPES):
        x = make.x((2, D), dtype=dtype, seed=1)
        got = add_positional_encoding(distribute_tensor(x, mesh, (Shard(1),) * mesh.ndim), convention=convention)
        assert_same(got, add_positional_encoding(x, convention=convention), what=f"{convention.name}, {dtype}")


@check
def ids_out_of_range() -> None:
    """Of the whole table, on every process, whichever rows it has."""
    for mesh in meshes():
        for placements, bad in itertools.product(placed(mesh), (V, -1, 2**40)):
            weight = leaf(make.table(V, D), mesh, placements)
            words = ("embed_general: input must hold ids in [0, ", V, "), got ", bad, " at input[1]")
            assert_refused(lambda w=weight, i=bad: embed(torch.tensor([0, i, 1]), w), *words, error=IndexError)


@check
def refusals() -> None:
    mesh, *_ = meshes()
    ids, weight = make.ids((B, T), V), leaf(make.table(V, D), mesh, (Shard(0),))
    out = torch.empty(B, T, D)
    for name, value in {"max_norm": 1.0, "scale_grad_by_freq": True, "sparse": True, "out": out}.items():
        for function in (embed, scaled_embedding):
            words = f"posenc_ext::embed: {name} cannot be combined with a DTensor"
            assert_refused(lambda f=function, o={name: value}: f(ids, weight, **o), words)
    x = distribute_tensor(out, mesh, (Shard(0),))
    words = "posenc_ext::add_positional_encoding: out cannot be combined with a DTensor"
    assert_refused(lambda: add_positional_encoding(x, out=x), words)

    summands = DTensor.from_local(make.table(V, D), mesh, (Partial(),))
    assert_refused(
        lambda: embed(ids, summands), "embed: placements of weight must be Replicate or Shard, got", "artial"
    )
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = DTensor.from_local(make.table(4, D), mesh, (_StridedShard(0, split_factor=2),), run_check=False)
    assert_refused(lambda: embed(ids, strided), "embed: placements of weight must be", "StridedShard")
    assert_refused(lambda: add_positional_encoding(strided), "encoding: placements of x must be", "StridedShard")
    other = distribute_tensor(ids, init_device_mesh("cpu", (1, dist.get_world_size())), (Replicate(), Replicate()))
    assert_refused(lambda: embed(other, weight), "embed: input must be on the mesh")
    assert_refused(lambda: embed(other, make.table(V, D)), "embed: weight must be a DTensor where input is one")


@check
def compiled() -> None:
    (mesh, *_) = meshes()
    ids, table = make.ids((B, T), V, seed=1), make.table(V, D, seed=2, grad=True)

    def function(weight: Tensor) -> Any:
        return embed(ids, weight, token_scale=2.0) * 2

    want = function(table)
    program = torch.compile(function, backend="aot_eager", fullgraph=True)
    for placements in ((Shard(0),), (Shard(1),), (Replicate(),)):
        torch.compiler.reset()
        weight = leaf(table, mesh, placements)
        result = program(weight)
        assert_same(result.detach(), want.detach(), what=f"{placements}")
        assert_same(gradient(result, weight), gradient(function(table), table), placements, f"{placements}")


# ---- modules, beside the textbook's ----------------------------------------------------------------------------------


W = 8


def lookups(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def models(**options: Any) -> dict[str, tuple[nn.Module, nn.Module]]:
    """The layers, each with the textbook modules that it stands for, in a model of the same numbers."""

    def model(*layers: nn.Module) -> nn.Sequential:
        torch.manual_seed(5)
        result = nn.Sequential(nn.Sequential(*layers), nn.Linear(W, 3))
        for parameter in result.parameters():
            nn.init.normal_(parameter)
        for name, value in options.items():
            setattr(lookups(result)[0], name, value)
        return result

    def pair(source: Any) -> nn.Module:
        return model(source.Embeddings(W, V), source.PositionalEncoding(W, 20))

    return {
        "Embeddings": (model(posenc_ext.Embeddings(W, V)), model(reference.Embeddings(W, V))),
        "pair": (pair(posenc_ext), pair(reference)),
        "TransformerEmbedding": (model(posenc_ext.TransformerEmbedding(V, W)), pair(reference)),
    }


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def trained(model: nn.Module, steps: int = 2, same_ids: bool = False) -> list[Tensor]:
    """Outputs and parameters of a short training, on ids of this process or on the same everywhere."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        ids = make.ids((2, T), V, seed=10 * step + (0 if same_ids else dist.get_rank()))
        result = model(ids)
        optimizer.zero_grad()
        result.square().mean().backward()
        optimizer.step()
        found.append(whole(result))
    return found + [whole(parameter) for parameter in model.parameters()]


def compare(wrap: Callable[[nn.Module], nn.Module], name: str = "", same_ids: bool = False, **options: Any) -> None:
    """Both models wrapped alike train alike."""
    for kind, pair in models(**options).items():
        got, want = (trained(wrap(model), same_ids=same_ids) for model in pair)
        torch.testing.assert_close(got, want, msg=lambda text, k=kind: f"{name} {k}: {text}")


@check
def data_parallel() -> None:
    compare(DistributedDataParallel)


@check
def data_parallel_with_sparse_gradients() -> None:
    compare(DistributedDataParallel, sparse=True)


@check
def fully_sharded() -> None:
    """The whole model, each layer, and `lut` alone."""

    def layers(model: nn.Module) -> nn.Module:
        for layer in model[0]:
            if list(layer.parameters()):
                fully_shard(layer)
        return fully_shard(model)

    def lut(model: nn.Module) -> nn.Module:
        for module in lookups(model):
            fully_shard(module)
        return fully_shard(model)

    compare(fully_shard, "model")
    compare(layers, "layers")
    compare(lut, "lut")


@check
def fully_sharded_of_torch_1() -> None:
    compare(lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")))


@check
def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for style in (RowwiseParallel, ColwiseParallel):

        def wrap(model: nn.Module, style: Any = style) -> nn.Module:
            plan = style(input_layouts=Replicate(), output_layouts=Replicate())
            return parallelize_module(model, mesh, {"0.0.lut": plan})

        compare(wrap, style.__name__, same_ids=True)


@check
def tensor_parallel_and_fully_sharded() -> None:
    """On a mesh of two dimensions, which takes four processes."""
    if dist.get_world_size() < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def wrap(model: nn.Module) -> nn.Module:
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        model = parallelize_module(model, mesh["tensor"], {"0.0.lut": plan})
        return fully_shard(model, mesh=mesh["data"])

    compare(wrap, same_ids=True)
    ids, layer = make.ids((B, T), V, seed=1), make.layer(rows=V, width=W)
    want, parts = layer(ids).detach(), copy.deepcopy(layer)
    parts.lut.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tensor"], (Shard(0),)))
    fully_shard(parts, mesh=mesh["data"])
    assert_same(parts(ids).detach(), want)


@check
def a_table_of_shards_in_a_layer() -> None:
    """Without hooks on `lut` the layer itself works on the shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = make.ids((B, T), V, seed=1)
    for kind, placement in itertools.product(make.OF_IDS, PLACEMENTS):
        layer = make.layer(kind, rows=V, width=D)
        want, parts = layer(ids), copy.deepcopy(layer)
        parts.lut.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, (placement,)))
        got = parts(ids)
        assert_same(got.detach(), want.detach(), what=f"{kind}, {placement}")
        got.full_tensor().square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(parts.lut.weight.grad.full_tensor(), layer.weight.grad)


@check
def checkpoints() -> None:
    """Saved in shards, loaded into shards of other axes and into a module of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = Path("checkpoint")
    for kind in make.OF_IDS:
        source, target, single = (make.layer(kind, rows=V, width=D) for _ in range(3))
        for layer, placement in ((source, Shard(0)), (target, Shard(1))):
            layer.lut.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, (placement,)))
        for layer in (target, single):
            nn.init.zeros_(layer.lut.weight)
        checkpoint.save(source.state_dict(), checkpoint_id=folder / kind)
        for layer in (target, single):
            state = layer.state_dict()
            checkpoint.load(state, checkpoint_id=folder / kind)
            layer.load_state_dict(state)
            assert_same_bits(whole(layer.lut.weight), whole(source.lut.weight), kind)


# ---- running them ----------------------------------------------------------------------------------------------------


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    ended: dict[str, str] = {}
    for name, function in CHECKS.items():
        if len(sys.argv) > 4 and name not in sys.argv[4:]:
            continue
        torch.manual_seed(0)
        try:
            function()
            dist.barrier()
            ended[name] = ""
        except BaseException:
            ended[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(ended))
        if ended[name]:
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
