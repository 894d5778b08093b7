"""Parts of the benchmark that need a process of their own: another allocator, or memory that nobody has used yet."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

# glibc keeps freed memory and hands it out again, instead of returning it to the system and paying for every page anew.
# That is what a process sees that allocates the same sizes step after step, or runs under a caching allocator.
POOLED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "536870912"}


class Child:
    """A process of its own, started by the first call with these variables besides the present ones."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self._environment = environment or {}

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function there.

        Raises:
            BrokenProcessPool: the process ended without a result. What the function raises is raised here.
        """
        before = dict(os.environ)
        os.environ.update(self._environment)  # glibc reads its own when a process starts
        try:
            return self.pool.submit(function, *arguments).result()
        finally:
            os.environ.clear()
            os.environ.update(before)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process."""
    child = Child()
    with child.pool:
        return child.call(function, *arguments)
