"""Small caches and rows for tests, and the whole state of a cache, to compare before and after."""

from __future__ import annotations

import torch

from kvstrata.cache import TieredCache
from kvstrata.cache.storage.pool import EMPTY

TIERS = ("K4V4", "K3V3", "K2V2")


def rows(tokens: int, heads: int = 2, dim: int = 64, dtype=torch.float32, seed: int = 0) -> tuple:
    k, v = torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return k, v


def limit(amount: int | float | None) -> dict:
    """The arguments of a cache: an int is bytes, anything else a fraction."""
    return dict(budget=None, budget_bytes=amount) if type(amount) is int else dict(budget=amount)


def make(layers: int = 1, heads: int = 2, dim: int = 64, **options) -> TieredCache:
    options = (
        dict(recent_tokens=32, page_tokens=16, dtype=torch.float32, max_tokens=4096, tiers=TIERS, debug=True) | options
    )
    return TieredCache(layers, heads, dim, **options)


def by_head(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


def fingerprint(cache: TieredCache, spare: bool = True) -> list[object]:
    """Everything that an operation that raised must have left alone; ``spare``: empty slabs too."""
    pool = cache.pool
    slabs = [
        None if slab is None or (tier == EMPTY and not spare) else slab.clone()
        for slab, tier in zip(pool.slabs, pool.tier.tolist(), strict=True)
    ]
    arrays = [cache.buckets.page_table, cache.buckets.count, cache.centre, cache._device_lengths, cache.reports.numbers]
    host = (cache._centred, cache._lengths, cache._ahead_from)
    books = [x.copy() for x in (*host, cache.buckets.host_table, cache.buckets.host_count)]
    return [cache.requests, slabs, *books, *(x.clone() for x in arrays), cache.pool.refs.copy(), cache.pool.tier.copy()]


def same(a: list[object], b: list[object]) -> bool:
    def equal(x, y) -> bool:
        if isinstance(x, list):
            return len(x) == len(y) and all(equal(p, q) for p, q in zip(x, y, strict=True))
        if isinstance(x, torch.Tensor):
            return isinstance(y, torch.Tensor) and torch.equal(x, y)
        return bool((x == y).all()) if hasattr(x, "all") else x == y

    return equal(a, b)
