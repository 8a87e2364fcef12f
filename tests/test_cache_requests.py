"""Requests as wholes: forks, crops, beams."""

from __future__ import annotations

import copy

import pytest
import torch

from cache_model import by_head, fingerprint, limit, make, rows, same
from kvstrata.cache.ops import crop


def test_fork_shares_until_one_writes() -> None:
    cache = make(layers=2, max_requests=3)
    for layer in range(2):
        cache.append(layer, *rows(500))
    used, slack = cache.memory().tiers, cache.memory().page_slack
    twin = cache.fork(0)
    assert cache.memory().tiers == used
    assert cache.memory().page_slack == slack > 0
    original = [x.clone() for x in cache.gather(0, 0)]
    cache.append(0, *rows(200, seed=3), requests=[twin])
    cache.check()
    assert all(torch.equal(a, b) for a, b in zip(original, cache.gather(0, 0), strict=True))
    assert torch.equal(cache.gather(1, twin)[0], cache.gather(1, 0)[0])
    cache.free_request(0)
    cache.check()
    assert cache.length(twin) == 700
    cache.free_request(twin)
    assert cache.memory().kinds["slabs"] == 0


def test_a_freed_request_shares_no_pages() -> None:
    """Requests without shared pages are handled in one pass."""
    cache = make(max_requests=3)
    cache.append(0, *rows(100))
    cache.append(0, *rows(100), requests=[1])
    cache.free_request(1)
    cache.crop(0, 0)
    assert not cache.pool.shares
    cache.append(0, *rows(100))
    cache.fork(0)
    assert cache.pool.shares


@pytest.mark.parametrize("budget", [0.25, 1_000_000])
def test_a_copy_has_separate_pages(budget: int | float) -> None:
    cache = make(layers=2, max_requests=3, **limit(budget))
    for layer in range(2):
        cache.append(layer, *rows(300, seed=layer), requests=[0])
        cache.append(layer, *rows(40, seed=layer), requests=[2])
    cache.update_importance(1, torch.rand(2, 2, 300))
    twin = copy.deepcopy(cache)
    twin.check()
    assert twin.requests == (0, 2)
    assert twin.memory() == cache.memory()
    for request in (0, 2):
        assert torch.equal(twin.importance(1, request), cache.importance(1, request))
        for a, b in zip(twin.gather(1, request), cache.gather(1, request), strict=True):
            assert torch.equal(a, b)
    before = fingerprint(cache)
    for layer in range(2):
        twin.append(layer, *rows(200, seed=5))
    twin.free_request(2)
    assert same(before, fingerprint(cache))


def test_a_cache_made_in_inference_mode() -> None:
    with torch.inference_mode():
        cache = make(max_requests=2)
        cache.append(0, *rows(300))
        cache.update_importance(0, torch.rand(1, 2, 300))
    cache.append(0, *rows(300, seed=1))
    cache.update_importance(0, torch.rand(1, 2, 600))
    cache.settle()
    cache.crop(cache.fork(0), 100)
    cache.check()


def test_forks_under_bytes_cost_nothing_until_they_differ() -> None:
    one = make(budget=None, dtype=torch.bfloat16, max_requests=8, max_tokens=1024)
    one.append(0, *rows(500, dtype=torch.bfloat16))
    budget = one.memory().total + 24 * one.pool.slab_bytes
    cache = make(budget_bytes=budget, dtype=torch.bfloat16, max_requests=8, max_tokens=1024)
    cache.append(0, *rows(500, dtype=torch.bfloat16))
    for _ in range(7):
        cache.fork(0)
    cache.check()
    assert (cache.tier_map(0, 7) == 0).all()
    for request in range(8):
        cache.append(0, *rows(1, dtype=torch.bfloat16, seed=request), requests=[request])
        cache.check()


@pytest.mark.parametrize("length", [0, 1, 4, 16, 250, 299, 300, 400])
def test_crop_drops_the_last_tokens(length: int) -> None:
    cache = make(layers=2, max_requests=2)
    for layer in range(2):
        cache.append(layer, *rows(300, seed=layer))
    twin = cache.fork(0)
    before, tiers = cache.gather(1, 0), cache.tier_map(1)
    cache.crop(0, length)
    cache.check()
    left = min(length, 300)
    assert cache.length(0) == left
    after = cache.gather(1, 0)
    stay = cache.tier_map(1) == tiers[:, :left]
    for a, b in zip(after[:2], before[:2], strict=True):
        assert torch.equal(a[stay], b[:, :left][stay])
    assert all(torch.equal(a, b) for a, b in zip(before, cache.gather(1, twin), strict=True))
    cache.append(0, *rows(3, seed=7))
    assert cache.length(0) == left + 3


def test_a_crop_that_has_to_settle_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a shared budget in bytes, page copies made by a fork's crop are paid by all requests, in every layer."""
    options = dict(
        layers=2, dim=32, dtype=torch.float16, max_requests=3, max_tokens=600, recent_tokens=16, slab_bytes=1 << 13
    )
    plain = make(budget=None, **options).budget
    cache = make(budget_bytes=plain.fixed + plain.reserve + 96_000, **options)
    given = [rows(180, dim=32, dtype=torch.float16, seed=layer) for layer in range(2)]
    for layer, (k, v) in enumerate(given):
        cache.append(layer, k, v, [0], [180])
        cache.append(layer, k[:40], v[:40], [2], [40])
    cache.fork(0)
    tiers = [[cache.tier_map(layer, request) for request in range(3)] for layer in range(2)]
    planned = []
    plan = crop.plan_scopes
    monkeypatch.setattr(
        crop, "plan_scopes", lambda cache, places, *rest: planned.append(places) or plan(cache, places, *rest)
    )
    cache.crop(1, 120)
    cache.check()
    assert planned == [[(0, [0, 1, 2])], [(1, [0, 1, 2])]]
    assert [cache.length(request) for request in range(3)] == [180, 120, 40]
    assert any(bool((cache.tier_map(at, 0) > tiers[at][0]).any()) for at in range(2)), "somebody paid"
    for layer, (k, v) in enumerate(given):
        for request, length in enumerate((180, 120, 40)):
            found = cache.gather(layer, request)
            assert torch.equal(found[2], torch.arange(length).expand(2, length))
            still = cache.tier_map(layer, request) == 0
            for want, got in zip((k, v), found, strict=False):
                want = by_head(want[:length])
                assert torch.equal(got[still], want[still])
                assert (got.float() - want.float()).square().mean() < 0.15
    assert cache.memory().total <= cache.memory().allowed


def test_crop_to_nothing_forgets_the_centre() -> None:
    cache = make()
    cache.append(0, *rows(300))
    assert cache.centre.any()
    cache.crop(0, 0)
    assert cache.requests == (0,)
    assert not cache.centre.any()
    cache.check()


def test_speculative_steps_roll_back() -> None:
    """Draft four, keep one, again and again; then it is as if the others had never been."""
    cache, plain = make(budget=None), make(budget=None)
    k, v = rows(30)
    for i in range(30):
        cache.append(0, *rows(4, seed=1000 + i))
        cache.crop(0, i)
        cache.append(0, k[i : i + 1], v[i : i + 1])
        plain.append(0, k[i : i + 1], v[i : i + 1])
    for a, b in zip(cache.gather(0), plain.gather(0), strict=True):
        assert torch.equal(a, b)
    cache.check()


def test_reorder_shares_pages_between_beams() -> None:
    cache = make(max_requests=4)
    data = [rows(200 + i, seed=i) for i in range(4)]
    for i, (k, v) in enumerate(data):
        cache.append(0, k, v, requests=[i])
    was = [cache.gather(0, i) for i in range(4)]
    cache.reorder([3, 3, 0, 2])
    cache.check()
    for i, source in enumerate([3, 3, 0, 2]):
        assert all(torch.equal(a, b) for a, b in zip(cache.gather(0, i), was[source], strict=True))
    cache.reorder([1, 0], requests=[2, 0])
    assert torch.equal(cache.gather(0, 2)[0], was[3][0])
    assert torch.equal(cache.gather(0, 0)[0], was[0][0])
    cache.select([3, 0])
    assert cache.requests == (0, 1)
    assert torch.equal(cache.gather(0, 0)[0], was[2][0])
    assert torch.equal(cache.gather(0, 1)[0], was[0][0])
    cache.check()
    for _ in range(2):  # the second time there are none
        cache.select([])
        assert cache.requests == ()
        cache.check()
    cache.reorder([])
