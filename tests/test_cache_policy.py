"""Which tier a token gets: the allocator, the policies, and importance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_model import make, rows
from kvstrata.cache.policy import assign as allocate
from kvstrata.layout import Format
from kvstrata.quant import reference as quant

# The allocator


def test_errors_follow_the_measured_ratio() -> None:
    errors = [allocate.format_error(Format.parse(n, 64)) for n in ("K16V16", "K8V8", "K4V4", "K4V2", "K2V4", "K2V2")]
    assert errors == sorted(errors)
    x = torch.randn(4096, 64)
    for bits, db in allocate.SQNR_DB.items():
        error = x - quant.dequantize(quant.quantize(x, bits))
        assert 10 * math.log10(x.square().sum() / error.square().sum()) == pytest.approx(db, abs=1.0)


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=5, unique=True),
    slack=st.floats(0, 1),
)
def test_by_weight_is_optimal_for_its_bytes(weights: list[float], slack: float) -> None:
    """One token a page: no assignment of the same bytes or fewer has less error (by enumeration)."""
    import itertools

    cost, error = [16.0, 4.0, 3.0, 2.0], [0.0, 0.011, 0.036, 0.119]
    weight = torch.tensor(weights, dtype=torch.float64)
    allowed = 2 * len(weights) + slack * 14 * len(weights)
    family, low, high = allocate.by_weight(weight, cost, error)
    low, high = low * min(weights), high * max(weights)

    def price(target) -> float:
        return sum(cost[int(t)] for t in target)

    def loss(target) -> float:
        return sum(w * error[int(t)] for w, t in zip(weights, target, strict=True))

    target = allocate.cheapest(family, lambda t: price(t) <= allowed, low, high)
    assert target is not None
    spent = price(target)
    assert spent <= allowed
    best = min(loss(t) for t in itertools.product(range(4), repeat=len(weights)) if price(t) <= spent)
    assert loss(target) <= best * (1 + 1e-9) + 1e-15


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 40), page_tokens=st.sampled_from([1, 4]))
def test_every_bucket_has_the_least_price_that_fits(seed: int, n: int, page_tokens: int) -> None:
    """Against all prices at which something changes: no error is left that the bytes of a bucket could have saved."""
    page, error, buckets = (160, 40, 30, 20), (0.0, 0.011, 0.036, 0.119), 3
    prices = allocate.Prices(page, page_tokens)
    _, slopes = allocate.hull([x / page_tokens for x in page], error)
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(np.exp(3 * rng.standard_normal(n)))
    bucket, tier = (torch.from_numpy(rng.integers(0, high, n)) for high in (buckets, 4))
    others = torch.from_numpy(rng.integers(0, 9, (buckets, 4)))
    ranked = allocate.Ranked(allocate.rank(weight), bucket, tier, prices, error)

    def bytes_of(target: torch.Tensor) -> torch.Tensor:
        return prices.each(prices.counts(bucket, target, buckets) + others)

    def loss(target: torch.Tensor, mine: torch.Tensor) -> float:
        return float((weight * torch.tensor(error, dtype=torch.float64)[target])[mine].sum())

    low, high = bytes_of(ranked.lowest()), bytes_of(tier)
    allowed = low + ((high - low).clamp(min=0) * torch.from_numpy(rng.random(buckets))).long()
    found = ranked.cheapest_each(others, allowed)
    assert bool((found >= tier).all())
    assert bool((bytes_of(found) <= allowed).all())
    family, _, _ = allocate.by_weight(weight, [x / page_tokens for x in page], error)
    for b in range(buckets):
        mine = bucket == b
        changes = sorted({w * s for w in weight[mine].tolist() for s in slopes}, reverse=True)
        best = ranked.lowest()
        for change in changes:
            tried = torch.maximum(tier, family(change))  # what changes at this price does not go down any more
            if int(bytes_of(tried)[b]) > int(allowed[b]):
                break
            best = tried
        assert loss(found, mine) <= loss(best, mine) * (1 + 1e-9)


def test_buckets_of_nothing_have_a_price_too() -> None:
    prices = allocate.Prices((64, 16), 16)
    none = torch.zeros(0, dtype=torch.int64)
    ranked = allocate.Ranked(none, none, none, prices, (0.0, 0.1))
    assert len(ranked.cheapest_each(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))) == 0
    one = torch.tensor([1])
    ranked = allocate.Ranked(allocate.rank(torch.ones(1)), one, one * 0, prices, (0.0, 0.1))
    others = torch.tensor([[40, 0], [0, 0], [0, 3]])
    assert ranked.cheapest_each(others, torch.tensor([0, 16, 0])).tolist() == [1]
    assert ranked.cheapest_each(others, torch.tensor([0, 64, 0])).tolist() == [0]


@given(st.lists(st.floats(0, exclude_min=True, allow_infinity=True), min_size=2, max_size=8))
def test_ranks_are_in_the_order_of_their_numbers(numbers: list[float]) -> None:
    x = torch.tensor(sorted(numbers), dtype=torch.float64)
    rank = allocate.rank(x)
    assert bool((rank.diff() >= 0).all())
    assert bool((rank >> allocate.BITS == 0).all())
    normal = (x > 1e-300) & x.isfinite()
    least = allocate.unrank(rank)
    assert bool((least <= x).all())
    assert bool((least * (1 + 2**-28) > x)[normal].all())
    assert torch.equal(allocate.rank(least), rank)


def test_hull_leaves_out_what_is_never_best() -> None:
    tiers, slopes = allocate.hull([16, 4, 3.9, 2], [0, 0.01, 0.1, 0.12])
    assert tiers == [0, 1, 3]
    assert slopes == sorted(slopes)
    assert allocate.hull([16, 4, 4, 4], [0, 0.01, 0.03, 0.1])[0] == [0, 1]


# Policies


def test_uniform_has_two_neighbouring_tiers_by_age() -> None:
    cache = make(policy="uniform", budget=0.3, dtype=torch.bfloat16)
    cache.append(0, *rows(1500, dtype=torch.bfloat16))
    tiers = cache.tier_map(0)[0, 4:-32]
    assert (tiers.diff() <= 0).all()
    assert len(tiers.unique()) == 2
    assert tiers.max() - tiers.min() == 1


def test_recency_gives_the_newest_the_most() -> None:
    cache = make(policy="recency", budget=0.25, dtype=torch.bfloat16)
    cache.append(0, *rows(3000, dtype=torch.bfloat16))
    tiers = cache.tier_map(0)[0, 4:-32]
    assert (tiers.diff() <= 0).all()
    assert len(tiers.unique()) >= 3


def test_importance_keeps_what_matters_per_head() -> None:
    cache = make(budget=0.35, dtype=torch.bfloat16, recent_tokens=128)
    cache.append(0, *rows(120, dtype=torch.bfloat16))
    mass = torch.full((1, 2, 120), 1e-3)
    mass[0, 0, 20:60], mass[0, 1, 60:100] = 1.0, 1.0
    cache.update_importance(0, mass, queries=100)
    cache.append(0, *rows(1500, dtype=torch.bfloat16, seed=1))
    cache.check()
    tiers = cache.tier_map(0)
    assert tiers[0, 20:60].max() < tiers[0, 60:100].min()
    assert tiers[1, 60:100].max() < tiers[1, 20:60].min()


def test_one_choice_for_all_heads() -> None:
    cache = make(per_head=False, budget=0.25)
    for part in range(4):
        cache.append(0, *rows(200, seed=part))
        cache.update_importance(0, torch.rand(1, 2, 4096) ** 6)
        tiers = cache.tier_map(0)
        assert (tiers[0] == tiers[1]).all()


@pytest.mark.parametrize("mode", ["mean", "ema"])
def test_estimate_is_the_mass_per_query(mode: str) -> None:
    cache = make(importance=mode, decay=0.5, budget=0.3)
    cache.append(0, *rows(50))
    mass = torch.rand(1, 2, 70)
    for i in range(20):
        cache.append(0, *rows(1, seed=i))
        cache.update_importance(0, mass)
    torch.testing.assert_close(cache.importance(0)[:, :66], mass[0, :, :66], rtol=0.3, atol=0.03)
    cache.append(0, *rows(1, seed=1))
    assert cache.importance(0)[:, -1].tolist() == pytest.approx([1 / 71] * 2, rel=0.1)


def test_importance_moves_with_its_token() -> None:
    cache = make(budget=0.3)
    cache.append(0, *rows(50))
    mass = torch.arange(50.0).expand(1, 2, 50) / 50
    cache.update_importance(0, mass)
    before = cache.importance(0)
    cache.append(0, *rows(700, seed=1))
    cache.crop(0, 50)
    assert (cache.tier_map(0)[:, 4:] > 0).any()
    torch.testing.assert_close(cache.importance(0), before)


def test_hysteresis_protects_what_is_settled() -> None:
    def demoted(hysteresis: float) -> int:
        cache = make(hysteresis=hysteresis, budget=0.2, dtype=torch.bfloat16, tiers=("K4V4", "K2V2"))
        random_ = torch.Generator().manual_seed(0)
        count = 0
        for part in range(12):
            before = cache.tier_map(0) if part else None
            cache.append(0, *rows(120, dtype=torch.bfloat16, seed=part))
            if before is not None:
                count += int(((before == 1) & (cache.tier_map(0)[:, : before.shape[1]] == 2)).sum())
            cache.update_importance(0, torch.rand(1, 2, 4096, generator=random_))
        return count

    assert demoted(2.0) < demoted(0.0)


def test_settling_is_amortised() -> None:
    cache = make(budget=0.25, dtype=torch.bfloat16, settle_every=16, policy="recency")
    cache.append(0, *rows(1500, dtype=torch.bfloat16))
    changes, before = 0, cache.tier_map(0)
    for i in range(64):
        cache.append(0, *rows(1, dtype=torch.bfloat16, seed=i))
        after = cache.tier_map(0)
        changes += int((after[:, : before.shape[1]] != before).any())
        before = after
    assert changes <= 8
