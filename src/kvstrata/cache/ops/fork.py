"""Forking and freeing requests: pages are reference counted and copied on write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.pool import Pool


def assign(cache: CacheState, source: dict[int, int], gone: Sequence[int]) -> None:
    """Make requests copies of others, sharing their pages, and free some."""
    cache._forget([*source, *source.values(), *gone])
    with cache._operation() as change:
        buckets = cache.buckets
        to, origin, left = (np.array(list(x), np.int64) for x in (source, source.values(), gone))
        state = (cache._lengths, cache._centred, cache._ahead_from)
        new = [x[origin] for x in (buckets.host_table, buckets.host_count, *state)]
        changed = np.concatenate([to, left])
        first = cache._calibrated
        on_device: list[tuple[torch.Tensor, float | torch.Tensor]] = [
            (cache.centre, first.centre),
            (cache.reports.numbers, 0),
        ]
        for own, nothing in ((cache.balance, first.balance), (cache.direction, first.direction)):
            if own is not None and nothing is not None:
                on_device.append((own, nothing))
        if cache.device.type != "cpu":
            on_device += [(buckets.page_table, -1), (buckets.count, 0), (cache._device_lengths, 0)]
        to_there, origin_there, left_there = (cache.pool.to_device(x) for x in (to, origin, left))
        copies = [x[origin_there] for x, _ in on_device] if len(to) else []
        change.release(buckets.handles(changed))

        def run() -> None:
            cache.pool.retain(new[0][new[0] >= 0])
            for x, values in zip((buckets.host_table, buckets.host_count, *state), new, strict=True):
                x[to] = values
                x[left] = -1 if x is buckets.host_table else cache._calibrated.centred if x is cache._centred else 0
            for (tensor, _), rows in zip(on_device, copies, strict=False):
                tensor.index_copy_(0, to_there, rows)
            for tensor, nothing in on_device if len(left) else ():
                if isinstance(nothing, torch.Tensor):
                    tensor.index_copy_(0, left_there, nothing.expand(len(left), *nothing.shape))
                else:
                    tensor.index_fill_(0, left_there, nothing)
            cache.reports.state[1:].fill_(int(cache.pool.shares))
            cache._active = (cache._active | set(source)) - set(gone)
            buckets.forget(np.concatenate([changed, origin]))

        change.launch(run)
    _give_back(cache.pool)


def _give_back(pool: Pool) -> None:
    """Free slabs if more are empty than in use, as after beam search that starts with copies of the prompt."""
    used = pool.slabs_in_use
    if pool.slab_count > 2 * used:
        pool.trim(spare=used // 4)
