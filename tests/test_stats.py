"""The statistics against scipy, against values worked out by hand, and by what they promise: coverage."""

import math

import numpy as np
import pytest
import scipy.stats

from kvstrata.tools.bench.stats import hedges_g, rank_test, ratio, summary
from kvstrata.tools.tune import decide, experiment
from kvstrata.tools.tune.gates import Profile

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
    summaries = [summary(draw(np.random.default_rng(seed)), seed=seed) for seed in range(200)]
    assert 0.90 <= np.mean([s.lo <= true <= s.hi for s in summaries]) <= 0.995


def test_interval_of_a_ratio_covers_it():
    hits = 0
    for seed in range(200):
        r = np.random.default_rng(seed)
        summaries = ratio(r.lognormal(0.2, 0.2, 50), r.lognormal(0, 0.2, 40), seed=seed)
        hits += summaries.lo <= math.exp(0.2) <= summaries.hi
    assert 0.90 <= hits / 200 <= 0.995


def test_ratio_is_the_speedup_of_the_second():
    r = ratio([10.0, 10, 10], [5.0, 5, 5])
    assert (r.value, r.lo, r.hi) == (2, 2, 2)


def test_hedges_g_by_hand():
    # means 2 and 4, both variances 1: d = -2, and J = 1 - 3 / (4 * 6 - 9) = 0.8
    assert hedges_g([1, 2, 3], [3, 4, 5]) == pytest.approx(-1.6)
    assert hedges_g([3, 4, 5], [1, 2, 3]) == pytest.approx(1.6)


def test_hedges_g_without_tails():
    r = np.random.default_rng(3)
    a, b = r.normal(102, 2, 5000), r.normal(100, 2, 5000)
    assert hedges_g(a, b, 0.05) == pytest.approx(hedges_g(a, b), rel=0.02)  # the same for normal samples
    clipped = scipy.stats.mstats.winsorize(a, (0.05, 0.05)).data, scipy.stats.mstats.winsorize(b, (0.05, 0.05)).data
    assert hedges_g(a, b, 0.05) == pytest.approx(hedges_g(*clipped) * 0.9118, rel=1e-3)
    spoiled = np.where(np.arange(5000) % 50 == 0, 300, b)
    assert hedges_g(a, spoiled) < 0
    assert hedges_g(a, spoiled, 0.05) == pytest.approx(hedges_g(a, b), rel=0.1)


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


def test_too_few_or_non_positive_samples_raise():
    with pytest.raises(ValueError, match="at least 2"):
        hedges_g([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        ratio([1.0, 0.0], [1.0])


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_the_gate_rejects_equal_samples(noise):
    """A/A: at most 5 %, with confidence: the upper end of the exact interval. The stages of the gate, and both."""
    summaries = experiment.simulated(noise, 1.0, 200)
    assert scipy.stats.binomtest(summaries.confirm, summaries.n).proportion_ci().high <= 0.05
    assert summaries.promoted <= summaries.confirm


@pytest.mark.parametrize(("noise", "factor", "least"), [(0.02, 1.05, 0.95), (0.05, 1.1, 0.95)])
def test_the_gate_has_power(noise, factor, least):
    """A truly faster candidate is confirmed; past the quick gate it must win by more than the required 5 %."""
    summaries = experiment.simulated(noise, factor, 60)
    assert summaries.confirm / summaries.n >= least
    assert summaries.measured == pytest.approx(factor, rel=0.01)


def test_a_small_difference_in_large_noise_is_not_enough():
    """Hedges' g: half a standard deviation apart, however many samples."""
    r = np.random.default_rng(0)
    verdict = decide.confirm(r.normal(105, 10, 4000), r.normal(100, 10, 4000))
    assert verdict.p < 1e-6
    assert verdict.incumbent.lo > verdict.candidate.hi
    assert verdict.failed.startswith("Hedges' g is 0.4")


@pytest.mark.parametrize(
    ("candidate", "failed"),
    [
        (lambda r: r.normal(90, 1, 100), None),
        (lambda r: r.normal(110, 1, 100), "not faster"),
        (lambda r: r.normal(99.8, 3, 100), "the intervals overlap"),
        (lambda r: np.where(np.arange(100) == 0, 1.0, r.normal(100.5, 1, 100)), "not faster"),  # one lucky sample
    ],
    ids=["faster", "slower", "overlapping", "lucky"],
)
def test_confirm_gives_the_reason(candidate, failed):
    r = np.random.default_rng(1)
    verdict = decide.confirm(r.normal(100, 3, 100), candidate(r))
    assert verdict.faster == (failed is None)
    if failed:
        assert verdict.failed.startswith(failed)
    else:
        assert verdict.ratio == pytest.approx(100 / 90, rel=0.01)


def test_quick_gate_requires_five_percent_or_a_better_profile():
    slow, fast = np.full(40, 100.0), np.full(40, 98.0)
    assert not decide.passes_quick(slow, fast)
    assert decide.passes_quick(slow, fast, profile_is_better=True)
    assert decide.passes_quick(slow, np.full(40, 95.0))
    assert not decide.passes_quick(fast, slow, profile_is_better=True)
    here, more = Profile(128, 0, 0, 0.2), Profile(64, 0, 0, 0.3)
    assert decide.better_profile(more, here)
    assert not decide.better_profile(here, more)
    assert not decide.better_profile(Profile(64, 8, 0, 0.3), here), "it spills"
