"""Buckets: which pages hold the tokens of a (request, layer, KV head) in each tier, and how tokens move between them.

    table  int32 [requests, layers, kv_heads, tiers, max_pages]   handles, -1 for none
    count  int32 [requests, layers, kv_heads, tiers]              tokens; slot s is row s % P of page s // P

Both are device tensors at fixed addresses; the host works on its own copy (on the CPU it is the same memory) and
copies what changed. Tier 0 is plain rows. The order of tokens in a bucket means nothing: one that leaves is replaced
by one of the last, so pages are full up to the count.

Every change of a bucket is one call of `move`: a flat list of tokens, new ones among them, and the tier each goes to.
It reads first, then gives pages back, then takes pages and writes, so it never holds old and new at once; a page with
other owners is left to them and written anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .append_op import Job, append_rows
from .pages import PageKind, Rows
from .pool import Pool

NEW = -1  # the tier of a token that is in no bucket yet
DROP = -1  # the target of one that leaves the cache


@dataclass(frozen=True)
class Tokens:
    """Tokens of some requests in one layer; flat ``[n]``. ``bucket`` is (index of the request) * kv_heads + head.

    ``slot`` counts in the bucket; for new tokens it is the row of the values that come with them.
    """

    bucket: torch.Tensor
    tier: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    importance: torch.Tensor  # float32

    def __len__(self) -> int:
        return len(self.bucket)

    def __getitem__(self, at: torch.Tensor) -> Tokens:
        return Tokens(self.bucket[at], self.tier[at], self.slot[at], self.position[at], self.importance[at])

    def renumbered(self, index: dict[int, int], kv_heads: int) -> Tokens:
        """The same tokens with their requests at other indices."""
        table = torch.zeros(max(index) + 1, dtype=torch.int64, device=self.bucket.device)
        for old, new in index.items():
            table[old] = new
        bucket = table[self.bucket // kv_heads] * kv_heads + self.bucket % kv_heads
        return Tokens(bucket, self.tier, self.slot, self.position, self.importance)

    @staticmethod
    def cat(parts: Sequence[Tokens]) -> Tokens:
        names = ("bucket", "tier", "slot", "position", "importance")
        return Tokens(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _ranks(group: np.ndarray, groups: int) -> np.ndarray:
    """The number of each element among those of its group, in order."""
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(np.bincount(group, minlength=groups)) - np.bincount(group, minlength=groups)
    ranks = np.empty(len(group), np.int64)
    ranks[order] = np.arange(len(group)) - starts[group[order]]
    return ranks


@dataclass(frozen=True)
class _Change:
    """What `move` does to one tier."""

    taken: np.ndarray  # flat indices of tokens that are read: those that leave for another tier, then the fillers
    leavers: int
    filled_bucket: np.ndarray  # where the fillers go
    filled_slot: np.ndarray
    arrivals: np.ndarray  # flat indices, and where they go
    arrival_slot: np.ndarray
    count: np.ndarray  # [buckets] afterwards


class Buckets:
    """The page tables of all requests, and the pool under them."""

    def __init__(
        self, pool: Pool, kinds: Sequence[PageKind], requests: int, layers: int, kv_heads: int, max_pages: int
    ) -> None:
        self.pool, self.kinds = pool, tuple(kinds)
        self.kv_heads, self.max_pages = kv_heads, max_pages
        self.page_tokens = kinds[0].format.page_tokens
        self.device = pool.device
        self.heads = np.arange(kv_heads)
        shape = (requests, layers, kv_heads, len(kinds))
        table = torch.full((*shape, max_pages), -1, dtype=torch.int32)
        count = torch.zeros(shape, dtype=torch.int32)
        self.host_table, self.host_count = table.numpy(), count.numpy()
        self.table, self.count = table.to(self.device), count.to(self.device)

    def push(self, layer: int, requests: Sequence[int]) -> None:
        """The host's tables to the device."""
        if self.device.type == "cpu":
            return
        for request in requests:
            self.table[request, layer].copy_(torch.from_numpy(self.host_table[request, layer]))
            self.count[request, layer].copy_(torch.from_numpy(self.host_count[request, layer]))

    def _push_pages(self, at: tuple[np.ndarray, ...], handles: np.ndarray) -> None:
        """New handles at these indices of the table, here and on the device."""
        self.host_table[at] = handles
        if self.device.type != "cpu" and len(handles):
            flat = np.ravel_multi_index(at, self.host_table.shape)
            both = self.pool.to_device(np.stack([flat, handles]))
            self.table.view(-1)[both[0]] = both[1].int()

    def room(self, layer: int, requests: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Counts of the plain buckets ``[R, H]``, if new tokens fit their last pages and nobody else owns these."""
        count = self.host_count[requests, layer, :, 0].astype(np.int64)
        if (-count % self.page_tokens < lengths[:, None]).any():
            return None
        if self.pool.shares:
            some = lengths > 0
            last = self.host_table[requests[some, None], layer, self.heads, 0, count[some] // self.page_tokens]
            if (self.pool.owners(last) > 1).any():
                return None
        return count

    def make_room(self, layer: int, requests: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Pages of its own for new plain tokens, empty slots zero; the counts before, ``[R, H]``."""
        p = self.page_tokens
        count = self.host_count[requests, layer, :, 0].astype(np.int64)
        row, head = np.nonzero((count % p > 0) & (lengths[:, None] > 0))
        at = (requests[row], np.full(len(row), layer), head, np.zeros_like(row), count[row, head] // p)
        last = self.host_table[at].astype(np.int64)
        shared = self.pool.owners(last) > 1
        if shared.any():
            old = last[shared]
            new = self.pool.allocate(0, len(old))
            self.pool.copy(old, new, 0)
            self._push_pages(tuple(x[shared] for x in at), new)
            self.pool.release(old)
        before, after = -(-count // p), -(-(count + lengths[:, None]) // p)
        missing = (after - before).reshape(-1)
        bucket = np.repeat(np.arange(len(missing)), missing)
        number = np.arange(len(bucket)) - np.repeat(np.cumsum(missing) - missing, missing)
        row, head = bucket // self.kv_heads, bucket % self.kv_heads
        new = self.pool.allocate(0, len(bucket))
        self.pool.clear(new, 0)
        index = before.reshape(-1)[bucket] + number
        self._push_pages((requests[row], np.full(len(row), layer), head, np.zeros_like(row), index), new)
        return count

    def append(self, job: Job) -> None:
        """Plain rows into the pages that `room` or `make_room` found; the counts follow."""
        append_rows(job)
        self.host_count[job.requests, job.layer, :, 0] = job.count + job.lengths[:, None]

    def _pages_of(self, layer: int, requests: Sequence[int], tier: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bucket, index in the bucket's list and handle of every page in use."""
        count = self.host_count[list(requests), layer, :, tier].reshape(-1)
        pages = -(-count.astype(np.int64) // self.page_tokens)
        bucket = np.repeat(np.arange(len(pages)), pages)
        index = np.arange(len(bucket)) - np.repeat(np.cumsum(pages) - pages, pages)
        table = self.host_table[list(requests), layer, :, tier].reshape(-1, self.max_pages)
        return bucket, index, table[bucket, index].astype(np.int64)

    def snapshot(self, layer: int, requests: Sequence[int]) -> Tokens:
        """All tokens of these requests: tier by tier, bucket by bucket, slot by slot."""
        parts = []
        for tier, kind in enumerate(self.kinds):
            bucket, index, handles = self._pages_of(layer, requests, tier)
            start = kind.format.page_bytes
            side = self.pool.read(handles, start, kind.side_bytes)
            count = self.host_count[list(requests), layer, :, tier].reshape(-1).astype(np.int64)
            slot = index[:, None] * self.page_tokens + np.arange(self.page_tokens)
            used = torch.from_numpy(slot < count[bucket][:, None]).to(self.device)
            n = int(used.sum())
            spread = torch.from_numpy(np.broadcast_to(bucket[:, None], slot.shape).copy()).to(self.device)
            parts.append(
                Tokens(
                    spread[used],
                    torch.full((n,), tier, device=self.device),
                    torch.from_numpy(slot).to(self.device)[used],
                    kind.positions(side, start)[used].long(),
                    kind.importance(side, start)[used],
                )
            )
        return Tokens.cat(parts)

    def read(self, layer: int, requests: Sequence[int], tokens: Tokens, tier: int) -> Rows:
        """The rows of tokens that are all in one tier."""
        bucket, slot = tokens.bucket.cpu().numpy(), tokens.slot.cpu().numpy()
        keys, place = np.unique(bucket * self.max_pages + slot // self.page_tokens, return_inverse=True)
        pages = self.pool.read(self._handles(layer, requests, tier)[keys], 0, self.kinds[tier].stride)
        return self.kinds[tier].read(pages, self._to(place), tokens.slot % self.page_tokens)

    def _handles(self, layer: int, requests: Sequence[int], tier: int) -> np.ndarray:
        """Flat ``[buckets * max_pages]``, a copy."""
        return self.host_table[list(requests), layer, :, tier].reshape(-1).astype(np.int64)

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array.reshape(-1))).to(self.device)

    def _changes(self, layer: int, requests: Sequence[int], tokens: Tokens, target: torch.Tensor) -> list[_Change]:
        bucket, tier, slot, to = (
            t.cpu().numpy().astype(np.int64) for t in (tokens.bucket, tokens.tier, tokens.slot, target)
        )
        buckets = len(requests) * self.kv_heads
        changes = []
        for t in range(len(self.kinds)):
            before = self.host_count[list(requests), layer, :, t].reshape(-1).astype(np.int64)
            leaving, arriving = (tier == t) & (to != t), (to == t) & (tier != t)
            kept = before - np.bincount(bucket[leaving], minlength=buckets)
            holes = np.flatnonzero(leaving & (slot < kept[bucket]))
            fillers = np.flatnonzero((tier == t) & ~leaving & (slot >= kept[bucket]))
            holes, fillers = (x[np.lexsort((slot[x], bucket[x]))] for x in (holes, fillers))
            arrivals = np.flatnonzero(arriving)
            movers = np.flatnonzero(leaving & (to != DROP))
            changes.append(
                _Change(
                    np.concatenate([movers, fillers]),
                    len(movers),
                    bucket[holes],
                    slot[holes],
                    arrivals,
                    kept[bucket[arrivals]] + _ranks(bucket[arrivals], buckets),
                    kept + np.bincount(bucket[arrivals], minlength=buckets),
                )
            )
        return changes

    def move(
        self,
        layer: int,
        requests: Sequence[int],
        tokens: Tokens,
        target: torch.Tensor,
        fresh: Rows | None,
        centre: torch.Tensor,
    ) -> None:
        """Bring every token to its target tier, or out (`DROP`).

        ``tokens`` are all tokens of the buckets, or at least all of those that move and of the tiers they leave.
        ``fresh`` are the plain rows of new tokens; ``centre [buckets, D]`` is subtracted from plain K on its way
        into codes.
        """
        buckets = len(requests) * self.kv_heads
        changes = self._changes(layer, requests, tokens, target)
        bucket_of = tokens.bucket.cpu().numpy().astype(np.int64)
        slot_of = tokens.slot.cpu().numpy().astype(np.int64)
        pages_of = slot_of // self.page_tokens

        # Read what moves and the pages that will be written.
        taken: list[Rows | None] = []
        writes: list[tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]] = []
        release: list[np.ndarray] = []
        for t, change in enumerate(changes):
            kind, handles = self.kinds[t], self._handles(layer, requests, t)
            keys = bucket_of[change.taken] * self.max_pages + pages_of[change.taken]
            taken.append(None)
            if len(keys):
                pages, place = np.unique(keys, return_inverse=True)
                staged = self.pool.read(handles[pages], 0, kind.stride)
                slot = self._to(slot_of[change.taken] % self.page_tokens)
                taken[t] = kind.read(staged, self._to(place), slot)
            to_bucket = np.concatenate([change.filled_bucket, bucket_of[change.arrivals]])
            to_slot = np.concatenate([change.filled_slot, change.arrival_slot])
            keys, place = np.unique(to_bucket * self.max_pages + to_slot // self.page_tokens, return_inverse=True)
            staged = torch.zeros(len(keys), kind.stride, dtype=torch.uint8, device=self.device)
            there = handles[keys] >= 0
            if there.any():
                staged[self._to(np.flatnonzero(there))] = self.pool.read(handles[keys[there]], 0, kind.stride)
            writes.append((keys, place, to_slot, staged))

            # Pages past the end go; so does our share of a page that others own too.
            table = handles.reshape(buckets, self.max_pages)
            pages_after = -(-change.count // self.page_tokens)
            past = (np.arange(self.max_pages) >= pages_after[:, None]) & (table >= 0)
            shared = np.zeros(buckets * self.max_pages, bool)
            shared[keys[there]] = self.pool.owners(handles[keys[there]]) > 1
            gone = past | shared.reshape(past.shape)
            release.append(table[gone])
            table[gone] = -1
            self._store(layer, requests, t, table, change.count)

        for handles in release:
            self.pool.release(handles)

        for t, (change, (keys, place, to_slot, staged)) in enumerate(zip(changes, writes, strict=True)):
            if not len(keys):
                continue
            parts = []
            own = taken[t]
            if own is not None and len(change.filled_slot):
                parts.append(own[torch.arange(change.leavers, len(change.taken), device=self.device)])
            if len(change.arrivals):
                parts.append(self._arrivals(t, change.arrivals, tokens, changes, taken, fresh, centre))
            table = self._handles(layer, requests, t)
            missing = keys[table[keys] < 0]
            table[missing] = self.pool.allocate(t, len(missing))
            self._store(layer, requests, t, table.reshape(buckets, self.max_pages), change.count)
            self.kinds[t].write(staged, self._to(place), self._to(to_slot % self.page_tokens), Rows.cat(parts))
            self.pool.write(table[keys], 0, staged)
        self.push(layer, requests)

    def _store(self, layer: int, requests: Sequence[int], tier: int, table: np.ndarray, count: np.ndarray) -> None:
        self.host_table[list(requests), layer, :, tier] = table.reshape(len(requests), self.kv_heads, -1)
        self.host_count[list(requests), layer, :, tier] = count.reshape(len(requests), self.kv_heads)

    def _arrivals(
        self,
        tier: int,
        arrivals: np.ndarray,
        tokens: Tokens,
        changes: Sequence[_Change],
        taken: Sequence[Rows | None],
        fresh: Rows | None,
        centre: torch.Tensor,
    ) -> Rows:
        """The rows of these tokens, encoded for the tier, in this order."""
        origin = tokens.tier.cpu().numpy()[arrivals]
        parts, order = [], []
        for source in np.unique(origin).tolist():
            mine = np.flatnonzero(origin == source)
            index = arrivals[mine]
            if source == NEW:
                assert fresh is not None
                rows, kind = fresh[tokens.slot[self._to(index)]], self.kinds[0]
            else:
                change, own = changes[source], taken[source]
                assert own is not None
                # Leavers were taken in ascending order of their flat index.
                rows = own[self._to(np.searchsorted(change.taken[: change.leavers], index))]
                kind = self.kinds[source]
            if tier > 0:
                of_rows = centre[tokens.bucket[self._to(index)]] if kind.format.plain else None
                rows = self.kinds[tier].encode(rows, kind, of_rows)
            parts.append(rows)
            order.append(mine)
        rows = Rows.cat(parts)
        return rows[self._to(np.argsort(np.concatenate(order), kind="stable"))]
