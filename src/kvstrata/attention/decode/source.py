"""``Source``: tables and pages of a layer in the form that the CUDA decode kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvstrata.layout.format import Format

from .job import Job

if TYPE_CHECKING:
    from kvstrata.cache.storage.views import BucketedCacheLayer


class Source(NamedTuple):
    """Layer of a `TieredCache`, or an engine's blocks as a cache of one tier. Holds tables, never pages."""

    formats: tuple[Format, ...]
    table: torch.Tensor  # [requests, kv_heads, tiers, pages], or [requests, pages]
    counts: torch.Tensor  # [requests, kv_heads, tiers], or [requests]
    slabs: torch.Tensor | None
    units: int
    page_tokens: int
    lengths: torch.Tensor
    centre: torch.Tensor | None
    balance: torch.Tensor | None  # has the strides of the centre
    position_bytes: int
    rows: tuple[int, int, int, int]  # address of K, bytes of a page, a head and a row; zeros for a TieredCache
    v_offset: int

    @classmethod
    def of(cls, job: Job) -> Source:
        if job.paged is None:
            assert job.buckets is not None
            return cls.of_buckets(job.buckets)
        c = job.paged
        k, _ = c.by_head()
        tokens = 32 if c.head_dim <= 64 and c.block_size % 32 == 0 else 16
        format = Format(16, 16, c.head_dim, tokens)
        block, head, row, _ = (2 * n for n in k.stride())
        rows = (c.k.data_ptr(), block, head, row)
        v_offset = c.v.data_ptr() - c.k.data_ptr()
        return cls(
            (format,), c.block_table, c.seq_lens, None, 1, c.block_size, c.seq_lens, None, None, 0, rows, v_offset
        )

    @classmethod
    def of_buckets(cls, b: BucketedCacheLayer) -> Source:
        size = b.formats[0].page_tokens
        return cls(
            b.formats, b.page_table, b.count, b.slab_pointers, b.units, size, b.seq_lens, b.centre,
            b.balance, b.position_dtype.itemsize, (0, 0, 0, 0), 0,
        )  # fmt: skip
