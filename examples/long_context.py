"""Finds tokens by their position in long sequences, in a bfloat16 model.

    python long_context.py

A fixed attention head is asked for position p. Its query is the true encoding of p; its keys are what an input layer
made of the sequence, seen without the few directions that the tokens take; it answers with the key that fits best. The
layers are the same model's, made in float32 and cast by `.bfloat16()`:

- table: the textbook's, a finished table that the cast rounds;
- frequencies: positions and frequencies are kept in the model's dtype and multiplied at each call, as in Transformer-XL
  and the package positional-encodings. bfloat16 has 8 bits: it has no 257, and beyond 32768 only every 256th integer;
- posenc_ext: computes in float32 and rounds once, at the end.
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
from torch import Tensor, nn

from posenc_ext import TransformerEmbedding, functional, reference


class FrequencyEncoding(nn.Module):
    """Positions without a table, in the dtype of a buffer."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        frequencies = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        self.register_buffer("frequencies", frequencies)

    def forward(self, x: Tensor) -> Tensor:
        """Add the encodings to x [batch, length, d_model]."""
        angle = torch.arange(x.shape[1], dtype=self.frequencies.dtype)[:, None] * self.frequencies
        return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def retrieved(hidden: Tensor, tokens: Tensor, queries: Tensor) -> Tensor:
    """The position that each query [count, d_model] finds in hidden [length, d_model]."""
    basis = torch.linalg.qr(tokens.float().T).Q  # [d_model, vocab_size]: where tokens differ
    queries = queries - queries @ basis @ basis.T
    return torch.cat([(hidden.float() @ part.T).argmax(0) for part in queries.split(64)])


def main() -> None:
    """Ask each layer for positions at each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 32768, 131072])
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    longest = max(args.lengths)
    embeddings = reference.Embeddings(args.d_model, args.vocab_size)
    nn.init.zeros_(embeddings.lut.weight[0])  # so what a layer makes of id 0 is the encoding alone
    layers = {
        "table": nn.Sequential(embeddings, reference.PositionalEncoding(args.d_model, longest)),
        "frequencies": nn.Sequential(embeddings, FrequencyEncoding(args.d_model)),
        "posenc_ext": TransformerEmbedding.from_pretrained(embeddings.lut.weight.detach(), precision="exact"),
    }
    print(f"{'layer':12} {'length':>7} {'found':>7} {'largest error of an encoding':>29} {'kept beside weight':>20}")
    for name, layer in layers.items():
        layer = copy.deepcopy(layer).bfloat16()
        kept = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers())
        for length in args.lengths:
            truth = functional.positional_encoding(length, args.d_model, precision="exact")
            ids = torch.randint(1, args.vocab_size, (1, length))
            asked = torch.randint(length, (args.queries,))
            with torch.no_grad():
                found = retrieved(layer(ids)[0], embeddings.lut.weight, truth[asked])
                error = (layer(torch.zeros_like(ids))[0].float() - truth).abs().max().item()
            share = (found == asked).float().mean().item()
            print(f"{name:12} {length:7} {share:7.1%} {error:29.1e} {kept:14,} bytes", flush=True)


if __name__ == "__main__":
    main()
