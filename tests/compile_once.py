"""Loops of numba compiled by one worker of pytest-xdist and read from numba's disk cache by the others.

Workers begin at the same time and would compile the same loops side by side.
"""

from __future__ import annotations

import fcntl
import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[1] / ".pytest_cache" / "numba.lock"


def share() -> None:
    """Let one process at a time compile; it looks into the cache first. Nothing to do without workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ or find_spec("numba") is None:
        return
    from numba.core.dispatcher import Dispatcher

    compile_alone, own = Dispatcher.compile, threading.RLock()
    LOCK.parent.mkdir(exist_ok=True)
    file, depth = LOCK.open("w"), 0  # compiling a loop compiles those that it calls

    def compile_in_turn(self: Any, sig: Any) -> Any:
        nonlocal depth
        with own:
            if depth == 0:
                fcntl.flock(file, fcntl.LOCK_EX)
            depth += 1
            try:
                return compile_alone(self, sig)
            finally:
                depth -= 1
                if depth == 0:
                    fcntl.flock(file, fcntl.LOCK_UN)

    Dispatcher.compile = compile_in_turn
