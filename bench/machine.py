"""The facts about a machine without which a time means nothing."""

import datetime
import os
import platform
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

import posenc_ext
from posenc_ext import _C

from .timing import Settings


def facts(settings: Settings) -> dict[str, Any]:
    """Plain data for the head of a result: what torch collects, and what it does not."""
    environment = collect_env.get_env_info()._asdict()  # type: ignore[no-untyped-call]
    cpu = dict(re.findall(r"^(.+?):\s+(.+)$", str(environment.pop("cpu_info")), re.MULTILINE))
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = {
        "cpu": cpu.get("Model name") or platform.processor() or "unknown",
        "cpus": os.cpu_count(),
        "threads": settings.threads,
        "caches": {name: size for name, size in cpu.items() if "cache" in name},
        "huge_pages": huge_pages.read_text(encoding="ascii").strip() if huge_pages.exists() else "",
        "isa": _C.active_isa(),
        "posenc_ext": posenc_ext.__version__,
        **{f"built_with_{name}": value for name, value in _C.build_info().items()},
        "torch": torch.__version__,
        "environment": {name: value for name, value in environment.items() if value not in (None, "N/A")},
        "allocator": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
        "preloaded": os.environ.get("LD_PRELOAD", ""),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": settings.device.type,
        "cases": "gpu" if settings.gpu else "cpu",
    }
    if settings.device.type == "cuda":
        properties = torch.cuda.get_device_properties(settings.device)
        found["gpu"] = properties.name
        found["gpu_properties"] = str(properties)
        clocks = ("clock_rate", "memory_clock_rate")
        found |= {name: getattr(properties, name, None) for name in clocks}
    return found


def headline(machine: Mapping[str, Any]) -> str:
    """One line for the head of the tables, from the facts of a run, kept ones too."""
    known = defaultdict(lambda: "unknown", machine)
    where = f"{known['cpu']}, {known['threads']} threads, {known['isa']}"
    if known["cases"] == "gpu":
        built_for = machine.get("built_with_cuda_archs") or "the CPU alone"
        where = f"{machine.get('gpu', 'dry run: times mean nothing')}, kernels for {built_for}"
    return f"{where}, torch {known['torch']}, posenc_ext {known['posenc_ext']}, {known['date']}"


def file_name(machine: dict[str, Any], settings: Settings) -> str:
    """Of a result: one for each kind of machine."""
    name = f"{machine['cpu']}-{settings.threads}-threads{'-quick' * settings.quick}"
    name = f"gpu-{machine.get('gpu', 'dry-run')}" if settings.gpu else name
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-") + ".json"
