"""The command `posenc-ext demo`: from sentences to the input of the first layer, step by step."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import posenc_ext
from posenc_ext import functional, reference
from posenc_ext.console import SHOWN_ROWS, UsageError, heading, print_rows, print_vectors, shape, yes
from posenc_ext.vocabulary import Vocabulary

SENTENCES = ("나는 오늘 학교에 간다", "나는 오늘 도서관에 간다", "오늘 나는 학교에서 공부한다", "나는 집에 간다")

# The sizes of the timed comparison: batch, length, width, words of the vocabulary.
TIMED_SIZES = (16, 512, 512, 32000)
ROUNDS = 15


def run(args: argparse.Namespace) -> None:
    """The whole walk, for the parsed arguments of the command."""
    texts = _sentences(args.texts, args.file)
    vocabulary = Vocabulary.from_texts(texts)
    # The walk draws random numbers; a program that calls main() keeps its own.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(args.seed)
        embeddings = posenc_ext.Embeddings(args.d_model, len(vocabulary))
        encoding = posenc_ext.PositionalEncoding(args.d_model)
        layer = posenc_ext.fuse(nn.Sequential(embeddings, encoding))

        print(f"The input layer of a Transformer, from words to vectors: d_model {args.d_model}, seed {args.seed}")
        ids = _show_ids(texts, vocabulary)
        _show_embeddings(embeddings, vocabulary, ids)
        _show_encodings(ids.size(1), args.d_model)
        _show_sums(layer, embeddings, encoding, vocabulary, ids)
        _show_order(layer, embeddings, texts, vocabulary)
        _show_exercise(args.seed)
        _show_learned_against_fixed(args.seed)
        if not args.no_timing:
            _show_time_and_memory(args.seed)


def _sentences(texts: Sequence[str], file: Path | None) -> list[str]:
    if texts and file is not None:
        raise UsageError("demo takes sentences or --file, not both")
    given: Iterable[str] = texts or SENTENCES
    if file is not None:
        try:
            given = file.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} must be UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    sentences = [text for text in given if text.strip()]
    if not sentences:
        raise UsageError(f"demo needs at least one word, got none in {file or 'the sentences given'}")
    return sentences


def _show_ids(texts: Sequence[str], vocabulary: Vocabulary) -> Tensor:
    heading("1. Words become ids")
    print(f"The vocabulary has {len(vocabulary)} ids: {vocabulary.words[0]} fills short sentences up, then every word")
    print("in order of first appearance.")
    listed = [f"{i} {word}" for i, word in enumerate(vocabulary.words[:SHOWN_ROWS])]
    print("  " + "  ".join(listed) + ("  ..." if len(vocabulary) > SHOWN_ROWS else ""))
    ids = vocabulary.encode(texts)
    print(f"ids {shape(ids)}, one sentence per row")
    print_rows([(text, " ".join(f"{i:3d}" for i in row)) for text, row in zip(texts, ids.tolist(), strict=True)])
    return ids


def _show_embeddings(embeddings: posenc_ext.Embeddings, vocabulary: Vocabulary, ids: Tensor) -> None:
    d_model = embeddings.d_model
    heading(f"2. Ids become vectors: Embeddings(d_model={d_model}, vocab_size={len(vocabulary)})")
    print(f"Each id has a trainable row, multiplied by sqrt({d_model}) = {math.sqrt(d_model):.4f}.")
    every_id = torch.arange(len(vocabulary))
    print_vectors([f"{i} {word}" for i, word in enumerate(vocabulary.words)], embeddings(every_id))
    print(f"embeddings {shape(embeddings(ids))}")


def _show_encodings(length: int, d_model: int) -> None:
    heading(f"3. Positions become vectors: PositionalEncoding(d_model={d_model})")
    print("Sines in even columns, cosines in odd ones; each pair of columns turns more slowly than the one before.")
    table = functional.positional_encoding(length, d_model)
    print_vectors([f"position {p}" for p in range(length)], table)
    print(f"encodings {shape(table)}, the same for every sentence")


def _show_sums(
    layer: nn.Module, embeddings: posenc_ext.Embeddings, encoding: nn.Module, vocabulary: Vocabulary, ids: Tensor
) -> None:
    heading("4. Their sum is the input of the first layer: TransformerEmbedding, both in one pass")
    total = layer(ids)
    words = [f"{p} {vocabulary.words[i]}" for row in ids.tolist() for p, i in enumerate(row)]
    print_vectors(words, total.flatten(0, 1), group=ids.size(1))
    d_model = total.size(-1)
    print(f"ids {shape(ids)} -> embeddings {shape(total)} + encodings [{ids.size(1)}, {d_model}] -> {shape(total)}")
    print(f"the same bits as steps 2 and 3 one after the other: {yes(torch.equal(total, encoding(embeddings(ids))))}")
    textbook = _textbook(embeddings.lut.weight, max_len=ids.size(1))
    print(f"largest difference from the textbook modules: {(total - textbook(ids)).abs().max().item():.1e}")


def _show_order(
    layer: nn.Module, embeddings: posenc_ext.Embeddings, texts: Sequence[str], vocabulary: Vocabulary
) -> None:
    heading("5. The same words in another order are another input")
    sentences = [text.split() for text in texts]
    # Where a word differs from the next one.
    found = next(((s, p) for s in sentences for p in range(len(s) - 1) if s[p] != s[p + 1]), None)
    if found is None:
        print("No sentence here has two different words to exchange.")
        return
    words, p = found
    swapped = [*words[:p], words[p + 1], words[p], *words[p + 2 :]]
    ids, swapped_ids = vocabulary.encode([" ".join(words), " ".join(swapped)])
    print_rows([(" ".join(words), str(ids.tolist())), (" ".join(swapped), str(swapped_ids.tolist()))])
    before, after = layer(ids), layer(swapped_ids)
    word = words[p]
    print_vectors(
        [f"{word}, the embedding", f"{word} at position {p}", f"{word} at position {p + 1}"],
        torch.stack([embeddings(ids[p]), before[p], after[p + 1]]),
    )
    # Row by row the second sentence holds the words of the first with two of them exchanged.
    order = [*range(p), p + 1, p, *range(p + 2, len(words))]
    alone = (embeddings(ids)[order] - embeddings(swapped_ids)).abs().max().item()
    together = (before[order] - after).abs().max().item()
    print("largest change of any word's vector from one sentence to the other:")
    print(f"  {alone:.4f} in the embeddings alone: the same vectors, dealt out in another order")
    print(f"  {together:.4f} with encodings: a word knows where it stands")


def _show_exercise(seed: int) -> None:
    length, d_model = 10, 8
    heading(f"6. Exercise: a sequence of {length} random embeddings of width {d_model}, before and after")
    torch.manual_seed(seed)
    x = torch.randn(1, length, d_model)
    y = posenc_ext.PositionalEncoding(d_model)(x)
    positions = [f"position {p}" for p in range(length)]
    print(f"before {shape(x)}")
    print_vectors(positions, x[0])
    print(f"after {shape(y)}")
    print_vectors(positions, y[0])
    table = torch.from_numpy(posenc_ext.get_sinusoidal_positional_encoding(length, d_model))
    within = (y[0].double() - x[0] - table).abs().max().item() < 1e-6
    print(f"after - before is get_sinusoidal_positional_encoding({length}, {d_model}) within 1e-6: {yes(within)}")


def _show_learned_against_fixed(seed: int) -> None:
    trained, longer, far, d_model = 10, 12, 1_000_000, 8
    heading(f"7. Learned against fixed: trained on sequences of {trained}, then given {longer}")
    torch.manual_seed(seed)
    learned = posenc_ext.LearnedPositionalEmbedding(trained, d_model)
    fixed = posenc_ext.PositionalEncoding(d_model)
    for name, module in (
        (f"LearnedPositionalEmbedding({trained}, {d_model})", learned),
        (f"PositionalEncoding({d_model})", fixed),
    ):
        print(f"{name}, {sum(p.numel() for p in module.parameters())} trained numbers")
        for length in (trained, longer):
            print(f"  length {length}: {_outcome(module, torch.zeros(1, length, d_model))}")
    print("The fixed encoding is a formula, and goes on as far as positions do:")
    positions = torch.tensor([trained - 1, trained, longer - 1, far])
    table = functional.positional_encoding(positions, d_model, precision="exact")
    print_vectors([f"position {p}" for p in positions.tolist()], table)


def _outcome(module: nn.Module, x: Tensor) -> str:
    try:
        return f"output {shape(module(x))}"
    except (IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _show_time_and_memory(seed: int) -> None:
    batch, length, d_model, vocab_size = TIMED_SIZES
    heading("8. Time, and the memory not spent")
    torch.manual_seed(seed)
    fused = posenc_ext.TransformerEmbedding(vocab_size, d_model)
    textbook = _textbook(fused.weight)
    ids = torch.randint(vocab_size, (batch, length))
    slow, fast = _interleaved_medians([textbook, fused], ids)
    print(f"forward of ids [{batch}, {length}], d_model {d_model}, {vocab_size} words, float32,")
    print(f"{torch.get_num_threads()} threads, median of {ROUNDS} rounds in turn:")
    print(f"  textbook modules, eager {slow * 1e3:8.2f} ms")
    print(f"  TransformerEmbedding    {fast * 1e3:8.2f} ms   {fast / slow:.2f} of the time")
    print("kept in memory, and in every checkpoint, beside the weight:")
    print(f"  textbook modules        {_buffer_bytes(textbook):>12,} bytes, the table of 5000 positions")
    print(f"  TransformerEmbedding    {_buffer_bytes(fused):>12,} bytes")


def _interleaved_medians(modules: Sequence[nn.Module], ids: Tensor) -> list[float]:
    """Seconds per call of each module. They take turns, so that a busy moment of the machine falls on all."""

    def seconds(module: nn.Module) -> float:
        start = time.perf_counter()
        module(ids)
        return time.perf_counter() - start

    rounds = [[seconds(module) for module in modules] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _textbook(weight: Tensor, max_len: int = 5000) -> nn.Sequential:
    """The textbook modules on an existing weight ``[vocab_size, d_model]``."""
    vocab_size, d_model = weight.shape
    with torch.device("meta"):  # rows of its own would be drawn only to be thrown away
        embeddings = reference.Embeddings(d_model, vocab_size)
    embeddings.lut.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(embeddings, reference.PositionalEncoding(d_model, max_len))


def _buffer_bytes(module: nn.Module) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
