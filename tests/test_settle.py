"""Settling: a model's layers together, slots that are paid for, budgets that cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.policy import plan
from kvstrata.cache.policy import scopes as scopes_module


def filled(lengths: list[int], layers: int = 3, **options) -> TieredCache:
    """Requests of these lengths, prompts first, with importance of their own in every layer."""
    options = (
        dict(budget=0.3, recent_tokens=20, sink_tokens=4, page_tokens=16, dtype=torch.float32, settle_every=8) | options
    )
    options = dict(tiers=("K4V4", "K3V3", "K2V2")) | options
    cache = TieredCache(layers, 2, 32, max_requests=len(lengths), max_tokens=1024, **options)
    generator = torch.Generator().manual_seed(sum(lengths))
    for layer in range(layers):
        k, v = torch.randn(2, sum(lengths), 2, 32, generator=generator)
        cache.append(layer, k, v, list(range(len(lengths))), lengths)
        cache.update_importance(layer, torch.rand(len(lengths), 2, max(lengths), generator=generator) ** 4)
    return cache


def test_huge_mass_stays_finite_and_keeps_its_tier() -> None:
    cache = filled([300], layers=1, budget=0.5)
    mass = torch.rand(1, 2, 300)
    mass[:, :, 100] = 3e38
    for _ in range(3):
        cache.update_importance(0, mass)
    assert cache.importance(0).isfinite().all()
    before = int(cache.tier_map(0)[0, 100])
    decode(cache, 100)
    assert (cache.tier_map(0)[:, 100] == before).all()
    assert cache.memory().total <= cache.memory().allowed


def test_tiers_that_save_nothing_are_refused_clearly() -> None:
    """A second tier of the same format costs as much as the first; half of 16 bit is less than K8V8 takes."""
    for policy in plan.POLICIES:
        options = dict(page_tokens=16, dtype=torch.float16, policy=policy, tiers=("K8V8", "K8V8"))
        cache, enough = (TieredCache(1, 2, 64, budget=budget, **options) for budget in (0.5, 0.6))
        assert len(set(cache.policy.prices.page)) == 2
        k, v = torch.randn(2, 2000, 2, 64).half()
        with pytest.raises(BudgetExceeded, match="expected at least"):
            cache.append(0, k, v)
        enough.append(0, k, v)
        enough.check()


def test_slots_that_are_paid_for_are_filled_where_tokens_are_evicted_too() -> None:
    """20 plain tokens need two pages, so the weightiest of the others take the rest of the second."""
    options = dict(budget=0.1, recent_tokens=16, sink_tokens=4, settle_every=2, evict=True, max_tokens=4096)
    cache = TieredCache(1, 2, 32, page_tokens=16, dtype=torch.float32, tiers=("K4V4", "K3V3", "K2V2"), **options)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3000, 2, 32, generator=generator)
    cache.append(0, k, v, mass=torch.rand(1, 2, 3000, generator=generator) ** 4, queries=3000)
    tiers = cache.tier_map(0)
    assert cache.memory().total <= cache.memory().allowed
    assert ((tiers >= 0).sum(1) < 3000).all()
    assert ((tiers == 0).sum(1) == 30).all()  # and room for two


def decode(cache: TieredCache, steps: int) -> None:
    for step in range(steps):
        for layer in range(cache.layers):
            k, v = torch.randn(2, len(cache.requests), 1, 2, 32, generator=torch.Generator().manual_seed(step))
            cache.append(layer, k, v)


def test_layers_settle_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One search makes room in all layers; none of them has to search on its own."""
    cache = filled([300, 300], layers=5)
    calls = []
    plan_all = scopes_module.plan_all
    monkeypatch.setattr(scopes_module, "plan_all", lambda some, *rest: calls.append(len(some)) or plan_all(some, *rest))
    decode(cache, 60)
    assert calls
    assert set(calls) == {10}
    assert len(calls) <= 60 // 4
    assert cache.memory().total <= cache.memory().allowed
    assert {cache.length(r, layer) for r in (0, 1) for layer in range(5)} == {360}
    cache.check()


def test_without_room_ahead_every_layer_settles_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recent tokens that leave no slot: tried once in a while, and nothing is lost."""
    cache = filled([300], budget=0.22, recent_tokens=28, sink_tokens=4, settle_every=16)
    tried = []
    ahead = scopes_module.settle_scopes
    monkeypatch.setattr(scopes_module, "settle_scopes", lambda *given: tried.append(1) or ahead(*given))
    plan_all = scopes_module.plan_all

    def none_for_all_layers(some: plan.Scopes, *rest) -> plan.Plans:
        if len(some) == 1:
            return plan_all(some, *rest)
        return plan.Plans(some.tokens.tier.clamp(min=0), [None] * len(some), [0] * len(some))

    monkeypatch.setattr(scopes_module, "plan_all", none_for_all_layers)
    decode(cache, 40)
    assert 1 <= len(tried) <= 4
    assert cache.memory().total <= cache.memory().allowed
    for layer in range(3):
        position = cache.gather(layer, 0)[2]
        assert np.array_equal(np.sort(position.numpy(), 1), np.broadcast_to(np.arange(340), (2, 340)))
