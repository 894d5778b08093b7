"""The command ``posenc-ext``: a walk through the input layer, its pictures, what is installed, and the benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import platform
import statistics
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import posenc_ext
from posenc_ext import _C, functional, reference
from posenc_ext.conventions import CONVENTIONS, Convention
from posenc_ext.vocabulary import Vocabulary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SENTENCES = ("나는 오늘 학교에 간다", "나는 오늘 도서관에 간다", "오늘 나는 학교에서 공부한다", "나는 집에 간다")

# The sizes of the timed comparison: batch, length, width, words of the vocabulary.
TIMED_SIZES = (16, 512, 512, 32000)
ROUNDS = 15

# The largest table that plot makes: far more than a picture has points.
MOST_PLOTTED = 2**24

# What of a large table is printed.
SHOWN_ROWS = 24
SHOWN_COLUMNS = 8


class UsageError(Exception):
    """A request that cannot be met; its text is the one line the user sees."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``posenc-ext`` with these arguments, by default those of the process.

    Returns:
        The exit code: 0, or 2 after bad input, which is named in one line on stderr.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Whatever the encoding of the terminal, a word it cannot show must not end the program.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader has seen enough, as in `posenc-ext demo | head`
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _refuse(message: str) -> int:
    print(f"posenc-ext: error: {message}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    # The benchmarks have a parser of their own, which sees its arguments untouched, `--help` included.
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    args = _parser().parse_args(arguments)
    args.run(args)
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="posenc-ext", description="The input layer of a Transformer in one pass, without a table.")
    parser.add_argument("--version", action="version", version=f"posenc_ext {posenc_ext.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="from sentences to the input of the first layer, step by step")
    demo.add_argument("texts", nargs="*", metavar="TEXT", help="sentences of your own; by default four in Korean")
    demo.add_argument("--file", type=Path, help="take the sentences from the lines of this UTF-8 file")
    demo.add_argument("--d-model", type=_size, default=6, help="width of the vectors (6)")
    demo.add_argument("--seed", type=_seed, default=0, help="seed of the random weights (0)")
    demo.add_argument("--no-timing", action="store_true", help="leave out the timed comparison")
    demo.set_defaults(run=_demo)

    plot = commands.add_parser("plot", help="write the encodings as PNG pictures")
    plot.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="folder to write to (this one)")
    plot.add_argument("--d-model", type=_size, default=128, help="width of the encodings (128)")
    plot.add_argument("--length", type=_size, default=100, help="number of positions (100)")
    plot.add_argument("--convention", choices=list(CONVENTIONS), default="vaswani", help="named recipe (vaswani)")
    plot.set_defaults(run=_plot)

    info = commands.add_parser("info", help="versions, instruction set, threads, CUDA build")
    info.set_defaults(run=_info)

    commands.add_parser("bench", help="run the benchmarks; its own options follow (posenc-ext bench --help)")
    return parser


def _size(text: str) -> int:
    return _whole_number(text, 1, 2**20)


def _seed(text: str) -> int:
    return _whole_number(text, 0, 2**64 - 1)


def _whole_number(text: str, least: int, most: int) -> int:
    value = int(text) if text.strip().isdecimal() else -1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
    return value


# ---- demo ------------------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> None:
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
    _heading("1. Words become ids")
    print(f"The vocabulary has {len(vocabulary)} ids: {vocabulary.words[0]} fills short sentences up, then every word")
    print("in order of first appearance.")
    listed = [f"{i} {word}" for i, word in enumerate(vocabulary.words[:SHOWN_ROWS])]
    print("  " + "  ".join(listed) + ("  ..." if len(vocabulary) > SHOWN_ROWS else ""))
    ids = vocabulary.encode(texts)
    print(f"ids {_shape(ids)}, one sentence per row")
    _print_rows([(text, " ".join(f"{i:3d}" for i in row)) for text, row in zip(texts, ids.tolist(), strict=True)])
    return ids


def _show_embeddings(embeddings: posenc_ext.Embeddings, vocabulary: Vocabulary, ids: Tensor) -> None:
    d_model = embeddings.d_model
    _heading(f"2. Ids become vectors: Embeddings(d_model={d_model}, vocab_size={len(vocabulary)})")
    print(f"Each id has a trainable row, multiplied by sqrt({d_model}) = {math.sqrt(d_model):.4f}.")
    every_id = torch.arange(len(vocabulary))
    _print_vectors([f"{i} {word}" for i, word in enumerate(vocabulary.words)], embeddings(every_id))
    print(f"embeddings {_shape(embeddings(ids))}")


def _show_encodings(length: int, d_model: int) -> None:
    _heading(f"3. Positions become vectors: PositionalEncoding(d_model={d_model})")
    print("Sines in even columns, cosines in odd ones; each pair of columns turns more slowly than the one before.")
    table = functional.positional_encoding(length, d_model)
    _print_vectors([f"position {p}" for p in range(length)], table)
    print(f"encodings {_shape(table)}, the same for every sentence")


def _show_sums(
    layer: nn.Module, embeddings: posenc_ext.Embeddings, encoding: nn.Module, vocabulary: Vocabulary, ids: Tensor
) -> None:
    _heading("4. Their sum is the input of the first layer: TransformerEmbedding, both in one pass")
    total = layer(ids)
    words = [f"{p} {vocabulary.words[i]}" for row in ids.tolist() for p, i in enumerate(row)]
    _print_vectors(words, total.flatten(0, 1), group=ids.size(1))
    d_model = total.size(-1)
    print(f"ids {_shape(ids)} -> embeddings {_shape(total)} + encodings [{ids.size(1)}, {d_model}] -> {_shape(total)}")
    print(f"the same bits as steps 2 and 3 one after the other: {_yes(torch.equal(total, encoding(embeddings(ids))))}")
    textbook = _textbook(embeddings.lut.weight, max_len=ids.size(1))
    print(f"largest difference from the textbook modules: {(total - textbook(ids)).abs().max().item():.1e}")


def _show_order(
    layer: nn.Module, embeddings: posenc_ext.Embeddings, texts: Sequence[str], vocabulary: Vocabulary
) -> None:
    _heading("5. The same words in another order are another input")
    found = next(((words, p) for words in map(str.split, texts) if (p := _first_change(words)) is not None), None)
    if found is None:
        print("No sentence here has two different words to exchange.")
        return
    words, p = found
    swapped = [*words[:p], words[p + 1], words[p], *words[p + 2 :]]
    ids, swapped_ids = vocabulary.encode([" ".join(words), " ".join(swapped)])
    _print_rows([(" ".join(words), str(ids.tolist())), (" ".join(swapped), str(swapped_ids.tolist()))])
    before, after = layer(ids), layer(swapped_ids)
    word = words[p]
    _print_vectors(
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
    _heading(f"6. Exercise: a sequence of {length} random embeddings of width {d_model}, before and after")
    torch.manual_seed(seed)
    x = torch.randn(1, length, d_model)
    y = posenc_ext.PositionalEncoding(d_model)(x)
    positions = [f"position {p}" for p in range(length)]
    print(f"before {_shape(x)}")
    _print_vectors(positions, x[0])
    print(f"after {_shape(y)}")
    _print_vectors(positions, y[0])
    table = torch.from_numpy(posenc_ext.get_sinusoidal_positional_encoding(length, d_model))
    within = (y[0].double() - x[0] - table).abs().max().item() < 1e-6
    print(f"after - before is get_sinusoidal_positional_encoding({length}, {d_model}) within 1e-6: {_yes(within)}")


def _show_learned_against_fixed(seed: int) -> None:
    trained, longer, far, d_model = 10, 12, 1_000_000, 8
    _heading(f"7. Learned against fixed: trained on sequences of {trained}, then given {longer}")
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
    _print_vectors([f"position {p}" for p in positions.tolist()], table)


def _outcome(module: nn.Module, x: Tensor) -> str:
    try:
        return f"output {_shape(module(x))}"
    except (IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _show_time_and_memory(seed: int) -> None:
    batch, length, d_model, vocab_size = TIMED_SIZES
    _heading("8. Time, and the memory not spent")
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
    threads = torch.get_num_threads()
    timers = [Timer("module(ids)", globals={"module": m, "ids": ids}, num_threads=threads) for m in modules]
    rounds = [[timer.timeit(1).mean for timer in timers] for _ in range(ROUNDS)]
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


def _first_change(words: Sequence[str]) -> int | None:
    """The first position whose word differs from the next one."""
    return next((p for p in range(len(words) - 1) if words[p] != words[p + 1]), None)


# ---- plot ------------------------------------------------------------------------------------------------------------


def _plot(args: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plot needs matplotlib: pip install 'posenc_ext[plot]'") from None
    convention = CONVENTIONS[args.convention]
    if args.length * args.d_model > MOST_PLOTTED:
        raise UsageError(f"plot draws at most {MOST_PLOTTED} values, got {args.length} positions of {args.d_model}")
    if not _waves(args.d_model, convention):
        raise UsageError(f"plot needs a wave, and {convention.name} has none in d_model {args.d_model}")
    table = functional.positional_encoding(args.length, args.d_model, convention=convention).double().numpy()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, draw, size in (
        ("heat_map", _draw_heat_map, (9.0, 5.5)),
        ("waves", _draw_waves, (9.0, 6.5)),
        ("similarity", _draw_similarity, (9.0, 5.0)),
    ):
        # A Figure of its own, without pyplot: it draws with Agg, and needs no display.
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        draw(figure, table, convention)
        path = args.output / f"{name}.png"
        figure.savefig(path, format="png")
        print(path)


def _draw_heat_map(figure: Figure, table: reference.FloatArray, convention: Convention) -> None:
    """Value by position and column."""
    axes = figure.add_subplot()
    length, d_model = table.shape
    first = convention.first_position - 0.5
    image = axes.imshow(
        table,
        cmap="RdBu_r",
        vmin=-1,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, d_model - 0.5, first + length, first),
    )
    figure.colorbar(image, label="value")
    axes.set(xlabel="column", ylabel="position", title=_title("Sinusoidal position encodings", table, convention))


def _draw_waves(figure: Figure, table: reference.FloatArray, convention: Convention) -> None:
    """A few column pairs along the positions, from fast to slow."""
    length, d_model = table.shape
    positions = np.arange(length) + convention.first_position
    waves = _waves(d_model, convention)
    # Faster ones would fill their panel with ink, slower ones cross it as straight lines.
    legible = [wave for wave in waves if length / 25 <= wave[0] <= 8 * length] or waves
    chosen = [legible[i] for i in np.unique(np.linspace(0, len(legible) - 1, 4).round().astype(int))]
    panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    # The wave itself is drawn thin; what the table holds of it are the dots.
    fine = np.linspace(positions[0], positions[-1], 2000)
    dot = float(np.clip(600 / length, 1.5, 6))
    dots: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": dot}
    for axes, (wavelength, sine, cosine) in zip(panels, chosen, strict=True):
        angle = 2 * math.pi * fine / wavelength
        for column, wave, name, color in (
            (sine, np.sin(angle), "sine", "tab:blue"),
            (cosine, np.cos(angle), "cosine", "tab:orange"),
        ):
            if column is not None:
                axes.plot(fine, wave, color=color, linewidth=0.8)
                axes.plot(positions, table[:, column], color=color, label=f"column {column}, {name}", **dots)
        axes.set(ylim=(-1.15, 1.15), yticks=(-1, 0, 1))
        axes.set_title(f"one turn in {wavelength:,.1f} positions", fontsize="medium", loc="left")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, markerscale=6 / dot)
        _tidy(axes)
    margin = 0.01 * length
    panels[-1].set(xlabel="position", xlim=(positions[0] - margin, positions[-1] + margin))
    figure.suptitle(_title("The waves by column", table, convention))


def _waves(d_model: int, convention: Convention) -> list[tuple[float, int, int | None]]:
    """(wavelength, column of the sine, column of the cosine if there is one) of every frequency, fastest first."""
    frequency = reference.sinusoid_frequencies(
        d_model, base=convention.base, divisor=convention.divisor, odd=convention.odd
    )
    sines, cosines = len(frequency), d_model // 2
    sine_columns, cosine_columns = reference.wave_columns(d_model, convention.layout, sines=sines)
    columns = range(d_model)
    pairs = [*columns[cosine_columns], *[None] * (sines - cosines)]
    return list(zip((2 * math.pi / frequency).tolist(), columns[sine_columns], pairs, strict=True))


def _draw_similarity(figure: Figure, table: reference.FloatArray, convention: Convention) -> None:
    """The dot product of two encodings by the distance between them, seen from three positions."""
    axes = figure.add_subplot()
    length = len(table)
    starts = np.unique([length // 4, length // 2, 3 * length // 4])
    # Lines that lie on each other stay visible when the later ones are narrower.
    for i, start in enumerate(starts):
        distance = np.arange(length) - start
        p = start + convention.first_position
        axes.plot(distance, table @ table[start], linewidth=5 - 1.8 * i, label=f"p = {p}")
    axes.set(xlabel="distance k", ylabel="PE(p) · PE(p + k)")
    axes.set_title(_title("Similarity by distance", table, convention))
    axes.legend(frameon=False)
    _tidy(axes)


def _title(what: str, table: reference.FloatArray, convention: Convention) -> str:
    length, d_model = table.shape
    return f"{what}: {convention.name}, {length} positions, d_model {d_model}"


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


# ---- info ------------------------------------------------------------------------------------------------------------


def _info(_: argparse.Namespace) -> None:
    build = _C.build_info()
    facts = {
        "posenc_ext": posenc_ext.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, posenc_ext built with {build['torch_built_with']}",
        "numpy": np.__version__,
        "compiler": str(build["compiler"]),
        "machine": f"{platform.system()} {platform.machine()}",
        "CPU instruction set": f"{_C.active_isa()} in use, of {', '.join(_C.available_isas())}",
        "threads": str(torch.get_num_threads()),
        "CUDA kernels": _cuda_build(build),
        "CUDA device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    _print_rows(list(facts.items()), indent="")


def _cuda_build(build: dict[str, Any]) -> str:
    return f"built for {build['cuda_archs'] or 'unknown architectures'}" if build["cuda"] else "not built"


# ---- bench -----------------------------------------------------------------------------------------------------------


def _bench(arguments: list[str]) -> int:
    module = _bench_module()
    try:
        run = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        raise UsageError(f"bench needs {error.name}: pip install 'posenc_ext[bench]'") from None
    return int(run(arguments) or 0)


def _bench_module() -> str:
    """The name of the benchmarks' module: in the package, or in the checkout around it or around this folder."""
    if importlib.util.find_spec("posenc_ext.bench") is not None:
        return "posenc_ext.bench.__main__"
    for root in (Path(__file__).resolve().parent.parent, Path.cwd()):
        # `bench` is a common name: only beside our own sources is it ours.
        if all((root / name).is_file() for name in ("setup.py", "posenc_ext/cli.py", "bench/__main__.py")):
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return "bench.__main__"
    raise UsageError("bench is not part of this installation: run it in a checkout of the posenc_ext sources")


# ---- text ------------------------------------------------------------------------------------------------------------


def _heading(text: str) -> None:
    print(f"\n{text}\n{'-' * _display_width(text)}")


def _print_vectors(labels: Sequence[str], vectors: Tensor, group: int = 0) -> None:
    """Rows of ``vectors [n, d]`` with a label each; a blank line after every ``group`` of them."""
    cut = " ..." if vectors.size(1) > SHOWN_COLUMNS else ""
    lines = [" ".join(f"{value:8.4f}" for value in row) + cut for row in vectors[:, :SHOWN_COLUMNS].tolist()]
    _print_rows(list(zip(labels, lines, strict=True)), group=group)


def _print_rows(rows: Sequence[tuple[str, str]], indent: str = "  ", group: int = 0) -> None:
    """Two columns, the second one aligned after wide letters too; no more rows than a reader takes in."""
    shown = rows[:SHOWN_ROWS]
    width = max((_display_width(label) for label, _ in shown), default=0)
    for i, (label, text) in enumerate(shown):
        if group and i and i % group == 0:
            print()
        print(f"{indent}{label}{' ' * (width - _display_width(label))}  {text}")
    if len(rows) > len(shown):
        print(f"{indent}... and {len(rows) - len(shown)} more")


def _display_width(text: str) -> int:
    """Columns of a terminal that the text takes: two for a Korean, Chinese or Japanese letter, none for an accent."""
    letters = unicodedata.normalize("NFC", text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in letters)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
