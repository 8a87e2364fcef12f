"""The allocator: which tier each token should have so that the pages fit the bytes and the expected error is least.

Every policy is a family of assignments that get cheaper as one number grows; the least such number that fits is
found by bisection, with the exact price in whole pages, so there is no rounding reserve. Tokens are only ever moved
to cheaper tiers. Everything is a few vector operations over all tokens at once.

The error of a format is that of its widths: the squared error relative to the row, from the signal-to-noise ratio
that `tests/test_quantize.py` measures on Gaussian rows. An error in K moves scores: with a relative error e the noise
of a score has the variance `K_NOISE` e, and the weight exp(score) of the token is off by `spread` of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..layout.format import Format

SQNR_DB = {2: 9.3, 3: 14.4, 4: 19.5, 8: 43.8}
K_NOISE = 2.0  # variance of a score by the relative error of K; KL on packed bytes hardly tells 0.5 from 4
STEPS = 24  # of a bisection: a part in 10,000 of the price, and slots that are left over are filled

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


@dataclass(frozen=True)
class Prices:
    """What pages cost: ``page[tier]`` bytes for ``page_tokens`` tokens of one bucket."""

    page: tuple[int, ...]
    page_tokens: int

    def counts(self, bucket: torch.Tensor, tier: torch.Tensor, buckets: int) -> torch.Tensor:
        """Tokens per bucket and tier ``[buckets, tiers]``; a tier of -1 is dropped."""
        columns = len(self.page) + 1  # the first is for the dropped
        return torch.bincount(bucket * columns + tier + 1, minlength=buckets * columns).view(buckets, columns)[:, 1:]

    def total(self, counts: torch.Tensor, headroom: int = 0) -> int:
        """Bytes of whole pages, with room for ``headroom`` more plain tokens in every bucket."""
        pages = counts.cpu().numpy().astype(np.int64)
        pages[:, 0] += headroom
        return int((-(-pages // self.page_tokens) @ np.asarray(self.page)).sum())

    def each(self, counts: torch.Tensor, headroom: int | torch.Tensor = 0) -> torch.Tensor:
        """The same for every bucket on its own: int64 ``[buckets]``, on the device; the headroom may be too."""
        plain = torch.zeros_like(counts)
        plain[:, 0] = headroom
        pages = (counts + plain + self.page_tokens - 1) // self.page_tokens
        return (pages * torch.tensor(self.page, device=counts.device)).sum(1)


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

    return family, min(slopes) / 2, max(slopes) * 2


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


def cheapest_each(
    family: Family,
    cost: Callable[[torch.Tensor], torch.Tensor],
    part: torch.Tensor,
    allowed: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    geometric: bool,
) -> torch.Tensor:
    """The same for many parts, ``part`` is that of each token; the greatest number must fit all. Never waits for the
    device."""
    under, over = low, high
    best = family(over)
    for _ in range(STEPS):
        middle = (under * over).sqrt() if geometric else (under + over) / 2
        tried = family(middle)
        fits = cost(tried) <= allowed
        best = torch.where(fits[part], tried, best)
        over, under = torch.where(fits, middle, over), torch.where(fits, under, middle)
    return best
