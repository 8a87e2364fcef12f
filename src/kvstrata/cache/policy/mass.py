"""Writes attention mass into the pages of tokens as importance (importance.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.storage.tokens import Tokens

from .importance import initial, updated

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


@lru_cache(maxsize=1)
def _numba() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    from . import mass_numba

    return mass_numba


def add_mass(
    cache: CacheState,
    change: Transaction,
    layer: int,
    requests: Sequence[int],
    mass: torch.Tensor,
    queries: int,
    ends: Sequence[int],
) -> None:
    """Write mass into pages; ``ends``: lengths when it was reported."""
    # Requests that share pages write to them one after the other.
    for part in [[i] for i in range(len(requests))] if cache.pool.shares else [list(range(len(requests)))]:
        updating = [requests[i] for i in part]
        if not cache.buckets.host_count[updating, layer].any():
            continue
        tokens, handle = cache.buckets.snapshot_with_handles(layer, updating)
        own = mass_of(tokens, mass if len(part) == len(mass) else mass[part], cache.kv_heads)
        owners = cache.buckets.owners(layer, updating, tokens)
        importance = updated(cache.policy.mode, tokens.importance, own, queries, owners, cache.decay).contiguous()
        write = cache.buckets.prepare_side(handle, tokens)
        change.undo(partial(write, tokens.importance.contiguous()))
        write(importance)
    cache.reports.add(change, requests, layer, queries, ends)


def new_importance(
    cache: CacheState, layer: int, requests: Sequence[int], lengths: Sequence[int], mass: torch.Tensor, queries: int
) -> torch.Tensor:
    """Importance of new tokens from the mass passed with them: float32 ``[rows, kv_heads]``."""
    starts = cache._lengths[list(requests), layer].astype(np.int64)
    parts = zip(mass, starts.tolist(), lengths, strict=True)
    own = torch.cat([of_request[:, start : start + n].T for of_request, start, n in parts])
    if cache.policy.mode == "mean":
        first = torch.zeros((), dtype=torch.float32, device="cpu")  # independent of the length
    else:
        ends = cache.pool.to_device(np.repeat(starts + np.array(lengths), lengths)).unsqueeze(1).expand_as(own)
        first = initial(cache.policy.mode, ends)
    one = torch.ones((), dtype=torch.float32, device="cpu")
    return updated(cache.policy.mode, first, own, queries, one, cache.decay).contiguous()


def observe_mass(
    cache: CacheState, layer: int, requests: Sequence[int], mass: torch.Tensor, weight: torch.Tensor, q_len: int
) -> None:
    """Add the mass of ``q_len`` queries, which represent the last ``weight [requests]`` of each request, in place.

    Each token gets its mass per query times the number of those queries that could see it. A page that several requests
    share gets the mass of the first one with a weight. Reports are not changed.
    """
    loops = _numba() if cache.device.type == "cpu" else None
    if loops is not None and cache.policy.mode == "mean" and not cache.pool.shares:
        loops.observe_mass(cache, layer, requests, mass, weight, q_len)
        return
    tokens, handle = cache.buckets.snapshot_with_handles(layer, requests)
    row = tokens.head_cache // cache.kv_heads
    length = cache.pool.to_device(cache._lengths[list(requests), layer].astype(np.int64))
    seen, given = length[row] - tokens.position, weight.long()[row]
    own = mass_of(tokens, mass, cache.kv_heads) * (torch.minimum(given, seen) / seen.clamp(max=q_len))
    one = torch.ones((), dtype=torch.float32, device=own.device)
    importance = updated(cache.policy.mode, tokens.importance, own, given.clamp(min=1), one, cache.decay)
    speaks = given > 0
    if cache.pool.shares:
        firsts = cache.pool.to_device(_first_owners(cache, layer, requests, weight.cpu().numpy() > 0))
        speaks &= firsts[tokens.head_cache, tokens.tier, tokens.slot // cache.page_tokens]
    index = speaks.nonzero().flatten()
    cache.buckets.prepare_side(handle[index], tokens[index])(importance[index].contiguous())


def _first_owners(cache: CacheState, layer: int, requests: Sequence[int], live: np.ndarray) -> np.ndarray:
    """Entries of the page table that no earlier live request has as well: bool ``[head_caches, tiers, pages]``."""
    table = cache.buckets.host_table[list(requests), layer]
    handles, first = np.unique(np.where(live[:, None, None, None], table, -1), return_index=True)
    is_first = np.zeros(table.size, bool)
    is_first[first[handles >= 0]] = True
    return is_first.reshape(-1, *table.shape[2:])


def mass_of(tokens: Tokens, mass: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The entry of each token in ``mass [requests, kv_heads, positions]``."""
    return mass[tokens.head_cache // kv_heads, tokens.head_cache % kv_heads, tokens.position]
