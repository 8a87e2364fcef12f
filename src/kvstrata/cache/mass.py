"""Mass: what attention gave to the tokens of a cache, written into their pages as importance (importance.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .importance import updated
from .tokens import Tokens

if TYPE_CHECKING:
    from .cache import TieredCache


def hear(
    cache: TieredCache, layer: int, requests: Sequence[int], mass: torch.Tensor, queries: int, ends: Sequence[int]
) -> Callable[[], None]:
    """Write mass into pages; ``ends``: the lengths when it was given. Returns what undoes it."""
    before: list[tuple[Tokens, torch.Tensor]] = []
    told = cache._queries[:, layer].copy(), cache._reported[:, layer].copy()
    # A page that several share hears from one after the other.
    for part in [[i] for i in range(len(requests))] if cache.pool.shares else [list(range(len(requests)))]:
        mine = [requests[i] for i in part]
        tokens, handle = cache.buckets.look(layer, mine)
        own = mass_of(tokens, mass if len(part) == len(mass) else mass[part], cache.kv_heads)
        owners = cache.buckets.owners(layer, mine, tokens)
        heard = updated(cache.policy.mode, tokens.importance, own, queries, owners, cache.decay)
        before.append((tokens, handle))
        cache.buckets.set_side(handle, replace(tokens, importance=heard))
    cache._queries[list(requests), layer] += queries
    cache._reported[list(requests), layer] = ends

    def undo() -> None:
        for tokens, handle in reversed(before):
            cache.buckets.set_side(handle, tokens)
        cache._queries[:, layer], cache._reported[:, layer] = told

    return undo


def hear_first(cache: TieredCache, tokens: Tokens, mass: torch.Tensor, queries: int) -> Tokens:
    """Tokens that are in no page yet, with their part of the mass that came with them."""
    one = torch.ones_like(tokens.bucket)
    own = mass_of(tokens, mass, cache.kv_heads)
    heard = updated(cache.policy.mode, tokens.importance, own, queries, one, cache.decay)
    return replace(tokens, importance=heard)


def mass_of(tokens: Tokens, mass: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The entry of each token in ``mass [requests, kv_heads, positions]``."""
    return mass[tokens.bucket // kv_heads, tokens.bucket % kv_heads, tokens.position]
