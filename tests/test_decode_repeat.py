"""Eager decode calls that repeat: the same outputs as the long way, and the long way where anything looks different."""

from __future__ import annotations

import pytest
import torch

import emulator
from conftest import HAS_GPU
from kvstrata import decode_attention
from kvstrata.attention.decode import op
from kvstrata.cache import TieredCache

DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_GPU:
        return
    if emulator.missing():
        pytest.skip(str(emulator.missing()))
    emulator.decode_without_cuda(monkeypatch)


def filled(lengths: list[int], **options) -> TieredCache:
    cache = TieredCache(
        3, 2, 64, budget=0.3, recent_tokens=20, sink_tokens=4, page_tokens=16, tiers=("K4V4", "K2V2"), settle_every=8,
        dtype=torch.float16, device=DEVICE, max_requests=len(lengths) + 1, max_tokens=512, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for layer in range(3):
        k, v = torch.randn(2, sum(lengths), 2, 64, generator=generator).half().to(DEVICE)
        cache.append(layer, k, v, list(range(len(lengths))), lengths)
    return cache


def queries(rows: int, q_len: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, q_len, 6, 64, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def again(q: torch.Tensor, cache: TieredCache, *given) -> torch.Tensor | None:
    return None if cache._decoded is None else cache._decoded.repeat(q, cache, *given)


def fails(*given, **named):
    raise AssertionError("the long way")


@pytest.mark.parametrize("q_len", [1, 3])
def test_repeated_calls_equal_the_first(monkeypatch: pytest.MonkeyPatch, q_len: int) -> None:
    """Layer after layer with other queries, then after the cache has grown, without checks or jobs."""
    cache = filled([90, 30])
    first = [decode_attention(queries(2, q_len), cache, layer, backend="cuda") for layer in range(3)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(op, "_job", fails)
        again = [decode_attention(queries(2, q_len), cache, layer, backend="cuda") for layer in (2, 0, 1)]
    assert all(torch.equal(again[i], first[layer]) for i, layer in enumerate((2, 0, 1)))
    for step in range(12):
        k, v = torch.randn(2, 2, 1, 2, 64, generator=torch.Generator().manual_seed(step)).half().to(DEVICE)
        for layer in range(3):
            cache.append(layer, k, v)
    q = queries(2, q_len, seed=5)
    for layer in range(3):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(op, "_job", fails)
            got = decode_attention(q, cache, layer, backend="cuda")
        want = decode_attention(q, cache, layer, backend="reference")
        torch.testing.assert_close(got.float(), want.float(), atol=2e-3, rtol=2e-3)


def test_any_other_call_takes_the_normal_path() -> None:
    cache = filled([90, 30])
    q = queries(2)
    decode_attention(q, cache, 0, backend="cuda")
    assert again(q, cache, 0, None, None) is not None
    wide = torch.zeros(2, 1, 6, 128, dtype=torch.float16, device=DEVICE)[..., :64]
    assert again(q, cache, 1, None, None) is None, "a layer that was not read yet"
    assert again(wide, cache, 0, None, None) is None, "other strides"
    assert again(q.float(), cache, 0, None, None) is None, "another dtype"
    assert again(q, cache, 0, None, 0.5) is None, "another scale"
    assert again(q, cache, 0, [0, 1], None) is None, "requests by name"
    assert again(q, filled([90, 30]), 0, None, None) is None, "another cache"
    with pytest.raises(ValueError, match="layer"):
        decode_attention(q, cache, 7, backend="cuda")
    cache.add_request()
    assert again(q, cache, 0, None, None) is None, "one request more"
    with pytest.raises(ValueError, match="q: expected 3 rows"):
        decode_attention(q, cache, 0, backend="cuda")


def test_calls_of_other_requests_do_not_mix() -> None:
    """The plan of a shape is shared: what another call left there is not used."""
    cache = filled([90, 30, 60])
    q, want = queries(2), {}
    for rows in ([0, 1], [2, 0]):
        want[tuple(rows)] = decode_attention(q, cache, 0, requests=rows, backend="reference")
    for rows in ([0, 1], [2, 0], [0, 1], [2, 0], [2, 0]):
        got = decode_attention(q, cache, 0, requests=rows, backend="cuda")
        torch.testing.assert_close(got.float(), want[tuple(rows)].float(), atol=2e-3, rtol=2e-3)


def test_queries_with_odd_strides_are_not_remembered() -> None:
    """Such queries are copied for the kernel: their own addresses and the copy's strides do not go together."""
    cache = filled([90, 30])
    whole = torch.randn(2, 385, generator=torch.Generator().manual_seed(3)).half().to(DEVICE)
    q = whole.as_strided((2, 1, 6, 64), (385, 384, 64, 1))
    want = decode_attention(q, cache, 0, backend="reference")
    for _ in range(2):
        got = decode_attention(q, cache, 0, backend="cuda")
        torch.testing.assert_close(got.float(), want.float(), atol=2e-3, rtol=2e-3)
