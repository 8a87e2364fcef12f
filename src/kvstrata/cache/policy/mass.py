"""Mass: what attention gave to the tokens of a cache, written into their pages as importance (importance.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.storage.tokens import Tokens

from .importance import initial, updated

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
        if not cache.buckets.host_count[updating, layer].any():
            continue
        tokens, handle = cache.buckets.look(layer, updating)
        own = mass_of(tokens, mass if len(part) == len(mass) else mass[part], cache.kv_heads)
        owners = cache.buckets.owners(layer, updating, tokens)
        importance = updated(cache.policy.mode, tokens.importance, own, queries, owners, cache.decay).contiguous()
        write = cache.buckets.prepare_side(handle, tokens)
        change.undo(partial(write, tokens.importance.contiguous()))
        write(importance)
    change.set(cache._queries, (list(requests), layer), cache._queries[list(requests), layer] + queries)
    change.set(cache._reported, (list(requests), layer), ends)


def new_importance(
    cache: CacheState, layer: int, requests: Sequence[int], lengths: Sequence[int], mass: torch.Tensor, queries: int
) -> torch.Tensor:
    """Importance of new tokens from the mass that came with them: float32 ``[rows, kv_heads]``."""
    starts = cache._lengths[list(requests), layer].astype(np.int64)
    parts = zip(mass, starts.tolist(), lengths, strict=True)
    own = torch.cat([of_request[:, start : start + n].T for of_request, start, n in parts])
    ends = cache.pool.to_device(np.repeat(starts + np.array(lengths), lengths)).unsqueeze(1).expand_as(own)
    one = torch.ones((), device=own.device)
    return updated(cache.policy.mode, initial(cache.policy.mode, ends), own, queries, one, cache.decay).contiguous()


def mass_of(tokens: Tokens, mass: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The entry of each token in ``mass [requests, kv_heads, positions]``."""
    return mass[tokens.head_cache // kv_heads, tokens.head_cache % kv_heads, tokens.position]
