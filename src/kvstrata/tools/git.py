"""Files at earlier revisions, if a folder is in a git checkout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from . import child

T = TypeVar("T")


@dataclass(frozen=True)
class Version:
    commit: str
    date: str  # commit date, ISO 8601
    text: str


def _git(folder: Path, *arguments: str) -> str | None:
    return child.output("git", "-C", str(folder), *arguments)


def read_at(path: Path, revision: str) -> str:
    """The file's text at a revision; LookupError says what is missing."""
    folder = next((p for p in path.resolve().parents if p.is_dir()), Path.cwd())
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        raise LookupError(f"{revision!r} is not a file, nor a revision: {folder} is not in a git checkout")
    root = Path(top.strip())
    if _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        raise LookupError(f"{revision!r} is neither a file nor a revision of {root.name}")
    relative = path.resolve().relative_to(root).as_posix()
    text = _git(root, "show", f"{revision}:{relative}")
    if text is None:
        raise LookupError(f"there is no {relative} at revision {revision}")
    return text


def read_earlier(reference: str, path: Path, read: Callable[[str, str], T]) -> T:
    """``read(text, name)`` of the file `reference`, or of `here` at that revision; LookupError, ValueError, OSError."""
    if Path(reference).is_file():
        return read(Path(reference).read_text(encoding="utf-8"), reference)
    if Path(reference).suffix == ".json":
        raise FileNotFoundError(f"--against: no file {reference}")
    return read(read_at(path, reference), f"{path.name} at {reference}")


def versions(path: Path, limit: int = 20) -> list[Version]:
    """Versions of a file in the last ``limit`` commits that changed it, oldest first; empty outside a checkout."""
    folder = path.resolve().parent
    log = _git(folder, "log", f"-{limit}", "--format=%H %cI", "--", path.name) if folder.is_dir() else None
    history = []
    for line in reversed((log or "").splitlines()):
        commit, date = line.split()
        text = _git(folder, "show", f"{commit}:./{path.name}")
        if text is not None:
            history.append(Version(commit, date, text))
    return history
