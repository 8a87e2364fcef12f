"""Sharing: requests that become copies of others, or go. No page is copied: owners are counted, until one writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .room import tidy

if TYPE_CHECKING:
    from .cache import TieredCache


def assign(cache: TieredCache, source: dict[int, int], gone: Sequence[int]) -> None:
    """Requests become copies of what others were, pages shared; some go."""
    table, count = cache.buckets.host_table, cache.buckets.host_count
    to, origin = list(source), list(source.values())
    state = (table, count, cache._lengths, cache._queries, cache._reported, cache._centred, cache._ahead_from)
    new = [x[origin].copy() for x in state]
    centres = cache.centre[origin].clone()
    changed = [*to, *gone]
    old_handles = table[changed]
    old_handles = old_handles[old_handles >= 0]
    cache.pool.retain(new[0][new[0] >= 0])
    for x, values in zip(state, new, strict=True):
        x[to] = values
    cache.centre[to] = centres
    left = list(gone)
    for x in state:
        x[left] = -1 if x is table else 0
    cache.centre[left] = 0
    cache.pool.release(old_handles)
    cache._active = (cache._active | set(to)) - set(gone)
    if cache.device.type != "cpu":
        cache._device_lengths.copy_(torch.from_numpy(cache._lengths))
        for layer in range(cache.layers):
            cache.buckets.push(layer, changed)
    tidy(cache)
