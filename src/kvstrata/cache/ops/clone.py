"""A cache copied request by request, into one of the same or of other sizes; the copy has pages of its own."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from kvstrata.cache.state import CacheState

from .files import put, taken

Cache = TypeVar("Cache", bound=CacheState)


def clone(cache: Cache, **changes: Any) -> Cache:
    """With other arguments of the constructor; BudgetExceeded where the requests do not fit them."""
    twin = type(cache)(**cache._arguments | changes)
    for request in cache.requests:
        put(twin, request, taken(cache, request))
    return twin


def parts(cache: CacheState) -> dict[int, dict[str, torch.Tensor]]:
    """All requests as `files.taken` gives them, in memory of their own: torch.save takes no two views of one."""
    return {r: {name: x.contiguous().clone() for name, x in taken(cache, r).items()} for r in cache.requests}


def restored(kind: type[Cache], arguments: dict[str, Any], requests: dict[int, dict[str, torch.Tensor]]) -> Cache:
    """A cache with these requests, as `parts` gives them."""
    cache = kind(**arguments)
    for request, tensors in requests.items():
        put(cache, request, tensors)
    return cache
