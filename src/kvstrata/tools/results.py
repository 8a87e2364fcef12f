"""Result files: ``results/<machine>/<name>.json``, readable, written in one step and checked when read.

Every command has rows of its own (``bench/results.py``, ``tune/results.py``, ...); how they become files is here.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEMA = 1


def trim(value: Any, key: str = "") -> Any:
    """JSON values with floats rounded to six digits, and ``samples`` to 0.01."""
    if isinstance(value, dict):
        return {name: trim(entry, name) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [trim(entry, key) for entry in value]
    if isinstance(value, float):
        return round(value, 2) if key == "samples" else float(f"{value:.6g}")
    return value


def dumps(fields: dict[str, Any], lists: Collection[str] = ("rows",)) -> str:
    """Fields as JSON after the schema, one line each; ``lists`` have one line per entry."""
    parts = []
    for name, value in {"schema": SCHEMA, **trim(fields)}.items():
        if name in lists and value:
            entries = ",\n  ".join(json.dumps(entry) for entry in value)
            parts.append(f' "{name}": [\n  {entries}\n ]')
        else:
            parts.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(path: Path, text: str) -> Path:
    """Write a file in one step: readers see the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)  # mkstemp's 0600 is for secrets
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    return path


@contextmanager
def reading(name: object, what: str) -> Iterator[None]:
    """Turn errors about the contents of a file into one ValueError: ``<name>: not <what>: <why>``."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{name}: not {what}: {error}") from error


def parse(text: str, **expected: str) -> dict[str, Any]:
    """Fields of a result file without the schema and the ``expected`` ones; ValueError if one of these differs."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {type(fields).__name__}")
    for name, wanted in {"schema": SCHEMA, **expected}.items():
        if (given := fields.pop(name, None)) != wanted:
            raise ValueError(f"{name}: expected {wanted!r}, got {given!r}")
    return fields


def provenance(machine: dict[str, Any]) -> str:
    """Revision and date of a result, for captions."""
    revision = (machine.get("revision") or "unknown")[:10] + ("+changes" if machine.get("dirty") else "")
    return f"revision {revision}, {machine['date'][:10]}"
