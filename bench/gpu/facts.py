"""The facts about a GPU and its software without which a time means nothing."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from typing import Any

import torch

from posenc_ext import _C

from ..machine import facts as host_facts


def facts(device: torch.device) -> dict[str, Any]:
    """Plain data for the head of a result."""
    found = host_facts(torch.get_num_threads())
    info = _C.build_info()
    found |= {"device": device.type, "built_for": info["cuda_archs"], "cuda_half": info["cuda"], "triton": _triton()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            **_driver(device),
        }
    return found


def headline(machine: dict[str, Any]) -> str:
    """One line for the head of a table."""
    where = machine.get("gpu") or f"{machine['cpu']} (dry run: times mean nothing)"
    return (
        f"{where}, driver {machine.get('driver', 'none')}, torch {machine['torch']}, triton {machine['triton']}, "
        f"posenc_ext {machine['posenc_ext']} for {machine['built_for'] or 'the CPU alone'}, {machine['date']}"
    )


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "none"
    return str(importlib.import_module("triton").__version__)


def _driver(device: torch.device) -> dict[str, Any]:
    """What only the driver's own tool tells; nothing where it is missing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = {"driver": "driver_version", "clock_mhz": "clocks.sm", "memory_clock_mhz": "clocks.mem"}
    index = torch.cuda.current_device() if device.index is None else device.index
    asked = subprocess.run(
        ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    values = [value.strip() for value in asked.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if asked.returncode == 0 and len(values) == len(fields) else {}
