"""Allocations of an operation on a cache, counted, and one of them refused.

Counted are operators of torch that return new memory, and the pool's slabs, workspaces and copies of host arrays, which
need no operator on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvstrata
from kvstrata.cache.storage.pool import Pool

SOURCE = str(Path(kvstrata.__file__).parent)


class Allocations(TorchDispatchMode):
    """Counts allocations, with the file, function and line that asks for each; number ``fails`` raises."""

    def __init__(self, fails: int = -1) -> None:
        super().__init__()
        self.fails = fails
        self.lines: list[tuple[str, str, int]] = []

    def tick(self) -> None:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
            frame = frame.f_back
        code = None if frame is None else frame.f_code
        self.lines.append(("", "", 0) if code is None else (code.co_filename, code.co_name, frame.f_lineno))
        if len(self.lines) - 1 == self.fails:
            raise torch.OutOfMemoryError("out of memory, as asked for")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema
        if not schema.is_mutable and any(result.alias_info is None for result in schema.returns):
            self.tick()
        return function(*args, **(kwargs or {}))

    @classmethod
    def of(cls, operation: Callable[[], object], fails: int = -1) -> Allocations:
        """Allocations of one call."""
        mode = cls(fails)
        with pytest.MonkeyPatch.context() as patched, mode:
            for name in ("_new_slab", "to_device", "read", "workspace"):
                method = getattr(Pool, name)

                def counted(*given, _method=method):
                    mode.tick()
                    return _method(*given)

                patched.setattr(Pool, name, counted)
            operation()
        return mode
