"""Statistics that decide: medians with intervals, effect size, rank test.

Timing samples are skewed and have outliers, so location is the median and its uncertainty a seeded bootstrap;
equal samples always give equal results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Order statistics of one set of samples; ``lo`` to ``hi`` is the 95 % interval of the median."""

    n: int
    median: float
    p5: float
    p25: float
    p75: float
    p95: float
    lo: float
    hi: float


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its 95 % interval."""

    value: float
    lo: float
    hi: float


def summary(samples: ArrayLike, seed: int = 0) -> Summary:
    """Median, percentiles and the bootstrap 95 % interval of the median."""
    x = _checked(samples, "samples")
    p5, p25, median, p75, p95 = np.percentile(x, [5, 25, 50, 75, 95])
    lo, hi = _interval(_medians(x, np.random.default_rng(seed)))
    return Summary(x.size, float(median), float(p5), float(p25), float(p75), float(p95), lo, hi)


def ratio(a: ArrayLike, b: ArrayLike, seed: int = 0) -> Ratio:
    """median(a) / median(b) with its bootstrap 95 % interval: the speed-up of b over a when both are times."""
    x, y = _checked(a, "a"), _checked(b, "b")
    if x.min() <= 0 or y.min() <= 0:
        raise ValueError("ratio: expected positive samples")
    rng = np.random.default_rng(seed)
    lo, hi = _interval(_medians(x, rng) / _medians(y, rng))
    return Ratio(float(np.median(x) / np.median(y)), lo, hi)


def hedges_g(a: ArrayLike, b: ArrayLike, tails: float = 0.0) -> float:
    """Difference of means in pooled standard deviations, corrected for small samples; positive when a is larger.

    `tails`: this share of the samples at either end is replaced by the quantile there (winsorized), so that no outlier
    determines the spread; the deviation is rescaled to be unchanged for normal samples. Without any variance the
    result is 0 for equal means and infinite otherwise.
    """
    x, y = (_checked(s, name, least=2) for s, name in ((a, "a"), (b, "b")))
    if tails:
        x, y = (np.clip(s, *np.quantile(s, [tails, 1 - tails])) for s in (x, y))
    n = x.size + y.size
    difference = float(x.mean() - y.mean())
    pooled = math.sqrt(float((x.size - 1) * x.var(ddof=1) + (y.size - 1) * y.var(ddof=1)) / (n - 2))
    if pooled == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    pooled /= _winsorized_std(tails)
    return difference / pooled * (1 - 3 / (4 * n - 9))


def rank_test(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p of the Mann-Whitney rank test: the probability of such ranks if a and b do not differ."""
    x, y = _checked(a, "a"), _checked(b, "b")
    if min(x.min(), y.min()) == max(x.max(), y.max()):
        return 1.0
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(x, y, alternative="two-sided").pvalue)


def _checked(samples: ArrayLike, name: str, least: int = 1) -> Array:
    x = np.asarray(samples, dtype=np.float64).ravel()
    if x.size < least:
        raise ValueError(f"{name}: expected at least {least} sample(s), got {x.size}")
    if not np.isfinite(x).all():
        raise ValueError(f"{name}: {int((~np.isfinite(x)).sum())} of {x.size} samples are not finite")
    return x


def _winsorized_std(tails: float) -> float:
    """Standard deviation of a winsorized standard normal variable."""
    if not tails:
        return 1.0
    normal = NormalDist()
    z = normal.inv_cdf(1 - tails)
    return math.sqrt(1 - 2 * tails - 2 * z * normal.pdf(z) + 2 * tails * z * z)


def _medians(x: Array, rng: np.random.Generator) -> Array:
    return np.median(x[rng.integers(x.size, size=(RESAMPLES, x.size))], axis=1)


def _interval(values: Any) -> tuple[float, float]:
    lo, hi = np.percentile(values, [2.5, 97.5])
    return float(lo), float(hi)
