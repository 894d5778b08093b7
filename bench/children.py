"""Parts of the benchmark that need a process of their own: another allocator, or memory that nobody has used yet."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

# glibc keeps freed memory and hands it out again, instead of returning it to the system and paying for every page anew.
# That is what a process sees that allocates the same sizes step after step, or runs under a caching allocator.
POOLED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "536870912"}


def call(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Call a function in a fresh process, started with these variables besides the present ones.

    Raises:
        BrokenProcessPool: the process ended without a result. What the function raises is raised here.
    """
    before = dict(os.environ)
    os.environ.update(environment or {})  # glibc reads its own when a process starts
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)
