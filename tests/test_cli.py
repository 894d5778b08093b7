import importlib.machinery
import io
import math
import os
import re
import sys
import types

import make
import numpy as np
import pytest
import torch

import posenc_ext
from posenc_ext import _C, cli, demo, functional, plot
from posenc_ext.conventions import CONVENTIONS

WORDS = ("[PAD]", "나는", "오늘", "학교에", "간다", "도서관에", "학교에서", "공부한다", "집에")
NUMBER = re.compile(r"-?\d+\.\d{4}\b")


def run(capsys, command):
    """The standard output of a command that succeeds; words in a string, or a list of them."""
    code = cli.main(command.split() if isinstance(command, str) else command)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refused(capsys, *arguments):
    """The one line that a refused command says."""
    code = cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("posenc-ext: error: ")
    return err.removeprefix("posenc-ext: error: ").rstrip()


def section(out, number):
    return re.search(rf"^{number}\. .*?(?=^\d+\. |\Z)", out, re.MULTILINE | re.DOTALL).group()


def vectors(text):
    """{label: numbers} of the printed rows, later ones winning."""
    return dict(rows(text))


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("  ") and NUMBER.search(line)]
    return [(line[: NUMBER.search(line).start()].strip(), [float(x) for x in NUMBER.findall(line)]) for line in lines]


def encoding(p, d):
    """The formula of the paper, one number at a time."""
    return [(math.cos if j % 2 else math.sin)(p * 10000.0 ** (-(j - j % 2) / d)) for j in range(d)]


def near(expected):
    return pytest.approx(expected, abs=6e-5)


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def walk(capsys):
    return run(capsys, "demo --no-timing")


@pytest.fixture
def table():
    """The embeddings of the demo, drawn as nn.Embedding draws them."""
    torch.manual_seed(0)
    return (torch.nn.Embedding(9, 6).weight.detach().double() * math.sqrt(6)).tolist()


def test_demo_vocabulary_and_ids(walk):
    text = section(walk, 1)
    assert "  ".join(f"{i} {word}" for i, word in enumerate(WORDS)) in text
    ids = [[int(i) for i in re.findall(r"\d+", line)] for line in text.splitlines() if re.search(r"[가-힣] +\d", line)]
    assert ids[-4:] == [[1, 2, 3, 4], [1, 2, 5, 4], [2, 1, 6, 7], [1, 8, 4, 0]]
    assert "ids [4, 4]" in text


def test_demo_embeddings(walk, table):
    printed = vectors(section(walk, 2))
    assert printed["1 나는"] == [-0.7741, -5.1812, 0.7894, -3.0945, 0.8573, 0.7548]
    assert list(printed) == [f"{i} {word}" for i, word in enumerate(WORDS)]
    for i, row in enumerate(printed.values()):
        assert row == near(table[i])
    assert "embeddings [4, 4, 6]" in walk


def test_demo_encodings(walk):
    printed = vectors(section(walk, 3))
    assert list(printed) == [f"position {p}" for p in range(4)]
    for p, row in enumerate(printed.values()):
        assert row == near(encoding(p, 6))


def test_demo_sums(walk, table):
    text = section(walk, 4)
    printed = rows(text)
    ids = [1, 2, 3, 4, 1, 2, 5, 4, 2, 1, 6, 7, 1, 8, 4, 0]
    assert [label for label, _ in printed] == [f"{n % 4} {WORDS[i]}" for n, i in enumerate(ids)]
    for n, (_, row) in enumerate(printed):
        assert row == near([a + b for a, b in zip(table[ids[n]], encoding(n % 4, 6), strict=True)])
    assert "ids [4, 4] -> embeddings [4, 4, 6] + encodings [4, 6] -> [4, 4, 6]" in text
    assert "the same bits as steps 2 and 3 one after the other: yes" in text
    assert float(re.search(r"difference from the textbook modules: (\S+)", text).group(1)) < 1e-6


def test_demo_order(walk, table):
    text = section(walk, 5)
    assert re.search(r"나는 오늘 학교에 간다 +\[1, 2, 3, 4\]", text)
    assert re.search(r"오늘 나는 학교에 간다 +\[2, 1, 3, 4\]", text)
    printed = vectors(text)
    assert printed["나는, the embedding"] == near(table[1])
    for p in (0, 1):
        assert printed[f"나는 at position {p}"] == near(np.add(table[1], encoding(p, 6)).tolist())
    change = max(abs(a - b) for a, b in zip(encoding(0, 6), encoding(1, 6), strict=True))
    assert re.search(r"^  0\.0000 in the embeddings alone", text, re.MULTILINE)
    assert f"  {change:.4f} with encodings" in text


def test_demo_exercise(walk):
    text = section(walk, 6)
    torch.manual_seed(0)
    x = torch.randn(1, 10, 8)[0].tolist()
    printed = [row for label, row in rows(text) if label.startswith("position")]
    assert len(printed) == 20
    for p in range(10):
        assert printed[p] == near(x[p])
        assert printed[10 + p] == near(np.add(x[p], encoding(p, 8)).tolist())
    assert text.count("[1, 10, 8]") == 2
    assert "get_sinusoidal_positional_encoding(10, 8) within 1e-6: yes" in text


def test_demo_learned_against_fixed(walk):
    text = section(walk, 7)
    learned, fixed = text.split("PositionalEncoding(8), 0 trained numbers")
    assert "LearnedPositionalEmbedding(10, 8), 80 trained numbers" in learned
    assert "length 10: output [1, 10, 8]" in learned
    assert re.search(r"length 12: IndexError: .*position_table.*10.*", learned)
    assert "length 12: output [1, 12, 8]" in fixed
    printed = vectors(fixed)
    for p in (9, 10, 11, 1_000_000):
        assert printed[f"position {p}"] == near(encoding(p, 8))


def test_demo_is_the_same_every_time_and_leaves_the_generator_alone(capsys, walk):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert run(capsys, "demo --no-timing") == walk
    assert torch.equal(torch.random.get_rng_state(), before)
    assert run(capsys, "demo --no-timing --seed 1") != walk


def test_demo_time_and_memory(capsys, monkeypatch, walk):
    monkeypatch.setattr(demo, "TIMED_SIZES", (2, 16, 8, 10))
    monkeypatch.setattr(demo, "ROUNDS", 3)
    out = run(capsys, "demo")
    assert out.startswith(walk), "the timing comes last, and nothing else depends on it"
    text = out.removeprefix(walk)
    assert "ids [2, 16], d_model 8, 10 words" in text
    assert re.search(r"textbook modules, eager +\d+\.\d\d ms\n  TransformerEmbedding +\d+\.\d\d ms +\d+\.\d\d of", text)
    # float32, 5000 rows of 8.
    assert re.search(r"textbook modules +160,000 bytes", text)
    assert re.search(r"TransformerEmbedding +0 bytes", text)


def test_interleaved_medians_tell_slow_from_fast():
    calls = []

    class Counted(torch.nn.Module):
        def __init__(self, name, work):
            super().__init__()
            self.name, self.work = name, work

        def forward(self, ids):
            calls.append(self.name)
            return sum(range(self.work))

    slow, fast = demo._interleaved_medians([Counted("slow", 100_000), Counted("fast", 0)], torch.zeros(1))
    assert slow > 10 * fast > 0
    turns = [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]
    assert turns == ["slow", "fast"] * demo.ROUNDS


def test_textbook_modules_share_the_weight():
    weight = torch.randn(5, 4)
    module = demo._textbook(weight, max_len=3)
    expected = [2 * weight[i] + torch.tensor(encoding(p, 4)) for p, i in enumerate((4, 0, 2))]
    torch.testing.assert_close(module(torch.tensor([[4, 0, 2]]))[0], torch.stack(expected), atol=1e-6, rtol=0)
    assert module[0].lut.weight.data_ptr() == weight.data_ptr()


def test_demo_on_sentences_of_ones_own(capsys):
    out = run(capsys, ["demo", "--no-timing", "--d-model", "20", "the cat sat", "a a", "the dog"])
    assert "0 [PAD]  1 the  2 cat  3 sat  4 a  5 dog\n" in section(out, 1)
    assert re.search(r"^  a a +4   4   0$", section(out, 1), re.MULTILINE)
    torch.manual_seed(0)
    weight = torch.nn.Embedding(6, 20).weight.double() * math.sqrt(20)
    assert vectors(section(out, 2))["5 dog"] == near(weight[5, :8].tolist()), "wide rows are cut to eight columns"
    assert "ids [3, 3] -> embeddings [3, 3, 20]" in out
    assert "the same bits as steps 2 and 3 one after the other: yes" in out
    assert re.search(r"^  cat the sat +\[2, 1, 3\]$", section(out, 5), re.MULTILINE)


def test_demo_on_a_file(capsys, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\ufeff하나 둘\n\n   \n둘 셋\n", encoding="utf-8")
    out = run(capsys, ["demo", "--no-timing", "--file", str(path)])
    assert "0 [PAD]  1 하나  2 둘  3 셋\n" in out
    assert "ids [2, 2]" in out
    path.write_text("a a\nb")
    out = run(capsys, ["demo", "--no-timing", "--file", str(path)])
    assert "No sentence here has two different words to exchange." in section(out, 5)


def test_demo_on_a_long_text_prints_part_of_it(capsys):
    out = run(capsys, ["demo", "--no-timing", " ".join(f"w{i}" for i in range(300))])
    assert "300 more" not in out
    assert "... and 277 more" in section(out, 2), "301 ids, 24 shown"
    assert "... and 276 more" in section(out, 3), "300 positions, 24 shown"
    assert len(rows(out)) < 120


def test_wide_letters_are_aligned(walk):
    lines = [line for line in section(walk, 2).splitlines() if NUMBER.search(line) and line.startswith("  ")]
    starts = [line[: NUMBER.search(line).end()] for line in lines]
    assert len(starts) == 9
    assert len({sum(2 if "가" <= c <= "힣" else 1 for c in start) for start in starts}) == 1


def test_a_terminal_that_cannot_show_a_word(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(["demo", "--no-timing"]) == 0
    assert rb"1 \ub098\ub294" in stdout.buffer.getvalue()


# ---- plot ------------------------------------------------------------------------------------------------------------


@make.each("convention_length_width", ["fairseq 12 7", "vaswani 1 1", "positional_encodings 400 3"])
def test_plot_writes_three_pictures(capsys, tmp_path, convention_length_width):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "new" / "folder"
    options = "--convention {} --length {} --d-model {}".format(*convention_length_width.split())
    out = run(capsys, ["plot", "--output", str(folder), *options.split()])
    paths = [folder / f"{name}.png" for name in ("heat_map", "waves", "similarity")]
    assert out.splitlines() == [str(path) for path in paths]
    for path in paths:
        with image.open(path) as picture:
            assert picture.format == "PNG"
            pixels = np.asarray(picture.convert("L"))
        assert min(pixels.shape) > 500
        assert pixels.std() > 5, "not an empty page"


@pytest.fixture
def figure():
    return pytest.importorskip("matplotlib.figure").Figure()


def pictured(convention, length, d):
    return functional.positional_encoding(length, d, convention=convention).double().numpy()


def test_heat_map_shows_the_table_at_its_positions(figure):
    convention = CONVENTIONS["fairseq"]
    plot.draw_heat_map(figure, pictured(convention, 6, 8), convention)
    (image,) = figure.axes[0].images
    # fairseq: sines, then cosines, of 10000 ** (-k / 3), the first position being 2.
    waves = [(f, 10000.0 ** (-k / 3)) for f in (math.sin, math.cos) for k in range(4)]
    np.testing.assert_allclose(image.get_array(), [[f(p * w) for f, w in waves] for p in range(2, 8)], atol=1e-6)
    assert image.get_extent() == [-0.5, 7.5, 7.5, 1.5]
    assert image.get_clim() == (-1, 1)


def test_waves_name_columns_and_wavelengths(figure):
    convention = CONVENTIONS["musicgen"]
    plot.draw_waves(figure, pictured(convention, 50, 5), convention)
    # Cosines first, two pairs, w = 1 and 1 / 10000: the second one stands still for 50 positions and is left out.
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "one turn in 6.3 positions"
    dots = {line.get_label(): line.get_xydata() for line in axes.lines if line.get_marker() == "."}
    assert list(dots) == ["column 2, sine", "column 0, cosine"]
    for data, wave in zip(dots.values(), (math.sin, math.cos), strict=True):
        np.testing.assert_allclose(data, [[p, wave(p)] for p in range(50)], atol=1e-6)


def test_waves_lie_on_their_dots(figure):
    convention = CONVENTIONS["opennmt_tf"]
    plot.draw_waves(figure, pictured(convention, 60, 32), convention)
    assert len(figure.axes) == 4
    for axes in figure.axes:
        for wave, dots in zip(axes.lines[::2], axes.lines[1::2], strict=True):
            assert dots.get_xdata()[0] == 1, "OpenNMT-tf counts from 1"
            between = np.interp(dots.get_xdata(), wave.get_xdata(), wave.get_ydata())
            np.testing.assert_allclose(dots.get_ydata(), between, atol=1e-3)


def test_similarity_depends_on_the_distance_alone(figure):
    convention = CONVENTIONS["vaswani"]
    plot.draw_similarity(figure, pictured(convention, 40, 16), convention)
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines] == ["p = 10", "p = 20", "p = 30"]
    for line, p in zip(lines, (10, 20, 30), strict=True):
        assert line.get_xdata().tolist() == list(range(-p, 40 - p))
        # sin a sin b + cos a cos b = cos(a - b), pair by pair.
        expected = [sum(math.cos(k * 10000.0 ** (-i / 8)) for i in range(8)) for k in line.get_xdata()]
        np.testing.assert_allclose(line.get_ydata(), expected, atol=1e-5)


def test_plot_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert refused(capsys, "plot", "--output", str(tmp_path)) == "plot needs matplotlib: pip install 'posenc_ext[plot]'"
    assert list(tmp_path.iterdir()) == []


# ---- info ------------------------------------------------------------------------------------------------------------


def test_info(capsys):
    out = run(capsys, "info")
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    built_with = _C.build_info()["torch_built_with"]
    assert facts["torch"].startswith(f"{torch.__version__}, posenc_ext built with {built_with}")
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["numpy"] == np.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["library of the ops"] == posenc_ext.ops_library()
    assert facts["CPU instruction set"] == f"{_C.active_isa()} in use, of {', '.join(_C.available_isas())}"
    assert facts["CUDA kernels"] == "not built" or _C.build_info()["cuda"]
    assert re.match(r"\d+\.\d+\.\d+", facts["posenc_ext"])
    assert cli._cuda_build({"cuda": False, "cuda_archs": ""}) == "not built"
    assert cli._cuda_build({"cuda": True, "cuda_archs": "8.0;9.0"}) == "built for 8.0;9.0"


# ---- bench -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_bench(monkeypatch, tmp_path):
    """The command as installed in an empty folder, with no benchmarks in reach."""
    for name in [name for name in sys.modules if re.match(r"(posenc_ext\.)?bench\b", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site" / "posenc_ext" / "cli.py"))
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: sys.modules.get(name))
    (tmp_path / "site").mkdir()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "bench"]:
        del sys.modules[name]


def make_checkout(root, main):
    texts = {"setup.py": "", "posenc_ext/cli.py": "", "bench/__init__.py": "", "bench/__main__.py": main}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_bench_of_a_checkout_gets_the_arguments_and_gives_the_exit_code(no_bench, capsys):
    make_checkout(no_bench, "def main(argv):\n    print('bench', argv)\n    return 3\n")
    assert cli.main(["bench", "--quick", "--help", "forward"]) == 3
    assert capsys.readouterr() == ("bench ['--quick', '--help', 'forward']\n", "")


def test_bench_in_the_package_comes_first_then_the_one_beside_it(no_bench, capsys, monkeypatch):
    make_checkout(no_bench, "def main(argv):\n    print('here')\n")
    make_checkout(no_bench / "site", "def main(argv):\n    print('beside')\n")
    assert run(capsys, "bench") == "beside\n"
    package, module = types.ModuleType("posenc_ext.bench"), types.ModuleType("posenc_ext.bench.__main__")
    package.__spec__ = importlib.machinery.ModuleSpec(package.__name__, None)
    package.__path__ = []
    module.main = lambda argv: print("package", argv)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run(capsys, "bench -x") == "package ['-x']\n"


def test_bench_of_another_project_is_not_ours(no_bench, capsys):
    make_checkout(no_bench, "def main(argv):\n    raise AssertionError\n")
    (no_bench / "setup.py").unlink()
    assert "bench is not part of this installation" in refused(capsys, "bench")


def test_bench_without_what_it_imports(no_bench, capsys):
    make_checkout(no_bench, "import a_module_nobody_has\n")
    assert refused(capsys, "bench") == "bench needs a_module_nobody_has: pip install 'posenc_ext[bench]'"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND (see posenc-ext --help)"),
        (["dance"], "invalid choice: 'dance'"),
        (["info", "--fast"], "unrecognized arguments: --fast"),
        (["demo", "--d-model", "0"], "--d-model: must be a whole number from 1 to 1048576, got '0'"),
        (["demo", "--d-model", "six"], "got 'six' (see posenc-ext demo --help)"),
        (["demo", "--d-model=-6"], "got '-6'"),
        (["demo", "--seed", str(2**64)], f"--seed: must be a whole number from 0 to {2**64 - 1}, got '{2**64}'"),
        (["demo", ""], "demo needs at least one word, got none in the sentences given"),
        (["demo", " ", "\t"], "demo needs at least one word"),
        (["demo", "a b", "--file", "x"], "demo takes sentences or --file, not both"),
        (["demo", "--file", "no/such.txt"], "no/such.txt: No such file or directory"),
        (["plot", "--length", "0"], "--length: must be a whole number from 1 to 1048576, got '0'"),
        (["plot", "--convention", "rope"], "argument --convention: invalid choice: 'rope'"),
        (["plot", "--d-model", "5000", "--length", "5000"], "at most 16777216 values, got 5000 positions of 5000"),
        (["plot", "--d-model", "1", "--convention", "fairseq"], "fairseq has none in d_model 1"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_a_file_that_is_not_text(capsys, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(b"ab\xff")
    assert refused(capsys, "demo", "--file", str(path)) == f"{path} must be UTF-8 text, got byte 0xff"
    path.write_bytes(b" \n\n")
    assert refused(capsys, "demo", "--file", str(path)) == f"demo needs at least one word, got none in {path}"


def test_plot_into_a_file(capsys, tmp_path):
    path = tmp_path / "file"
    path.touch()
    assert refused(capsys, "plot", "--output", str(path)) == f"{path}: File exists"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {command} ", out, re.MULTILINE) for command in ("demo", "plot", "info", "bench"))


def test_a_reader_that_leaves_early(monkeypatch):
    """As `head` does: no traceback, not even from what is still to be flushed at the end."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["demo", "--no-timing"]) == 1
