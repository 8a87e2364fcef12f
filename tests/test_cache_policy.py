"""Which tier a token gets: errors of formats, the policies, and importance."""

from __future__ import annotations

import math

import pytest
import torch

from cache_model import make, rows
from kvstrata.cache.policy import prices
from kvstrata.layout import Format
from kvstrata.quant import reference as quant

# Prices and errors


def test_errors_follow_the_measured_ratio() -> None:
    errors = [prices.format_error(Format.parse(n, 64)) for n in ("K16V16", "K8V8", "K4V4", "K4V2", "K2V4", "K2V2")]
    assert errors == sorted(errors)
    x = torch.randn(4096, 64)
    for bits, db in prices.SQNR_DB.items():
        error = x - quant.dequantize(quant.quantize(x, bits))
        assert 10 * math.log10(x.square().sum() / error.square().sum()) == pytest.approx(db, abs=1.0)


def test_hull_skips_tiers_that_are_never_best() -> None:
    tiers, slopes = prices.hull([16, 4, 3.9, 2], [0, 0.01, 0.1, 0.12])
    assert tiers == [0, 1, 3]
    assert slopes == sorted(slopes)
    assert prices.hull([16, 4, 4, 4], [0, 0.01, 0.03, 0.1])[0] == [0, 1]


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


def test_importance_keeps_important_tokens_per_head() -> None:
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


def test_hysteresis_protects_settled_tokens() -> None:
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
