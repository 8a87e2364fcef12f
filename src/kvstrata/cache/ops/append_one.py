"""Append of one token of each request, layer after layer and step after step with the same list of requests.

What an append checks and derives is kept from one call to the next: as long as requests and tensors look the same, what
remains is whether the open pages have room, pages for those that have none, one launch, and counts. Any other
append takes the normal path.
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
from kvstrata.cache.policy.importance import initial
from kvstrata.cache.policy.room import fits_plain
from kvstrata.cache.storage.request_list import Repeated
from kvstrata.call_cache import guard_of

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState


def remember(
    cache: CacheState,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Sequence[int] | None,
    seq_lens: Sequence[int] | None,
    asked: list[int],
) -> None:
    """Keep the arguments of an append of one token of each of the requests ``asked``, unless they are kept already."""
    last = cache._repeated
    if last is not None and _looks(last, k, v, requests, seq_lens) and (last.launch is None or last.launch.fits(k, v)):
        return
    if not all(x is None or type(x) is list for x in (requests, seq_lens)) or k.stride(-1) != 1 or v.stride(-1) != 1:
        return
    buckets, listed, launch = cache.buckets, cache.buckets.listed(asked), None
    if cache.device.type != "cpu" and buckets.by_cuda:
        flat = [x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v)]
        ids, reciprocal = buckets.device_ids(listed.ids), cache.policy.mode != "mean"
        launch = append_cuda.AppendOne(buckets, ids, flat[0], flat[1], cache._device_lengths, cache.balance, reciprocal)
    given, lengths = (None if x is None else list(x) for x in (requests, seq_lens))
    cache._repeated = Repeated(given, lengths, frozenset(asked), listed, guard_of((k, v)), launch)


def append_one(
    cache: CacheState,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Sequence[int] | None,
    seq_lens: Sequence[int] | None,
) -> bool:
    """Append if the arguments look like those of the last time and nothing has to settle; else False."""
    last = cache._repeated
    if last is None or not _looks(last, k, v, requests, seq_lens) or not last.distinct <= cache._active:
        return False
    buckets, listed = cache.buckets, last.listed
    where, ids = listed.where, listed.ids
    count, lengths = buckets.host_count[where, layer, :, 0], cache._lengths[where, layer]
    if int(lengths.max()) >= cache.max_tokens or (last.launch is not None and not last.launch.fits(k, v)):
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
    cache.pool.note_stream()
    cache._due = None
    if cache._ahead:
        cache._drop_plans(cache.requests if cache.budget.shared else ids.tolist())

    def count_up() -> None:
        listed.add_one(buckets.host_count[:, layer, :, 0])
        listed.add_one(cache._lengths[:, layer])
        buckets.left[ids] = -1

    if not len(full):
        _prepare(cache, last, layer, k, v, count, lengths)()
        count_up()
        if layer == cache.layers - 1 and cache.budget.amount is None:
            _pages_ahead(cache, ids)
        return True
    buckets.ahead.give_back(full)
    with cache._operation() as change:
        buckets.make_room(change, layer, full, np.ones_like(full))
        change.launch(_prepare(cache, last, layer, k, v, count, lengths))
        change.launch(count_up)
    return True


def _pages_ahead(cache: CacheState, ids: np.ndarray) -> None:
    """Take pages that the next steps need in all layers, of some requests; see storage/pages_ahead.py."""
    ahead = cache.buckets.ahead
    left = -cache._lengths[ids, -1] & (cache.page_tokens - 1)
    near = left <= ahead.near
    if near.any() and not (there := ahead.there(ids[near], -1)).all():
        some, left = ids[near][~there], left[near][~there]
        ahead.look(some)
        even = ahead.even[some]
        if even.any():
            ahead.take(some[even], left[even], len(ids))


def _looks(
    last: Repeated, k: torch.Tensor, v: torch.Tensor, requests: Sequence[int] | None, seq_lens: Sequence[int] | None
) -> bool:
    """True if arguments look like those that were remembered."""
    return same_list(requests, last.requests) and same_list(seq_lens, last.seq_lens) and last.looks(k, v)


def same_list(given: Sequence[int] | None, last: list[int] | None) -> bool:
    """True if a list is given again, or None."""
    return given is None if last is None else type(given) is list and given == last


def _prepare(
    cache: CacheState,
    last: Repeated,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    count: np.ndarray,
    lengths: np.ndarray,
) -> Callable[[], None]:
    """A function that writes the rows into pages that are there, and allocates nothing."""
    if last.launch is not None:
        return partial(last.launch, layer, k, v)
    ids = last.listed.ids
    k, v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v))
    starts, mode = lengths.astype(np.int64), cache.policy.mode
    first = np.zeros(len(ids), np.float32) if mode == "mean" else initial(mode, torch.from_numpy(starts + 1)).numpy()
    counts = count.astype(np.int64)
    written = (starts, counts, k, v, first, None, cache._device_lengths, cache.balance)
    return rows.prepare_append(Job(cache.buckets, layer, ids, np.ones_like(ids), *written))
