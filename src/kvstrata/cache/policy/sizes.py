"""Sizes that follow from the arguments of a cache before it holds a token: formats of pages, slabs, the budget.

A slab is as large as the whole pages of one tier that fit its address range, so a page is charged its own bytes. In
addition to the pages, a budget pays for one slab of each tier, which may be nearly empty. Both depend on the tiers, so
default tiers are chosen by the budget that each list would give (`expected`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstrata.cache.storage.page import PageFormat
from kvstrata.checks import check_int
from kvstrata.layout.format import UNIT, Format

from .budget import Budget

MANY_SLABS = 1 << 15
LARGE_SLAB = 16 << 20  # bytes; torch's allocator returns this size without waste, in one driver call
PAGES_IN_SLAB = 4096  # as many as growing requests take in one launch: see storage/pages_ahead.py


@dataclass(frozen=True)
class Sizes:
    amount: int | float | None  # amount of the budget
    layers: int
    kv_heads: int
    head_dim: int
    kept: int  # sink and recent tokens
    settle_every: int
    dtype: torch.dtype
    device: torch.device
    max_requests: int
    max_tokens: int
    page_tokens: int
    importance: bool  # True if pages hold importance
    slab_bytes: int | None  # None chooses a size

    @property
    def max_pages(self) -> int:
        return -(-self.max_tokens // self.page_tokens)

    @property
    def position_dtype(self) -> torch.dtype:
        return torch.int16 if self.max_tokens <= 2**15 else torch.int32

    def page_formats(self, names: Sequence[str]) -> tuple[PageFormat, ...]:
        """Page formats of plain rows and of these tiers."""
        plain = f"K{8 * self.dtype.itemsize}V{8 * self.dtype.itemsize}"
        formats = (Format.parse(name, self.head_dim, self.page_tokens) for name in (plain, *names))
        return tuple(PageFormat(f, self.dtype, self.position_dtype, self.importance, self.device) for f in formats)

    def check_tables(self, tiers: int) -> None:
        """ValueError if the page tables of ``tiers`` tiers would have 2^31 entries (8 GiB) or more."""
        entries = self.max_requests * self.layers * self.kv_heads * tiers * self.max_pages
        if entries >= 2**31:
            per = f"{self.max_requests} requests, {self.layers} layers, {self.kv_heads} KV heads and {tiers} tiers"
            most = 2**31 // (entries // self.max_pages) * self.page_tokens
            raise ValueError(f"max_tokens: expected fewer than {most:,d} for {per}, got {self.max_tokens:,d}")

    def slabs(self, stride: int, tiers: int) -> tuple[int, int]:
        """Address range of a slab in bytes, and how many the tables hold: small slabs waste less, but not millions."""
        pages = self.max_requests * self.layers * self.kv_heads * (self.max_pages + tiers - 1)
        # A budget pays for slabs that are not full. Without one, larger slabs save allocations when requests grow.
        share, most = (4, 64) if self.amount is None else (16, 8)
        size = stride * max(min(max(self.layers * self.kv_heads // share, 1), most), pages // MANY_SLABS)
        if self.amount is None and pages * stride >= 64 * LARGE_SLAB:
            each = self.layers * self.kv_heads  # pages that a request allocates at once
            requests = min(pages // 64, PAGES_IN_SLAB) // each
            size = max(size, LARGE_SLAB, requests * each * stride)
        size = size if self.slab_bytes is None else self.slab_bytes
        check_int("slab_bytes", size, stride)
        size = size // UNIT * UNIT
        capacity = 2 * (-(-pages // (size // stride)) + tiers)
        return size, min(capacity, 2**31 // (size // UNIT))  # limit of int32 handles

    def budget(self, strides: Sequence[int], slab_sizes: Sequence[int], fixed: int) -> Budget:
        """Budget for pages and slabs of these bytes in each tier, and tables of ``fixed`` bytes."""
        return Budget(
            amount=self.amount,
            layers=self.layers,
            kv_heads=self.kv_heads,
            token_bytes=2 * self.head_dim * self.dtype.itemsize,
            kept=self.kept,
            room=min(self.settle_every, self.page_tokens // 2),
            page_tokens=self.page_tokens,
            page_price=tuple(strides),
            fixed=fixed,
            reserve=sum(slab_sizes),
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
        )

    def expected(self, names: Sequence[str]) -> Budget:
        """Budget with these tiers, neglecting that tables would be smaller."""
        strides = [kind.stride for kind in self.page_formats(names)]
        size, capacity = self.slabs(strides[0], len(strides))
        per_head = len(strides) * self.max_pages + self.head_dim
        fixed = 8 * capacity + 4 * self.max_requests * self.layers * self.kv_heads * per_head
        return self.budget(strides, [size // stride * stride for stride in strides], fixed)
