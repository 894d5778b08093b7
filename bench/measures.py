"""The list of measures, and how each is run."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from . import accuracy, children, forward, latency, memory, rows, scaling, training
from .contenders import BATCHED, SINGLE, Shape, of_dtype
from .rows import Row
from .settings import PLAIN, POOLED, Settings

BF16 = torch.bfloat16
LARGE = Shape(32, 512, 512)


@dataclasses.dataclass(frozen=True)
class Measure:
    """Something to be found out.

    Attributes:
        name: for `--only`.
        title: for the table.
        run: takes the name and the settings, and the mode of memory where `allocates`.
        allocates: whether a call asks for large memory, so that its time depends on the allocator.
    """

    name: str
    title: str
    run: Callable[..., list[Row]]
    allocates: bool = False


def _all() -> Iterator[Measure]:
    narrow = of_dtype(BATCHED, BF16), of_dtype(SINGLE, BF16)
    for shape, floor in zip((BATCHED, SINGLE, *narrow), (0.90, 1.10, 1.20, 2.0), strict=True):
        run = partial(_out, shape=shape, floor=floor)
        yield Measure(f"forward.out.{shape.name}", f"forward {shape.text}, out=", run)
    yield Measure(
        f"forward.positions.{BATCHED.name}",
        f"forward {BATCHED.text}, explicit positions, out=",
        partial(_out, shape=BATCHED, floor=1.30, positions=True),
    )
    for shape in (BATCHED, SINGLE, *narrow):
        run = partial(_module, shape=shape)
        yield Measure(f"forward.module.{shape.name}", f"forward {shape.text}", run, allocates=True)
    yield Measure("train.step", f"forward + backward {BATCHED.text}", training.step, allocates=True)
    yield Measure("train.backward", f"backward alone {BATCHED.text}", training.backward, allocates=True)
    yield Measure("train.repeated", "backward, half of all ids equal", training.repeated, allocates=True)
    yield Measure("sparse.step", "sparse: 512 tokens, backward, SparseAdam step", training.sparse_step, allocates=True)
    yield Measure("sparse.backward", "sparse: the coalesced gradient alone", training.sparse_backward, allocates=True)
    yield Measure("token.call", "one token, no grad", latency.one_token)
    yield Measure("token.decode", "one token at an offset, no grad", latency.decode_step)
    yield Measure("memory.forward", f"memory of a forward {memory.SHAPE.text}", memory.forward)
    yield Measure("accuracy.exact", "error of precision exact", accuracy.exact)
    yield Measure("accuracy.reference", "error of precision reference", accuracy.reference_angles)
    for shape in (BATCHED, narrow[0], LARGE):
        run = partial(_scaling, shape=shape)
        yield Measure(f"threads.forward.{shape.name}", f"speed-up by threads: forward {shape.text}, out=", run)
    yield Measure("threads.backward", f"speed-up by threads: backward {BATCHED.text}", scaling.backward, allocates=True)


# partial() fills keywords only, and the name of the measure comes first.
def _out(measure: str, settings: Settings, *, shape: Shape, floor: float, positions: bool = False) -> list[Row]:
    return forward.into_out(measure, shape, floor, settings, positions=positions)


def _module(measure: str, settings: Settings, mode: str, *, shape: Shape) -> list[Row]:
    return forward.as_module(measure, shape, settings, mode)


def _scaling(measure: str, settings: Settings, *, shape: Shape) -> list[Row]:
    return scaling.forward(measure, shape, settings)


MEASURES: dict[str, Measure] = {measure.name: measure for measure in _all()}


def select(patterns: Sequence[str]) -> list[str]:
    """The measures with one of these names; a name may be a beginning, up to a dot, or have wildcards. All, for none.

    Raises:
        ValueError: nothing has such a name.
    """
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in MEASURES):
            raise ValueError(f"no measure is named {pattern!r}; --list shows them")
    return [name for name in MEASURES if not patterns or any(_fits(name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)


def run(names: Sequence[str], settings: Settings, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Run measures and return their rows, in the order of the list.

    Args:
        names: of measures.
        settings: for all of them.
        progress: is told what is being done.
    """
    here = [name for name in names if not MEASURES[name].allocates]
    allocating = [name for name in names if MEASURES[name].allocates]
    found: list[Row] = []
    if here:
        found += run_here(here, settings, "", progress)
    if allocating:
        progress(f"{len(allocating)} measures under a pooled allocator, in a process of their own")
        arguments = {"names": allocating, "settings": dataclasses.asdict(settings), "mode": POOLED}
        found += rows.from_data(children.call("measures:run_as_data", arguments, children.POOLED))
        if not settings.quick:
            found += run_here(allocating, settings.for_information(), PLAIN, progress)
    order = list(MEASURES)
    # Stable, so contenders stay in order.
    return sorted(found, key=lambda row: (row.mode == PLAIN, order.index(row.measure)))


def run_here(
    names: Sequence[str], settings: Settings, mode: str, progress: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Run measures in this process, with the allocator it was started with."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    found: list[Row] = []
    try:
        for name in names:
            measure = MEASURES[name]
            progress(f"{measure.title}{f', {mode} allocator' if mode else ''}")
            found += measure.run(name, settings, mode) if measure.allocates else measure.run(name, settings)
    finally:
        torch.set_num_threads(threads_before)
    return found


def run_as_data(names: Sequence[str], settings: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """The child's side of `run`."""
    return rows.to_data(run_here(names, Settings(**settings), mode))
