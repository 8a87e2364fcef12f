"""Room: whether tokens fit the budget as it stands, and which slabs must be freed.

Pages are what is charged: a token that fits an existing page costs nothing, one that does not costs a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.storage.tokens import DROP, Tokens

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState

Layers = int | Sequence[int] | np.ndarray


def physical(cache: CacheState, layers: Layers) -> np.ndarray:
    """Bytes of each layer's pages, shared ones counted once; int64, in the shape of ``layers``."""
    buckets, prices = cache.buckets, np.array(cache.policy.prices.page)
    if not cache.pool.shares:
        return (buckets.pages_of().sum(0) @ prices)[layers]
    each = []
    for layer in np.atleast_1d(layers).tolist():
        tables = (buckets.host_table[:, layer, :, tier] for tier in range(len(prices)))
        each.append(sum(len(np.unique(x[x >= 0])) * price for x, price in zip(tables, prices.tolist(), strict=True)))
    return np.array(each).reshape(np.shape(layers))


def fits_plain(cache: CacheState, layers: Layers, requests: Sequence[int], lengths: Sequence[int]) -> bool:
    """True if all new tokens fit the plain buckets of these layers without settling."""
    if cache.budget.amount is None:
        return True
    if not cache.budget.shared:
        return bool(fits_each(cache, layers, requests, lengths).all())
    p, buckets, where = cache.page_tokens, cache.buckets, np.array(requests, np.int64)
    new, rows = np.array(lengths, np.int64)[:, None], np.atleast_1d(layers)[:, None]
    count = buckets.host_count[where, rows, :, 0].astype(np.int64)  # [layers, requests, kv_heads]
    pages = (-(-(count + new) // p) - -(-count // p)).sum((1, 2))
    if cache.pool.shares:
        layer, request, head = np.nonzero(count % p)
        last = buckets.host_table[where[request], rows[layer, 0], head, 0, count[layer, request, head] // p]
        pages += np.bincount(layer, cache.pool.owners(last) > 1, len(pages)).astype(np.int64)
    needed = physical(cache, rows[:, 0]) + pages * cache.policy.prices.page[0]
    return bool((needed <= cache.budget.pages(0)).all())


def fits_each(cache: CacheState, layers: Layers, requests: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """`fits_plain` per request under a fractional budget: bool ``[requests]``, or ``[layers, requests]``."""
    where, new = np.array(requests, np.int64), np.array(lengths, np.int64)
    rows = layers if np.ndim(layers) == 0 else np.asarray(layers)[:, None]
    counts = cache.buckets.host_count[where, rows].astype(np.int64)
    counts[..., 0] += new[:, None]
    needed = (-(-counts // cache.page_tokens)).sum(-2) @ np.array(cache.policy.prices.page)
    ends = cache._lengths[where, rows] + new
    return needed <= cache.budget.granted_at(rows, ends) - cache.budget.overhead


def fits_cropped(
    cache: CacheState, layer: int, request: int, tokens: Tokens, target: torch.Tensor, length: int
) -> bool:
    """True if the remaining tokens of a cropped request fit the budget of its new length."""
    if cache.budget.amount is None:
        return True
    prices = cache.policy.prices
    if not cache.budget.shared:
        tiers = len(prices.page)
        bucket = (tokens.head_cache * tiers + target)[target != DROP].cpu().numpy()
        counts = np.bincount(bucket, minlength=cache.kv_heads * tiers).reshape(-1, tiers)
        return int(prices.each(counts).sum()) <= cache.budget.pages(length, layer)
    copies = 0
    for tier, price in enumerate(prices.page):
        handles = cache.buckets._pages_of(layer, [request], tier)[2]
        copies += int((cache.pool.owners(handles) > 1).sum()) * price
    return int(physical(cache, layer)) + copies <= cache.budget.pages(0)


def tidy(cache: CacheState, workspace: torch.Tensor) -> None:
    """Free memory until the budget holds: empty slabs first, as many as needed, then holes in slabs."""
    pool = cache.pool
    allowed = cache.budget.allowed(cache._lengths, len(cache._active))
    limit = None if allowed is None else allowed - cache.budget.fixed

    def over() -> bool:
        return pool.is_crowded or (limit is not None and pool.nbytes > limit)

    if over():
        pool.trim(nbytes=limit)
        if over():
            compact(cache, workspace)


def compact(cache: CacheState, workspace: torch.Tensor) -> None:
    """Close the holes of slabs: pages move, and the tables with them. Allocates nothing on the device."""
    changed = np.zeros(cache.max_requests, bool)
    cache.buckets.ahead.empty_reserve()
    for tier in range(len(cache.page_formats)):
        old, new = cache.pool.compact(tier, workspace)
        if len(old):
            table = cache.buckets.host_table[:, :, :, tier]
            index = np.searchsorted(old, table).clip(max=len(old) - 1)
            moved = old[index] == table
            table[moved] = new[index[moved]]
            changed |= moved.any((1, 2, 3))
    cache.pool.trim()
    cache.buckets.push(np.flatnonzero(changed))
