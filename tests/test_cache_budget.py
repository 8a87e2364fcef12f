"""The bytes of a cache: what was allocated, what is allowed, and what happens where it does not suffice."""

from __future__ import annotations

import pytest
import torch

from cache_model import fingerprint, make, rows, same
from kvstrata.cache import BudgetExceeded


@pytest.mark.parametrize("budget", [0.2, 0.25, 0.4, 0.6])
def test_a_fraction_is_kept_and_used(budget: float) -> None:
    cache = make(layers=2, budget=budget, dtype=torch.bfloat16, settle_every=16)
    k, v = rows(3000, dtype=torch.bfloat16)
    for layer in range(2):
        cache.append(layer, k, v)
    memory = cache.memory()
    assert memory.total <= budget * memory.full
    assert memory.total >= 0.85 * budget * memory.full
    assert memory.full == 2 * 3000 * 2 * 2 * 64 * 2
    assert sum(memory.tokens.values()) == 2 * 3000 * 2


def test_memory_is_what_was_allocated() -> None:
    cache = make(layers=2, max_requests=3)
    cache.append(0, *rows(700))
    memory = cache.memory()
    slabs = sum(slab.nbytes for slab in cache.pool.slabs if slab is not None)
    tables = cache.buckets.table.nbytes + cache.buckets.count.nbytes + cache.pool.pointers.nbytes
    assert memory.total == slabs + tables + cache.centre.nbytes + cache._device_lengths.nbytes
    assert sum(memory.tiers.values()) + memory.slab_slack == memory.kinds["slabs"]
    assert 0 < memory.page_slack < sum(memory.tiers.values())


@pytest.mark.parametrize("budget", [60_000, 0.05])
def test_exceeded_says_what_has_room(budget: int | float) -> None:
    options = dict(dtype=torch.bfloat16, max_tokens=2048)
    with pytest.raises(BudgetExceeded, match=r"; budget=[\d.]+ has room for them") as found:
        make(budget=budget, **options).append(0, *rows(2000, dtype=torch.bfloat16))
    enough = str(found.value).split("; budget=")[1].split()[0]
    make(budget=type(budget)(enough), **options).append(0, *rows(2000, dtype=torch.bfloat16))


def test_exceeded_leaves_everything() -> None:
    cache = make(budget=0.02, max_requests=2)
    cache.append(0, *rows(50))
    before = fingerprint(cache)
    with pytest.raises(BudgetExceeded, match=r"budget: expected at least \d+ bytes .* allowed are \d+") as caught:
        cache.append(0, *rows(500, seed=1))
    assert same(before, fingerprint(cache))
    assert caught.value.needed > caught.value.allowed
    cache.check()
    with pytest.raises(BudgetExceeded):  # the short request would fit: none of both is taken
        cache.append(0, *rows(2001), requests=[1, 0], lengths=[1, 2000])
    assert same(before, fingerprint(cache))


def test_bytes_for_everything() -> None:
    cache = make(budget=400_000, max_requests=4, dtype=torch.bfloat16, max_tokens=2048)

    def fill() -> None:
        for i in range(100):
            cache.append(0, *rows(100, dtype=torch.bfloat16, seed=i), requests=[i % 4])
            cache.check()

    with pytest.raises(BudgetExceeded):
        fill()
    assert cache.memory().total <= 400_000
    low = cache.memory().tokens["K2V2"]
    assert low / sum(cache.memory().tokens.values()) > 0.7  # nothing was refused that could have been squeezed
    cache.free(0)
    cache.append(0, *rows(100, dtype=torch.bfloat16), requests=[1])
    cache.check()


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("policy", ["importance", "recency", "uniform"])
def test_evict_instead(policy: str, per_head: bool) -> None:
    cache = make(budget=0.05, evict=True, policy=policy, per_head=per_head, dtype=torch.bfloat16)
    for i in range(20):
        k, v = rows(100, dtype=torch.bfloat16, seed=i)
        cache.append(0, k, v)
        cache.check()
    _, _, positions = cache.gather(0)
    assert cache.length(0) == 2000
    assert positions.shape[1] < 1000
    for head in positions:
        there = set(head.tolist())
        assert {0, 1, 2, 3, *range(1968, 2000)} <= there


def test_holes_in_slabs_are_closed() -> None:
    """Requests whose pages lie mixed in the same slabs; some go, and a shared page moves with both its owners."""
    cache = make(max_requests=6, dim=32, max_tokens=512, slab_bytes=6 * 16 * 264)
    for part in range(6):
        cache.append(0, *rows(6 * 30, dim=32, seed=part), lengths=[30] * 6)
    cache.reorder([0, 1, 2, 3, 4, 4])
    for request in (0, 2, 3):
        cache.free(request)
    before = [cache.gather(0, r) for r in (1, 4, 5)]
    slabs, used = cache.memory().kinds["slabs"], cache.memory().tiers
    cache.compact()
    cache.check()
    assert cache.memory().kinds["slabs"] < slabs
    assert cache.memory().tiers == used
    for tier, per_slab in enumerate(cache.pool.per_slab):
        assert cache.pool.slabs_of(tier) == -(-cache.pool.pages(tier) // per_slab)
    for request, was in zip((1, 4, 5), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(cache.gather(0, request), was, strict=True))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (dict(page_tokens=64, window=64, settle_every=64), 60),  # the defaults: 4 + 64 tokens leave 60 of two pages
        (dict(page_tokens=16, window=28, settle_every=16), 16),  # fills two pages
        (dict(page_tokens=16, window=27, settle_every=16), 17),  # leaves one slot
        (dict(page_tokens=16, window=27, settle_every=1), 1),  # asked for
    ],
)
def test_settlings_make_room_for_several_steps(options: dict, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the floor, where pages are scarcest, as above it: once in so many steps, in each layer."""
    cache = make(layers=2, dim=32, budget=0.3, tiers=None, dtype=torch.bfloat16, **options)
    moved: list[int] = []
    move = cache.buckets.move
    monkeypatch.setattr(cache.buckets, "move", lambda layers, *rest: (moved.extend(layers), move(layers, *rest)))
    k, v = rows(328, dim=32, dtype=torch.bfloat16)
    for layer in range(2):
        cache.append(layer, k[:200], v[:200])
    assert cache.budget.floor_tokens > 328
    moved.clear()
    steps = 128 if most > 1 else 16
    for i in range(200, 200 + steps):
        for layer in range(2):
            cache.append(layer, k[i : i + 1], v[i : i + 1])
    assert len(moved) / 2 <= -(-steps // most) + 1
    assert len(moved) > 0
    cache.check()
