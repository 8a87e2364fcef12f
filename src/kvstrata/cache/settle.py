"""Settling: from importance or age to the tier of every token, under the bytes of a scope.

A scope is what shares one sum of bytes: a request in a layer (fraction) or all requests of a layer (absolute).
By importance each head has its own part of them, as much per token as the others: heads differ in the size of q, k and
v, so that the mass of one says nothing beside that of another.
Sinks and the recent window stay at the model's precision as long as they are; what was quantised before may only get
cheaper. With hysteresis h a quantised token counts 1 + h times its weight, so that a small change of importance does
not re-encode it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import allocate
from .buckets import DROP, Tokens
from .importance import estimate

POLICIES = ("importance", "recency", "uniform")
TIE = 1e-3  # of a weight, over the length of the context: among equals the newer one is worth more
FLOOR = 0.2  # of the mean weight of a head's tokens, added to each: what was not asked for yet may be tomorrow


@dataclass(frozen=True)
class Policy:
    name: str
    mode: str  # of the importance
    per_head: bool
    evict: bool
    window: int
    sinks: int
    hysteresis: float
    settle_every: int
    prices: allocate.Prices
    error: tuple[float, ...]


@dataclass(frozen=True)
class Scope:
    """Tokens that share ``allowed`` bytes of pages; ``length``, ``queries`` and ``reported`` are per bucket, int64."""

    tokens: Tokens
    length: torch.Tensor
    queries: torch.Tensor
    reported: torch.Tensor
    kv_heads: int
    allowed: int


@dataclass(frozen=True)
class Plan:
    """Targets ``[n]``; ``needed`` is set when even the cheapest assignment takes more than is allowed."""

    target: torch.Tensor
    needed: int | None = None


def _weights(scope: Scope, policy: Policy, movable: torch.Tensor) -> torch.Tensor:
    """What an error in each token counts, float64, positive, no two positions of a bucket alike."""
    tokens, length = scope.tokens, scope.length[scope.tokens.bucket]
    age = (length - tokens.position).double()
    if policy.name != "importance":
        return 1 / age
    queries, reported = scope.queries[tokens.bucket], scope.reported[tokens.bucket]
    weight = estimate(policy.mode, tokens.importance, tokens.position, length, queries, reported).double()
    # A table and not a sum by index: on a GPU that would add in any order.
    table = torch.zeros(2, len(scope.length), int(scope.length.max()), dtype=torch.float64, device=weight.device)
    table[0, tokens.bucket, tokens.position], table[1, tokens.bucket, tokens.position] = (
        weight * movable,
        movable.double(),
    )
    sums, counts = table.sum(-1)
    mean = (sums / counts.clamp(min=1)).clamp(min=torch.finfo(torch.float32).tiny)
    weight = weight / mean[tokens.bucket] + FLOOR
    if not policy.per_head:
        stride = int(scope.length.max()) + 1
        key = tokens.bucket // scope.kv_heads * stride + tokens.position
        _, group = torch.unique(key, return_inverse=True)
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64, device=weight.device)
        weight = sums.index_add_(0, group, weight)[group]
    weight = weight * (1 + TIE * tokens.position / length)
    return torch.where(tokens.tier > 0, weight * (1 + policy.hysteresis), weight)


def _fill(
    target: torch.Tensor,
    current: torch.Tensor,
    movable: torch.Tensor,
    weight: torch.Tensor,
    scope: Scope,
    policy: Policy,
    spare: int,
) -> torch.Tensor:
    """Slots that are paid for and empty go to the weightiest tokens of lower tiers; no page is taken by it."""
    bucket, prices = scope.tokens.bucket, policy.prices
    order = torch.sort(weight, descending=True, stable=True).indices
    order = order[torch.sort(bucket[order], stable=True).indices]
    for tier in range(len(prices.page) - 1):
        counts = prices.counts(bucket, target, len(scope.length))[:, tier] + (spare if tier == 0 else 0)
        free = -counts % prices.page_tokens
        able = (movable & (target > tier) & (current <= tier))[order].long()
        before = able.cumsum(0) - able  # candidates of earlier buckets, and of this one
        first = torch.searchsorted(bucket[order].contiguous(), torch.arange(len(free), device=free.device))
        start = torch.cat([before, before[-1:] + able[-1:]])[first]
        chosen = (able > 0) & (before - start[bucket[order]] < free[bucket[order]])
        target = target.clone()
        target[order] = torch.where(chosen, tier, target[order])
    return target


def plan(scope: Scope, policy: Policy, headroom: int) -> Plan:
    """The least bad assignment that fits, with room for as many as ``headroom`` more plain tokens per bucket.

    Less headroom is left where it does not fit. Nothing is changed here.
    """
    tokens, prices = scope.tokens, policy.prices
    current = tokens.tier.clamp(min=0)
    if len(tokens) == 0:
        return Plan(current)
    buckets = len(scope.length)
    length = scope.length[tokens.bucket]
    kept = (current == 0) & ((tokens.position < policy.sinks) | (tokens.position >= length - policy.window))
    movable = ~kept
    weight = _weights(scope, policy, movable)
    spare = headroom

    def fits(target: torch.Tensor) -> bool:
        return prices.total(prices.counts(tokens.bucket, target, buckets), spare) <= scope.allowed

    if fits(current):
        return Plan(current)
    wanted: allocate.Family
    if policy.name == "uniform":
        age = 1 - (tokens.position.double() + 0.5) / length
        wanted, low, high = allocate.by_age(age, len(prices.page))
    elif bool(movable.any()):
        cost = [price / prices.page_tokens for price in prices.page]
        within, low, high = allocate.by_weight(weight[movable], cost, policy.error)
        bucket = tokens.bucket[movable]

        def wanted(x: float | torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(current).masked_scatter(movable, within(x if isinstance(x, float) else x[bucket]))
    else:
        low, high = 0.0, 1.0

        def wanted(x: float | torch.Tensor) -> torch.Tensor:
            return current

    def family(x: float | torch.Tensor) -> torch.Tensor:
        return torch.where(movable, torch.maximum(current, wanted(x)), current)

    def each(low: float, high: float) -> torch.Tensor | None:
        """Every head under its own part of the bytes: what its lowest tier takes, and more by its tokens."""
        least = family(high)
        if not fits(least):
            return None

        def cost(target: torch.Tensor) -> torch.Tensor:
            return prices.each(prices.counts(tokens.bucket, target, buckets), spare)

        lowest, count = cost(least), torch.bincount(bucket, minlength=buckets)
        more = (scope.allowed - int(lowest.sum())) * count // max(int(count.sum()), 1)
        return allocate.cheapest_each(family, cost, tokens.bucket, lowest + more, low, high)

    def search(kind: allocate.Family, low: float, high: float, apart: bool = False) -> torch.Tensor | None:
        nonlocal spare
        spare = headroom
        while (target := each(low, high) if apart else allocate.cheapest(kind, fits, low, high)) is None and spare:
            spare //= 2
            if fits(current):
                return current
        return target

    apart = policy.name == "importance" and policy.per_head and bool(movable.any())
    target = search(family, low, high, apart)
    if target is None and policy.evict:
        lowest = family(high)
        # Equal over the heads where they choose alike, so that they go together; else one by one.
        rank = weight if not policy.per_head else torch.empty_like(weight)
        if policy.per_head:
            order = torch.sort(weight, stable=True).indices
            rank[order] = torch.arange(1, len(weight) + 1, device=weight.device).double()

        def evicted(x: float) -> torch.Tensor:
            return torch.where(movable & (rank <= x), DROP, lowest)

        target = search(evicted, float(rank.min()) / 2, float(rank.max()))
    if target is not None:
        return Plan(_fill(target, current, movable, weight, scope, policy, spare) if apart else target)
    spare = 0
    return Plan(current, prices.total(prices.counts(tokens.bucket, family(high), buckets)))
