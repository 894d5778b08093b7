"""Generates with a static KV cache and a decoding step that is compiled once.

    python decode.py

The cache has its full length from the start, and the position of a step is a tensor: given to the layer as `offset`, to
the cache as an index and to the mask as a bound. So one graph serves every step. A step that would compile again ends
in an error. The tokens are those of a plain model that reads the whole sequence anew for each of them.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc_ext import TransformerEmbedding


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer; keys and values are cached, [batch, heads, max_len, width]."""

    def __init__(self, d_model: int, heads: int, batch: int, max_len: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.merge = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, heads, max_len, d_model // heads), persistent=False)

    def forward(self, x: Tensor, places: Tensor | None) -> Tensor:
        """Tokens [batch, length, d_model] at these places [length] of the cache; None: without a cache."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.project(self.norms[0](x)).chunk(3, dim=-1)
        )
        if places is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            self.keys.index_copy_(2, places, key)
            self.values.index_copy_(2, places, value)
            seen = torch.arange(self.keys.shape[2]) <= places[:, None]
            mixed = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        x = x + self.merge(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.norms[1](x))


class Decoder(nn.Module):
    """A language model."""

    def __init__(self, vocab_size: int, d_model: int, heads: int, layers: int, batch: int, max_len: int) -> None:
        super().__init__()
        self.embed = TransformerEmbedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads, batch, max_len) for _ in range(layers))
        self.output = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size))

    def forward(self, ids: Tensor, position: Tensor | None = None) -> Tensor:
        """Next tokens [batch, 1] after ids [batch, length], which begin at a position (0-d) of the cache."""
        places = None if position is None else position + torch.arange(ids.shape[1])
        x = self.embed(ids, offset=0 if position is None else position)
        for block in self.blocks:
            x = block(x, places)
        return self.output(x[:, -1:]).argmax(-1)


def main() -> None:
    """Generate in three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=7)
    parser.add_argument("--steps", type=int, default=57)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = Decoder(args.vocab_size, args.d_model, 4, args.layers, args.batch, args.prompt + args.steps).eval()
    prompt = torch.randint(args.vocab_size, (args.batch, args.prompt))
    graphs = 0

    def counted(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._inductor.compile(graph, example)

    step = torch.compile(model, fullgraph=True, dynamic=False, backend=counted)

    def whole_pass() -> Tensor:
        ids = prompt
        for _ in range(args.steps):
            ids = torch.cat([ids, model(ids)], 1)
        return ids

    def with_cache(step: nn.Module) -> Tensor:
        found = [prompt, model(prompt, torch.tensor(0))]  # the prompt at once, uncompiled
        for position in range(args.prompt, args.prompt + args.steps - 1):
            found.append(step(found[-1], torch.tensor(position)))
        return torch.cat(found, 1)

    with torch.no_grad():
        step(model(prompt), torch.tensor(args.prompt))  # compiles
        # From here on a step that does not fit the graph is an error.
        with torch.compiler.set_stance("fail_on_recompile"):
            ways = {
                "whole pass, eager": whole_pass,
                "cache, eager": lambda: with_cache(model),
                "cache, compiled": lambda: with_cache(step),
            }
            results: list[Tensor] = []
            for name, generate in ways.items():
                start = time.perf_counter()
                results.append(generate())
                milliseconds = (time.perf_counter() - start) / args.steps * 1e3
                equal = (results[-1] == results[0]).float().mean().item()
                print(f"{name:18} {milliseconds:8.2f} ms a step, {equal:.0%} of the tokens equal")
    different = results[0][:, args.prompt :].unique().numel()
    print(f"different tokens: {different} in {args.batch} x {args.steps} steps")
    print(f"graphs compiled: {graphs}")


if __name__ == "__main__":
    main()
