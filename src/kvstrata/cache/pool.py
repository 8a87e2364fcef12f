"""The page pool: slabs of bytes, pages cut from them, and who holds each page.

    slab 0 (K16V16)          slab 1 (K4V4)                slab 2 (empty)
    [page][page][page]..     [page][page][page][page]..   [                ]

A slab is one uint8 tensor that never moves (on the CPU a part of one range of addresses, see space.py). While a page
of it is in use it belongs to one tier, whose stride cuts it into pages; when the last page goes it is empty and may
serve any tier. A page's handle is its byte offset in the space of all slabs laid end to end, divided by 64:
``handle // units`` is the slab, ``handle % units * 64`` the offset in it. A kernel adds that to ``pointers[slab]``.
Reference counts live on the host; a page may have several owners (forks), and whoever writes must be the only one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .space import Space

UNIT = 64  # bytes a handle counts in
POISON = 0xFF  # NaN as fp16, bf16 and fp32; -1 as a position
EMPTY = -1


class Pool:
    """Pages of several strides (one per tier) from slabs of one size."""

    def __init__(
        self, strides: Sequence[int], slab_bytes: int, capacity: int, device: torch.device, debug: bool = False
    ) -> None:
        for tier, stride in enumerate(strides):
            if stride % UNIT or not 0 < stride <= slab_bytes:
                raise ValueError(f"strides[{tier}]: expected a multiple of {UNIT} up to {slab_bytes}, got {stride}")
        if slab_bytes % UNIT:
            raise ValueError(f"slab_bytes: expected a multiple of {UNIT}, got {slab_bytes}")
        self.units = slab_bytes // UNIT
        if capacity * self.units > 2**31:
            raise ValueError(f"capacity: expected at most {2**31 // self.units} slabs of {slab_bytes}, got {capacity}")
        self.strides = tuple(strides)
        self.slab_bytes = slab_bytes
        self.per_slab = tuple(slab_bytes // stride for stride in strides)
        self.device = device
        self.debug = debug
        self.space = Space(capacity * slab_bytes) if device.type == "cpu" else None
        self.slabs: list[torch.Tensor | None] = [None] * capacity
        self.pointers = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.allocated = np.zeros(capacity, bool)
        self.tier = np.full(capacity, EMPTY, np.int8)
        self.refs = np.zeros((capacity, max(self.per_slab)), np.int32)
        self.shares = False  # whether any page ever had two owners
        self._used = np.zeros(capacity, np.int32)  # pages with an owner
        self._pages = np.zeros(len(self.strides), np.int64)  # the same per tier
        self._slabs = np.zeros(len(self.strides), np.int64)  # slabs per tier
        self._stride = np.asarray(self.strides)

    @property
    def capacity(self) -> int:
        return len(self.slabs)

    @property
    def slab_count(self) -> int:
        """Slabs that are allocated, empty ones included."""
        return int(np.count_nonzero(self.allocated))

    @property
    def nbytes(self) -> int:
        return self.slab_count * self.slab_bytes

    def pages(self, tier: int) -> int:
        """Pages of a tier in use, each counted once."""
        return int(self._pages[tier])

    def slabs_of(self, tier: int) -> int:
        return int(self._slabs[tier])

    def _locate(self, handles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slab and index in it."""
        handles = handles.astype(np.int64)
        slab = handles // self.units
        stride = self._stride[self.tier[slab]]
        return slab, handles % self.units * UNIT // stride

    def _open(self, tier: int) -> None:
        """One more slab for a tier: an empty one, or a new one."""
        empty = np.flatnonzero(self.allocated & (self.tier == EMPTY))
        if len(empty):
            at = int(empty[0])
        else:
            if self.allocated.all():
                raise RuntimeError(f"pool: expected a free slab, all {self.capacity} are in use")
            at = int(np.argmin(self.allocated))
            with torch.inference_mode(False):
                if self.space is None:
                    slab = torch.empty(self.slab_bytes, dtype=torch.uint8, device=self.device)
                else:
                    slab = self.space.bytes[at * self.slab_bytes : (at + 1) * self.slab_bytes]
            if self.debug:
                slab.fill_(POISON)
            self.slabs[at], self.allocated[at] = slab, True
            self.pointers[at] = slab.data_ptr()
        self.tier[at] = tier
        self._slabs[tier] += 1

    def allocate(self, tier: int, n: int) -> np.ndarray:
        """Handles of ``n`` pages, the lowest free ones, each with one owner. Their bytes are undefined."""
        if n == 0:
            return np.zeros(0, np.int64)
        per_slab = self.per_slab[tier]
        missing = n - (self.slabs_of(tier) * per_slab - self.pages(tier))
        for _ in range(-(-missing // per_slab)):
            self._open(tier)
        mine = np.flatnonzero((self.tier == tier) & (self._used < per_slab))
        mine = mine[: np.searchsorted(np.cumsum(per_slab - self._used[mine]), n) + 1]
        row, index = np.nonzero(self.refs[mine, :per_slab] == 0)
        slab, index = mine[row[:n]], index[:n]
        self.refs[slab, index] = 1
        self._used += np.bincount(slab, minlength=self.capacity)
        self._pages[tier] += n
        return slab * self.units + index * (self.strides[tier] // UNIT)

    def owners(self, handles: np.ndarray) -> np.ndarray:
        """Reference counts."""
        return self.refs[self._locate(handles)]

    def retain(self, handles: np.ndarray) -> None:
        """One more owner each; a handle may appear more than once."""
        if handles.size == 0:
            return
        np.add.at(self.refs, self._locate(handles), 1)
        self.shares = True

    def release(self, handles: np.ndarray) -> None:
        """One owner less each; pages without any are free, and slabs without any page are empty."""
        if handles.size == 0:
            return
        slab, index = self._locate(handles)
        refs, page = self.refs.reshape(-1), slab * self.refs.shape[1] + index
        np.subtract.at(refs, page, 1)
        left = refs[page]
        if (left < 0).any():
            raise RuntimeError(f"pool: page {int(handles[left < 0][0])} released more often than it was owned")
        freed = handles[left == 0]
        if self.shares:  # else a page that is given back twice was found above
            freed = np.unique(freed)
        if not len(freed):
            return
        if self.debug:
            for handle in freed.tolist():
                self._bytes(handle, 0, self.strides[self.tier[handle // self.units]]).fill_(POISON)
        by_slab = np.bincount(freed // self.units, minlength=self.capacity)
        self._used -= by_slab
        np.subtract.at(self._pages, self.tier[by_slab > 0], by_slab[by_slab > 0])
        self._empty(np.flatnonzero((by_slab > 0) & (self._used == 0)))

    def _empty(self, slabs: np.ndarray) -> None:
        """Slabs without a page belong to no tier."""
        np.subtract.at(self._slabs, self.tier[slabs], 1)
        self.tier[slabs] = EMPTY

    def _bytes(self, handle: int, start: int, size: int) -> torch.Tensor:
        slab = self.slabs[handle // self.units]
        assert slab is not None
        at = handle % self.units * UNIT + start
        return slab[at : at + size]

    def read(self, handles: np.ndarray, start: int, size: int) -> torch.Tensor:
        """Copies of bytes ``start .. start + size`` of pages: uint8 ``[n, size]``; one indexed read for all pages."""
        if handles.size == 0:
            return torch.empty(0, size, dtype=torch.uint8, device=self.device)
        if self.space is not None:
            found = self.space.runs(start, size)[handles]
            return torch.from_numpy(found.view(np.uint8).reshape(len(handles), size))
        from .pages_triton import gather

        return gather(self, self.to_device(handles), start, size)

    def write(self, handles: np.ndarray, start: int, data: torch.Tensor) -> None:
        """The inverse of ``read``; no page twice."""
        if handles.size == 0:
            return
        if self.space is not None:
            rows = data.contiguous().numpy().view(f"V{data.shape[1]}")
            self.space.runs(start, data.shape[1])[handles] = rows.reshape(len(handles))
        else:
            from .pages_triton import scatter

            scatter(self, self.to_device(handles), start, data)

    def copy(self, old: np.ndarray, new: np.ndarray, tier: int) -> None:
        """Whole pages of a tier to others."""
        if self.space is not None or old.size == 0:
            self.write(new, 0, self.read(old, 0, self.strides[tier]))
        else:
            from .pages_triton import copy

            copy(self, self.to_device(old), self.to_device(new), self.strides[tier])

    def clear(self, handles: np.ndarray, tier: int) -> None:
        """Zeros in whole pages of a tier."""
        if handles.size == 0:
            return
        if self.space is not None:
            self.space.runs(0, self.strides[tier])[handles] = np.zeros(1, f"V{self.strides[tier]}")
        else:
            from .pages_triton import clear

            clear(self, self.to_device(handles), self.strides[tier])

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """A copy of a small host array; on a GPU it goes through pinned memory, and the host does not wait."""
        copy = torch.from_numpy(np.ascontiguousarray(array))
        if self.space is not None or copy.numel() == 0:
            return copy.to(self.device)
        return copy.pin_memory().to(self.device, non_blocking=True)

    def trim(self, spare: int = 0) -> None:
        """Give empty slabs back, all but ``spare``."""
        for at in np.flatnonzero(self.allocated & (self.tier == EMPTY))[spare:].tolist():
            self.slabs[at], self.allocated[at] = None, False
            self.pointers[at] = 0
            if self.space is not None:
                self.space.forget(at * self.slab_bytes, self.slab_bytes)

    def compact(self, tier: int) -> tuple[np.ndarray, np.ndarray]:
        """Move pages from the last slabs of a tier into holes of the first: handles before (sorted) and after."""
        per_slab, step = self.per_slab[tier], self.strides[tier] // UNIT
        mine = np.flatnonzero(self.tier == tier)
        keep = -(-self.pages(tier) // per_slab)
        from_row, from_index = np.nonzero(self.refs[mine[keep:], :per_slab] > 0)
        to_row, to_index = np.nonzero(self.refs[mine[:keep], :per_slab] == 0)
        from_slab, to_slab = mine[keep:][from_row], mine[:keep][to_row[: len(from_row)]]
        to_index = to_index[: len(from_row)]
        old, new = from_slab * self.units + from_index * step, to_slab * self.units + to_index * step
        self.copy(old, new, tier)
        self.refs[to_slab, to_index] = self.refs[from_slab, from_index]
        np.add.at(self._used, to_slab, 1)
        self._pages[tier] += len(new)
        self.refs[from_slab, from_index] = 1
        self.release(old)
        return old, new
