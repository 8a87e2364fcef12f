"""Memory accounting of a cache, and the invariants that hold after every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.policy.budget import Memory
from kvstrata.cache.storage.scratch import scratch_bytes

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState

SCALE_BITS = 16  # fp16, one for K and one for V of each token and head


def fixed(cache: CacheState) -> dict[str, int]:
    """Bytes that are allocated independently of the tokens stored."""
    tensors = {
        "page_table": cache.buckets.page_table,
        "count": cache.buckets.count,
        "centre": cache.centre,
        "balance": torch.empty(0, dtype=torch.int8) if cache.balance is None else cache.balance,
        "direction": torch.empty(0, dtype=torch.int8) if cache.direction is None else cache.direction,
        "seq_lens": cache._device_lengths,
        "slab_pointers": cache.pool.pointers,
    }
    return {name: tensor.nbytes for name, tensor in tensors.items()} | {"reports": cache.reports.nbytes}


def memory(cache: CacheState) -> Memory:
    """Memory of a cache, computed from host tables without synchronising."""
    counts = cache.buckets.host_count[list(cache.requests)].astype(np.int64).sum((0, 1, 2))
    pages = [cache.pool.pages(tier) for tier in range(len(cache.page_formats))]
    pages[0] -= len(cache.buckets.ahead.reserve)
    used = [n * stride for n, stride in zip(pages, cache.pool.strides, strict=True)]
    taken = _slots_taken(cache) if cache.pool.shares else counts.tolist()
    slack = sum(
        (n * cache.page_tokens - count) * stride // cache.page_tokens
        for n, count, stride in zip(pages, taken, cache.pool.strides, strict=True)
    )
    return Memory(
        kinds={"slabs": cache.pool.nbytes, **fixed(cache)},
        tiers=_by_format(cache, used),
        page_slack=slack,
        slab_slack=cache.pool.nbytes - sum(used),
        tokens=_by_format(cache, counts.tolist()),
        full=int(cache._lengths.sum()) * cache.kv_heads * 2 * cache.head_dim * cache.dtype.itemsize,
        allowed=cache.budget.allowed(cache._lengths, len(cache._active)),
        scratch=scratch_bytes(cache),
        **_bits(cache, pages, taken),
    )


def _by_format(cache: CacheState, numbers: list[int]) -> dict[str, int]:
    """Numbers of the tiers by the name of their format; a list of tiers may have one twice."""
    total = dict.fromkeys((f.name for f in cache.formats), 0)
    for f, number in zip(cache.formats, numbers, strict=True):
        total[f.name] += number
    return total


def _bits(cache: CacheState, pages: list[int], taken: list[int]) -> dict[str, float]:
    """Bits per value of K and V: from whole pages, and from the widths of the formats of their tokens."""
    tokens = max(sum(taken), 1)
    sides: dict[str, float] = {}
    for side in ("k", "v"):
        stored = expected = 0.0
        for f, n, count in zip(cache.formats, pages, taken, strict=True):
            stored += n * (getattr(f, f"{side}_bytes") + f.scale_bytes / 2) * 8
            expected += count * (getattr(f, f"{side}_bits") + (0 if f.plain else SCALE_BITS / cache.head_dim))
        sides[f"{side}_bits"] = stored / (tokens * cache.head_dim)
        sides[f"expected_{side}_bits"] = expected / tokens
    return sides


def _slots_taken(cache: CacheState) -> list[int]:
    """Occupied slots per tier; a shared page counts once, with the tokens of the owner that has the most in it."""
    first = np.arange(cache.buckets.max_pages) * cache.page_tokens
    taken = []
    for tier in range(len(cache.page_formats)):
        table = cache.buckets.host_table[:, :, :, tier]
        filled = (cache.buckets.host_count[:, :, :, tier, None] - first).clip(0, cache.page_tokens)[table >= 0]
        pages, page = np.unique(table[table >= 0], return_inverse=True)
        most = np.zeros(len(pages), np.int64)
        np.maximum.at(most, page, filled)
        taken.append(int(most.sum()))
    return taken


def check(cache: CacheState) -> None:
    """Assert that refcounts, counts, positions and bytes agree; reads every page."""
    table, count = cache.buckets.host_table, cache.buckets.host_count
    handles, owned = np.unique(table[table >= 0], return_counts=True)
    assert (cache.pool.owners(handles) == owned).all(), "a page has other owners than the tables say"
    place = np.broadcast_to(np.arange(table[0].size).reshape(table.shape[1:]), table.shape)[table >= 0]
    kept = np.unique(np.stack([table[table >= 0], place]), axis=1)
    assert kept.shape[1] == len(handles), "a shared page is at different indices of its owners' lists"
    used, reserve = int((cache.pool.refs > 0).sum()), cache.buckets.ahead.reserve
    assert (cache.pool.owners(reserve) == 1).all(), "a page in reserve has other owners"
    assert not np.isin(reserve, handles).any(), "a page in reserve is in a table"
    assert used == len(handles) + len(reserve), f"{used} pages in use, {len(handles)} + {len(reserve)} known"
    pool = cache.pool
    for t in range(len(cache.page_formats)):
        assert pool.pages(t) == int((pool.refs[pool.tier == t] > 0).sum()), "a tier's pages were counted wrong"
        assert pool.slabs_of(t) == int((pool.tier == t).sum()), "a tier's slabs were counted wrong"
    _check_free_lists(cache)
    pages = -(-count.astype(np.int64) // cache.page_tokens)
    pages[..., 0] += cache.buckets.ahead.there()[..., None]
    listed = np.arange(table.shape[-1]) < pages[..., None]
    assert ((table >= 0) == listed).all(), "page lists and counts differ"
    tier = np.broadcast_to(np.arange(len(cache.page_formats))[:, None], table.shape)
    assert (cache.pool.tier[table[listed] // cache.pool.units] == tier[listed]).all(), "a page in another tier's slab"
    assert torch.equal(cache.buckets.page_table.cpu(), torch.from_numpy(table)), "device table differs"
    assert torch.equal(cache.buckets.count.cpu(), torch.from_numpy(count)), "device counts differ"
    assert torch.equal(cache._device_lengths.cpu(), torch.from_numpy(cache._lengths)), "device lengths differ"
    for request in range(cache.max_requests):
        if request not in cache._active:
            assert not count[request].any(), "an unused request holds tokens"
            assert not cache._lengths[request].any(), "an unused request has a length"
            continue
        for layer in range(cache.layers):
            _check_positions(cache, layer, request)
    allocated = sum(slab.nbytes for slab in cache.pool.slabs if slab is not None) + sum(fixed(cache).values())
    taken = memory(cache)
    assert taken.total == allocated, f"memory() says {taken.total}, allocated are {allocated}"
    assert taken.allowed is None or taken.total <= taken.allowed, f"{taken.total} bytes of {taken.allowed}"
    addresses = [0 if slab is None else slab.data_ptr() for slab in cache.pool.slabs]
    assert cache.pool.pointers.tolist() == addresses, "a stale slab pointer"


def _check_free_lists(cache: CacheState) -> None:
    """Assert that free pages have no owner, and that running totals equal the sums over slabs."""
    pool, free = cache.pool, cache.pool.free
    for t, per_slab in enumerate(pool.per_slab):
        slabs = np.flatnonzero(pool.tier == t)
        taken = pool.refs[slabs, :per_slab] > 0
        assert (free.used[slabs] == taken.sum(1)).all(), "a slab's pages were counted wrong"
        assert np.array_equal(free.available[t], slabs[~taken.all(1)]), "slabs with a free page are other ones"
        for slab, of_slab in zip(slabs.tolist(), taken, strict=True):
            assert sorted(free.pages(t, slab)) == np.flatnonzero(~of_slab).tolist(), "free pages are other ones"
    assert pool.nbytes == int(pool.sizes.sum()), "the bytes of slabs were counted wrong"
    assert pool.slab_count == int(pool.allocated.sum()), "slabs were counted wrong"


def _check_positions(cache: CacheState, layer: int, request: int) -> None:
    tokens = cache.buckets.snapshot(layer, [request])
    length = int(cache._lengths[request, layer])
    keys = tokens.head_cache * cache.max_tokens + tokens.position
    assert len(torch.unique(keys)) == len(keys), "a position twice in a head"
    assert not len(keys) or (int(tokens.position.min()) >= 0 and int(tokens.position.max()) < length), "position"
    if not cache.policy.evict:
        assert len(keys) == length * cache.kv_heads, f"{len(keys)} tokens of {length} x {cache.kv_heads}"
