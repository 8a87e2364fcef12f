"""The bytes of a cache: what was allocated, what is allowed, and what happens where it does not suffice."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_model import fingerprint, limit, make, rows, same
from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.move import apply
from kvstrata.cache.policy.budget import TIERS
from kvstrata.cache.policy.sizes import Sizes
from kvstrata.cache.storage.pool import Pool


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
    tables = cache.buckets.page_table.nbytes + cache.buckets.count.nbytes + cache.pool.pointers.nbytes
    numbers = cache.centre.nbytes + cache._device_lengths.nbytes + cache.reports.nbytes
    assert memory.total == slabs + tables + numbers
    assert sum(memory.tiers.values()) + memory.slab_slack == memory.kinds["slabs"]
    assert 0 < memory.page_slack < sum(memory.tiers.values())


def test_memory_of_a_format_that_is_listed_twice() -> None:
    cache = make(budget=0.35, tiers=("K4V4", "K4V4"), policy="uniform")
    cache.append(0, *rows(700))
    memory = cache.memory()
    assert sum(memory.tokens.values()) == 2 * 700
    assert sum(memory.tiers.values()) + memory.slab_slack == memory.kinds["slabs"]


def test_room_for_more_tokens_than_there_can_be() -> None:
    """A larger ``settle_every`` than the tables is no reason for larger ones."""
    most, large = (make(max_tokens=1000, settle_every=n, budget=0.3) for n in (1000, 10**12))
    for cache in (most, large):
        cache.append(0, *rows(700))
        cache.check()
    assert len(large.budget.granted_by_length) == len(most.budget.granted_by_length)
    assert torch.equal(large.tier_map(0), most.tier_map(0))


@pytest.mark.parametrize("budget", [60_000, 0.05])
def test_the_error_names_a_budget_with_room(budget: int | float) -> None:
    options = dict(dtype=torch.bfloat16, max_tokens=2048)
    with pytest.raises(BudgetExceeded, match=r"; budget(_bytes)?=[\d.]+ has room for them") as found:
        make(**limit(budget), **options).append(0, *rows(2000, dtype=torch.bfloat16))
    [(name, enough)] = re.findall(r"; (\w+)=([\d.]+) has room", str(found.value))
    assert name in limit(budget)
    make(**limit(type(budget)(enough)), **options).append(0, *rows(2000, dtype=torch.bfloat16))


def test_exceeding_the_budget_leaves_the_cache_unchanged() -> None:
    cache = make(budget=0.02, max_requests=2)
    cache.append(0, *rows(50))
    before = fingerprint(cache)
    with pytest.raises(BudgetExceeded, match=r"budget: expected at least \d+ bytes .* allowed are \d+") as caught:
        cache.append(0, *rows(500, seed=1))
    assert same(before, fingerprint(cache))
    assert caught.value.needed > caught.value.allowed
    cache.check()
    with pytest.raises(BudgetExceeded):  # the short request would fit: none of both is taken
        cache.append(0, *rows(2001), requests=[1, 0], seq_lens=[1, 2000])
    assert same(before, fingerprint(cache))


def test_a_byte_budget_covers_tables_and_pages() -> None:
    cache = make(budget_bytes=400_000, max_requests=4, dtype=torch.bfloat16, max_tokens=2048)

    def fill() -> None:
        for i in range(100):
            cache.append(0, *rows(100, dtype=torch.bfloat16, seed=i), requests=[i % 4])
            cache.check()

    with pytest.raises(BudgetExceeded):
        fill()
    assert cache.memory().total <= 400_000
    low = cache.memory().tokens["K2V2"]
    assert low / sum(cache.memory().tokens.values()) > 0.7  # nothing was refused that could have been squeezed
    cache.free_request(0)
    cache.append(0, *rows(100, dtype=torch.bfloat16), requests=[1])
    cache.check()


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("policy", ["importance", "recency", "uniform"])
def test_evict_drops_tokens_instead_of_raising(policy: str, per_head: bool) -> None:
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


def test_holes_in_slabs_are_closed() -> None:
    """Requests whose pages lie mixed in the same slabs; some go, and a shared page moves with both its owners."""
    cache = make(max_requests=6, dim=32, max_tokens=512, slab_bytes=6 * 16 * 264)
    for part in range(6):
        cache.append(0, *rows(6 * 30, dim=32, seed=part), seq_lens=[30] * 6)
    cache.reorder([0, 1, 2, 3, 4, 4])
    for request in (0, 2, 3):
        cache.free_request(request)
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


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (
            dict(page_tokens=64, recent_tokens=64, settle_every=64),
            60,
        ),  # the defaults: 4 + 64 tokens leave 60 of two pages
        (dict(page_tokens=16, recent_tokens=28, settle_every=16), 16),  # fills two pages
        (dict(page_tokens=16, recent_tokens=27, settle_every=16), 17),  # leaves one slot
        (dict(page_tokens=16, recent_tokens=27, settle_every=1), 1),  # asked for
    ],
)
def test_settlings_make_room_for_several_steps(options: dict, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the floor, where pages are scarcest, as above it: once in so many steps, in each layer."""
    cache = make(layers=2, dim=32, budget=0.3, tiers=None, dtype=torch.bfloat16, **options)
    moved: list[int] = []
    move = apply.move
    monkeypatch.setattr(apply, "move", lambda b, c, layers, *rest: (moved.extend(layers), move(b, c, layers, *rest)))
    k, v = rows(328, dim=32, dtype=torch.bfloat16)
    for layer in range(2):
        cache.append(layer, k[:200], v[:200])
    assert cache.budget.floor_tokens > 328
    moved.clear()
    steps = 128 if most > 1 else 16
    for i in range(200, 200 + steps):
        for layer in range(2):
            cache.append(layer, k[i : i + 1], v[i : i + 1])
    assert len(moved) / 2 <= -(-steps // most) + 1
    assert len(moved) > 0
    cache.check()


@pytest.mark.parametrize(("tiers", "budget", "tokens"), [("K8V8", 0.55, 100_000), ("K4V4", 0.3, 16_384)])
def test_a_page_of_few_layers_and_heads_costs_its_bytes(tiers: str, budget: float, tokens: int) -> None:
    """K8V8 takes 0.52 of 16 bit, positions and importance included, K4V4 0.27; the rest is for recent tokens."""
    options = dict(budget=budget, tiers=[tiers])
    granted = TieredCache(1, 8, 128, max_tokens=tokens, **options).budget
    assert granted.need(tokens) <= budget * tokens * 8 * granted.token_bytes
    cache = TieredCache(1, 1, 128, max_tokens=16_384, **options)
    k, v = rows(16_384, heads=1, dim=128, dtype=torch.bfloat16)
    cache.append(0, k, v)
    memory = cache.memory()
    assert memory.total <= budget * memory.full
    assert memory.slab_slack <= cache.budget.reserve


@settings(max_examples=60)
@given(
    layers=st.integers(1, 40),
    heads=st.integers(1, 16),
    dim=st.sampled_from(range(32, 257, 16)),
    page_tokens=st.sampled_from([16, 32, 64]),
    requests=st.integers(1, 4),
    tiers=st.sampled_from([*TIERS, ("K8V8",), ("K4V4",), ("K3V3", "K2V2"), ("K8V2", "K3V2")]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    importance=st.booleans(),
    max_tokens=st.sampled_from([64, 1000, 40_000]),
    slab_pages=st.sampled_from([None, None, 1, 3]),
    data=st.data(),
)
def test_pages_cost_their_bytes_and_a_slab_per_tier(
    layers, heads, dim, page_tokens, requests, tiers, dtype, importance, max_tokens, slab_pages, data
) -> None:
    sizes = Sizes(
        0.25,
        layers,
        heads,
        dim,
        68,
        64,
        dtype,
        torch.device("cpu"),
        requests,
        max_tokens,
        page_tokens,
        importance,
        None,
    )
    strides = [kind.stride for kind in sizes.page_formats(tiers)]
    slab, capacity = sizes.slabs(strides[0], len(strides))
    if slab_pages is not None:
        slab, capacity = slab_pages * strides[0], 400
    pool = Pool(strides, slab, capacity, torch.device("cpu"))
    budget = sizes.budget(strides, pool.slab_sizes, 0)
    assert all(price <= 1.03 * stride for price, stride in zip(budget.page_price, strides, strict=True))
    assert budget.reserve <= len(strides) * slab
    counts = [data.draw(st.integers(0, 60)) for _ in strides]
    handles = [pool.allocate(tier, n) for tier, n in enumerate(counts)]

    def slack() -> float:
        return pool.nbytes - 1.03 * sum(pool.pages(tier) * stride for tier, stride in enumerate(strides))

    assert slack() <= budget.reserve
    for tier, some in enumerate(handles):
        pool.release(some[:: data.draw(st.integers(2, 5))])
        pool.compact(tier)
    pool.trim()
    assert slack() <= budget.reserve


def test_empty_slabs_are_replaced_by_slabs_of_other_tiers() -> None:
    """A pool whose slabs have a different size in each tier."""
    pool = Pool([640, 448, 192], 1024, 3, torch.device("cpu"))
    assert pool.slab_sizes == (640, 896, 960)
    first = pool.allocate(0, 3)
    assert pool.nbytes == 3 * 640
    pool.release(first)
    assert pool.allocate(1, 3).tolist() == [0, 7, 16]
    assert pool.nbytes == 640 + 2 * 896
    assert pool.allocate(0, 1).tolist() == [32]
    with pytest.raises(RuntimeError, match="expected 1 free slabs, got 0 of 3"):
        pool.allocate(2, 1)
    addresses = [slab.data_ptr() for slab in pool.slabs if slab is not None]
    assert pool.pointers.tolist() == addresses


@pytest.mark.parametrize("dim", [64, 128])
def test_bits_that_are_stored_are_those_of_the_tiers(dim: int) -> None:
    cache = make(layers=2, dim=dim, dtype=torch.bfloat16, budget=0.3, max_requests=3, tiers=("K8V4", "K4V3", "K3V2"))
    assert cache.memory().k_bits == cache.memory().expected_k_bits == 0
    for layer in range(2):
        cache.append(layer, *rows(3000, dim=dim, dtype=torch.bfloat16), requests=[0, 1], seq_lens=[2000, 1000])

    def check() -> None:
        """Against the bytes of every page that a table names, once each."""
        memory, table, count = cache.memory(), cache.buckets.host_table, cache.buckets.host_count
        shares = {f.name: 0 for f in cache.formats}
        stored = dict(k=0.0, v=0.0)
        for tier, f in enumerate(cache.formats):
            pages, first = np.unique(table[..., tier, :][table[..., tier, :] >= 0], return_index=True)
            index = np.argwhere(table[..., tier, :] >= 0)[first]
            slots = count[(*index.T[:3], tier)] - index[:, 3] * 16
            shares[f.name] = int(slots.clip(max=16).sum())
            stored["k"] += len(pages) * f.v_offset + len(pages) * (0 if f.plain else 2 * 16)
            stored["v"] += len(pages) * (f.page_bytes - f.v_offset) - len(pages) * (0 if f.plain else 2 * 16)
        tokens = sum(shares.values())
        assert memory.k_bits == pytest.approx(8 * stored["k"] / (tokens * dim))
        assert memory.v_bits == pytest.approx(8 * stored["v"] / (tokens * dim))
        scale, widths = 16 / dim, {"K16V16": (16, 16), "K8V4": (8, 4), "K4V3": (4, 3), "K3V2": (3, 2)}
        for got, want, side in (
            (memory.k_bits, memory.expected_k_bits, 0),
            (memory.v_bits, memory.expected_v_bits, 1),
        ):
            by_share = sum(n * (widths[name][side] + scale * (name != "K16V16")) for name, n in shares.items()) / tokens
            assert want == pytest.approx(by_share)
            empty = memory.page_slack / (sum(memory.tiers.values()) - memory.page_slack)
            assert want <= got <= want * (1 + 2 * empty)

    check()
    cache.fork(0)  # a page that two share is counted once
    check()
    cache.crop(2, 1500)
    check()


@pytest.mark.parametrize(("filled", "budget"), [(False, 200_000), (True, 300_000)])
def test_a_step_of_requests_without_tokens_keeps_the_budget(filled: bool, budget: int) -> None:
    """`advance` of the first tokens, with and without another request that has some."""
    cache = TieredCache(2, 4, 64, budget_bytes=budget, max_requests=3, max_tokens=1500)
    requests = [cache.add_request() for _ in range(3)]
    if filled:
        for layer in range(2):
            cache.append(layer, *torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16), requests=[requests[0]])
    with pytest.raises(BudgetExceeded, match=r"budget: expected at least \d+ bytes"):
        cache.advance()
    cache.check()
    memory = cache.memory()
    assert memory.total <= memory.allowed
    assert [cache.length(request) for request in requests] == [int(filled), 0, 0]
    roomy = TieredCache(2, 4, 64, budget_bytes=2_000_000, max_requests=3, max_tokens=1500)
    for _ in range(3):
        roomy.add_request()
    roomy.advance()
    assert roomy.memory().total <= roomy.memory().allowed
