"""Settling one step ahead: `advance` plans the moves of the next step, and the next `advance` executes them.

    advance n    moves planned at n - 1, room, counts ──▶ plan for n + 1 is queued; its counts are copied to the host
    step n       the captured graph runs after it
    advance n+1  counts have arrived: pages and moves, without waiting

The token of step n is counted when the plan is made, but is not in its page yet: planners know its position. A plan
stays valid for a request until anything but `advance`, `write` and `update_importance` changes the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.storage.tokens import NEW, Fresh, Tokens
from kvstrata.cache.storage.transaction import is_out_of_memory

from . import ahead_cuda, settle_cuda
from .importance import initial, initial_of
from .plan_op import plan_all
from .schedule import due
from .scopes import Place, make_scopes, move_tokens, pairs, scopes_of

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


def places_of(cache: CacheState, ids: np.ndarray, wanted: np.ndarray) -> list[Place]:
    """Places with a True in ``wanted [requests, layers]``, layer by layer, with all requests that share their bytes."""
    places: list[Place] = []
    for layer in np.flatnonzero(wanted.any(0)).tolist():
        places += [(layer, scope) for scope in scopes_of(cache, ids[wanted[:, layer]].tolist())]
    return places


def lengths_then(cache: CacheState, places: Sequence[Place], given: set[int]) -> list[list[int]]:
    """Lengths of the requests of places, with one more token for those in ``given``."""
    return [[int(cache._lengths[r, layer]) + (r in given) for r in scope] for layer, scope in places]


def coming(cache: CacheState, places: Sequence[Place], given: set[int]) -> Fresh:
    """One more token of each given request, without K and V rows."""
    layers, requests = (np.array(x) for x in pairs(places))
    comes = np.isin(requests, list(given)).astype(np.int64)
    now = cache._lengths[requests, layers].astype(np.int64)
    return Fresh(comes, np.zeros_like(comes), now, initial_of(cache.policy.mode, now + 1))


def coming_tokens(cache: CacheState, places: Sequence[Place], given: set[int]) -> Tokens:
    """`coming` as a list of tokens."""
    layers, requests = (np.array(x) for x in pairs(places))
    place = np.flatnonzero(np.isin(requests, list(given)))
    heads, length = cache.kv_heads, cache._lengths[requests[place], layers[place]]
    head_cache = cache.pool.to_device((place[:, None] * heads + np.arange(heads)).reshape(-1))
    position = cache.pool.to_device(length.astype(np.int64).repeat(heads))
    tier, slot = torch.full_like(head_cache, NEW), torch.arange(len(head_cache), device=cache.device)
    return Tokens(head_cache, tier, slot, position, initial(cache.policy.mode, position + 1))


class Ahead:
    """A plan for places whose requests get one more token each; ``valid`` requests have not been changed since."""

    def __init__(self, cache: CacheState, places: list[Place], given: Sequence[int]) -> None:
        self._cache, self.places, self.valid = cache, places, set(given)
        self._given = set(given)
        lengths = lengths_then(cache, places, self._given)
        self._planned = None
        if settle_cuda.supports(cache):
            fresh = coming(cache, places, self._given)
            self._planned = settle_cuda.plan(cache, places, lengths, fresh, unwritten=fresh.counts)
        else:
            stored = _with_unwritten(cache, places, self._given)
            self._head_cache = stored.head_cache
            tokens = Tokens.cat([stored, coming_tokens(cache, places, self._given)])
            self._plans = plan_all(make_scopes(cache, places, tokens, lengths), cache.policy, cache.policy.settle_every)

    def forget(self, requests: Sequence[int]) -> None:
        self.valid.difference_update(requests)

    def carry_out(self, change: Transaction, ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Move the tokens of wanted places that are planned and fit; True for those, ``[requests, layers]``."""
        cache, done = self._cache, np.zeros_like(wanted)
        usable = self.valid & set(ids.tolist())
        if not usable:
            return done
        needed = self._planned.needed if self._planned is not None else self._plans.needed
        row_of, chosen = {request: i for i, request in enumerate(ids.tolist())}, []
        for (layer, scope), least in zip(self.places, needed, strict=True):
            if cache.budget.shared:  # one plan for all requests: valid for all or for none
                fits = usable == self._given == set(ids.tolist()) and set(scope) == cache._active
            else:
                fits = scope[0] in usable
            rows = [row_of[r] for r in scope if r in row_of]
            chosen.append(fits and least is None and bool(wanted[rows, layer].any()))
            if chosen[-1]:
                done[rows, layer] = True
        if not any(chosen):
            return done
        if self._planned is not None:
            without = ~np.repeat(chosen, [len(scope) for _, scope in self.places])
            settle_cuda.move(cache, change, self._planned, without=without)
            return done
        places = [place for place, one in zip(self.places, chosen, strict=True) if one]
        kept = cache.pool.to_device(np.repeat(chosen, [len(scope) * cache.kv_heads for _, scope in self.places]))
        target = self._plans.target[: len(self._head_cache)][kept[self._head_cache]]
        tokens = cache.buckets.snapshots(*pairs(places))  # in the same order, including what was written since
        move_tokens(cache, change, places, tokens, target)
        return done


def _with_unwritten(cache: CacheState, places: Sequence[Place], given: set[int]) -> Tokens:
    """Tokens of places; the last plain token of each given request is counted but not in its page yet."""
    layers, requests = (np.array(x) for x in pairs(places))
    tokens = cache.buckets.snapshots(layers.tolist(), requests.tolist())
    last = cache.buckets.host_count[requests, layers, :, 0].astype(np.int64) - 1
    last[~np.isin(requests, list(given))] = -1
    length = cache._lengths[requests, layers].astype(np.int64).repeat(cache.kv_heads)
    slots, lengths = cache.pool.to_device(np.stack([last.reshape(-1), length]))
    unwritten = (tokens.tier == 0) & (tokens.slot == slots[tokens.head_cache])
    length_of = lengths[tokens.head_cache]
    return replace(
        tokens,
        position=torch.where(unwritten, length_of - 1, tokens.position),
        importance=torch.where(unwritten, initial(cache.policy.mode, length_of), tokens.importance),
    )


def plan_ahead(cache: CacheState, ids: np.ndarray) -> None:
    """Plan for the next token of these requests, in places where it will have to settle."""
    able = ids
    if int(cache._lengths.max()) >= cache.max_tokens:
        able = ids[cache._lengths[ids].max(1) < cache.max_tokens]
    wanted = due(cache, able) if len(able) else None
    if len(able) == len(ids):
        cache._due = (ids, wanted)
    if wanted is None:
        return
    try:
        if ahead_cuda.supports(cache):
            cache._ahead.append(ahead_cuda.DeviceAhead(cache, able, wanted))
        else:
            cache._ahead.append(Ahead(cache, places_of(cache, able, wanted), able.tolist()))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):  # otherwise the next step plans for itself
            raise
