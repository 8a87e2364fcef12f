"""Writes the winners of a search as tables that `auto` reads (`jit.tuned`)."""

from __future__ import annotations

import json
from pathlib import Path

from kvstrata.jit import tuned
from kvstrata.tools.results import write

from .results import Tuning


def entries(tuning: Tuning) -> list[tuned.Entry]:
    """One entry per case; null if the default stays, so that no winner of a distant shape is used there."""
    return [{"case": row.case, "shape": row.shape, "choice": row.choice, "top": row.top} for row in tuning.rows]


def save(op: str, tuning: Tuning, arch: str, folder: Path) -> Path:
    """Write the winners to `<folder>/<gpu>.json`; entries of other ops and cases stay."""
    path = folder / f"{tuning.machine['slug']}.json"
    tables = tuned.read(path) if path.exists() else {}
    fresh = entries(tuning)
    kept = [entry for entry in tables.get(op, []) if entry["case"] not in {e["case"] for e in fresh}]
    tables[op] = sorted([*kept, *fresh], key=lambda entry: entry["case"])
    ops = []
    for name, op_entries in sorted(tables.items()):
        ops.append(f'  "{name}": [\n   ' + ",\n   ".join(json.dumps(entry) for entry in op_entries) + "\n  ]")
    head = {"schema": tuned.SCHEMA, "gpu": tuning.machine["name"], "arch": arch}
    text = ",\n".join(
        [*(f' "{k}": {json.dumps(v)}' for k, v in head.items()), ' "ops": {\n' + ",\n".join(ops) + "\n }"]
    )
    write(path, "{\n" + text + "\n}\n")
    tuned.forget()
    return path


def arch_of(path: Path) -> str:
    """The architecture of a table's GPU."""
    return str(json.loads(path.read_text(encoding="utf-8"))["arch"])
