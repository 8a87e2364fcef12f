"""Operations of a cache when memory runs out: nothing has changed, and a second try does what the first would have.

Every allocation of an operation fails once: device tensors (any operator of torch that returns new memory), slabs,
copies of host arrays, workspaces. Without ``slow`` it is the last one of each function, and plans, which look at no
cache, are made once. Where kernels settle, a cache keeps their scratch, also from an attempt that failed, and the next
one asks for less: then every allocation fails in a cache of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from allocations import Allocations
from cache_model import fingerprint, limit, make, rows, same
from conftest import HAS_GPU
from kvstrata.cache import TieredCache
from kvstrata.cache.ops import files, step
from kvstrata.cache.policy import ahead, plan, plan_op, scopes, settle_cuda
from test_settle_cuda import device

__all__ = ["device"]  # a fixture
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def given(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.to(DEVICE) for x in rows(tokens, dim=32, seed=seed))
    return k, v


def mass(requests: int, positions: int) -> torch.Tensor:
    return (torch.rand(requests, 2, positions, generator=torch.Generator().manual_seed(1)) ** 4).to(DEVICE)


def filled(**options) -> TieredCache:
    """Requests 0 to 2 with settled tokens; 2 is a fork of 0 that has one token more in layer 0."""
    options = (
        dict(layers=2, dim=32, recent_tokens=8, sink_tokens=2, budget=0.4, max_requests=5, max_tokens=192) | options
    )
    backend = options.pop("backend", None)
    cache = make(device=DEVICE, settle_every=8, **dict(tiers=("K8V4", "K4V3", "K2V2")) | options)
    if backend is not None:
        cache.buckets.backend = backend
    for kind in cache.page_formats[1:]:
        assert kind._codes  # tables that are made when they are needed first
        assert kind._scale_index
    for layer in range(2):
        cache.append(layer, *given(110, layer), requests=[0, 1], seq_lens=[70, 40])
        cache.update_importance(layer, mass(2, 70))
    cache.append(0, *given(1, 5), requests=[cache.fork(0)])
    return cache


def one_each(cache: TieredCache, layer: int = 0) -> None:
    cache.append(layer, *given(3, 7), requests=[0, 1, 2], seq_lens=[1, 1, 1])


def before_settling(operation: Callable[[TieredCache], object]) -> TieredCache:
    """A cache in which the operation, which adds a token to each request, has to settle others."""
    cache = filled()
    while True:
        twin = copy.deepcopy(cache)
        operation(twin)
        if twin.memory().tokens["K32V32"] < cache.memory().tokens["K32V32"]:
            return cache
        for layer in range(cache.layers):
            one_each(cache, layer)


def with_holes() -> TieredCache:
    """Pages of several requests in the same slabs, and then of fewer."""
    cache = filled(budget=None, slab_bytes=1 << 14)
    for part in range(3):
        cache.append(0, *given(80, part), requests=[0, 1, 2, 3], seq_lens=[20] * 4)
    for request in (0, 2):
        cache.free_request(request)
    return cache


def write(cache: TieredCache) -> None:
    """The rows of the tokens that `advance` made room for."""
    ids = torch.tensor(cache.requests, dtype=torch.int32, device=DEVICE)
    for layer in range(cache.layers):
        cache.write(layer, *given(len(ids), layer), ids)


def advance(cache: TieredCache) -> None:
    """A step that plans nothing for the next one, which may fail without harm."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step, "plan_ahead", lambda cache, given: None)
        cache.advance()


def planned_ahead() -> TieredCache:
    """A cache whose next step is planned."""
    cache = filled()
    while not cache._ahead:
        cache.advance()
        write(cache)
    return cache


OPERATIONS: dict[str, tuple[Callable[[], TieredCache], Callable[[TieredCache], object]]] = {
    "append one": (filled, one_each),
    "append one to a shared page": (filled, lambda c: c.append(1, *given(1), requests=[2])),
    "append pages": (
        lambda: filled(budget=None), lambda c: c.append(0, *given(60, 7), requests=[2, 3], seq_lens=[40, 20])
    ),
    "append and settle": (filled, lambda c: c.append(1, *given(130, 7), requests=[3, 1], seq_lens=[100, 30])),
    "append and settle ahead": (lambda: before_settling(one_each), one_each),
    "append with mass": (
        filled, lambda c: c.append(0, *given(60, 7), requests=[0, 2], seq_lens=[30, 30], mass=mass(2, 160))
    ),
    "append under bytes": (
        lambda: filled(**limit(150_000)), lambda c: c.append(0, *given(90, 7), requests=[1, 3], seq_lens=[40, 50])
    ),
    "advance": (lambda: before_settling(advance), advance),
    "advance without room": (filled, advance),
    "advance by a plan made ahead": (planned_ahead, advance),
    "update importance": (filled, lambda c: c.update_importance(0, mass(3, 80))),
    "settle": (filled, lambda c: c.settle()),
    "crop": (filled, lambda c: c.crop(2, 41)),
    "crop to nothing": (filled, lambda c: c.crop(0, 0)),
    "fork": (filled, lambda c: c.fork(1)),
    "reorder": (filled, lambda c: c.reorder([1, 1, 0])),
    "select": (filled, lambda c: c.select([2, 1])),
    "free": (filled, lambda c: c.free_request(1)),
    "compact": (with_holes, lambda c: c.compact()),
}  # fmt: skip


def contents(cache: TieredCache) -> list[object]:
    """Observable state of the cache, independent of where its pages are."""
    held: list[object] = [cache.requests, cache.memory().tokens, cache.memory().full, cache._ahead_from.copy()]
    for request in cache.requests:
        for layer in range(cache.layers):
            held += [*cache.gather(layer, request), cache.tier_map(layer, request), cache.importance(layer, request)]
            held.append(cache.length(request, layer))
    return held


def chosen(lines: list[tuple[str, str, int]], every: bool) -> Sequence[int]:
    last = {(file, function): number for number, (file, function, _) in enumerate(lines)}
    return range(len(lines)) if every else sorted(last.values())


def fail_everywhere(
    make_cache: Callable[[], TieredCache], operation: Callable[[TieredCache], object], every: bool = False,
    finish: Callable[[TieredCache], None] = lambda cache: None,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not every:
            plan_once(monkeypatch)
        _fail_everywhere(make_cache, operation, every, finish)


def plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: dict[object, plan.Plans] = {}

    def planned(scopes, policy, headroom):
        tokens = scopes.tokens
        key = (
            scopes.allowed,
            headroom,
            *(tuple(x.tolist()) for x in (tokens.tier, tokens.position, scopes.numbers[0])),
        )
        if key not in plans:
            plans[key] = plan_op.plan_all(scopes, policy, headroom)
        return plans[key]

    for module in (ahead, scopes, step):
        monkeypatch.setattr(module, "plan_all", planned)


def _fail_everywhere(
    make_cache: Callable[[], TieredCache], operation: Callable[[TieredCache], object], every: bool,
    finish: Callable[[TieredCache], None],
) -> None:  # fmt: skip
    cache, undisturbed, first = make_cache(), make_cache(), make_cache()
    operation(first)  # plans and compiles
    lines = Allocations.of(lambda: operation(undisturbed)).lines
    assert lines
    before, held, slack = fingerprint(cache, spare=False), contents(cache), cache.memory().slab_slack
    for number in chosen(lines, every):
        if settle_cuda.supports(cache):
            cache = make_cache()
        with pytest.raises(torch.OutOfMemoryError, match="as asked for"):
            Allocations.of(lambda cache=cache: operation(cache), number)
        place = f"allocation {number} of {len(lines)}, in {lines[number]}"
        assert same(before, fingerprint(cache, spare=False)), place
        cache.check()
        assert cache.memory().slab_slack <= slack, place
    assert same(held, contents(cache))
    operation(cache)
    for one in (cache, undisturbed):
        finish(one)
        one.check()
    assert same(contents(cache), contents(undisturbed))


@pytest.mark.parametrize("name", OPERATIONS)
def test_out_of_memory_changes_nothing(name: str) -> None:
    fail_everywhere(*OPERATIONS[name], finish=write if "advance" in name else lambda cache: None)


@pytest.mark.skipif(HAS_GPU, reason="kernels settle in the test above")
@pytest.mark.parametrize("name", [pytest.param("append and settle", marks=pytest.mark.slow), "settle"])
def test_out_of_memory_changes_nothing_where_kernels_settle(name: str, device: str) -> None:
    """As on a GPU, with emulated kernels."""
    fail_everywhere(lambda: filled(tiers=("K4V4", "K2V2"), backend="cuda", budget=0.3), OPERATIONS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_out_of_memory_anywhere_changes_nothing(name: str) -> None:
    fail_everywhere(*OPERATIONS[name], True, write if "advance" in name else lambda cache: None)


def test_out_of_memory_in_a_plan_made_ahead_does_no_harm() -> None:
    cache = filled()
    while True:
        before = copy.deepcopy(cache)
        cache.advance()
        if cache._ahead:
            break
        write(cache)
    write(cache)
    twins = copy.deepcopy(before), copy.deepcopy(before)
    needed, lines = len(Allocations.of(lambda: advance(twins[0])).lines), Allocations.of(twins[1].advance).lines
    assert len(lines) > needed
    for number in {needed, (needed + len(lines)) // 2, len(lines) - 1}:
        twin = copy.deepcopy(before)
        Allocations.of(twin.advance, number)
        assert not twin._ahead
        write(twin)
        twin.check()
        assert same(contents(twin), contents(cache))


@pytest.mark.parametrize("budget", [None, 0.4, 150_000])
def test_out_of_memory_while_loading(
    budget: float | int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the request has to settle first."""
    path, tensors = tmp_path / "request.safetensors", files.taken(filled(budget=None), 0)
    tensors = {name: x.cpu() for name, x in tensors.items()}
    monkeypatch.setattr(files, "_read", lambda cache, path: tensors)  # memory of safetensors is not ours
    fail_everywhere(lambda: filled(**limit(budget)), lambda c: c.load(path))


def test_out_of_memory_while_saving(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    fail_everywhere(filled, lambda c: c.save(path, 0))


@pytest.mark.gpu
def test_freed_memory_is_recorded_on_other_streams() -> None:
    """A stream that has yet to read pages when the cache frees them, on the stream that allocated their slabs."""
    cache = filled(budget=None, debug=False)
    want = [slab.clone() for slab in cache.pool.slabs if slab is not None]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    sizes = cache.pool.sizes[cache.pool.allocated].tolist()
    with torch.cuda.stream(other):
        slabs = cache.bucket_views(0).slabs  # the cache notes the stream
        torch.cuda._sleep(200_000_000)
        found = [slab.clone() for slab in slabs if slab is not None]
    del slabs
    for request in cache.requests:
        cache.free_request(request)
    cache.compact()
    assert cache.pool.slab_count == 0
    for _ in range(4):
        junk = [torch.full((size,), 0x55, dtype=torch.uint8, device=DEVICE) for size in sizes]
    torch.cuda.synchronize()
    del junk
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
