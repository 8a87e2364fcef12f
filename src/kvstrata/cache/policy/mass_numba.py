"""`observe_mass` on the CPU in a compiled loop, for sums of mass (mode ``mean``) and pages that are not shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.layout.format import UNIT
from kvstrata.loops import exact

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState

MOST = np.float32(torch.finfo(torch.float32).max)


def observe_mass(
    cache: CacheState, layer: int, requests: Sequence[int], mass: torch.Tensor, weight: torch.Tensor, q_len: int
) -> None:
    """`mass.observe_mass`, bit-identical."""
    buckets, space = cache.buckets, cache.pool.space
    assert space is not None, "the loops need a pool on the CPU"
    wide = cache.position_dtype == torch.int32
    _observe(
        space.typed(np.uint16), space.typed(np.int32), space.typed(np.float32), wide, np.array(requests, np.int64),
        layer, cache._lengths, buckets.host_table, buckets.host_count, buckets.side_offsets.numpy(),
        buckets.page_tokens, mass.numpy(), weight.numpy(), q_len,
    )  # fmt: skip


@exact
def _observe(
    short_positions, positions, importance, wide, requests, layer, lengths, table, count, offsets, page_tokens, mass,
    weight, q_len,
):  # fmt: skip
    heads, tiers = count.shape[2:]
    for i in range(len(requests)):
        request, given = requests[i], np.int64(weight[i])
        if given <= 0:
            continue
        length = np.int64(lengths[request, layer])
        for head in range(heads):
            own = mass[i, head]
            for tier in range(tiers):
                left = count[request, layer, head, tier]
                for page in range((left + page_tokens - 1) // page_tokens):
                    start = np.int64(table[request, layer, head, tier, page]) * UNIT
                    place, state = start + offsets[tier, 0], (start + offsets[tier, 1]) // 4
                    for slot in range(min(left - page * page_tokens, page_tokens)):
                        if wide:
                            position = np.int64(positions[place // 4 + slot])
                        else:
                            position = np.int64(short_positions[place // 2 + slot])
                        seen = length - position
                        times = np.float32(min(given, seen)) / np.float32(min(seen, q_len))
                        more = own[position] * times
                        if 0 < more <= MOST:
                            importance[state + slot] = min(importance[state + slot] + more, MOST)
