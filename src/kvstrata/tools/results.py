"""Result files: ``results/<machine>/<name>.json``, readable, written atomically and checked when read.

Every command has its own rows (``bench/results.py``, ``tune/results.py``, ...); this module turns them into files.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

SCHEMA = 1
T = TypeVar("T")


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
    """Write a file atomically: readers see the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)  # mkstemp creates 0600
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    return path


@contextmanager
def naming_errors(name: object, what: str) -> Iterator[None]:
    """Turn errors about a file's contents into a ValueError that names it: ``<name>: not <what>: <why>``."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{name}: not {what}: {error}") from error


def parse(text: str, **expected: str) -> dict[str, Any]:
    """Fields of a result file without the schema and the ``expected`` ones; ValueError if one of those differs."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {type(fields).__name__}")
    for name, wanted in {"schema": SCHEMA, **expected}.items():
        if (given := fields.pop(name, None)) != wanted:
            raise ValueError(f"{name}: expected {wanted!r}, got {given!r}")
    return fields


def from_json(kind: type[T], fields: dict[str, Any]) -> T:
    """Dataclass from JSON; nested dataclasses, and lists and dicts of them, are converted by their type hints."""
    hints = get_type_hints(kind)
    return kind(**{name: _convert(hints.get(name), value) for name, value in fields.items()})


def _convert(hint: Any, value: Any) -> Any:
    nested = next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)
    if nested is None or value is None:
        return value
    if isinstance(value, list):
        return [from_json(nested, each) for each in value]  # type: ignore[arg-type]
    if nested in get_args(hint) and type(None) not in get_args(hint):
        return {name: from_json(nested, each) for name, each in value.items()}  # type: ignore[arg-type]
    return from_json(nested, value)  # type: ignore[arg-type]


def loads(kind: type[T], text: str, name: object, what: str, /, **expected: str) -> T:
    """Read the text of a file; ValueError, which names it ``name``, if it is not ``what`` is expected."""
    with naming_errors(name, what):
        return from_json(kind, parse(text, **expected))


def load(kind: type[T], path: Path, what: str, /, **expected: str) -> T:
    """Read a result file; ValueError for anything else."""
    with naming_errors(path, what):
        text = path.read_text(encoding="utf-8")
    return loads(kind, text, path, what, **expected)


def revision_of(machine: dict[str, Any]) -> str:
    """Short revision of a result, marked if the checkout had uncommitted changes."""
    return (machine.get("revision") or "unknown")[:10] + ("+changes" if machine.get("dirty") else "")


def provenance(machine: dict[str, Any]) -> str:
    """Revision and date of a result, for captions."""
    return f"revision {revision_of(machine)}, {machine['date'][:10]}"
