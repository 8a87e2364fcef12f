"""Comparison of a candidate with the incumbent: a quick gate that saves time, then one that decides.

    quick     40 samples: at least 5 % faster, or no slower with a better profile; abandoned after 10 if all are slower
    confirm   100 samples: 95 % intervals of the medians do not overlap, Hedges' g at least 0.8, rank test below 0.05

Samples of both are interleaved (`bench.timer`), so drift affects both. A few lucky samples change neither a median nor
a rank, and g ignores the outermost 5 % at either end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstrata.tools.bench.stats import Array, Summary, hedges_g, rank_test, summary

from .gates import Profile

QUICK, CONFIRM = 40, 100  # samples
FASTER = 1.05  # incumbent over candidate
EFFECT = 0.8
TAILS = 0.05  # share of the samples at either end, for the effect size
LEVEL = 0.05
# L2 hits up by 8 points, DRAM throughput down by 10, achieved occupancy up by 8: +1 is more, -1 is less.
METRICS = {"l2_hit": (1, 8.0), "dram": (-1, 10.0), "occupancy": (1, 8.0)}
FEWEST = 10  # minimum number of samples before a candidate is given up
BETTER_OCCUPANCY = 0.08  # share of a multiprocessor's warps


@dataclass(frozen=True)
class Verdict:
    """Two sets of samples compared; `ratio` above 1: the candidate is faster. `failed`: why it is rejected."""

    incumbent: Summary
    candidate: Summary
    ratio: float
    g: float
    p: float
    failed: str | None

    @property
    def faster(self) -> bool:
        return self.failed is None


def better_profile(candidate: Profile, incumbent: Profile) -> bool:
    """True if more warps are resident and no more bytes are spilled."""
    return candidate.spills <= incumbent.spills and candidate.occupancy >= incumbent.occupancy + BETTER_OCCUPANCY


def better_metrics(candidate: Mapping[str, float], incumbent: Mapping[str, float]) -> bool:
    """True if one of METRICS (names of `profile.ncu`) is better by its margin and none is worse by it."""
    gains = [
        sign * (candidate[name] - incumbent[name]) / margin
        for name, (sign, margin) in METRICS.items()
        if name in candidate and name in incumbent
    ]
    return any(gain >= 1 for gain in gains) and not any(gain <= -1 for gain in gains)


def hopeless(incumbent: Array, candidate: Array) -> bool:
    """True if all samples are slower than the incumbent's median; with ten samples, by chance once in 1,024."""
    return candidate.size >= FEWEST and float(candidate.min()) > float(np.median(incumbent))


def passes_quick(incumbent: Array, candidate: Array, profile_is_better: bool = False) -> bool:
    """True if the candidate is worth confirming."""
    ratio = float(np.median(incumbent) / np.median(candidate))
    return ratio >= (1.0 if profile_is_better else FASTER)


def confirm(incumbent: Array, candidate: Array) -> Verdict:
    """Verdict on whether the candidate is faster beyond noise."""
    a, b = summary(incumbent), summary(candidate, seed=1)
    g, p = hedges_g(incumbent, candidate, TAILS), rank_test(incumbent, candidate)
    failed = None
    if b.median >= a.median:
        failed = f"not faster: {b.median:.2f} us against {a.median:.2f}"
    elif b.hi >= a.lo:
        failed = f"the intervals overlap: up to {b.hi:.2f} us against from {a.lo:.2f}"
    elif g < EFFECT:
        failed = f"Hedges' g is {g:.2f}, expected at least {EFFECT}"
    elif p >= LEVEL:
        failed = f"the rank test says p = {p:.2g}, expected below {LEVEL}"
    return Verdict(a, b, a.median / b.median, g, p, failed)
