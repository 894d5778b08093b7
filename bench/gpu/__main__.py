"""The command `python -m bench.gpu`."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posenc_ext import _C

from ..machine import slug
from ..rows import Row, write
from ..settings import Settings
from ..wording import verdict
from . import roofline, table
from .clock import Clock, CudaClock, HostClock
from .facts import facts, headline
from .goals import failures_of
from .measures import Measure, measures, run

ROUNDS = 15
SECONDS = 2.0  # for the rounds of one measure
LIMIT = 600.0
BUDGET = Path("csrc/cuda/sass_budget.json")  # in a checkout


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep.

    Returns:
        0; with `--strict` 1 if a goal was missed or anything failed; 2 after bad input or without a GPU.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    known = measures(tiny=args.dry_run)
    try:
        chosen = select(known, args.only)
        if args.list:
            for measure in chosen:
                print(f"{measure.name:44} {measure.title}")
            return 0
        if args.estimate_only:
            _show_estimates(roofline.estimates(args.sass or BUDGET, roofline.chip_of(args.chip or "")))
            return 0
        clock = _clock(args.dry_run)
        machine = facts(clock.device)
        chip = roofline.chip_of(args.chip or machine.get("gpu", ""))
        estimates = roofline.estimates(args.sass, chip) if args.sass else []
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        settings = Settings(rounds=args.rounds or 2, seconds=0.0, quick=args.quick)
    else:
        settings = Settings(rounds=args.rounds or ROUNDS, seconds=SECONDS, quick=args.quick)
    path = args.json or (None if args.only or args.dry_run else default_path(machine))

    found = _run(chosen, clock, settings, args.seconds, path, machine, estimates)
    table.show(headline(machine), table.COLUMNS, table.cells(found, {m.name: m.title for m in chosen}))
    if estimates:
        _show_estimates(estimates)
    failures = failures_of(found)
    for line in failures:
        print(line)
    for row in found:
        if row.note and not row.note.startswith("failed"):
            print(f"{row.measure}, {row.contender}: {row.note}")
    print(verdict(found))
    if path is not None:
        print(f"kept in {path}")
    return 1 if args.strict and (failures or any(row.passed is False for row in found)) else 0


def _show_estimates(estimates: list[dict[str, Any]]) -> None:
    title = f"Upper bounds of the forward, {roofline.LABEL}: instructions from the disassembly, data sheet figures"
    table.show(title, table.ESTIMATE_COLUMNS, table.estimate_cells(estimates), left=2)


def _run(
    chosen: Sequence[Measure],
    clock: Clock,
    settings: Settings,
    limit: float,
    path: Path | None,
    machine: dict[str, Any],
    estimates: list[dict[str, Any]],
) -> list[Row]:
    """All measures; the result is kept after each, so that a run that is cut short leaves what it had."""
    start, found = time.monotonic(), []
    for measure in chosen:
        took = time.monotonic() - start
        if took > limit:
            found.append(Row(measure.name, "all", note=f"failed: left out, {limit:.0f} s were over"))
            continue
        print(f"{took:4.0f} s  {measure.title}", file=sys.stderr, flush=True)
        found += run(measure, clock, settings)
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
        if path is not None:
            said = {**dataclasses.asdict(settings), "limit": limit, "took": round(time.monotonic() - start, 1)}
            write(path, found, machine, said, estimates=estimates)
    return found


def select(known: Mapping[str, Measure], patterns: Sequence[str]) -> list[Measure]:
    """The measures with one of these names; a name may be a beginning, up to a dot, or have wildcards. All, for none.

    Raises:
        ValueError: nothing has such a name.
    """
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in known):
            raise ValueError(f"no measure is named {pattern!r}; --list shows them")
    return [m for name, m in known.items() if not patterns or any(_fits(name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)


def _clock(dry_run: bool) -> Clock:
    if dry_run:
        return HostClock()
    if not torch.cuda.is_available():
        raise ValueError("needs a GPU: torch.cuda.is_available() is False (--dry-run tries the program on the CPU)")
    if not _C.build_info()["cuda"]:
        raise ValueError("posenc_ext was built without its CUDA half")
    return CudaClock(torch.device("cuda", torch.cuda.current_device()))


def default_path(machine: Mapping[str, Any]) -> Path:
    """One file for each kind of GPU, beside the sources; in the current folder where the package is installed."""
    beside = Path(__file__).parent.parent / "results"
    folder = beside if (__package__ or "").startswith("bench") else Path("posenc_ext_bench")
    return folder / f"gpu-{slug(machine['gpu'])}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="Measure the CUDA half against what it replaces, and a copy."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, tiny, to try the program; times mean nothing"
    )
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these measures, e.g. backward.zipf")
    parser.add_argument("--rounds", type=int, help=f"rounds of timings ({ROUNDS})")
    parser.add_argument("--seconds", type=float, default=LIMIT, help=f"begin no measure after that time ({LIMIT:.0f})")
    parser.add_argument("--sass", type=Path, metavar="REPORT.json", help="add an estimate from the disassembly gate")
    parser.add_argument("--estimate-only", action="store_true", help="the estimate alone, which needs no GPU")
    parser.add_argument("--chip", choices=sorted(roofline.CHIPS), help="data sheet for the estimate (that of the GPU)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to keep the result")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed or a contender fails")
    parser.add_argument("--list", action="store_true", help="list the measures and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
