"""From cases to rows."""

import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from . import children
from .cases import DEVICE, PLAIN, POOLED, SHARE, TOLERANCE, Case, cpu_cases, gpu_cases, kernel_cases, sweep_cases
from .inputs import COPY, OURS
from .rows import Row
from .timing import Provider, Rounds, Settings, reason, run_rounds


def cases_of(settings: Settings, kernels: bool = False) -> dict[str, Case]:
    """By name, in the order of the table."""
    if settings.gpu:
        cases = gpu_cases(settings.dry_run)
    else:
        cases = kernel_cases() if kernels else itertools.chain(cpu_cases(), sweep_cases())
    return {case.name: case for case in cases}


def select(cases: Mapping[str, Case], patterns: Sequence[str]) -> list[Case]:
    """Those with one of these names, which may be a beginning, up to a dot, or have wildcards; all but sweeps for none.

    Raises:
        ValueError: nothing has such a name.
    """
    chosen = set() if patterns else {name for name, case in cases.items() if not case.axis}
    for pattern in patterns:
        fitting = {name for name in cases if name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)}
        if not fitting:
            raise ValueError(f"no case is named {pattern!r}; --list shows them")
        chosen |= fitting
    return [case for name, case in cases.items() if name in chosen]


def steps(cases: Sequence[Case], settings: Settings) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """What there is to do, each with a title: cases in this process, then those that want another allocator."""
    for case in cases:
        if case.group != POOLED:
            yield case.title, partial(run_case, case, settings)
    pooled, child = [case for case in cases if case.group == POOLED], children.Child(children.POOLED)
    less = dataclasses.replace(settings, rounds=max(settings.rounds // 2, 1), seconds=settings.seconds / 2)
    for case in pooled:
        title = f"{case.title}, at {case.at}" if case.axis else case.title
        yield f"{title}, pooled allocator", partial(child.call, run_named, case.name, less if case.axis else settings)
    for case in [] if settings.quick else [case for case in pooled if not case.axis]:
        yield f"{case.title}, plain allocator", partial(run_case, case, less, PLAIN)


def run_named(name: str, settings: Settings) -> list[Row]:
    """The side of the child with the pooled allocator."""
    return run_case(cases_of(settings)[name], settings)


def run_case(case: Case, settings: Settings, group: str | None = None) -> list[Row]:
    """The rows of a case, whatever happens to it. Threads and autograd are afterwards as they were.

    Args:
        case: to be run.
        settings: of the run.
        group: where the output lies, if not where the case says.
    """
    if settings.threads < case.threads:
        return [Row(case.name, OURS, case.group, note=f"needs --threads {case.threads} or more")]
    modes = case.ways if case.group == DEVICE else (case.group if group is None else group,)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.set_grad_enabled(case.grad):
            found = _rows(case, settings, modes)
    except Exception as error:
        missed = [Row(case.name, name, way, threshold=most) for way in modes for name, most in case.thresholds.items()]
        found = [Row(case.name, OURS, modes[0], note=reason(error)), *missed]
    finally:
        torch.set_num_threads(threads_before)
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
    if case.at is not None:
        found = [dataclasses.replace(row, case=case.series, at=case.at, axis=case.axis) for row in found]
    return [dataclasses.replace(row, threshold=None) for row in found] if group == PLAIN else found


def _rows(case: Case, settings: Settings, modes: Sequence[str]) -> list[Row]:
    if case.probe is not None:
        probed = case.probe(settings)
        return [dataclasses.replace(row, case=case.name, threshold=case.thresholds.get(row.provider)) for row in probed]
    assert case.providers is not None
    providers, found = case.providers(case, settings), []
    failures = disagreements(providers, case.tolerance or TOLERANCE[case.shape.dtype])
    for way, mode in zip(case.ways, modes, strict=True):
        present = [p for p in providers if way != p.sits_out and (p.timed or p.name in failures)]
        timed = run_rounds([p for p in present if p.name not in failures], settings, case.calls, way)
        timed.failures |= failures
        found += rows_of(case, mode, present, timed)
    return found


def disagreements(providers: Sequence[Provider], tolerance: float) -> dict[str, str]:
    """Providers must do the same work before anyone asks who is faster: the reasons of those that do not."""
    failures: dict[str, str] = {}
    wanted = None
    for provider in providers:
        try:
            got = provider.call(provider.inputs[0])
            if not provider.same:
                continue
            got = got.detach().to_dense().to(torch.float32, copy=True)
            wanted = got if wanted is None else wanted
            apart = float((got - wanted).norm() / wanted.norm())
            if not apart <= tolerance:
                raise AssertionError(f"differs from {providers[0].name} by {apart:.2g} of its norm")
        except Exception as error:
            failures[provider.name] = reason(error)
    return failures


def rows_of(case: Case, mode: str, providers: Sequence[Provider], timed: Rounds) -> list[Row]:
    """A row for each provider, and one for the share of the copy's bandwidth where the case asks for it.

    The threshold of a provider that failed counts as missed: nothing shows that it was reached. Where memory is the
    limit nothing gets more out of threads than a copy does: its speed-up is enough.
    """
    first, task, found = providers[0].name, case.bytes_moved(case.shape), []
    moved = {provider.name: provider.bytes or task for provider in providers}
    copied = moved.get(COPY) if COPY in timed.seconds else None
    for provider in providers:
        name, more = provider.name, provider.speedup_over
        row = Row(case.name, name, mode, threshold=case.thresholds.get(name), note=timed.failures.get(name, ""))
        if name in timed.seconds:
            times: dict[str, Any] = {"median_us": timed.median_us(name), "rounds": len(timed.seconds[name])}
            times["us25"], times["us75"] = timed.quartiles_us(name)
            pair = (name, more) if more else (first, name)
            if name != first and pair[0] in timed.seconds and pair[1] in timed.seconds:
                times |= timed.ratio(*pair)
            if copied and (mine := moved[name]):
                times["of_copy"] = timed.ratio(COPY, name)["ratio"] * mine / copied
            times |= {"at_least": bool(more), "bytes": moved[name], "preempted": timed.preempted}
            row = dataclasses.replace(row, **times)
        found.append(row)
    caps = [row.ratio for row in found if row.at_least and row.ratio is not None and row.provider.startswith(COPY)]
    if caps:
        found = [dataclasses.replace(row, threshold=row.threshold and min(row.threshold, *caps)) for row in found]
    if SHARE in case.thresholds and (share := found[0].of_copy) is not None:
        threshold = case.thresholds[SHARE]
        found.insert(1, Row(case.name, SHARE, mode, value=share, unit="share", threshold=threshold, at_least=True))
    return found
