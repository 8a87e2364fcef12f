"""Memory that a captured launch reads by address must outlive the caches that hold it on the host."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import kvstrata
from kvstrata.attention.decode import source_triton
from kvstrata.replay import plan as replay_plan
from kvstrata.replay import triton as copy_triton

CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One flag: True while a capture is simulated."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


def test_requests_of_a_captured_decode_outlive_other_lists(
    monkeypatch: pytest.MonkeyPatch, capturing: list[bool]
) -> None:
    real = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, dtype, device: real(values, dtype=dtype))
    monkeypatch.setattr(source_triton, "_captured", {})
    source_triton._uploaded.cache_clear()
    eager = weakref.ref(source_triton.on_device((3,), CUDA))
    captured = weakref.ref(source_triton.on_device((7, 1), CUDA))
    capturing[0] = True
    source_triton.on_device((7, 1), CUDA)
    capturing[0] = False
    for i in range(300):
        source_triton.on_device((i, i + 1), CUDA)
    gc.collect()
    assert eager() is None, "nothing was evicted: the test shows nothing"
    assert captured() is not None
    assert source_triton.on_device((7, 1), CUDA) is captured()
    source_triton._uploaded.cache_clear()


def test_table_of_a_captured_copy_outlives_its_plan(monkeypatch: pytest.MonkeyPatch, capturing: list[bool]) -> None:
    launched: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(replay_plan, "_captured", {})
    monkeypatch.setattr(copy_triton, "launch", lambda table, grid, casts: launched.append(weakref.ref(table)))
    source, buffer = torch.ones(4), torch.zeros(4)
    plan = kvstrata.CopyPlan([buffer])
    plan.backend = "triton"
    plan.run([source])
    plan.device, capturing[0] = CUDA, True
    plan.run([source])
    plan.run([source])
    del plan
    gc.collect()
    assert len(launched) == 3
    assert launched[1]() is launched[2]() is not None
    assert len(replay_plan._captured) == 1, "one table, kept once"


@needs_gpu
def test_graph_of_triton_decode_after_many_other_requests() -> None:
    cache = kvstrata.TieredCache(1, 2, 64, budget=1.0, max_requests=4, max_tokens=64, device="cuda")
    for _ in range(3):
        cache.add_request()
    k, v = torch.randn(2, 3 * 16, 2, 64, device="cuda", dtype=cache.dtype)
    cache.append(0, k, v, requests=[0, 1, 2], seq_lens=[16, 16, 16])
    q = torch.randn(2, 1, 4, 64, device="cuda", dtype=cache.dtype)
    expected = kvstrata.decode_attention(q, cache, requests=[2, 0], backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kvstrata.decode_attention(q, cache, requests=[2, 0], backend="triton")
    for i in range(300):
        source_triton.on_device((i, i), torch.device("cuda", torch.cuda.current_device()))
    gc.collect()
    torch.cuda.empty_cache()
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
