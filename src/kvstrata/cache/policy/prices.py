"""Prices and errors: bytes of a page in each tier, and the effect of rounding to it on the output.

The error of a format follows from its widths: the squared error relative to the row, from the signal-to-noise ratio
that `tests/test_quantize.py` measures on Gaussian rows. An error in K changes scores: with a relative error e the noise
of a score has the variance `K_NOISE` e, and the weight exp(score) of the token is off by `spread` of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.layout.format import Format

SQNR_DB = {2: 9.3, 3: 14.4, 4: 19.5, 8: 43.8}
K_NOISE = 4.0  # variance of a score by the relative error of K: docs/decisions.md


def spread(variance: float) -> float:
    """E (exp(x) - 1)^2 of a Gaussian x: about its variance if that is small, and far more if not."""
    return math.exp(2 * variance) - 2 * math.exp(variance / 2) + 1


def format_error(format: Format) -> float:
    """Expected squared error of a token's contribution to the output, relative to it."""
    if format.plain:
        return 0.0
    k, v = (10 ** (-SQNR_DB[bits] / 10) for bits in (format.k_bits, format.v_bits))
    return spread(K_NOISE * k) + v


@dataclass(frozen=True)
class Prices:
    """Bytes of pages: ``page[tier]`` bytes hold ``page_tokens`` tokens of one head cache."""

    page: tuple[int, ...]
    page_tokens: int

    def each(self, counts: np.ndarray, headroom: int | np.ndarray = 0) -> np.ndarray:
        """Bytes per head cache of whole pages for ``counts [head_caches, tiers]``, with room for more plain tokens."""
        counts = counts.astype(np.int64)
        counts[:, 0] += headroom
        return -(-counts // self.page_tokens) @ np.asarray(self.page, np.int64)


def hull(cost: Sequence[float], error: Sequence[float]) -> tuple[list[int], list[float]]:
    """Tiers on the lower convex hull of (cost, error), most expensive first, and the error per byte saved."""
    tiers: list[int] = [0]
    slopes: list[float] = []
    while cheaper := [t for t in range(len(cost)) if cost[t] < cost[tiers[-1]]]:
        here = tiers[-1]
        slope, _, best = min(((error[t] - error[here]) / (cost[here] - cost[t]), cost[t], t) for t in cheaper)
        slopes.append(slope)
        tiers.append(best)
    return tiers, slopes
