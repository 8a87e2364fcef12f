"""Rows of a window: a ring of 16-bit rows for the newest tokens, the tail, and a ring of packed pages for the rest.

    new tokens ──▶ tail, position mod C + 1 ──▶ packed pages, position mod ring ──▶ overwritten

Shapes of K and V are ``[rows, kv_heads, n, D]``, right-aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from kvstrata.cache.policy.centre import CENTRE_TOKENS
from kvstrata.layout import Format
from kvstrata.quant import reference as quant
from kvstrata.store import store_packed

from .window_counts import NewColumns, RowCounts
from .window_rows import RowCalibration, picked
from .window_step import in_dtype

T = TypeVar("T")
TENSORS = ("pages", "tail_k", "tail_v")  # in a file


def without_autocast(method: Callable[..., T]) -> Callable[..., T]:
    """Keep the dtypes of the tail and of the pages whatever an autocast around the model says."""

    @wraps(method)
    def run(self: Any, *args: Any) -> T:
        if not torch.is_autocast_enabled(self.device.type):
            return method(self, *args)
        with torch.autocast(self.device.type, enabled=False):
            return method(self, *args)

    return run


class WindowRings:
    """Tail and pages of a window, and their counters."""

    format: Format  # set with the first token, like the tensors
    pages: torch.Tensor  # uint8 [rows * ring_blocks, kv_heads, page_bytes]
    table: torch.Tensor  # int32 [rows, 2 * ring_blocks]: block table, two turns of the ring
    tail_k: torch.Tensor  # [rows, kv_heads, recent_tokens + 1, D]
    tail_v: torch.Tensor
    calibration: RowCalibration
    counts: RowCounts
    recent_tokens: int  # tokens in the tail, which has one slot more
    ring_blocks: int  # pages of a row
    ring: int  # slots in them
    dtype: torch.dtype  # of the tail
    device: torch.device

    @property
    def rows(self) -> int:
        return len(self.counts.lengths)

    @property
    def kept(self) -> int:
        """Number of a prompt's last tokens that `store` uses."""
        return max(self.ring + self.recent_tokens, CENTRE_TOKENS)

    def allocate(self, rows: int, kv_heads: int, dim: int) -> None:
        """Allocate both rings of ``rows`` rows, without tokens."""
        with torch.inference_mode(False):  # steps outside inference mode write to them
            size = (rows * self.ring_blocks, kv_heads, self.format.page_bytes)
            self.pages = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self.tail_k, self.tail_v = (
                torch.zeros(rows, kv_heads, self.recent_tokens + 1, dim, dtype=self.dtype, device=self.device)
                for _ in range(2)
            )
        self.table = self._ring_table(rows)
        self.calibration = RowCalibration(rows, kv_heads, dim, self.device)
        self.counts = RowCounts.empty(rows)

    def take(self, rings: WindowRings, first: int, rows: int) -> None:
        """Use ``rows`` rows of others from ``first`` on, without a copy."""
        blocks, own = self.ring_blocks, slice(first, first + rows)
        with torch.inference_mode(False):
            self.pages = rings.pages[first * blocks : (first + rows) * blocks]
            self.tail_k, self.tail_v, self.table = rings.tail_k[own], rings.tail_v[own], rings.table[:rows]
        self.calibration = rings.calibration.slice(own)

    def _ring_table(self, rows: int) -> torch.Tensor:
        block = torch.arange(2 * self.ring_blocks) % self.ring_blocks
        table = torch.arange(rows).unsqueeze(1) * self.ring_blocks + block
        with torch.inference_mode(False):
            return table.to(self.device, torch.int32, copy=True, non_blocking=True)

    # Reading

    @without_autocast
    def past(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[rows, kv_heads, count, D]`` of each row's last tokens, right-aligned; zero before them."""
        ends, held = self._numbers(self.counts.lengths).unsqueeze(1), self._numbers(self.counts.held).unsqueeze(1)
        position = ends - count + torch.arange(count, device=self.device)
        k, v = quant.restore(*quant.dequantize_page(self.pages.unsqueeze(2), self.format), self.format)
        ring_k, ring_v = (x.squeeze(2).unflatten(0, (len(ends), -1)).transpose(1, 2).flatten(2, 3) for x in (k, v))
        slot = torch.where(
            position >= ends - held, self.ring + position % (self.recent_tokens + 1), position % self.ring
        )[:, None, :, None]
        out = []
        for ring, tail in ((self.calibration.restored(ring_k), self.tail_k), (ring_v, self.tail_v)):
            both = torch.cat([in_dtype(ring, dtype), tail.to(dtype)], 2)  # [rows, kv_heads, slots, D]
            rows = both.gather(2, slot.expand(-1, both.shape[1], -1, both.shape[3]))
            out.append(rows.masked_fill_((position < 0)[:, None, :, None], 0))
        return out[0], out[1]

    def _in_order(self) -> torch.Tensor:
        """K of the tail ``[rows, kv_heads, recent_tokens, D]`` with the newest tokens at the end."""
        width = self.recent_tokens
        position = self._numbers(self.counts.lengths).unsqueeze(1) + torch.arange(-width, 0, device=self.device)
        return self.tail_k.gather(2, (position % (width + 1))[:, None, :, None].expand_as(self.tail_k[:, :, 1:]))

    def _numbers(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Copy a few numbers to the device without waiting for it."""
        return torch.tensor(values, dtype=dtype, device="cpu").to(self.device, non_blocking=True)

    # Writing

    @without_autocast
    @torch.no_grad()
    def append(self, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None) -> None:
        """Store the tokens among the new columns: the newest in the tail, all others of the window in the pages."""
        new = NewColumns.of(real, key.shape[2], self.counts.lengths)
        self.store(*(new.last(x, self.kept) for x in (key, value)), new)

    @without_autocast
    @torch.no_grad()
    def store(self, key: torch.Tensor, value: torch.Tensor, new: NewColumns) -> None:
        """Store the last `kept` of the new columns, or all if they are fewer, as `NewColumns.last` gives them."""
        self._fix_centres(key, new.tokens)
        grown = self.counts.grown(new.tokens, self.recent_tokens, new.ended)
        first = max(key.shape[2] - self.ring - self.recent_tokens, 0)
        key, value = (in_dtype(x[:, :, first:], self.dtype) for x in (key, value))
        before, after = (self._numbers(x.lengths).unsqueeze(1) for x in (self.counts, grown))
        self._pack(key, value, before, after)
        self._fill_tail(key, value, before, after)
        self.counts = grown

    def _fix_centres(self, key: torch.Tensor, new: list[int]) -> None:
        """Fix the centres of rows that will have their first packed tokens, from all that they hold at 16 bit.

        ``key [rows, kv_heads, n, D]`` is right-aligned, with ``new`` tokens of each row.
        """
        if first := self.counts.unpacked(new, self.recent_tokens):
            if any(self.counts.held):  # rows with earlier tokens have no padding before the new ones
                key = torch.cat([self._in_order(), in_dtype(key, self.dtype)], 2)
            self.calibration.fix_centres(first, key, [self.counts.held[row] + new[row] for row in first])

    def _pack(self, key: torch.Tensor, value: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """Pack tokens that have no place in the tail any more; arguments as in `_fill_tail`."""
        n, width, ring = key.shape[2], self.recent_tokens, self.ring
        slot = torch.arange(width + 1, device=self.device)
        in_tail = before - 1 - (before - 1 - slot) % (width + 1)  # position in each slot of the tail
        held, packed_to = (self._numbers(x).unsqueeze(1) for x in (self.counts.held, self.counts.packed_to))
        added = after - n + torch.arange(n, device=self.device)
        position = torch.cat(
            [in_tail.masked_fill(in_tail < before - held, -1), added.masked_fill(added < before, -1)], 1
        )
        leaves = (position >= packed_to) & (position < after - width) & (position >= after - width - ring)
        page_slot = torch.arange(len(position), device=self.device).unsqueeze(1) * ring + position % ring
        page_slot = torch.where(leaves, page_slot, -1).int().flatten()  # int32, as in steps: the same kernel
        old_k, old_v = torch.cat([self.tail_k, key], 2), torch.cat([self.tail_v, value], 2)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (self.calibration.packed(old_k), old_v))
        store_packed(k, v, self.pages, page_slot, self.format)

    def _fill_tail(self, key: torch.Tensor, value: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """Write the newest tokens to the tail.

        ``key, value [rows, kv_heads, n, D]`` are right-aligned; ``before, after [rows, 1]`` are lengths.
        """
        slots, n = self.recent_tokens + 1, key.shape[2]
        slot = torch.arange(slots, device=self.device)
        position = after - 1 - (after - 1 - slot) % slots  # newest position of each slot
        source = torch.where(position >= before, slots + n + position - after, slot)[:, None, :, None]
        for tail, x in ((self.tail_k, key), (self.tail_v, value)):
            tail.copy_(torch.cat([tail, x], 2).gather(2, source.expand_as(tail)))

    @without_autocast
    def refill(self) -> None:
        """Copy packed tokens back to the tail, which `crop` left with fewer tokens than it has room for."""
        k, v = self.past(self.recent_tokens + 1, self.dtype)
        after = self._numbers(self.counts.lengths).unsqueeze(1)
        self._fill_tail(k, v, torch.zeros_like(after), after)
        self.counts = self.counts.refilled(self.recent_tokens)

    def pick(self, rows: torch.Tensor) -> None:
        """Make row i a copy of row ``rows[i]``, int64 ``[rows]`` on the host; in place if their number is the same."""
        if len(rows) != self.rows:
            self.table = self._ring_table(len(rows))
        self.counts = self.counts.picked(rows.tolist())
        rows = rows.to(self.device)
        self.pages = picked(self.pages.unflatten(0, (-1, self.ring_blocks)), rows).flatten(0, 1)
        self.tail_k, self.tail_v = picked(self.tail_k, rows), picked(self.tail_v, rows)
        self.calibration.pick(rows)
