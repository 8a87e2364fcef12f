"""One checked call of ``decode_attention``, the input of every backend."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.store.paged_cache import PagedCache

from .observe import Observation


class Prepared(Protocol):
    """The part of a `DecodePlan` that backends use."""

    def cuda(self) -> Any:
        """Work lists and scratch of the CUDA kernels."""


Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Job(NamedTuple):
    """Arguments of one call after checking. Exactly one of ``buckets`` and ``paged`` is set."""

    q: torch.Tensor  # [B, q_len, Hq, D], inner stride 1
    buckets: BucketedCacheLayer | None  # the layer's views
    paged: PagedCache | None
    requests: list[int]  # rows of the page tables, one per row of q
    kv_heads: int
    max_length: int  # longest request (`longest`); for a PagedCache the capacity of its block_table
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # float32 [Hq]
    return_lse: bool
    return_mass: bool
    plan: Prepared | None = None  # plan of the step
    layer: int = 0
    observation: Observation | None = None  # mass is added to importance in the layers that are observed in this step
    owner: TieredCache | None = None  # calls of one cache share scratch

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q.shape[2] // self.kv_heads
