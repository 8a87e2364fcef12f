"""Scratch of decode calls: who shares it, how much it is, and when it goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import emulator
from conftest import HAS_GPU
from decode_model import DEVICE, filled
from kvstrata import DecodePlan, PagedCache, TieredCache, decode_attention
from kvstrata.attention.decode import cuda as decode_cuda
from kvstrata.attention.decode.source import Source
from kvstrata.layout import Format


def emulated(test: Callable) -> Callable:
    """Runs where there is no GPU, with the kernels of the emulator."""
    for mark in (
        pytest.mark.skipif(HAS_GPU, reason="the kernels run on the GPU here"),
        pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing())),
        pytest.mark.usefixtures("kernels"),
    ):
        test = mark(test)
    return test


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.decode_without_cuda(monkeypatch)


@pytest.fixture
def idle(kernels: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches nothing; the entries of what would have been launched."""
    entries: list[str] = []

    class Launch:
        def __init__(self, kernel: str, grid: Any, block: int, params: bytes, **options: Any) -> None:
            self.entry, self.params = kernel, bytearray(params)

        def __call__(self, stream: int) -> None:
            entries.append(self.entry)

    fake = SimpleNamespace(**vars(decode_cuda.jit) | {"load": lambda source, entry, arch: entry, "Launch": Launch})
    monkeypatch.setattr(decode_cuda, "jit", fake)
    return entries


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Every plan that is made from here on."""
    made: list[weakref.ref] = []
    first = decode_cuda.WorkPlan.__init__

    def init(self: decode_cuda.WorkPlan, *arguments: Any, **options: Any) -> None:
        first(self, *arguments, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(decode_cuda.WorkPlan, "__init__", init)
    return made


def small(layers: int = 1, requests: int = 1, **options: Any) -> TieredCache:
    cache = TieredCache(
        layers, 1, 32, budget=None, dtype=torch.bfloat16, page_tokens=16, max_tokens=64, max_requests=requests,
        device=DEVICE, **options,
    )  # fmt: skip
    for layer in range(layers):
        rows = torch.randn(2, 5 * requests, 1, 32).bfloat16().to(DEVICE)
        cache.append(layer, *rows, requests=list(range(requests)), seq_lens=[5] * requests)
    return cache


def queries(requests: int, heads: int = 1, dim: int = 32) -> torch.Tensor:
    return torch.randn(requests, 1, heads, dim).bfloat16().to(DEVICE)


def call(cache: TieredCache, layer: int = 0, requests: list[int] | None = None) -> torch.Tensor:
    rows = len(cache.requests if requests is None else requests)
    return decode_attention(queries(rows), cache, layer, requests=requests, backend="cuda")


@emulated
def test_layers_share_a_plan(idle: list[str], plans: list[weakref.ref]) -> None:
    cache = small(layers=80)
    for _ in range(2):
        for layer in range(80):
            call(cache, layer)
    assert len(plans) == 1
    assert idle.count("worklist") == 160, "a list for every call"


@emulated
def test_a_plan_is_freed_with_its_cache(idle: list[str], plans: list[weakref.ref]) -> None:
    cache = small()
    call(cache)
    slab = weakref.ref(cache.pool)
    assert cache.memory().scratch == plans[0]().nbytes > 0
    del cache
    gc.collect()
    assert plans[0]() is None
    assert slab() is None


@emulated
def test_least_recently_used_plans_are_evicted_first(idle: list[str], plans: list[weakref.ref]) -> None:
    cache = small(requests=decode_cuda.KEPT + 1)
    for many in [*range(1, decode_cuda.KEPT + 1), 1, decode_cuda.KEPT + 1]:
        call(cache, requests=list(range(many)))
    gc.collect()
    assert [plan() is not None for plan in plans] == [True, False, *[True] * (decode_cuda.KEPT - 1)]


@emulated
def test_plain_pages_of_all_layers_share_a_plan(idle: list[str], plans: list[weakref.ref]) -> None:
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    for _ in range(3):
        k, v = torch.randn(2, 2, 16, 1, 64).half()
        decode_attention(torch.randn(1, 1, 2, 64).half(), PagedCache(k, v, table, lengths), backend="cuda")
        assert decode_cuda.WORKLIST.unpack(plans[0]()._worklist.params)[13] == k.data_ptr()
    assert len(plans) == 1


@emulated
def test_requests_may_change_from_call_to_call(plans: list[weakref.ref]) -> None:
    cache = filled([40, 70, 20], dtype=torch.bfloat16, tiers=("K4V4",))
    q = queries(3, heads=6, dim=64)
    want = decode_attention(q, cache, backend="reference")
    for requests in ([2, 0], [0, 1], [1, 2], [1, 2]):
        out = decode_attention(q[requests], cache, requests=requests, backend="cuda")
        torch.testing.assert_close(out, want[requests], rtol=2e-2, atol=2e-2)
    assert len(plans) == 1


@emulated
def test_a_captured_call_leaves_nothing_behind(plans: list[weakref.ref], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scratch is the graph's; also rows of requests, which no copy from the host brings."""
    cache = filled([40, 20], layers=2, dtype=torch.bfloat16, tiers=("K4V4",))
    q = queries(2, heads=6, dim=64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "tensor", None)
    for layer in range(2):
        out = decode_attention(q, cache, layer, requests=[1, 0], backend="cuda")
        want = decode_attention(q, cache, layer, requests=[1, 0], backend="reference")
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    gc.collect()
    assert [plan() for plan in plans] == [None, None]
    assert cache.memory().scratch == 0


def sized(requests: int, tokens: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> decode_cuda.WorkPlan:
    """A plan for 8 KV heads of 128 in five tiers on 132 multiprocessors, that allocates nothing."""
    card = SimpleNamespace(name="x", multi_processor_count=132, shared_memory_per_multiprocessor=233472)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    formats = tuple(Format.parse(name, 128) for name in ("K16V16", "K8V4", "K4V3", "K3V2", "K2V2"))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    table, count = ints(requests, layers, 8, 5, tokens // 64), ints(requests, layers, 8, 5)
    tables = (table[:, 0], count[:, 0], None, 1, 64, count, None, None)
    source = Source(formats, *tables, 2, (0, 0, 0, 0), 0)
    strides = (table.stride(1), count.stride(1))
    return decode_cuda.WorkPlan(source, tuple(range(requests)), 8, 32, 1, layers=layers, layer_strides=strides)


@emulated
@pytest.mark.parametrize(
    ("requests", "tokens", "most"), [(32, 16384, 50e6), (256, 32768, 600e6), (32, 1024, 24e6), (1, 16384, 18e6)]
)
def test_size_of_a_plan(
    idle: list[str], requests: int, tokens: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sized(requests, tokens, 32, monkeypatch)
    tensors = (plan.stages, plan.parts, plan.slots, plan.partial_out, plan.partial_sum)
    assert plan.nbytes == sum(x.nbytes for x in tensors) < most
    assert plan.at_once == (32 if most < 30e6 else 8), "small lists are made in one launch"


@emulated
def test_memory_counts_plans(idle: list[str]) -> None:
    cache = small(layers=2)
    plan = DecodePlan(cache, 1)
    assert plan.nbytes == cache.memory().scratch == 0
    plan.update()
    assert plan.nbytes == cache.memory().scratch > 0
    total = cache.memory().total
    cache.check()
    del plan
    gc.collect()
    assert cache.memory().scratch == 0
    assert cache.memory().total == total


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of two layers at once."""
    monkeypatch.setattr(decode_cuda, "layers_at_once", lambda layers, *sizes: min(layers, 2))


@emulated
def test_lists_of_some_layers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of calls, and of three layers the last are those of two."""
    in_parts(monkeypatch)
    cache = filled([40, 20], layers=3, dtype=torch.bfloat16, tiers=("K4V4",))
    step, q = DecodePlan(cache, 6), queries(2, heads=6, dim=64)
    step.update()
    for layer in (0, 1, 2, 1, 0):
        out = decode_attention(q, cache, layer, plan=step, backend="cuda")
        want = decode_attention(q, cache, layer, backend="reference")
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@emulated
def test_lists_that_a_replay_may_have_replaced(idle: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch)
    cache = small(layers=4)
    step = DecodePlan(cache, 1)

    def lists(capture: int, *layers: int, update: bool = True) -> int:
        """Launches that make lists."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capture > 0)
        monkeypatch.setattr(decode_cuda.jit, "capture_id", lambda stream: capture)
        idle.clear()
        if update:
            step.update()
        for layer in layers:
            decode_attention(queries(1), cache, layer, plan=step, backend="cuda")
        return idle.count("worklist")

    assert lists(0, 0, 1, 2, 3) == 2
    assert lists(7, 0, 1, 2, 3) == 2
    assert lists(7, 2, 3, update=False) == 0, "the same graph"
    assert lists(8, 3, 2, update=False) == 1, "a graph of its own"
    assert lists(9, 2, update=False) == 1
    assert lists(0, 0, 0, 2, 2) == 5, "graphs may have been replayed between any two calls"


@pytest.mark.gpu
def test_graphs_free_their_memory() -> None:
    """Calls without a plan, of requests in an order that no call had before."""
    cache = filled([900, 300, 20], layers=4, dtype=torch.bfloat16)
    q = queries(2, heads=6, dim=64)
    want = [decode_attention(q, cache, layer, requests=[1, 0], backend="reference") for layer in range(4)]
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        decode_attention(q, cache, requests=[2, 0], backend="cuda")  # loads the kernels
    torch.cuda.synchronize()

    def used() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    seen = []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [decode_attention(q, cache, layer, requests=[1, 0], backend="cuda") for layer in range(4)]
        for _ in range(2):
            graph.replay()
        for out, expected in zip(outs, want, strict=True):
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        graph.reset()
        del graph, outs, out
        seen.append(used())
    assert len(set(seen)) == 1, seen


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_a_captured_step_with_lists_of_some_layers(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for the step, or one for each layer, replayed in any order after tokens came."""
    in_parts(monkeypatch)
    cache = filled([100, 40], layers=5, dtype=torch.bfloat16)
    q, step = queries(2, heads=6, dim=64), DecodePlan(cache, 6)

    def run(layers: list[int]) -> list[torch.Tensor]:
        return [decode_attention(q, cache, layer, plan=step, backend="cuda") for layer in layers]

    step.update()
    run([0])
    graphs = []
    for layers in [list(range(5))] if whole else [[4], [2], [0], [1], [3]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            if whole:
                step.update()
            outs = run(layers)
        graphs.append((graph, layers, outs))
    for _ in range(2):
        new = torch.randn(2, 2 * 7, 2, 64, device="cuda").bfloat16()
        for layer in range(5):
            cache.append(layer, *new, requests=[0, 1], seq_lens=[7, 7])
        for graph, layers, outs in reversed(graphs):
            if not whole:
                step.update()
            graph.replay()
            for layer, out in zip(layers, outs, strict=True):
                assert torch.equal(out, decode_attention(q, cache, layer, backend="cuda"))
