"""Appends one token per request, layer by layer and step by step with the same list of requests.

The checks and derived values of an append are kept from one call to the next. As long as requests and tensors have the
same form, only one launch and the counting remain; whether the open pages have room is computed only if it is unknown
since the last change. Any other append takes the normal path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.move import append as rows
from kvstrata.cache.move import append_cuda
from kvstrata.cache.move.append_job import Job
from kvstrata.cache.policy.importance import initial_of
from kvstrata.cache.policy.room import fits_plain
from kvstrata.cache.storage.request_list import ONE, Repeated, RequestList, Room
from kvstrata.call_cache import guard_of

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState


def remember(
    cache: CacheState,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Sequence[int] | None,
    seq_lens: Sequence[int] | None,
    request_list: list[int],
) -> None:
    """Keep the arguments of an append of one token to each request of ``request_list``, unless already kept."""
    last = cache._repeated
    if (
        last is not None
        and _matches(last, k, v, requests, seq_lens)
        and (last.launch is None or last.launch.fits(k, v))
    ):
        return
    if not all(x is None or type(x) is list for x in (requests, seq_lens)) or k.stride(-1) != 1 or v.stride(-1) != 1:
        return
    buckets, listed, launch = cache.buckets, cache.buckets.listed(request_list), None
    if cache.device.type != "cpu" and buckets.by_cuda:
        flat = [x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v)]
        ids, reciprocal = buckets.device_ids(listed.ids), cache.policy.mode != "mean"
        launch = append_cuda.AppendOne(buckets, ids, flat[0], flat[1], cache._device_lengths, cache.balance, reciprocal)
    given, lengths = (None if x is None else list(x) for x in (requests, seq_lens))
    cache._repeated = Repeated(given, lengths, frozenset(request_list), listed, guard_of((k, v)), launch)


def append_one(
    cache: CacheState,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Sequence[int] | None,
    seq_lens: Sequence[int] | None,
) -> bool:
    """Append if the arguments match the last ones and nothing has to settle; otherwise return False."""
    last = cache._repeated
    if last is None or not _matches(last, k, v, requests, seq_lens):
        return False
    room = last.rooms.get(layer)
    if room is None or room.version != cache.buckets.version or room.active is not cache._active or not room.tokens:
        return _check_and_append(cache, last, layer, k, v)
    if not _launch(cache, last, layer, k, v):
        return False
    room.tokens -= 1
    if room.counts is None or room.lengths is None:
        _count(cache, last.listed, layer)
    else:  # `left` is unknown while `room` is valid; computing it changes the version
        np.add(room.counts, ONE, room.counts)
        np.add(room.lengths, ONE, room.lengths)
    if layer == cache.layers - 1:
        _pages_ahead(cache, last.listed.ids)
    return True


def _check_and_append(cache: CacheState, last: Repeated, layer: int, k: torch.Tensor, v: torch.Tensor) -> bool:
    """`append_one` if it is unknown whether the open pages have room."""
    if not last.distinct <= cache._active or (last.launch is not None and not last.launch.fits(k, v)):
        return False
    buckets, listed = cache.buckets, last.listed
    where, ids = listed.where, listed.ids
    count, lengths = buckets.host_count[where, layer, :, 0], cache._lengths[where, layer]
    if int(lengths.max()) >= cache.max_tokens:
        return False
    open_rows = count & (cache.page_tokens - 1)
    fits = bool(open_rows.all())
    if cache.pool.shares and (not fits or buckets.room(layer, ids, np.ones_like(ids)) is None):
        return False
    full = ids[:0] if fits else ids[~open_rows.all(1)]
    if len(full) and buckets.ahead.there(full, layer).all():
        full = ids[:0]
    if len(full) and (cache.budget.shared or not fits_plain(cache, layer, full.tolist(), [1] * len(full))):
        return False
    if not len(full):
        _launch(cache, last, layer, k, v)
        _count(cache, listed, layer)
        views = (listed.rows(x) for x in (buckets.host_count[:, layer, :, 0], cache._lengths[:, layer]))
        last.rooms[layer] = Room(buckets.version, cache._active, _tokens_left(cache, listed, layer), *views)
    else:
        cache.pool.note_stream()
        _drop_plans(cache, ids)
        buckets.ahead.give_back(full)
        with cache._operation() as change:
            buckets.make_room(change, layer, full, np.ones_like(full))
            change.launch(_prepare(cache, last, layer, k, v))
            change.launch(lambda: _count(cache, listed, layer))
        last.rooms.pop(layer, None)
    if layer == cache.layers - 1:
        _pages_ahead(cache, ids)
    return True


def _launch(cache: CacheState, last: Repeated, layer: int, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Write the rows into existing pages; returns False, and does nothing, if their addresses do not allow it."""
    stream = cache.pool.note_stream()
    _drop_plans(cache, last.listed.ids)
    if last.launch is not None:
        return last.launch(layer, k, v, stream)
    _prepare(cache, last, layer, k, v)()
    return True


def _drop_plans(cache: CacheState, ids: np.ndarray) -> None:
    cache._due = None
    if cache._ahead:
        cache._drop_plans(cache.requests if cache.budget.shared else ids.tolist())


def _count(cache: CacheState, listed: RequestList, layer: int) -> None:
    """Count one more token for each of these requests in a layer."""
    buckets = cache.buckets
    listed.add_one(buckets.host_count[:, layer, :, 0])
    listed.add_one(cache._lengths[:, layer])
    buckets.left[listed.where], buckets.last_short = -1, None


def _tokens_left(cache: CacheState, listed: RequestList, layer: int) -> int:
    """Tokens per request that fit existing unshared pages and the tables."""
    p, where = cache.page_tokens, listed.where
    left = (-cache.buckets.host_count[where, layer, :, 0] & (p - 1)).min(1)
    if cache.budget.amount is None:
        left = left + p * cache.buckets.ahead.there(where, layer)
    return min(int(left.min()), cache.max_tokens - int(cache._lengths[where, layer].max()))


def _pages_ahead(cache: CacheState, ids: np.ndarray) -> None:
    """After the last layer of a step, allocate pages that the next steps need in all layers, for some requests.

    See storage/pages_ahead.py.
    """
    if cache.budget.amount is not None:
        return
    ahead = cache.buckets.ahead
    left = -cache._lengths[ids, -1] & (cache.page_tokens - 1)
    if left.min() <= ahead.soon:
        near = left <= ahead.near
        near[near] = ~ahead.there(ids[near], -1)
        if near.any() and left[near].min() <= ahead.soon:
            some, left = ids[near], left[near]
            ahead.update_even(some)
            even = ahead.even[some]
            if even.any() and len(ahead.take(some[even], left[even], len(ids))):
                return
    if ahead.missing:
        ahead.fill_reserve()


def _matches(
    last: Repeated, k: torch.Tensor, v: torch.Tensor, requests: Sequence[int] | None, seq_lens: Sequence[int] | None
) -> bool:
    """True if arguments match the remembered ones."""
    if requests is not last.requests and not same_list(requests, last.requests):
        return False
    return (seq_lens is last.seq_lens or same_list(seq_lens, last.seq_lens)) and last.guard(k, v)


def same_list(given: Sequence[int] | None, last: list[int] | None) -> bool:
    """True if the given list equals the last one, or both are None."""
    return given is None if last is None else type(given) is list and given == last


def _prepare(cache: CacheState, last: Repeated, layer: int, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    """Function that writes the rows into existing pages without allocating."""
    if last.launch is not None:
        return partial(last.launch, layer, k, v)
    ids, where = last.listed.ids, last.listed.where
    k, v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v))
    starts = cache._lengths[where, layer].astype(np.int64)
    first = initial_of(cache.policy.mode, starts + 1)
    counts = cache.buckets.host_count[where, layer, :, 0].astype(np.int64)
    written = (starts, counts, k, v, first, None, cache._device_lengths, cache.balance)
    return rows.prepare_append(Job(cache.buckets, layer, ids, np.ones_like(ids), *written))
