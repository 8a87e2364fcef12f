"""decode_attention over tiers: every backend against a float32 model of it on the packed bytes (decode_model.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import HAS_GPU
from decode_model import (
    DEVICE,
    HALF,
    HAS_NUMBA,
    INTERPRETED,
    Case,
    case_of,
    check,
    each_backend,
    few,
    filled,
    poison_tails,
)
from kvstrata import AttentionOutput, DecodePlan, TieredCache, decode_attention
from kvstrata.attention.decode import op
from kvstrata.attention.decode.job import Job
from kvstrata.jit import tuned
from kvstrata.layout import Format
from kvstrata.tools.bench import synthetic


@each_backend
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", ["K8V8", "K4V4", "K3V3", "K2V2", "K8V2", "K4V3", "K3V2", "K2V4"])
def test_widths_and_head_dims(backend: str, dim: int, bits: str) -> None:
    some = {32: ("K2V2", "K3V3"), 64: ("K8V2", "K4V3", "K2V4"), 80: ("K3V2",), 128: ("K8V8",)}
    few(backend, bits in some.get(dim, ()))
    check(case_of([70, 21], dim=dim, tiers=(bits,), page_tokens=32, dtype=HALF), backend)


@each_backend
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("tiers", [("K8V8", "K4V4", "K3V3", "K2V2"), ("K8V4", "K4V2"), ("K4V3", "K3V2", "K2V2")])
def test_mixes_of_tiers(backend: str, page_tokens: int, tiers: tuple[str, ...]) -> None:
    lengths = [1, 60, 37] if backend == "triton" and INTERPRETED else [1, 150, 97]
    check(case_of(lengths, tiers=tiers, page_tokens=page_tokens, dtype=HALF), backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    check(case_of([90, 33], dim=128, dtype=dtype), backend)


@each_backend
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_query_heads_per_kv_head(backend: str, group: int) -> None:
    few(backend, group in (1, 7, 16))
    check(case_of([60, 40], group=group, dtype=HALF), backend)
    check(case_of([45], group=group, kv_heads=1, dtype=HALF), backend)


@each_backend
@pytest.mark.parametrize("q_len", range(1, 9))
def test_new_tokens_see_only_earlier_ones(backend: str, q_len: int) -> None:
    """Also where the request is no longer than the queries are."""
    few(backend, q_len in (1, 2, 5, 8))
    check(case_of([q_len, 50, 3, 0], q_len=q_len, recent=2, dtype=HALF), backend)


@each_backend
@pytest.mark.parametrize("recent", [0, 3])
def test_lengths_at_page_edges(backend: str, recent: int) -> None:
    check(case_of([15, 16, 17, 31, 32, 33, 48, 1], tiers=("K4V4",), recent=recent, dtype=HALF), backend)


@pytest.mark.skipif(not (HAS_GPU or HAS_NUMBA), reason="the compiled loops, numba, are not there")
@pytest.mark.parametrize("backend", ["triton", "cuda"] if HAS_GPU else ["numba"])
def test_a_context_of_128k(backend: str) -> None:
    tiers = ("K4V4", "K3V3", "K2V2")
    check(case_of([1 << 17, 1000], kv_heads=1, tiers=tiers, page_tokens=64, group=4, dtype=HALF), backend)


@each_backend
def test_empty_requests(backend: str) -> None:
    case = case_of([0, 20, 0], dtype=HALF)
    check(case, backend)
    out, lse, mass = case.run(backend)
    assert (out[::2] == 0).all()
    assert (lse[::2] == -torch.inf).all()
    assert (mass[::2] == 0).all()
    nothing = case_of([0], dtype=HALF)
    out, lse, mass = nothing.run(backend)
    assert (out == 0).all()
    assert mass.shape == (1, 2, 0)


@each_backend
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("window", [1, 7, 33, 1000])
def test_window(backend: str, window: int, q_len: int) -> None:
    few(backend, window != 33)
    check(case_of([60, 5, 20], q_len=q_len, options=dict(sliding_window=window), dtype=HALF), backend)


@each_backend
@pytest.mark.parametrize(("q_len", "window"), [(4, None), (8, 40), (1, 33), (1, 64)])
@pytest.mark.parametrize("tiers", [("K4V4",), ("K3V2",)], ids=str)
def test_hidden_in_full_pages(backend: str, tiers: tuple[str, ...], q_len: int, window: int | None) -> None:
    """Nothing but a position says so: every slot is taken, and all but a few tokens are seen."""
    few(backend, tiers == ("K4V4",) and q_len != 8)
    full = dict(page_tokens=64, recent=0, plain=False, tiers=tiers, dtype=HALF)
    check(case_of([128, 64], q_len=q_len, group=4, options=dict(sliding_window=window), **full), backend)


@each_backend
@pytest.mark.parametrize(
    "options", [dict(softcap=5.0), dict(scale=0.3), dict(softcap=30.0, sliding_window=20)], ids=str
)
def test_score_options(backend: str, options: dict) -> None:
    check(case_of([47, 21], q_len=2, options=options, dtype=HALF), backend)


@each_backend
def test_sinks_take_weight(backend: str) -> None:
    sinks = torch.tensor([-100.0, 0.0, 1.0, 4.0, 30.0, -torch.inf], device=DEVICE)
    case = case_of([50, 0, 3], options=dict(sinks=sinks), dtype=HALF)
    check(case, backend)
    out, lse, mass = case.run(backend)
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[1, 0], sinks)
    assert (mass[0].sum(-1) < 3).all()


@each_backend
def test_huge_scores(backend: str) -> None:
    """Scores of thousands: one token takes all the weight, and nothing overflows."""
    case = case_of([50, 20], loud=200.0, large=20.0, q_len=2)
    lse = case.run("reference")[1]
    assert lse.abs().max() > 1000
    if backend != "cuda":  # in 16 bit ranks of such scores are rounding; see the next test
        check(case, backend)


@each_backend
def test_equal_huge_scores_average(backend: str) -> None:
    """Equal keys, however large their scores: the output is the mean of the values."""
    cache = TieredCache(1, 1, 64, budget=None, dtype=HALF, device=DEVICE, page_tokens=16, tiers=("K4V4",))
    v = torch.randn(40, 1, 64).to(HALF).to(DEVICE)
    cache.append(0, torch.full_like(v, 100.0), v)
    q = torch.full((1, 1, 4, 64), 100.0, dtype=HALF, device=DEVICE)
    out, lse, _ = decode_attention(q, cache, return_lse=True, backend=backend)
    torch.testing.assert_close(out[0, 0, 2].float(), v.float().mean((0, 1)), atol=2e-3 if HAS_GPU else 1e-6, rtol=0)
    assert lse.min() > 7.9e4


@each_backend
def test_evicted_tokens(backend: str) -> None:
    check(case_of([70, 70], drop=0.5, dtype=HALF), backend)


@each_backend
def test_forks_crops_and_some_requests(backend: str) -> None:
    cache = filled([60, 35, 0, 0], dtype=HALF)
    cache.free_request(3)
    cache.free_request(2)
    twin = cache.fork(0)
    more = torch.randn(2, 4, 2, 64).to(HALF).to(DEVICE)
    cache.append(0, *more, requests=[twin])
    cache.crop(0, 41)
    poison_tails(cache)
    q = torch.randn(3, 2, 4, 64).to(HALF).to(DEVICE)
    check(Case(cache, q, [twin, 0, 1], [64, 41, 35]), backend)
    check(Case(cache, q[:1], [1], [35]), backend)
    check(Case(cache, q[:2], [0, 0], [41, 41]), backend)
    torch.testing.assert_close(
        decode_attention(q, cache, backend=backend),
        decode_attention(q, cache, requests=[0, 1, twin], backend=backend),
    )


@each_backend
def test_layers_are_their_own(backend: str) -> None:
    cache = filled([30, 20], layers=3, dtype=HALF)
    q = torch.randn(2, 1, 6, 64).to(HALF).to(DEVICE)
    for layer in range(3):
        check(Case(cache, q, [0, 1], [30, 20], layer=layer), backend)


@each_backend
def test_strided_queries(backend: str) -> None:
    case = case_of([40, 30], q_len=3, dtype=HALF)
    q = case.q
    wide = torch.zeros(*q.shape[:3], 80, dtype=q.dtype, device=DEVICE)
    wide[..., 7:71] = q
    for strided in (q.transpose(1, 2).contiguous().transpose(1, 2), wide[..., 7:71], q[:, :, :1].expand(q.shape)):
        got = decode_attention(strided, case.cache, backend=backend)
        want = decode_attention(strided.contiguous(), case.cache, backend=backend)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@each_backend
def test_long_context(backend: str) -> None:
    """Many pages, several splits; the interpreter gets a shorter one."""
    interpreted = backend == "triton" and INTERPRETED
    lengths = [200, 20] if interpreted else [3000, 40]
    check(case_of(lengths, page_tokens=64, dtype=HALF, group=2), backend)


@each_backend
def test_settled_under_a_budget(backend: str) -> None:
    """As a model uses it: append, decode, hand the mass back."""
    cache = TieredCache(
        1,
        2,
        64,
        budget=0.3,
        recent_tokens=16,
        page_tokens=16,
        dtype=HALF,
        device=DEVICE,
        max_requests=2,
        max_tokens=600,
    )
    torch.manual_seed(0)
    cache.append(0, *torch.randn(2, 200, 2, 64).to(HALF).to(DEVICE), requests=[0, 1], seq_lens=[120, 80])
    for step in range(3):
        cache.append(0, *torch.randn(2, 2, 1, 2, 64).to(HALF).to(DEVICE))
        q = torch.randn(2, 1, 4, 64).to(HALF).to(DEVICE)
        check(Case(cache, q, [0, 1], [121 + step, 81 + step]), backend)
        _, _, mass = decode_attention(q, cache, return_mass=True, backend=backend)
        cache.update_importance(0, mass)
        cache.settle()


@each_backend
def test_any_case(backend: str) -> None:
    interpreted = backend == "triton" and INTERPRETED
    widths = st.sampled_from([2, 3, 4, 8])

    @settings(max_examples=4 if interpreted else 25)
    @given(
        lengths=st.lists(st.integers(0, 60 if interpreted else 200), min_size=1, max_size=3),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 5, 8]),
        dim=st.sampled_from([32, 64] if interpreted else [32, 48, 64, 80, 96, 112, 128, 256]),
        tiers=st.lists(st.tuples(widths, widths), min_size=1, max_size=4),
        page_tokens=st.sampled_from([16, 32, 64]),
        q_len=st.integers(1, 8),
        window=st.none() | st.integers(1, 70),
        softcap=st.none() | st.floats(1.0, 50.0),
        sink=st.booleans(),
        recent=st.integers(0, 20),
        drop=st.sampled_from([0.0, 0.3]),
        seed=st.integers(0, 1000),
    )
    def run(
        lengths, kv_heads, group, dim, tiers, page_tokens, q_len, window, softcap, sink, recent, drop, seed
    ) -> None:
        k_widths, v_widths = (sorted(widths, reverse=True) for widths in zip(*tiers, strict=True))
        names = tuple(f"K{k}V{v}" for k, v in zip(k_widths, v_widths, strict=True))
        sinks = torch.randn(kv_heads * group, device=DEVICE) if sink else None
        options = dict(sliding_window=window, softcap=softcap, sinks=sinks)
        case = case_of(
            lengths, kv_heads=kv_heads, group=group, dim=dim, tiers=names, page_tokens=page_tokens, q_len=q_len,
            options=options, recent=recent, drop=drop, seed=seed, dtype=HALF,
        )  # fmt: skip
        check(case, backend)

    run()


@each_backend
def test_one_plan_for_all_layers(backend: str) -> None:
    """Made before the last tokens came and renewed after; outputs are those of calls without one."""
    few(backend, False)
    cache = filled([70, 33], layers=3, dtype=HALF)
    plan = DecodePlan(cache, heads=6, requests=[1, 0])
    k, v = torch.randn(2, 2, 2, 64, dtype=HALF, device=DEVICE)
    for layer in range(3):
        cache.append(layer, k, v, requests=[0, 1], seq_lens=[1, 1])
    plan.update()
    q = torch.randn(2, 1, 6, 64, dtype=HALF, device=DEVICE)
    for layer in range(3):
        with_plan = decode_attention(q, cache, layer, requests=[1, 0], plan=plan, backend=backend)
        assert torch.equal(with_plan, decode_attention(q, cache, layer, requests=[1, 0], backend=backend))


@pytest.mark.gpu
def test_fixed_split_does_not_know_the_batch() -> None:
    """The same bits alone and among others, with contexts long enough to be split."""
    cache = filled([900, 20, 400, 1500], dtype=torch.bfloat16)
    q = torch.randn(4, 1, 6, 64, device="cuda").bfloat16()
    together = DecodePlan(cache, 6, fixed_split=128)
    together.update()
    out = decode_attention(q, cache, plan=together, backend="cuda")
    for request in range(4):
        alone = DecodePlan(cache, 6, requests=[request], fixed_split=128)
        alone.update()
        one = decode_attention(q[request : request + 1], cache, requests=[request], plan=alone, backend="cuda")
        assert torch.equal(out[request : request + 1], one)


@pytest.mark.gpu
@pytest.mark.parametrize("combine", [1, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_warps_that_combine(combine: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many: more partial results than they take at a time, requests with none, sinks beside them."""
    cut = dict(warps=2, resident=8, width=1, waves=1, combine=combine)
    monkeypatch.setattr(tuned, "lookup", lambda op, gpu, shape: cut)
    options = dict(sinks=torch.tensor([0.5, -1.0, -torch.inf, 2.0], device=DEVICE))
    check(case_of([1500, 0, 1, 333], dim=dim, dtype=HALF, group=2, options=options), "cuda")
    check(case_of([700, 90], dim=dim, dtype=torch.float16, q_len=2, page_tokens=64), "cuda")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.gpu
def test_captured_step_follows_the_cache(backend: str) -> None:
    """A graph of append's effects: replayed after tokens were added and settled, it gives what an eager call gives."""
    cache = filled([100, 40], dtype=torch.bfloat16)
    q = torch.randn(2, 1, 6, 64, device="cuda").bfloat16()
    plan = DecodePlan(cache, 6)
    plan.update()
    decode_attention(q, cache, plan=plan, backend=backend, return_mass=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update()
        out, _, mass = decode_attention(q, cache, plan=plan, backend=backend, return_mass=True)
    for tokens in (1, 1, 12):
        new = torch.randn(2, 2 * tokens, 2, 64, device="cuda").bfloat16()
        cache.append(0, *new, requests=[0, 1], seq_lens=[tokens, tokens])
        graph.replay()
        want, _, its_mass = decode_attention(q, cache, backend=backend, return_mass=True)
        if backend == "cuda":
            assert torch.equal(out, want)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(mass[..., : its_mass.shape[2]], its_mass, rtol=2e-2, atol=1e-3)
        assert not mass[..., its_mass.shape[2] :].any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_captured_call_has_room_for_what_will_come(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the host fixes are those of the longest request that there can be."""
    cache = filled([30, 5])
    q = torch.randn(2, 1, 6, 64, device=DEVICE)
    want, _, its_mass = decode_attention(q, cache, backend=backend, return_mass=True)
    monkeypatch.setattr(op, "capturing", lambda device: True)
    out, _, mass = decode_attention(q, cache, backend=backend, return_mass=True)
    assert mass.shape == (2, 2, cache.max_tokens)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(mass[..., :30], its_mass)
    assert not mass[..., 30:].any()


def test_plans_that_do_not_fit() -> None:
    cache, other = filled([20]), filled([20])
    q = torch.randn(1, 1, 6, 64, device=DEVICE)
    with pytest.raises(ValueError, match="plan: expected a plan for the given cache"):
        decode_attention(q, cache, plan=DecodePlan(other, 6))
    with pytest.raises(ValueError, match=r"plan: expected one for .*\(6, 1, \(0,\)\), got one for \(8, 1, \(0,\)\)"):
        decode_attention(q, cache, plan=DecodePlan(cache, 8))
    with pytest.raises(ValueError, match="heads: expected a multiple of 2, got 5"):
        DecodePlan(cache, 5)
    with pytest.raises(ValueError, match="fixed_split: expected an int of at least 1, got 0"):
        DecodePlan(cache, 6, fixed_split=0)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not there")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_plain_numbers_in_compiled_loops(dtype: torch.dtype) -> None:
    """Every 16-bit number, subnormal ones too, is what torch says; NaN of fp16 becomes infinite."""
    from kvstrata.attention.decode.numba import KINDS
    from kvstrata.layout import unpack_numba

    given = torch.arange(2**16).to(torch.uint16).view(torch.int16)
    x = given.view(dtype) if dtype != torch.float32 else given.float() * 1e-3
    want, bytes_ = x.float().numpy(), x.view(torch.uint8).numpy()
    bits = np.zeros(len(want), np.uint32)
    found = bits.view(np.float32)
    unpack_numba.floats(bytes_.view(np.uint32), bytes_.view(np.uint16), 0, len(want), KINDS[dtype], bits, found)
    finite = np.isfinite(want)
    assert np.array_equal(found[finite], want[finite])
    assert not np.isfinite(found[~finite]).any()
    assert np.array_equal(np.signbit(found)[finite], np.signbit(want)[finite])


@pytest.mark.skipif(not HAS_NUMBA or HAS_GPU, reason="numba, a CPU backend, is not there")
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_threads_share_out_the_heads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.attention import threads as pools
    from kvstrata.attention.decode import numba as decode_numba

    cache = filled([150, 0, 40])
    q = torch.randn(3, 1, 6, 64)
    alone = decode_attention(q, cache, return_lse=True, return_mass=True, backend="numba")
    monkeypatch.setattr(decode_numba, "THREADED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together = decode_attention(q, cache, return_lse=True, return_mass=True, backend="numba")
    assert pools._pool.cache_info().currsize >= 1
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert decode_attention(q[:0], cache, requests=[], backend="numba").shape == (0, 1, 6, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [509, 512, 1024])
def test_lists_of_many_heads(requests: int) -> None:
    """The list of 16,288 heads and more asks for no more shared memory than a launch gets."""
    formats = tuple(Format.parse(name, 32, 16) for name in ("K16V16", "K8V8", "K4V4", "K2V2"))
    held = torch.randint(0, 40, (requests, 32, 4))
    buckets = synthetic.layer(formats, held, torch.float16, DEVICE, 0)
    q, rows = torch.randn(requests, 1, 32, 32, dtype=torch.float16, device=DEVICE), list(range(requests))
    options = (32, 160, 0.2, None, None, None, True, False)
    out, lse, _ = op.run(Job(q, buckets, None, rows, *options), "cuda")
    for request in (0, 1, requests - 1):
        one = q[request : request + 1]
        want, want_lse, _ = op.run(Job(one, buckets, None, [request], *options), "reference")
        torch.testing.assert_close(lse[request], want_lse[0], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(out[request], want[0], rtol=0.02, atol=0.02)


def test_what_is_returned() -> None:
    case = case_of([20])
    q, cache = case.q, case.cache
    out = decode_attention(q, cache)
    assert isinstance(out, torch.Tensor)
    assert not out.requires_grad
    with_lse = decode_attention(q, cache, return_lse=True)
    with_mass = decode_attention(q, cache, return_mass=True)
    both = decode_attention(q, cache, return_lse=True, return_mass=True)
    assert all(type(made) is AttentionOutput for made in (with_lse, with_mass, both))
    assert with_lse.mass is None
    assert with_mass.lse is None
    assert (both.lse.dtype, both.lse.shape) == (torch.float32, (1, 1, 6))
    assert (both.mass.dtype, both.mass.shape) == (torch.float32, (1, 2, 20))
    for made in (with_lse, with_mass, both):
        assert torch.equal(made.out, out)
    assert torch.equal(both.lse, with_lse.lse)
    assert torch.equal(both.mass, with_mass.mass)


BAD = {
    "cache": (lambda q, c: dict(cache=3), TypeError, "cache: expected a TieredCache or a PagedCache, got int"),
    "q type": (lambda q, c: dict(q=1), TypeError, "q: expected a tensor"),
    "q dims": (lambda q, c: dict(q=q[0]), ValueError, r"q: expected \[requests, q_len, a multiple of 2, 64\]"),
    "heads": (lambda q, c: dict(q=q[:, :, :3]), ValueError, r"q: expected .* a multiple of 2, 64\], got shape"),
    "head_dim": (lambda q, c: dict(q=q[..., :32]), ValueError, "q: expected"),
    "rows": (lambda q, c: dict(q=q[:1]), ValueError, "q: expected 2 rows, one per request, got 1"),
    "q_len": (lambda q, c: dict(q=q[:, :0]), ValueError, "q: expected at least one query"),
    "stride": (lambda q, c: dict(q=q.repeat(1, 1, 1, 2)[..., ::2]), ValueError, "q: expected an inner stride of 1"),
    "dtype": (lambda q, c: dict(q=q.double()), TypeError, "q: expected torch.float32 for this cache, got"),
    "layer": (lambda q, c: dict(layer=1), ValueError, "layer: expected an int from 0 to 0, got 1"),
    "requests": (lambda q, c: dict(requests=[0, 5]), ValueError, r"requests: expected some of \(0, 1\), got 5"),
    "requests type": (lambda q, c: dict(requests=["a"]), ValueError, "requests: expected whole numbers, got"),
    "plan": (lambda q, c: dict(plan="x"), TypeError, "plan: expected a DecodePlan or None, got str"),
    "scale": (lambda q, c: dict(scale=-1.0), ValueError, "scale: expected a positive number, got -1.0"),
    "softcap": (lambda q, c: dict(softcap=0), ValueError, "softcap: expected a positive number, got 0"),
    "window": (lambda q, c: dict(sliding_window=0), ValueError, "sliding_window: expected an int of at least 1, got 0"),
    "sinks": (lambda q, c: dict(sinks=torch.zeros(2)), ValueError, r"sinks: expected floats \[4\]"),
    "sinks type": (lambda q, c: dict(sinks=1.0), ValueError, r"sinks: expected floats \[4\].* got 1.0"),
    "backend": (lambda q, c: dict(backend="fast"), ValueError, "backend: expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    change, error, message = BAD[name]
    cache = TieredCache(1, 2, 64, dtype=torch.float32, max_requests=2)
    cache.append(0, *torch.randn(2, 2, 5, 2, 64))
    q = torch.randn(2, 1, 4, 64)
    arguments = dict(q=q, cache=cache) | change(q, cache)
    with pytest.raises(error, match=message):
        decode_attention(**arguments)


def test_backends_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([10])
    job = op._job(case.q, case.cache, 0, None, None, None, None, None, False, False)
    assert op._choose("auto", job) == ("numba" if HAS_NUMBA else "reference") or HAS_GPU
    monkeypatch.setattr(op, "_has_numba", lambda: False)
    assert op._choose("auto", job) == "reference" or HAS_GPU
    with pytest.raises(RuntimeError, match="backend: numba is not installed"):
        case.run("numba")
    if not HAS_GPU:
        with pytest.raises(RuntimeError, match="backend: cuda needs CUDA tensors"):
            case.run("cuda")
