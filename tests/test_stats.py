"""The statistics against scipy, against values worked out by hand, and by what they promise: coverage."""

import math

import numpy as np
import pytest
import scipy.stats

from kvstrata.bench.stats import hedges_g, rank_test, ratio, summary

rng = np.random.default_rng(7)
A, B = rng.lognormal(1.0, 0.1, 60), rng.lognormal(1.05, 0.1, 45)


def test_summary_is_the_order_statistics():
    s = summary(range(101))
    assert (s.n, s.median, s.p5, s.p25, s.p75, s.p95) == (101, 50, 5, 25, 75, 95)
    assert s.lo < 50 < s.hi


def test_summary_agrees_with_scipy_bootstrap():
    theirs = scipy.stats.bootstrap((A,), np.median, n_resamples=5000, method="percentile", rng=1).confidence_interval
    ours = summary(A)
    assert ours.lo == pytest.approx(theirs.low, rel=0.01)
    assert ours.hi == pytest.approx(theirs.high, rel=0.01)


def test_same_samples_give_the_same_figures():
    assert summary(A) == summary(A.copy())
    assert ratio(A, B) == ratio(list(A), list(B))


def test_one_sample_has_no_spread():
    s = summary([3.5])
    assert s.lo == s.median == s.hi == 3.5


@pytest.mark.parametrize(
    ("draw", "true"),
    [(lambda r: r.lognormal(0, 0.3, 60), 1.0), (lambda r: r.exponential(1.0, 60), math.log(2))],
    ids=["lognormal", "exponential"],
)
def test_interval_covers_the_median(draw, true):
    found = [summary(draw(np.random.default_rng(seed)), seed=seed) for seed in range(200)]
    assert 0.90 <= np.mean([s.lo <= true <= s.hi for s in found]) <= 0.995


def test_interval_of_a_ratio_covers_it():
    hits = 0
    for seed in range(200):
        r = np.random.default_rng(seed)
        found = ratio(r.lognormal(0.2, 0.2, 50), r.lognormal(0, 0.2, 40), seed=seed)
        hits += found.lo <= math.exp(0.2) <= found.hi
    assert 0.90 <= hits / 200 <= 0.995


def test_ratio_is_the_speedup_of_the_second():
    r = ratio([10.0, 10, 10], [5.0, 5, 5])
    assert (r.value, r.lo, r.hi) == (2, 2, 2)


def test_hedges_g_by_hand():
    # means 2 and 4, both variances 1: d = -2, and J = 1 - 3 / (4 * 6 - 9) = 0.8
    assert hedges_g([1, 2, 3], [3, 4, 5]) == pytest.approx(-1.6)
    assert hedges_g([3, 4, 5], [1, 2, 3]) == pytest.approx(1.6)


def test_hedges_g_without_variance():
    assert hedges_g([2, 2], [2, 2]) == 0
    assert hedges_g([3, 3], [2, 2]) == math.inf
    assert hedges_g([1, 1], [2, 2]) == -math.inf


def test_rank_test_is_mann_whitney():
    assert rank_test(A, B) == scipy.stats.mannwhitneyu(A, B, alternative="two-sided").pvalue
    assert rank_test([1, 1, 1], [1, 1]) == 1.0
    assert rank_test(A, A + 10) < 1e-10


def test_rank_test_keeps_its_level_on_equal_samples():
    wrong = sum(
        rank_test(np.random.default_rng(i).normal(size=40), np.random.default_rng(10_000 + i).normal(size=40)) < 0.05
        for i in range(400)
    )
    assert wrong / 400 < 0.08


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [1.0, math.inf]])
def test_bad_samples_are_named(bad):
    for call in (lambda: summary(bad), lambda: ratio(bad, A), lambda: ratio(A, bad), lambda: rank_test(bad, A)):
        with pytest.raises(ValueError, match=r"at least 1 sample|not finite"):
            call()


def test_too_few_or_impossible():
    with pytest.raises(ValueError, match="at least 2"):
        hedges_g([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        ratio([1.0, 0.0], [1.0])
