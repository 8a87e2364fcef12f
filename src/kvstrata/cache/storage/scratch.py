"""Scratch that kernels keep beside a cache, so that the cache can report its bytes.

The registry holds weak references only: entries vanish with the cache or the scratch.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet


class Scratch(Protocol):
    @property
    def nbytes(self) -> int: ...


_LIVE: WeakKeyDictionary[object, WeakSet[Scratch]] = WeakKeyDictionary()


def register(cache: object, scratch: Scratch) -> None:
    """Count ``scratch`` as the cache's until it is freed."""
    _LIVE.setdefault(cache, WeakSet()).add(scratch)


def scratch_bytes(cache: object) -> int:
    """Bytes of all scratch of a cache that is allocated now."""
    return sum(scratch.nbytes for scratch in _LIVE.get(cache, ()))
