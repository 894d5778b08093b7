"""The benchmark's own arithmetic, and that its command runs. No test here depends on how fast anything is."""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from posenc_ext import CONVENTIONS, functional

ROOT = Path(__file__).resolve().parent.parent


def find_bench() -> str:
    """The benchmark as the command line finds it: in the package, or in this checkout."""
    if importlib.util.find_spec("posenc_ext.bench") is not None:
        return "posenc_ext.bench"
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # at the end: the package under test stays the one already imported
    return "bench"


BENCH = find_bench()
command = importlib.import_module(f"{BENCH}.__main__")  # imports all the others
bench = sys.modules[BENCH]
accuracy, cases, children, inputs, machine = bench.accuracy, bench.cases, bench.children, bench.inputs, bench.machine
memory, plots, report, roofline, rows, run, timing = (
    getattr(bench, name) for name in ("memory", "plots", "report", "roofline", "rows", "run", "timing")
)
main, Case, Provider, Rounds, Row = command.main, cases.Case, timing.Provider, timing.Rounds, rows.Row
Settings, Shape = timing.Settings, inputs.Shape
FEW = Settings(rounds=2, seconds=0.0, threads=1, quick=True)
GPU = Settings(gpu=True, dry_run=True)
collected = functools.cache(machine.collect_env.get_env_info)


@pytest.fixture(autouse=True)
def _collect_once(monkeypatch):
    monkeypatch.setattr(machine.collect_env, "get_env_info", collected)  # takes a second


def always(name, value=None, **fields):
    return Provider(name, lambda given: value, [0], **fields)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_median_and_ratio_are_taken_over_rounds():
    timed = Rounds({"ours": [1e-6, 2e-6, 9e-6], "theirs": [2e-6, 2e-6, 3e-6]})
    assert timed.median_us("ours") == pytest.approx(2.0)
    assert timed.ratio("ours", "theirs") == pytest.approx({"ratio": 1.0, "q25": 0.75, "q75": 2.0})
    with pytest.raises(ValueError, match="shorter"):
        Rounds({"a": [1.0, 2.0], "b": [1.0]}).ratio("a", "b")


def made(seconds, thresholds=None, failures=None, **fields):
    """Rows of a case whose calls move 300 bytes, and whose copy 200."""
    case = Case("m", "", thresholds=thresholds or {}, bytes_moved=lambda shape: 300)
    names = [*seconds, *(failures or {})]
    providers = [always(name, bytes=200 if name == "copy" else None, **fields.get(name, {})) for name in names]
    timed = Rounds({name: [value] * 3 for name, value in seconds.items()}, failures or {}, preempted=7.0)
    return run.rows_of(case, "cold", providers, timed)


def test_rows_of_a_case():
    seconds, thresholds = {"ours": 2e-6, "eager": 6e-6, "copy": 1.25e-6}, {"eager": 0.4, cases.SHARE: 0.9}
    ours, share, eager, copy = made(seconds, thresholds)
    assert (ours.provider, ours.median_us, ours.ratio, ours.passed) == ("ours", pytest.approx(2.0), None, None)
    assert (ours.rounds, ours.preempted, ours.bytes) == (3, 7.0, 300)
    assert ours.gigabytes_per_second == pytest.approx(300 / 2e-6 / 1e9)
    # 150 bytes a microsecond against the copy's 160.
    assert (share.value, share.passed) == (pytest.approx(150 / 160), True)
    assert (eager.ratio, eager.q25, eager.q75) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert (eager.passed, eager.of_copy) == (True, pytest.approx(50 / 160))
    assert (copy.bytes, copy.of_copy, copy.passed) == (200, pytest.approx(1.0), None)
    assert made({"ours": 2e-6, "copy": 1e-6}, {cases.SHARE: None})[1].passed is None


def test_a_provider_that_fails_is_a_row_and_a_missed_threshold():
    *_, broken = made({"ours": 1e-6, "copy": 1e-6}, {"compiled": 1.0}, {"compiled": "failed: no compiler"})
    assert (broken.provider, broken.median_us, broken.passed, broken.failed) == ("compiled", None, False, True)
    # Without ours the times of the others are facts all the same.
    case = Case("m", "", thresholds={"eager": 0.4})
    timed = Rounds({"eager": [1e-6]}, {"ours": "failed: x"})
    ours, eager = run.rows_of(case, "cold", [always("ours"), always("eager")], timed)
    assert (ours.failed, eager.median_us, eager.ratio, eager.passed) == (True, 1.0, None, False)


@pytest.mark.parametrize(("copy", "threshold", "passed"), [(1.9, 1.6, False), (1.4, 1.4, True)])
def test_speed_up_by_threads_needs_to_be_no_better_than_a_copys(copy, threshold, passed):
    seconds = {"posenc_ext, 2 threads": 1.0, "posenc_ext, 1 thread": 1.5}
    seconds |= {"copy, 2 threads": 1.0, "copy, 1 thread": copy}
    over = {f"{who}, 1 thread": {"speedup_over": f"{who}, 2 threads"} for who in ("posenc_ext", "copy")}
    judged = [row for row in made(seconds, {"posenc_ext, 1 thread": 1.6}, **over) if row.passed is not None]
    assert [(row.ratio, row.threshold, row.passed) for row in judged] == [pytest.approx((1.5, threshold, passed))]


def test_threshold_in_both_directions():
    """A threshold that nothing was measured for is not reached."""
    for value, most, passed in ((0.9, 0.9, True), (0.91, 0.9, False), (None, 0.9, False), (0.1, None, None)):
        assert Row("m", "c", ratio=value, threshold=most).passed is passed
        assert Row("m", "c", value=value, threshold=most).passed is passed
    assert [Row("m", "c", ratio=n, threshold=1.6, at_least=True).passed for n in (1.6, 1.59)] == [True, False]


def test_bytes_of_the_shapes():
    """As the README states them."""
    shape = Shape(2, 5, 4, torch.bfloat16, vocabulary=100)
    assert shape.forward_bytes() == 10 * 8 + 2 * 10 * 4 * 2
    assert shape.forward_bytes(positions=True) == 2 * 10 * 8 + 2 * 10 * 4 * 2
    assert shape.backward_bytes() == 10 * 8 + 110 * 4 * 2
    assert shape.distinct == 10  # 9.56
    assert cases.sparse_bytes(shape) == 10 * 8 + 20 * 4 * 2
    assert cases.sparse_step_bytes(shape) == shape.forward_bytes() + cases.sparse_bytes(shape) + 7 * 10 * 4 * 2


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_every_provider_runs_in_every_round_on_the_same_fresh_inputs():
    seen: list[tuple[str, int]] = []
    made = [Provider(name, lambda given, name=name: seen.append((name, given)), [1, 2, 3, 4]) for name in "ab"]
    timed = timing.run_rounds(made, Settings(rounds=2), calls=3)
    assert {name: len(times) for name, times in timed.seconds.items()} == {"a": 2, "b": 2}
    blocks = [seen[-16:][i : i + 4] for i in range(0, 16, 4)]  # an untimed call, then three
    assert ["".join(name for name, _ in block) for block in blocks] == ["aaaa", "bbbb", "bbbb", "aaaa"]
    assert all([given for _, given in block] == [1, 2, 3, 4] for block in blocks)


def every_case():
    return [*run.cases_of(FEW).values(), *run.cases_of(FEW, kernels=True).values(), *run.cases_of(GPU).values()]


def test_no_batch_comes_twice_within_a_block():
    for case in every_case():
        large = dataclasses.replace(case, shape=Shape(4, 8, 8), calls=min(case.calls, 32))
        batches = large.batches(FEW)
        assert len(batches) == large.calls + 1
        assert len({tuple(tokens.flatten().tolist()) for tokens in batches}) == len(batches), case.name


def test_a_slow_machine_gets_fewer_rounds():
    timed = timing.run_rounds([always("a")], Settings(rounds=50, seconds=0.0), calls=1)
    assert len(timed.seconds["a"]) == timing.FEWEST_ROUNDS


def test_threads_are_set_for_a_provider_and_restored():
    before, seen = torch.get_num_threads(), []
    one, two = (Provider(f"{n}", lambda n: seen.append((n, torch.get_num_threads())), [n], threads=n) for n in (1, 2))
    timing.run_rounds([one, two], Settings(rounds=2), calls=1)
    assert set(seen) == {(1, 1), (2, 2)}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("way", "steps", "seconds"),
    [
        ("cold", "hold flush mark call mark flush mark call mark synchronize seconds seconds", 1.0),
        ("called", "call synchronize mark call call mark synchronize seconds", 0.5),
        ("graph", "replay mark replay mark synchronize seconds", 0.5),
    ],
)
def test_what_is_timed(way, steps, seconds, monkeypatch):
    clock = mock.Mock()
    clock.mark.side_effect, clock.seconds.side_effect = itertools.count(), lambda start, end: end - start
    clock.capture.side_effect = lambda calls: calls() or clock.replay
    monkeypatch.setattr(timing, "clock_of", lambda device: clock)
    timed = timing.run_rounds([Provider("a", clock.call, [1, 2, 3])], Settings(rounds=1), 2, way)
    assert timed.seconds == {"a": [seconds]}
    assert " ".join(name for name, *_ in clock.method_calls).endswith(steps)
    assert clock.call.call_args_list[-2:] == [mock.call(2), mock.call(3)]  # the first is not timed


def test_who_raises_is_left_out():
    def broken(given):
        raise RuntimeError("no kernel image\nis available")

    timed = timing.run_rounds([always("good"), Provider("bad", broken, [1])], FEW, 2)
    assert list(timed.seconds) == ["good"]
    assert timed.failures == {"bad": "failed: RuntimeError: no kernel image"}
    assert timing.reason(ValueError()) == "failed: ValueError: no message"


def test_the_device_clock(monkeypatch):
    """What it asks of torch.cuda."""
    cuda = mock.Mock()
    cuda.get_device_properties.return_value.L2_cache_size = 4096
    cuda.Event.return_value.elapsed_time.return_value = 10.0
    for name in ("get_device_properties", "Event", "synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name), raising=False)
    clock = timing.CudaClock(torch.device("cpu"))
    clock.flush()
    assert clock._sink == clock._ballast.numel() == 3 * 1024
    clock.hold(0.5)
    cuda._sleep.assert_called_once_with(1_500_000_000)
    assert clock.seconds(clock.mark(), clock.mark()) == pytest.approx(0.01)
    assert cuda.Event.return_value.record.call_count == 2
    clock.synchronize()
    cuda.synchronize.assert_called_once_with()


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_the_cases_of_the_readme():
    known = run.cases_of(Settings(gpu=True))
    for sizes in ("32x512x512", "8x2048x1024", "1x131072x1024", "256x1x4096"):
        assert {f"forward.fp32.{sizes}", f"forward.bf16.{sizes}"} <= set(known)
    for dtype, ids, size in itertools.product(("fp32", "bf16"), ("uniform", "zipf", "half-hot"), (32_000, 256_000)):
        assert known[f"backward.{ids}.{size}.{dtype}.32x512x512"].thresholds[cases.DENSE_BACKWARD] == 1 / 1.5
    assert {"copy.large", "forward.strided", "backward.tokens.512", "backward.tokens.65536"} <= set(known)
    assert (len(known), len(run.select(run.cases_of(FEW), []))) == (1 + 8 + 12 + 4, 73)
    large, small = (known[f"forward.bf16.{sizes}"].thresholds for sizes in ("8x2048x1024", "32x512x512"))
    assert (large[cases.SHARE], small[cases.SHARE], large[inputs.EAGER]) == (0.9, None, 0.4)
    assert {large[name] for name in (cases.COMPILED, cases.AUTOTUNED, cases.FORMULA)} == {1.0}
    if BENCH == "bench":  # beside the sources, results of the first format
        kept, _ = rows.read(ROOT / "bench/results/cpu-xeon-2-threads.json")
        forward = ("alike", "unlike", "offsets", "learned", "floating", "padded", "normed", *cases.EXTRAS)
        later = ("sweep.", "train.adam", "train.sparse_adam", "token.compiled", "accuracy.positions")
        later += ("positions.", "dropout.", "timesteps.", "axes.", *(f"forward.{name}." for name in forward))
        former = {row.case for row in kept} - {"forward.positions.fp32.16x512x512"}  # now alike and unlike
        assert former == {name for name in run.cases_of(FEW) if not name.startswith(later)}


# Of a sweep, one point for each task: in a tiny shape most are alike. Of one along the dtype, all.
TINY = list({(case.group, case.series, case.shape.dtype): case for case in every_case() if case.probe is None}.values())


@pytest.mark.parametrize("case", TINY, ids=[f"{case.group}-{case.name}" for case in TINY])
def test_every_provider_runs_and_agrees(case):
    settings = GPU if case.group == cases.DEVICE else FEW
    settings = dataclasses.replace(settings, rounds=1, quick=True, threads=case.threads)
    shape = dataclasses.replace(case.shape, batch=2, length=8, width=32, vocabulary=64)
    found = run.run_case(dataclasses.replace(case, shape=shape, calls=2), settings)
    assert not [row.note for row in found if row.failed]
    assert all(row.median_us > 0 for row in found if row.value is None)
    wanted = {name for name in case.thresholds if "compile" not in name and "autotune" not in name}
    wanted.discard(cases.COMPOSED if importlib.util.find_spec("transformers") else cases.TRANSFORMERS)
    assert wanted <= {row.provider for row in found}


def test_who_computes_something_else_fails(monkeypatch):
    one, nan = torch.ones(3), torch.tensor([1.0, 1.0, math.nan])
    providers = [always("ours", one), always("near", one + 1e-6), always("far", 2 * one), always("nan", nan)]
    failures = run.disagreements([*providers, always("other work", nan, same=False)], 1e-5)
    assert failures.keys() == {"far", "nan"}
    assert failures["far"] == "failed: AssertionError: differs from ours by 1 of its norm"
    wrong = lambda shape, weight: lambda ids: weight[ids]  # noqa: E731
    monkeypatch.setattr(inputs, "textbook", wrong)
    for name in ("forward.module.fp32.16x512x512", "forward.out.fp32.16x512x512"):
        case = dataclasses.replace(run.cases_of(FEW)[name], shape=Shape(2, 8, 32, vocabulary=64), calls=1)
        (eager,) = [row for row in run.run_case(case, FEW) if row.provider == inputs.EAGER]
        assert eager.note.startswith("failed: AssertionError: differs from posenc_ext")


def test_a_case_that_breaks_is_reported():
    def broken(case, settings):
        raise MemoryError("too large")

    case = Case("m", "", broken, thresholds={"eager": 0.4}, group=cases.POOLED, threads=2)
    ours, theirs = run.run_case(case, Settings())
    assert (ours.note, ours.mode) == ("failed: MemoryError: too large", "pooled")
    assert (theirs.provider, theirs.passed) == ("eager", False)
    assert {row.passed for row in run.run_case(case, Settings(), cases.PLAIN)} == {None}
    (row,) = run.run_case(case, FEW)
    assert (row.note, row.failed) == ("needs --threads 2 or more", False)


def test_pooled_cases_run_in_a_child_and_again_for_information():
    chosen = run.select(run.cases_of(FEW), ["sparse", "token.call"])
    assert [title.split(",")[-1] for title, _ in run.steps(chosen, FEW)] == [" no grad", *[" pooled allocator"] * 2]
    titles = [title for title, _ in run.steps(chosen, Settings())]
    assert [title.split(",")[-1] for title in titles[3:]] == [" plain allocator"] * 2


def test_children():
    child = children.Child(children.POOLED)
    with child.pool:
        assert child.call(os.getenv, "MALLOC_TOP_PAD_") == "536870912"
        assert child.call(os.getpid) == child.call(os.getpid) != os.getpid()
    assert "MALLOC_TOP_PAD_" not in os.environ
    assert children.call(os.getenv, "MALLOC_TOP_PAD_") is None


def test_memory_beyond_the_output(monkeypatch):
    monkeypatch.setattr(memory, "SHAPE", Shape(1, 512, 64, vocabulary=50))
    monkeypatch.setattr(children, "call", lambda function, *arguments: function(*arguments))
    ours, eager = memory.forward(Settings(threads=torch.get_num_threads()))
    assert "output of 0, and a table of 0" in ours.note
    assert "and a table of 1 before" in eager.note  # 5000 * 64 * 4 bytes
    assert math.isfinite(ours.value)


def test_memory_by_length(monkeypatch):
    monkeypatch.setattr(memory, "SHAPE", Shape(1, 512, 64, vocabulary=50))
    monkeypatch.setattr(memory, "LENGTHS", (8, 16384))
    monkeypatch.setattr(children, "call", lambda function, *arguments: function(*arguments))
    # What a call takes in this process depends on what was freed before; without that, the table is left.
    monkeypatch.setattr(memory, "_status_mib", lambda field: 0.0)
    found = memory.by_length(Settings(threads=torch.get_num_threads()))
    assert [(row.provider, row.at) for row in found] == [
        (n, at) for n in ("posenc_ext", inputs.EAGER) for at in (8, 16384)
    ]
    tables = [eager.value - ours.value for ours, eager in zip(found[:2], found[2:], strict=True)]
    assert tables == [rows * 64 * 4 / 2**20 for rows in (5000, 16384)]


# ---- sweeps and pictures ---------------------------------------------------------------------------------------------


def test_sweeps_measure_at_every_point():
    for axis in cases.SWEEPS[:-1]:
        assert len(cases.sweep_points(axis)) > (axis != "threads")
        chosen = run.select(run.cases_of(FEW), [f"sweep.{axis}"])
        assert [case.at for case in chosen] == [*cases.sweep_points(axis)] * 2
        assert len({case.series for case in chosen}) == 2
    (case,) = run.select(run.cases_of(FEW), ["sweep.ids.forward.zipf"])
    assert (case.ids, case.shape) == ("zipf", Shape(4, 512, 512))
    tiny = dataclasses.replace(case, shape=Shape(2, 8, 32, vocabulary=64), calls=2)
    found = run.run_case(tiny, FEW)
    assert {(row.case, row.axis, row.at, row.failed) for row in found} == {("sweep.ids.forward", "ids", "zipf", False)}
    assert [row.provider for row in found] == ["posenc_ext", inputs.EAGER, cases.EMBEDDING, "copy"]
    seen = []
    fake = cases.swept(tiny, FEW, backward=False, threads=3)
    timing.run_rounds([dataclasses.replace(fake[0], call=lambda _: seen.append(torch.get_num_threads()))], FEW, 1)
    assert set(seen) == {3}


def points():
    """Two tasks along the tokens, one probe along the position, and a row that stands alone."""
    for task, providers in (("forward", ("posenc_ext", "copy")), ("step", ("posenc_ext",))):
        for provider in providers:
            for at in (1, 8, 64):
                took = at * (2.0 if provider == "copy" else 3.0)
                yield Row(f"sweep.tokens.{task}", provider, "pooled", took, bytes=6000 * at, at=at, axis="tokens")
    for name, at in itertools.product(("vaswani, exact", "vaswani, bf16 table", "marian, exact"), (16, 256)):
        yield Row("accuracy.positions", name, value=at * 1e-9, unit="error", at=at, axis="position")
    yield Row("sweep.length.memory", "posenc_ext", value=3.0, unit="MiB", at=1024, axis="length")
    yield Row("sweep.ids.forward", "posenc_ext", note="failed: x", at="zipf", axis="ids")
    yield Row("sweep.ids.forward", "posenc_ext", "pooled", 5.0, bytes=1000, at="uniform", axis="ids")
    yield Row("forward", "posenc_ext", "pooled", 5.0)


def test_pictures_hold_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    figures = dict(plots.draw([*points()]))
    assert list(figures) == ["cost_by_tokens", "error_by_position", "memory_by_length", "cost_by_ids"]
    times, steps, bandwidths, _ = figures["cost_by_tokens"].axes
    ours, copy = times.lines
    assert (ours.get_xydata().tolist(), copy.get_ydata().tolist()) == ([[1, 3], [8, 24], [64, 192]], [2, 16, 128])
    assert (copy.get_label(), copy.get_linestyle(), ours.get_linestyle()) == ("copy, the limit", "--", "-")
    assert [line.get_ydata().tolist() for line in bandwidths.lines] == [[2] * 3, [3] * 3]  # bytes over ns
    assert (times.get_title(), steps.get_title(), times.get_xlabel()) == ("forward", "step", "tokens")
    first, second = figures["error_by_position"].axes
    assert [line.get_label() for line in first.lines] == ["exact", "bf16 table"]
    assert (first.get_title(), second.get_title()) == ("vaswani", "marian")
    assert first.lines[0].get_xydata().tolist() == [[16, 16e-9], [256, 256e-9]]
    assert [*figures["cost_by_ids"].axes[0].lines[0].get_xdata()] == ["uniform"]  # what failed has no point
    for path in plots.write([*points()], tmp_path / "new", "a machine"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "new").iterdir())) == 4


@pytest.mark.parametrize("columns", [80, 100])
def test_series_are_tables(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    sweeps = [*points(), *accuracy.by_position(FEW)]
    report.show(sweeps, {"sweep.tokens.forward": "forward by tokens"})
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert "…" not in printed
    assert re.search(r"tokens +1 +8 +64", printed)
    assert re.search(r"posenc_ext +3 us +24 us +192 us", printed)
    assert re.search(r"posenc_ext +failed +5 us", printed)
    assert "posenc_ext, zipf: failed: x" in printed


def test_a_kept_run_is_shown_drawn_and_compared(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    kept, older, drawn = tmp_path / "kept.json", tmp_path / "older.json", tmp_path / "plots"
    rows.write(kept, [*points()], machine={"cpu": "this one", "torch": "2"})
    faster = [dataclasses.replace(row, us25=1.0, us75=1.1) for row in points()]
    rows.write(older, [*faster, Row("gone", "x")], machine={"cpu": "that one"})
    assert main(["--from", str(kept), "--plots", str(drawn), "--compare", str(older)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("this one, unknown threads")
    assert "Compared with that one" in printed
    assert "1 rows of the older run are not in this one" in printed
    assert (drawn / "cost_by_tokens.png").stat().st_size > 5000
    rows.write(kept, [Row("m", "x")])
    assert main(["--from", str(kept), "--plots", str(drawn)]) == 2
    assert "needs a run with --sweep" in capsys.readouterr().err


def test_pictures_need_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(run, "run_case", lambda *_: pytest.fail("asked for after the run"))
    assert main(["--plots", "x", "--only", "token.call"]) == 2
    assert "pip install 'posenc_ext[plot]'" in capsys.readouterr().err


# ---- what got slower -------------------------------------------------------------------------------------------------

RATIO = Row("m", "eager", ratio=0.5, q25=0.45, q75=0.55)


@pytest.mark.parametrize(
    ("was", "now", "worse"),
    [
        (RATIO, {"ratio": 0.6, "q25": 0.56, "q75": 0.7}, True),
        (RATIO, {"ratio": 0.6, "q25": 0.54, "q75": 0.7}, False),  # the quartiles touch
        (RATIO, {"ratio": 0.1, "q25": 0.1, "q75": 0.2}, False),  # faster
        (RATIO, {"us25": 90.0, "us75": 91.0}, False),  # the machine is slower, not the layer
        (dataclasses.replace(RATIO, at_least=True), {"q25": 0.2, "q75": 0.44}, True),
        (dataclasses.replace(RATIO, at_least=True), {"q25": 0.6, "q75": 0.7}, False),
        (Row("m", "ours", us25=1.0, us75=2.0), {"us25": 2.1, "us75": 3.0}, True),
        (Row("m", "ours", us25=1.0, us75=2.0), {"us25": 1.9, "us75": 3.0}, False),
        (Row("m", "ours", "", 1.5), {"us25": 2.1, "us75": 3.0}, False),  # an old file has no quartiles of times
        (Row("m", "exact", value=1e-7, unit="error"), {"value": 1.02e-7}, True),
        (Row("m", "exact", value=1e-7, unit="error"), {"value": 1.005e-7}, False),
        (Row("m", "ours", value=0.1, unit="MiB"), {"value": 1.0}, False),
        (Row("m", "ours", value=0.1, unit="MiB"), {"value": 1.2}, True),
        (Row("m", "share", value=0.9, unit="share", at_least=True), {"value": 0.8}, True),
        (Row("m", "ours", "", 1.0), {"note": "failed: x"}, True),
        (Row("m", "ours", note="failed: x"), {"note": "failed: y"}, False),
    ],
)
def test_slower_is_beyond_the_quartiles(was, now, worse):
    assert rows.slower(was, dataclasses.replace(was, **now)) is worse


def test_regressions_are_named(tmp_path, monkeypatch, capsys):
    old = [RATIO, Row("s", "ours", "pooled", 1.0, us25=1.0, us75=1.2, at=8, axis="tokens"), Row("m", "copy")]
    new = [dataclasses.replace(RATIO, ratio=0.8, q25=0.7, q75=0.9), dataclasses.replace(old[1], us25=1.5, us75=2.0)]
    assert report.show_changes(old, new) == new
    printed = capsys.readouterr().out
    assert "2 of 2 rows got worse" in printed
    assert "slower: m, eager: ratio 0.50 (0.45-0.55) before, 0.80 (0.70-0.90) now" in printed
    assert "slower: s pooled, ours, at 8: 1 us (1-1.2) before, 1 us (1.5-2) now" in printed
    assert "1 rows of the older run" in printed
    for name, kept in (("old", old), ("new", new)):
        rows.write(tmp_path / name, kept)
    arguments = ["--from", str(tmp_path / "new"), "--compare", str(tmp_path / "old")]
    assert (main(arguments), main([*arguments, "--strict"])) == (0, 1)
    assert main(["--from", str(tmp_path / "new"), "--compare", str(tmp_path / "new"), "--strict"]) == 0


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_copies_read_whole_spans_of_the_table():
    weight = torch.arange(100 * 64.0).view(100, 64)
    for elements in (64, 64 * 30, 64 * 70, 64 * 100):
        spans = inputs.spans(weight, elements)
        assert 2 <= len(spans) <= inputs.SPANS
        assert all(span.numel() == elements and span.is_contiguous() for span in spans)
    longer = inputs.copy_of(Shape(1, 8, 4, vocabulary=10), 20)
    assert {span.numel() for span in longer.inputs} == {80}
    assert longer.bytes == 2 * 80 * 4


@pytest.mark.parametrize("kind", inputs.IDS)
def test_ids_lie_in_the_table_and_do_not_change(kind):
    shape = Shape(4, 32, 8, vocabulary=1000)
    first, second = (inputs.IDS[kind](shape, 3) for _ in range(2))
    for tokens, again in zip(first, second, strict=True):
        assert (tokens.shape, tokens.dtype) == ((4, 32), torch.int64)
        assert 0 <= tokens.min() <= tokens.max() < 1000
        assert torch.equal(tokens, again)


def test_distributions_of_ids():
    for tokens in inputs.half_equal(Shape(4, 32, 8, vocabulary=10**6), 3):
        assert tokens.unique(return_counts=True)[1].max() in (64, 65)
    (tokens,) = inputs.zipf(Shape(100, 100, 8, vocabulary=1000), 1)
    counts = torch.bincount(tokens.flatten(), minlength=1000).sort(descending=True)
    first = 10_000 / sum(1 / r for r in range(1, 1001))
    assert counts.values[:2].tolist() == pytest.approx([first, first / 2], rel=0.2)
    assert counts.indices[:10].max() - counts.indices[:10].min() > 100


def test_the_formula_is_the_layer():
    shape = Shape(4, 32, 8, vocabulary=100)
    weight, tokens = torch.nn.Parameter(inputs.table(shape)), inputs.uniform(shape, 1)[0]
    ours = inputs.fused(shape, weight)(tokens)
    torch.testing.assert_close(inputs.formula(weight, tokens), ours, rtol=0, atol=1e-5)


# ---- accuracy --------------------------------------------------------------------------------------------------------


def test_positions_cover_the_ends_and_both_signs():
    for bits in (24, 40):
        chosen = accuracy.sample(bits, 50)
        assert len(chosen) == 50
        assert {0, 2**bits, 2**16 + 1} <= {abs(position) for position in chosen}
        assert min(chosen) < 0 < max(chosen)
        assert accuracy.sample(bits, 50) == chosen


@pytest.mark.parametrize("planted", [0.0, 0.5, math.nan])
def test_the_worst_error_is_found(planted):
    positions = [0, 1, 5]

    def sin_cos(convention, width):
        frequencies = functional.angular_frequencies(width, convention=convention, precision="exact").numpy()
        angles = np.array(positions)[:, None] * frequencies
        sine, cosine = np.sin(angles), np.cos(angles)
        if convention.name == "musicgen" and width == 63:  # cosines first
            cosine[2, 1] += planted
        return sine, cosine

    row = accuracy.worst("exact", positions, sin_cos, "")
    row = dataclasses.replace(row, threshold=2.5e-7)
    assert row.passed is (planted == 0)
    if planted:
        assert "musicgen, width 63, position 5, column 1" in row.note
        assert row.value == (None if math.isnan(planted) else pytest.approx(planted, abs=1e-6))
    assert f"{len(CONVENTIONS) * 3 * (512 + 63)} numbers" in row.note


def test_mpmath_agrees(monkeypatch):
    pytest.importorskip("mpmath")
    monkeypatch.setattr(accuracy, "sample", lambda bits, count: [0, 3])
    monkeypatch.setattr(accuracy, "WIDTHS", (9,))
    (row,) = accuracy.exact(FEW)
    assert row.value < 2.5e-7


def test_errors_by_position():
    """Every way of making an encoding, for every convention: near the end of fp32 they are what each is known for."""
    found = {(*row.provider.split(", "), row.at): row.value for row in accuracy.by_position(FEW)}
    assert len(found) == len(CONVENTIONS) * 5 * len(accuracy.POSITIONS)
    for name, convention in CONVENTIONS.items():
        last = {recipe: found[name, recipe, 2**24] for recipe in accuracy.RECIPES}
        first = {recipe: found[name, recipe, 2**4] for recipe in accuracy.RECIPES}
        assert last["exact"] < 2.5e-7
        assert last["reference"] > 0.1
        assert (last["fp32 table"] < 1e-7) is (convention.precision == "exact")
        assert max(first["fp32 table"], first["reference"]) < 5e-6
        assert 1e-3 < first["bf16 table"] < 4e-3
        assert last["computed in bf16"] > 0.5


# ---- the estimate ----------------------------------------------------------------------------------------------------


def test_estimate_is_bytes_over_bandwidth(capsys):
    assert [roofline.chip_of(name) for name in ("NVIDIA A100-SXM4-80GB", "")] == ["A100", "H200"]
    entry = roofline.estimates("H100")[0]  # fp32 [32, 512] x 512: ids, rows and output
    assert entry["us"] == pytest.approx(32 * 512 * (8 + 2 * 512 * 4) / 3350e9 * 1e6, abs=0.1)
    assert main(["--estimate-only", "--chip", "H100"]) == 0
    assert "estimate, not measured" in capsys.readouterr().out


# ---- tables and files ------------------------------------------------------------------------------------------------


def test_cells():
    ours = Row("m", "posenc_ext", "cold", 31.25, 15, bytes=134_217_728, of_copy=0.93)
    assert report.cells(ours) == ["  posenc_ext", "31.2 us", *[""] * 4, "134.2", "4295", "93%"]
    share = Row("m", cases.SHARE, "cold", value=0.93, unit="share", threshold=0.9, at_least=True)
    assert report.cells(share)[1:6] == ["93%", "", "", ">= 90%", "pass"]
    eager = Row("m", "eager", "cold", 15000.0, 15, ratio=0.5, q25=0.4, q75=0.6, threshold=0.4)
    assert report.cells(eager)[1:6] == ["15.0 ms", "0.50", "0.40-0.60", "<= 0.40", "MISS"]
    assert report.cells(Row("m", "x", note="failed: y"))[1] == "failed"
    assert [report.number(n, "us") for n in (1.234, 999.4, 1234.0)] == ["1.23 us", "999 us", "1234 us"]
    assert report.number(1.5e-7, "error") == "1.50e-07"


def test_verdict_counts_and_names_what_was_missed():
    good, bad = Row("a", "x", ratio=0.5, threshold=0.9), Row("b", "y", ratio=1.0, threshold=0.9, preempted=500.0)
    text = report.verdict([good, bad, Row("c", "z", ratio=2.0)])
    assert text.startswith("1 of 2 thresholds reached\n  missed: b, y: 1.00, threshold <= 0.90\n")
    assert "during 1 cases" in text
    assert (report.mark(good), report.mark(bad)) == ("pass", "MISS?")


@pytest.mark.parametrize("width", [80, 100, 132])
def test_tables_fit_the_terminal(width, monkeypatch, capsys):
    """Every table, note and verdict of a kept run, with no number cut short."""
    monkeypatch.setenv("COLUMNS", str(width))
    kept, _ = rows.read(Path(report.__file__).parent / "results/cpu-xeon-2-threads.json")
    report.show(kept, {case.name: case.title for case in run.cases_of(Settings()).values()})
    report.show_changes(kept, kept)
    roofline.show(roofline.estimates("H200"))
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= width
    assert "…" not in printed
    shown = {"quartiles": width >= 100, "GB/s": width >= 120}
    assert {name: f" {name} " in printed for name in shown} == shown
    for row in kept:
        assert report.number(row.median_us, "us") in printed
    assert main(["--list"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= width


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_counts(terminal, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    with report.progress(2) as announce:
        announce("the first")
        announce("the second, whose title does not fit into a line")
    printed = capsys.readouterr().err
    assert "0 of 2 done, 0 s: the first" in printed
    assert ("1 of 2 done, 0 s: the second, whose tit…" in printed) is terminal
    assert ("does not fit into a line\n" in printed) is not terminal


def test_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    report.table("title", ("name", "time"), [["a", "1 us"]])
    with report.progress(1) as announce:
        announce("the first")
    assert capsys.readouterr() == ("title\nname\ttime\na\t1 us\n\n", "0 of 1 done, 0 s: the first\n")


def test_rows_survive_json(tmp_path):
    kept = [Row("m", "theirs", "out=", 3.0, 25, 1.5, 0.5, 0.4, 0.6, threshold=0.9, note="n")]
    kept.append(Row("error", "exact", value=1e-7, unit="error", threshold=2.5e-7))
    path = tmp_path / "folder" / "result.json"
    rows.write(path, kept, machine={"cpu": "x"})
    assert rows.read(path) == (kept, {"cpu": "x"})
    content = json.loads(path.read_text())
    assert [entry["passed"] for entry in content["rows"]] == [True, True]
    # The first format had other names, and a later one may have more.
    former = {"measure": "m", "contender": "c", "floor": 0.5, "later": 1}
    path.write_text(json.dumps({"format": 1, "rows": [former]}))
    assert rows.read(path) == ([Row("m", "c", threshold=0.5)], {})
    path.write_text('{"format": 0, "rows": []}')
    with pytest.raises(ValueError, match="format"):
        rows.read(path)


# ---- command ---------------------------------------------------------------------------------------------------------


def test_names_select_cases(capsys):
    known = run.cases_of(FEW)
    assert {name for name in known if known[name] not in run.select(known, [])} == {n for n in known if "sweep" in n}
    names = ["sparse.step", "*.exact", "token"]
    chosen = ["sparse.step", "token.call", "token.decode", "token.compiled", "accuracy.exact"]
    assert [c.name for c in run.select(known, names)] == chosen
    with pytest.raises(ValueError, match="'tok'"):
        run.select(known, ["tok"])
    assert main(["--list", "--only", "token.call,memory"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["token.call", "memory.forward"]


def test_bad_input_is_one_line(capsys):
    for arguments in (["--only", "nonsense"], ["--compare", "missing.json"], ["--rounds", "0"], ["--threads", "0"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--gpu", "--only", "copy.large"]) == 2
    assert "torch.cuda.is_available() is False" in capsys.readouterr().err


def test_tiny_run(tmp_path, capsys):
    """From end to end; then the same against itself."""
    path = tmp_path / "folder" / "gpu.json"
    arguments = ["--dry-run", "--quick", "--threads", "1", "--only", "copy", "forward.bf16", "--json", str(path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "dry run: times mean nothing" in printed
    assert "failed" not in printed
    content = json.loads(path.read_text())
    assert {"cpu", "threads", "torch", "isa", "allocator", "date", "device"} <= set(content["machine"])
    assert content["settings"]["rounds"] == 2
    found, _ = rows.read(path)
    assert {row.mode for row in found} == {"cold", "called", "graph"}
    assert main([*arguments, "--compare", str(path)]) == 0
    assert "Against the older run" in capsys.readouterr().out


def test_time_that_is_over_is_said(capsys):
    assert main(["--dry-run", "--seconds", "-1", "--only", "copy", "backward.zipf"]) == 0
    assert capsys.readouterr().out.count("failed: left out") == 5


def test_strict(monkeypatch, capsys):
    arguments = ["--only", "token.call", "--strict"]
    for row, code in ((Row("token.call", "x", ratio=2.0, threshold=1.0), 1), (Row("token.call", "x", note="n"), 0)):
        monkeypatch.setattr(run, "run_case", lambda *_, row=row: [row])
        assert main(arguments) == code
        assert main(arguments[:-1]) == 0
    monkeypatch.setattr(run, "run_case", lambda *_: [Row("token.call", "x", note="failed: n")])
    assert main(arguments) == 1


@pytest.mark.parametrize("module", ["gpu", "kernels"])
def test_the_modules_run(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--list"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"{BENCH}.{module}", run_name="__main__")
    assert ended.value.code == 0
    assert ("copy.large " if module == "gpu" else "kernel.exact.") in capsys.readouterr().out


# ---- the list of what only a GPU can tell


@pytest.fixture
def ticks():
    """Of a checkout alone."""
    if not (ROOT / "docs/cuda.md").exists():
        pytest.skip("no checkout here (docs/cuda.md)")
    return importlib.import_module(f"{BENCH}.ticks")


def test_the_list_names_tests_and_steps(ticks, monkeypatch):
    monkeypatch.setattr(ticks, "LIST", ROOT / "docs/cuda.md")
    lines = [line for line in ticks.LIST.read_text().splitlines() if line.startswith("- [ ]")]
    assert len(ticks.items()) == len(lines) >= 10
    files = [ROOT / f"tests/test_cuda{name}.py" for name in ("", "_errors", "_streams")]
    tests = set(re.findall(r"^def (test_\w+)", "".join(f.read_text() for f in files), re.MULTILINE))
    steps = set(re.findall(r"^ *step (\w+)", (ROOT / "bench/gpu.sh").read_text(), re.MULTILINE))
    for _, names in ticks.items():
        assert set(names) <= tests | steps


def test_what_a_run_has_shown(ticks, monkeypatch, tmp_path, capsys):
    listed = tmp_path / "list.md"
    listed.write_text("\n".join(f"- [ ] {c} ({n})" for c, n in [
        ("A", "build"), ("B", "test_good, build"), ("C", "test_good, test_bad"), ("D", "test_skipped, test_good"),
        ("E", "test_missing"), ("F", "memcheck"), ("G", "test_some")]))  # fmt: skip
    monkeypatch.setattr(ticks, "LIST", listed)
    (tmp_path / "summary.txt").write_text("build      ok, 3s\nmemcheck   FAILED (9), 4s: see memcheck.log\n")
    cases = ['name="test_good[a]"/', 'name="test_good[b]"/', 'name="test_bad[a]"><failure/></testcase',
             'name="test_bad[b]"/', 'name="test_skipped"><skipped/></testcase', 'name="test_some[a]"/',
             'name="test_some[b]"><skipped/></testcase']  # fmt: skip
    (tmp_path / "tests.xml").write_text("<suite>" + "".join(f"<testcase {c}>" for c in cases) + "</suite>")
    ticks.main(str(tmp_path))
    assert capsys.readouterr().out.splitlines() == [
        "done     A",
        "done     B",
        "failed   C (test_bad failed)",
        "not run  D (test_skipped not run)",
        "not run  E (test_missing not run)",
        "failed   F (memcheck failed)",
        "not run  G (test_some not run)",
    ]
    ticks.main(str(tmp_path / "nowhere"))
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"not"}
