"""Settling by kernels: a cache whose operations are planned and moved in CUDA C++ against one that goes by lists."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import emulator
from allocations import Allocations
from cache_model import fingerprint
from cache_model import same as alike
from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.ops import append_prompt
from kvstrata.cache.policy import settle_cuda
from kvstrata.cache.policy.prompt_cuda import PreparedPrompt
from kvstrata.cache.policy.room import fits_each
from kvstrata.cache.storage.page import NewRows
from kvstrata.cache.storage.tokens import Fresh
from kvstrata.cache.storage.transaction import Transaction

HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU, or the CPU with "cuda" emulated for caches whose buckets ask for it."""
    yield from emulator.settling_kernels(monkeypatch)


def pair(device: str, **options) -> tuple[TieredCache, TieredCache]:
    """A cache that settles by kernels, and one that goes by lists."""
    options = dict(
        budget=0.3, recent_tokens=20, sink_tokens=4, page_tokens=16, dtype=torch.float32, settle_every=8,
        tiers=("K4V4", "K2V2"), max_tokens=2048, max_requests=3, rope=[1.0 / 10 ** (i / 4) for i in range(16)],
    ) | options  # fmt: skip
    ours, wanted = TieredCache(2, 2, 32, device=device, **options), TieredCache(2, 2, 32, device="cpu", **options)
    ours.buckets.backend = "cuda"
    assert settle_cuda.supports(ours)
    assert not settle_cuda.supports(wanted)
    return ours, wanted


def same(ours: TieredCache, wanted: TieredCache) -> None:
    """Lengths, tiers and positions, token by token; values up to how a code is rounded."""
    assert ours.requests == wanted.requests
    for request in wanted.requests:
        for layer in range(2):
            assert ours.length(request, layer) == wanted.length(request, layer)
            assert torch.equal(ours.tier_map(layer, request).cpu(), wanted.tier_map(layer, request))
            k, v, position = (x.cpu() for x in ours.gather(layer, request))
            other_k, other_v, other = wanted.gather(layer, request)
            assert torch.equal(position, other)
            for a, b in ((k, other_k), (v, other_v)):
                assert int(((a.float() - b.float()).abs().amax(-1) > 0.02).sum()) <= 0.03 * other.numel()
            torch.testing.assert_close(ours.importance(layer, request).cpu(), wanted.importance(layer, request))
    assert (ours.buckets.count.cpu() == torch.from_numpy(wanted.buckets.host_count)).all()
    torch.testing.assert_close(ours.centre.cpu(), wanted.centre, atol=1e-4, rtol=1e-4)
    ours.check()


OFTEN = [
    dict(),
    dict(dtype=torch.bfloat16),
    dict(per_head=False),
    dict(evict=True, budget=0.15),
    dict(budget=None, budget_bytes=600_000),
]
RARELY = [
    dict(dtype=torch.float16),
    dict(importance="ema"),
    dict(policy="recency"),
    dict(policy="uniform"),
    dict(rope=None),
]
OPTIONS = [*OFTEN, *(pytest.param(options, marks=pytest.mark.slow) for options in RARELY)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) or "default")
def test_prompts_steps_and_appends_settle_alike(device: str, options: dict) -> None:
    """A prompt with mass, a ragged second one, chunks, decoded tokens, steps with `advance`, settling on demand."""
    ours, wanted = pair(device, **options)
    generator = torch.Generator().manual_seed(0)

    def both(name: str, *arguments, **keywords) -> None:
        raised = []
        for cache in (ours, wanted):
            place = [x.to(cache.device) if isinstance(x, torch.Tensor) else x for x in arguments]
            options = {k: x.to(cache.device) if isinstance(x, torch.Tensor) else x for k, x in keywords.items()}
            try:
                getattr(cache, name)(*place, **options)
                raised.append(None)
            except BudgetExceeded as error:
                raised.append((error.needed, error.allowed))
        assert raised[0] == raised[1]

    def rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(2, *shape, 2, 32, generator=generator).to(ours.dtype))

    for layer in range(2):
        mass = torch.rand(1, 2, 400, generator=generator) ** 4
        both("append", layer, *rows(400), [0], mass=mass, queries=400)
        both("append", layer, *rows(150 + 7), [1, 2], [150, 7])
        both("append", layer, *rows(90 + 200), [0, 2], [90, 200])
        same(ours, wanted)
    for step in range(24 if HAS_GPU else 12):  # emulated kernels are slow
        both("advance")
        k, v = rows(3)
        for layer in range(2):
            both("write", layer, k, v)
            both("update_importance", layer, torch.rand(3, 2, 600, generator=generator) ** 4)
        if step % 12 == 11:
            same(ours, wanted)
    for _ in range(12 if HAS_GPU else 6):
        k, v = rows(3, 1)
        for layer in range(2):
            both("append", layer, k, v)
    both("crop", 0, 300)
    both("settle")
    same(ours, wanted)


def test_scratch_of_a_prompt_is_bounded_and_counted(device: str) -> None:
    """At most 32 bytes per token and head, plus a few pages of small lists; `memory` reports them."""
    ours, _ = pair(device, max_tokens=4096, budget=0.25, dtype=torch.bfloat16)
    tokens = 3000
    k, v = torch.randn(2, tokens, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    before = ours.memory().scratch
    for layer in range(2):
        ours.append(layer, k, v, [0])
    used = ours.memory().scratch - before
    assert 5 * tokens * 2 < used <= 32 * tokens * 2 + 16 * 512


def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are appended to by what another one prepared."""
    layers: list[int] = []
    prepare = PreparedPrompt.prepare

    def counted(self, cache, change, layer, rows):
        layers.append(layer)
        prepare(self, cache, change, layer, rows)

    monkeypatch.setattr(PreparedPrompt, "prepare", counted)
    return layers


ROWS = {
    "packed": lambda k: k,
    "heads first": lambda k: k.transpose(0, 1).contiguous().transpose(0, 1),
    "in a wider tensor": lambda k: torch.cat([k, k], 1)[:, :2],
}


@pytest.mark.parametrize(("rows", "balance"), list(zip(ROWS, (False, True, True), strict=True)))
def test_layers_of_prompts_reuse_what_the_first_prepared(
    device: str, monkeypatch: pytest.MonkeyPatch, rows: str, balance: bool
) -> None:
    """Other rows in each layer; one request and two of different lengths; pages that others gave back."""
    ours, wanted = pair(device, balance=balance)
    layers, generator = again(monkeypatch), torch.Generator().manual_seed(0)
    if balance:
        by = torch.randint(-2, 3, (2, 2, 32), generator=generator).float().exp2()
        for cache in (ours, wanted):
            for layer in range(2):
                query = by[1 - layer].log2().to(cache.device)
                cache.set_balance(layer, by[layer].to(cache.device), [0, 1, 2], query=query)

    def prompts(requests: list[int], lengths: list[int] | None, tokens: int, seen: list[int]) -> None:
        layers.clear()
        for layer in range(2):
            k, v = torch.randn(2, tokens, 2, 32, generator=generator)
            for cache in (ours, wanted):
                cache.append(layer, ROWS[rows](k.to(cache.device)), ROWS[rows](v.to(cache.device)), requests, lengths)
        assert layers == seen
        same(ours, wanted)

    prompts([1], None, 300, [1])
    prompts([0, 2], [150, 200], 350, [1])
    for cache in (ours, wanted):
        cache.free_request(0)
        cache.free_request(2)
    prompts([2, 0], [200, 150], 350, [1])
    for cache in (ours, wanted):
        cache.free_request(1)
    prompts([1], None, 300, [1])
    for cache in (ours, wanted):
        cache.free_request(1)
    prompts([1], None, 300, [0, 1])


def test_other_layers_and_rows_are_not_reused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are there, other lengths, a balance of columns in between, rows that are not aligned."""
    ours, wanted = pair(device)
    layers = again(monkeypatch)

    def both(layer: int, k: torch.Tensor, requests: list[int], lengths: list[int] | None = None) -> None:
        for cache in (ours, wanted):
            rows = k.to(cache.device)
            if k.storage_offset():
                rows = torch.empty(k.numel() + 1, device=cache.device)[1:].view(k.shape).copy_(k)
            if not k.is_contiguous():
                rows = torch.empty(len(k), 2, 33, device=cache.device)[..., :32].copy_(k)
            cache.append(layer, rows, -rows, requests, lengths)

    k = torch.randn(300, 2, 32, generator=torch.Generator().manual_seed(0))
    both(0, k, [0])
    both(0, k, [1])
    both(0, k, [0])  # behind others
    both(1, k[:299], [0])
    both(1, torch.empty(k.numel() + 1)[1:].view(k.shape).copy_(k), [1])
    both(0, k, [2], [300])
    both(1, k, [2])  # as given before, but not by a list of lengths
    same(ours, wanted)
    for cache in (ours, wanted):
        cache.free_request(0)
    for layer in range(2):  # the kernels read a copy
        both(layer, torch.empty(300, 2, 33)[..., :32].copy_(k), [0])
    assert layers == []
    same(ours, wanted)


def test_out_of_memory_in_another_layer_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = again(monkeypatch)
    monkeypatch.setattr(append_prompt, "guard_of", lambda given: lambda *rows: True)  # which see the mode that counts
    caches = [pair(device)[0] for _ in range(2)]
    k, v = torch.randn(2, 300, 2, 32, generator=torch.Generator().manual_seed(0)).to(device)
    for cache in caches:
        cache.append(0, k, v, [1])
    lines = Allocations.of(lambda: caches[1].append(1, v, k, [1])).lines
    before = fingerprint(caches[0], spare=False)
    assert layers == [1]
    assert len(lines) > 2
    for number in range(len(lines)):
        with pytest.raises(torch.OutOfMemoryError, match="as asked for"):
            Allocations.of(lambda: caches[0].append(1, v, k, [1]), number)
        assert alike(before, fingerprint(caches[0], spare=False)), lines[number]
        caches[0].check()
    caches[0].append(1, v, k, [1])
    assert layers == [1] * len(layers)
    for a, b in zip(caches[0].gather(1, 1), caches[1].gather(1, 1), strict=True):
        assert torch.equal(a, b)
    caches[0].check()


def test_several_requests_that_need_not_settle_beside_one_that_must(device: str) -> None:
    """The new pages of each are entered in the table of the device."""
    ours, wanted = pair(device)
    lengths = [20, 300, 30]
    for layer in range(2):
        k, v = torch.randn(2, sum(lengths), 2, 32, generator=torch.Generator().manual_seed(layer))
        for cache in (ours, wanted):
            assert fits_each(cache, layer, [0, 1, 2], lengths).tolist() == [True, False, True]
            cache.append(layer, k.to(cache.device), v.to(cache.device), [0, 1, 2], lengths)
    same(ours, wanted)


def test_new_pages_of_one_operation_have_separate_lists() -> None:
    """As on a CUDA device, where launches that run when the operation completes enter them in the table."""
    cache = TieredCache(1, 2, 32, page_tokens=16, max_requests=3, dtype=torch.float32)
    buckets, entered = cache.buckets, []
    buckets.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    launch = SimpleNamespace(prepare=lambda both: lambda: entered.append(both.view(2, -1).tolist()))
    vars(buckets).update(by_cuda=True, _pages_to_table=launch)
    with Transaction(cache.pool) as change:
        for request in range(3):
            buckets.make_room(change, 0, np.array([request]), np.array([17]))
    table = buckets.host_table.reshape(-1)
    assert [table[entries].tolist() for entries, _ in entered] == [handles for _, handles in entered]
    assert sorted(x for entries, _ in entered for x in entries) == np.flatnonzero(table >= 0).tolist()


@pytest.mark.parametrize("again", [False, True], ids=["planned", "plan of the layer before"])
def test_tensors_read_by_launches_live_until_they_run(device: str, again: bool) -> None:
    """Moves are launched when the operation completes, and their addresses point into an upload of the plan."""
    cache, _ = pair(device)
    n = 400
    for layer in range(1 + again):
        k, v = torch.randn(2, n, 2, 32).to(cache.device)
        rows = NewRows(*(x.reshape(-1, 32) for x in (k, v)))
        fresh = Fresh(np.array([n]), np.array([0]), np.array([0]), np.zeros(1, np.float32), None)
        with cache._operation() as change:
            planned = settle_cuda.plan(cache, [(layer, [0])], [[n]], fresh, rows)
            upload = weakref.ref(planned.outcome.device.uploaded)
            settle_cuda.move(cache, change, planned, rows)
            cache._activate(change, [0])
            cache._set_lengths(change, [0], layer, np.array([n]))
            if layer == again:
                cache._prompt = None
            del planned
            gc.collect()
            assert upload() is not None
        assert cache.length(0, layer) == n
    cache.check()


def test_prompts_follow_the_share_of_each_layer(device: str) -> None:
    """Layers with another sensitivity have another plan: that of the layer before does not serve them."""
    ours, wanted = pair(device, sensitivity=(8.0, 0.1), dtype=torch.bfloat16, budget=0.28)
    assert ours.budget.shares[0] > ours.budget.shares[1]
    for layer in range(2):
        k, v = torch.randn(2, 1800, 2, 32, generator=torch.Generator().manual_seed(layer))
        for cache in (ours, wanted):
            cache.append(layer, k.to(cache.device, cache.dtype), v.to(cache.device, cache.dtype), [0])
    same(ours, wanted)
    tiers = [wanted.tier_map(layer, 0).sort()[0] for layer in range(2)]
    assert not torch.equal(*tiers)
