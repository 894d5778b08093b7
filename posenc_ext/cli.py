"""The command ``posenc-ext``: a walk through the input layer, its pictures, what is installed, and the benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

import posenc_ext
from posenc_ext import _C, demo, plot
from posenc_ext.console import UsageError, print_rows
from posenc_ext.conventions import CONVENTIONS


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``posenc-ext`` with these arguments, by default those of the process.

    Returns:
        The exit code: 0, or 2 after bad input, which is named in one line on stderr.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Whatever the encoding of the terminal, a word it cannot show must not end the program.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader has seen enough, as in `posenc-ext demo | head`
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _refuse(message: str) -> int:
    print(f"posenc-ext: error: {message}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    # The benchmarks have a parser of their own, which sees its arguments untouched, `--help` included.
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    args = _parser().parse_args(arguments)
    args.run(args)
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="posenc-ext", description="The input layer of a Transformer in one pass, without a table.")
    parser.add_argument("--version", action="version", version=f"posenc_ext {posenc_ext.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    walk = commands.add_parser("demo", help="from sentences to the input of the first layer, step by step")
    walk.add_argument("texts", nargs="*", metavar="TEXT", help="sentences of your own; by default four in Korean")
    walk.add_argument("--file", type=Path, help="take the sentences from the lines of this UTF-8 file")
    walk.add_argument("--d-model", type=_size, default=6, help="width of the vectors (6)")
    walk.add_argument("--seed", type=_seed, default=0, help="seed of the random weights (0)")
    walk.add_argument("--no-timing", action="store_true", help="leave out the timed comparison")
    walk.set_defaults(run=demo.run)

    pictures = commands.add_parser("plot", help="write the encodings as PNG pictures")
    pictures.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="folder to write to (this one)")
    pictures.add_argument("--d-model", type=_size, default=128, help="width of the encodings (128)")
    pictures.add_argument("--length", type=_size, default=100, help="number of positions (100)")
    pictures.add_argument("--convention", choices=list(CONVENTIONS), default="vaswani", help="named recipe (vaswani)")
    pictures.set_defaults(run=plot.run)

    info = commands.add_parser("info", help="versions, instruction set, threads, CUDA build")
    info.set_defaults(run=_info)

    commands.add_parser("bench", help="run the benchmarks; its own options follow (posenc-ext bench --help)")
    return parser


def _size(text: str) -> int:
    return _whole_number(text, 1, 2**20)


def _seed(text: str) -> int:
    return _whole_number(text, 0, 2**64 - 1)


def _whole_number(text: str, least: int, most: int) -> int:
    value = int(text) if text.strip().isdecimal() else -1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
    return value


# ---- info ------------------------------------------------------------------------------------------------------------


def _info(_: argparse.Namespace) -> None:
    build = _C.build_info()
    facts = {
        "posenc_ext": posenc_ext.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, posenc_ext built with {build['torch_built_with']}",
        "numpy": np.__version__,
        "compiler": str(build["compiler"]),
        "machine": f"{platform.system()} {platform.machine()}",
        "library of the ops": posenc_ext.ops_library(),
        "CPU instruction set": f"{_C.active_isa()} in use, of {', '.join(_C.available_isas())}",
        "threads": str(torch.get_num_threads()),
        "CUDA kernels": _cuda_build(build),
        "CUDA device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    print_rows(list(facts.items()), indent="")


def _cuda_build(build: dict[str, Any]) -> str:
    return f"built for {build['cuda_archs'] or 'unknown architectures'}" if build["cuda"] else "not built"


# ---- bench -----------------------------------------------------------------------------------------------------------


def _bench(arguments: list[str]) -> int:
    module = _bench_module()
    try:
        run = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        raise UsageError(f"bench needs {error.name}: pip install 'posenc_ext[bench]'") from None
    return int(run(arguments) or 0)


def _bench_module() -> str:
    """The name of the benchmarks' module: in the package, or in the checkout around it or around this folder."""
    if importlib.util.find_spec("posenc_ext.bench") is not None:
        return "posenc_ext.bench.__main__"
    for root in (Path(__file__).resolve().parent.parent, Path.cwd()):
        # `bench` is a common name: only beside our own sources is it ours.
        if all((root / name).is_file() for name in ("setup.py", "posenc_ext/cli.py", "bench/__main__.py")):
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return "bench.__main__"
    raise UsageError("bench is not part of this installation: run it in a checkout of the posenc_ext sources")
