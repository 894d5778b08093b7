"""What the gate of the machine code counts: reads in flight, blocks on a multiprocessor, waves."""

import importlib.util
import math
import shutil
from pathlib import Path

import pytest

GATE = Path(__file__).parent.parent / ".ci/cuda_gate.py"
pytestmark = pytest.mark.skipif(not GATE.exists(), reason="no gate here (.ci/cuda_gate.py)")
NAME = "forward_tokens<float, gathered, interleaved, along_seq>"


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("cuda_gate", GATE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(*inner):
    """A loop of these instructions, in a loop of its own, after loads that belong to neither."""
    before = ["LDG.E.128 R40, desc[UR6][R2.64]", "LDG.E.128 R44, desc[UR6][R2.64]", "LDG.E.64 R50, desc[UR6][R2.64]"]
    start = len(before) + 1
    back = f"@!P0 BRA 0x{16 * start:x}"
    return [*before, "NOP", *inner, back, f"@!P1 BRA 0x{16 * 2:x}", "EXIT"]


LOOK, SEARCH = "LDG.E.64.STRONG.SYS R2, desc[UR4][R8.64]", "SHFL.IDX PT, R3, R2, R4, 0x1f"
LEAST = "ATOMG.E.MIN.64.STRONG.GPU PT, R2, desc[UR4][R8.64], R2"
LOCK, FREE = "ATOMG.E.CAS.STRONG.GPU PT, R2, [R8], R2, R3", "ATOMG.E.EXCH.STRONG.GPU PT, RZ, desc[UR4][R8.64], RZ"
FENCE, PLAIN = "MEMBAR.SC.GPU", "STG.E.64 desc[UR4][R8.64], R2"
RECORD = [LOOK, SEARCH, LEAST, LOCK, "@P0 " + LOOK, FENCE, LOOK, PLAIN, FENCE, FREE]
TAKE = [LOCK, FENCE, LOCK, PLAIN, FENCE, FREE]


@pytest.mark.parametrize(("name", "steps"), [("find_out_of_range", RECORD), ("take_record", TAKE)])
def test_steps_of_a_record(gate, name, steps):
    assert not gate.problems_of_atomics(gate.Kernel(name, steps))
    for i, step in enumerate(steps):
        if step not in (PLAIN, "@P0 " + LOOK):
            assert gate.problems_of_atomics(gate.Kernel(name, steps[:i] + steps[i + 1 :])), f"without {step}"
    assert gate.problems_of_atomics(gate.Kernel("sum_segments<float, true>", [FENCE]))


ROWS = [f"LDG.E.128.CONSTANT R{r}, desc[UR6][R{r}.64]" for r in (8, 12, 16, 20)]
IDS = ["@P6 LDG.E.64 R60, desc[UR6][R62.64]", "@P6 LDG.E.64 R64, desc[UR6][R66.64]"]
STORE = "STG.E.128 desc[UR6][R2.64], R28"


@pytest.mark.parametrize(("inner", "rows", "ids"), [
    ([*ROWS, *IDS, "FMUL R28, R8, R7", STORE], 4, 2),
    ([*IDS, ROWS[0], "FMUL R28, R11, R7", *ROWS[1:], STORE], 3, 2),
    ([*ROWS[:2], STORE, *IDS, "FADD R1, R9, R1"], 2, 0),
    ([x for row in ROWS for x in (row, f"FMUL R28, R{row.split()[1][1:-1]}, R7")] + [STORE, *IDS], 1, 0),
    ([*ROWS, "HADD2.BF16_V2 R30, R31, R23", STORE], 4, 0),
    ([ROWS[0], "DADD R2, R6, R10.64", ROWS[1], ROWS[2], STORE], 2, 0),
])  # fmt: skip
def test_loads_ahead(gate, inner, rows, ids):
    kernel = gate.Kernel(NAME, code(*inner))
    assert (kernel.rows_ahead(), kernel.ids_before_stores()) == (rows, ids)


def test_resident_blocks(gate):
    assert [gate.resident_blocks(r) for r in (16, 32, 33, 64, 65, 80, 81, 128)] == [8, 8, 6, 4, 3, 3, 2, 2]


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_shapes(gate):
    places = [2 * 132, 3 * 132]
    calls = [(units, seq, batch, places_, min(batch, 4)) for places_ in places for units in (64, 128, 256)
             for batch, seq in ((32, 512), (8, 2048), (16, 4096), (1, 131072))]  # fmt: skip
    for (units, seq, batch, held, together), shape in zip(calls, gate.shapes_of(calls), strict=True):
        threads, y, z, blocks_x, blocks_y, blocks_z, steps = shape
        assert threads == 256
        tokens_of_all = steps * y * z * blocks_x * blocks_z
        assert tokens_of_all >= seq * batch
        assert tokens_of_all * threads // (y * z) * blocks_y >= units * seq * batch
        waves = blocks_x * blocks_y * blocks_z / held
        assert math.ceil(waves) <= 1.1 * waves
        assert math.ceil(math.ceil(batch / z) / blocks_z) >= together / z


def test_launches_are_refused(gate):
    kernels = {NAME: gate.Kernel(NAME, code(*ROWS, *IDS, *IDS, "FMUL R28, R8, R7", STORE))}
    good = gate.Launch(NAME, "[1, 9] x 9", 72, 3, 396, 1.0, 1.0, 4, 48 << 10)
    assert gate.problems_of_launches([good], kernels) == []
    for change in ({"in_flight": 23 << 10}, {"waves": 1.29}, {"rounding": 1.25}):
        assert len(gate.problems_of_launches([good._replace(**change)], kernels)) == 1
    late = {NAME: gate.Kernel(NAME, code(*ROWS, "FMUL R28, R8, R7", STORE, *IDS, *IDS))}
    assert len(gate.problems_of_launches([good], late)) == 1


def test_no_grid_takes_fewer_steps(gate):
    """The shapes that launch_config.h tries hold the best of all grids, for any registers and kind of column."""
    calls = [
        (units, seq, batch, blocks * gate.MULTIPROCESSORS, gate.TOGETHER if batch >= gate.TOGETHER else 1)
        for batch, seq, width in gate.CALLS
        for units in (width // 8, width // 4, width // 2)
        for blocks in range(1, 9)
    ]
    for call, shape in zip(calls, gate.shapes_of(calls), strict=True):
        _, seq, batch, resident, together = call
        _, y, z, x_blocks, y_blocks, z_blocks, steps = shape
        x_count, z_count, resident = math.ceil(seq / y), math.ceil(batch / z), resident // y_blocks
        if x_count * z_count < together * resident:
            together = 1
        best = min(
            math.ceil(x * z / resident) * math.ceil(x_count / x) * math.ceil(z_count / z)
            for z in range(1, max(z_count // together, 1) + 1)
            for x in {min(x_count, waves * resident // z) for waves in (1, 2, 3, 4)}
            if x > 0
        )
        assert math.ceil(x_blocks * z_blocks / resident) * steps <= 1.05 * best, call
