"""Allocates pages ahead of need: without a budget, a request gets its next plain pages before its open ones are full.

    rows left in open pages   63 .. 33   32 .. 17                16 .. 1             0
    next pages                none       allocated with others   already allocated   in use, with 64 rows left

A step that fills the last row of a page finds the next one in the tables and need not do anything. When the first
request has 16 rows left, an eighth of all requests get theirs in one launch, so most steps allocate none; requests with
equally full pages get theirs at different steps, so no step pays for all. Pages come from a small reserve, which is
refilled in the following steps, one slab at a time: few steps allocate from the pool, and those do nothing else. With a
budget a page is charged when it is allocated, so none is allocated ahead.

A page ahead lies beyond the tokens counted, and kernels find the end of a list by the counts. Whatever changes a
request in another way than token by token frees its pages ahead first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from .table_cuda import NextPages, Tables
from .transaction import is_out_of_memory

RESERVE = 16  # the reserve is filled for at most this many requests, and for a quarter of all
FEWEST = 4  # minimum number of requests that one launch serves


class Lists(Tables, Protocol):
    """The part of a cache's buckets that pages ahead use: sizes, tables on the host, and a way to enter pages."""

    device: torch.device
    kv_heads: int
    page_tokens: int
    max_pages: int
    version: int
    left: np.ndarray
    host_count: np.ndarray
    host_table: np.ndarray
    plain_lists: np.ndarray

    @property
    def by_cuda(self) -> bool: ...

    def prepare_new_pages(self, entries: np.ndarray, handles: np.ndarray, own: bool) -> Callable[[], None] | None: ...


class PagesAhead:
    """Requests whose plain page lists end in an empty page, and how they get it."""

    def __init__(self, buckets: Lists, requests: int, layers: int) -> None:
        self._buckets, self._shape = buckets, (layers, buckets.kv_heads)
        self.near = buckets.page_tokens // 2  # rows left in open pages from which the next page may be allocated
        self.soon = buckets.page_tokens // 4  # rows left at which some are allocated
        self.even = np.zeros(requests, bool)  # requests with equally many tokens in all lists, if `left` is known
        self.reserve = np.zeros(0, np.int32)  # handles of pages that are in no list
        self._page = np.zeros(requests, np.int64)  # index of the page in its lists, 0 for none; it may be in use
        self._any = False  # False if no request has one
        self._wait = 0  # number of calls to skip, after memory was short
        self.missing = 0  # pages that the reserve lacks

    def there(self, requests: np.ndarray | slice = slice(None), layers: int | slice = slice(None)) -> np.ndarray:
        """True for places whose lists end in an empty page, ``[requests, layers]``, or ``[requests]`` of a layer."""
        page, count = self._page[requests], self._buckets.host_count[requests, layers, 0, 0]
        page = page.reshape(-1, *[1] * (count.ndim - 1))
        return (page > 0) & (page * self._buckets.page_tokens >= count)

    def update_even(self, requests: np.ndarray) -> None:
        """Determine which requests have equally many tokens in all lists."""
        count = self._buckets.host_count[requests, :, :, 0]
        self.even[requests] = (count == count[:, :1, :1]).all((1, 2))

    def take(self, requests: np.ndarray, left: np.ndarray, of: int) -> np.ndarray:
        """Allocate the next pages of some even requests with ``left`` rows in their open ones; returns which.

        As many are chosen that all have their pages when the first needs them, and an eighth of the ``of`` growing
        requests if one launch serves that many; none if memory is short.
        """
        buckets, p = self._buckets, self._buckets.page_tokens
        if self._wait:
            self._wait -= 1
            return requests[:0]
        most = min(self._next_pages.most, max(of // 8, FEWEST)) if buckets.by_cuda else 0
        many = max(-(-len(requests) // max(int(left.min()), 1)), most)
        chosen = requests if many >= len(requests) else requests[left.argsort(kind="stable")[:many]]
        pages = (buckets.host_count[chosen, 0, 0, 0] + (p - 1)) // p
        if int(pages.max(initial=0)) >= buckets.max_pages:
            chosen, pages = chosen[pages < buckets.max_pages], pages[pages < buckets.max_pages]
        step = most or max(len(chosen), 1)
        for first in range(0, len(chosen), step):
            part = slice(first, first + step)
            if not self._take(chosen[part], pages[part], launch=most > 0):
                self._wait = p
                return chosen[:first]
        kept = min(max(of // 4, FEWEST), of, RESERVE)  # no fewer than one launch serves
        self.missing = max(kept * self._shape[0] * self._shape[1] - len(self.reserve), 0)
        return chosen

    def fill_reserve(self) -> None:
        """Add missing pages to the reserve, at most those of one slab; none if memory is short."""
        pool = self._buckets.pool
        try:
            self._add(1, min(self.missing, pool.per_slab[0]))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.missing = 0

    def _add(self, least: int, most: int) -> None:
        more = self._buckets.pool.take_some(0, least, most)
        self.reserve = np.concatenate([self.reserve, more]) if len(self.reserve) else more
        self.missing = max(self.missing - len(more), 0)

    def _take(self, requests: np.ndarray, numbers: np.ndarray, launch: bool) -> bool:
        """Enter pages in the lists of requests, at these indices; False if memory is short."""
        buckets, (layers, heads) = self._buckets, self._shape
        n = len(requests) * layers * heads
        try:
            if len(self.reserve) < n:
                self._add(n - len(self.reserve), 0)
            handles = self.reserve[:n]
            if not launch:
                entries = (buckets.plain_lists[requests] + numbers[:, None, None]).reshape(-1)
                run = buckets.prepare_new_pages(entries, handles.astype(np.int64), own=False)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        self.reserve = self.reserve[n:]
        buckets.host_table[requests, :, :, 0, numbers] = handles.reshape(-1, layers, heads)
        self._page[requests] = numbers
        self._any = True
        if launch:
            self._next_pages(requests, numbers, handles)
        elif run is not None:
            run()
        return True

    @functools.cached_property
    def _next_pages(self) -> NextPages:
        return NextPages(self._buckets)

    def give_back(self, requests: Sequence[int] | np.ndarray) -> None:
        """Free the empty pages at the end of the lists of requests; allocates nothing on the device."""
        if not self._any:
            return
        buckets, ids = self._buckets, np.unique(np.asarray(requests, np.int64))
        there = self.there(ids)
        for i in np.flatnonzero(there.any(1)).tolist():
            request, layers, page = int(ids[i]), there[i], int(self._page[ids[i]])
            handles = buckets.host_table[request, layers, :, 0, page].astype(np.int64)
            buckets.host_table[request, layers, :, 0, page] = -1
            if buckets.device.type != "cpu":
                of_request = buckets.page_table[request, :, :, 0, page]
                for part in [slice(None)] if layers.all() else np.flatnonzero(layers).tolist():
                    of_request[part].fill_(-1)
            buckets.pool.release(handles.reshape(-1))
            buckets.left[request] = -1
            buckets.version += 1
        self._page[ids] = 0
        self._any = bool(self._page.any())
        if not self._any:
            self.empty_reserve()

    def empty_reserve(self) -> None:
        """Return the reserve to the pool."""
        self._buckets.pool.release(self.reserve)
        self.reserve, self.missing = self.reserve[:0], 0
