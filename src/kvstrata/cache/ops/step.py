"""A decode step in two parts, the second of which a graph can hold.

    advance   the host: room for one more token of each request in all layers, settling where it is needed; counts and
              lengths go up
    write     the device: K and V of a layer into the slots that `advance` made, by the tables as they are when it runs

`append` does both for one layer, and cannot be captured: the host has to know the layers of a step one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.move.append import write_rows
from kvstrata.cache.move.append_job import Written
from kvstrata.cache.policy import settle_cuda
from kvstrata.cache.policy.importance import initial
from kvstrata.cache.policy.plan_op import plan_all
from kvstrata.cache.policy.room import fits_each, fits_plain
from kvstrata.cache.policy.scopes import Place, check_plans, make_scopes, move_tokens, pairs, scopes_of
from kvstrata.cache.storage.tokens import NEW, Fresh, Tokens

from .arguments import check_rows

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


def advance(cache: CacheState, given: list[int]) -> None:
    """`TieredCache.advance` of these requests."""
    if not given:
        return
    cache.pool.note_stream()
    ids, layers = np.array(given), range(cache.layers)
    longest = int(cache._lengths[ids].max())
    if longest >= cache.max_tokens:
        raise ValueError(f"max_tokens: expected at least {longest + 1}, for one token more, got {cache.max_tokens}")
    one = np.ones_like(ids)

    def tight() -> list[int]:
        """Layers in which a token needs a page."""
        return [layer for layer in layers if cache.buckets.room(layer, ids, one) is None] if _edge(cache, ids) else []

    needy = tight()
    if not needy:
        _prepare_count(cache, ids)()
        return
    with cache._operation() as change:
        for layer in tight() if _settle(cache, change, given, needy) else needy:
            cache.buckets.make_room(change, layer, ids, one)
        change.launch(_prepare_count(cache, ids))


def _prepare_count(cache: CacheState, ids: np.ndarray) -> Callable[[], None]:
    """Return a function that counts one more plain token of these requests in every layer, without allocating."""
    buckets, on_device = cache.buckets, []
    if cache.device.type != "cpu":
        rows = cache.pool.to_device(ids)
        for x in (buckets.count.select(3, 0), cache._device_lengths):
            on_device.append((x, torch.ones((), dtype=x.dtype, device=x.device).expand(len(ids), *x.shape[1:])))

    def count() -> None:
        buckets.host_count[ids, :, :, 0] += 1
        cache._lengths[ids] += 1
        for x, ones in on_device:
            x.index_add_(0, rows, ones)

    return count


def _edge(cache: CacheState, ids: np.ndarray) -> bool:
    """True if some token may not fit the open page of its bucket."""
    return cache.pool.shares or bool((cache.buckets.host_count[ids, :, :, 0] % cache.page_tokens == 0).any())


def _settle(cache: CacheState, change: Transaction, given: list[int], tight: list[int]) -> bool:
    """Settle requests that lack room in one of these layers, in all layers; returns whether any did."""
    if cache.budget.amount is None:
        return False
    ones = [1] * len(given)
    if cache.budget.shared:
        short = [] if all(fits_plain(cache, layer, given, ones) for layer in tight) else given
    else:
        fits = np.logical_and.reduce([fits_each(cache, layer, given, ones) for layer in tight])
        short = [request for request, fit in zip(given, fits.tolist(), strict=True) if not fit]
    places = [(layer, scope) for layer in range(cache.layers) for scope in scopes_of(cache, short)]
    if not places:
        return False
    if settle_cuda.supports(cache) and _settle_cuda(cache, change, places, set(given)):
        return True
    tokens = cache.buckets.snapshots(*pairs(places))
    move_tokens(cache, change, places, tokens, _targets(cache, places, tokens, set(given)))
    return True


def _settle_cuda(cache: CacheState, change: Transaction, places: list[Place], given: set[int]) -> bool:
    """Settle by kernels, with the tokens to come planned as if they were there; False if that does not fit."""
    layers, requests = (np.array(x) for x in pairs(places))
    now = cache._lengths[requests, layers].astype(np.int64)
    comes = np.isin(requests, list(given)).astype(np.int64)
    first = initial(cache.policy.mode, torch.from_numpy(now + 1)).numpy()
    fresh = Fresh(comes, np.zeros_like(comes), now, first)
    ends, lengths = np.cumsum([len(scope) for _, scope in places]).tolist(), (now + comes).tolist()
    planned = settle_cuda.plan(
        cache, places, [lengths[end - len(scope) : end] for end, (_, scope) in zip(ends, places, strict=True)], fresh
    )
    if any(needed is not None for needed in planned.needed):
        return False
    settle_cuda.move(cache, change, planned)
    return True


def _targets(cache: CacheState, places: list[Place], tokens: Tokens, given: set[int]) -> torch.Tensor:
    """With room for one plain token more of each given request; or BudgetExceeded.

    Planned as if it were there. Where that does not fit, for the tokens that are, with a slot to spare: one token less
    is no longer recent, which may save a page. Where that does not either, the token may have room as it is: a plan
    pays for shared pages once an owner.
    """
    now = [[int(cache._lengths[r, layer]) for r in scope] for layer, scope in places]
    then = [
        [n + (r in given) for n, r in zip(some, scope, strict=True)]
        for some, (_, scope) in zip(now, places, strict=True)
    ]
    scopes = make_scopes(cache, places, Tokens.cat([tokens, _coming(cache, places, given)]), then)
    made = plan_all(scopes, cache.policy, cache.policy.settle_every)
    target = made.target[: len(tokens)]
    if any(needed is not None for needed in made.needed):
        ahead = plan_all(make_scopes(cache, places, tokens, now), cache.policy, cache.policy.settle_every)
        needed, which = list(made.needed), np.zeros(len(places), np.int64)
        for i, (layer, scope) in enumerate(places):
            coming = [r for r in scope if r in given]
            if needed[i] is not None and ahead.needed[i] is None and ahead.spare[i] > 0:
                needed[i], which[i] = None, 1
            elif needed[i] is not None and fits_plain(cache, layer, coming, [1] * len(coming)):
                needed[i], which[i] = None, 2
        check_plans(cache, places, then, needed)
        by_head_cache = np.repeat(which, [len(scope) * cache.kv_heads for _, scope in places])
        choices = torch.stack([target, ahead.target, tokens.tier])
        target = choices.gather(0, cache.pool.to_device(by_head_cache)[tokens.head_cache].unsqueeze(0))[0]
    return target


def _coming(cache: CacheState, places: list[Place], given: set[int]) -> Tokens:
    """The tokens to come; there are no rows of them yet."""
    layers, requests = (np.array(x) for x in pairs(places))
    place = np.flatnonzero(np.isin(requests, list(given)))
    heads, length = cache.kv_heads, cache._lengths[requests[place], layers[place]]
    head_cache = cache.pool.to_device((place[:, None] * heads + np.arange(heads)).reshape(-1))
    position = cache.pool.to_device(length.astype(np.int64).repeat(heads))
    tier, slot = torch.full_like(head_cache, NEW), torch.arange(len(head_cache), device=cache.device)
    return Tokens(head_cache, tier, slot, position, initial(cache.policy.mode, position + 1))


def write(cache: CacheState, layer: int, k: torch.Tensor, v: torch.Tensor, requests: torch.Tensor | None) -> None:
    """`TieredCache.write`."""
    k, v = check_rows(cache, k, v, requests)
    reciprocal = cache.policy.mode != "mean"
    write_rows(Written(cache.buckets, layer, k, v, requests, cache._device_lengths, reciprocal, cache.balance))
