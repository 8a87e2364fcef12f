"""Tuned configurations, read at run time: the one of the nearest measured shape on this GPU.

    kvstrata/jit/tables/<gpu>.json         shipped; without one, kernels use their built-in defaults
    $KVSTRATA_CACHE/tables/<gpu>.json      the user's own; its ops replace those of the shipped table

A shape is a few numbers and strings. The distance of two shapes is the sum of |log2(a / b)| over the numbers (1 is a
factor of two in one of them), and infinite if a string differs. Entries farther away than `FARTHEST` are not used.
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .compiler import cache_folder

SCHEMA = 2  # version 1 had groups, unit and units for kv_warps, vector and head_caches
FARTHEST = 2.0
SHIPPED = Path(__file__).parent / "tables"

Value = int | str
Choice = dict[str, Any]  # values of the tuned parameters
Entry = dict[str, Any]  # "case", "shape", "choice" (None: the kernel's own), "top" (choices, best first)


def slug(name: str) -> str:
    """File name of a GPU: 'NVIDIA H200' becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def user_folder() -> Path:
    """Folder of the tables that `kvstrata tune` writes; they take precedence over the shipped ones."""
    return cache_folder() / "tables"


def distance(a: Mapping[str, Value], b: Mapping[str, Value]) -> float:
    """Distance of two shapes; infinite if their strings or keys differ."""
    if a.keys() != b.keys():
        return math.inf
    total = 0.0
    for name, x in a.items():
        y = b[name]
        if isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0:
            total += abs(math.log2(x / y))
        elif x != y:
            return math.inf
    return total


def read(path: Path) -> dict[str, list[Entry]]:
    """Entries of a table by op; ValueError if the file is not a table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA}")
        ops: dict[str, list[Entry]] = data["ops"]
        for entry in (entry for entries in ops.values() for entry in entries):
            if not isinstance(entry["shape"], dict) or not isinstance(entry["choice"], dict | None):
                raise ValueError(f"entry {entry.get('case')!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a tuned table: {error}") from error
    return ops


@functools.lru_cache(maxsize=16)
def table(gpu: str) -> dict[str, list[Entry]]:
    """Entries for a GPU (its slug) by op; empty for an unknown GPU."""
    entries: dict[str, list[Entry]] = {}
    for folder in (SHIPPED, user_folder()):
        try:
            entries |= read(folder / f"{gpu}.json")
        except OSError:
            continue
        except ValueError as error:
            warnings.warn(f"{error}; the table is ignored", stacklevel=2)
    return entries


def nearest(op: str, gpu: str, shape: Mapping[str, Value]) -> Entry | None:
    """Entry nearest to a shape, or None if all are too far away."""
    entries = table(gpu).get(op, [])
    best = min(entries, key=lambda entry: distance(shape, entry["shape"]), default=None)
    return best if best is not None and distance(shape, best["shape"]) <= FARTHEST else None


def lookup(op: str, gpu_name: str, shape: Mapping[str, Value]) -> Choice | None:
    """Tuned choice for a shape on a GPU; None if nothing near was measured or the kernel's default was best."""
    return _lookup(op, gpu_name, tuple(shape.items()))


@functools.lru_cache(maxsize=4096)
def _lookup(op: str, gpu_name: str, shape: tuple[tuple[str, Value], ...]) -> Choice | None:
    entry = nearest(op, slug(gpu_name), dict(shape))
    return None if entry is None else entry["choice"]


def forget() -> None:
    """Clear the caches, so that tables are read again."""
    table.cache_clear()
    _lookup.cache_clear()
