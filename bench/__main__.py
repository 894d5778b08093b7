"""The command `python -m bench`, or `python -m posenc_ext.bench` where the package is installed."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import torch

from posenc_ext import _C

from . import machine, plots, report, roofline, rows, run
from .cases import SWEEPS, Case
from .timing import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep.

    Returns:
        0; with `--strict` 1 if a threshold was missed, anything failed, or a row got slower than in `--compare`;
        2 after bad input or without a result.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _main(args)
    except (OSError, ValueError, BrokenExecutor) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    settings = _settings(args)
    cases = run.cases_of(settings, args.kernels)
    sweeps = [f"sweep.{axis}" for axis in ([*SWEEPS] if args.sweep == [] else args.sweep or [])]
    chosen = run.select(cases, [name for group in args.only for name in group.split(",") if name] + sweeps)
    if args.list:
        report.say("\n".join(f"{case.name:34} {case.title}" for case in chosen))
        return 0
    if args.estimate_only:
        roofline.show(roofline.estimates(roofline.chip_of(args.chip or "")))
        return 0
    if settings.device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("needs a GPU: torch.cuda.is_available() is False (--dry-run tries the program on the CPU)")
        if not _C.build_info()["cuda"]:
            raise ValueError("posenc_ext was built without its CUDA half")
    older = rows.read(args.compare) if args.compare else None
    if args.plots:
        plots.figure_type()  # asked for now, not after the run
    if args.kept:
        found, facts = rows.read(args.kept)
    else:
        found, facts = _measure(args, settings, chosen)
    headline = machine.headline(facts)
    report.say(f"{headline}\n")
    report.show(found, {case.series: case.title for case in cases.values()})
    worse = []
    if older is not None:
        if (was := machine.headline(older[1])) != headline:
            report.say(f"Compared with {was}")
        worse = report.show_changes(older[0], found)
    if args.plots:
        report.say("\n".join(str(path) for path in plots.write(found, args.plots, headline)))
    return 1 if args.strict and (worse or any(row.passed is False or row.failed for row in found)) else 0


def _measure(
    args: argparse.Namespace, settings: Settings, chosen: Sequence[Case]
) -> tuple[list[rows.Row], dict[str, Any]]:
    """Run the cases, and keep what they gave."""
    facts = machine.facts(settings)
    # Beside the sources; in the current folder where the package is installed.
    folder = Path(__file__).parent / "results" if __package__ == "bench" else Path("posenc_ext_bench")
    passing = args.only or args.sweep is not None or args.dry_run or args.kernels
    path = args.json or (None if passing else folder / machine.file_name(facts, settings))

    start, found = time.monotonic(), []
    todo = list(run.steps(chosen, settings))
    with report.progress(len(todo)) as announce:
        for title, step in todo:
            took = time.monotonic() - start
            if took > args.seconds:
                found.append(rows.Row(title, "all", note=f"{rows.FAILED}left out, {args.seconds:.0f} s were over"))
                continue
            announce(title)
            found += step()
            if path is not None:  # a run that is cut short leaves what it had
                said = {**dataclasses.asdict(settings), "took": round(time.monotonic() - start, 1)}
                rows.write(path, found, machine=facts, settings=said)
    if path is not None:
        report.say(f"{time.monotonic() - start:.0f} s; kept in {path}")
    return found, facts


def _settings(args: argparse.Namespace) -> Settings:
    """Rounds that were asked for take however long they take."""
    if args.threads < 1 or (args.rounds is not None and args.rounds < 1):
        raise ValueError(f"--rounds and --threads must be positive, got {args.rounds} and {args.threads}")
    rounds, seconds = (2, 0.0) if args.dry_run else (15, 2.0) if args.gpu else (7, 1.0) if args.quick else (25, 6.0)
    if args.rounds is not None:
        rounds, seconds = args.rounds, sys.float_info.max  # JSON has no infinity
    return Settings(rounds, seconds, args.threads, args.quick, args.gpu or args.dry_run, args.dry_run)


def _parser() -> argparse.ArgumentParser:
    what = "Measure the fused input layer against what it replaces."
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=what)
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds, no torch.compile, no plain allocator")
    add("--only", nargs="+", default=[], metavar="NAMES", help="these cases, e.g. forward.out token.call")
    add("--rounds", type=int, help="rounds of timings (25; 7 if quick; 15 on a GPU)")
    add("--threads", type=int, default=2, help="threads of torch (2)")
    add("--seconds", type=float, default=600.0, help="begin no case after that time (600)")
    add("--json", type=Path, metavar="PATH", help="where to keep the result; always kept unless --only")
    add("--sweep", nargs="*", choices=SWEEPS, help="how cost grows along these axes, or along all of them")
    add("--plots", type=Path, metavar="DIR", help="draw what has an axis: sweeps and errors by position")
    add("--from", dest="kept", type=Path, metavar="RUN.json", help="run nothing: show, draw, compare a kept result")
    add("--compare", type=Path, metavar="OLD.json", help="name what got slower since an older result")
    add("--strict", action="store_true", help="exit with 1 after a missed threshold, a failure, a slower row")
    add("--list", action="store_true", help="list the cases and exit")
    add("--gpu", action="store_true", help="the cases of the GPU")
    add("--kernels", action="store_true", help="the forward kernel alone, for each instruction set; not kept")
    add("--dry-run", action="store_true", help="those, tiny, on the CPU, to try the program; times mean nothing")
    add("--estimate-only", action="store_true", help="lower bounds from a GPU's data sheet; needs no GPU")
    add("--chip", choices=sorted(roofline.BANDWIDTH), help="data sheet for the estimate (H200)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
