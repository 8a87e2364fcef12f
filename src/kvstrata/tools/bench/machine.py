"""Description of the machine: device, driver, clocks, versions and revision; nothing that identifies the host."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from kvstrata import __version__
from kvstrata.jit.tuned import slug as slug
from kvstrata.tools import child

PACKAGE = Path(__file__).resolve().parents[2]
CLOCKS = {
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "memory_max_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
}


def describe(device: torch.device | str, revision: str | None = None) -> dict[str, Any]:
    """The environment as plain data; `revision` is recorded if the package is not in a git checkout."""
    device = torch.device(device)
    return {
        **(_gpu(device) if device.type == "cuda" else _cpu()),
        "versions": versions(),
        **_revision(revision),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
    }


def versions() -> dict[str, str | None]:
    """Versions of everything that takes part in a measurement; None for packages that are not installed."""
    by_package: dict[str, str | None] = {
        "kvstrata": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "cuda-core", "numpy"):
        try:
            by_package[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            by_package[name] = None
    return by_package


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache: the L2 of a GPU, the largest cache of a CPU (32 MB if unknown)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) << {"K": 10, "M": 20}[s[-1]] for s in sizes if s[-1:] in ("K", "M")), default=32 << 20)


def release(device: torch.device) -> None:
    """Return unused device memory to the driver."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "slug": slug(properties.name),
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "cache_bytes": cache_bytes(device),
        "memory_bytes": properties.total_memory,
        **_nvidia_smi(str(getattr(properties, "uuid", ""))),
    }


def _nvidia_smi(uuid: str) -> dict[str, Any]:
    """Driver and clocks of the GPU with that uuid; empty if nvidia-smi does not report them."""
    fields = ["uuid", "driver_version", *CLOCKS.values()]
    listing = child.output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits") or ""
    table = [[cell.strip() for cell in row.split(",")] for row in listing.splitlines()]
    matching = [
        row for row in table if len(row) == len(fields) and (len(table) == 1 or (uuid and row[0].endswith(uuid)))
    ]
    if not matching:
        return {"driver": None, "clocks": {}}
    return {"driver": matching[0][1], "clocks": dict(zip(CLOCKS, map(_number, matching[0][2:]), strict=True))}


def _cpu() -> dict[str, Any]:
    arch, model = platform.machine(), re.search(r"^Model name:\s*(.+)$", child.output("lscpu") or "", re.MULTILINE)
    return {
        "name": (model.group(1).strip() if model else platform.processor()) or arch,
        "slug": f"cpu-{slug(arch)}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(torch.device("cpu")),
    }


def _revision(given: str | None) -> dict[str, Any]:
    """Revision and dirty flag of the checkout, if git tracks this package itself (not only a folder around it)."""
    git = ("git", "-C", str(PACKAGE))
    if not child.output(*git, "ls-files", "__init__.py"):
        return {"revision": given, "dirty": None}
    status = child.output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"revision": (child.output(*git, "rev-parse", "HEAD") or "").strip() or given, "dirty": bool(status)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
