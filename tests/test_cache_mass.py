"""Mass that comes with the tokens: a prompt attends before it is stored, and settles by what it attended to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.policy.prices import format_error, spread
from kvstrata.layout import Format


def make(**options) -> TieredCache:
    given = dict(layers=1, kv_heads=2, head_dim=64, recent_tokens=32, page_tokens=16, max_tokens=4096)
    return TieredCache(**given | dict(dtype=torch.bfloat16, tiers=("K4V4", "K3V3", "K2V2")) | options)


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, n, 2, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return k, v


def some_mass(requests: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(requests, 2, n, generator=torch.Generator().manual_seed(seed)) ** 8


@pytest.mark.parametrize("mode", ["mean", "ema"])
def test_mass_passed_to_append_equals_mass_reported_afterwards(mode: str) -> None:
    caches = [make(budget=None, importance=mode) for _ in range(2)]
    for step, n in enumerate((40, 7, 1)):
        end = caches[0].length(0) + n
        mass = some_mass(1, end, seed=step)
        caches[0].append(0, *rows(n, step), mass=mass, queries=n)
        caches[1].append(0, *rows(n, step))
        caches[1].update_importance(0, mass, queries=n)
        torch.testing.assert_close(caches[0].importance(0), caches[1].importance(0))
        for cache in caches:
            cache.check()


def test_a_prompt_settles_by_its_own_mass() -> None:
    cache = make(budget=0.35, max_tokens=1024)
    n = 1000
    mass = torch.full((1, 2, n), 1e-4)
    mass[0, 0, 100:160], mass[0, 1, 700:760] = 1.0, 1.0
    cache.append(0, *rows(n), mass=mass)
    cache.check()
    tiers = cache.tier_map(0)
    assert tiers[0, 100:160].max() < tiers[0, 200:900].min()
    assert tiers[1, 700:760].max() < tiers[1, 100:600].min()


@pytest.mark.filterwarnings("error")
def test_mass_with_a_gradient_is_accepted() -> None:
    """Tensors that require grad, as outside no_grad: no warning, and no autograd graph is kept."""
    cache = make(budget=0.35, max_tokens=1024)
    cache.append(0, *(x.requires_grad_() for x in rows(1000)), mass=torch.rand(1, 2, 1000, requires_grad=True).exp())
    cache.update_importance(0, torch.rand(1, 2, 1000, requires_grad=True).exp())
    cache.settle()
    cache.check()


def test_ragged_requests_say_how_many_queries() -> None:
    cache = make(max_requests=2, budget=0.25)
    k, v = rows(900)
    with pytest.raises(ValueError, match="queries: expected the number of queries"):
        cache.append(0, k, v, requests=[0, 1], seq_lens=[300, 600], mass=some_mass(2, 600))
    cache.append(0, k, v, requests=[0, 1], seq_lens=[300, 600], mass=some_mass(2, 600), queries=64)
    cache.check()
    assert cache.importance(0, 1).shape == (2, 600)
    with pytest.raises(ValueError, match="mass: expected"):
        cache.append(0, k[:4], v[:4], requests=[1], mass=some_mass(1, 603))
    with pytest.raises(TypeError, match="mass: expected a floating-point"):
        cache.append(0, k[:4], v[:4], requests=[1], mass=some_mass(1, 604).long())


def test_a_failed_append_leaves_importance_unchanged() -> None:
    cache = make(budget_bytes=400_000, max_tokens=20_000)
    cache.append(0, *rows(500), mass=some_mass(1, 500))
    before, tiers = cache.importance(0), cache.tier_map(0)
    with pytest.raises(BudgetExceeded):
        cache.append(0, *rows(19_000, seed=1), mass=some_mass(1, 19_500))
    assert torch.equal(cache.importance(0), before)
    assert torch.equal(cache.tier_map(0), tiers)
    cache.check()


def test_other_policies_accept_and_ignore_mass() -> None:
    for policy in ("recency", "uniform"):
        caches = [make(budget=0.25, policy=policy) for _ in range(2)]
        caches[0].append(0, *rows(800), mass=some_mass(1, 800))
        caches[1].append(0, *rows(800))
        assert torch.equal(caches[0].tier_map(0), caches[1].tier_map(0))


def test_a_larger_floor_spreads_bits_more_evenly() -> None:
    """Without the floor the few that received attention get all bits; with a large one, nearly all get the same."""

    def tiers(floor: float) -> int:
        cache = make(budget=0.35, max_tokens=1024)
        cache.policy = replace(cache.policy, floor=floor)
        cache.append(0, *rows(1000), mass=some_mass(1, 1000))
        return int((cache.tier_map(0) == 3).sum())

    assert tiers(0.0) > tiers(0.5) > tiers(5.0)


def test_noise_in_scores_costs_more_than_its_variance() -> None:
    assert spread(1e-6) == pytest.approx(1e-6, rel=1e-3)
    assert spread(1.0) > 4
    x = 0.5 * torch.randn(1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float((x.exp() - 1).square().mean()) == pytest.approx(spread(0.25), rel=0.01)
    names = ("K8V8", "K4V4", "K4V3", "K3V3", "K3V2", "K2V2")
    errors = [format_error(Format.parse(name, 64)) for name in names]
    assert errors == sorted(errors)
    assert format_error(Format.parse("K2V4", 64)) > format_error(Format.parse("K4V2", 64))


def test_slots_that_are_paid_for_are_used() -> None:
    cache = make(budget=0.3, max_tokens=1024, settle_every=16, recent_tokens=28)
    cache.append(0, *rows(1000), mass=some_mass(1, 1000))
    cache.check()
    count = cache.bucket_views(0).count[0]
    assert bool((count[:, 1:-1] % 16 == 0).all())  # a tier above the lowest has no empty slot
    assert bool((count[:, 1:-1] > 0).any())
