"""`CachedJob`: one checked call of ``prefill_attention_cached``, the input of every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.store.paged_cache import PagedCache


class CachedJob(NamedTuple):
    """One checked call. Exactly one of ``buckets`` and ``paged`` is given."""

    q: torch.Tensor  # [T, Hq, D], the new tokens of all requests end to end, inner stride 1
    new: list[int]  # new tokens of each request
    buckets: BucketedCacheLayer | None
    paged: PagedCache | None
    requests: list[int]
    kv_heads: int
    max_length: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # float32 [Hq]
    return_lse: bool
    k_new: torch.Tensor | None = None  # [T, Hkv, D], inner stride 1; if given, the cache does not hold the new tokens
    v_new: torch.Tensor | None = None
