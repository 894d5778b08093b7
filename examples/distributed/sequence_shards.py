"""Context parallel: each process has a part of every sequence, and says where it is by `offset` or `positions`.

    torchrun --standalone --nproc-per-node 2 sequence_shards.py

- offset: process r of n has the r-th of n equal parts;
- positions: it has parts r and 2n - 1 - r of 2n, which gives causal attention the same work everywhere ("zigzag");
- DTensor: ids are a DTensor in parts of the sequence, and the layer knows their places itself.

What the processes compute has the bits of the whole sequence on one process. The gradient of the weight is summed.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from posenc_ext import TransformerEmbedding


def gathered(part: Tensor) -> list[Tensor]:
    """The parts of all processes."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return parts


def main() -> None:
    """Embed in parts, and compare with the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096, help="a multiple of twice the number of processes")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # the same ids and weight everywhere
    layer = TransformerEmbedding(args.vocab_size, args.d_model)
    ids = torch.randint(args.vocab_size, (args.batch, args.length))
    probe = torch.randn(args.batch, args.length, args.d_model)  # the gradient that comes back to the layer
    whole = layer(ids)
    (of_whole,) = torch.autograd.grad(whole, layer.weight, probe)

    # Which tokens this process has, and the calls that embed them.
    places = torch.arange(args.length)
    halves = places.chunk(2 * world)
    ways = {
        "offset": (places.chunk(world)[rank], lambda part, own: layer(part, offset=int(own[0]))),
        "positions": (
            torch.cat([halves[rank], halves[2 * world - 1 - rank]]),
            lambda part, own: layer(part, positions=own),
        ),
    }
    for name, (own, embed) in ways.items():
        part = embed(ids[:, own], own)
        (gradient,) = torch.autograd.grad(part, layer.weight, probe[:, own])
        dist.all_reduce(gradient)
        together = torch.empty_like(whole)
        for where, rows in zip(gathered(own), gathered(part.detach()), strict=True):
            together[:, where] = rows
        report(rank, name, together, whole, gradient, of_whole)

    mesh = init_device_mesh("cpu", (world,))
    weight = layer.lut.weight
    layer.lut.weight = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))
    together = layer(distribute_tensor(ids, mesh, [Shard(1)]))
    (gradient,) = torch.autograd.grad(together, layer.lut.weight, distribute_tensor(probe, mesh, [Shard(1)]))
    report(rank, "DTensor", together.full_tensor(), whole, gradient.full_tensor(), of_whole)
    dist.destroy_process_group()


def report(rank: int, name: str, together: Tensor, whole: Tensor, gradient: Tensor, of_whole: Tensor) -> None:
    """Print how the parts compare with the whole."""
    equal = "yes" if torch.equal(together, whole) else "no"
    difference = ((gradient - of_whole).abs().max() / of_whole.abs().max()).item()
    if rank == 0:
        print(f"{name:10} bits of the whole: {equal}; gradient of the weight within {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
