"""Free pages of a pool's slabs as stacks, so that allocating and freeing cost only the pages and slabs touched.

    stack[slab]      [ 9 7 4 . . . ]    indices of free pages; the last one, ``per_slab - used``, is allocated first
    available[tier]  [ 3 8 21 ]         slabs of a tier with a free page, ascending; the first is used first

Allocation is deterministic: equal sequences of calls return equal pages. A slab that is opened has all of its pages
in order, lowest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def merged(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Merge two sorted arrays."""
    if not len(a) or not len(b):
        return a if len(a) else np.sort(b)
    return np.sort(np.concatenate([a, b]), kind="stable")  # merges runs


def without(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elements of a sorted array that are not in ``b``, which may be unsorted."""
    if not len(a) or not len(b):
        return a
    keep = np.ones(len(a), bool)
    index = np.searchsorted(a, b).clip(max=len(a) - 1)
    keep[index[a[index] == b]] = False
    return a[keep]


class FreeLists:
    """Stacks of free pages per slab, and the slabs that have any per tier."""

    def __init__(self, per_slab: Sequence[int], capacity: int) -> None:
        self.per_slab = np.asarray(per_slab)
        self.width = max(per_slab)
        self.used = np.zeros(capacity, np.int64)  # pages with an owner
        self.available = [np.zeros(0, np.int64) for _ in per_slab]
        self._stack = np.empty(capacity * self.width, np.int16 if self.width < 2**15 else np.int32)

    def open(self, tier: int, slabs: np.ndarray) -> None:
        """Add slabs, ascending, all of whose pages are free, to a tier."""
        n = int(self.per_slab[tier])
        self._stack.reshape(-1, self.width)[slabs, :n] = np.arange(n - 1, -1, -1)
        self.used[slabs] = 0
        self.available[tier] = merged(self.available[tier], slabs)

    def close(self, tier: int, slabs: np.ndarray) -> None:
        """Remove slabs, ascending, from a tier."""
        self.available[tier] = without(self.available[tier], slabs)

    def take(self, tier: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Slab and index of ``n`` pages, which must be free."""
        available = self.available[tier]
        slabs = available[:n]
        free = self.per_slab[tier] - self.used[slabs]
        ends = free.cumsum()
        last = int(ends.searchsorted(n))
        slabs, taken = slabs[: last + 1], free[: last + 1].copy()
        spare = int(ends[last]) - n
        taken[last] -= spare
        self.used[slabs] += taken
        self.available[tier] = available[last + (spare == 0) :]
        slab = slabs.repeat(taken)
        top = slabs * self.width + (ends[: last + 1] - 1)  # top of the stack, for the first page; the next is one below
        return slab, self._stack[top.repeat(taken) - np.arange(n)].astype(np.int64)

    def give(self, pages: np.ndarray, tier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Push pages, each given once as ``slab * width + index``; ``tier`` of all slabs. Returns slabs and counts."""
        pages = np.sort(pages)
        slab = pages // self.width
        begins = np.ones(len(pages) + 1, bool)  # start of each slab's run, and the end
        np.not_equal(slab[1:], slab[:-1], out=begins[1:-1])
        bounds = begins.nonzero()[0]
        firsts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        slabs = slab[firsts]
        tiers, used = tier[slabs], self.used[slabs]
        top = self.per_slab[tiers] - used + counts - 1 + firsts  # the lowest page of a slab ends on top
        self._stack[slab * self.width + np.repeat(top, counts) - np.arange(len(pages))] = pages - slab * self.width
        self.used[slabs] = used - counts
        were_full = used == self.per_slab[tiers]
        if were_full.any():
            joining, tiers = slabs[were_full], tiers[were_full]
            for number in sorted(set(tiers.tolist())):
                self.available[number] = merged(self.available[number], joining[tiers == number])
        return slabs, counts

    def pages(self, tier: int, slab: int) -> list[int]:
        """Indices of a slab's free pages."""
        first = slab * self.width
        return self._stack[first : first + int(self.per_slab[tier] - self.used[slab])].tolist()

    def recount(self, tier: int, slabs: np.ndarray, refs: np.ndarray) -> None:
        """Rebuild the stacks of slabs, ascending, from the refcounts of their pages."""
        n = int(self.per_slab[tier])
        stack = self._stack.reshape(-1, self.width)
        for slab in slabs.tolist():
            free = np.flatnonzero(refs[slab, :n] == 0)
            stack[slab, : len(free)] = free[::-1]
            self.used[slab] = n - len(free)
        self.available[tier] = merged(without(self.available[tier], slabs), slabs[self.used[slabs] < n])
