"""Buckets: which pages hold the tokens of a (request, layer, KV head) in each tier.

    page_table  int32 [requests, layers, kv_heads, tiers, max_pages]   handles, -1 for none
    count       int32 [requests, layers, kv_heads, tiers]              tokens; slot s is row s % P of page s // P

Both are device tensors at fixed addresses. The host works on its own copy (on the CPU the same memory) and uploads what
changed. Tier 0 is plain rows. Tokens of a bucket have no order: one of the last fills the slot of a token that leaves,
so pages are full up to the count. `cache.move.apply` moves tokens, bucket_reads.py reads them; this file adds and
removes pages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.backends import resolve
from kvstrata.layout.format import MAX_TIERS

from . import table_cuda
from .bucket_reads import BucketReads, runs, spans
from .page import PageFormat
from .pages_ahead import PagesAhead
from .pool import Pool
from .request_list import RequestList
from .scratch import Arena
from .tokens import DROP, NEW, Tokens
from .transaction import Transaction

__all__ = ["DROP", "NEW", "Buckets", "Tokens"]


@dataclass(frozen=True)
class Exchanged:
    """Pages that places gained and lost: ``entered`` and ``left`` int64 ``[n, 2]``, index in the flat table, handle.

    Those that left have handle -1. ``before``: tokens of each bucket. ``added``: new pages of each tier.
    """

    before: np.ndarray
    entered: np.ndarray
    left: np.ndarray
    added: list[np.ndarray]


@dataclass(frozen=True)
class Short:
    """Requests that need a page for one more plain token."""

    requests: np.ndarray
    rows: np.ndarray  # index of each in the list that was passed
    pages: np.ndarray  # int [requests, layers]: new pages; copies of shared ones are not included
    layers: np.ndarray  # bool [requests, layers]: where a page is needed
    after: np.ndarray  # tokens that fit the open pages in all layers, once these pages exist
    whole: bool = False  # every bucket needs one


class Buckets(BucketReads):
    """The page tables of all requests, and the pool that their pages come from."""

    def __init__(
        self, pool: Pool, page_formats: Sequence[PageFormat], requests: int, layers: int, kv_heads: int, max_pages: int
    ) -> None:
        self.pool, self.page_formats = pool, tuple(page_formats)
        self.kv_heads, self.max_pages = kv_heads, max_pages
        self.page_tokens = page_formats[0].format.page_tokens
        self.device = pool.device
        self.heads = np.arange(kv_heads)
        self.backend = "auto"  # backend of moves between tiers
        self.arena = Arena(self.device, pool.streams)  # scratch of plans and moves on a CUDA device
        self._lease = self.arena.lease()  # buffers that table updates read
        self.ids: dict[bytes, torch.Tensor] = {}  # lists of requests that were appended to, on the device
        self.lists: dict[tuple[int, ...], RequestList] = {}  # of requests that advanced
        self._last: tuple[Sequence[int], RequestList | None] = ((), None)  # the last list that was passed
        self.left = np.full(requests, -1)  # tokens that fit the unshared open pages in all layers; -1: unknown
        self.least = 0  # minimum of `left` over the requests that `short` was last called with
        self.version = 0  # incremented when counts or owners change, except for a token that `append_one` adds
        self.last_short: tuple[int, np.ndarray, Short | None] | None = None  # last result of `short`, by version
        self.plan_params: tuple[object, bytes] | None = None  # parameters of the planner, by policy
        self._pages = np.zeros((requests, layers, len(page_formats)), np.int64)  # per place and tier
        self._counted = np.zeros(requests, bool)  # requests whose `_pages` are up to date
        plain = np.arange(requests * layers * kv_heads).reshape(requests, layers, kv_heads)
        self.plain_lists = plain * (len(page_formats) * max_pages)  # start of each in the flat table
        offsets = [[kind.position_offset, kind.importance_offset] for kind in page_formats]
        padding = [0] * (2 * (MAX_TIERS - len(page_formats)))
        self.offsets = (*itertools.chain(*offsets), *padding)  # in the form that kernels take
        self.side_offsets = torch.tensor(offsets, device=self.device)
        shape = (requests, layers, kv_heads, len(page_formats))
        table = torch.full((*shape, max_pages), -1, dtype=torch.int32, device="cpu")
        count = torch.zeros(shape, dtype=torch.int32, device="cpu")
        self.host_table, self.host_count = table.numpy(), count.numpy()
        if self.device.type != "cpu":  # plain counts, which change at every step, are one block, layer by layer
            self.host_count = np.zeros((shape[3], layers, requests, kv_heads), np.int32).transpose(2, 1, 3, 0)
        self.page_table, self.count = table.to(self.device), count.to(self.device)
        self.ahead = PagesAhead(self, requests, layers)

    def push(self, requests: Sequence[int] | np.ndarray) -> None:
        """Upload the host's tables, without allocating on the device; one copy per run of consecutive requests."""
        ids = np.sort(np.asarray(requests, np.int64))
        if self.device.type == "cpu" or not len(ids):
            return
        for run in np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1):
            part = slice(int(run[0]), int(run[-1]) + 1)
            for x, host in ((self.page_table, self.host_table), (self.count, self.host_count)):
                x[part].copy_(torch.from_numpy(host[part]))

    def forget(self, requests: int | slice | np.ndarray = slice(None), change: Transaction | None = None) -> None:
        """Call when counts or owners of requests change; derived values are recomputed when needed."""
        if change is not None:
            change.undo(self.forget)
        self.version += 1
        self.left[requests] = -1
        self._counted[requests] = False

    def pages_of(self, requests: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Pages of each request by layer and tier, int64 ``[requests, layers, tiers]``, including shared ones."""
        known = self._counted[requests]
        if not known.all():
            new = np.arange(len(self.left))[requests][~known]
            self._pages[new] = ((self.host_count[new] + (self.page_tokens - 1)) // self.page_tokens).sum(2)
            self._counted[new] = True
        return self._pages[requests]

    def listed(self, requests: Sequence[int]) -> RequestList:
        """A list of requests with values derived from it, cached: it rarely changes from step to step.

        ``requests`` are not modified later.
        """
        if self._last[1] is not None and self._last[0] is requests:
            return self._last[1]
        key = tuple(requests)
        known = self.lists.get(key)
        if known is None:
            if len(self.lists) >= 64:
                self.lists.clear()
            self.lists[key] = known = RequestList(key, len(self.left))
        self._last = (requests, known)
        return known

    def device_ids(self, requests: np.ndarray) -> torch.Tensor:
        """Requests on the device, int32, cached."""
        key = requests.tobytes()
        if key not in self.ids:
            if len(self.ids) >= 64:
                self.ids.clear()
            self.ids[key] = self.pool.to_device(requests.astype(np.int32))
        return self.ids[key]

    def short(self, requests: np.ndarray, where: np.ndarray | slice | None = None) -> Short | None:
        """Requests that need a page for one more plain token, in some layer; None if there is none.

        ``where``: the requests as a slice, if they are consecutive.
        """
        left = self.left[requests if where is None else where]
        self.least = int(left.min())
        if self.least > 0:
            return None
        if self.last_short is None or self.last_short[0] != self.version or self.last_short[1] is not requests:
            short = self._find_short(requests, np.flatnonzero(left <= 0))
            self.last_short = (self.version, requests, short)
        return self.last_short[2]

    def _find_short(self, requests: np.ndarray, rows: np.ndarray) -> Short | None:
        """`short` of the requests in these rows, whose open pages may be full."""
        some = requests[rows]
        self.version += 1  # invalidates whatever relies on `left` being unknown
        self.ahead.give_back(some)  # requests that were appended to in another way
        self.ahead.update_even(some)
        filled = self.host_count[some, :, :, 0] & (self.page_tokens - 1)  # rows of the open page
        if not filled.any():
            pages = np.full(filled.shape[:2], self.kv_heads)
            self.left[some] = 0
            return Short(some, rows, pages, pages > 0, np.full(len(some), self.page_tokens), whole=True)
        pages = (filled == 0).sum(2)
        layers = pages > 0
        if self.pool.shares:
            row, layer, head = np.nonzero(filled)
            page = self.host_count[some[row], layer, head, 0] // self.page_tokens
            shared = self.pool.owners(self.host_table[some[row], layer, head, 0, page]) > 1
            layers[row[shared], layer[shared]] = True
        after = self.page_tokens - filled.max((1, 2)).astype(np.int64)
        lacking = layers.any(1)
        self.left[some] = np.where(lacking, 0, after)
        if not lacking.any():
            return None
        return Short(some[lacking], rows[lacking], pages[lacking], layers[lacking], after[lacking])

    def _set_pages(
        self, change: Transaction, index: tuple[np.ndarray, ...], handles: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Write handles to the table at ``index``, on the device when the transaction completes.

        Returns flat indices and handles on the device; None if host and device share the table.
        """
        change.set(self.host_table, index, handles)
        if self.device.type == "cpu" or not len(handles):
            return None
        flat = np.ravel_multi_index(index, self.host_table.shape)
        both = self.pool.to_device(np.stack([flat, handles]))
        places, values, table = both[0], both[1].int(), self.page_table.view(-1)
        change.launch(lambda: table.__setitem__(places, values))
        return places, values

    def room(self, layer: int, requests: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Counts of the plain buckets ``[R, H]`` if new tokens fit their last pages, unshared; else None."""
        count = self.host_count[requests, layer, :, 0].astype(np.int64)
        if (-count % self.page_tokens < lengths[:, None]).any():
            return None
        if self.pool.shares:
            growing = lengths > 0
            page = count[growing] // self.page_tokens
            last = self.host_table[requests[growing, None], layer, self.heads, 0, page]
            if (self.pool.owners(last) > 1).any():
                return None
        return count

    def make_room(
        self, change: Transaction, layer: int | None, requests: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Allocate or copy pages for new plain tokens, new ones zeroed; returns the counts before.

        Counts are ``[R, H]``, or ``[R, L, H]`` for ``layer`` None: all layers.
        """
        p, of_layer = self.page_tokens, slice(None) if layer is None else layer
        count = self.host_count[requests, of_layer, :, 0].astype(np.int64)
        lists = self.plain_lists[requests, of_layer]
        new = lengths.reshape(-1, *[1] * (count.ndim - 1))
        if self.pool.shares:
            self._own_open_pages(change, count, lists, new)
        before = (count + (p - 1)) // p
        missing = (count + (new + (p - 1))) // p - before
        self._pages[requests, of_layer, 0] += missing.sum(-1)
        change.undo(self.forget)
        first, missing = (lists + before).reshape(-1), missing.reshape(-1)
        if missing.max(initial=0) <= 1:
            entries = first[missing > 0]
        else:
            entries = np.repeat(first - (np.cumsum(missing) - missing), missing) + np.arange(missing.sum())
        self._new_pages(change, entries, change.allocate(0, len(entries)))
        return count

    def make_room_for_one(self, change: Transaction, short: Short) -> None:
        """`make_room` for one token of each of these requests in all layers."""
        if not short.whole:
            self.make_room(change, None, short.requests, np.ones_like(short.requests))
            return
        pages = self.host_count[short.requests, :, :, 0] // self.page_tokens
        entries = (self.plain_lists[short.requests] + pages).reshape(-1)
        self._pages[short.requests, :, 0] += self.kv_heads
        change.undo(self.forget)
        self._new_pages(change, entries, change.allocate(0, len(entries)))

    def _own_open_pages(self, change: Transaction, count: np.ndarray, lists: np.ndarray, new: np.ndarray) -> None:
        """Copy open plain pages that are shared with other requests and will be written."""
        p = self.page_tokens
        growing = ((count % p > 0) & (new > 0)).reshape(-1)
        entries = (lists + count // p).reshape(-1)[growing]
        last = self.host_table.reshape(-1)[entries].astype(np.int64)
        shared = self.pool.owners(last) > 1
        if shared.any():
            old, entries = last[shared], entries[shared]
            own = change.allocate(0, len(old))
            self.pool.copy(old, own, 0)
            self._set_pages(change, np.unravel_index(entries, self.host_table.shape), own)
            change.release(old)

    def _new_pages(self, change: Transaction, entries: np.ndarray, handles: np.ndarray) -> None:
        """Enter zeroed plain pages at entries of the flat table that have none yet."""
        if not len(entries):
            return
        table = self.host_table.reshape(-1)
        change.undo(lambda: table.__setitem__(entries, -1))
        table[entries] = handles
        run = self.prepare_new_pages(entries, handles, own=change.has_launches)
        if run is not None:
            change.launch(run)

    def prepare_new_pages(self, entries: np.ndarray, handles: np.ndarray, own: bool) -> Callable[[], None] | None:
        """Function that zeroes pages and enters them in the device's table, if it is separate from the host's.

        ``own``: queued launches may still read the previous list of pages, so this one needs its own buffer.
        """
        if self.device.type == "cpu":
            self.pool.clear(handles, 0)
            return None
        if self.by_cuda:
            listed = np.concatenate([entries, handles])
            if own:
                both = self.pool.to_device(listed)
            else:
                both = self._lease.take("entries", len(listed), torch.int64)
                self.pool.fill(both, listed)
            return self._pages_to_table.prepare(both)
        both = self.pool.to_device(np.stack([entries, handles]))
        self.pool.clear_at(both[1], 0)
        values, on_device = both[1].int(), self.page_table.view(-1)
        return lambda: on_device.__setitem__(both[0], values)

    @functools.cached_property
    def _pages_to_table(self) -> table_cuda.NewPages:
        return table_cuda.NewPages(self)

    @functools.cached_property
    def by_cuda(self) -> bool:
        """True if kernels in CUDA C++ change the tables."""
        return resolve("auto", self.device) == "cuda"

    def exchange_pages(
        self,
        change: Transaction,
        requests: np.ndarray,
        layers: np.ndarray,
        left: np.ndarray,
        came: np.ndarray,
        holes: np.ndarray,
    ) -> torch.Tensor:
        """`exchange`, with new pages zeroed and the device's tables updated when the transaction completes.

        Returns the device's table as it will be.
        """
        exchanged = self.exchange(change, requests, layers, left, came, holes)
        for tier, added in enumerate(exchanged.added):
            self.pool.clear(added, tier)
        if self.device.type == "cpu":
            return self.page_table
        both = self.pool.to_device(np.concatenate([exchanged.entered, exchanged.left]))
        index, handles, table = both[:, 0], both[:, 1].int(), self.page_table.view(-1)
        place = self.pool.to_device(requests * self.page_table.shape[1] + layers)
        counts, count = self.pool.to_device(self.host_count[requests, layers]), self.count.flatten(0, 1)
        change.launch(lambda: table.__setitem__(index, handles))
        change.launch(lambda: count.__setitem__(place, counts))
        after = self.page_table.clone()
        after.view(-1)[index] = handles
        return after

    def exchange(
        self,
        change: Transaction,
        requests: np.ndarray,
        layers: np.ndarray,
        left: np.ndarray,
        came: np.ndarray,
        holes: np.ndarray,
    ) -> Exchanged:
        """Update the host's tables and counts: release pages past the end, copy pages that are shared and written.

        ``left``, ``came``, ``holes``: int64 per bucket. The caller zeroes new plain pages.
        """
        tiers, p, table = len(self.page_formats), self.page_tokens, self.host_table.reshape(-1)
        counts = self.host_count[requests, layers]
        before = counts.reshape(-1).astype(np.int64)
        after = before - left + came
        pages, pages_after = (before + (p - 1)) // p, (after + (p - 1)) // p
        first, grown = self._lists(requests, layers), pages_after - pages
        gone, more = runs(first + pages_after, np.maximum(-grown, 0)), np.maximum(grown, 0)
        entries, released = runs(first + pages, more), table[gone].astype(np.int64)
        of_tier = change.allocate_all(dict(enumerate(more.reshape(-1, tiers).sum(0).tolist())))
        handles, tier = np.empty(len(entries), np.int64), np.repeat(np.arange(len(more)) % tiers, more)
        handles[tier.argsort(kind="stable")] = np.concatenate(list(of_tier.values()))
        old = np.full(len(entries), -1)
        if self.pool.shares:
            written = np.where(holes > 0, 0, np.where(came > 0, (before - left) // p, pages))  # first page written
            shared, of_shared = self._shared(first, written, np.minimum(pages, pages_after))
            if len(shared):
                theirs, own = table[shared].astype(np.int64), np.zeros(len(shared), np.int64)
                for t in np.unique(of_shared).tolist():
                    here = of_shared == t
                    own[here] = change.allocate(t, int(here.sum()))
                    self.pool.copy(theirs[here], own[here], t)
                released, old = np.concatenate([released, theirs]), np.concatenate([old, theirs])
                entries, handles = np.concatenate([entries, shared]), np.concatenate([handles, own])
        change.release(released)
        back = released[: len(gone)]

        def restore() -> None:
            table[entries], table[gone], self.host_count[requests, layers] = old, back, counts

        change.undo(restore)
        table[entries], table[gone] = handles, -1
        self.host_count[requests, layers] = after.reshape(counts.shape)
        self.forget(requests, change)
        entered, left_table = np.empty((len(entries), 2), np.int64), np.full((len(gone), 2), -1)
        entered[:, 0], entered[:, 1], left_table[:, 0] = entries, handles, gone
        return Exchanged(before, entered, left_table, list(of_tier.values()))

    def _lists(self, requests: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Start of each bucket's page list in the flat table, ``[places * kv_heads * tiers]``."""
        buckets = self.kv_heads * len(self.page_formats)
        places = requests * self.host_table.shape[1] + layers
        return (places[:, None] * (buckets * self.max_pages) + np.arange(buckets) * self.max_pages).reshape(-1)

    def _shared(self, lists: np.ndarray, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Index in the flat table and tier of the shared ones among pages ``first .. end - 1`` of every bucket."""
        bucket, page = spans(first, end)
        entries = lists[bucket] + page
        many = self.pool.owners(self.host_table.reshape(-1)[entries]) > 1
        return entries[many], bucket[many] % len(self.page_formats)
