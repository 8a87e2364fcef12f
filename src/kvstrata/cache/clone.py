"""A cache copied request by request, into one of the same or of other sizes; the copy has pages of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .files import put, taken

if TYPE_CHECKING:
    from .cache import TieredCache


def clone(cache: TieredCache, **changes: Any) -> TieredCache:
    """With other arguments of the constructor; BudgetExceeded where the requests do not fit them."""
    twin = type(cache)(**cache._arguments | changes)
    for request in cache.requests:
        put(twin, request, taken(cache, request))
    return twin
