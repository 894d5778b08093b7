"""Generates for prompts of different lengths in one left-padded batch, as if each were alone.

    python left_padded_batch.py

With `count_padding=False` positions count real tokens, so a prompt has the positions that it would have alone. In a
step the offset is how many real tokens each row has so far. Attention keeps away from pads by its mask. For comparison
the same with positions that count pads: that is another input to the same model, and it generates other tokens.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc_ext import TransformerEmbedding

PAD = 0


class Decoder(nn.Module):
    """One block of attention with a cache that grows, between the input layer and the output."""

    def __init__(self, vocab_size: int, d_model: int, heads: int) -> None:
        super().__init__()
        self.embed = TransformerEmbedding(vocab_size, d_model, padding_idx=PAD, count_padding=False)
        self.heads = heads
        self.project = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size))

    def forward(self, ids: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """Logits [batch, vocab_size] after the last of ids [batch, length]; the cache has what came before."""
        if not cache:
            counted = torch.zeros(len(ids), dtype=torch.long)
            cache.update(real=torch.zeros(len(ids), 0, dtype=torch.bool))
        else:
            counted = cache["real"].sum(1)  # real tokens so far, one number a row
        x = self.embed(ids, offset=counted)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.project(x).chunk(3, -1))
        if "keys" in cache:
            key, value = torch.cat([cache["keys"], key], 2), torch.cat([cache["values"], value], 2)
        real = torch.cat([cache["real"], ids != PAD], 1)
        cache.update(keys=key, values=value, real=real)
        length = real.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[-ids.shape[1] :]
        # A pad sees itself, since a softmax over nothing is NaN.
        seen = (causal & real[:, None]) | torch.eye(length, dtype=torch.bool)[-ids.shape[1] :]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
        return self.output((x + mixed.transpose(1, 2).flatten(-2))[:, -1])


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, steps: int, cached: bool = True) -> tuple[Tensor, Tensor]:
    """The tokens [batch, steps] that follow, the likeliest each time, and the logits of the first."""
    ids, cache = prompt, {}
    found, first = [], None
    for _ in range(steps):
        logits = model(ids, cache) if cached else model(torch.cat([prompt, *found], 1), {})
        logits[:, PAD] = -torch.inf
        first = logits if first is None else first
        ids = logits.argmax(-1, keepdim=True)
        found.append(ids)
    return torch.cat(found, 1), first


def main() -> None:
    """Generate alone, in a batch, and in a batch with counted pads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 11, 1, 7])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = Decoder(args.vocab_size, args.d_model, 4).eval()
    prompts = [torch.randint(1, args.vocab_size, (length,)) for length in args.lengths]
    padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=PAD, padding_side="left")
    embedded = model.embed(padded)
    equal = all(torch.equal(embedded[i, -len(p) :], model.embed(p[None])[0]) for i, p in enumerate(prompts))
    print(f"input layer, bits equal to those of a prompt alone: {'yes' if equal else 'no'}")

    alone = [generate(model, prompt[None], args.steps, cached=False) for prompt in prompts]
    tokens, logits = (torch.cat(parts) for parts in zip(*alone, strict=True))
    for counts, name in ((False, "real tokens counted"), (True, "pads counted too")):
        model.embed.count_padding = counts
        found, first = generate(model, padded, args.steps)
        share = (found == tokens).float().mean().item()
        difference = (first - logits)[:, PAD + 1 :].abs().max().item()
        print(f"{name:19} {share:6.1%} of the tokens as alone, logits of the first within {difference:.1e}")


if __name__ == "__main__":
    main()
