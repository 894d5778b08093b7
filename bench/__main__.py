"""The command `python -m bench`, or `python -m posenc_ext.bench` where the package is installed."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import machine, measures, report, rows
from .children import ChildError
from .settings import QUICK_ROUNDS, QUICK_SECONDS, ROUNDS, SECONDS, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep.

    Returns:
        0; with `--strict` 1 if a floor was missed; 2 after bad input or without a result.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        names = measures.select([name for group in args.only for name in group.split(",") if name])
        older = rows.read(args.compare)[0] if args.compare else None
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for name in names:
            print(f"{name:36} {measures.MEASURES[name].title}")
        return 0

    settings = _settings(args)
    facts = machine.facts(settings.threads)
    console = report.console()
    start = time.monotonic()
    try:
        with console.status("") as status:
            found = measures.run(names, settings, status.update)
    except ChildError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - start

    report.show(found, facts, console)
    if older is not None:
        report.show_changes(older, found, console)
    path = args.json or (None if args.only else default_path(settings))
    if path is not None:
        rows.write(path, found, facts, _as_data(settings, seconds))
        console.print(f"{seconds:.0f} s; kept in {path}", highlight=False, soft_wrap=True)
    return 1 if args.strict and any(row.passed is False for row in found) else 0


def _settings(args: argparse.Namespace) -> Settings:
    if args.rounds is not None:  # asked for: however long they take
        return Settings(args.rounds, math.inf, args.threads, args.quick)
    if args.quick:
        return Settings(QUICK_ROUNDS, QUICK_SECONDS, args.threads, quick=True)
    return Settings(ROUNDS, SECONDS, args.threads)


def _as_data(settings: Settings, took: float) -> dict[str, Any]:
    limit = settings.seconds if math.isfinite(settings.seconds) else None  # JSON has no infinity
    return {**dataclasses.asdict(settings), "seconds": limit, "took": round(took, 1)}


def default_path(settings: Settings) -> Path:
    """One file for each machine, beside the sources; in the current folder where the package is installed."""
    folder = Path(__file__).parent / "results" if __package__ == "bench" else Path("posenc_ext_bench")
    kind = "-quick" if settings.quick else ""
    return folder / f"{machine.slug(machine.cpu_model())}-{settings.threads}-threads{kind}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="Measure the fused input layer against what it replaces."
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, no torch.compile, no plain allocator")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAMES", help="these measures, e.g. forward.out")
    parser.add_argument("--rounds", type=_positive, help=f"rounds of timings ({ROUNDS}; {QUICK_ROUNDS} if quick)")
    parser.add_argument("--threads", type=_positive, default=2, help="threads of torch (2)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to keep the result; always kept unless --only")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="show what changed since an older result")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a floor is missed")
    parser.add_argument("--list", action="store_true", help="list the measures and exit")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
