"""Trains an encoder-decoder on a toy translation, with four input layers, and draws their loss curves.

    python train_translation.py --plot curves.png

A sentence is a few different words in random order. Its translation is each word's counterpart, in reverse order. A
model without positions sees a set of words: of the n words that are left it can only guess which one comes next, and no
training brings its loss below ln(n!)/n for each word.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc_ext import Embeddings, LearnedPositionalEmbedding, TransformerEmbedding, reference

KINDS = ("textbook", "fused", "learned", "none")
START = 0  # the id before the first word of a translation


def input_layer(kind: str, vocab_size: int, d_model: int, max_len: int) -> nn.Module:
    """Ids [batch, length] -> [batch, length, d_model]."""
    if kind == "textbook":
        embeddings, encoding = reference.Embeddings(d_model, vocab_size), reference.PositionalEncoding(d_model, max_len)
        return nn.Sequential(embeddings, encoding)
    if kind == "fused":
        return TransformerEmbedding(vocab_size, d_model)
    if kind == "learned":
        position = LearnedPositionalEmbedding(max_len, d_model)
        return TransformerEmbedding(vocab_size, d_model, position=position)
    return Embeddings(d_model, vocab_size)


class Translator(nn.Module):
    """A small `nn.Transformer` with an input layer on each side."""

    def __init__(self, kind: str, vocab_size: int, d_model: int, max_len: int, layers: int) -> None:
        super().__init__()
        self.source = input_layer(kind, vocab_size, d_model, max_len)
        self.target = input_layer(kind, vocab_size, d_model, max_len)
        # Without dropout: fused and unfused layers draw different random numbers.
        self.transformer = nn.Transformer(d_model, 4, layers, layers, 4 * d_model, dropout=0.0, batch_first=True)
        self.output = nn.Linear(d_model, vocab_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Words, and the translation so far [batch, length] -> logits of the next word [batch, length, vocab_size]."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return self.output(hidden)


def sentences(count: int, words: int, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sentences of different words 1...words and their translations, [count, length] each."""
    source = torch.rand(count, words, generator=random).argsort(1)[:, :length] + 1
    return source, source.flip(1) % words + 1  # the counterpart of a word is the next one


def train(kind: str, args: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of each step, and the share of new sentences that are translated without a fault."""
    torch.manual_seed(args.seed)
    random = torch.Generator().manual_seed(args.seed)  # every kind sees the same sentences
    model = Translator(kind, args.words + 1, args.d_model, args.length + 1, args.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    losses = []
    for _ in range(args.steps):
        source, target = sentences(args.batch, args.words, args.length, random)
        logits = model(source, F.pad(target[:, :-1], (1, 0), value=START))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    model.eval()
    source, target = sentences(256, args.words, args.length, random)
    found = torch.full((len(source), 1), START)
    with torch.no_grad():
        for _ in range(args.length):
            found = torch.cat([found, model(source, found)[:, -1:].argmax(-1)], 1)
    return losses, (found[:, 1:] == target).all(1).float().mean().item()


def plot(curves: dict[str, list[float]], floor: float, path: str) -> None:
    """All loss curves in one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for kind, losses in curves.items():
        width, alpha = (5, 0.3) if kind == "textbook" else (1.2, 1)  # it lies under the fused one
        axes.plot(range(1, len(losses) + 1), losses, label=kind, linewidth=width, alpha=alpha)
    axes.axhline(floor, color="gray", linestyle=":", label="least without positions, ln(n!)/n")
    axes.set(xlabel="step", ylabel="loss for each word (nats)", title="Reversed translation, by input layer")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Train with every input layer, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="where to write the loss curves (PNG); needs matplotlib")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--words", type=int, default=16)
    parser.add_argument("--length", type=int, default=6)
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    curves = {}
    print(f"{'input layer':12} {'loss, last 20 steps':>20} {'faultless sentences':>20} {'seconds':>8}")
    for kind in KINDS:
        start = time.perf_counter()
        curves[kind], faultless = train(kind, args)
        last = sum(curves[kind][-20:]) / 20
        print(f"{kind:12} {last:20.4f} {faultless:20.1%} {time.perf_counter() - start:8.1f}", flush=True)
    floor = math.lgamma(args.length + 1) / args.length
    print(f"least loss without positions, ln({args.length}!)/{args.length}: {floor:.4f}")
    differences = [abs(a - b) for a, b in zip(curves["textbook"], curves["fused"], strict=True)]
    print(f"textbook - fused at most: {max(differences[:40]):.1e} for 40 steps, {max(differences):.1e} later")
    if args.plot:
        plot(curves, floor, args.plot)
        print(args.plot)


if __name__ == "__main__":
    main()
