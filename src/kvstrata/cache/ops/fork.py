"""Forking and freeing of requests: pages are shared by reference count and copied on write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.storage.pool import EMPTY

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.pool import Pool


def assign(cache: CacheState, source: dict[int, int], gone: Sequence[int]) -> None:
    """Make requests copies of others, sharing their pages, and free some."""
    with cache._operation() as change:
        table, count = cache.buckets.host_table, cache.buckets.host_count
        to, origin, left = list(source), list(source.values()), list(gone)
        state = (table, count, cache._lengths, cache._queries, cache._reported, cache._centred, cache._ahead_from)
        new = [x[origin].copy() for x in state]
        changed = [*to, *left]
        sources = cache.pool.to_device(np.array(origin, np.int64))
        of_rows = [(cache.centre, cache._calibrated.centre), (cache.balance, cache._calibrated.balance)]
        kept = [
            (x, torch.cat([x[sources], first.expand(len(left), *first.shape)]))
            for x, first in of_rows
            if x is not None and first is not None
        ]
        rows = cache.pool.to_device(np.array(changed, np.int64))
        old_handles = table[changed]
        change.release(old_handles[old_handles >= 0].astype(np.int64))

        def run() -> None:
            cache.pool.retain(new[0][new[0] >= 0])
            for x, values in zip(state, new, strict=True):
                x[to] = values
                x[left] = -1 if x is table else cache._calibrated.centred if x is cache._centred else 0
            for own, of_requests in kept:
                own[rows] = of_requests
            cache._active = (cache._active | set(to)) - set(gone)
            if cache.device.type != "cpu":
                cache._device_lengths.copy_(torch.from_numpy(cache._lengths))
                for layer in range(cache.layers):
                    cache.buckets.push(layer, changed)

        change.launch(run)
    _give_back(cache.pool)


def _give_back(pool: Pool) -> None:
    """Give slabs back where more are empty than in use, as after beams that begin with a copy of the prompt each."""
    used = int((pool.tier != EMPTY).sum())
    if pool.slab_count > 2 * used:
        pool.trim(spare=used // 4)
