"""Append of one token of each request, layer after layer and step after step with the same list of requests.

What an append checks and derives is kept from one call to the next: as long as requests and tensors look the same, what
remains is whether the open pages have room, one launch, and counts. Anything else goes the way of every append.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.move import append as rows
from kvstrata.cache.move import append_cuda
from kvstrata.cache.move.append_job import Job
from kvstrata.cache.policy.importance import initial
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
    """Keep the arguments of an append of one token of each of the requests ``asked``."""
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
    """Append if the arguments look like those of the last time and the open pages have room; else False."""
    last = cache._repeated
    if last is None or not same_list(requests, last.requests) or not same_list(seq_lens, last.seq_lens):
        return False
    if not last.looks(k, v) or not last.distinct <= cache._active:
        return False
    buckets, listed = cache.buckets, last.listed
    where, ids = listed.where, listed.ids
    count, lengths = buckets.host_count[where, layer, :, 0], cache._lengths[where, layer]
    if not (count & (cache.page_tokens - 1)).all() or int(lengths.max()) >= cache.max_tokens:
        return False
    if cache.pool.shares and buckets.room(layer, ids, np.ones_like(ids)) is None:
        return False
    cache.pool.note_stream()
    cache._due = None
    if cache._ahead:
        cache._forget(cache.requests if cache.budget.shared else ids.tolist())
    if last.launch is None:
        _write(cache, layer, k, v, ids, count, lengths)
    elif not last.launch(layer, k, v):
        return False
    listed.add_one(buckets.host_count[:, layer, :, 0])
    listed.add_one(cache._lengths[:, layer])
    buckets.left[ids] = -1
    return True


def same_list(given: Sequence[int] | None, last: list[int] | None) -> bool:
    """True if a list is given again, or None."""
    return given is None if last is None else type(given) is list and given == last


def _write(
    cache: CacheState,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: np.ndarray,
    count: np.ndarray,
    lengths: np.ndarray,
) -> None:
    """Rows by another backend than CUDA C++."""
    k, v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v))
    starts, mode = lengths.astype(np.int64), cache.policy.mode
    first = np.zeros(len(ids), np.float32) if mode == "mean" else initial(mode, torch.from_numpy(starts + 1)).numpy()
    counts = count.astype(np.int64)
    written = (starts, counts, k, v, first, None, cache._device_lengths, cache.balance)
    rows.append_rows(Job(cache.buckets, layer, ids, np.ones_like(ids), *written))
