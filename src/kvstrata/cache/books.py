"""The books: what must be true of a cache after every operation. Reads every page; for tests and debugging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .cache import TieredCache


def check(cache: TieredCache) -> None:
    """Assert that owners, counts, positions and bytes agree."""
    table, count = cache.buckets.host_table, cache.buckets.host_count
    handles, owned = np.unique(table[table >= 0], return_counts=True)
    assert (cache.pool.owners(handles) == owned).all(), "a page has other owners than the tables say"
    used = int((cache.pool.refs > 0).sum())
    assert used == len(handles), f"{used} pages in use, {len(handles)} in tables"
    pool = cache.pool
    for t in range(len(cache.kinds)):
        assert pool.pages(t) == int((pool.refs[pool.tier == t] > 0).sum()), "a tier's pages were counted wrong"
        assert pool.slabs_of(t) == int((pool.tier == t).sum()), "a tier's slabs were counted wrong"
    pages = -(-count.astype(np.int64) // cache.page_tokens)
    listed = np.arange(table.shape[-1]) < pages[..., None]
    assert ((table >= 0) == listed).all(), "page lists and counts differ"
    tier = np.broadcast_to(np.arange(len(cache.kinds))[:, None], table.shape)
    assert (cache.pool.tier[table[listed] // cache.pool.units] == tier[listed]).all(), "a page in another tier's slab"
    assert torch.equal(cache.buckets.table.cpu(), torch.from_numpy(table)), "device table differs"
    assert torch.equal(cache.buckets.count.cpu(), torch.from_numpy(count)), "device counts differ"
    assert torch.equal(cache._device_lengths.cpu(), torch.from_numpy(cache._lengths)), "device lengths differ"
    for request in range(cache.max_requests):
        if request not in cache._active:
            assert not count[request].any(), "an unused request holds tokens"
            assert not cache._lengths[request].any(), "an unused request has a length"
            continue
        for layer in range(cache.layers):
            _check_positions(cache, layer, request)
    allocated = sum(slab.nbytes for slab in cache.pool.slabs if slab is not None) + sum(cache._fixed().values())
    memory = cache.memory()
    assert memory.total == allocated, f"memory() says {memory.total}, allocated are {allocated}"
    assert memory.allowed is None or memory.total <= memory.allowed, f"{memory.total} bytes of {memory.allowed}"
    addresses = [0 if slab is None else slab.data_ptr() for slab in cache.pool.slabs]
    assert cache.pool.pointers.tolist() == addresses, "a stale slab pointer"


def _check_positions(cache: TieredCache, layer: int, request: int) -> None:
    tokens = cache.buckets.snapshot(layer, [request])
    length = int(cache._lengths[request, layer])
    keys = tokens.bucket * cache.max_tokens + tokens.position
    assert len(torch.unique(keys)) == len(keys), "a position twice in a head"
    assert not len(keys) or (int(tokens.position.min()) >= 0 and int(tokens.position.max()) < length), "position"
    if not cache.policy.evict:
        assert len(keys) == length * cache.kv_heads, f"{len(keys)} tokens of {length} x {cache.kv_heads}"
