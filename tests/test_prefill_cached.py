"""prefill_attention_cached: every backend against decode's float32 model on the packed bytes (decode_model.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conftest import HAS_GPU
from decode_model import DEVICE, EPS, INTERPRETED, Case, filled, poison_tails
from kvstrata import PagedCache, TieredCache, decode_attention, prefill_attention_cached
from kvstrata.attention.prefill_cached import triton as cached_triton
from kvstrata.attention.prefill_cached.job import CachedJob
from kvstrata.layout.unpack_triton import load_levels, page_levels, whole_pages
from prefill_backends import choose_backend, each_backend

HALF = torch.bfloat16 if HAS_GPU else torch.float16
backend = pytest.fixture(choose_backend)


def few(backend: str, chosen: bool) -> None:
    if backend == "triton" and INTERPRETED and not chosen:
        pytest.skip("one kind is enough under the interpreter")


def check(
    cache: TieredCache | PagedCache, lengths: list[int], new: list[int], backend: str, group: int = 2, **options: object
) -> None:
    """Ragged new tokens, request by request against the model."""
    dtype = cache.dtype if isinstance(cache, TieredCache) else HALF
    heads = cache.kv_heads * group
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(sum(new), heads, cache.head_dim, generator=generator).to(dtype).to(DEVICE)
    out, lse, _ = prefill_attention_cached(q, cache, lengths=new, return_lse=True, backend=backend, **options)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:2]
    first = 0
    for request, (length, n) in enumerate(zip(lengths, new, strict=True)):
        part = slice(first, first + n)
        first += n
        if n == 0:
            continue
        case = Case(cache, q[part].unsqueeze(0), [request], [length], options=options)
        (want, want_lse, _), (low, low_lse, _) = case.expectations()
        for a, b, c, eps in (
            (out[part], want[0], low[0], EPS[dtype]),
            (lse[part], want_lse[0], low_lse[0], EPS[torch.float32]),
        ):
            a = a.float().cpu()
            assert torch.equal(a.isfinite(), b.isfinite())
            live = b.isfinite()
            assert torch.equal(a[~live], b[~live])
            if live.any():
                largest = b[live].abs().max().clamp(min=1e-3)
                # rows of K and V are rounded to the dtype once more: an eps of every score
                allowed = 2 * (c - b)[live].abs().max() + 4 * (eps + EPS[dtype]) * largest
                assert (a - b)[live].abs().max() <= allowed


@each_backend
@pytest.mark.parametrize("tiers", [("K4V4",), ("K8V8", "K4V4", "K3V3", "K2V2")], ids=str)
def test_tiers_equal_the_model(backend: str, tiers: tuple[str, ...]) -> None:
    lengths = [60, 9, 33]
    check(filled(lengths, tiers=tiers, dtype=HALF), lengths, [20, 9, 1], backend)


@each_backend
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_dim_equals_the_model(backend: str, dim: int) -> None:
    few(backend, dim == 96)
    check(filled([50], tiers=("K4V3",), dim=dim, dtype=HALF), [50], [13], backend)


@each_backend
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_every_page_size_equals_the_model(backend: str, page_tokens: int) -> None:
    few(backend, page_tokens != 32)
    lengths = [70, 3]
    check(filled(lengths, tiers=("K4V4", "K2V2"), page_tokens=page_tokens, dtype=HALF), lengths, [17, 2], backend)


@each_backend
@pytest.mark.parametrize(
    "options", [dict(sliding_window=1), dict(sliding_window=12), dict(softcap=4.0), dict(scale=0.3)], ids=str
)
def test_score_options_equal_the_model(backend: str, options: dict) -> None:
    few(backend, "sliding_window" in options)
    lengths = [55, 20]
    check(filled(lengths, dtype=HALF, tiers=("K4V4",)), lengths, [24, 5], backend, **options)


@each_backend
def test_float32_cache_with_sinks_equals_the_model(backend: str) -> None:
    lengths = [40, 0, 6]
    sinks = torch.tensor([-torch.inf, 0.0, 2.0, 9.0], device=DEVICE)
    check(filled(lengths, tiers=("K8V4",)), lengths, [7, 0, 6], backend, sinks=sinks)


@each_backend
@pytest.mark.parametrize("group", [1, 3, 8])
def test_query_heads_per_kv_head(backend: str, group: int) -> None:
    few(backend, group == 3)
    check(filled([40], tiers=("K4V4",), dtype=HALF), [40], [11], backend, group=group)


@each_backend
def test_staging_in_several_chunks_equals_the_model(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums go from chunk to chunk; a chunk may hold nothing of a request."""
    monkeypatch.setattr(cached_triton, "STAGED", 1)
    lengths = [75, 16] if INTERPRETED else [500, 70]
    cache = filled(lengths, tiers=("K4V4", "K2V2"), dtype=HALF)
    check(cache, lengths, [18, 16], backend, sliding_window=40)
    check(cache, lengths, [1, 3], backend)


@each_backend
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_many_rows_over_many_blocks(backend: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and tokens than one program, warpgroup or ring takes; some requests end long before the last chunk."""
    if INTERPRETED:
        pytest.skip("for a GPU")
    sinks = torch.randn(6, device=DEVICE)
    lengths = [1500, 130, 700, 64]
    cache = filled(lengths, tiers=("K4V4", "K2V2"), dim=dim, dtype=HALF)
    poison_tails(cache)
    check(cache, lengths, [150, 130, 1, 0], backend, group=3, sinks=sinks)
    monkeypatch.setattr(cached_triton, "STAGED", 5 * 128 * 8 * 4 * dim)  # five blocks a chunk: more than the ring has
    check(cache, lengths, [150, 130, 1, 0], backend, group=3, sinks=sinks)


@triton.jit
def both_ways(code_ptr, one_ptr, other_ptr, BITS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
              IS_K: tl.constexpr):  # fmt: skip
    token, dim = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM)[None, :]
    live = (token >= 0) & (dim >= 0)
    tl.store(one_ptr + token * DIM + dim, load_levels(code_ptr, token, dim, live, BITS, DIM, TOKENS, IS_K))
    tl.store(other_ptr + token * DIM + dim, page_levels(code_ptr, BITS, DIM, TOKENS, IS_K))


@pytest.mark.parametrize("is_k", [True, False])
@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_levels_of_a_whole_page(bits: int, dim: int, tokens: int, is_k: bool) -> None:
    """Field by field of each word, or value by value."""
    if not whole_pages(dim, tokens, [bits]):
        assert bits < 4
        assert tokens * dim <= 2048
        return
    words = torch.randint(-(2**31), 2**31, (tokens * dim * bits // 32,)).int().to(DEVICE)
    one, other = torch.zeros(2, tokens, dim, device=DEVICE)
    both_ways[(1,)](words, one, other, bits, dim, tokens, is_k)
    assert one.unique().numel() > 2**bits // 2
    assert torch.equal(one, other)


@pytest.mark.parametrize(("new", "beside"), [(0, False), (1, False), (40, False), (40, True)])
def test_blocks_with_a_mask_come_first(new: int, beside: bool) -> None:
    """Those with a position after the first new token's, or with an empty slot."""
    gluon = pytest.importorskip("kvstrata.attention.prefill_cached.gluon")
    generator, slots, tokens = torch.Generator().manual_seed(new), 640, 64
    length = torch.tensor([500, 90], dtype=torch.int32)
    count = torch.tensor([[500], [90]], dtype=torch.int32)
    latest = torch.randint(0, 460, (2, 10), generator=generator, dtype=torch.int32)
    latest[0, [3, 6]], latest[0, 7:] = 470, 0x7FFFFFFF
    latest[1, 1:] = 0x7FFFFFFF
    bounds = torch.stack([torch.zeros_like(latest), latest], 2)
    starts = torch.tensor([0, new, 2 * new], dtype=torch.int32)
    order, some = torch.full((2, 5), -1, dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32)
    on = [x.to(DEVICE) for x in (order, some, bounds, torch.tensor([0, 1]).int(), starts, length, count)]
    gluon.order_kernel[(2,)](*on, 1, 1, 1, 0, slots, KV_HEADS=1, TIERS=1, TOKENS=tokens, BLOCK_N=128, MAX_BLOCKS=8,
                            BESIDE=beside)  # fmt: skip
    order, some = on[0].tolist(), on[1].tolist()
    for request, blocks in enumerate((4, 1)):
        first = int(length[request]) - (0 if beside else new)
        hidden = [int(latest[request, 2 * b : 2 * b + 2].max()) > first for b in range(blocks)]
        assert some[request] == [sum(hidden), blocks]
        wanted = [b for b in range(blocks) if hidden[b]] + [b for b in range(blocks) if not hidden[b]]
        assert order[request] == wanted + [-1] * (5 - blocks)


@pytest.mark.gpu
@pytest.mark.sanitizer
def test_chunks_under_sanitizers() -> None:
    lengths = [300, 5]
    check(filled(lengths, tiers=("K4V4",), dtype=HALF), lengths, [40, 5], "triton")
    torch.cuda.synchronize()


@each_backend
def test_new_tokens_among_the_quantised(backend: str) -> None:
    """Positions decide, not tiers: nothing was kept plain."""
    check(filled([64], tiers=("K4V4",), recent=0, dtype=HALF), [64], [30], backend)


@each_backend
def test_evicted_tokens_are_not_attended_to(backend: str) -> None:
    check(filled([60], drop=0.5, dtype=HALF, tiers=("K4V4",)), [60], [9], backend)


@each_backend
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("fp8", [False, True])
def test_paged_cache_equals_the_model(backend: str, layout: str, fp8: bool) -> None:
    few(backend, (layout == "HND") == fp8)
    k, v = torch.randn(2, 8, 16, 2, 64).to(HALF).to(DEVICE)
    if layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    scale = None
    if fp8:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        scale = torch.tensor([0.5, 2.0], device=DEVICE)
    table = torch.tensor([[3, 1, 6, -1], [5, -1, -1, -1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([40, 16], dtype=torch.int32, device=DEVICE)
    cache = PagedCache(k, v, table, lengths, k_scale=scale, v_scale=scale, layout=layout)
    check(cache, [40, 16], [22, 3], backend)


@each_backend
@pytest.mark.parametrize("block_size", [1, 5, 48])
def test_blocks_of_any_size(backend: str, block_size: int) -> None:
    few(backend, block_size == 5)
    k, v = torch.randn(2, 3 + 50 // block_size, block_size, 2, 64).to(HALF).to(DEVICE)
    table = torch.randperm(len(k))[: 50 // block_size + 1].int().to(DEVICE).unsqueeze(0)
    lengths = torch.tensor([45], dtype=torch.int32, device=DEVICE)
    check(PagedCache(k, v, table, lengths), [45], [19], backend)


@each_backend
def test_pages_of_odd_heads(backend: str) -> None:
    """Rows that are no whole chunks of 16 bytes; a softcap that is a number of numpy's."""
    k, v = torch.randn(2, 4, 16, 2, 100).to(HALF).to(DEVICE)
    table, lengths = torch.tensor([[2, 0, 3]]).int().to(DEVICE), torch.tensor([41]).int().to(DEVICE)
    check(PagedCache(k, v, table, lengths), [41], [9], backend)
    check(PagedCache(k, v, table, lengths), [41], [9], backend, softcap=np.float64(5.0))


def test_jobs_that_the_specialized_kernel_refuses() -> None:
    gluon = pytest.importorskip("kvstrata.attention.prefill_cached.gluon")
    q = torch.zeros(4, 8, 128, dtype=torch.float16)
    job = CachedJob(q, [4], None, None, [0], 2, 40, 1.0, None, None, None, False)
    assert gluon.missing(job) is None
    far = torch.empty(0, dtype=torch.float16).as_strided((0, 8, 128), (128, 1 << 28, 1))
    for other in (dict(q=q.float()), dict(q=q[..., :100]), dict(q=q[..., :32]), dict(q=far), dict(sliding_window=3),
                  dict(softcap=3.0)):  # fmt: skip
        assert gluon.missing(job._replace(**other)), other


@each_backend
def test_few_queries_equal_decode(backend: str) -> None:
    cache = filled([70, 30], dtype=HALF)
    q = torch.randn(2, 3, 4, 64).to(HALF).to(DEVICE)
    out, lse, _ = prefill_attention_cached(q, cache, return_lse=True, backend=backend)
    want, want_lse, _ = decode_attention(q, cache, return_lse=True, backend="reference")
    assert out.shape == q.shape
    torch.testing.assert_close(out.float(), want.float(), rtol=0, atol=0.05 if HAS_GPU else 0.01)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=0.05 if HAS_GPU else 0.01)


@each_backend
def test_some_requests_of_a_forked_cache(backend: str) -> None:
    cache = filled([60, 35, 0], dtype=HALF)
    cache.free_request(2)
    twin = cache.fork(0)
    cache.append(0, *torch.randn(2, 4, 2, 64).to(HALF).to(DEVICE), requests=[twin])
    poison_tails(cache)
    q = torch.randn(9, 4, 64).to(HALF).to(DEVICE)
    out = prefill_attention_cached(q, cache, requests=[twin, 1], lengths=[5, 4], backend=backend)
    case = Case(cache, q[:5].unsqueeze(0), [twin], [64])
    torch.testing.assert_close(out[:5].float().cpu(), case.expected()[0][0], rtol=0, atol=0.05 if HAS_GPU else 0.01)


CACHE = TieredCache(1, 2, 64, budget=None, dtype=torch.float32, page_tokens=16)
CACHE.append(0, *torch.randn(2, 20, 2, 64))
Q = torch.zeros(1, 5, 4, 64)
BAD = {
    "cache: expected a TieredCache": dict(cache=3),
    "q: expected a tensor": dict(q=3),
    "q: expected \\[requests": dict(q=Q[..., :32]),
    "q: expected 1 rows": dict(q=Q.expand(2, -1, -1, -1)),
    "q: expected torch.float32": dict(q=Q.half()),
    "q: expected an inner stride": dict(q=torch.zeros(1, 5, 4, 128)[..., ::2]),
    "lengths: expected None": dict(lengths=[5]),
    "lengths: expected the new tokens": dict(q=Q[0]),
    "lengths: expected 1 that sum to 5": dict(q=Q[0], lengths=[4]),
    "requests: expected some of": dict(requests=[7]),
    "sliding_window: expected an int": dict(sliding_window=0),
    "scale: expected a positive": dict(scale=-1.0),
    "sinks: expected floats \\[4\\]": dict(sinks=torch.zeros(2)),
    "backend: expected one of": dict(backend="cuda"),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_are_named(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        prefill_attention_cached(**(dict(q=Q, cache=CACHE) | BAD[message]))


@pytest.mark.gpu
def test_replay_reads_new_queries_lengths_and_blocks() -> None:
    """A replay reads the queries, lengths and blocks of that time."""
    k, v = torch.randn(2, 8, 16, 2, 64, device=DEVICE).to(HALF)
    table = torch.randperm(8, device=DEVICE).int().view(2, 4)
    lengths = torch.tensor([64, 40], dtype=torch.int32, device=DEVICE)
    cache, q = PagedCache(k, v, table, lengths), torch.randn(2, 20, 4, 64, device=DEVICE).to(HALF)
    prefill_attention_cached(q, cache, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_attention_cached(q, cache, backend="triton")
    q.normal_()
    lengths.copy_(torch.tensor([30, 61], dtype=torch.int32))
    table.copy_(table.flip(0))
    graph.replay()
    torch.testing.assert_close(out, prefill_attention_cached(q, cache, backend="triton"), rtol=0, atol=0)
