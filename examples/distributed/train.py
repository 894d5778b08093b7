"""Trains a small language model on several processes; its losses are those of one process.

    torchrun --standalone --nproc-per-node 2 train.py
    torchrun --standalone --nproc-per-node 2 train.py fsdp2

- ddp: each process has the whole model and its part of the batch;
- fsdp2: `fully_shard`; each process has a part of every parameter and of the batch;
- rowwise, colwise: tensor parallel; each process has some rows or columns of `lut`, and the same batch.

On GPUs the mesh is "cuda", the backend "nccl", and model and ids go to the process's device.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from posenc_ext import TransformerEmbedding

SPLIT_BATCH = ("ddp", "fsdp2")
KINDS = (*SPLIT_BATCH, "rowwise", "colwise")


class LanguageModel(nn.Module):
    """The input layer, causal encoder layers and the output."""

    def __init__(self, vocab_size: int, d_model: int, layers: int) -> None:
        super().__init__()
        self.embed = TransformerEmbedding(vocab_size, d_model)
        nn.init.normal_(self.embed.weight, std=d_model**-0.5)
        block = nn.TransformerEncoderLayer(d_model, 4, 4 * d_model, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.output = nn.Linear(d_model, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [batch, length] -> logits [batch, length, vocab_size]."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.output(self.blocks(self.embed(ids), mask=mask, is_causal=True))


def parallelized(model: LanguageModel, kind: str, mesh: DeviceMesh) -> nn.Module:
    """The model, made ready for several processes."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for block in model.blocks.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model.embed, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    style = {"rowwise": RowwiseParallel, "colwise": ColwiseParallel}[kind]
    plan = {"embed.lut": style(input_layouts=Replicate(), output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


def train(model: nn.Module, args: argparse.Namespace, rank: int = 0, world: int = 1) -> list[float]:
    """The loss of each step, the mean over the processes that share a batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    random, losses = torch.Generator().manual_seed(args.seed), []
    for _ in range(args.steps):
        # To be learned: each token is the one before it, and one more.
        start = torch.randint(args.vocab_size, (args.batch, 1), generator=random)
        ids = ((start + torch.arange(args.length + 1)) % args.vocab_size).chunk(world)[rank]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    """Train in each way, and in one process for comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=KINDS, help=f"of {', '.join(KINDS)}; all of them without any")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="of all processes together, a multiple of their number")
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=31)
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def model() -> LanguageModel:
        torch.manual_seed(args.seed)  # the same numbers on every process
        return LanguageModel(args.vocab_size, args.d_model, args.layers)

    want = train(model(), args)
    if rank == 0:
        print(f"{'one process':12} loss {want[0]:.4f} to {want[-1]:.4f}", flush=True)
    for kind in args.kinds:
        wrapped = parallelized(model(), kind, mesh)
        part = (rank, world) if kind in SPLIT_BATCH else (0, 1)
        losses = train(wrapped, args, *part)
        weight = (wrapped.module if kind == "ddp" else wrapped).embed.weight
        local = list(weight.to_local().shape) if hasattr(weight, "to_local") else list(weight.shape)
        difference = max(abs(a - b) for a, b in zip(losses, want, strict=True))
        if rank == 0:
            print(
                f"{kind:12} loss {losses[0]:.4f} to {losses[-1]:.4f}, within {difference:.1e} of one process in every "
                f"step; lut here {local} of {list(weight.shape)}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
