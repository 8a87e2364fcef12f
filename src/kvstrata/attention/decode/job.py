"""One call of ``decode_attention``, checked: what every backend is given."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.store.paged_cache import PagedCache


class Prepared(Protocol):
    """A `DecodePlan`, as far as backends use it."""

    def cuda(self) -> Any:
        """The work lists and scratch of the CUDA kernels."""


Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Job(NamedTuple):
    """One call, checked. Exactly one of ``buckets`` and ``paged`` is given."""

    q: torch.Tensor  # [B, q_len, Hq, D], inner stride 1
    buckets: BucketedCacheLayer | None  # the layer's views
    paged: PagedCache | None
    requests: list[int]  # rows of the tables, one per row of q
    kv_heads: int
    max_length: int  # of these requests (`longest`); of a PagedCache, what its block_table has room for
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # float32 [Hq]
    return_lse: bool
    return_mass: bool
    plan: Prepared | None = None  # of the step
    layer: int = 0
    owner: TieredCache | None = None  # whose calls share scratch

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q.shape[2] // self.kv_heads
