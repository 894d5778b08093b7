"""The arithmetic of the benchmark for GPUs, and that its program runs, on a CPU in the GPU's place."""

import dataclasses
import importlib
import json
import subprocess
import sys
import types

import pytest
import torch
from test_bench import find_bench

BENCH = find_bench()


def part(name: str):
    return importlib.import_module(f"{BENCH}.{name}")


goals, inputs, measures, forward, backward = (
    part(f"gpu.{n}") for n in ("goals", "inputs", "measures", "forward", "backward")
)
clock, roofline, rounds, table, main_part = (
    part(f"gpu.{n}") for n in ("clock", "roofline", "rounds", "table", "__main__")
)
main = main_part.main
contenders, rows, settings, timing, traffic = map(part, ("contenders", "rows", "settings", "timing", "traffic"))
Row, Rounds, Contender = rows.Row, timing.Rounds, timing.Contender

SHAPE = contenders.Shape(4, 32, 8, vocabulary=1000)
FEW = settings.Settings(rounds=2, seconds=0.0, quick=True)


# ---- rows and goals --------------------------------------------------------------------------------------------------


def made(seconds, failures=None, large=False, wanted=None):
    return goals.rows_of(
        "m",
        "cold",
        Rounds({name: [value] * 3 for name, value in seconds.items()}),
        ours="posenc_ext",
        goals=wanted or {},
        failures=failures or {},
        bytes_moved=300,
        copy_bytes=200,
        large=large,
    )


def test_rows_of_a_measure():
    found = made({"posenc_ext": 2e-6, "eager": 6e-6, "copy": 1.25e-6}, large=True, wanted={"eager": 0.4})
    ours, share, eager, copy = found
    assert (ours.contender, ours.median_us, ours.passed) == ("posenc_ext", pytest.approx(2.0), None)
    assert ours.gigabytes_per_second == pytest.approx(300 / 2e-6 / 1e9)
    # 150 bytes a microsecond against the copy's 160.
    assert (share.value, share.passed) == (pytest.approx(150 / 160), True)
    assert (eager.ratio, eager.passed) == (pytest.approx(1 / 3), True)
    assert copy.of_copy == pytest.approx(1.0)


def test_the_share_has_a_goal_for_large_shapes_alone():
    seconds = {"posenc_ext": 2e-6, "copy": 1e-6}
    assert made(seconds, large=True)[1].passed is False
    assert made(seconds)[1].passed is None


def test_a_contender_that_fails_is_a_row_and_a_missed_goal():
    *_, broken = made({"posenc_ext": 1e-6, "copy": 1e-6}, {"compiled": "failed: no compiler"}, wanted={"compiled": 1.0})
    assert (broken.contender, broken.median_us, broken.passed) == ("compiled", None, False)
    assert goals.failures_of([broken]) == ["m cold, compiled: failed: no compiler"]
    assert table.cells([broken], {})[0][3] == "failed"


def test_without_ours_the_others_keep_their_times():
    found = made({"eager": 1e-6, "copy": 1e-6}, {"posenc_ext": "failed: RuntimeError: no kernel image"})
    assert [(row.contender, row.median_us) for row in found[:2]] == [("eager", 1.0), ("copy", 1.0)]
    assert found[-1].note.startswith("failed")


def test_goals_are_those_of_the_readme():
    assert goals.COPY_GOAL == 0.9
    assert goals.FORWARD_GOALS[contenders.EAGER] == pytest.approx(1 / 2.5)
    assert {goals.FORWARD_GOALS[n] for n in (contenders.COMPILED, goals.AUTOTUNED, goals.FORMULA)} == {1.0}
    assert list(goals.BACKWARD_GOALS) == [goals.DENSE_BACKWARD]
    assert goals.BACKWARD_GOALS[goals.DENSE_BACKWARD] == pytest.approx(1 / 1.5)


def test_bytes_of_the_shapes():
    """As the README states them: ids, a row for each token, the output; for the gradient all rows of the table."""
    assert traffic.forward(16 * 512, 512, 2) == 16 * 512 * (8 + 2 * 512 * 2)
    assert traffic.backward(32 * 512, 256_000, 512, 4) == 32 * 512 * 8 + (32 * 512 + 256_000) * 512 * 4


# ---- rounds ----------------------------------------------------------------------------------------------------------


class Recorder(clock.HostClock):
    """Notes what is asked of it."""

    def __init__(self):
        self.log = []
        self.now = 0.0

    def hold(self, seconds):
        self.log.append("hold")

    def flush(self):
        self.log.append("flush")

    def mark(self):
        self.log.append("mark")
        self.now += 1.0
        return self.now

    def synchronize(self):
        self.log.append("synchronize")


def test_cold_calls_are_flushed_and_timed_one_by_one():
    recorder = Recorder()
    made = [Contender("a", lambda given: recorder.log.append(given), [1, 2])]
    timed, failures = rounds.run_rounds(made, recorder, settings.Settings(rounds=1), 3, rounds.COLD)
    assert failures == {}
    assert timed.seconds == {"a": [1.0]}
    one = [step for given in (1, 2, 1) for step in ("flush", "mark", given, "mark")]
    assert recorder.log[-14:] == ["hold", *one, "synchronize"]


@pytest.mark.parametrize("mode", [rounds.COLD, rounds.CALLED, rounds.GRAPH])
def test_contenders_take_turns(mode):
    seen = []
    made = [Contender(name, lambda given, name=name: seen.append(name), [1]) for name in "abc"]
    timed, _ = rounds.run_rounds(made, clock.HostClock(), settings.Settings(rounds=6), 1, mode)
    assert {name: len(values) for name, values in timed.seconds.items()} == dict.fromkeys("abc", 6)
    order = [name for i, name in enumerate(seen) if i == 0 or seen[i - 1] != name]
    assert "".join(order).endswith("abcbcacababcbcacab")


def test_who_raises_is_left_out():
    def broken(given):
        raise RuntimeError("no kernel image\nis available")

    made = [Contender("good", lambda given: None, [1]), Contender("bad", broken, [1])]
    timed, failures = rounds.run_rounds(made, clock.HostClock(), FEW, 2, rounds.COLD)
    assert list(timed.seconds) == ["good"]
    assert failures == {"bad": "failed: RuntimeError: no kernel image"}


def test_reason_of_an_empty_exception():
    assert rounds.reason(ValueError()) == "failed: ValueError: no message"


# ---- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", inputs.IDS)
def test_ids_lie_in_the_table_and_do_not_change(kind):
    first, second = (inputs.IDS[kind](SHAPE, 3) for _ in range(2))
    assert len(first) == 3
    for tokens, again in zip(first, second, strict=True):
        assert tokens.shape == (4, 32)
        assert tokens.dtype == torch.int64
        assert tokens.min() >= 0
        assert tokens.max() < 1000
        assert torch.equal(tokens, again)


def test_zipf_is_skewed_and_spread_over_the_table():
    (tokens,) = inputs.zipf(contenders.Shape(100, 100, 8, vocabulary=1000), 1)
    rows_found, counts = tokens.unique(return_counts=True)
    counts, order = counts.sort(descending=True)
    expected = 10_000 / sum(1 / r for r in range(1, 1001))
    assert counts[0] == pytest.approx(expected, rel=0.15)
    assert counts[1] == pytest.approx(expected / 2, rel=0.2)
    hot = rows_found[order[:10]]
    assert hot.max() - hot.min() > 100


def test_the_formula_is_the_layer():
    weight = torch.nn.Parameter(torch.randn(1000, 8))
    tokens = contenders.id_batches(SHAPE, 1)[0]
    ours = contenders.fused(SHAPE, weight)(tokens)
    torch.testing.assert_close(forward.Formula(weight)(tokens), ours, rtol=0, atol=forward.tolerance(SHAPE))


def test_a_contender_that_computes_something_else_fails(monkeypatch):
    monkeypatch.setattr(forward, "textbook", lambda shape, weight: lambda tokens: weight[tokens])
    found = forward.forward("m", clock.HostClock(), FEW, shape=SHAPE, modes=(rounds.COLD,), large=False)
    (eager,) = [row for row in found if row.contender == contenders.EAGER]
    assert eager.note.startswith("failed: AssertionError")
    assert eager.passed is False


def test_a_gradient_that_differs_fails(monkeypatch):
    wrong = lambda grad, shape: lambda tokens: torch.zeros(shape.vocabulary, shape.width)  # noqa: E731
    monkeypatch.setattr(backward, "torch_backward_op", wrong)
    found = backward.backward("m", clock.HostClock(), FEW, shape=SHAPE, kind="uniform")
    (theirs,) = [row for row in found if row.contender == goals.DENSE_BACKWARD]
    assert theirs.note == "failed: differs from ours by 1 of its norm"
    assert theirs.passed is False


def test_a_measure_that_breaks_is_reported(monkeypatch):
    def broken(*_, **__):
        raise MemoryError("too large")

    measure = measures.Measure("backward.x", "", broken)
    ours, theirs = measures.run(measure, clock.HostClock(), FEW)
    assert ours.note == "failed: MemoryError: too large"
    assert (theirs.contender, theirs.passed) == (goals.DENSE_BACKWARD, False)


def test_shapes_are_those_of_the_readme():
    names = list(measures.measures(tiny=False))
    for dtype in ("fp32", "bf16"):
        for sizes in ("32x512x512", "8x2048x1024", "1x131072x1024", "256x1x4096"):
            assert f"forward.{dtype}.{sizes}" in names
        for kind in ("uniform", "zipf", "half-hot"):
            for rows_of_table in (32_000, 256_000):
                assert f"backward.{kind}.{rows_of_table}.{dtype}.32x512x512" in names
    assert {"forward.strided", "backward.tokens.512", "backward.tokens.4096", "backward.tokens.65536"} <= set(names)
    assert len(names) == 1 + 8 + 12 + 4


# ---- the estimate ----------------------------------------------------------------------------------------------------

CHIP = roofline.Chip("test", "90", 100, 1.0, 1000)


def test_what_binds():
    """100 multiprocessors, 128 lanes, 1 GHz: 12.8e12 instructions a second; 1e12 bytes a second."""
    light, heavy = (roofline.estimate("k", n, 4, CHIP) for n in (10, 100))
    assert (light.issue, light.memory) == (pytest.approx(1.28e12), pytest.approx(0.25e12))
    assert (light.limit, light.of_bandwidth) == ("memory", 1.0)
    assert (heavy.limit, heavy.of_bandwidth) == ("instructions", pytest.approx(0.512))


def test_report_of_the_gate(tmp_path):
    path = tmp_path / "sass.json"
    kernels = {
        "forward_vectors<bfloat16, gathered, halves, shared>": {"80": 4.5, "90": 5.0},
        "forward_vectors<float, none, interleaved, token_exact>": {"90": 17.0},
        "forward_vectors<double, dense, halves, shared>": {"90": 6},
        "forward_vectors<float16, dense, halves, shared>": {"75": 9.0},
    }
    path.write_text(json.dumps({"kernels": kernels, "nvcc": "13.0"}))
    assert list(roofline.read_kernels(path, "90").values()) == [(5.0, 4), (17.0, 4), (6.0, 16)]
    entries = roofline.estimates(path, CHIP)
    assert {entry["label"] for entry in entries} == {"estimate, not measured"}
    assert table.estimate_cells(entries)[0][-1] == "estimate, not measured"


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"kernels": []}', '{"kernels": {"f<float, none>": {"90": 0}}}', '{"kernels": {"f": {"90": 1}}}', "?"],
)
def test_other_reports_are_refused(tmp_path, content, capsys):
    path = tmp_path / "sass.json"
    path.write_text(content)
    assert main(["--estimate-only", "--sass", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_chips_by_the_drivers_name():
    assert roofline.chip_of("NVIDIA H200").name == "H200"
    assert roofline.chip_of("NVIDIA A100-SXM4-80GB").name == "A100 80GB"
    assert roofline.chip_of("").name == "H200"


# ---- the table -------------------------------------------------------------------------------------------------------


def test_cells():
    found = [
        Row("m", "posenc_ext", "cold", 31.25, 15, bytes=134_217_728, of_copy=0.93),
        Row("m", goals.SHARE, "cold", value=0.93, floor=0.9, at_least=True),
        Row("m", "eager", "cold", 1500.0, 15, ratio=0.02, q25=0.01, q75=0.03, floor=0.4),
    ]
    ours, share, eager = table.cells(found, {"m": "forward"})
    assert ours == ["forward", "posenc_ext", "cold", "31.2 us", "4295", "93%", "", "", "", "", "134.2"]
    assert share[3] == "93%"
    assert share[8:10] == [">= 0.90", "pass"]
    assert eager[0] == ""
    assert eager[3:10] == ["1.50 ms", "", "", "0.02", "0.01-0.03", "<= 0.40", "pass"]


def test_plain_table():
    text = table.plain(("name", "time"), [["a", "1 us"], ["long one", "10 us"]], left=1)
    assert text.splitlines() == ["name       time", "--------  -----", "a          1 us", "long one  10 us"]


def test_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    table.show("title", ("name", "time"), [["a", "1 us"]], left=1)
    assert capsys.readouterr().out == "title\n\nname  time\n----  ----\na     1 us\n\n"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_names_select_measures():
    known = measures.measures(tiny=False)
    assert len(main_part.select(known, [])) == len(known)
    assert [m.name for m in main_part.select(known, ["copy"])] == ["copy.large"]
    assert len(main_part.select(known, ["backward.zipf", "forward.fp32"])) == 4 + 4
    with pytest.raises(ValueError, match="'back'"):
        main_part.select(known, ["back"])


def test_list(capsys):
    assert main(["--dry-run", "--list", "--only", "copy"]) == 0
    assert capsys.readouterr().out.startswith("copy.large ")


def test_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--only", "copy.large"]) == 2
    assert "torch.cuda.is_available() is False" in capsys.readouterr().err


def test_dry_run(tmp_path, capsys):
    """Every measure, from end to end, without compiling anything."""
    path, report = tmp_path / "folder" / "gpu.json", tmp_path / "sass.json"
    report.write_text('{"kernels": {"forward_vectors<bfloat16, gathered, plain, shared>": {"90": 20}}}')
    assert main(["--dry-run", "--quick", "--json", str(path), "--sass", str(report), "--chip", "H100"]) == 0
    printed = capsys.readouterr().out
    assert "dry run: times mean nothing" in printed
    assert "estimate, not measured" in printed
    assert "failed" not in printed
    content = json.loads(path.read_text())
    assert content["machine"]["device"] == "cpu"
    assert content["estimates"][0]["chip"] == "H100 SXM"
    found, _ = rows.read(path)
    assert {row.measure for row in found} == set(measures.measures(tiny=True))
    assert {row.mode for row in found} == {rounds.COLD, rounds.CALLED, rounds.GRAPH}
    assert all(row.median_us > 0 for row in found if row.value is None)
    for entry in content["rows"]:
        if entry["value"] is None:
            assert entry["gigabytes_per_second"] == pytest.approx(entry["bytes"] / entry["median_us"] / 1e3)


def test_time_that_is_over_is_said(capsys):
    assert main(["--dry-run", "--quick", "--seconds", "-1", "--only", "copy", "backward.zipf"]) == 0
    assert capsys.readouterr().out.count("failed: left out") == 5
    assert main(["--dry-run", "--quick", "--seconds", "-1", "--only", "copy", "--strict"]) == 1


def test_strict(monkeypatch):
    row = dataclasses.replace(Row("copy.large", "x", ratio=0.5), floor=1.0)
    arguments = ["--dry-run", "--only", "copy", "--strict"]
    monkeypatch.setattr(main_part, "run", lambda *_: [row])
    assert main(arguments) == 0
    monkeypatch.setattr(main_part, "run", lambda *_: [dataclasses.replace(row, ratio=2.0)])
    assert main(arguments) == 1


# ---- what a GPU is asked for -----------------------------------------------------------------------------------------


def test_the_device_clock(monkeypatch):
    """Its calls of torch.cuda, in order, with a device that only takes notes."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def elapsed_time(self, end):
            return 10.0

    properties = types.SimpleNamespace(L2_cache_size=4096)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(cycles), raising=False)
    device = clock.CudaClock(torch.device("cpu"))
    assert device._ballast.nbytes == 3 * 4096
    device.flush()
    assert device._sink == 3 * 1024
    device.hold(0.5)  # 20 million cycles took 10 ms
    assert log == [1_000_000, "record", 20_000_000, "record", "synchronize", 1_000_000_000]
    log.clear()
    device.hold(0.25)
    assert log == [500_000_000]
    assert device.seconds(device.mark(), device.mark()) == pytest.approx(0.01)


def test_the_module_runs(tmp_path):
    from helpers import child

    finished = subprocess.run(
        [sys.executable, "-m", f"{BENCH}.gpu", "--dry-run", "--list"],
        capture_output=True,
        text=True,
        check=False,
        **child(tmp_path),
    )
    assert finished.returncode == 0, finished.stderr
    assert "forward" in finished.stdout
