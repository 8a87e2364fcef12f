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
from kvstrata.cache.policy.ahead import coming, coming_tokens, lengths_then, places_of, plan_ahead
from kvstrata.cache.policy.plan_op import plan_all
from kvstrata.cache.policy.room import fits_plain
from kvstrata.cache.policy.scopes import Place, check_plans, make_scopes, move_tokens, pairs
from kvstrata.cache.policy.turns import due
from kvstrata.cache.storage.tokens import Tokens

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

    wanted = due(cache, ids)
    if not wanted.any() and not tight():
        _prepare_count(cache, ids)()
    else:
        with cache._operation() as change:
            _settle(cache, change, given, ids, wanted)
            for layer in tight():
                cache.buckets.make_room(change, layer, ids, one)
            change.launch(_prepare_count(cache, ids))
    cache._forget(given)
    if (ahead := plan_ahead(cache, given)) is not None:
        cache._ahead.append(ahead)


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


def _settle(cache: CacheState, change: Transaction, given: list[int], ids: np.ndarray, wanted: np.ndarray) -> None:
    """Settle places, ``wanted [requests, layers]``: by plans that were made ahead, and the rest by one made now."""
    rest = wanted.copy()
    for ahead in cache._ahead:
        rest &= ~ahead.carry_out(change, ids, rest)
    places = places_of(cache, ids, rest)
    if not places or (settle_cuda.supports(cache) and _settle_cuda(cache, change, places, set(given))):
        return
    tokens = cache.buckets.snapshots(*pairs(places))
    move_tokens(cache, change, places, tokens, _targets(cache, places, tokens, set(given)))


def _settle_cuda(cache: CacheState, change: Transaction, places: list[Place], given: set[int]) -> bool:
    """Settle by kernels, with the tokens to come planned as if they were there; False if that does not fit."""
    planned = settle_cuda.plan(cache, places, lengths_then(cache, places, given), coming(cache, places, given))
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
    now, then = lengths_then(cache, places, set()), lengths_then(cache, places, given)
    scopes = make_scopes(cache, places, Tokens.cat([tokens, coming_tokens(cache, places, given)]), then)
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


def write(cache: CacheState, layer: int, k: torch.Tensor, v: torch.Tensor, requests: torch.Tensor | None) -> None:
    """`TieredCache.write`."""
    k, v = check_rows(cache, k, v, requests)
    write_rows(Written(cache.buckets, layer, k, v, requests, cache._device_lengths, cache.policy.mode != "mean"))
