"""A decode step with the same requests again: tables by one launch (table.cu, append.cu), and what is kept between."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import emulator
from allocations import Allocations
from cache_model import fingerprint, make, rows
from cache_model import same as alike
from conftest import HAS_GPU
from kvstrata import jit
from kvstrata.cache import TieredCache
from kvstrata.cache.move import append_cuda, launches
from kvstrata.cache.ops import append as append_op
from kvstrata.cache.ops import append_one
from kvstrata.cache.ops import step as step_op
from kvstrata.cache.storage import table_cuda

DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch):
    if HAS_GPU or emulator.missing():
        pytest.skip("the kernels run on the GPU, or there is no compiler")
    for module in (append_cuda, launches, table_cuda):
        monkeypatch.setattr(module, "jit", emulator.launcher())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for cached in (launches.kernel, table_cuda._kernel):
        cached.cache_clear()
    yield
    for cached in (launches.kernel, table_cuda._kernel):
        cached.cache_clear()


def filled(requests: int = 4, tokens: int = 21, budget: float | None = None, **options) -> TieredCache:
    cache = make(layers=3, max_requests=requests, budget=budget, device=DEVICE, **options)
    for layer in range(3):
        k, v = (x.to(DEVICE) for x in rows(requests * tokens, seed=layer))
        cache.append(layer, k, v, list(range(requests)), [tokens] * requests)
    return cache


def same_rows(a: TieredCache, b: TieredCache) -> bool:
    return all(
        torch.equal(x, y)
        for layer in range(3)
        for r in a.requests
        for x, y in zip(a.gather(layer, r), b.gather(layer, r), strict=True)
    )


def test_counts_go_up_on_the_device(emulated: None) -> None:
    cache = filled()
    count, length = cache.buckets.count.clone(), cache._device_lengths.clone()
    ids = torch.tensor([3, 1], dtype=torch.int32)
    table_cuda.count_up(cache.buckets, ids, cache._device_lengths)()
    for request in (1, 3):
        count[request, :, :, 0] += 1
        length[request] += 1
    assert torch.equal(cache.buckets.count, count)
    assert torch.equal(cache._device_lengths, length)


def test_new_pages_are_zero_and_in_the_table(emulated: None) -> None:
    """Pages in several slabs; adjacent pages keep their bytes."""
    cache = filled()
    pool, table = cache.pool, cache.buckets.page_table.clone()
    handles = pool.allocate(0, 9)
    pool.write(handles, 0, torch.full((9, pool.strides[0]), 7, dtype=torch.uint8))
    chosen = handles[[0, 2, 5, 8]]
    entries = np.array([5, 900, 17, 3000])
    assert chosen[-1] // pool.units > chosen[0] // pool.units
    table_cuda.NewPages(cache.buckets).prepare(torch.from_numpy(np.concatenate([entries, chosen])))()
    table.view(-1)[torch.from_numpy(entries)] = torch.from_numpy(chosen).int()
    assert torch.equal(cache.buckets.page_table, table)
    cleared = pool.read(handles, 0, pool.strides[0])
    assert torch.equal(cleared.amax(1) == 0, torch.from_numpy(np.isin(handles, chosen)))


@pytest.mark.parametrize("options", [{}, {"importance": "ema"}, {"max_tokens": 40000}])
@pytest.mark.parametrize("batched", [True, False])
def test_one_launch_appends_like_the_reference(emulated: None, options: dict, batched: bool) -> None:
    """Other rows, another layer, and rows at an address that needs narrower accesses."""
    wanted, cache = filled(**options), filled(**options)
    ids, listed = torch.tensor([2, 0], dtype=torch.int32), [2, 0]
    k, v = rows(2, seed=9)
    one = append_cuda.AppendOne(cache.buckets, ids, k, v, cache._device_lengths, None, cache.policy.mode != "mean")
    for layer in (2, 0):
        k, v = rows(2, seed=10 + layer)
        wanted.append(layer, k, v, listed, [1, 1])
        assert one.fits(k, v)
        one(layer, *((x.unsqueeze(1) if batched else x) for x in (k, v)))
    assert same_rows(wanted, cache)
    assert torch.equal(wanted.importance(2, 0), cache.importance(2, 0))
    odd = torch.zeros(k.numel() + 1)[1:].view(k.shape)
    assert not one.fits(odd, v)


@pytest.mark.parametrize("budget", [None, 0.6])
@pytest.mark.parametrize("numbered", [True, False])
def test_repeated_steps_equal_single_appends(
    numbered: bool, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over page edges, a fork that shares the open page, a request that leaves and comes back, other lists between."""
    cache, wanted, slow = filled(5, budget=budget), filled(5, budget=budget), []
    plain = append_op.append_plain
    monkeypatch.setattr(append_op, "append_plain", lambda *given: slow.append(given[0]) or plain(*given))

    def step(n: int, requests: list[int] | None) -> None:
        ids = requests or [0, 1, 2, 3, 4]
        for layer in range(3):
            k, v = (x.to(DEVICE) for x in rows(len(ids), seed=100 + 3 * n + layer))
            cache.append(layer, k.unsqueeze(1), v.unsqueeze(1), requests)
            for i, request in enumerate(ids):
                wanted.append(layer, k[i : i + 1], v[i : i + 1], [request])

    for n in range(14):
        step(n, [4, 2, 0] if numbered else None)
    assert slow.count(cache) == 1 if budget is None else slow.count(cache) < 14  # of 42 appends
    cache.check()
    assert same_rows(cache, wanted)
    for each in (cache, wanted):
        each.free_request(4)
        each.fork(2)
    for n in range(14, 30):
        step(n, [4, 2, 0] if numbered else None)
    cache.advance([0, 2])
    wanted.advance([0, 2])
    assert np.array_equal(cache._lengths, wanted._lengths)
    for each in (cache, wanted):
        for layer in range(3):
            k, v = (x.to(DEVICE) for x in rows(2, seed=layer))
            each.write(layer, k, v, torch.tensor([0, 2], dtype=torch.int32, device=DEVICE))
    cache.check()
    assert same_rows(cache, wanted)


def test_out_of_memory_at_a_page_edge_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_one, "guard_of", lambda given: lambda *rows: True)  # which see the mode that counts
    caches = [filled(3, slab_bytes=1 << 14) for _ in range(2)]
    k, v = (x.to(DEVICE).unsqueeze(1) for x in rows(3))
    for cache in caches:
        cache.buckets.ahead.near = -1  # none is taken ahead of the edge
        while cache.length(0) % cache.page_tokens:
            for layer in range(3):
                cache.append(layer, k, v, [0, 1, 2])
    monkeypatch.setattr(append_op, "append_plain", lambda *given: pytest.fail("not as the last one"))
    lines = Allocations.of(lambda: caches[1].append(1, v, k, [0, 1, 2])).lines
    before = fingerprint(caches[0], spare=False)
    assert len(lines) > 3
    for number in range(len(lines)):
        with pytest.raises(torch.OutOfMemoryError, match="as asked for"):
            Allocations.of(lambda: caches[0].append(1, v, k, [0, 1, 2]), number)
        assert alike(before, fingerprint(caches[0], spare=False)), lines[number]
        caches[0].check()
    caches[0].append(1, v, k, [0, 1, 2])
    assert same_rows(*caches)


def test_repeated_steps_are_still_checked() -> None:
    cache = filled(2, tokens=20, max_tokens=24)
    k, v = (x.to(DEVICE).unsqueeze(1) for x in rows(2))
    for _ in range(4):
        for layer in range(3):
            cache.append(layer, k, v, [0, 1])
    with pytest.raises(ValueError, match="k: expected at most 0 more tokens"):
        cache.append(0, k, v, [0, 1])
    with pytest.raises(TypeError, match=r"k: expected torch\.float32"):
        cache.append(0, k.half(), v.half(), [0, 1])
    with pytest.raises(ValueError, match="layer: expected"):
        cache.append(3, k, v, [0, 1])
    cache.check()


@pytest.mark.parametrize("requests", [[0, 1, 2, 3, 4], [3, 1], [4, 0, 2], [2]])
@pytest.mark.parametrize("budget", [None, 0.4, 3_000_000])
def test_steps_over_page_edges_keep_the_invariants(requests: list[int], budget: float | int | None) -> None:
    """Advance of contiguous and other lists, long and short ones; forks, crops and settlings between."""
    limit = dict(budget=None, budget_bytes=budget) if isinstance(budget, int) else dict(budget=budget)
    cache = make(layers=2, max_requests=6, device=DEVICE, **limit)
    for layer in range(2):
        k, v = (x.to(DEVICE) for x in rows(5 * 30, seed=layer))
        cache.append(layer, k, v, list(range(5)), [30 - r for r in range(4)] + [36])
    for n in range(40):
        cache.advance(requests)
        for layer in range(2):
            k, v = (x.to(DEVICE) for x in rows(len(requests), seed=n))
            cache.write(layer, k, v, torch.tensor(requests, dtype=torch.int32, device=DEVICE))
        if n == 11:
            twin = cache.fork(requests[0])
        if n == 20:
            cache.free_request(twin)
            cache.crop(requests[0], 33)
        if n % 5 == 0:
            cache.check()
    pages = -(-cache.buckets.host_count.astype(np.int64) // cache.page_tokens)
    if budget is not None:
        assert np.array_equal(cache.buckets.pages_of(), pages.sum(2))
    left, ahead = cache.buckets.left[requests], cache.buckets.ahead.there(np.array(requests)).all(1)
    room = (-cache.buckets.host_count[requests, :, :, 0] % cache.page_tokens).min((1, 2))
    assert ((left < 0) | (left == room + cache.page_tokens * ahead)).all()
    assert not ahead.any() or budget is None
    cache.check()


@pytest.mark.parametrize("numbered", [True, False])
def test_a_request_at_a_page_edge_in_every_step_does_not_trigger_page_checks(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests at all places of their pages: after the first step no append takes pages itself."""
    caches = [make(layers=3, max_requests=16, budget=None, device=DEVICE) for _ in range(2)]
    for cache in caches:
        for layer in range(3):
            k, v = (x.to(DEVICE) for x in rows(16 * 20 + 120, seed=layer))
            cache.append(layer, k, v, list(range(16)), [20 + i for i in range(16)])
    ours, wanted = caches
    wanted.buckets.ahead.near = -1
    operations: list[int] = []
    begin = TieredCache._operation
    monkeypatch.setattr(TieredCache, "_operation", lambda self: operations.append(self is ours) or begin(self))
    for number in range(20):
        for layer in range(3):
            k, v = (x.to(DEVICE).unsqueeze(1) for x in rows(16, seed=100 + 3 * number + layer))
            ours.append(layer, k, v, list(range(16)) if numbered else None)
            wanted.append(layer, k, v)
        if number == 0:
            assert sum(operations) == 3
    assert sum(operations) == 3
    assert len(operations) == 3 + 20 * 3  # without pages ahead every append takes some
    ours.check()
    assert same_rows(ours, wanted)


def test_appends_after_a_step_that_failed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step knows how much room is left; appends that repeat must not leave it with that."""
    cache = filled(3, tokens=20)
    k, v = (x.to(DEVICE).unsqueeze(1) for x in rows(3))

    def append(times: int) -> None:
        for _ in range(times):
            for layer in range(3):
                cache.append(layer, k, v)

    def fail(*given: object) -> None:
        raise MemoryError

    append(3)
    with monkeypatch.context() as patched:
        patched.setattr(step_op, "_prepare_count", fail)
        with pytest.raises(MemoryError):
            cache.advance()
    assert (cache.buckets.left == 9).all()
    append(3)
    assert (cache.buckets.left == -1).all()
    cache.advance()
    assert (cache.buckets.left == 5).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_stay_within_register_limits(arch: str) -> None:
    pytest.importorskip("cuda.core")
    for kernel in table_cuda.KERNELS:
        usage = jit.usage(table_cuda.SOURCE, kernel, arch=arch)
        assert usage.spill_bytes == usage.stack_bytes == usage.shared_bytes == 0, usage
        assert 0 < usage.registers <= 64, usage  # of the three kernels together


@pytest.mark.parametrize("budget", [None, 0.5])
def test_cached_room_of_pages_is_invalidated_by_other_operations(budget: float | None) -> None:
    """Tokens appended between steps, forks, crops, other lists and settling: as in a cache that looks every time."""
    caches = [filled(4, tokens=40, budget=budget) for _ in range(2)]
    ours, wanted = caches
    kept: list[int] = []

    def append(number: int, requests: list[int]) -> None:
        for cache in caches:
            for layer in range(3):
                if cache is wanted:
                    cache.buckets.forget()
                elif cache._repeated is not None and (room := cache._repeated.rooms.get(layer)) is not None:
                    kept.append(room.tokens * (room.version == cache.buckets.version))
                k, v = (x.to(DEVICE).unsqueeze(1) for x in rows(len(requests), seed=10 * number + layer))
                cache.append(layer, k, v, requests)

    def advance(number: int, requests: list[int] | None = None) -> None:
        for cache in caches:
            if cache is wanted:
                cache.buckets.forget()
            cache.advance(requests)
            given = list(cache.requests) if requests is None else requests
            for layer in range(3):
                k, v = (x.to(DEVICE) for x in rows(len(given), seed=10 * number + layer))
                cache.write(layer, k, v, torch.tensor(given, dtype=torch.int32, device=DEVICE))

    for cache in caches:
        cache.free_request(3)
    for number in range(5):
        append(number, [0, 1, 2])
    advance(5)
    for number in range(7, 19):  # steps end at a page edge, and appends cross it
        append(number, [0, 1, 2])
        advance(100 + number)
    for cache in caches:
        cache.fork(1)
    append(19, [0, 1, 2])  # the open pages of one are shared
    append(20, [3, 0])
    for cache in caches:
        cache.crop(0, 33)
    for number in range(21, 45):
        append(number, [0, 1, 2] if number % 5 else [3, 1])
        if number % 7 == 0:
            advance(200 + number, [2, 0])
        ours.check()
    assert sum(n > 0 for n in kept) > 30
    assert np.array_equal(ours.buckets.host_count, wanted.buckets.host_count)
    assert np.array_equal(ours._lengths, wanted._lengths)
    assert same_rows(*caches)


def test_pages_allocated_by_an_append_are_not_allocated_again() -> None:
    """`short` keeps its answer while nothing changes; an append that repeats crosses the edge it spoke of."""
    cache = filled(2, tokens=14, budget=0.5)
    k, v = (x.to(DEVICE).unsqueeze(1) for x in rows(2))

    def append() -> None:
        for layer in range(3):
            cache.append(layer, k, v, [0, 1])

    append()
    append()
    ids = np.array([0, 1])
    short = cache.buckets.short(ids)
    assert short is not None
    assert short.requests.tolist() == [0, 1]
    assert cache.buckets.short(ids) is short
    version = cache.buckets.version
    append()
    assert cache.buckets.version == version  # so nothing else drops the answer
    assert cache.buckets.short(ids) is None
    cache.check()
