"""Copies a cache request by request, into a cache of the same or other sizes with its own pages."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from kvstrata.cache.state import CacheState

from .files import put, taken

Cache = TypeVar("Cache", bound=CacheState)


def clone(cache: Cache, **changes: Any) -> Cache:
    """Copy a cache, optionally with other constructor arguments; BudgetExceeded if the requests do not fit.

    Forks share no pages in the copy. Under a budget in bytes they may therefore not fit, or be demoted or evicted.
    """
    copy = type(cache)(**cache._arguments | changes)
    for request in cache.requests:
        put(copy, request, taken(cache, request))
    copy.reports.set_steps(cache.reports.steps)
    return copy


def parts(cache: CacheState) -> dict[int, dict[str, torch.Tensor]]:
    """Tensors of all requests, cloned because torch.save rejects views of one storage with different dtypes."""
    return {r: {name: x.contiguous().clone() for name, x in taken(cache, r).items()} for r in cache.requests}


def restored(
    kind: type[Cache], arguments: dict[str, Any], requests: dict[int, dict[str, torch.Tensor]], steps: int = 0
) -> Cache:
    """Create a cache from the requests that `parts` returned; ``steps`` decode steps were observed before."""
    cache = kind(**arguments)
    for request, tensors in requests.items():
        put(cache, request, tensors)
    cache.reports.set_steps(steps)
    return cache
