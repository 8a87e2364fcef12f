"""The allocator: which tier each token should have so that the pages fit the bytes and the expected error is least.

Every policy is a family of assignments that get cheaper as one number grows; the least such number that fits is
found by bisection, with the exact price in whole pages, so there is no rounding reserve. Tokens are only ever moved
to cheaper tiers. Everything is a few vector operations over all tokens at once; where every head cache has its own
number (`cheapest_each`), the tokens are sorted once and the search looks at counts alone, many numbers of all head
caches a step.

The error of a format is that of its widths: the squared error relative to the row, from the signal-to-noise ratio
that `tests/test_quantize.py` measures on Gaussian rows. An error in K moves scores: with a relative error e the noise
of a score has the variance `K_NOISE` e, and the weight exp(score) of the token is off by `spread` of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from kvstrata.layout.format import Format

SQNR_DB = {2: 9.3, 3: 14.4, 4: 19.5, 8: 43.8}
K_NOISE = 4.0  # variance of a score by the relative error of K: docs/decisions.md
STEPS = 24  # of a bisection: a part in 10,000 of the price, and slots that are left over are filled
ROUNDS, TRIED = 4, 64  # of the search of many head caches: as fine as 24 steps, and so many numbers tried in each
BITS = 40  # of a rank

Family = Callable[[Any], torch.Tensor]  # the tiers for one number, or for as many as there are parts or tokens


def spread(variance: float) -> float:
    """E (exp(x) - 1)^2 of a Gaussian x: about its variance where that is small, and far more where it is not."""
    return math.exp(2 * variance) - 2 * math.exp(variance / 2) + 1


def format_error(format: Format) -> float:
    """Expected squared error of a token's part of the output, relative to that part."""
    if format.plain:
        return 0.0
    k, v = (10 ** (-SQNR_DB[bits] / 10) for bits in (format.k_bits, format.v_bits))
    return spread(K_NOISE * k) + v


@lru_cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor, made once: to bring one to a device is to wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)


def count(index: torch.Tensor, n: int, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """How often each number below ``n`` is there, or among the chosen. Does not wait for the device, as bincount does
    for the greatest."""
    each = torch.ones_like(index) if chosen is None else chosen.long()
    return torch.zeros(n, dtype=torch.int64, device=index.device).scatter_add_(0, index, each)


@dataclass(frozen=True)
class Prices:
    """Price of pages: ``page[tier]`` bytes hold ``page_tokens`` tokens of one head cache."""

    page: tuple[int, ...]
    page_tokens: int

    def counts(self, head_cache: torch.Tensor, tier: torch.Tensor, head_caches: int) -> torch.Tensor:
        """Tokens per head cache and tier ``[head_caches, tiers]``; a tier of -1 is dropped."""
        columns = len(self.page) + 1  # the first is for the dropped
        return count(head_cache * columns + tier + 1, head_caches * columns).view(head_caches, columns)[:, 1:]

    def total(self, counts: torch.Tensor, headroom: int = 0) -> int:
        """Bytes of whole pages, with room for ``headroom`` more plain tokens in every head cache."""
        pages = counts.cpu().numpy().astype(np.int64)
        pages[:, 0] += headroom
        return int((-(-pages // self.page_tokens) @ np.asarray(self.page)).sum())

    def each(self, counts: torch.Tensor, headroom: int | torch.Tensor = 0) -> torch.Tensor:
        """Bytes per head cache, int64 ``[head_caches]`` on the device; the headroom may be a device tensor."""
        plain = torch.zeros_like(counts)
        plain[:, 0] = headroom
        pages = (counts + plain + self.page_tokens - 1) // self.page_tokens
        return (pages * _constant(self.page, torch.int64, counts.device)).sum(1)


def hull(cost: Sequence[float], error: Sequence[float]) -> tuple[list[int], list[float]]:
    """Tiers on the lower convex hull of (cost, error), dearest first, and the error a byte saved costs between them."""
    at: list[int] = [0]
    slopes: list[float] = []
    while cheaper := [t for t in range(len(cost)) if cost[t] < cost[at[-1]]]:
        here = at[-1]
        rate, _, best = min(((error[t] - error[here]) / (cost[here] - cost[t]), cost[t], t) for t in cheaper)
        slopes.append(rate)
        at.append(best)
    return at, slopes


def by_weight(weight: torch.Tensor, cost: Sequence[float], error: Sequence[float]) -> tuple[Family, float, float]:
    """Minimise sum(weight * error) + price * bytes: the assignment for a price per byte. The prices to search are from
    the least weight times the first factor to the greatest times the second."""
    tiers, slopes = hull(cost, error)
    weight = weight.double()
    weight = weight.clamp(min=max(float(weight.max()) * 1e-12, 1e-300))
    index = torch.tensor(tiers, device=weight.device)

    def family(price: float | torch.Tensor) -> torch.Tensor:
        steps = torch.zeros_like(weight, dtype=torch.int64)
        for slope in slopes:
            steps += weight * slope < price
        return index[steps]

    return family, min(slopes, default=1) / 2, max(slopes, default=1) * 2


def by_age(age: torch.Tensor, tiers: int) -> Family:
    """One tier for all, between two tiers the oldest go first; ``age`` is 0 for the newest, 1 for the oldest. For
    numbers from 0 to ``tiers - 1``."""

    def family(x: float | torch.Tensor) -> torch.Tensor:
        x = torch.as_tensor(x, dtype=torch.float64, device=age.device)
        base = x.long().clamp(max=tiers - 1)
        return (base + (age > 1 - (x - base)).long()).clamp(max=tiers - 1)

    return family


def cheapest(family: Family, fits: Callable[[torch.Tensor], bool], low: float, high: float) -> torch.Tensor | None:
    """The assignment of the least number that fits, or None when the greatest does not."""
    best = family(high)
    if not fits(best):
        return None
    geometric = low > 0
    for _ in range(STEPS):
        middle = (low * high) ** 0.5 if geometric else (low + high) / 2
        if not low < middle < high:
            break
        tried = family(middle)
        if fits(tried):
            best, high = tried, middle
        else:
            low = middle
    return best


def cheapest_parts(
    family: Family, cost: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor, allowed: torch.Tensor, high: float
) -> torch.Tensor:
    """The same for many parts, ``part`` is that of each token, and numbers from 0; the greatest must fit all. Never
    waits for the device."""
    under = torch.zeros_like(allowed, dtype=torch.float64)
    over = under + high
    best = family(over)
    for _ in range(STEPS):
        middle = (under + over) / 2
        tried = family(middle)
        fits = cost(tried) <= allowed
        best = torch.where(fits[part], tried, best)
        over, under = torch.where(fits, middle, over), torch.where(fits, under, middle)
    return best


def rank(x: torch.Tensor) -> torch.Tensor:
    """Positive numbers as whole ones of `BITS` bits in the same order, about as far apart as their logarithms: the
    first bits of a float64, so that every device gives the same."""
    return x.double().view(torch.int64).clamp(min=0) >> (63 - BITS)


def unrank(x: torch.Tensor) -> torch.Tensor:
    """The least number of a rank."""
    return (x << (63 - BITS)).view(torch.float64)


@dataclass(frozen=True)
class Ranked:
    """Tokens that may move, by what an error in each counts: for the search of a price per byte in every head cache."""

    weight: torch.Tensor  # ranks
    head_cache: torch.Tensor
    tier: torch.Tensor
    prices: Prices
    error: tuple[float, ...]

    @cached_property
    def hull(self) -> tuple[list[int], list[float]]:
        return hull([page / self.prices.page_tokens for page in self.prices.page], self.error)

    def lowest(self) -> torch.Tensor:
        """Tiers of the greatest price."""
        return self.tier.clamp(min=self.hull[0][-1])

    def cheapest_each(self, others: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Tiers that minimise sum(weight * error) + price * bytes in every head cache, for the least price that fits
        ``allowed`` bytes ``[head_caches]``; the cheapest assignment must. Tokens ``others`` ``[head_caches, tiers]``
        stay where they are. Never waits for the device, and a head cache gets what it would get alone.

        In whole pages a lower price may fit where a higher does not; every round takes the least that does."""
        tiers, slopes = self.hull
        if not slopes:  # no tier is cheaper than the first
            return self.tier
        device, (head_caches, columns) = self.weight.device, others.shape
        slope = _constant(tuple(max(x, 1e-300) for x in slopes), torch.float64, device)
        index = _constant(tuple(tiers), torch.int64, device)
        group = torch.arange(head_caches * columns + 1, device=device) << BITS  # a head cache's tokens of a tier
        key = torch.sort((self.head_cache * columns + self.tier << BITS) | self.weight).values
        first = torch.searchsorted(key, group)
        size = first.diff().view(head_caches, 1, 1, columns)
        first, group = (x[:-1].view(head_caches, 1, 1, columns) for x in (first, group))
        every = torch.arange(columns, device=device)
        to = (torch.maximum(index[:, None], every).view(-1, 1) == every).double()  # from step and tier to tier
        page = _constant(self.prices.page, torch.float64, device)

        def limits(price: torch.Tensor) -> torch.Tensor:
            """Below which ranks tokens go a step down, and another: one more dimension, falling."""
            return rank(unrank(price)[..., None] / slope)

        def fits(price: torch.Tensor) -> torch.Tensor:
            """``[head_caches, prices]``."""
            below = torch.searchsorted(key, group | limits(price)[..., None]) - first
            ends = [size.expand(-1, price.shape[1], -1, -1), below, torch.zeros_like(below[:, :, :1])]
            steps = -torch.cat(ends, 2).diff(dim=2)  # tokens ``[head_caches, prices, steps, tiers]``
            counts = steps.flatten(2).double() @ to + others[:, None]
            return (counts / self.prices.page_tokens).ceil() @ page <= allowed[:, None]

        empty = size.sum((1, 2, 3)) == 0
        under = torch.full((head_caches,), 1 << BITS, device=device)
        under = under.scatter_reduce(0, self.head_cache, self.weight, "amin")
        over = torch.zeros_like(under).scatter_reduce(0, self.head_cache, self.weight, "amax")
        under, over = torch.where(empty, 0, unrank(under) * min(slopes) / 2), unrank(over) * max(slopes) * 2
        under, over = rank(under), rank(over)
        parts = torch.arange(1, TRIED + 1, device=device)
        for _ in range(ROUNDS):
            tried = torch.cat([under[:, None], under[:, None] + (over - under)[:, None] * parts // TRIED], 1)
            least = fits(tried[:, 1:]).byte().argmax(1, keepdim=True)
            under, over = tried.gather(1, least).squeeze(1), tried.gather(1, least + 1).squeeze(1)
        steps = (self.weight[:, None] < limits(over)[self.head_cache]).sum(1)
        return torch.maximum(self.tier, index[steps])
