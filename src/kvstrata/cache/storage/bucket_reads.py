"""Reads tokens of buckets: lists of positions, importance and pages, and the rows themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from kvstrata.layout.format import UNIT

from .page import PageFormat, Rows
from .pool import Pool
from .tokens import Tokens


def spans(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All integers ``first[i] .. end[i] - 1``, flat: the i of each, and the integer."""
    counts = np.maximum(end - first, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    return which, first[which] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def runs(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``counts[i]`` integers from ``first[i]`` on, flat."""
    ends = counts.cumsum()
    return (first + counts - ends).repeat(counts) + np.arange(ends[-1] if len(ends) else 0)


class BucketReads:
    """The part of `Buckets` that modifies nothing but importance."""

    pool: Pool
    page_formats: tuple[PageFormat, ...]
    kv_heads: int
    max_pages: int
    page_tokens: int
    device: torch.device
    side_offsets: torch.Tensor
    host_table: np.ndarray
    host_count: np.ndarray
    page_table: torch.Tensor
    count: torch.Tensor

    def _pages_of(self, layer: int, requests: Sequence[int], tier: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bucket, index in the bucket's page list, and handle of every page in use."""
        count = self.host_count[list(requests), layer, :, tier].reshape(-1)
        pages = -(-count.astype(np.int64) // self.page_tokens)
        bucket = np.repeat(np.arange(len(pages)), pages)
        index = np.arange(len(bucket)) - np.repeat(np.cumsum(pages) - pages, pages)
        table = self.host_table[list(requests), layer, :, tier].reshape(-1, self.max_pages)
        return bucket, index, table[bucket, index].astype(np.int64)

    def handles(self, requests: np.ndarray) -> np.ndarray:
        """All pages of requests, int64; a shared page appears once per owner."""
        counts = self.host_count[requests].astype(np.int64)
        pages = -(-counts // self.page_tokens).reshape(len(requests), self.host_count[0].size)
        first = (requests[:, None] * pages.shape[1] + np.arange(pages.shape[1])).reshape(-1) * self.max_pages
        bucket, page = spans(np.zeros(pages.size, np.int64), pages.reshape(-1))
        return self.host_table.reshape(-1)[first[bucket] + page].astype(np.int64)

    def snapshot(self, layer: int, requests: Sequence[int]) -> Tokens:
        """All tokens of these requests: tier by tier, bucket by bucket, slot by slot. Does not wait for the device."""
        return self.snapshot_with_handles(layer, requests)[0]

    def snapshot_with_handles(self, layer: int, requests: Sequence[int]) -> tuple[Tokens, torch.Tensor]:
        """`snapshot`, and the handles of the tokens' pages."""
        ids = np.array(requests, np.int64)
        buckets = np.arange(ids.size * self.kv_heads * len(self.page_formats)).reshape(-1, len(self.page_formats))
        return self._tokens_of(ids, np.full_like(ids, layer), buckets.T)

    def snapshots(self, layers: Sequence[int], requests: Sequence[int]) -> Tokens:
        """All tokens of each request in its layer, one request after the other, each as in `snapshot`."""
        ids, layer_ids = np.array(requests, np.int64), np.array(layers, np.int64)
        shape = (ids.size, self.kv_heads, len(self.page_formats))
        return self._tokens_of(ids, layer_ids, np.arange(np.prod(shape)).reshape(shape).transpose(0, 2, 1))[0]

    def _tokens_of(self, requests: np.ndarray, layers: np.ndarray, order: np.ndarray) -> tuple[Tokens, torch.Tensor]:
        """Tokens of places, bucket by bucket (head_cache * tiers + tier) in this order, and handles of their pages."""
        order, tiers = order.reshape(-1), len(self.page_formats)
        host = self.host_count[requests, layers].reshape(-1).astype(np.int64)[order]
        n = int(host.sum())
        buckets, count = self.pool.to_device(np.stack([order, host]))
        numbers = torch.repeat_interleave(torch.arange(len(host), device=self.device), count, output_size=n)
        slot = torch.arange(n, device=self.device) - (count.cumsum(0) - count)[numbers]
        bucket = buckets[numbers]
        tier = bucket % tiers
        handle = self.handles_at(self.table_offsets(requests, layers), bucket, slot)
        position, importance = self._side(handle, slot, tier)
        return Tokens(bucket // tiers, tier, slot, position, importance), handle

    def table_offsets(self, requests: np.ndarray, layers: np.ndarray) -> torch.Tensor:
        """Offset of each bucket's page list in the flat table, for places (request, layer)."""
        heads, tiers, pages = self.page_table.shape[2:]
        first = (requests * self.page_table.shape[1] + layers) * heads * tiers * pages
        return self.pool.to_device((first[:, None] + np.arange(heads * tiers) * pages).reshape(-1))

    def handles_at(
        self, bases: torch.Tensor, bucket: torch.Tensor, slot: torch.Tensor, table: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Handles of tokens' pages in ``table``, by default the device's."""
        table = self.page_table if table is None else table
        return table.view(-1)[bases[bucket] + slot // self.page_tokens].long()

    def _side(self, handle: torch.Tensor, slot: torch.Tensor, tier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (int64) and importance (float32) of tokens; zeros if importance is not kept."""
        kind, slot = self.page_formats[0], slot % self.page_tokens
        position = torch.empty_like(slot)
        importance = torch.zeros(len(slot), dtype=torch.float32, device=self.device)
        space, offsets = self.pool.space, self.side_offsets[tier]
        if space is not None:
            step = kind.position_dtype.itemsize
            position.copy_(space.bytes.view(kind.position_dtype)[(handle * UNIT + offsets[:, 0]) // step + slot])
            if kind.keeps_importance:
                importance = space.bytes.view(torch.float32)[(handle * UNIT + offsets[:, 1]) // 4 + slot]
        else:
            from .page_triton import side

            side(
                self.pool, handle, slot, tier, self.side_offsets, position, importance, kind.position_dtype,
                kind.keeps_importance, write=False,
            )  # fmt: skip
        return position, importance

    def prepare_side(self, handle: torch.Tensor, tokens: Tokens) -> Callable[[torch.Tensor], None]:
        """A callable that writes importance into the pages of tokens and allocates nothing."""
        kind, slot = self.page_formats[0], tokens.slot % self.page_tokens
        space = self.pool.space
        if space is not None:
            index = (handle * UNIT + self.side_offsets[tokens.tier, 1]) // 4 + slot
            values = space.bytes.view(torch.float32)
            return lambda importance: values.__setitem__(index, importance)
        from .page_triton import side

        def write(importance: torch.Tensor) -> None:
            side(
                self.pool, handle, slot, tokens.tier, self.side_offsets, tokens.position, importance,
                kind.position_dtype, kind.keeps_importance, write=True,
            )  # fmt: skip

        return write

    def owners(self, layer: int, requests: Sequence[int], tokens: Tokens) -> torch.Tensor:
        """Refcount of each token's page; scalar 1 if nothing was ever shared."""
        if not self.pool.shares:
            return torch.ones((), dtype=torch.float32, device=self.device)
        table = self.host_table[list(requests), layer].reshape(-1, len(self.page_formats), self.max_pages)
        owned = np.ones(table.shape, np.int32)
        owned[table >= 0] = self.pool.owners(table[table >= 0])
        return self.pool.to_device(owned)[tokens.head_cache, tokens.tier, tokens.slot // self.page_tokens]

    def read(self, layers: int | np.ndarray, requests: Sequence[int], tokens: Tokens, tier: int) -> Rows:
        """The rows of tokens that are all in one tier; ``layers``: of all requests, or of each."""
        head_cache, slot = tokens.head_cache.cpu().numpy(), tokens.slot.cpu().numpy()
        keys, place = np.unique(head_cache * self.max_pages + slot // self.page_tokens, return_inverse=True)
        table = self.host_table[list(requests), layers, :, tier].reshape(-1)
        pages = self.pool.read(table[keys].astype(np.int64), 0, self.page_formats[tier].stride)
        page = self.pool.to_device(place.reshape(-1))
        return self.page_formats[tier].read(pages, page, tokens.slot % self.page_tokens)

    def read_all(self, layer: int, requests: Sequence[int], tokens: Tokens) -> Iterator[tuple[PageFormat, slice, Rows]]:
        """Rows of a `snapshot`, tier by tier: page format, slice of the snapshot, rows. Never waits for the device."""
        end = 0
        for tier, kind in enumerate(self.page_formats):
            count = self.host_count[list(requests), layer, :, tier].reshape(-1).astype(np.int64)
            begin, end = end, end + int(count.sum())
            if begin == end:
                continue
            stored, pages = tokens[begin:end], -(-count // self.page_tokens)
            first = self.pool.to_device(np.cumsum(pages) - pages)
            page = first[stored.head_cache] + stored.slot // self.page_tokens
            data = self.pool.read(self._pages_of(layer, requests, tier)[2], 0, kind.stride)
            yield kind, slice(begin, end), kind.read(data, page, stored.slot % self.page_tokens)
