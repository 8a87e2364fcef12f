"""Layers that suffer more from rounding get more bytes, under the same sum."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_model import make, prompt
from kvstrata import TieredCache
from kvstrata.cache.policy.shares import BYTES, by_slack, shares_of
from kvstrata.hf import StrataCache
from kvstrata.quant.calibration import Calibration, LayerCalibration

SIZES = dict(budget=0.25, recent_tokens=28, page_tokens=16, settle_every=16, dtype=torch.float16, max_tokens=4096)
COST = [1.0, 30.0, 3.0, 0.0]


def cache_of(sensitivity: list[float] | None = None, **options) -> TieredCache:
    layers = len(sensitivity or COST)
    return TieredCache(layers, 2, 64, **SIZES | options, sensitivity=sensitivity)


def fill(cache: TieredCache, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in range(cache.layers):
        cache.append(layer, *torch.randn(2, tokens, 2, 64, generator=generator).half())


def test_bytes_follow_the_logarithm() -> None:
    assert by_slack([5.0] * 3, 20.0, 60.0, 64) == pytest.approx((1.0, 1.0, 1.0))
    shares = np.array(by_slack([1.0, np.e, np.e**2], 20.0, 60.0, 64))
    assert shares.mean() == pytest.approx(1.0)
    assert 20 * np.diff(shares) == pytest.approx([BYTES * 64] * 2)
    steep = np.array(by_slack([1.0, 1e5, 0.0, 1.0], 20.0, 60.0, 64))
    assert steep.mean() == pytest.approx(1.0)
    assert steep[1] == pytest.approx(3.0)  # the widest tier
    assert steep[2] == 0.0  # the lowest
    for tiny in (1e-307, 5e-324):
        assert by_slack([0.0, tiny], 20.0, 60.0, 64) == pytest.approx(by_slack([0.0, 1.0], 20.0, 60.0, 64))
    assert by_slack([0.0, 0.0], 20.0, 60.0, 64) == by_slack([1.0, 2.0], -1.0, 60.0, 64) == ()


def test_no_layer_is_allowed_more_than_the_widest_tier() -> None:
    """Prices are those of a page; the widest tier is the first that is quantised."""
    budget = SimpleNamespace(page_price=[16384, 8448, 2304], page_tokens=64, amount=0.3, token_bytes=256)
    shares = shares_of(budget, [1.0] * 12 + [1e6], 64)
    slack, most = 0.3 * 256 - 2304 / 64, (8448 - 2304) / 64
    assert max(shares) * slack == pytest.approx(most)
    assert sum(shares) == pytest.approx(13)


def test_the_sum_stays_and_no_layer_is_starved() -> None:
    alike, shared = cache_of().budget, cache_of(COST).budget
    assert shared.shares
    assert not alike.shares
    lengths = np.arange(4097)
    granted = np.stack([shared.granted_at(layer, lengths) for layer in range(4)])
    plain = alike.granted_by_length[lengths]
    total = 4 * plain
    assert (granted.sum(0) <= total).all()
    assert (granted.sum(0) > total - 8).all()
    assert (np.diff(granted[:, 64:]) >= 0).all()
    need = np.array([shared.need(n) for n in lengths])
    assert (granted >= np.minimum(need, plain)).all()
    assert granted[1, -1] > 1.1 * granted[0, -1]
    assert shared.allowed(np.array([[100, 3000, 200, 4096]]), 1) == sum(
        shared.pages(n, layer) + shared.overhead for layer, n in enumerate((100, 3000, 200, 4096))
    )


def test_a_sensitive_layer_has_wider_tiers() -> None:
    alike, shared = cache_of(), cache_of(COST)
    for cache in (alike, shared):
        fill(cache, 3000)
        cache.settle()
        cache.check()
    tiers = [float(shared.tier_map(layer).float().mean()) for layer in range(4)]
    assert tiers[1] < tiers[2] < tiers[0] <= tiers[3]
    assert tiers[1] < float(alike.tier_map(1).float().mean()) - 0.2
    assert shared.memory().total <= alike.memory().allowed
    twin = copy.deepcopy(shared)
    assert twin.budget.shares == shared.budget.shares
    fill(twin, 400)
    twin.check()


def test_steps_keep_the_shares() -> None:
    """Token by token through `advance`, layers have the bytes of their share at every length."""
    cache = cache_of(COST)
    fill(cache, 1500)
    for _ in range(40):
        cache.advance([0])
        for layer in range(4):
            cache.write(layer, *torch.randn(2, 1, 2, 64).half())
        cache.check()
        held = cache.buckets.pages_of([0])[0] @ np.array(cache.policy.prices.page)
        length = cache.length(0)
        assert (held <= cache.budget.granted_at(np.arange(4), length) - cache.budget.overhead).all()


def test_no_shares_without_slack() -> None:
    assert not cache_of(COST, budget=None).budget.shares
    assert not cache_of(COST, budget=None, budget_bytes=1 << 22).budget.shares
    assert not cache_of(COST, budget=0.9).budget.shares  # all old tokens are 8 bit
    with pytest.raises(ValueError, match="sensitivity: expected 4 numbers, one per layer, got 3"):
        TieredCache(4, 2, 64, sensitivity=[1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match=r"sensitivity: expected 2 numbers, one per layer, got 1\.5"):
        TieredCache(2, 2, 64, sensitivity=1.5)
    with pytest.raises(ValueError, match="sensitivity: expected a number in"):
        TieredCache(2, 2, 64, sensitivity=[1.0, -2.0])


def test_a_calibration_provides_its_sensitivities() -> None:
    model = make("llama")
    layers = [LayerCalibration()] * model.config.num_hidden_layers
    cost = [9.0] + [1.0] * (len(layers) - 1)
    calibration = Calibration(layers, cost, [0.0] * len(layers), 2)
    assert calibration.sensitivity == tuple(cost)
    assert Calibration(layers).sensitivity is None
    cache = StrataCache(model.config, calibration=calibration, page_tokens=16, recent_tokens=12)
    model(prompt(1, 40), past_key_values=cache)
    shares = cache.tiered.budget.shares
    assert shares[0] > shares[1]
    with pytest.raises(TypeError, match=r"sensitivity: expected to be left out.*calibration"):
        StrataCache(model.config, sensitivity=cost)
