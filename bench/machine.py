"""The facts about a machine without which a time means nothing."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import posenc_ext
from posenc_ext import _C


def facts(threads: int) -> dict[str, Any]:
    """Plain data for the head of a result."""
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "caches": _caches(),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "isa": _C.active_isa(),
        "compiler": _C.build_info()["compiler"],
        "posenc_ext": posenc_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver()).strip()}",
        "allocator": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
        "preloaded": os.environ.get("LD_PRELOAD", ""),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """The CPU's own name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def slug(text: str) -> str:
    """Letters and digits of a text, for a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-") or "unknown"


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = _first_line(index / "type")
        if kind != "Instruction":
            found[f"L{_first_line(index / 'level')}"] = _first_line(index / "size")
    return found


def _first_line(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
