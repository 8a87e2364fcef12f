"""Settling by a schedule, and one step ahead: how much a step moves, and that the batch does not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_model import make, rows
from conftest import HAS_GPU
from kvstrata.cache import TieredCache
from kvstrata.cache.policy import schedule

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
OPTIONS = dict(budget=0.3, recent_tokens=20, sink_tokens=4, settle_every=24, tiers=("K4V4", "K2V2"))


def started(lengths: list[int], layers: int) -> TieredCache:
    cache = make(layers, max_requests=4, device=DEVICE, **OPTIONS)
    for layer in range(layers):
        for request, n in enumerate(lengths):
            k, v = rows(n, dtype=cache.dtype, seed=10 * layer + request)
            cache.append(layer, k.to(DEVICE), v.to(DEVICE), [request], [n])
    return cache


def step(cache: TieredCache, requests: list[int], number: int) -> None:
    """One token of each request, the same for a request in any batch; and mass."""
    cache.advance(requests)
    ids = torch.tensor(requests, dtype=torch.int32, device=DEVICE)
    for layer in range(cache.layers):
        given = [rows(1, dtype=cache.dtype, seed=1000 * number + 10 * layer + r) for r in requests]
        cache.write(layer, *(torch.cat(x).to(DEVICE) for x in zip(*given, strict=True)), ids)
        for request in requests:
            random = torch.Generator().manual_seed(number + 7 * request)
            mass = torch.rand(1, cache.kv_heads, cache.max_tokens, generator=random) ** 4
            cache.update_importance(layer, mass.to(DEVICE), [request])


def test_phases_cover_the_period_in_order() -> None:
    assert schedule.phases(32, 60).tolist() == np.repeat([0, 7, 15, 22, 30, 37, 45, 52], 4).tolist()
    assert schedule.phases(2, 24).tolist() == [0, 12]
    assert schedule.phases(3, 2).tolist() == [0, 0, 1]
    assert schedule.phases(1, 1).tolist() == [0]


def test_layers_settle_in_rotation() -> None:
    """Requests of one length, eight layers: no step settles more than one of them, and each has a turn in a period."""
    cache = started([300, 300, 300], layers=8)
    period, settled = cache.policy.settle_every, []
    before = None
    for number in range(3 * period):
        step(cache, [0, 1, 2], number)
        now = cache.buckets.host_count[:3, :, :, 1:].sum((2, 3))
        if before is not None:
            settled.append((now > before).any(0))
        before = now.copy()
    cache.check()
    by_layer = np.array(settled[period:])
    assert by_layer.sum(1).max() == 1
    assert (by_layer.sum(0) >= 1).all()


@pytest.mark.parametrize("layers", [1, 3])
def test_other_requests_do_not_change_tiers(layers: int) -> None:
    """A request alone, and with others that come, pause, crop and leave: the same tokens in the same tiers."""
    alone, among = started([200], layers), started([200, 150, 260], layers)
    for number in range(90):
        step(alone, [0], number)
        step(among, [[0, 1, 2], [2, 0], [0, 1]][number % 3] if 1 in among.requests else [0, 2], number)
        if number == 30:
            among.crop(2, 100)
        if number == 60:
            among.free_request(1)
    for layer in range(layers):
        assert torch.equal(alone.tier_map(layer, 0), among.tier_map(layer, 0))
        assert int(alone.tier_map(layer, 0).max()) > 0
        for mine, other in zip(alone.gather(layer, 0), among.gather(layer, 0), strict=True):
            assert torch.equal(mine, other)


def test_plans_made_ahead_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing but steps happens, no step plans for itself."""
    from kvstrata.cache.ops import step as step_op

    cache = started([200, 333], layers=2)
    step(cache, [0, 1], 0)
    monkeypatch.setattr(step_op, "_targets", lambda *given: pytest.fail("a plan was not made ahead"))
    monkeypatch.setattr(step_op, "_settle_cuda", lambda *given: pytest.fail("a plan was not made ahead"))
    tokens = cache.memory().tokens["K2V2"]
    for number in range(1, 60):
        step(cache, [0, 1], number)
    assert cache.memory().tokens["K2V2"] > tokens


def test_a_plan_is_dropped_when_its_request_changes() -> None:
    cache = started([200, 333], layers=2)
    number = 0
    while not cache._ahead or cache._ahead[0].valid != {0, 1}:
        step(cache, [0, 1], number)
        number += 1
    cache.crop(1, 300)
    assert all(1 not in ahead.valid for ahead in cache._ahead)
    for more in range(40):
        step(cache, [0, 1], number + more)
        memory = cache.memory()
        assert memory.total <= memory.allowed
    cache.check()


def test_appends_between_steps_settle_as_they_must() -> None:
    """What `advance` knows of the next step is forgotten when a request grows in another way."""
    one, other = started([200, 333], layers=2), started([200, 333], layers=2)
    for number in range(40):
        for cache in (one, other):
            step(cache, [0, 1], number)
            if cache is other:
                cache._due = None  # nothing is remembered
            if number % 5 == 4:
                for layer in range(2):
                    k, v = rows(2, dtype=cache.dtype, seed=number + layer)
                    cache.append(layer, k.unsqueeze(1).to(DEVICE), v.unsqueeze(1).to(DEVICE), [0, 1])
    for layer in range(2):
        for request in (0, 1):
            assert torch.equal(one.tier_map(layer, request), other.tier_map(layer, request))
    one.check()


def test_plans_under_bytes_follow_all_requests() -> None:
    """Of requests that share a budget, some advance while a plan for others waits: it is not used too late."""
    options = OPTIONS | dict(budget=None, budget_bytes=400_000, settle_every=8, max_tokens=2048)
    cache = make(2, 2, 32, max_requests=4, device=DEVICE, **options)
    for layer in range(2):
        for request, n in enumerate([300, 300, 200]):
            k, v = torch.randn(2, n, 2, 32, generator=torch.Generator().manual_seed(10 * layer + request))
            cache.append(layer, k.to(DEVICE, cache.dtype), v.to(DEVICE, cache.dtype), [request], [n])

    def advance(*requests: int) -> None:
        cache.advance(list(requests))
        ids = torch.tensor(requests, dtype=torch.int32, device=DEVICE)
        for layer in range(2):
            k, v = torch.randn(2, len(requests), 2, 32).to(DEVICE, cache.dtype)
            cache.write(layer, k, v, ids)

    interrupted = 0
    for _ in range(60):
        advance(0, 1)
        if cache._ahead:
            interrupted += 1
            advance(2)
            if interrupted % 3 == 0:
                cache.reorder([1, 0], [0, 2])
        cache.check()
    assert interrupted > 3


def test_a_plan_that_failed_once_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one request fails for want of memory, then both take it: no place is left out."""
    from kvstrata.cache.storage.page_table import Buckets

    cache, number = started([200, 200], layers=2), 0
    while not cache._ahead or cache._ahead[0].valid != {0, 1}:
        step(cache, [0, 1], number)
        number += 1
    with monkeypatch.context() as patched:
        patched.setattr(Buckets, "short", lambda self, ids: (_ for _ in ()).throw(torch.OutOfMemoryError("memory")))
        with pytest.raises(torch.OutOfMemoryError):
            cache.advance([0])
    for more in range(3):
        step(cache, [0, 1], number + more)
    cache.check()
