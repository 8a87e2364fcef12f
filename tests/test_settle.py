"""Many scopes planned at once against each on its own, and a model's layers that settle together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.policy import assign as allocate
from kvstrata.cache.policy import scopes as scopes_module
from kvstrata.cache.policy import settle
from kvstrata.cache.storage.tokens import Tokens


def filled(lengths: list[int], layers: int = 3, **options) -> TieredCache:
    """Requests of these lengths, prompts first, with importance of their own in every layer."""
    options = (
        dict(budget=0.3, recent_tokens=20, sink_tokens=4, page_tokens=16, dtype=torch.float32, settle_every=8) | options
    )
    options = dict(tiers=("K4V4", "K3V3", "K2V2")) | options
    cache = TieredCache(layers, 2, 32, max_requests=len(lengths), max_tokens=1024, **options)
    generator = torch.Generator().manual_seed(sum(lengths))
    for layer in range(layers):
        k, v = torch.randn(2, sum(lengths), 2, 32, generator=generator)
        cache.append(layer, k, v, list(range(len(lengths))), lengths)
        cache.update_importance(layer, torch.rand(len(lengths), 2, max(lengths), generator=generator) ** 4)
    return cache


def scopes_of(cache: TieredCache) -> settle.Scopes:
    places = [(layer, [request]) for layer in range(cache.layers) for request in cache.requests]
    lengths = [[cache.length(request, layer)] for layer, [request] in places]
    tokens = cache.buckets.snapshots(*scopes_module.pairs(places))
    return scopes_module.make_scopes(cache, places, tokens, lengths)


def tighter(scopes: settle.Scopes, less: float) -> settle.Scopes:
    return replace(scopes, allowed=tuple(int(x * less) for x in scopes.allowed))


def mixed(scopes: settle.Scopes, seed: int = 0) -> settle.Scopes:
    """The same tokens in another order, so that those of a scope lie apart; slot by slot in a bucket all the same."""
    bucket = scopes.tokens.head_cache.numpy()
    order = np.random.default_rng(seed).permutation(len(bucket))
    order[np.argsort(bucket[order], kind="stable")] = np.argsort(bucket, kind="stable")
    return replace(scopes, tokens=scopes.tokens[torch.from_numpy(order)])


def each(scopes: settle.Scopes) -> list[tuple[settle.Scopes, torch.Tensor]]:
    """Every scope alone, and where its tokens are."""
    found = scopes.split(range(1, len(scopes) + 1))
    return [(one, torch.arange(len(scopes.tokens))[at]) for one, at in found]


def price(scope: settle.Scopes, target: torch.Tensor, spare: int, prices) -> int:
    return prices.total(prices.counts(scope.tokens.head_cache, target, len(scope.length)), spare)


@pytest.mark.parametrize("policy", ["importance", "uniform", "recency"])
@pytest.mark.parametrize("headroom", [0, 8, 64])
@pytest.mark.parametrize("less", [0.97, 0.93, 0.87])
def test_together_as_alone(policy: str, headroom: int, less: float) -> None:
    """Under fewer bytes than now, what a scope gets does not depend on who is planned beside it, nor on the order."""
    cache = filled([400, 150, 333], policy=policy)
    scopes = mixed(tighter(scopes_of(cache), less))
    many = settle.plan_all(scopes, cache.policy, headroom)
    moved = False
    for i, (x, at) in enumerate(each(scopes)):
        one = settle.plan_all(x, cache.policy, headroom)
        assert (one.needed, one.spare) == ([many.needed[i]], [many.spare[i]])
        assert torch.equal(one.target, many.target[at])
        assert bool((one.target >= x.tokens.tier).all())
        assert one.needed[0] is not None or price(x, one.target, one.spare[0], cache.policy.prices) <= x.allowed[0]
        moved |= bool((x.tokens.tier != one.target).any())
    assert moved


@pytest.mark.parametrize("headroom", [0, 64])
@pytest.mark.parametrize("less", [0.97, 0.9])
def test_uniform_is_what_one_search_finds(headroom: int, less: float) -> None:
    cache = filled([400, 150, 333], policy="uniform")
    scopes = tighter(scopes_of(cache), less)
    many = settle.plan_all(scopes, cache.policy, headroom)
    for i, (x, at) in enumerate(each(scopes)):
        one = settle.plan(x, cache.policy, headroom)
        assert (one.needed, one.spare) == (many.needed[i], many.spare[i])
        assert torch.equal(one.target, many.target[at])


@pytest.mark.parametrize("less", [0.5, 0.3])
def test_a_head_has_its_part_of_the_bytes(less: float) -> None:
    """Near to what is allowed, and every head as near to its part, whatever mass it got; with one price it is not."""
    cache = filled([400, 333], layers=1, budget=None)
    for request in cache.requests:
        mass = torch.full((1, 2, cache.length(request)), 0.5)
        mass[0, 0] = torch.rand(mass.shape[2], generator=torch.Generator().manual_seed(request)) ** 16 * 50
        cache.update_importance(0, mass, [request], queries=50)
    prices, apart = cache.policy.prices, []
    for x, _ in each(scopes_of(cache)):
        allowed = int(less * prices.total(prices.counts(x.tokens.head_cache, x.tokens.tier, 2)))
        x = replace(x, allowed=(allowed,))
        made, one = settle.plan_all(x, cache.policy, 8), settle.plan(x, cache.policy, 8)
        for target, spare in ((made.target, made.spare[0]), (one.target, one.spare)):
            heads = prices.each(prices.counts(x.tokens.head_cache, target, len(x.length)), spare)
            apart.append(int(heads.max() - heads.min()))
            assert allowed - 2 * prices.page[0] <= int(heads.sum()) <= allowed
    assert max(apart[::2]) <= prices.page[0] < max(apart[1::2])


def test_an_empty_scope_beside_a_full_one() -> None:
    cache = filled([300, 200], budget=0.5)
    (both, _), *_ = scopes_of(cache).split([2, 6])
    both = replace(both, tokens=both.tokens[both.tokens.head_cache >= 2], allowed=(0, int(both.allowed[1] * 0.9)))
    alone = settle.plan_all(each(both)[0][0], cache.policy, 8)
    beside = settle.plan_all(both, cache.policy, 8)
    assert (alone.needed[0], alone.spare[0]) == (beside.needed[0], beside.spare[0]) == (None, 8)
    assert bool((beside.target > both.tokens.tier).any())


def test_parts_of_scopes() -> None:
    scopes = mixed(scopes_of(filled([300, 200, 50])))
    parts = list(scopes.split([2, 3, 9]))
    assert [len(part) for part, _ in parts] == [2, 1, 6]
    assert torch.equal(torch.cat([at for _, at in parts]).sort().values, torch.arange(len(scopes.tokens)))
    first = 0
    for part, at in parts:
        assert bool((at.diff() > 0).all()), "in the order they had"
        assert torch.equal(part.tokens.head_cache + first, scopes.tokens.head_cache[at])
        assert torch.equal(part.tokens.position, scopes.tokens.position[at])
        assert torch.equal(part.numbers, scopes.numbers[:, first : first + sum(part.head_caches)])
        first += sum(part.head_caches)
    assert sum((part.allowed for part, _ in parts), ()) == scopes.allowed
    assert sum((part.longest for part, _ in parts), ()) == scopes.longest


def test_the_weightiest_get_the_slots_that_are_left() -> None:
    """In every bucket those that the free slots of a tier hold, and none that was lower before or may not move."""
    cache = filled([100], layers=1, budget=None)
    scopes = scopes_of(cache)
    tokens, n = scopes.tokens, len(scopes.tokens)
    weight = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    current = torch.zeros_like(tokens.tier)
    current[::7] = 3
    movable = torch.arange(n) % 5 > 0
    target = torch.where(movable, 3, current)
    spare = torch.tensor([3, 0])
    filled_in = settle._fill(target, current, movable, weight, scopes, cache.policy, spare)
    for bucket in range(2):
        mine = tokens.head_cache == bucket
        kept = int(((target == 0) & mine).sum()) + int(spare[bucket])
        able = (mine & movable & (current == 0)).nonzero().flatten()
        best = able[weight[able].argsort(descending=True)][: -kept % cache.page_tokens]
        assert 0 < len(best) < len(able)
        assert set(best.tolist()) == set((mine & (filled_in == 0) & (target > 0)).nonzero().flatten().tolist())


def test_weights_are_those_of_the_estimate() -> None:
    """By the queries that could see a token, which are other numbers than the tokens and the length when they came."""
    cache = filled([90], layers=1, budget=None, hysteresis=0.0)
    cache.update_importance(0, torch.rand(1, 2, 90), queries=7)
    cache.append(0, *torch.randn(2, 30, 2, 32))
    scopes = scopes_of(cache)
    assert scopes.numbers.tolist() == [[120] * 2, [8] * 2, [90] * 2]
    movable = scopes.tokens.position < 100
    weight = settle._weights(scopes, cache.policy, movable)
    for bucket in range(2):
        mine = scopes.tokens.head_cache == bucket
        mass, position = (x[mine].tolist() for x in (scopes.tokens.importance, scopes.tokens.position))
        each = {p: (m + 1 / 120) / (min(8, max(90 - p, 0)) + 1) for m, p in zip(mass, position, strict=True)}
        mean = np.mean([each[p] for p in range(100)])
        expected = [(each[p] / mean + settle.FLOOR) * (1 + settle.TIE * p / 120) for p in position]
        np.testing.assert_allclose(weight[mine].numpy(), expected, rtol=1e-5)


def test_no_two_positions_weigh_the_same() -> None:
    """Of a long context in which all have the same mass."""
    n = 40_000
    cache = TieredCache(1, 1, 32, max_tokens=n)
    none, position = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    scopes = settle.Scopes(
        Tokens(none, none, position, position, none.float()), torch.tensor([[n], [0], [0]]), 1, (1,), (0,), (n,)
    )
    ranks = allocate.rank(settle._weights(scopes, cache.policy, none == 0))
    assert bool((ranks.diff() > 0).all())


def test_a_sum_does_not_depend_on_the_neighbours() -> None:
    """To the last bit: a request's tiers are the same beside longer ones."""
    lengths = torch.randint(1, 3000, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    bucket = torch.repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    x = torch.rand(len(bucket), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = Tokens(bucket, bucket, position, position, x)
    numbers = torch.tensor(lengths).expand(3, -1)
    ones = (1,) * len(lengths)
    both = settle.Scopes(tokens, numbers, 1, ones, ones, tuple(lengths))
    sums = settle._sums(x, both)
    torch.testing.assert_close(sums, torch.zeros_like(sums).index_add(0, bucket, x))
    alone = [settle._sums(x[at], one) for one, at in both.split(range(1, len(lengths) + 1))]
    assert torch.equal(sums, torch.cat(alone))


def test_mass_without_end_is_the_greatest() -> None:
    cache = filled([300], layers=1, budget=0.5)
    mass = torch.rand(1, 2, 300)
    mass[:, :, 100] = 3e38
    for _ in range(3):
        cache.update_importance(0, mass)
    assert cache.importance(0).isfinite().all()
    before = int(cache.tier_map(0)[0, 100])
    decode(cache, 100)
    assert (cache.tier_map(0)[:, 100] == before).all()
    assert cache.memory().total <= cache.memory().allowed


def test_tiers_that_save_nothing_are_refused_clearly() -> None:
    """A second tier of the same format costs as much as the first; half of 16 bit is less than K8V8 takes."""
    for policy in settle.POLICIES:
        options = dict(page_tokens=16, dtype=torch.float16, policy=policy, tiers=("K8V8", "K8V8"))
        cache, enough = (TieredCache(1, 2, 64, budget=budget, **options) for budget in (0.5, 0.6))
        assert len(set(cache.policy.prices.page)) == 2
        k, v = torch.randn(2, 2000, 2, 64).half()
        with pytest.raises(BudgetExceeded, match="expected at least"):
            cache.append(0, k, v)
        enough.append(0, k, v)
        enough.check()


def test_slots_that_are_paid_for_are_filled_where_tokens_are_evicted_too() -> None:
    """20 plain tokens need two pages, so the weightiest of the others take the rest of the second."""
    options = dict(budget=0.1, recent_tokens=16, sink_tokens=4, settle_every=2, evict=True, max_tokens=4096)
    cache = TieredCache(1, 2, 32, page_tokens=16, dtype=torch.float32, tiers=("K4V4", "K3V3", "K2V2"), **options)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3000, 2, 32, generator=generator)
    cache.append(0, k, v, mass=torch.rand(1, 2, 3000, generator=generator) ** 4, queries=3000)
    tiers = cache.tier_map(0)
    assert cache.memory().total <= cache.memory().allowed
    assert ((tiers >= 0).sum(1) < 3000).all()
    assert ((tiers == 0).sum(1) == 30).all()  # and room for two


@pytest.mark.parametrize(("name", "limit"), [("TOGETHER", 2 * 200 * 2), ("SEARCHED", 4)])
def test_batches_of_scopes(monkeypatch: pytest.MonkeyPatch, name: str, limit: int) -> None:
    cache = filled([200, 90], budget=0.6)
    scopes = tighter(scopes_of(cache), 0.8)
    whole = settle.plan_all(scopes, cache.policy, 8)
    sizes = []
    together = settle._together
    monkeypatch.setattr(settle, name, limit)
    monkeypatch.setattr(settle, "_together", lambda some, *rest: sizes.append(len(some)) or together(some, *rest))
    parts = settle.plan_all(scopes, cache.policy, 8)
    assert sum(sizes) == len(scopes)
    assert max(sizes) == 2
    assert bool((whole.target > scopes.tokens.tier).any())
    assert torch.equal(whole.target, parts.target)
    assert (whole.needed, whole.spare) == (parts.needed, parts.spare)


def decode(cache: TieredCache, steps: int) -> None:
    for step in range(steps):
        for layer in range(cache.layers):
            k, v = torch.randn(2, len(cache.requests), 1, 2, 32, generator=torch.Generator().manual_seed(step))
            cache.append(layer, k, v)


def test_layers_settle_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One search makes room in all layers; none of them has to search on its own."""
    cache = filled([300, 300], layers=5)
    calls = []
    plan_all = scopes_module.plan_all
    monkeypatch.setattr(scopes_module, "plan_all", lambda some, *rest: calls.append(len(some)) or plan_all(some, *rest))
    decode(cache, 60)
    assert calls
    assert set(calls) == {10}
    assert len(calls) <= 60 // 4
    assert cache.memory().total <= cache.memory().allowed
    assert {cache.length(r, layer) for r in (0, 1) for layer in range(5)} == {360}
    cache.check()


def test_without_room_ahead_every_layer_is_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recent tokens that leave no slot: tried once in a while, and nothing is lost."""
    cache = filled([300], budget=0.22, recent_tokens=28, sink_tokens=4, settle_every=16)
    tried = []
    ahead = scopes_module.settle_scopes
    monkeypatch.setattr(scopes_module, "settle_scopes", lambda *given: tried.append(1) or ahead(*given))
    plan_all = scopes_module.plan_all

    def none_for_all_layers(some: settle.Scopes, *rest) -> settle.Plans:
        if len(some) == 1:
            return plan_all(some, *rest)
        return settle.Plans(some.tokens.tier.clamp(min=0), [None] * len(some), [0] * len(some))

    monkeypatch.setattr(scopes_module, "plan_all", none_for_all_layers)
    decode(cache, 40)
    assert 1 <= len(tried) <= 4
    assert cache.memory().total <= cache.memory().allowed
    for layer in range(3):
        position = cache.gather(layer, 0)[2]
        assert np.array_equal(np.sort(position.numpy(), 1), np.broadcast_to(np.arange(340), (2, 340)))
