"""Tiers that a fraction chooses, from a half to 16 bit: never a worse choice than 8 bit for all old tokens.

Only the plan is made, for heads of 128 with made-up attention mass: bytes in whole pages, expected error, and the cost
of a decode step by the table with which decode balances its work.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from cache_model import make, rows
from kvstrata.attention.decode import stages
from kvstrata.cache import TieredCache
from kvstrata.cache.policy.plan import Scopes
from kvstrata.cache.policy.plan_op import plan_all
from kvstrata.cache.storage.tokens import Tokens

HEADS, LAYERS, DIM = 8, 32, 128
LENGTHS = (1024, 2048, 16384)


@dataclass(frozen=True)
class Outcome:
    bytes: int  # of the pages of a layer
    error: float  # expected, of a token's part of the output by its attention mass
    cost: int  # of a decode step
    narrowest: str


@functools.cache
def cache_of(budget: float, tiers: tuple[str, ...] | None = None) -> TieredCache:
    return TieredCache(LAYERS, HEADS, DIM, budget=budget, tiers=tiers, max_tokens=max(LENGTHS))


def settled(cache: TieredCache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiers after a prompt, and the attention mass of each token: ``[heads, tokens]``."""
    mass = torch.randn(HEADS, tokens, generator=torch.Generator().manual_seed(tokens)).mul(1.5).exp()
    bucket = torch.arange(HEADS).repeat_interleave(tokens)
    position = torch.arange(tokens).repeat(HEADS)
    fresh = torch.full_like(bucket, -1)
    state = Tokens(bucket, fresh, position, position, mass.flatten())
    numbers = np.full((3, HEADS), tokens)
    scope = Scopes(state, numbers, HEADS, (HEADS,), (cache.budget.pages(tokens),))
    plans = plan_all(scope, cache.policy, cache.policy.settle_every)
    assert plans.needed == [None]
    return plans.target.view(HEADS, tokens), mass


def outcome(cache: TieredCache, tier: torch.Tensor, mass: torch.Tensor) -> Outcome:
    counts = torch.stack([(tier == t).sum(1) for t in range(len(cache.formats))], 1)
    error = torch.tensor(cache.policy.error)[tier]
    cost = 0
    for format, count in zip(cache.formats, counts[0].tolist(), strict=True):
        if count:
            pieces = -(-count // stages.stage_tokens(format))
            cost += pieces * stages.cost(format) + stages.begin_cost(format)
    narrowest = cache.formats[int(tier.max())].name
    return Outcome(
        int(cache.policy.prices.each(counts.numpy()).sum()), float((error * mass).sum() / mass.sum()), cost, narrowest
    )


def uniform(cache: TieredCache, tokens: int) -> torch.Tensor:
    """All old tokens in the first tier."""
    tier = torch.ones(HEADS, tokens, dtype=torch.int64)
    tier[:, : cache.sink_tokens] = tier[:, tokens - cache.recent_tokens :] = 0
    return tier


@pytest.mark.parametrize("budget", [0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.99])
def test_from_a_half_on_no_budget_is_worse_than_8_bit(budget: float) -> None:
    cache = cache_of(budget)
    assert cache.formats[1].name == "K8V8"
    for tokens in LENGTHS:
        tier, mass = settled(cache, tokens)
        default = outcome(cache, tier, mass)
        eight = outcome(cache, uniform(cache, tokens), mass)
        allowed = cache.budget.pages(tokens)
        assert default.bytes <= allowed
        assert default.cost <= eight.cost
        if eight.bytes <= allowed:
            assert default.error <= eight.error
        else:  # 8 bit does not fit: what is narrower is one step narrower, in V
            assert default.narrowest == "K8V4"
            narrow = cache_of(budget, ("K8V4",))
            assert default.error <= outcome(narrow, uniform(narrow, tokens), mass).error


def test_at_a_half_a_third_tier_would_add_nothing() -> None:
    """Each tier is one more group of stages in a step. Below K8V4 it helps short contexts alone, under their floor."""
    two, three = cache_of(0.5), cache_of(0.5, ("K8V8", "K8V4", "K4V4"))
    assert [f.name for f in two.formats[1:]] == ["K8V8", "K8V4"]
    for tokens in LENGTHS:
        first, second = (outcome(cache, *settled(cache, tokens)) for cache in (two, three))
        assert first.error <= (1 if tokens > 1024 else 1.2) * second.error
        assert first.cost <= 1.1 * second.cost


@pytest.mark.parametrize("policy", ["importance", "uniform", "recency"])
def test_bytes_to_spare_keep_no_old_token_at_16_bit(policy: str) -> None:
    options = dict(tiers=("K8V8",), policy=policy, settle_every=16, recent_tokens=28, dtype=torch.bfloat16)
    cache = make(budget=0.95, slab_bytes=36864, **options)
    k, v = rows(700, dtype=torch.bfloat16)
    cache.append(0, k[:600], v[:600])
    plain = []
    for i in range(600, 700):
        cache.append(0, k[i : i + 1], v[i : i + 1])
        plain.append(int((cache.tier_map(0) == 0).sum(1).max()))
        memory = cache.memory()
        assert memory.allowed is not None
        assert memory.total <= memory.allowed < 0.92 * memory.full
    kept = cache.recent_tokens + cache.sink_tokens
    assert min(plain) == kept
    assert max(plain) <= kept + 16 + cache.page_tokens  # until there is a page to settle
    assert sum(now < before for before, now in pairwise(plain)) <= 100 // 16
    for length in (699, 671, 650, 600, 333, 30):
        cache.crop(0, length)
        cache.append(0, k[length : length + 1], v[length : length + 1])
    cache.check()
