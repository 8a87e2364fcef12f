"""A decode step of one layer on the CPU in two compiled calls: write the new token's K and V, then attend.

The checks and derived values of `TieredCache.write` and `decode_attention` do not change from step to step. Here they
are computed once per layer, so that only the actual work of a small model's step remains.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.cache.move.append_numba import KINDS, offsets, places, write
from kvstrata.cache.tiered_cache import TieredCache

from .numba import MASS, NO_SINKS, attend, memory_of, views
from .plan import DecodePlan


class LayerStep:
    """Steps of one layer of a cache on the CPU."""

    def __init__(self, cache: TieredCache, layer: int, plan: DecodePlan) -> None:
        self.cache, self.layer, self.plan = cache, layer, plan
        self.requests = np.array(plan.requests, np.int64)
        self.written = np.array(plan.requests, np.int32)
        self.views = views(cache.bucket_views(layer), cache.dtype)
        self.places = (
            *places(cache.buckets, layer, cache._device_lengths, cache.balance), *offsets(cache.buckets),
            KINDS[cache.dtype], cache.policy.mode != "mean",
        )  # fmt: skip

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention output ``[rows, 1, heads, D]`` in the query's dtype.

        Args:
            query: ``[rows, heads, 1, D]``.
            key, value: ``[rows, kv_heads, 1, D]``; fp16 that comes from a wider dtype stays finite.
            scale, softcap, sinks: as in `decode_attention`.

        `TieredCache.advance` must have made room for the token. The cache is mutated.
        """
        cache, observation = self.cache, self.plan.observation
        q = query.detach().float().contiguous()
        k, v = (x.detach().float().contiguous().numpy()[:, :, 0] for x in (key, value))
        longest = int(cache._lengths[:, self.layer].max())
        observes = observation is not None and observation.due(self.layer)
        sink_logits = NO_SINKS if sinks is None else sinks.detach().float().contiguous().numpy()
        clamp = cache.dtype == torch.float16 and key.dtype != cache.dtype
        write(*self.places, k, v, clamp, self.written)
        rows, heads, _, dim = query.shape
        memory = memory_of((rows, 1, heads, dim), cache.kv_heads, longest if observes else 0)
        out, results = attend(
            self.views, self.requests, q, memory, longest, scale, 0, softcap or 0.0, sink_logits
        )  # fmt: skip
        if observes:
            assert observation is not None
            observation.add(self.layer, self.plan.requests, torch.from_numpy(memory.array(results, MASS)))
        return out.to(query.dtype)
