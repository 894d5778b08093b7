"""Parts of the benchmark that need a process of their own: another allocator, or memory nobody has used yet.

The parent names a function of this package and its arguments as JSON; the child writes what it returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# glibc keeps freed memory and hands it out again, instead of returning it to the system and paying for every page anew.
# That is what a process sees that allocates the same sizes step after step, or runs under a caching allocator.
POOLED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "536870912",
}


class ChildError(RuntimeError):
    """A child ended without a result."""


def call(function: str, arguments: dict[str, Any], environment: dict[str, str] | None = None) -> Any:
    """Run `"module:function"` of this package in a fresh process.

    Args:
        function: module and function, both named from inside this package.
        arguments: its keyword arguments, plain data.
        environment: variables to start the process with, besides the present ones.

    Raises:
        ChildError: the process failed; its last lines are in the text.
    """
    # The child must find the packages that this process found, wherever it was started.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryDirectory(prefix="posenc-bench-") as folder:
        result = Path(folder) / "result.json"
        job = json.dumps({"function": function, "arguments": arguments, "result": str(result)})
        finished = subprocess.run(
            [sys.executable, "-m", __name__, job],
            env={**os.environ, **(environment or {}), "PYTHONPATH": path},
            cwd=folder,  # python -m puts it first, and in a checkout it may hold the package without its compiled half
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if finished.returncode != 0 or not result.exists():
            last = "\n".join(finished.stderr.splitlines()[-15:])
            raise ChildError(f"{function} ended with code {finished.returncode} and no result:\n{last}")
        return json.loads(result.read_text(encoding="utf-8"))


def main() -> None:
    """The child's side."""
    job = json.loads(sys.argv[1])
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(f".{module}", __package__), name)
    Path(job["result"]).write_text(json.dumps(function(**job["arguments"])), encoding="utf-8")


if __name__ == "__main__":
    main()
