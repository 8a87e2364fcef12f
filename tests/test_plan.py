"""The planner: loops and kernels against the reference, token by token, and what a plan has to hold."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emulator
import gates
from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.policy import plan, plan_cuda, plan_numba, plan_op, plan_reference
from kvstrata.cache.policy.scopes import make_scopes, pairs

HAS_GPU = torch.cuda.is_available()
TIERS = ("K4V4", "K3V3", "K2V2")


def filled(lengths: list[int], layers: int = 2, device: str = "cpu", seed: int = 0, **options) -> TieredCache:
    """Requests of these lengths, prompts first, with importance of their own in every layer."""
    options = dict(
        budget=0.3, recent_tokens=20, sink_tokens=4, page_tokens=16, dtype=torch.float32, settle_every=8, tiers=TIERS,
        max_tokens=2048, device=device,
    ) | options  # fmt: skip
    cache = TieredCache(layers, 2, 32, max_requests=len(lengths), **options)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(layers):
        k, v = torch.randn(2, sum(lengths), 2, 32, generator=generator).to(device)
        with contextlib.suppress(BudgetExceeded):
            cache.append(layer, k, v, list(range(len(lengths))), lengths)
            mass = torch.rand(len(lengths), 2, max(lengths), generator=generator) ** 4
            cache.update_importance(layer, mass.to(device), queries=3)
    return cache


def places_of(cache: TieredCache) -> list[tuple[int, list[int]]]:
    every = [(layer, [request]) for layer in range(cache.layers) for request in cache.requests]
    if cache.budget.shared:
        every = [(layer, list(cache.requests)) for layer in range(cache.layers)]
    return [(layer, some) for layer, some in every if all(cache.length(r, layer) for r in some)]


def scopes_of(cache: TieredCache, less: float = 1.0) -> plan.Scopes:
    places = places_of(cache)
    lengths = [[cache.length(request, layer) for request in some] for layer, some in places]
    scopes = make_scopes(cache, places, cache.buckets.snapshots(*pairs(places)), lengths)
    return replace(scopes, allowed=tuple(int(x * less) for x in scopes.allowed))


def by_bucket(cache: TieredCache, scopes: plan.Scopes, target: torch.Tensor) -> torch.Tensor:
    """Targets in the order of a device plan: by head cache, tier and slot."""
    tokens = scopes.tokens
    key = ((tokens.head_cache * 16 + tokens.tier) << 32) + tokens.slot
    return target[key.argsort()]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device on which the kernels run: a GPU, or the CPU that emulates one."""
    yield from emulator.kernels_here(monkeypatch, plan_cuda)


def on_device(cache: TieredCache, scopes: plan.Scopes, headroom: int) -> plan_cuda.DevicePlan:
    layers, requests = (np.array(x) for x in pairs(places_of(cache)))
    lengths = scopes.numbers[0, :: cache.kv_heads]
    sizes = [n // cache.kv_heads for n in scopes.head_caches]
    places = requests * cache.layers + layers
    return plan_cuda.plan_places(
        cache.buckets, cache.policy, places, lengths, cache.reports, sizes, scopes.allowed, headroom
    )


POLICIES = [
    dict(), dict(importance="ema"), dict(per_head=False), dict(policy="recency"), dict(policy="uniform"),
    dict(evict=True), dict(evict=True, per_head=False), dict(evict=True, policy="uniform"),
    dict(budget=0.4, tiers=("K8V4", "K4V4", "K4V3", "K4V2", "K2V2")), dict(budget=None, budget_bytes=400_000),
    dict(page_tokens=64, recent_tokens=64, budget=0.8),
]  # fmt: skip


def agrees(cache: TieredCache, scopes: plan.Scopes, headroom: int) -> set[int]:
    """Loops and kernels give what the reference gives; returns what the scopes do."""
    expected, found = plan_reference.chosen(scopes, cache.policy, headroom)
    if cache.device.type == "cpu":
        loops, split = plan_numba.chosen(scopes, cache.policy, headroom)
        assert torch.equal(loops, expected)
        assert np.array_equal(split.kind, found.kind)
    planned = on_device(cache, scopes, headroom)
    spare = np.where(found.kind == plan.FAIL, 0, found.spare)
    assert planned.kind.tolist() == np.stack([found.kind, spare], 1).tolist()
    assert planned.needed.tolist() == found.needed.tolist()
    assert torch.equal(planned.target.long(), by_bucket(cache, scopes, expected))
    return set(found.kind.tolist())


@pytest.mark.parametrize("options", POLICIES, ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) or "default")
def test_loops_and_kernels_choose_what_the_reference_does(kernels: str, options: dict) -> None:
    cache = filled([400, 150, 333, 1], device=kernels, **options)
    kinds = set()
    for less, headroom in ((1.0, 8), (0.97, 8), (0.9, 0), (0.7, 8), (0.4, 8), (0.0, 8)):
        kinds |= agrees(cache, scopes_of(cache, less), headroom)
    assert {plan.KEEP, plan.CHOOSE, plan.EVICT if options.get("evict") else plan.FAIL} <= kinds


@pytest.mark.parametrize("leave_plain", [False, True])
@pytest.mark.parametrize("max_tokens", [2048, 40_000])
def test_plain_tokens_settle_as_the_reference_says(kernels: str, leave_plain: bool, max_tokens: int) -> None:
    cache = filled([300, 77], layers=1, device=kernels, budget=None, max_tokens=max_tokens)
    cache.policy = replace(cache.policy, leave_plain=leave_plain)
    now = cache.policy.prices.each(cache.buckets.host_count[:, 0].reshape(-1, 4)).reshape(2, 2).sum(1)
    for less in (0.9, 0.5, 0.25):
        scopes = replace(scopes_of(cache), allowed=tuple((now * less).astype(int).tolist()))
        assert plan.CHOOSE in agrees(cache, scopes, 8)


@pytest.mark.parametrize("near", [False, True])
def test_long_head_caches_settle_as_the_reference_says(
    kernels: str, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of undecided tokens in the search, and of tokens that may fill slots, with keys near and far."""
    if not near:
        monkeypatch.setattr(plan_cuda, "NEARBY", 0)
    options = dict(budget=None, max_tokens=8192, page_tokens=64, recent_tokens=64, evict=not near)
    cache = filled([5000, 700], layers=1, device=kernels, **options)
    now = cache.policy.prices.each(cache.buckets.host_count[:, 0].reshape(-1, 4)).reshape(2, 2).sum(1)
    for less in (0.6, 0.23, 0.13) if near else (0.6, 0.1):
        scopes = replace(scopes_of(cache), allowed=tuple((now * less).astype(int).tolist()))
        assert (plan.EVICT if less == 0.1 else plan.CHOOSE) in agrees(cache, scopes, 8)


@pytest.mark.parametrize("ranked", [256, 4])
def test_equal_tokens_fill_slots_newest_first(
    kernels: str, ranked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mass at all, positions too many for float32 to tell their weights apart; also where they are too many to rank
    (``ranked`` tokens), which takes a context of millions otherwise."""
    source = plan_cuda.CHOOSE_SOURCE
    text = source.read_text().replace("kRanked = 256", f"kRanked = {ranked}")
    assert f"kRanked = {ranked}" in text
    (tmp_path / source.name).write_text(text)
    for header in source.parent.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    monkeypatch.setattr(plan_cuda, "CHOOSE_SOURCE", tmp_path / source.name)
    cache = TieredCache(
        1, 1, 32, budget=None, tiers=("K4V4", "K2V2"), page_tokens=16, max_tokens=60_000, dtype=torch.float32,
        recent_tokens=16, sink_tokens=0, settle_every=8, device=kernels,
    )  # fmt: skip
    cache.append(0, *torch.zeros(2, 40_000, 1, 32, device=kernels))
    price = int(cache.policy.prices.each(np.array([[24, 20_000, 19_976]])).sum())
    agrees(cache, replace(scopes_of(cache), allowed=(price,)), 8)
    target = plan_reference.chosen(replace(scopes_of(cache), allowed=(price,)), cache.policy, 8)[0]
    counts = np.bincount(target.cpu().numpy(), minlength=3)
    assert counts[0] % 16 == 8, "with room for 8 the plain pages are full"
    assert counts[1] % 16 == 0
    assert counts[2] > 0
    assert bool((target.diff() <= 0).all()), "the newer, the wider"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
def test_planner_kernels_stay_within_register_limits(arch: str) -> None:
    """No spills, and two blocks of 512 threads a multiprocessor."""
    pytest.importorskip("cuda.core")
    entries = [(plan_cuda.SOURCE, "survey<short, true>"), (plan_cuda.SOURCE, "merge<int, true>")]
    entries += [(plan_cuda.CHOOSE_SOURCE, f"choose<{x}>") for x in ("short, true, true", "int, false, false")]
    for source, entry in entries:
        usage = gates.usage(source, entry, arch=arch)
        assert usage.spill_bytes == usage.stack_bytes == 0, usage
        assert usage.shared_bytes <= 15 * 1024, usage
        assert 0 < usage.registers <= 64, usage


# What a plan has to hold


def price(scopes: plan.Scopes, target: torch.Tensor, policy: plan.Policy, spare: list[int]) -> np.ndarray:
    """Bytes of each scope."""
    tiers, n = len(policy.prices.page), scopes.numbers.shape[1]
    held = target >= 0
    bucket = (scopes.tokens.head_cache * tiers + target)[held].numpy()
    scope = np.repeat(np.arange(len(scopes)), scopes.head_caches)
    each = policy.prices.each(np.bincount(bucket, minlength=n * tiers).reshape(n, tiers), np.array(spare)[scope])
    return np.bincount(scope, each, len(scopes)).astype(np.int64)


def alone(scopes: plan.Scopes, number: int) -> tuple[plan.Scopes, torch.Tensor]:
    """One scope, and where its tokens are."""
    first = sum(scopes.head_caches[:number])
    end = first + scopes.head_caches[number]
    at = ((scopes.tokens.head_cache >= first) & (scopes.tokens.head_cache < end)).nonzero().flatten()
    tokens = replace(scopes.tokens[at], head_cache=scopes.tokens.head_cache[at] - first)
    numbers = scopes.numbers[:, first:end]
    return plan.Scopes(tokens, numbers, scopes.kv_heads, (end - first,), scopes.allowed[number : number + 1]), at


@pytest.mark.parametrize("policy", plan.POLICIES)
@pytest.mark.parametrize("headroom", [0, 64])
@pytest.mark.parametrize("less", [0.97, 0.87])
def test_a_scope_gets_the_same_tiers_alone(policy: str, headroom: int, less: float) -> None:
    """Whatever else is planned, and in whatever order its tokens come; and its assignment fits."""
    cache = filled([400, 150, 333], layers=3, policy=policy)
    scopes = scopes_of(cache, less)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(scopes.tokens)))
    scopes = replace(scopes, tokens=scopes.tokens[order])
    many = plan_op.plan_all(scopes, cache.policy, headroom)
    paid = price(scopes, many.target, cache.policy, many.spare)
    moved = False
    for i in range(len(scopes)):
        scope, at = alone(scopes, i)
        one = plan_op.plan_all(scope, cache.policy, headroom)
        assert (one.needed, one.spare) == ([many.needed[i]], [many.spare[i]])
        assert torch.equal(one.target, many.target[at])
        assert bool((one.target >= scope.tokens.tier).all())
        assert one.needed[0] is not None or paid[i] <= scope.allowed[0]
        moved |= bool((scope.tokens.tier != one.target).any())
    assert moved


@pytest.mark.parametrize("less", [0.5, 0.3])
def test_a_head_has_its_part_of_the_bytes(less: float) -> None:
    """Near to what is allowed, and every head as near to its part, whatever mass it got."""
    cache = filled([400, 333], layers=1, budget=None)
    for request in cache.requests:
        mass = torch.full((1, 2, cache.length(request)), 0.5)
        mass[0, 0] = torch.rand(mass.shape[2], generator=torch.Generator().manual_seed(request)) ** 16 * 50
        cache.update_importance(0, mass, [request], queries=50)
    prices, whole = cache.policy.prices, scopes_of(cache)
    now = price(whole, whole.tokens.tier, cache.policy, [0, 0])
    for number in range(2):
        scope, _ = alone(replace(whole, allowed=tuple(int(less * x) for x in now)), number)
        made = plan_op.plan_all(scope, cache.policy, 8)
        counts = np.bincount((scope.tokens.head_cache * 4 + made.target).numpy(), minlength=8).reshape(2, 4)
        heads = prices.each(counts, made.spare[0])
        assert scope.allowed[0] - 2 * prices.page[0] <= heads.sum() <= scope.allowed[0]
        assert heads.max() - heads.min() <= prices.page[0]


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 40), slack=st.floats(0, 1))
def test_no_cheaper_or_equal_assignment_has_less_error(seed: int, n: int, slack: float) -> None:
    """One token a page, one head: against the Lagrangian optimum over all prices at which something changes."""
    page, error = (160, 40, 30, 20), (0.0, 0.011, 0.036, 0.119)
    prices = plan.Prices(page, 1)
    policy = plan.Policy("importance", "ema", True, False, 0, 0, 0.0, 1, prices, error)
    rng = np.random.default_rng(seed)
    importance = torch.from_numpy(np.exp(2 * rng.standard_normal(n)).astype(np.float32)).clamp(max=60)
    zero, position = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    tokens = plan.Tokens(zero, zero, position, position, importance)
    allowed = int(n * (20 + slack * 140))
    scopes = plan.Scopes(tokens, np.full((3, 1), n), 1, (1,), (allowed,))
    key = plan_reference.keys(scopes, policy, torch.ones(n, dtype=torch.bool))
    weight = key.int().view(torch.float32).double().numpy()
    target = plan_reference.chosen(scopes, policy, 0)[0].numpy()
    cost, loss = np.array(page)[target].sum(), (weight * np.array(error)[target]).sum()
    assert cost <= allowed
    tiers, slopes = policy.ladder
    best = (weight * error[-1]).sum()
    for change in sorted({w * s for w in weight for s in slopes}):
        tried = np.array(tiers)[(weight[:, None] < change / np.array(slopes) * (1 - 1e-6)).sum(1)]
        if np.array(page)[tried].sum() <= allowed:
            best = min(best, (weight * np.array(error)[tried]).sum())
    assert loss <= best * (1 + 1e-5) + 1e-12


def test_weights_are_those_of_the_estimate() -> None:
    """By the queries that could see a token, which are other numbers than the tokens and the length when they came."""
    cache = filled([90], layers=1, budget=None, hysteresis=0.0)
    cache.update_importance(0, torch.rand(1, 2, 90), queries=7)
    cache.append(0, *torch.randn(2, 30, 2, 32))
    scopes = scopes_of(cache)
    assert scopes.numbers.tolist() == [[120] * 2, [10] * 2, [90] * 2]
    moves = scopes.tokens.position < 100
    key = plan_reference.keys(scopes, cache.policy, moves)
    weight = key.int().view(torch.float32)
    for head in range(2):
        own = (scopes.tokens.head_cache == head) & moves
        mass, position = (x[own].tolist() for x in (scopes.tokens.importance, scopes.tokens.position))
        each = {p: (m + 1 / 120) / (min(10, max(90 - p, 0)) + 1) for m, p in zip(mass, position, strict=True)}
        mean = np.mean([each[p] for p in range(100)])
        expected = [(each[p] / mean + plan.FLOOR) * (1 + plan.TIE * p / 120) for p in position]
        np.testing.assert_allclose(weight[own].numpy(), expected, rtol=1e-5)
    assert bool((key[~moves] == plan.FIXED).all())


def test_an_empty_scope_next_to_a_full_one_keeps_its_room() -> None:
    cache = filled([300, 200], layers=1, budget=None)
    scopes = scopes_of(cache)
    now = int(price(scopes, scopes.tokens.tier, cache.policy, [0, 0])[1])
    both = replace(scopes, tokens=scopes.tokens[scopes.tokens.head_cache >= 2], allowed=(0, now // 2))
    made = plan_op.plan_all(both, cache.policy, 8)
    assert (made.needed[0], made.spare[0]) == (None, 8)
    assert bool((made.target > both.tokens.tier).any())
