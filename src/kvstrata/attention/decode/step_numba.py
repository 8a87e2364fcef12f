"""A decode step of one layer on the CPU in one compiled call: write the new token's K and V, then attend.

What a call of `TieredCache.write` and one of `decode_attention` check and derive does not change from step to step.
Here it is looked up once a layer, so that what remains of a small model's step is the work itself.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.attention.threads import share_out
from kvstrata.cache.move.append_numba import offsets, places, round_row, write_row
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_numba import compiled

from .numba import KINDS, NO_SINKS, THREADED, decode_heads, views
from .plan import DecodePlan


class LayerStep:
    """Steps of one layer of a cache on the CPU."""

    def __init__(self, cache: TieredCache, layer: int, plan: DecodePlan) -> None:
        self.cache, self.layer, self.plan = cache, layer, plan
        self.requests = np.array(plan.requests, np.int64)
        buckets = cache.buckets
        words = np.dtype(np.uint32 if cache.dtype == torch.float32 else np.uint16)
        self.views = views(cache.bucket_views(layer), cache.dtype)
        self.write = (*places(buckets, words), KINDS[cache.dtype], *offsets(buckets), cache.policy.mode != "mean")
        self.block = block_of(cache.head_dim)

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

        `TieredCache.advance` made room for the token. The cache is mutated.
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
        arguments = (
            self.views, self.write, k, v, clamp, self.requests, self.block, q, np.float32(scale),
            np.float32(softcap or 0.0), sink_logits, out, lse, mass, observes,
        )  # fmt: skip
        head_caches = rows * cache.kv_heads
        threads = torch.get_num_threads() if head_caches * longest >= THREADED else 1
        share_out(_step, arguments, head_caches, threads)
        if observes:
            assert observation is not None
            observation.add(self.layer, self.plan.requests, torch.from_numpy(mass))
        return torch.from_numpy(out).to(query.dtype)


@compiled
def _step(
    layer, places, k, v, clamp, requests, block, q, scale, softcap, sinks, out, lse, mass, want_mass, first, last
):
    words, halves, wide, length, table, count, centre, balance, tiers = layer
    (
        rows, short_positions, positions, importance, kind, page_tokens, v_offset, position_offset, _,
        importance_offset, reciprocal,
    ) = places  # fmt: skip
    kv_heads = table.shape[1]
    new_k, new_v = np.empty(q.shape[3], rows.dtype), np.empty(q.shape[3], rows.dtype)
    for head_cache in range(first, last):
        b, head = head_cache // kv_heads, head_cache % kv_heads
        round_row(k[b, head], kind, clamp, new_k)
        round_row(v[b, head], kind, clamp, new_v)
        write_row(
            rows, short_positions, positions, importance, new_k, new_v, requests[b], head, table, count, length,
            balance, kind, page_tokens, v_offset, position_offset, wide, importance_offset, reciprocal,
        )  # fmt: skip
    decode_heads(
        words, halves, wide, requests, length, table, count, centre, balance, tiers, page_tokens, block, q, scale, 0,
        softcap, sinks, out, lse, mass, want_mass, first, last,
    )  # fmt: skip
