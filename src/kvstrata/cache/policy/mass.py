"""Mass: what attention gave to the tokens of a cache, written into their pages as importance (importance.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvstrata.cache.storage.tokens import Tokens

from .importance import updated

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


def add_mass(
    cache: CacheState,
    change: Transaction,
    layer: int,
    requests: Sequence[int],
    mass: torch.Tensor,
    queries: int,
    ends: Sequence[int],
) -> None:
    """Write mass into pages; ``ends``: the lengths when it was given."""
    # Requests that share pages write to them one after the other.
    for part in [[i] for i in range(len(requests))] if cache.pool.shares else [list(range(len(requests)))]:
        updating = [requests[i] for i in part]
        tokens, handle = cache.buckets.look(layer, updating)
        own = mass_of(tokens, mass if len(part) == len(mass) else mass[part], cache.kv_heads)
        owners = cache.buckets.owners(layer, updating, tokens)
        importance = updated(cache.policy.mode, tokens.importance, own, queries, owners, cache.decay).contiguous()
        write = cache.buckets.prepare_side(handle, tokens)
        change.undo(partial(write, tokens.importance.contiguous()))
        write(importance)
    change.set(cache._queries, (list(requests), layer), cache._queries[list(requests), layer] + queries)
    change.set(cache._reported, (list(requests), layer), ends)


def with_mass(cache: CacheState, tokens: Tokens, mass: torch.Tensor, queries: int) -> Tokens:
    """Tokens that are in no page yet, with importance from the mass that came with them."""
    one = torch.ones_like(tokens.head_cache)
    own = mass_of(tokens, mass, cache.kv_heads)
    importance = updated(cache.policy.mode, tokens.importance, own, queries, one, cache.decay)
    return replace(tokens, importance=importance)


def mass_of(tokens: Tokens, mass: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The entry of each token in ``mass [requests, kv_heads, positions]``."""
    return mass[tokens.head_cache // kv_heads, tokens.head_cache % kv_heads, tokens.position]
