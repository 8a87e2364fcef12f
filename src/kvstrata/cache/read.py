"""Reading a cache back, head by head and sorted by position: for tests, tools and reference attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import importance as importance_module
from .buckets import Tokens

if TYPE_CHECKING:
    from .cache import TieredCache


def by_head(
    cache: TieredCache, tokens: Tokens, requests: int = 1
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Where each token goes in ``[requests * kv_heads, n]`` when every head is sorted by position."""
    buckets = requests * cache.kv_heads
    counts = torch.bincount(tokens.bucket, minlength=buckets)
    order = torch.argsort(tokens.bucket * cache.max_tokens + tokens.position)
    column = torch.empty_like(order)
    starts = (counts.cumsum(0) - counts)[tokens.bucket[order]]
    column[order] = torch.arange(len(order), device=cache.device) - starts
    return (tokens.bucket, column), (buckets, int(counts.max()))


def gather(cache: TieredCache, layer: int, requests: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dequantised rows ``[requests, kv_heads, n, D]`` and positions, sorted by position."""
    tokens = cache.buckets.snapshot(layer, requests)
    centre = cache.centre[list(requests), layer].flatten(0, 1)
    k = torch.zeros(len(tokens), cache.head_dim, dtype=cache.dtype, device=cache.device)
    v = torch.zeros_like(k)
    for tier, kind in enumerate(cache.kinds):
        at = (tokens.tier == tier).nonzero().flatten()
        if len(at):
            some = tokens[at]
            rows = cache.buckets.read(layer, requests, some, tier)
            k[at], v[at] = kind.decode(rows, centre[some.bucket])
    place, shape = by_head(cache, tokens, len(requests))
    out = [torch.zeros(*shape, cache.head_dim, dtype=cache.dtype, device=cache.device) for _ in range(2)]
    positions = torch.full(shape, -1, device=cache.device)
    out[0][place], out[1][place], positions[place] = k, v, tokens.position
    each = (len(requests), cache.kv_heads)
    return out[0].unflatten(0, each), out[1].unflatten(0, each), positions.unflatten(0, each)


def tier_map(cache: TieredCache, layer: int, request: int) -> torch.Tensor:
    """Tiers in the same order."""
    tokens = cache._tokens(layer, request)
    place, shape = by_head(cache, tokens)
    tiers = torch.full(shape, -1, device=cache.device)
    tiers[place] = tokens.tier
    return tiers


def importance(cache: TieredCache, layer: int, request: int) -> torch.Tensor:
    """Estimated mass in the same order."""
    tokens = cache._tokens(layer, request)
    place, shape = by_head(cache, tokens)
    length = torch.full_like(tokens.position, int(cache._lengths[request, layer]))
    queries = torch.full_like(tokens.position, int(cache._queries[request, layer]))
    reported = torch.full_like(tokens.position, int(cache._reported[request, layer]))
    estimates = torch.zeros(shape, device=cache.device)
    estimates[place] = importance_module.estimate(
        cache.policy.mode, tokens.importance, tokens.position, length, queries, reported
    )
    return estimates
