"""Environment report: versions, device limits, backends of each op and why some cannot run, tools, caches, tables."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from kvstrata.jit import cache_folder, tuned

from . import child
from .bench import cases
from .bench.machine import describe
from .check import sweeps

EXTRAS = {"scipy": "bench", "matplotlib": "bench", "jinja2": "bench", "optuna": "tune", "numba": "cpu",
          "transformers": "hf"}  # fmt: skip
TOOLS = {"ncu": "kvstrata profile", "compute-sanitizer": "kvstrata check", "nvidia-smi": "clocks and driver"}
LIMITS = {
    "shared_memory_per_block": "shared_memory_per_block_optin",
    "shared_memory_per_multiprocessor": "shared_memory_per_multiprocessor",
    "registers_per_multiprocessor": "regs_per_multiprocessor",
    "threads_per_multiprocessor": "max_threads_per_multi_processor",
    "warp": "warp_size",
}


def facts(device: torch.device) -> dict[str, Any]:
    """The report as plain data; in ``backends``, ``packages`` and ``tools`` None means available."""
    machine = describe(device)
    return {
        **machine,
        "limits": limits(device),
        "backends": {op: sweeps.backends(op, device) for op in sweeps.names()},
        "packages": {
            name: None if importlib.util.find_spec(name) else f"pip install 'kvstrata[{extra}]'"
            for name, extra in EXTRAS.items()
        },
        "tools": {
            name: None if child.find_tool(name) else f"not on the PATH; for {use}" for name, use in TOOLS.items()
        },
        "benchmarks": cases.names(),
        "cache": str(cache_folder()),
        "caches": caches(),
        "tables": tables(machine["slug"]),
    }


def limits(device: torch.device) -> dict[str, int]:
    """Resource limits of a kernel on this GPU; empty on a CPU."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {name: int(getattr(properties, field)) for name, field in LIMITS.items() if hasattr(properties, field)}


def caches() -> dict[str, dict[str, Any]]:
    """Cache folders of kvstrata and Triton, with their number of files and bytes."""
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    folders = {"cubin": cache_folder() / "cubin", "tables": cache_folder() / "tables", "triton": triton}
    return {name: {"folder": str(folder), **_size(folder)} for name, folder in folders.items()}


def tables(slug: str) -> list[dict[str, Any]]:
    """Tuned tables: first the user's, then the shipped ones; `used` marks those of this machine."""
    described = []
    for folder in (tuned.user_folder(), tuned.SHIPPED):
        for path in sorted(folder.glob("*.json")):
            entry: dict[str, Any] = {"path": str(path), "used": path.stem == slug}
            try:
                ops = {op: len(entries) for op, entries in tuned.read(path).items()}
                described.append({**entry, "ops": ops, "error": None})
            except ValueError as error:
                described.append({**entry, "ops": {}, "error": str(error)})
    return described


def lines(facts: dict[str, Any]) -> list[str]:
    """The report as text, one fact per line."""
    shown = []
    for key, value in facts.items():
        if key in ("backends", "packages", "tools"):
            shown += _available(key, value)
        elif key == "caches":
            shown += [
                _line(key, f"{name} {c['folder']} ({c['files']} files, {_bytes(c['bytes'])})")
                for name, c in value.items()
            ]
        elif key == "tables":
            shown += [_line(key, _table(t)) for t in value]
            if not any(t["used"] for t in value):
                shown.append(
                    _line(key, "none for this machine: kernels choose by themselves (kvstrata tune makes one)")
                )
        elif isinstance(value, dict):
            shown += [_line(key, f"{name} {'-' if entry is None else entry}") for name, entry in value.items()]
        elif isinstance(value, list):
            shown.append(_line(key, ", ".join(value)))
        else:
            shown.append(_line(key, "-" if value is None else f"{value}"))
    return shown


def _table(table: dict[str, Any]) -> str:
    ops = ", ".join(f"{op} {n}" for op, n in table["ops"].items())
    return f"{table['path']} ({table['error'] or ops}{'; in use' if table['used'] and not table['error'] else ''})"


def _available(key: str, value: dict[str, Any]) -> list[str]:
    nested = value if key == "backends" else {"": value}
    return [
        _line(key, f"{f'{op} ' if op else ''}{name}{f': {reason}' if reason else ' available'}")
        for op, entries in nested.items()
        for name, reason in entries.items()
    ]


def _line(key: str, text: str) -> str:
    return f"{key:12} {text}"


def _size(folder: Path) -> dict[str, int]:
    sizes = []
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except OSError:  # another process clears the cache
            continue
    return {"files": len(sizes), "bytes": sum(sizes)}


def _bytes(n: int) -> str:
    return f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n} bytes"
