"""The benchmark's own arithmetic, and that its command runs. No test here depends on how fast anything is."""

import dataclasses
import importlib
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import posenc_ext

ROOT = Path(__file__).resolve().parent.parent


def find_bench() -> str:
    """The benchmark as the command line finds it: in the package, or in this checkout."""
    if importlib.util.find_spec("posenc_ext.bench") is not None:
        return "posenc_ext.bench"
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # at the end: the package under test stays the one already imported
    return "bench"


BENCH = find_bench()
pytest.importorskip("rich")


def part(name: str):
    return importlib.import_module(f"{BENCH}.{name}")


rows, timing, traffic, measures, contenders = map(part, ("rows", "timing", "traffic", "measures", "contenders"))
accuracy, children, report, settings, training = map(part, ("accuracy", "children", "report", "settings", "training"))
main = part("__main__").main
Row = rows.Row


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_median_and_ratio_are_taken_over_rounds():
    timed = timing.Rounds({"ours": [1e-6, 2e-6, 9e-6], "theirs": [2e-6, 2e-6, 3e-6]})
    assert timed.median_us("ours") == pytest.approx(2.0)
    spread = timed.ratio("ours", "theirs")
    assert spread.median == pytest.approx(1.0)
    assert (spread.q25, spread.q75) == (pytest.approx(0.75), pytest.approx(2.0))
    # Of the same round: the ratio of the medians would be the same here only by chance.
    assert timed.ratio("theirs", "ours").median == pytest.approx(1.0)


def test_ratio_refuses_rounds_that_are_not_the_same():
    with pytest.raises(ValueError, match="shorter"):
        timing.Rounds({"a": [1.0, 2.0], "b": [1.0]}).ratio("a", "b")


def test_compare_makes_a_row_for_each_contender():
    timed = timing.Rounds({"ours": [2e-6] * 3, "theirs": [4e-6] * 3, "copy": [1e-6] * 3})
    ours, theirs, copy = timing.compare(
        "m", "out=", timed, floors={"theirs": 0.6}, bytes_moved=300, copy_bytes=200, notes={"theirs": "slow"}
    )
    assert (ours.contender, ours.ratio, ours.passed) == ("ours", None, None)
    assert ours.of_copy == pytest.approx(300 / 2 / 200)
    assert theirs.ratio == pytest.approx(0.5)
    assert (theirs.floor, theirs.passed, theirs.note) == (0.6, True, "slow")
    assert theirs.of_copy == pytest.approx(300 / 4 / 200)
    assert (copy.bytes, copy.of_copy, copy.passed) == (200, pytest.approx(1.0), None)


@pytest.mark.parametrize(
    ("ratio", "floor", "at_least", "passed"),
    [
        (0.9, 0.9, False, True),
        (0.91, 0.9, False, False),
        (1.6, 1.6, True, True),
        (1.59, 1.6, True, False),
        (None, 0.9, False, False),  # a floor that nothing was measured for is not reached
        (0.1, None, False, None),
    ],
)
def test_floor_in_both_directions(ratio, floor, at_least, passed):
    assert Row("m", "c", ratio=ratio, floor=floor, at_least=at_least).passed is passed
    assert Row("m", "c", value=ratio, floor=floor, at_least=at_least).passed is passed


def test_thread_floor_is_the_lower_of_its_own_and_the_copys(monkeypatch):
    scaling = part("scaling")

    def floor_for(copy_speedup: float) -> tuple[float, bool]:
        seconds = {"posenc_ext, 2 threads": 1.0, "posenc_ext, 1 thread": 1.5}
        seconds |= {"copy, 2 threads": 1.0, "copy, 1 thread": copy_speedup}
        timed = timing.Rounds({name: [value] for name, value in seconds.items()})
        monkeypatch.setattr(scaling, "run_rounds", lambda *_, **__: timed)
        found = scaling._scaling("m", "out=", settings.Settings(), len, [], len, [], 0)
        (judged,) = [row for row in found if row.passed is not None]
        assert judged.ratio == pytest.approx(1.5)
        return judged.floor, judged.passed

    assert floor_for(1.9) == (1.6, False)
    assert floor_for(1.4) == (pytest.approx(1.4), True)


def test_byte_models():
    assert traffic.forward(10, 4, 2) == 10 * 8 + 2 * 10 * 4 * 2
    assert traffic.forward(10, 4, 2, positions=True) == 2 * 10 * 8 + 2 * 10 * 4 * 2
    assert traffic.backward(10, 100, 4, 4) == 10 * 8 + 110 * 4 * 4
    assert traffic.sparse_adam(3, 4, 4) == 7 * 3 * 4 * 4
    assert traffic.copy(5, 4) == 40


def test_verdict_counts_and_names_what_was_missed():
    found = [Row("a", "x", ratio=0.5, floor=0.9), Row("b", "y", ratio=1.0, floor=0.9), Row("c", "z", ratio=2.0)]
    text = report.verdict(found)
    assert text.startswith("1 of 2 floors reached")
    assert "b against y: 1.00, floor <= 0.90" in text
    assert "c against" not in text


def test_a_disturbed_measure_is_marked():
    calm, busy = (Row("a", "x", ratio=0.5, floor=0.9, preempted=rate) for rate in (1.0, 500.0))
    assert "?" not in report.mark(calm) + report.verdict([calm])
    assert report.mark(busy).endswith("?")
    assert "Something else was running during 1 measures" in report.verdict([busy])


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_every_contender_runs_in_every_round_on_the_same_inputs():
    seen: list[tuple[str, int]] = []
    made = [timing.Contender(name, lambda given, name=name: seen.append((name, given)), [1, 2, 3]) for name in "ab"]
    timed = timing.run_rounds(made, settings.Settings(rounds=2), calls=4)
    assert {name: len(times) for name, times in timed.seconds.items()} == {"a": 2, "b": 2}
    blocks = [seen[i : i + 5] for i in range(0, len(seen), 5)]  # an untimed call, then four
    assert [block[0][0] for block in blocks] == ["b", "a", "a", "b", "b", "a"]
    for block in blocks:
        assert len({name for name, _ in block}) == 1
        assert [given for _, given in block] == [1, 1, 2, 3, 1]


def test_a_slow_machine_gets_fewer_rounds():
    made = [timing.Contender("a", lambda _: None, [0])]
    timed = timing.run_rounds(made, settings.Settings(rounds=50, seconds=0.0), calls=1)
    assert len(timed.seconds["a"]) == settings.FEWEST_ROUNDS


def test_threads_are_set_for_a_contender_and_restored():
    before = torch.get_num_threads()
    seen: list[int] = []
    made = [timing.Contender(str(n), lambda _: seen.append(torch.get_num_threads()), [0], n) for n in (1, 2)]
    timing.run_rounds(made, settings.Settings(rounds=1), calls=1)
    assert set(seen) == {1, 2}
    assert torch.get_num_threads() == before


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_copies_read_whole_stretches_of_the_table():
    weight = torch.arange(100 * 64.0).view(100, 64)
    for elements in (64, 64 * 30, 64 * 70, 64 * 100):
        pieces = contenders.stretches(weight, elements)
        assert 2 <= len(pieces) <= contenders.BATCHES
        assert all(piece.numel() == elements and piece.is_contiguous() for piece in pieces)
    with pytest.raises(ValueError, match="no stretch"):
        contenders.stretches(weight, 64 * 101)


def test_half_of_the_ids_become_equal():
    shape = contenders.Shape(4, 32, 8, vocabulary=10**6)
    for tokens in training.half_equal(contenders.id_batches(shape)):
        assert tokens.shape == (4, 32)
        assert tokens.unique(return_counts=True)[1].max() in (64, 65)


def test_contenders_must_agree():
    contenders.agree([torch.ones(3), torch.ones(3) + 1e-6], 1e-5)
    with pytest.raises(AssertionError):
        contenders.agree([torch.ones(3), torch.tensor([1.0, 1.0, 2.0])], 1e-5)


# ---- accuracy --------------------------------------------------------------------------------------------------------


def test_positions_cover_the_ends_and_both_signs():
    for bits in (24, 40):
        chosen = accuracy.sample(bits, 50)
        assert len(chosen) == 50
        assert {0, 2**bits} <= {abs(position) for position in chosen}
        assert min(chosen) < 0 < max(chosen)
        assert accuracy.sample(bits, 50) == chosen


def test_the_worst_error_is_found():
    width, positions = 8, [0, 1, 5]
    convention = posenc_ext.CONVENTIONS["vaswani"]
    frequencies = posenc_ext.functional.angular_frequencies(width, precision="exact").numpy()
    angles = torch.tensor(positions).double().numpy()[:, None] * frequencies

    def worst_with(error: float):
        sine, cosine = torch.from_numpy(angles).sin().numpy(), torch.from_numpy(angles).cos().numpy()
        cosine[2, 1] += error
        worst = accuracy.Worst()
        worst.see(convention, "exact", width, positions, (sine, cosine))
        return worst

    assert worst_with(0.0).error < 2.5e-7
    planted = worst_with(0.5)
    assert planted.error == pytest.approx(0.5, abs=1e-6)
    assert "position 5, column 3" in planted.where
    row = worst_with(math.nan).row("m", "exact", 1.0, "")
    assert row.value is None
    assert row.passed is False


# ---- keeping ---------------------------------------------------------------------------------------------------------


def test_rows_survive_json(tmp_path):
    kept = [
        Row("m", "ours", "out=", median_us=1.5, bytes=10, of_copy=0.5),
        Row("m", "theirs", "out=", 3.0, 25, 1.5, 0.5, 0.4, 0.6, floor=0.9, note="n"),
        Row("error", "exact", value=1e-7, unit="error", floor=2.5e-7),
    ]
    path = tmp_path / "folder" / "result.json"
    rows.write(path, kept, {"cpu": "x"}, {"rounds": 1})
    assert rows.read(path) == (kept, {"cpu": "x"})
    assert [entry["passed"] for entry in json.loads(path.read_text())["rows"]] == [None, True, True]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"format": 0, "rows": []}')
    with pytest.raises(ValueError, match="format"):
        rows.read(path)


def test_rows_with_unknown_fields_are_read():
    (entry,) = rows.to_data([Row("m", "c")])
    assert rows.from_data([{**entry, "later": 1}]) == [Row("m", "c")]


# ---- command ---------------------------------------------------------------------------------------------------------


def test_names_select_measures():
    assert measures.select([]) == list(measures.MEASURES)
    assert measures.select(["token"]) == ["token.call", "token.decode"]
    assert measures.select(["sparse.step", "*.exact"]) == ["sparse.step", "accuracy.exact"]
    assert measures.select(["forward.out.fp32.1x2048x1024"]) == ["forward.out.fp32.1x2048x1024"]
    with pytest.raises(ValueError, match="'tok'"):
        measures.select(["tok"])


def test_list(capsys):
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(measures.MEASURES)


@pytest.mark.parametrize("arguments", [["--only", "nonsense"], ["--compare", "missing.json"]])
def test_bad_input_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_tiny_run(tmp_path, capsys):
    path = tmp_path / "result.json"
    only = ["accuracy.reference,forward.out.bf16.1x2048x1024", "sparse.backward"]
    threads = torch.get_num_threads()
    assert main(["--quick", "--rounds", "1", "--threads", "1", "--only", *only, "--json", str(path)]) == 0
    assert torch.get_num_threads() == threads
    content = json.loads(path.read_text())
    assert content["settings"]["rounds"] == 1
    assert {"cpu", "threads", "torch", "isa", "allocator", "date"} <= set(content["machine"])
    found, _ = rows.read(path)
    assert {row.measure for row in found} == {
        "accuracy.reference",
        "forward.out.bf16.1x2048x1024",
        "sparse.backward",
    }
    assert {row.mode for row in found} == {"", "out=", "pooled"}
    assert all(row.median_us is not None and row.median_us > 0 for row in found if row.value is None)
    printed = capsys.readouterr().out
    assert "floors reached" in printed

    # The same run, against itself.
    arguments = ["--quick", "--rounds", "1", "--threads", "1", "--only", "accuracy.reference", "--compare", str(path)]
    assert main(arguments) == 0
    assert "Against the older run" in capsys.readouterr().out


def test_strict_reports_a_missed_floor(monkeypatch):
    missed = [dataclasses.replace(Row("token.call", "x", ratio=2.0), floor=1.0)]
    monkeypatch.setattr(measures, "run", lambda *_: missed)
    assert main(["--only", "token.call"]) == 0
    assert main(["--only", "token.call", "--strict"]) == 1


def test_a_failing_child_says_why():
    with pytest.raises(children.ChildError, match="nothing_of_this_name"):
        children.call("measures:nothing_of_this_name", {})
