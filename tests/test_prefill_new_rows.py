"""prefill_attention_cached with new rows outside the cache, against a plain softmax over its tokens and these rows."""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from decode_model import DEVICE, EPS, INTERPRETED, filled, poison_tails, tokens_of
from kvstrata import PagedCache, TieredCache, prefill_attention_cached
from kvstrata.attention.prefill_cached import triton as cached_triton
from prefill_backends import choose_backend, each_backend

HALF = torch.bfloat16 if HAS_GPU else torch.float16
backend = pytest.fixture(choose_backend)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory of floats is NaN."""
    empty = torch.empty

    def poisoned_empty(*args: object, **options: object) -> torch.Tensor:
        x = empty(*args, **options)
        return x.fill_(torch.nan) if x.is_floating_point() and x.dtype.itemsize > 1 else x

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def expected(
    cache: TieredCache | PagedCache, request: int, length: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    scale: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output and lse of ``q [n, Hq, D]`` at positions from ``length`` on, in float32."""
    q, k, v = (x.float().cpu() for x in (q, k, v))
    new, heads, dim = q.shape
    group = heads // cache.kv_heads
    out, lse = torch.empty_like(q), torch.empty(new, heads)
    own = length + torch.arange(new)
    for head in range(heads):
        past = tokens_of(cache, 0, request, head // group)
        keys, values = torch.cat([past.k, k[:, head // group]]), torch.cat([past.v, v[:, head // group]])
        position = torch.cat([past.position, own])
        scores = q[:, head] @ keys.mT * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = position > own[:, None]
        if sliding_window is not None:
            hidden |= position <= own[:, None] - sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].cpu().expand(new, 1)], 1)
            values = torch.cat([values, torch.zeros(1, dim)])
        out[:, head], lse[:, head] = scores.softmax(1) @ values, scores.logsumexp(1)
    return out, lse


def check(
    cache: TieredCache | PagedCache, lengths: list[int], new: list[int], backend: str, group: int = 2, **options: object
) -> None:
    """Ragged new tokens, request by request against `expected`; dense ones if all are as many."""
    dtype = cache.dtype if isinstance(cache, TieredCache) else HALF
    generator, dim, total = torch.Generator().manual_seed(7), cache.head_dim, sum(new)
    q, k, v = (
        torch.randn(total, heads, dim, generator=generator).to(dtype).to(DEVICE)
        for heads in (cache.kv_heads * group, cache.kv_heads, cache.kv_heads)
    )
    given = (q, k, v)
    if dense := len(set(new)) == 1:
        given = tuple(x.unflatten(0, (len(new), -1)) for x in given)
    out, lse, _ = prefill_attention_cached(
        given[0], cache, lengths=None if dense else new, k_new=given[1], v_new=given[2], return_lse=True,
        backend=backend, **options,
    )  # fmt: skip
    assert out.shape == given[0].shape
    assert lse.shape == out.shape[:-1]
    out, lse, first = out.view(q.shape).float().cpu(), lse.view(q.shape[:2]).cpu(), 0
    for request, (length, n) in enumerate(zip(lengths, new, strict=True)):
        part = slice(first, first + n)
        first += n
        want, want_lse = expected(cache, request, length, q[part], k[part], v[part], **options)
        for a, b, eps in ((out[part], want, EPS[dtype]), (lse[part], want_lse, EPS[torch.float32])):
            if n:
                # rows of K and V, weights, and what the sums start with are rounded to the dtype
                assert (a - b).abs().max() <= 6 * (eps + EPS[dtype]) * b.abs().max().clamp(min=1.0)


@each_backend
@pytest.mark.parametrize("new", [[20, 9, 1], [17, 17, 17], [0, 40, 3]], ids=str)
def test_new_rows_beside_tiers_equal_the_model(backend: str, new: list[int]) -> None:
    lengths = [60, 0, 16]  # nothing is stored, and a whole page
    check(filled(lengths, tiers=("K8V8", "K4V4", "K2V2"), dtype=HALF), lengths, new, backend)


OPTIONS = [dict(sliding_window=1), dict(sliding_window=12), dict(softcap=4.0), dict(scale=0.3)]


@each_backend
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_new_rows_with_score_options_equal_the_model(backend: str, options: dict) -> None:
    lengths = [55, 20]
    check(filled(lengths, dtype=HALF, tiers=("K4V4",)), lengths, [24, 5], backend, **options)


@each_backend
@pytest.mark.parametrize("group", [1, 3, 16])
def test_sinks_once_in_several_chunks(backend: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; a chunk may hold nothing of a request."""
    monkeypatch.setattr(cached_triton, "STAGED", 1)
    lengths = [75, 16, 0] if INTERPRETED else [500, 70, 0]
    sinks = torch.linspace(-3, 3, 2 * group, device=DEVICE)
    sinks[0] = -torch.inf
    cache = filled(lengths, tiers=("K4V4", "K2V2"))
    poison_tails(cache)
    check(cache, lengths, [6, 3, 2], backend, group=group, sinks=sinks)


@each_backend
def test_new_rows_beside_evicted_tokens_equal_the_model(backend: str) -> None:
    check(filled([60], drop=0.5, dtype=HALF, tiers=("K4V4",)), [60], [9], backend)


@each_backend
def test_new_rows_beside_a_paged_cache_equal_the_model(backend: str) -> None:
    k, v = torch.randn(2, 8, 16, 2, 64).to(HALF).to(DEVICE)
    table = torch.tensor([[3, 1, 6, -1], [5, -1, -1, -1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([40, 16], dtype=torch.int32, device=DEVICE)
    check(PagedCache(k, v, table, lengths), [40, 16], [22, 3], backend)


@each_backend
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_many_rows_over_many_blocks(backend: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and tokens than one program, warpgroup or ring takes."""
    if INTERPRETED:
        pytest.skip("for a GPU")
    sinks = torch.randn(6, device=DEVICE)
    lengths = [1500, 130, 700, 64]
    cache = filled(lengths, tiers=("K4V4", "K2V2"), dim=dim, dtype=HALF)
    for new in ([150, 130, 1, 0], [70] * 4):
        check(cache, lengths, new, backend, group=3, sinks=sinks)
        with monkeypatch.context() as patched:
            patched.setattr(cached_triton, "STAGED", 5 * 128 * 8 * 4 * dim)
            check(cache, lengths, new, backend, group=3, sinks=sinks)


def test_strided_new_rows_equal_contiguous_ones() -> None:
    cache = filled([40], dtype=torch.float32)
    q, k, v = (torch.randn(1, heads, 12, 64, device=DEVICE).transpose(1, 2) for heads in (4, 2, 2))
    got = [prefill_attention_cached(q, cache, k_new=k, v_new=v, backend=name) for name in ("triton", "reference")]
    torch.testing.assert_close(*got, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[0], prefill_attention_cached(q, cache, k_new=k.clone(), v_new=v, backend="triton"))


CACHE = TieredCache(1, 2, 64, budget=None, dtype=torch.float32, page_tokens=16)
CACHE.append(0, *torch.randn(2, 20, 2, 64))
Q, K = torch.zeros(1, 5, 4, 64), torch.zeros(1, 5, 2, 64)
BAD = {
    "v_new: expected to be given": dict(v_new=None),
    "k_new: expected a tensor, got int": dict(k_new=3),
    r"k_new: expected shape \(1, 5, 2, 64\), with the tokens of q, got \(1, 4, 2, 64\)": dict(k_new=K[:, :4]),
    "v_new: expected torch.float32 as q, got torch.float16": dict(v_new=K.half()),
    "v_new: expected an inner stride of 1, got 2": dict(v_new=torch.zeros(1, 5, 2, 128)[..., ::2]),
    "v_new: expected a tensor on cpu": dict(v_new=K.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_new_rows_are_named(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        prefill_attention_cached(**(dict(q=Q, cache=CACHE, k_new=K, v_new=K) | BAD[message]))


def test_unsupported_head_dims() -> None:
    cache = filled([30], dim=80, dtype=torch.float32)
    q, k = torch.randn(1, 5, 4, 80, device=DEVICE), torch.randn(1, 5, 2, 80, device=DEVICE)
    with pytest.raises(RuntimeError, match="backend: triton supports new rows outside a cache with a head_dim"):
        prefill_attention_cached(q, cache, k_new=k, v_new=k, backend="triton")
    check(cache, [30], [5], "auto")
