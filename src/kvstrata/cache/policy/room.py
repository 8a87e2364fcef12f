"""Room: whether tokens fit the budget as things stand, and slabs that it does not allow to keep.

Pages are what is paid: a token that fits a page that is there costs nothing, one that does not costs a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.storage.pool import EMPTY
from kvstrata.cache.storage.tokens import DROP, Tokens

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState


def physical(cache: CacheState, layer: int) -> int:
    """The price of a layer's pages, shared ones once."""
    total = 0
    for tier, price in enumerate(cache.policy.prices.page):
        handles = cache.buckets.host_table[:, layer, :, tier]
        total += len(np.unique(handles[handles >= 0])) * price
    return total


def fits_plain(cache: CacheState, layer: int, requests: Sequence[int], lengths: Sequence[int]) -> bool:
    """True if all new tokens fit the plain bucket without settling."""
    if cache.budget.amount is None:
        return True
    prices, p = cache.policy.prices, cache.page_tokens
    if not cache.budget.shared:
        return bool(fits_each(cache, layer, requests, lengths).all())
    pages = 0
    for request, new in zip(requests, lengths, strict=True):
        count = cache.buckets.host_count[request, layer, :, 0].astype(np.int64)
        pages += int((-(-(count + new) // p) - -(-count // p)).sum())
        open_heads = np.flatnonzero(count % p)
        last = cache.buckets.host_table[request, layer, open_heads, 0, count[open_heads] // p]
        pages += int((cache.pool.owners(last) > 1).sum())
    return physical(cache, layer) + pages * prices.page[0] <= cache.budget.pages(0)


def fits_each(cache: CacheState, layer: int, requests: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """`fits_plain` per request under a fractional budget, bool ``[requests]``."""
    prices, where, new = cache.policy.prices, np.array(requests, np.int64), np.array(lengths, np.int64)
    counts = cache.buckets.host_count[where, layer].astype(np.int64)
    counts[:, :, 0] += new[:, None]
    needed = (-(-counts // cache.page_tokens) @ np.array(prices.page)).sum(1)
    ends = (cache._lengths[where, layer] + new).tolist()
    allowed = {n: cache.budget.pages(n) for n in set(ends)}
    return needed <= np.array([allowed[n] for n in ends], np.int64)


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
        return int(prices.each(counts).sum()) <= cache.budget.pages(length)
    copies = 0
    for tier, price in enumerate(prices.page):
        handles = cache.buckets._pages_of(layer, [request], tier)[2]
        copies += int((cache.pool.owners(handles) > 1).sum()) * price
    return physical(cache, layer) + copies <= cache.budget.pages(0)


def tidy(cache: CacheState, workspace: torch.Tensor) -> None:
    """Free memory until the budget holds: empty slabs first, then holes in slabs."""
    allowed = cache.budget.allowed([cache._lengths[r].tolist() for r in cache.requests])
    fixed = cache.budget.fixed

    def over() -> bool:
        too_many = int((cache.pool.tier != EMPTY).sum()) > cache.pool.capacity // 2
        return too_many or (allowed is not None and fixed + cache.pool.nbytes > allowed)

    if over():
        cache.pool.trim()
    if over():
        compact(cache, workspace)


def compact(cache: CacheState, workspace: torch.Tensor) -> None:
    """Close the holes of slabs: pages move, and the tables with them. Allocates nothing on the device."""
    for tier in range(len(cache.page_formats)):
        old, new = cache.pool.compact(tier, workspace)
        if len(old):
            table = cache.buckets.host_table[:, :, :, tier]
            index = np.searchsorted(old, table).clip(max=len(old) - 1)
            table[...] = np.where(old[index] == table, new[index], table)
    cache.pool.trim()
    for layer in range(cache.layers):
        cache.buckets.push(layer, cache.requests)
