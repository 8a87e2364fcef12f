"""Pages ahead of need: a page edge takes nothing, other operations give them back, and rows are where they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allocations import Allocations
from cache_model import make, rows
from conftest import HAS_GPU
from kvstrata import jit
from kvstrata.cache import TieredCache
from kvstrata.cache.storage import table_cuda
from test_append_one import DEVICE, emulated, filled, same_rows

__all__ = ["emulated"]  # a fixture
LAYERS, P = 3, 16


def step(cache: TieredCache, number: int, eager: bool = False, requests: list[int] | None = None) -> None:
    """A token of each request: by `advance` and `write`, or appended layer by layer."""
    given = list(cache.requests) if requests is None else requests
    if not eager:
        cache.advance(given)
    for layer in range(LAYERS):
        k, v = (x.to(DEVICE) for x in rows(len(given), seed=100 * number + layer))
        if eager:
            cache.append(layer, k.unsqueeze(1), v.unsqueeze(1), given)
        else:
            cache.write(layer, k, v, torch.tensor(given, dtype=torch.int32, device=DEVICE))


def without(cache: TieredCache) -> TieredCache:
    cache.buckets.ahead.near = -1
    return cache


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("stagger", [0, 5])
def test_a_page_edge_allocates_nothing_and_rows_are_the_same(eager: bool, stagger: int) -> None:
    """All requests at the same place of their pages, and at different ones, over several pages."""
    caches = [make(layers=LAYERS, max_requests=4, budget=None, device=DEVICE) for _ in range(2)]
    without(caches[1])
    for cache in caches:
        for layer in range(LAYERS):
            lengths = [20 + stagger * i for i in range(4)]
            k, v = (x.to(DEVICE) for x in rows(sum(lengths), seed=layer))
            cache.append(layer, k, v, list(range(4)), lengths)
    ours, edges, most = caches[0], 0, 0
    for number in range(50):
        at_edge = [r for r in range(4) if ours.length(r) % P == 0]
        there = ours.buckets.ahead.there()
        before = ours.pool.pages(0) - len(ours.buckets.ahead.reserve)
        for cache in caches:
            step(cache, number, eager)
        if number > 20:
            assert there[at_edge].all()
            edges += len(at_edge)
            most = max(most, (ours.pool.pages(0) - len(ours.buckets.ahead.reserve) - before) // (LAYERS * 2))
    assert edges >= 4
    assert most <= 1 or ours.buckets.by_cuda  # requests take turns, but for those of one launch
    assert most
    ours.check()
    assert same_rows(*caches)
    for request in range(4):
        ours.free_request(request)
    ours.check()
    assert (ours.pool.pages(0), sum(ours.memory().tiers.values())) == (0, 0)


def test_one_request_takes_pages_that_others_left() -> None:
    ours, wanted = filled(4, tokens=60), without(filled(4, tokens=60))
    for cache in (ours, wanted):
        for request in (1, 2, 3):
            cache.crop(request, 20)
    slabs = ours.pool.slab_count
    for number in range(40):
        for cache in (ours, wanted):
            step(cache, number, requests=[2])
    assert ours.pool.slab_count == slabs
    ours.check()
    assert same_rows(ours, wanted)


def test_a_step_at_an_edge_allocates_nothing() -> None:
    cache = filled(3, tokens=29)
    for number in range(3):
        step(cache, number)
    assert cache.length(0) % P == 0
    assert cache.buckets.ahead.there().all()
    while cache.buckets.ahead.missing:  # what a step does that has nothing else to do
        cache.buckets.ahead.fill_reserve()
    pages = cache.pool.pages(0)
    assert Allocations.of(cache.advance).lines == []
    assert cache.pool.pages(0) == pages


@pytest.mark.parametrize("eager", [False, True])
def test_other_operations_give_pages_back(eager: bool) -> None:
    """Fork, crop, prompts, reorder, leaving, and layers that have crossed an edge when others have not."""
    ours, wanted = filled(5, tokens=25), without(filled(5, tokens=25))

    def both(operation) -> None:
        for cache in (ours, wanted):
            operation(cache)
        ours.check()
        assert same_rows(ours, wanted)

    def several(cache: TieredCache, request: int, tokens: int) -> None:
        for layer in range(LAYERS):
            cache.append(layer, *(x.to(DEVICE) for x in rows(tokens, seed=layer)), [request], [tokens])

    for cache in (ours, wanted):
        cache.free_request(4)
    for number in range(3):
        for cache in (ours, wanted):
            step(cache, number, eager, [0, 1, 2, 3])
    assert ours.buckets.ahead.there().any()
    both(lambda cache: cache.fork(0))
    assert not ours.buckets.ahead.there()[[0, 4]].any()
    both(lambda cache: cache.crop(1, 17))
    both(lambda cache: several(cache, 2, 40))
    both(lambda cache: cache.reorder([0, 1, 2, 2, 4]))
    for number in range(3, 8):
        for cache in (ours, wanted):
            step(cache, number, eager)
    one = [x.to(DEVICE).unsqueeze(1) for x in rows(5, seed=9)]
    for layer in (1, 0):  # in another order, and the last one not yet
        both(lambda cache, at=layer: cache.append(at, *one, [0, 1, 2, 3, 4]))
    both(lambda cache: cache.free_request(3))
    both(lambda cache: cache.append(2, *(x[[0, 1, 2, 4]] for x in one), [0, 1, 2, 4]))
    for number in range(8, 20):
        for cache in (ours, wanted):
            step(cache, number, eager)
    both(lambda cache: cache.compact())
    for number in range(20, 24):
        for cache in (ours, wanted):
            step(cache, number, not eager)
    both(lambda cache: cache.crop(2, 40))
    for cache in (ours, wanted):
        for request in cache.requests:
            cache.free_request(request)
    assert ours.pool.pages(0) == 0


@pytest.mark.parametrize("eager", [False, True])
def test_lack_of_memory_does_no_harm(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every allocation of a step that takes pages ahead is refused once; the step is done all the same."""
    from kvstrata.cache.ops import append_one

    monkeypatch.setattr(append_one, "guard_of", lambda given: lambda *rows: True)  # which see the mode that counts

    def before() -> TieredCache:
        cache = filled(2, tokens=26, slab_bytes=1 << 14)
        step(cache, 0, eager, [0, 1])  # at the next one a quarter of a page is left
        cache.buckets.ahead.empty_reserve()
        return cache

    def last(cache: TieredCache) -> None:
        if not eager:
            cache.advance([0, 1])
            return
        for layer in range(LAYERS):
            cache.append(layer, *one, [0, 1])

    one = [x.to(DEVICE).unsqueeze(1) for x in rows(2, seed=5)]
    cache = before()
    lines = Allocations.of(lambda: last(cache)).lines
    assert lines
    assert cache.buckets.ahead.there().any()
    refused = []
    for number in range(len(lines)):
        cache = before()
        Allocations.of(lambda of=cache: last(of), number)
        refused.append(not cache.buckets.ahead.there().any())  # unless less than was asked for is granted
        if not eager:
            for layer in range(LAYERS):
                cache.write(layer, *(x.squeeze(1) for x in one))
        for more in range(1, 11, 3):
            step(cache, more, eager, [0, 1])
            cache.check()
    assert any(refused)


@pytest.mark.parametrize("eager", [False, True])
def test_the_reserve_is_filled_in_separate_steps(eager: bool) -> None:
    """After the first time no step both takes pages and opens a slab, and none opens two."""
    cache = filled(4, tokens=20, slab_bytes=1 << 16)
    for layer in range(LAYERS):  # every fourth step a request takes pages
        cache.append(layer, *(x.to(DEVICE) for x in rows(24, seed=3)), [0, 1, 2, 3], [0, 4, 8, 12])
    seen = []
    for number in range(60):
        pages, slabs = cache.buckets.ahead._page.copy(), cache.pool.slab_count
        step(cache, number, eager)
        seen.append(((cache.buckets.ahead._page != pages).any(), cache.pool.slab_count - slabs))
        if number % 10 == 0:
            cache.check()
    began = [taken for taken, _ in seen].index(True)
    assert max(opened for _, opened in seen[began + 1 :]) == 1
    assert sum(taken for taken, _ in seen) > 6
    assert not any(taken and opened for taken, opened in seen[began + 1 :])
    for request in cache.requests:
        cache.free_request(request)
    assert (cache.pool.pages(0), len(cache.buckets.ahead.reserve), cache.buckets.ahead.missing) == (0, 0, 0)


@pytest.mark.parametrize("eager", [False, True])
def test_a_reserve_that_cannot_be_filled_does_no_harm(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(8, tokens=27, slab_bytes=1 << 14)
    step(cache, 0, eager)
    assert cache.buckets.ahead.there().any()
    assert cache.buckets.ahead.missing > 0
    refused = []

    def refuse(*given: object) -> None:
        refused.append(given)
        raise torch.OutOfMemoryError("out of memory")

    cache.buckets.ahead._wait = 1  # so that no pages are taken now
    with monkeypatch.context() as patched:
        patched.setattr(type(cache.pool), "_allocate_slabs", refuse)
        step(cache, 1, eager)
    assert len(refused) == 1
    assert cache.buckets.ahead.missing == 0
    for number in range(2, 30):
        step(cache, number, eager)
    cache.check()
    assert cache.length(7, LAYERS - 1) == 27 + 30


def test_no_pages_ahead_under_a_budget_or_beyond_the_last_page() -> None:
    cache = filled(2, tokens=24, budget=0.5)
    for number in range(9):
        step(cache, number)
    assert not cache.buckets.ahead.there().any()
    cache = filled(2, tokens=24, max_tokens=40)
    for number in range(16):
        step(cache, number)
        cache.check()
    assert not cache.buckets.ahead.there().any()
    with pytest.raises(ValueError, match="max_tokens"):
        cache.advance()


def test_pages_by_a_kernel_are_zero_and_in_the_table(emulated: None) -> None:
    """Pages of three requests in one launch, at different indices of their lists; adjacent pages keep their bytes."""
    cache = filled(4)
    pool, table, each = cache.pool, cache.buckets.page_table.clone(), LAYERS * 2
    handles = pool.allocate(0, 4 * each)
    pool.write(handles, 0, torch.full((4 * each, pool.strides[0]), 7, dtype=torch.uint8))
    chosen, wanted = handles[: 3 * each].reshape(3, LAYERS, 2), [(3, 2), (0, 5), (1, 4)]
    enter = table_cuda.NextPages(cache.buckets)
    assert enter.most == 16
    enter(*np.array(wanted).T, chosen.reshape(-1).astype(np.int32))
    for (request, page), of in zip(wanted, chosen, strict=True):
        table[request, :, :, 0, page] = torch.from_numpy(of).int()
    assert torch.equal(cache.buckets.page_table, table)
    data = pool.read(handles, 0, pool.strides[0])
    assert not data[: 3 * each].any()
    assert (data[3 * each :] == 7).all()


def test_steps_by_the_kernel(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where host and device share the tables, the kernel writes what the host has written; most steps take nothing."""
    taken: list[int] = []
    enter = table_cuda.NextPages.__call__

    def counted(self: table_cuda.NextPages, requests: np.ndarray, numbers: np.ndarray, handles: np.ndarray) -> None:
        taken.append(len(requests))
        enter(self, requests, numbers, handles)

    monkeypatch.setattr(table_cuda.NextPages, "__call__", counted)
    ours, wanted = filled(4, tokens=20), without(filled(4, tokens=20))
    ours.buckets.__dict__["by_cuda"] = True
    for number in range(40):
        for cache in (ours, wanted):
            step(cache, number)
        if number % 6 == 0:
            ours.check()
    assert taken == [4, 4, 4]  # all of them at once, three times
    assert same_rows(ours, wanted)


def test_a_launch_has_room_for_its_requests() -> None:
    """A struct of parameters has at most 32,764 bytes; a request with more buckets than that goes by an upload."""
    size = 4 * (table_cuda.FIRST_HANDLE + table_cuda.PAGES)
    assert size <= 32764
    assert size % 8 == 0
    assert table_cuda.PAGES // (32 * 8) == table_cuda.REQUESTS


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_launch_in_a_thread_and_on_another_device_binds_a_context() -> None:
    import threading

    cache = filled(2, tokens=28)
    errors: list[BaseException] = []

    def steps() -> None:
        try:
            for number in range(8):
                step(cache, number)
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
    steps()
    assert not errors
    cache.check()
    assert jit.current_stream(0) is not None
