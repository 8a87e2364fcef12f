"""The pool's free lists against a plain model: every page free or owned once, slabs and bytes counted as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstrata.cache.storage.free_lists import merged, without
from kvstrata.cache.storage.pool import EMPTY, Pool


def check(pool: Pool, owned: dict[int, set[int]]) -> None:
    """Compare free lists and running totals with the pages that are owned, per tier."""
    for tier, per_slab in enumerate(pool.per_slab):
        slabs = np.flatnonzero(pool.tier == tier)
        assert pool.pages(tier) == len(owned[tier])
        assert pool.slabs_of(tier) == len(slabs)
        step, free = pool.strides[tier] // 64, set()
        for slab in slabs.tolist():
            pages = {slab * pool.units + index * step for index in range(per_slab)}
            listed = [slab * pool.units + index * step for index in pool.free.pages(tier, slab)]
            assert len(listed) == len(set(listed))
            assert set(listed) == pages - owned[tier]
            free |= {slab} if listed else set()
            assert pages & owned[tier], "a slab without a page belongs to no tier"
        assert pool.free.available[tier].tolist() == sorted(free)
    assert pool.nbytes == int(pool.sizes.sum()) == sum(x.nbytes for x in pool.slabs if x is not None)
    assert pool.slab_count == int(pool.allocated.sum())
    assert pool.slabs_in_use == int((pool.tier != EMPTY).sum())


@pytest.mark.parametrize("seed", range(4))
def test_pages_are_free_or_owned_once(seed: int) -> None:
    """Random allocations, releases, compactions and trims; an allocation that does not fit takes nothing."""
    chance = np.random.default_rng(seed)
    pool = Pool([640, 448, 192], 4096, 24, torch.device("cpu"), debug=bool(seed % 2))
    owned: dict[int, set[int]] = {tier: set() for tier in range(3)}
    refused = 0
    for _ in range(250):
        tier, what = int(chance.integers(3)), chance.random()
        if what < 0.5:
            try:
                handles = pool.allocate(tier, int(chance.integers(0, 40))).tolist()
            except RuntimeError:
                refused += 1
                continue
            assert owned[tier].isdisjoint(handles)
            assert len(set(handles)) == len(handles)
            owned[tier].update(handles)
        elif what < 0.9:
            some = [h for t in range(3) for h in sorted(owned[t]) if chance.random() < 0.3]
            pool.release(chance.permutation(np.array(some, np.int64)))
            owned = {t: handles - set(some) for t, handles in owned.items()}
        elif what < 0.95:
            old, new = pool.compact(tier)
            moved = dict(zip(old.tolist(), new.tolist(), strict=True))
            owned[tier] = {moved.get(h, h) for h in owned[tier]}
            assert pool.slabs_of(tier) == -(-pool.pages(tier) // pool.per_slab[tier])
        else:
            limit = int(chance.integers(0, 24 * 4096))
            pool.trim(nbytes=limit)
            assert pool.nbytes <= limit or pool.slab_count == pool.slabs_in_use
        check(pool, owned)
    assert refused


def test_a_trim_frees_no_more_than_it_must() -> None:
    pool = Pool([1024], 1024, 8, torch.device("cpu"))
    handles = pool.allocate(0, 6)
    pool.release(handles[1:])
    pool.trim(nbytes=3500)
    assert pool.nbytes == 3 * 1024
    assert np.flatnonzero(pool.allocated).tolist() == [0, 1, 2]
    pool.trim(nbytes=3 * 1024)
    assert pool.nbytes == 3 * 1024
    pool.trim()
    assert pool.nbytes == 1024


def test_the_same_calls_give_the_same_pages() -> None:
    def run() -> list[int]:
        pool, taken = Pool([256, 128], 1024, 16, torch.device("cpu")), []
        for n in (9, 3, 14):
            taken.append(pool.allocate(n % 2, n))
            pool.release(taken[-1][::2])
            taken.append(pool.allocate(n % 2, 2))
        return np.concatenate(taken).tolist()

    assert run() == run()


def test_sorted_arrays_merge_and_subtract() -> None:
    a, b = np.array([1, 4, 9]), np.array([2, 4])
    assert merged(a, np.array([7, 0])).tolist() == [0, 1, 4, 7, 9]
    assert without(a, b).tolist() == [1, 9]
    assert without(a, np.array([10, 0])).tolist() == [1, 4, 9]
    assert merged(a[:0], np.array([3, 1])).tolist() == [1, 3]
