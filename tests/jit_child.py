"""What child processes of `test_jit` run; it imports little, and only the process that they are forked from does."""

from __future__ import annotations

from pathlib import Path

import cuda.core  # noqa: F401

from kvstrata import jit


def compile_add(source: str, add: int) -> str:
    """Symbol of ``add<ADD>``."""
    return jit.compile(Path(source), f"add<{add}>", arch="sm_90").symbol
