"""Reading a cache back, head by head and sorted by position: for tests, tools and reference attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import importance as importance_module
from .buckets import Tokens

if TYPE_CHECKING:
    from .cache import TieredCache


def by_head(cache: TieredCache, tokens: Tokens) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Where each token goes in ``[kv_heads, n]`` when every head is sorted by position."""
    counts = torch.bincount(tokens.bucket, minlength=cache.kv_heads)
    order = torch.argsort(tokens.bucket * cache.max_tokens + tokens.position)
    column = torch.empty_like(order)
    starts = (counts.cumsum(0) - counts)[tokens.bucket[order]]
    column[order] = torch.arange(len(order), device=cache.device) - starts
    return (tokens.bucket, column), (cache.kv_heads, int(counts.max()))


def gather(cache: TieredCache, layer: int, request: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dequantised rows and positions, sorted by position."""
    tokens = cache._tokens(layer, request)
    k = torch.zeros(len(tokens), cache.head_dim, dtype=cache.dtype, device=cache.device)
    v = torch.zeros_like(k)
    for tier, kind in enumerate(cache.kinds):
        at = (tokens.tier == tier).nonzero().flatten()
        if len(at):
            some = tokens[at]
            rows = cache.buckets.read(layer, [request], some, tier)
            k[at], v[at] = kind.decode(rows, cache.centre[request, layer][some.bucket])
    place, shape = by_head(cache, tokens)
    out = [torch.zeros(*shape, cache.head_dim, dtype=cache.dtype, device=cache.device) for _ in range(2)]
    positions = torch.full(shape, -1, device=cache.device)
    out[0][place], out[1][place], positions[place] = k, v, tokens.position
    return out[0], out[1], positions


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
