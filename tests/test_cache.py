"""The tiered cache, operation by operation, at the edges, and what it refuses. Random orders: test_cache_machine.py."""

from __future__ import annotations

import json
import math
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.cache import BudgetExceeded, TieredCache, allocate, pages, pool
from kvstrata.cache import quantize_reference as quant
from kvstrata.layout import Format
from test_cache_machine import fingerprint, same

CPU = torch.device("cpu")
TIERS = ("K4V4", "K3V3", "K2V2")


def rows(tokens: int, heads: int = 2, dim: int = 64, dtype=torch.float32, seed: int = 0) -> tuple:
    k, v = torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return k, v


def make(layers: int = 1, heads: int = 2, dim: int = 64, **options) -> TieredCache:
    options = dict(window=32, page_tokens=16, dtype=torch.float32, max_tokens=4096, tiers=TIERS, debug=True) | options
    return TieredCache(layers, heads, dim, **options)


def by_head(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


# The pool


def small_pool(**options) -> pool.Pool:
    return pool.Pool([256, 128, 64], 512, 8, CPU, debug=True, **options)


def test_pool_takes_the_lowest_page_and_retypes_empty_slabs() -> None:
    p = small_pool()
    a = p.allocate(0, 3)
    assert a.tolist() == [0, 4, 8]
    b = p.allocate(2, 2)
    assert p.slab_count == 3
    p.release(a)
    assert p.slabs_of(0) == 0
    assert p.slab_count == 3  # empty ones wait
    assert p.allocate(1, 5).tolist() == [0, 2, 4, 6, 8]
    p.release(b)
    p.trim()
    assert p.slab_count == 2
    assert (p.pointers == 0).sum() == 6


def test_pool_counts_owners() -> None:
    p = small_pool()
    a = p.allocate(1, 2)
    p.retain(a[[0, 0]])
    assert p.owners(a).tolist() == [3, 1]
    p.release(a[[0, 0, 1]])
    assert p.owners(a).tolist() == [1, 0]
    with pytest.raises(RuntimeError, match="more often"):
        p.release(a[[0, 0]])


def test_pool_poisons_what_is_free() -> None:
    p = small_pool()
    a = p.allocate(1, 2)
    p.write(a, 0, torch.zeros(2, 128, dtype=torch.uint8))
    p.release(a[:1])
    assert (p.read(a[:1], 0, 128) == pool.POISON).all()
    assert (p.read(a[1:], 0, 128) == 0).all()


def test_pool_compacts_without_losing_a_byte() -> None:
    p = small_pool()
    a = p.allocate(1, 10)
    data = torch.arange(10, dtype=torch.uint8).unsqueeze(1).expand(10, 128).contiguous()
    p.write(a, 0, data)
    keep = np.array([1, 6, 9])
    p.retain(a[[6]])
    p.release(np.delete(a, keep))
    old, new = p.compact(1)
    where = dict(zip(old.tolist(), new.tolist(), strict=True))
    moved = np.array([where.get(h, h) for h in a[keep].tolist()])
    assert torch.equal(p.read(moved, 0, 128), data[keep])
    assert p.owners(moved).tolist() == [1, 2, 1]
    assert p.slabs_of(1) == 1


def test_pool_refuses() -> None:
    with pytest.raises(ValueError, match=r"strides\[1\]: expected a multiple of 64"):
        pool.Pool([256, 100], 512, 4, CPU)
    with pytest.raises(ValueError, match="capacity: expected at most"):
        pool.Pool([64], 1 << 30, 1 << 10, CPU)
    p = pool.Pool([512], 512, 2, CPU)
    with pytest.raises(RuntimeError, match="all 2 are in use"):
        p.allocate(0, 3)


# Pages


@pytest.mark.parametrize("name", ["K32V32", "K8V8", "K4V2", "K3V3", "K2V4"])
@pytest.mark.parametrize(("dim", "tokens"), [(64, 64), (48, 16), (80, 32)])
def test_rows_in_pages_as_the_layout_packs_them(name: str, dim: int, tokens: int) -> None:
    """Token by token into a page of garbage gives what packing the page at once gives."""
    kind = pages.PageKind(Format.parse(name, dim, tokens), torch.float32, torch.int16, True, CPU)
    plain = pages.PageKind(Format.parse("K32V32", dim, tokens), torch.float32, torch.int16, True, CPU)
    k, v = torch.randn(2, 2 * tokens, dim)
    position = torch.randperm(2 * tokens)
    source = pages.Rows(k, v, None, None, position, torch.rand(2 * tokens))
    wanted = source if kind.format.plain else kind.encode(source, plain, torch.zeros(2 * tokens, dim))
    staged = torch.randint(0, 256, (2, kind.stride), dtype=torch.uint8)
    at = torch.randperm(2 * tokens)
    for part in at.split(5):
        kind.write(staged, part // tokens, part % tokens, wanted[part])
    back = kind.read(staged, at // tokens, at % tokens)
    for name_ in ("k", "v", "k_scale", "v_scale", "position", "importance"):
        a, b = getattr(back, name_), getattr(wanted[at], name_)
        assert (a is None and b is None) or torch.equal(a, b), name_
    whole = quant.quantize_page(*(x.view(2, tokens, dim) for x in (k, v)), kind.format)
    clean = torch.zeros(2, kind.stride, dtype=torch.uint8)
    kind.write(clean, at // tokens, at % tokens, wanted[at])
    assert torch.equal(clean[:, : kind.format.page_bytes], whole)


def test_a_width_that_stays_keeps_its_codes() -> None:
    four, mixed = (
        pages.PageKind(Format.parse(name, 64, 16), torch.float32, torch.int16, True, CPU) for name in ("K4V4", "K4V2")
    )
    plain = pages.PageKind(Format.parse("K32V32", 64, 16), torch.float32, torch.int16, True, CPU)
    k, v = torch.randn(2, 8, 64)
    start = four.encode(pages.Rows(k, v, None, None, torch.arange(8), torch.zeros(8)), plain, None)
    moved = mixed.encode(start, four, None)
    assert moved.k is start.k
    assert moved.k_scale is start.k_scale
    assert moved.v.max() <= 3


# The allocator


def test_errors_follow_the_measured_ratio() -> None:
    errors = [allocate.format_error(Format.parse(n, 64)) for n in ("K16V16", "K8V8", "K4V4", "K4V2", "K2V4", "K2V2")]
    assert errors == sorted(errors)
    x = torch.randn(4096, 64)
    for bits, db in allocate.SQNR_DB.items():
        error = x - quant.dequantize(quant.quantize(x, bits))
        assert 10 * math.log10(x.square().sum() / error.square().sum()) == pytest.approx(db, abs=1.0)


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=5, unique=True),
    slack=st.floats(0, 1),
)
def test_by_weight_is_optimal_for_its_bytes(weights: list[float], slack: float) -> None:
    """One token a page: no assignment of the same bytes or fewer has less error (by enumeration)."""
    import itertools

    cost, error = [16.0, 4.0, 3.0, 2.0], [0.0, 0.011, 0.036, 0.119]
    weight = torch.tensor(weights, dtype=torch.float64)
    allowed = 2 * len(weights) + slack * 14 * len(weights)
    family, low, high = allocate.by_weight(weight, cost, error)

    def price(target) -> float:
        return sum(cost[int(t)] for t in target)

    def loss(target) -> float:
        return sum(w * error[int(t)] for w, t in zip(weights, target, strict=True))

    target = allocate.cheapest(family, lambda t: price(t) <= allowed, low, high)
    assert target is not None
    spent = price(target)
    assert spent <= allowed
    best = min(loss(t) for t in itertools.product(range(4), repeat=len(weights)) if price(t) <= spent)
    assert loss(target) <= best * (1 + 1e-9) + 1e-15


def test_hull_leaves_out_what_is_never_best() -> None:
    tiers, slopes = allocate.hull([16, 4, 3.9, 2], [0, 0.01, 0.1, 0.12])
    assert tiers == [0, 1, 3]
    assert slopes == sorted(slopes)
    assert allocate.hull([16, 4, 4, 4], [0, 0.01, 0.03, 0.1])[0] == [0, 1]


# Append and read back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_budget_compresses_nothing(dtype: torch.dtype) -> None:
    for budget in (None, 1.0):
        cache = make(budget=budget, dtype=dtype)
        k, v = rows(200, dtype=dtype)
        cache.append(0, k, v)
        cache.settle()
        cache.check()
        got = cache.gather(0)
        assert torch.equal(got[0], by_head(k))
        assert torch.equal(got[1], by_head(v))
        assert torch.equal(got[2], torch.arange(200).expand(2, -1))
        assert (cache.tier_map(0) == 0).all()


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 35, 36, 37, 63, 64, 65, 500])
@pytest.mark.parametrize("policy", ["importance", "recency", "uniform"])
def test_any_length(tokens: int, policy: str) -> None:
    """Around pages of 16, a window of 32 with 4 sinks, and the 64 tokens of the centre."""
    cache = make(budget=0.25, policy=policy)
    k, v = rows(tokens)
    cache.append(0, k, v)
    cache.check()
    assert cache.length(0) == tokens
    got, _, positions = cache.gather(0)
    assert torch.equal(positions, torch.arange(tokens).expand(2, -1))
    tiers = cache.tier_map(0)
    kept = torch.tensor([i < 4 or i >= tokens - 32 for i in range(tokens)], dtype=torch.bool)
    assert (tiers[:, kept] == 0).all()
    assert torch.equal(got[tiers == 0], by_head(k)[tiers == 0])


def test_nothing_there() -> None:
    cache = make()
    cache.check()
    assert cache.requests == ()
    assert cache.length(0) == 0
    assert cache.memory().kinds["slabs"] == 0
    cache.settle()
    request = cache.add()
    cache.check()
    k, v, positions = cache.gather(0, request)
    assert k.shape == v.shape == (2, 0, 64)
    assert positions.shape == (2, 0)
    cache.crop(request, 0)
    cache.free(request)
    with pytest.raises(ValueError, match=r"request: expected one of \(\), got 0"):
        cache.gather(0)


@pytest.mark.parametrize("budget", [0.2, 0.25, 0.4, 0.6])
def test_a_fraction_is_kept_and_used(budget: float) -> None:
    cache = make(layers=2, budget=budget, dtype=torch.bfloat16, settle_every=16)
    k, v = rows(3000, dtype=torch.bfloat16)
    for layer in range(2):
        cache.append(layer, k, v)
    memory = cache.memory()
    assert memory.total <= budget * memory.full
    assert memory.total >= 0.85 * budget * memory.full
    assert memory.full == 2 * 3000 * 2 * 2 * 64 * 2
    assert sum(memory.tokens.values()) == 2 * 3000 * 2


def test_memory_is_what_was_allocated() -> None:
    cache = make(layers=2, max_requests=3)
    cache.append(0, *rows(700))
    memory = cache.memory()
    slabs = sum(slab.nbytes for slab in cache.pool.slabs if slab is not None)
    tables = cache.buckets.table.nbytes + cache.buckets.count.nbytes + cache.pool.pointers.nbytes
    assert memory.total == slabs + tables + cache.centre.nbytes + cache._device_lengths.nbytes
    assert sum(memory.tiers.values()) + memory.slab_slack == memory.kinds["slabs"]
    assert 0 < memory.page_slack < sum(memory.tiers.values())


def test_chunks_and_single_tokens_give_the_same_tokens() -> None:
    """How tokens came does not change what a quantised row looks like, only when it was quantised."""
    k, v = rows(300)
    whole, steps = (make(policy="recency", tiers=("K4V4",), window=64) for _ in range(2))
    whole.append(0, k, v)
    for i in range(300):
        steps.append(0, k[i : i + 1], v[i : i + 1])
        assert steps.memory().total <= steps.memory().allowed
    steps.check()
    both = (whole.tier_map(0) == 1) & (steps.tier_map(0) == 1)
    assert both.sum() > 300
    assert torch.equal(whole.gather(0)[0][both], steps.gather(0)[0][both])


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """With a fraction: alone and in a ragged batch, bit for bit."""
    parts = [rows(n, seed=n) for n in (7, 300, 0, 129)]
    batch, lengths = make(max_requests=4), [7, 300, 0, 129]
    batch.append(0, torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts]), lengths=lengths)
    batch.check()
    for i, (k, v) in enumerate(parts):
        alone = make(max_requests=4)
        alone.append(0, k, v)
        for a, b in zip(batch.gather(0, i), alone.gather(0), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(batch.tier_map(0, i), alone.tier_map(0))


def test_batched_rows() -> None:
    cache = make(max_requests=3)
    k, v = torch.randn(2, 3, 50, 2, 64)
    cache.append(0, k, v)
    cache.append(0, k[1:2, :1], v[1:2, :1], requests=[2])
    assert [cache.length(r) for r in range(3)] == [50, 50, 51]
    assert torch.equal(cache.gather(0, 2)[0][:, -1], k[1, 0])


def test_order_of_operations_is_deterministic() -> None:
    def run() -> TieredCache:
        cache = make(max_requests=2)
        cache.append(0, *rows(300))
        cache.update_importance(0, torch.rand(1, 2, 4096, generator=torch.Generator().manual_seed(1)))
        cache.append(0, *rows(200, seed=1))
        cache.fork(0)
        cache.append(0, *rows(100, seed=2), requests=[1])
        return cache

    assert same(fingerprint(run())[2:3], fingerprint(run())[2:3])
    for a, b in zip(run().gather(0, 1), run().gather(0, 1), strict=True):
        assert torch.equal(a, b)


# What comes out


def test_quantised_rows_are_as_good_as_their_format() -> None:
    cache = make(heads=3, budget=0.3, tiers=("K4V3", "K3V2", "K2V2"), dtype=torch.float32)
    k, v = rows(2000, heads=3)
    k += 5 * torch.randn(3, 64)  # what the centre is for
    for part in range(0, 2000, 250):
        cache.append(0, k[part : part + 250], v[part : part + 250])
    got_k, got_v, _ = cache.gather(0)
    tiers = cache.tier_map(0)
    for tier, (k_bits, v_bits) in enumerate([(4, 3), (3, 2), (2, 2)], 1):
        at = tiers == tier
        if at.sum() < 50:
            continue
        for got, want, bits in ((got_k, by_head(k), k_bits), (got_v, by_head(v), v_bits)):
            centre = cache.centre[0, 0].unsqueeze(1).expand_as(want) if want is not by_head(v) and got is got_k else 0
            signal = (want - centre)[at].square().sum() if got is got_k else want[at].square().sum()
            noise = (got - want)[at].square().sum()
            # A token may have come through every tier above, each of which left its error.
            floor = -10 * math.log10(sum(10 ** (-allocate.SQNR_DB[b] / 10) for b in range(bits, 5)))
            assert 10 * math.log10(signal / noise) > floor - 0.7


def test_centre_is_the_mean_of_the_first_tokens_and_stays() -> None:
    cache = make()
    k, v = rows(300)
    k += 3
    cache.append(0, k, v)
    centre = cache.centre[0, 0].clone()
    torch.testing.assert_close(centre, k[:64].mean(0))
    cache.append(0, k + 50, v)
    assert torch.equal(centre, cache.centre[0, 0])


@pytest.mark.parametrize("fill", [0.0, 6e4, -3e38, math.inf, math.nan])
def test_a_bad_row_stays_alone(fill: float) -> None:
    k, v = rows(400)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[100], bad_v[200] = fill, fill
    good, bad = make(policy="recency"), make(policy="recency")
    good.append(0, k, v)
    bad.append(0, bad_k, bad_v)
    assert torch.equal(good.tier_map(0), bad.tier_map(0))
    others = torch.ones(400, dtype=torch.bool)
    others[[100, 200]] = False
    for a, b in zip(good.gather(0)[:2], bad.gather(0)[:2], strict=True):
        assert torch.equal(a[:, others], b[:, others])
        assert b.isfinite().all()


def test_nan_among_the_first_tokens_leaves_the_centre_finite() -> None:
    k, v = rows(400)
    k[3, 0, 5], k[4, 1] = math.nan, math.inf
    cache = make(sinks=0)
    cache.append(0, k, v)
    assert cache.centre.isfinite().all()
    others = torch.tensor([i not in (3, 4) for i in range(400)])
    got = cache.gather(0)[0][:, others]
    assert (got - by_head(k)[:, others]).square().mean() < 0.3


# Policies


def test_uniform_has_two_neighbouring_tiers_by_age() -> None:
    cache = make(policy="uniform", budget=0.3, dtype=torch.bfloat16)
    cache.append(0, *rows(1500, dtype=torch.bfloat16))
    tiers = cache.tier_map(0)[0, 4:-32]
    assert (tiers.diff() <= 0).all()
    assert len(tiers.unique()) == 2
    assert tiers.max() - tiers.min() == 1


def test_recency_gives_the_newest_the_most() -> None:
    cache = make(policy="recency", budget=0.25, dtype=torch.bfloat16)
    cache.append(0, *rows(3000, dtype=torch.bfloat16))
    tiers = cache.tier_map(0)[0, 4:-32]
    assert (tiers.diff() <= 0).all()
    assert len(tiers.unique()) >= 3


def test_importance_keeps_what_matters_per_head() -> None:
    cache = make(budget=0.35, dtype=torch.bfloat16, window=128)
    cache.append(0, *rows(120, dtype=torch.bfloat16))
    mass = torch.full((1, 2, 120), 1e-3)
    mass[0, 0, 20:60], mass[0, 1, 60:100] = 1.0, 1.0
    cache.update_importance(0, mass, queries=100)
    cache.append(0, *rows(1500, dtype=torch.bfloat16, seed=1))
    cache.check()
    tiers = cache.tier_map(0)
    assert tiers[0, 20:60].max() < tiers[0, 60:100].min()
    assert tiers[1, 60:100].max() < tiers[1, 20:60].min()


def test_one_choice_for_all_heads() -> None:
    cache = make(per_head=False, budget=0.25)
    for part in range(4):
        cache.append(0, *rows(200, seed=part))
        cache.update_importance(0, torch.rand(1, 2, 4096) ** 6)
        tiers = cache.tier_map(0)
        assert (tiers[0] == tiers[1]).all()


@pytest.mark.parametrize("mode", ["mean", "ema"])
def test_estimate_is_the_mass_per_query(mode: str) -> None:
    cache = make(importance=mode, decay=0.5, budget=0.3)
    cache.append(0, *rows(50))
    mass = torch.rand(1, 2, 70)
    for i in range(20):
        cache.append(0, *rows(1, seed=i))
        cache.update_importance(0, mass)
    torch.testing.assert_close(cache.importance(0)[:, :66], mass[0, :, :66], rtol=0.3, atol=0.03)
    cache.append(0, *rows(1, seed=1))
    assert cache.importance(0)[:, -1].tolist() == pytest.approx([1 / 71] * 2, rel=0.1)


def test_importance_moves_with_its_token() -> None:
    cache = make(budget=0.3)
    cache.append(0, *rows(50))
    mass = torch.arange(50.0).expand(1, 2, 50) / 50
    cache.update_importance(0, mass)
    before = cache.importance(0)
    cache.append(0, *rows(700, seed=1))
    cache.crop(0, 50)
    assert (cache.tier_map(0)[:, 4:] > 0).any()
    torch.testing.assert_close(cache.importance(0), before)


def test_hysteresis_protects_what_is_settled() -> None:
    def demoted(hysteresis: float) -> int:
        cache = make(hysteresis=hysteresis, budget=0.2, dtype=torch.bfloat16, tiers=("K4V4", "K2V2"))
        random_ = torch.Generator().manual_seed(0)
        count = 0
        for part in range(12):
            before = cache.tier_map(0) if part else None
            cache.append(0, *rows(120, dtype=torch.bfloat16, seed=part))
            if before is not None:
                count += int(((before == 1) & (cache.tier_map(0)[:, : before.shape[1]] == 2)).sum())
            cache.update_importance(0, torch.rand(1, 2, 4096, generator=random_))
        return count

    assert demoted(2.0) < demoted(0.0)


def test_settling_is_amortised() -> None:
    cache = make(budget=0.25, dtype=torch.bfloat16, settle_every=16, policy="recency")
    cache.append(0, *rows(1500, dtype=torch.bfloat16))
    changes, before = 0, cache.tier_map(0)
    for i in range(64):
        cache.append(0, *rows(1, dtype=torch.bfloat16, seed=i))
        after = cache.tier_map(0)
        changes += int((after[:, : before.shape[1]] != before).any())
        before = after
    assert changes <= 8


# Budget


def test_exceeded_leaves_everything() -> None:
    cache = make(budget=0.02, max_requests=2)
    cache.append(0, *rows(50))
    before = fingerprint(cache)
    with pytest.raises(BudgetExceeded, match=r"budget: expected at least \d+ bytes .* allowed are \d+") as caught:
        cache.append(0, *rows(500, seed=1))
    assert same(before, fingerprint(cache))
    assert caught.value.needed > caught.value.allowed
    cache.check()
    with pytest.raises(BudgetExceeded):  # the short request would fit: none of both is taken
        cache.append(0, *rows(2001), requests=[1, 0], lengths=[1, 2000])
    assert same(before, fingerprint(cache))


def test_bytes_for_everything() -> None:
    cache = make(budget=400_000, max_requests=4, dtype=torch.bfloat16, max_tokens=2048)

    def fill() -> None:
        for i in range(100):
            cache.append(0, *rows(100, dtype=torch.bfloat16, seed=i), requests=[i % 4])
            cache.check()

    with pytest.raises(BudgetExceeded):
        fill()
    assert cache.memory().total <= 400_000
    low = cache.memory().tokens["K2V2"]
    assert low / sum(cache.memory().tokens.values()) > 0.7  # nothing was refused that could have been squeezed
    cache.free(0)
    cache.append(0, *rows(100, dtype=torch.bfloat16), requests=[1])
    cache.check()


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("policy", ["importance", "recency", "uniform"])
def test_evict_instead(policy: str, per_head: bool) -> None:
    cache = make(budget=0.05, evict=True, policy=policy, per_head=per_head, dtype=torch.bfloat16)
    for i in range(20):
        k, v = rows(100, dtype=torch.bfloat16, seed=i)
        cache.append(0, k, v)
        cache.check()
    _, _, positions = cache.gather(0)
    assert cache.length(0) == 2000
    assert positions.shape[1] < 1000
    for head in positions:
        there = set(head.tolist())
        assert {0, 1, 2, 3, *range(1968, 2000)} <= there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(budget=0), "budget: expected bytes"),
        (dict(budget=1.5), "budget: expected bytes"),
        (dict(budget=10), "budget: expected at least"),
        (dict(budget=True), "budget: expected bytes"),
        (dict(tiers=("K2V2", "K4V4")), "tiers: expected none larger"),
        (dict(tiers=("4",)), "name: expected K<bits>V<bits>"),
        (dict(tiers=()), "tiers: expected at least one"),
        (dict(window=0), "window: expected an int of at least 1, got 0"),
        (dict(sinks=-1), "sinks: expected"),
        (dict(dtype=torch.float64), "dtype: expected one of"),
        (dict(policy="best"), "policy: expected one of"),
        (dict(importance="sum"), "importance: expected one of"),
        (dict(page_tokens=48), "page_tokens: expected one of"),
        (dict(slab_bytes=64), "slab_bytes: expected"),
        (dict(hysteresis=-1.0), "hysteresis: expected"),
        (dict(decay=1.0), "decay: expected"),
        (dict(settle_every=0), "settle_every: expected"),
    ],
)
def test_what_the_cache_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_what_append_refuses() -> None:
    cache = make(max_requests=2, max_tokens=64)
    k, v = rows(10)
    before = fingerprint(cache)
    for call, error, message in [
        (lambda: cache.append(1, k, v), ValueError, "layer: expected an int from 0 to 0, got 1"),
        (lambda: cache.append(0, k[:, :1], v), ValueError, r"k: expected \[tokens, 2, 64\]"),
        (lambda: cache.append(0, k, v[:5]), ValueError, "v: expected shape"),
        (lambda: cache.append(0, k.half(), v.half()), TypeError, "k: expected torch.float32, got torch.float16"),
        (lambda: cache.append(0, k, v, lengths=[3, 3]), ValueError, "lengths: expected numbers that sum to 10"),
        (lambda: cache.append(0, k, v, lengths=[-1, 11]), ValueError, "lengths: expected"),
        (lambda: cache.append(0, k[None], v[None], lengths=[10]), ValueError, "lengths: expected None"),
        (lambda: cache.append(0, k, v, requests=[2]), ValueError, "requests: expected an int from 0 to 1, got 2"),
        (lambda: cache.append(0, k, v, requests=[0, 0], lengths=[5, 5]), ValueError, "requests: expected 2 different"),
        (lambda: cache.append(0, *rows(65)), ValueError, r"at most 64 more tokens for request 0 \(max_tokens 64\)"),
        (lambda: cache.update_importance(0, torch.rand(1, 2, 5)), ValueError, r"mass: expected \[0, 2, at least 0\]"),
        (lambda: cache.settle(requests=[0]), ValueError, "requests: expected one of"),
        (lambda: cache.fork(1), ValueError, "request: expected one of"),
        (lambda: cache.select([1]), ValueError, "indices: expected one of"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert same(before, fingerprint(cache))


# Forks, crops, beams


def test_fork_shares_until_one_writes() -> None:
    cache = make(layers=2, max_requests=3)
    for layer in range(2):
        cache.append(layer, *rows(500))
    used = cache.memory().tiers
    twin = cache.fork(0)
    assert cache.memory().tiers == used
    original = [x.clone() for x in cache.gather(0, 0)]
    cache.append(0, *rows(200, seed=3), requests=[twin])
    cache.check()
    assert all(torch.equal(a, b) for a, b in zip(original, cache.gather(0, 0), strict=True))
    assert torch.equal(cache.gather(1, twin)[0], cache.gather(1, 0)[0])
    cache.free(0)
    cache.check()
    assert cache.length(twin) == 700
    cache.free(twin)
    assert cache.memory().kinds["slabs"] == 0


def test_forks_under_bytes_cost_nothing_until_they_differ() -> None:
    one = make(budget=None, dtype=torch.bfloat16, max_requests=8, max_tokens=1024)
    one.append(0, *rows(500, dtype=torch.bfloat16))
    budget = one.memory().total + 24 * one.pool.slab_bytes
    cache = make(budget=budget, dtype=torch.bfloat16, max_requests=8, max_tokens=1024)
    cache.append(0, *rows(500, dtype=torch.bfloat16))
    for _ in range(7):
        cache.fork(0)
    cache.check()
    assert (cache.tier_map(0, 7) == 0).all()
    for request in range(8):
        cache.append(0, *rows(1, dtype=torch.bfloat16, seed=request), requests=[request])
        cache.check()


@pytest.mark.parametrize("length", [0, 1, 4, 16, 250, 299, 300, 400])
def test_crop(length: int) -> None:
    cache = make(layers=2, max_requests=2)
    for layer in range(2):
        cache.append(layer, *rows(300, seed=layer))
    twin = cache.fork(0)
    before, tiers = cache.gather(1, 0), cache.tier_map(1)
    cache.crop(0, length)
    cache.check()
    left = min(length, 300)
    assert cache.length(0) == left
    after = cache.gather(1, 0)
    stay = cache.tier_map(1) == tiers[:, :left]
    for a, b in zip(after[:2], before[:2], strict=True):
        assert torch.equal(a[stay], b[:, :left][stay])
    assert all(torch.equal(a, b) for a, b in zip(before, cache.gather(1, twin), strict=True))
    cache.append(0, *rows(3, seed=7))
    assert cache.length(0) == left + 3


def test_crop_to_nothing_forgets_the_centre() -> None:
    cache = make()
    cache.append(0, *rows(300))
    assert cache.centre.any()
    cache.crop(0, 0)
    assert cache.requests == (0,)
    assert not cache.centre.any()
    cache.check()


def test_speculative_steps_roll_back() -> None:
    """Draft four, keep one, again and again; then it is as if the others had never been."""
    cache, plain = make(budget=None), make(budget=None)
    k, v = rows(30)
    for i in range(30):
        cache.append(0, *rows(4, seed=1000 + i))
        cache.crop(0, i)
        cache.append(0, k[i : i + 1], v[i : i + 1])
        plain.append(0, k[i : i + 1], v[i : i + 1])
    for a, b in zip(cache.gather(0), plain.gather(0), strict=True):
        assert torch.equal(a, b)
    cache.check()


def test_beams() -> None:
    cache = make(max_requests=4)
    data = [rows(200 + i, seed=i) for i in range(4)]
    for i, (k, v) in enumerate(data):
        cache.append(0, k, v, requests=[i])
    was = [cache.gather(0, i) for i in range(4)]
    cache.reorder([3, 3, 0, 2])
    cache.check()
    for i, source in enumerate([3, 3, 0, 2]):
        assert all(torch.equal(a, b) for a, b in zip(cache.gather(0, i), was[source], strict=True))
    cache.reorder([1, 0], requests=[2, 0])
    assert torch.equal(cache.gather(0, 2)[0], was[3][0])
    assert torch.equal(cache.gather(0, 0)[0], was[0][0])
    cache.select([3, 0])
    assert cache.requests == (0, 1)
    assert torch.equal(cache.gather(0, 0)[0], was[2][0])
    assert torch.equal(cache.gather(0, 1)[0], was[0][0])
    cache.check()
    cache.select([])
    assert cache.requests == ()
    cache.check()


def test_holes_in_slabs_are_closed() -> None:
    """Requests whose pages lie mixed in the same slabs; some go, and a shared page moves with both its owners."""
    cache = make(max_requests=6, dim=32, max_tokens=512, slab_bytes=6 * 16 * 264)
    for part in range(6):
        cache.append(0, *rows(6 * 30, dim=32, seed=part), lengths=[30] * 6)
    cache.reorder([0, 1, 2, 3, 4, 4])
    for request in (0, 2, 3):
        cache.free(request)
    before = [cache.gather(0, r) for r in (1, 4, 5)]
    slabs, used = cache.memory().kinds["slabs"], cache.memory().tiers
    cache.compact()
    cache.check()
    assert cache.memory().kinds["slabs"] < slabs
    assert cache.memory().tiers == used
    for tier, per_slab in enumerate(cache.pool.per_slab):
        assert cache.pool.slabs_of(tier) == -(-cache.pool.pages(tier) // per_slab)
    for request, was in zip((1, 4, 5), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(cache.gather(0, request), was, strict=True))


# What kernels read


def test_views_are_the_state() -> None:
    cache = make(layers=2, max_requests=2, dtype=torch.bfloat16)
    view = cache.bucket_views(1)
    addresses = [t.data_ptr() for t in (view.table, view.count, view.slab_pointers, view.centre, view.length)]
    cache.append(1, *rows(700, dtype=torch.bfloat16))
    cache.append(1, *rows(900, dtype=torch.bfloat16, seed=1), requests=[1])
    again = cache.bucket_views(1)
    assert addresses == [
        t.data_ptr() for t in (again.table, again.count, again.slab_pointers, again.centre, again.length)
    ]
    assert view.length.tolist() == [700, 900]
    assert (view.count.sum(-1) == view.length.unsqueeze(1)).all()
    # A kernel's way to a page, by hand: pointer table and offset, against the slab it means.
    k_all, v_all, positions = cache.gather(1, 1)
    tiers = cache.tier_map(1, 1)
    for tier, f in enumerate(view.formats):
        handle = int(view.table[1, 0, tier, 0])
        if handle < 0:
            continue
        slab = view.slabs[handle // view.units]
        assert int(view.slab_pointers[handle // view.units]) == slab.data_ptr()
        at = handle % view.units * 64
        page = slab[at : at + f.page_bytes]
        k, v = quant.dequantize_page(page, f, torch.bfloat16 if f.plain else None)
        if not f.plain:
            k, v = quant.restore(k, v, f, view.centre[1, 0])
        side = slab[at + view.position_offsets[tier] :][: 16 * view.position_dtype.itemsize].view(view.position_dtype)
        used = min(16, int(view.count[1, 0, tier]))
        for slot in range(used):
            column = int((positions[0] == int(side[slot])).nonzero())
            assert int(tiers[0, column]) == tier
            assert torch.equal(k[slot].bfloat16(), k_all[0, column])
            assert torch.equal(v[slot].bfloat16(), v_all[0, column])


def test_wide_positions() -> None:
    assert make(max_tokens=32768).position_dtype == torch.int16
    cache = make(max_tokens=32769, heads=1, dim=32)
    assert cache.position_dtype == torch.int32
    cache.append(0, *rows(100, heads=1, dim=32))
    cache.check()


# Files


def saved(tmp_path, **options) -> tuple:
    cache = make(layers=2, max_requests=2, **options)
    for layer in range(2):
        cache.append(layer, *rows(300, seed=layer))
        cache.update_importance(layer, torch.rand(1, 2, 300))
    path = tmp_path / "prefix.safetensors"
    cache.save(path)
    return cache, path


def test_save_and_load(tmp_path) -> None:
    cache, path = saved(tmp_path)
    twin = cache.load(path)
    other = make(layers=2, max_requests=1, max_tokens=40000)  # another width of positions
    other.load(path)
    for target, request in ((cache, twin), (other, 0)):
        target.check()
        for layer in range(2):
            for a, b in zip(cache.gather(layer, 0), target.gather(layer, request), strict=True):
                assert torch.equal(a, b)
            assert torch.equal(cache.importance(layer), target.importance(layer, request))
    other.append(0, *rows(50))
    other.check()


def test_a_file_says_nothing_of_dropped_tokens(tmp_path) -> None:
    cache, path = saved(tmp_path, budget=None)
    secret = torch.full((5, 2, 64), 12345.0)
    cache.append(0, secret, secret)
    cache.crop(0, 300)
    cache.save(path)
    assert struct.pack("<f", 12345.0) not in path.read_bytes()


def test_load_settles_into_a_smaller_budget(tmp_path) -> None:
    _, path = saved(tmp_path, budget=0.5)
    small = make(layers=2, max_requests=2, budget=0.22)
    small.load(path)
    small.check()
    tiny = make(layers=2, max_requests=2, budget=0.01)
    before = fingerprint(tiny)
    with pytest.raises(BudgetExceeded):
        tiny.load(path)
    tiny.check()
    assert same(before, fingerprint(tiny))


@pytest.mark.parametrize(
    "options",
    [
        dict(heads=1),
        dict(dim=32),
        dict(layers=1),
        dict(page_tokens=32),
        dict(tiers=("K4V4", "K2V2")),
        dict(dtype=torch.float16),
        dict(importance="ema"),
        dict(max_tokens=299),
    ],
)
def test_a_foreign_cache_is_refused(tmp_path, options: dict) -> None:
    _, path = saved(tmp_path)
    other = make(**(dict(layers=2, max_requests=2) | options))
    with pytest.raises(ValueError, match="path: expected a request that this cache can hold"):
        other.load(path)
    other.check()
    assert other.requests == ()


def test_other_files_are_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    cache = make(layers=2, max_requests=2)
    path = tmp_path / "x"
    for content in (b"", b"\0" * 7, b"\xff" * 64, b"\x80\x04K\x01.", b"PK\x03\x04" + b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="path: expected a request"):
            cache.load(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"kind: expected 'kvstrata\.cache', got None"):
        cache.load(path)
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "nowhere")


def rewritten(path, change) -> None:
    """The same file with other tensors and metadata and a digest that agrees."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from kvstrata.cache.files import _digest

    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata, tensors)
    save_file(tensors, path, metadata=metadata | {"digest": _digest(tensors)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: m.update(version="2"), "version: expected 1, got '2'"),
        (lambda m, t: m.update(meaning="[]"), "meaning"),
        (lambda m, t: m.update(meaning="{"), "not a whole"),
        (lambda m, t: t.pop("count"), "count: missing"),
        (lambda m, t: t["count"].add_(1), "count"),
        (lambda m, t: t["count"].neg_(), "count"),
        (lambda m, t: t["length"].fill_(1 << 40), "length"),
        (lambda m, t: t["position.0"].fill_(1), "position"),
        (lambda m, t: t["position.0"].fill_(-1), "position"),
        (lambda m, t: t["importance.0"].fill_(math.nan), "importance"),
        (lambda m, t: t["centre"].fill_(math.inf), "centre"),
        (lambda m, t: t["centred"].fill_(0), "centred"),
        (lambda m, t: t["reported"].fill_(301), "reported"),
        (lambda m, t: t["pages.3"].fill_(255), "pages.3: expected finite scales"),
        (lambda m, t: t.update({"pages.3": t["pages.3"][1:].clone()}), "pages.3: expected"),
        (lambda m, t: t.update({"centre": t["centre"].double()}), "centre: expected torch.float32"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path, change, message: str) -> None:
    cache, path = saved(tmp_path)
    rewritten(path, change)
    before = fingerprint(cache)
    with pytest.raises(ValueError, match=message):
        cache.load(path)
    assert same(before, fingerprint(cache))


def test_damaged_files_are_refused(tmp_path) -> None:
    """Truncations, flipped bytes and fuzzed headers: a ValueError, or the file as it was."""
    cache, path = saved(tmp_path)
    raw = path.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    chance = random.Random(0)
    before = fingerprint(cache)
    broken = [raw[: chance.randrange(len(raw))] for _ in range(15)] + [raw + b"x"]
    for low, high, times in ((0, 8, 10), (8, header, 80), (header, len(raw), 20)):
        for _ in range(times):
            data = bytearray(raw)
            data[chance.randrange(low, high)] ^= 1 << chance.randrange(8)
            broken.append(bytes(data))
    parsed = json.loads(raw[8:header])
    for name in list(parsed):
        if name == "__metadata__":
            continue
        for entry in ({"data_offsets": [0, 1 << 62]}, {"shape": [1 << 40, 1 << 40]}, {"dtype": "F64"}, {"shape": [-1]}):
            text = json.dumps(parsed | {name: parsed[name] | entry}).encode()
            broken.append(struct.pack("<Q", len(text)) + text + raw[header:])
    broken.append(struct.pack("<Q", 1 << 62) + raw[8:])
    refused = []
    for data in broken:
        path.write_bytes(data)
        try:
            cache.free(cache.load(path))
        except ValueError as error:
            refused.append(str(error))
    assert all(message.startswith("path: expected a request") for message in refused)
    assert len(refused) >= 0.95 * len(broken)  # a bit flipped in "settings" means nothing
    cache.pool.trim()
    assert same(before[2:6], fingerprint(cache)[2:6])
