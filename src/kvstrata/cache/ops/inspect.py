"""Reads a cache back, head by head and sorted by position: for tests, tools and reference attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.policy import importance as importance_module
from kvstrata.cache.policy.balance import factors_of
from kvstrata.cache.storage.page_table import Tokens

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState


def by_head(
    cache: CacheState, layer: int, requests: Sequence[int], tokens: Tokens
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Indices of each token in ``[requests * kv_heads, n]``, every head sorted by position, and that shape."""
    counts = cache.buckets.host_count[list(requests), layer].sum(-1, dtype=np.int64).reshape(-1)
    starts = cache.pool.to_device(np.cumsum(counts) - counts)
    order = torch.argsort(tokens.head_cache * cache.max_tokens + tokens.position)
    column = torch.empty_like(order)
    column[order] = torch.arange(len(order), device=cache.device) - starts[tokens.head_cache[order]]
    return (tokens.head_cache, column), (len(counts), int(counts.max()))


def gather(cache: CacheState, layer: int, requests: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dequantised rows ``[requests, kv_heads, n, D]`` and positions, sorted by position."""
    tokens = cache.buckets.snapshot(layer, requests)
    centre = cache.centre[cache.pool.to_device(np.array(requests, np.int64)), layer].flatten(0, 1)
    balance = factors_of(cache, layer, requests)
    if balance is not None:
        balance = balance.flatten(0, 1)
        centre = centre / balance
    k = torch.empty(len(tokens), cache.head_dim, dtype=cache.dtype, device=cache.device)
    v = torch.empty_like(k)
    for kind, index, rows in cache.buckets.read_all(layer, requests, tokens):
        k[index], v[index] = kind.decode(rows, centre[tokens.head_cache[index]])
    if balance is not None:
        k *= balance[tokens.head_cache].to(k.dtype)
    place, shape = by_head(cache, layer, requests, tokens)
    out = [torch.zeros(*shape, cache.head_dim, dtype=cache.dtype, device=cache.device) for _ in range(2)]
    positions = torch.full(shape, -1, device=cache.device)
    out[0][place], out[1][place], positions[place] = k, v, tokens.position
    each = (len(requests), cache.kv_heads)
    return out[0].unflatten(0, each), out[1].unflatten(0, each), positions.unflatten(0, each)


def tier_map(cache: CacheState, layer: int, request: int) -> torch.Tensor:
    """Tier of each token of a request, heads sorted by position as in `gather`."""
    tokens = cache._tokens(layer, request)
    place, shape = by_head(cache, layer, [request], tokens)
    tiers = torch.full(shape, -1, device=cache.device)
    tiers[place] = tokens.tier
    return tiers


def importance(cache: CacheState, layer: int, request: int) -> torch.Tensor:
    """Estimated mass of each token of a request, heads sorted by position as in `gather`."""
    tokens = cache._tokens(layer, request)
    place, shape = by_head(cache, layer, [request], tokens)
    length = torch.full_like(tokens.position, int(cache._lengths[request, layer]))
    queries, reported = cache.reports.numbers[request, layer].long()
    estimates = torch.zeros(shape, dtype=torch.float32, device=cache.device)
    estimates[place] = importance_module.estimate(
        cache.policy.mode, tokens.importance, tokens.position, length, queries, reported
    )
    return estimates
