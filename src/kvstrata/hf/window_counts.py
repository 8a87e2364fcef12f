"""Counters of the rows of a layer with a sliding window; immutable, so that layers share them from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class RowCounts(NamedTuple):
    """Counters of each row of a layer."""

    lengths: list[int]  # tokens so far
    held: list[int]  # newest tokens in the tail; fewer than it has room for after `cropped`
    packed_to: list[int]  # position after the last packed token
    written_to: list[int]  # the same, counting tokens that were removed again
    ended: list[bool]  # the last column is padding

    @classmethod
    def empty(cls, rows: int) -> RowCounts:
        none = [0] * rows
        return cls(none, none, none, none, [False] * rows)

    def grown(self, new: Sequence[int], tail: int, ended: list[bool] | None = None) -> RowCounts:
        """Counters after ``new`` tokens of each row, of which a tail of ``tail`` tokens keeps the newest."""
        lengths = [n + c for n, c in zip(self.lengths, new, strict=True)]
        held = [min(h + c, tail) for h, c in zip(self.held, new, strict=True)]
        packed_to = [max(p, n - h) for p, n, h in zip(self.packed_to, lengths, held, strict=True)]
        written_to = list(map(max, self.written_to, packed_to))
        return RowCounts(lengths, held, packed_to, written_to, ended or [False] * len(lengths))

    def cropped(self, count: int) -> RowCounts:
        """Counters without the last ``count`` columns."""
        lengths = [max(n - count, 0) for n in self.lengths]
        held = [max(h - before + n, 0) for h, before, n in zip(self.held, self.lengths, lengths, strict=True)]
        return self._replace(lengths=lengths, held=held, packed_to=list(map(min, self.packed_to, lengths)))

    def refilled(self, tail: int) -> RowCounts:
        """Counters when the tail holds as many tokens as it has room for."""
        return self._replace(held=[min(n, tail) for n in self.lengths])

    def picked(self, rows: list[int]) -> RowCounts:
        return RowCounts(*([x[row] for row in rows] for x in self))  # type: ignore[arg-type]

    def unpacked(self, new: Sequence[int], tail: int) -> list[int]:
        """Rows whose first packed token is among what they hold and ``new`` more tokens of each."""
        every = enumerate(zip(self.held, new, self.packed_to, strict=True))
        return [row for row, (h, c, packed_to) in every if h + c > tail and not packed_to]

    def lacks(self, tail: int) -> bool:
        """True if the tail of a row holds fewer tokens than it could."""
        return any(h < min(n, tail) for h, n in zip(self.held, self.lengths, strict=True))


class NewColumns(NamedTuple):
    """New columns of all rows, of which some may be padding."""

    tokens: list[int]  # number of tokens of each row among them
    ended: list[bool] | None = None  # rows with tokens whose last column is padding; None for none
    order: torch.Tensor | None = None  # columns of each row, padding first, int64 [rows, columns]; None without padding

    @classmethod
    def of(cls, real: torch.Tensor | None, columns: int, lengths: Sequence[int]) -> NewColumns:
        """``real`` bool ``[rows, columns]``, False for padding, or None; ``lengths`` are the tokens before them."""
        if real is None:
            return cls([columns] * len(lengths))
        new, last = real.sum(1).tolist(), real[:, -1].tolist()
        ended = [n + c > 0 and not own for n, c, own in zip(lengths, new, last, strict=True)]
        return cls(new, ended, real.int().argsort(dim=1, stable=True))

    def last(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The last ``count`` columns of ``x [rows, kv_heads, columns, D]``, or all, with padding first."""
        first = max(x.shape[2] - count, 0)
        if self.order is None:
            return x[:, :, first:]
        return x.gather(2, self.order[:, None, first:, None].expand(-1, x.shape[1], -1, x.shape[3]))

    def in_layers(self, layers: int) -> NewColumns:
        """Columns of ``layers`` layers with this prompt, one layer's rows after the other's; without `order`."""
        return NewColumns(self.tokens * layers, None if self.ended is None else self.ended * layers)


def behind_padding(counts: RowCounts, new: torch.Tensor, sliding_window: int) -> torch.Tensor:
    """Rows, bool ``[rows]``, with a token behind padding behind a token; ``new [rows, queries]`` is on the host.

    Padding in the middle of a prompt is no obstacle once no later query sees it.
    """
    begun, ended = torch.tensor([counts.lengths, counts.ended], device="cpu").bool().unsqueeze(2)
    before = torch.cat([begun & ~ended, new[:, :-1]], 1)
    behind = new & ~before & (begun | (before.cumsum(1) > 0))
    behind[:, 1 : 2 - sliding_window] = False
    return behind.any(1) | (ended & new).any(1)


class Geometry(NamedTuple):
    """Sizes that layers with equal slots share."""

    window: int
    tail: int  # tokens of a row at 16 bit, in tail + 1 slots
    ring: int  # slots of a row in the pages
    rows: int


TAIL_SLOT, LEAVING_SLOT, PAGE_SLOT, PACKED_LEN, LENGTH = range(5)  # rows of StepSlots.device


class StepSlots:
    """Slots of a new token of every row, int32 ``[5, rows]`` at a fixed address.

    TAIL_SLOT      slot of the new token in the tail
    LEAVING_SLOT   slot in the tail of the oldest token, which is packed; it stays there until the next step, so that a
                   step whose forward failed can be repeated
    PAGE_SLOT      slot of that token in the pages, -1 for none
    PACKED_LEN     packed tokens after that, modulo the ring, so that a block table of two turns of it suffices
    LENGTH         tokens after that
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        self.counts: RowCounts | None = None  # counters that it was filled for
        self.is_ready = False  # layers with these counters need no other preparation
        self.after = RowCounts.empty(geometry.rows)  # those after the step
        with torch.inference_mode(False):  # steps outside inference mode write to it
            self.device = torch.full((5, geometry.rows), -1, dtype=torch.int32, device=device)

    def fill(self, counts: RowCounts) -> None:
        """Fill in for rows with these counters and full tails."""
        if counts == self.counts:
            return
        _, tail, ring, rows = self.geometry
        lengths, packed_to = np.array(counts.lengths), np.array(counts.packed_to)
        leaves = lengths - tail  # position of the token that leaves the tail
        packed = np.maximum(leaves + 1, 0)
        slots = np.empty((5, rows), np.int32)
        slots[TAIL_SLOT], slots[LEAVING_SLOT] = lengths % (tail + 1), leaves % (tail + 1)
        slots[PAGE_SLOT] = np.where((leaves >= 0) & (leaves >= packed_to), np.arange(rows) * ring + leaves % ring, -1)
        slots[PACKED_LEN] = np.where(packed < ring, packed, ring + packed % ring)
        slots[LENGTH] = lengths + 1
        self.device.copy_(torch.from_numpy(slots), non_blocking=True)
        self.counts, self.after = counts, counts.grown([1] * rows, tail)
