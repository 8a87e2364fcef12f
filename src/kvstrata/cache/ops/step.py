"""A decode step in two parts, the second of which can be captured in a graph.

    advance   host: room for one more token of each request in all layers, settling where needed; counts and lengths
              increase
    write     device: K and V of a layer go to the slots that `advance` made, according to the tables at that time

`append` does both for one layer and cannot be captured, because the host takes part in every layer.
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
from kvstrata.cache.policy.schedule import due
from kvstrata.cache.policy.scopes import Place, check_plans, make_scopes, move_tokens, pairs
from kvstrata.cache.storage import table_cuda
from kvstrata.cache.storage.tokens import Tokens

from .arguments import check_rows

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.page_table import Short
    from kvstrata.cache.storage.request_list import RequestList
    from kvstrata.cache.storage.transaction import Transaction


def advance(cache: CacheState, given: list[int]) -> None:
    """`TieredCache.advance` of these requests."""
    if not given:
        return
    cache.pool.note_stream()
    buckets, listed = cache.buckets, cache.buckets.listed(given)
    if int(cache._lengths.max()) >= cache.max_tokens:
        longest = int(cache._lengths[listed.ids].max())
        if longest >= cache.max_tokens:
            raise ValueError(f"max_tokens: expected at least {longest + 1}, for one more token, got {cache.max_tokens}")
    known = cache._due
    wanted = known[1] if known is not None and known[0] is listed.ids else due(cache, listed.ids)
    short = buckets.short(listed.ids, listed.where)
    if short is None and wanted is None:
        _prepare_count(cache, listed)()
    else:
        with cache._operation() as change:
            change.undo(buckets.forget)
            if wanted is not None:
                _settle(cache, change, given, listed.ids, wanted)
                short = buckets.short(listed.ids)
            if short is not None:
                buckets.make_room_for_one(change, short)
            count = _prepare_count(cache, listed)

            def run(short: Short | None = short) -> None:
                if short is not None:
                    buckets.left[short.requests] = short.after
                count()

            change.launch(run)
    if cache.budget.amount is None:
        if buckets.least <= buckets.ahead.soon + 1 and _pages_ahead(cache, listed.ids):
            return
        if buckets.ahead.missing:
            buckets.ahead.fill_reserve()
        return
    cache._drop_plans(given)
    plan_ahead(cache, listed.ids)


def _pages_ahead(cache: CacheState, ids: np.ndarray) -> bool:
    """Allocate pages for the next steps of some requests; False if there are none. See storage/pages_ahead.py."""
    buckets, left = cache.buckets, cache.buckets.left[ids]
    if left.min() > buckets.ahead.soon:
        return False
    near = (left <= buckets.ahead.near) & buckets.ahead.even[ids]
    if not near.any():
        return False
    taken = buckets.ahead.take(ids[near], left[near], len(ids))
    buckets.left[taken] += buckets.page_tokens
    return len(taken) > 0


def _prepare_count(cache: CacheState, listed: RequestList) -> Callable[[], None]:
    """Function that counts one more plain token of these requests in every layer, without allocating."""
    buckets = cache.buckets
    if cache.device.type != "cpu" and listed.launch is None:
        listed.launch = _count_on_device(cache, listed.ids)

    def count() -> None:
        listed.add_one(buckets.host_count[..., 0])
        listed.add_one(cache._lengths)
        buckets.left[listed.where] -= 1
        buckets.version += 1
        if listed.launch is not None:
            listed.launch()

    return count


def _count_on_device(cache: CacheState, ids: np.ndarray) -> Callable[[], None]:
    """One or two launches that update the device's counts to the host's; may run repeatedly."""
    buckets, lengths = cache.buckets, cache._device_lengths
    if buckets.by_cuda:
        return table_cuda.count_up(buckets, buckets.device_ids(ids), lengths)
    rows, plain = cache.pool.to_device(ids), buckets.count.select(3, 0)
    ones = [torch.ones((), dtype=x.dtype, device=x.device).expand(len(ids), *x.shape[1:]) for x in (plain, lengths)]

    def run() -> None:
        plain.index_add_(0, rows, ones[0])
        lengths.index_add_(0, rows, ones[1])

    return run


def _settle(cache: CacheState, change: Transaction, given: list[int], ids: np.ndarray, wanted: np.ndarray) -> None:
    """Settle places, ``wanted [requests, layers]``: with plans made ahead, and the rest with one made now."""
    rest = wanted.copy()
    for ahead in cache._ahead:
        rest &= ~ahead.carry_out(change, ids, rest)
    places = places_of(cache, ids, rest)
    if not places or (settle_cuda.supports(cache) and _settle_cuda(cache, change, places, set(given))):
        return
    tokens = cache.buckets.snapshots(*pairs(places))
    move_tokens(cache, change, places, tokens, _targets(cache, places, tokens, set(given)))


def _settle_cuda(cache: CacheState, change: Transaction, places: list[Place], given: set[int]) -> bool:
    """Settle with kernels, planning the coming tokens as if they were stored; False if that does not fit."""
    planned = settle_cuda.plan(cache, places, lengths_then(cache, places, given), coming(cache, places, given))
    if any(needed is not None for needed in planned.needed):
        return False
    settle_cuda.move(cache, change, planned)
    return True


def _targets(cache: CacheState, places: list[Place], tokens: Tokens, given: set[int]) -> torch.Tensor:
    """Targets that leave room for one more plain token of each given request; raises BudgetExceeded if there are none.

    Planned first as if the token were stored. If that does not fit, planned for the existing tokens with a slot to
    spare: then one token fewer leaves the recent ones, which may save a page; a plan for no tokens at all says nothing
    about room. If that does not fit either, the token may still fit without settling: a plan charges shared pages to
    every owner.
    """
    now, then = lengths_then(cache, places, set()), lengths_then(cache, places, given)
    scopes = make_scopes(cache, places, Tokens.cat([tokens, coming_tokens(cache, places, given)]), then)
    plans = plan_all(scopes, cache.policy, cache.policy.settle_every)
    target = plans.target[: len(tokens)]
    if any(needed is not None for needed in plans.needed):
        ahead = plan_all(make_scopes(cache, places, tokens, now), cache.policy, cache.policy.settle_every)
        needed, which = list(plans.needed), np.zeros(len(places), np.int64)
        for i, (layer, scope) in enumerate(places):
            coming = [r for r in scope if r in given]
            if needed[i] is not None and ahead.needed[i] is None and ahead.spare[i] > 0 and any(now[i]):
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
    reciprocal = cache.policy.mode != "mean"
    write_rows(Written(cache.buckets, layer, k, v, requests, cache._device_lengths, reciprocal, cache.balance))
