"""The disk cache of compiled loops: a loop is compiled again when anything that it calls or reads has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="numba is not installed")

from kvstrata import loops

CALLEE = """
from kvstrata.loops import {kind}
from constants import FACTOR
OTHER = {other}

@{kind}
def scaled(x):
    return x * FACTOR{more}
"""
CALLER = """
import callee
from callee import scaled
from kvstrata.loops import exact

@exact
def twice(x):
    return 2 * scaled(x)
"""


def write(folder: Path, factor: float = 3.0, kind: str = "exact", more: str = "", other: int = 0) -> None:
    """Three modules; the caller's file stays as it is, with its time."""
    (folder / "constants.py").write_text(f"FACTOR = {factor}\n")
    (folder / "callee.py").write_text(CALLEE.format(kind=kind, more=more, other=other))
    if not (folder / "caller.py").exists():
        (folder / "caller.py").write_text(CALLER)
    for path in folder.glob("*.py"):
        os.utime(path, (1_000_000_000, 1_000_000_000))  # as files of a wheel, which have the time of its release


def run(folder: Path) -> tuple[float, int, int]:
    """Result of the loop in a new process, and how often it was found in the cache and not."""
    code = "import caller; t = caller.twice; print(t(1.5), *(sum(x.values()) for x in t.stats[1:]))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    value, hits, misses = done.stdout.split()
    return float(value), int(hits), int(misses)


def test_a_changed_constant_of_a_loop_that_is_called_is_noticed(tmp_path: Path) -> None:
    """The caller's own file is the same, in time and size: numba alone would go on with the old constant."""
    write(tmp_path, factor=3.0)
    assert run(tmp_path) == (9.0, 0, 1)
    write(tmp_path, factor=5.0)
    assert run(tmp_path) == (15.0, 0, 1)
    write(tmp_path, factor=3.0)
    assert run(tmp_path) == (9.0, 1, 0), "what was compiled before is still there"


def digest_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    write(folder, **changes)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "dont_write_bytecode", True)
        for name in ("caller", "callee", "constants"):
            sys.modules.pop(name, None)
        import caller  # type: ignore[import-not-found]

        return loops.digest(caller.twice)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        (dict(), True),
        (dict(other=1), True),
        (dict(factor=3), False),
        (dict(factor=-3.0), False),
        (dict(kind="fast"), False),
        (dict(more=" + 1"), False),
        (dict(more=" + callee_offset(x)"), False),
    ],
    ids=["nothing", "a constant that is not used", "type", "value", "options", "code", "another name"],
)
def test_digests_cover_what_a_loop_calls(
    changes: dict, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (digest_of(tmp_path, monkeypatch) == digest_of(tmp_path, monkeypatch, **changes)) == same


def test_digests_of_our_loops_differ_and_stay() -> None:
    from kvstrata.attention.decode import numba as decode_numba
    from kvstrata.cache.storage import page_numba

    found = [
        x for module in (decode_numba, page_numba) for x in vars(module).values() if isinstance(x, loops.Dispatcher)
    ]
    digests = {loop.py_func.__qualname__: loops.digest(loop) for loop in found}
    assert len(set(digests.values())) == len(digests) > 10
    loops.digest.cache_clear()
    assert {loop.py_func.__qualname__: loops.digest(loop) for loop in found} == digests
