"""A decode step of one layer on the CPU in two compiled calls: write the new token's K and V, then attend.

The checks and derived values of `TieredCache.write` and `decode_attention` do not change from step to step. Here they
are computed once per layer, so that only the actual work of a small model's step remains.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.cache.move.append_numba import KINDS, offsets, places, write
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.threads import share_out

from .numba import NO_SINKS, THREADED, decode_heads, views
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
        q, k, v = (x.detach().float().contiguous().numpy() for x in (query, key, value))
        rows, heads, _, dim = q.shape
        q, k, v = q.reshape(rows, 1, heads, dim), k[:, :, 0], v[:, :, 0]
        longest = int(cache._lengths[:, self.layer].max())
        observes = observation is not None and observation.due(self.layer)
        out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:3], np.float32)
        mass = np.zeros((rows, cache.kv_heads, longest if observes else 0), np.float32)
        sink_logits = NO_SINKS if sinks is None else sinks.detach().float().contiguous().numpy()
        clamp = cache.dtype == torch.float16 and key.dtype != cache.dtype
        rows_written = (*self.places, k, v, clamp, self.written)
        write(*rows_written)
        arguments = (
            *self.views, self.requests, q, np.float32(scale), 0, np.float32(softcap or 0.0), sink_logits, out, lse,
            mass, observes,
        )  # fmt: skip
        head_caches = rows * cache.kv_heads
        threads = torch.get_num_threads() if head_caches * longest >= THREADED else 1
        share_out(decode_heads, arguments, head_caches, threads)
        if observes:
            assert observation is not None
            observation.add(self.layer, self.plan.requests, torch.from_numpy(mass))
        return torch.from_numpy(out).to(query.dtype)
