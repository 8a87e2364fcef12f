"""decode_attention over tiers: every backend against a float32 model of it on the packed bytes (decode_model.py)."""

from __future__ import annotations

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
    check_of,
    each_backend,
    few,
    filled,
    poison_tails,
)
from kvstrata import DecodePlan, TieredCache, decode_attention
from kvstrata.attention.decode import op
from kvstrata.jit import tuned


@each_backend
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", ["K8V8", "K4V4", "K3V3", "K2V2", "K8V2", "K4V3", "K3V2", "K2V4"])
def test_every_width_and_head_dim_equals_the_model(backend: str, dim: int, bits: str) -> None:
    interpreted = {32: ("K2V2", "K3V3"), 64: ("K8V2", "K4V3", "K2V4"), 80: ("K3V2",), 128: ("K8V8",)}
    few(backend, bits in interpreted.get(dim, ()))
    check_of(backend, [70, 21], dim=dim, tiers=(bits,), page_tokens=32, dtype=HALF)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_equals_the_model(backend: str, dtype: torch.dtype) -> None:
    check_of(backend, [90, 33], dim=128, dtype=dtype)


@each_backend
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_every_group_size_equals_the_model(backend: str, group: int) -> None:
    few(backend, group in (1, 7, 16))
    check_of(backend, [60, 40], group=group, dtype=HALF)
    check_of(backend, [45], group=group, kv_heads=1, dtype=HALF)


@each_backend
@pytest.mark.parametrize("q_len", range(1, 9))
def test_new_tokens_see_only_earlier_ones(backend: str, q_len: int) -> None:
    """Also where the request is no longer than the queries are."""
    few(backend, q_len in (1, 2, 5, 8))
    check_of(backend, [q_len, 50, 3, 0], q_len=q_len, recent=2, dtype=HALF)


@each_backend
@pytest.mark.parametrize("recent", [0, 3])
def test_lengths_at_page_edges(backend: str, recent: int) -> None:
    check_of(backend, [15, 16, 17, 31, 32, 33, 48, 1], tiers=("K4V4",), recent=recent, dtype=HALF)


@pytest.mark.skipif(not (HAS_GPU or HAS_NUMBA), reason="the compiled loops, numba, are not there")
@pytest.mark.parametrize("backend", ["triton", "cuda"] if HAS_GPU else ["numba"])
def test_a_context_of_128k(backend: str) -> None:
    tiers = ("K4V4", "K3V3", "K2V2")
    check_of(backend, [1 << 17, 1000], kv_heads=1, tiers=tiers, page_tokens=64, group=4, dtype=HALF)


@each_backend
def test_empty_requests_give_zeros(backend: str) -> None:
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
def test_sliding_window_hides_older_tokens(backend: str, window: int, q_len: int) -> None:
    few(backend, window != 33)
    check_of(backend, [60, 5, 20], q_len=q_len, options=dict(sliding_window=window), dtype=HALF)


@each_backend
@pytest.mark.parametrize(("q_len", "window"), [(4, None), (8, 40), (1, 33), (1, 64)])
@pytest.mark.parametrize("tiers", [("K4V4",), ("K3V2",)], ids=str)
def test_fully_hidden_pages(backend: str, tiers: tuple[str, ...], q_len: int, window: int | None) -> None:
    """Nothing but a position says so: every slot is taken, and all but a few tokens are seen."""
    few(backend, tiers == ("K4V4",) and q_len != 8)
    full = dict(page_tokens=64, recent=0, plain=False, tiers=tiers, dtype=HALF)
    check_of(backend, [128, 64], q_len=q_len, group=4, options=dict(sliding_window=window), **full)


@each_backend
def test_sink_logits_take_weight_from_tokens(backend: str) -> None:
    sinks = torch.tensor([-100.0, 0.0, 1.0, 4.0, 30.0, -torch.inf], device=DEVICE)
    case = case_of([50, 0, 3], options=dict(sinks=sinks), dtype=HALF)
    check(case, backend)
    out, lse, mass = case.run(backend)
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[1, 0], sinks)
    assert (mass[0].sum(-1) < 3).all()


@each_backend
def test_huge_scores_do_not_overflow(backend: str) -> None:
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
def test_layers_are_independent(backend: str) -> None:
    cache = filled([30, 20], layers=3, dtype=HALF)
    q = torch.randn(2, 1, 6, 64).to(HALF).to(DEVICE)
    for layer in range(3):
        check(Case(cache, q, [0, 1], [30, 20], layer=layer), backend)


@each_backend
def test_strided_queries_equal_contiguous_ones(backend: str) -> None:
    case = case_of([40, 30], q_len=3, dtype=HALF)
    q = case.q
    wide = torch.zeros(*q.shape[:3], 80, dtype=q.dtype, device=DEVICE)
    wide[..., 7:71] = q
    for strided in (q.transpose(1, 2).contiguous().transpose(1, 2), wide[..., 7:71], q[:, :, :1].expand(q.shape)):
        got = decode_attention(strided, case.cache, backend=backend)
        want = decode_attention(strided.contiguous(), case.cache, backend=backend)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@each_backend
def test_long_context_in_several_splits_equals_the_model(backend: str) -> None:
    """Many pages, several splits; the interpreter gets a shorter one."""
    interpreted = backend == "triton" and INTERPRETED
    lengths = [200, 20] if interpreted else [3000, 40]
    check_of(backend, lengths, page_tokens=64, dtype=HALF, group=2)


@each_backend
def test_settled_under_a_budget(backend: str) -> None:
    """The loop of a model: append, decode, update importance."""
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


LOOPS = ("reference",) if HAS_GPU or not HAS_NUMBA else ("reference", "numba")


@pytest.mark.parametrize("backends", [LOOPS, ("triton",), pytest.param(("cuda",), marks=pytest.mark.gpu)], ids=" ".join)
def test_any_case_equals_the_model(backends: tuple[str, ...]) -> None:
    interpreted = backends == ("triton",) and INTERPRETED
    widths = st.sampled_from([2, 3, 4, 8])

    @settings(max_examples=8 if interpreted else 40)
    @given(
        lengths=st.lists(st.integers(0, 60 if interpreted else 200), min_size=1, max_size=3),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 3, 5, 7, 8, 16]),
        dim=st.sampled_from([32, 64] if interpreted else [32, 48, 64, 80, 96, 112, 128, 256]),
        tiers=st.lists(st.tuples(widths, widths), min_size=1, max_size=4),
        page_tokens=st.sampled_from([16, 32, 64]),
        q_len=st.integers(1, 8),
        window=st.none() | st.integers(1, 70),
        softcap=st.none() | st.floats(1.0, 50.0),
        scale=st.none() | st.floats(0.05, 0.5),
        sink=st.booleans(),
        recent=st.integers(0, 20),
        drop=st.sampled_from([0.0, 0.3, 0.5]),
        seed=st.integers(0, 1000),
    )
    def run(
        lengths, kv_heads, group, dim, tiers, page_tokens, q_len, window, softcap, scale, sink, recent, drop, seed
    ) -> None:
        k_widths, v_widths = (sorted(widths, reverse=True) for widths in zip(*tiers, strict=True))
        names = tuple(f"K{k}V{v}" for k, v in zip(k_widths, v_widths, strict=True))
        sinks = torch.randn(kv_heads * group, device=DEVICE) if sink else None
        options = dict(sliding_window=window, softcap=softcap, scale=scale, sinks=sinks)
        case = case_of(
            lengths, kv_heads=kv_heads, group=group, dim=dim, tiers=names, page_tokens=page_tokens, q_len=q_len,
            options=options, recent=recent, drop=drop, seed=seed, dtype=HALF,
        )  # fmt: skip
        for backend in backends:
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
def test_fixed_split_is_batch_invariant() -> None:
    """Output is batch-invariant bit for bit, with contexts long enough to be split."""
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
def test_any_number_of_combining_warps_gives_the_same_output(
    combine: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More partials than they take at a time, requests with none, and sinks."""
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
def test_a_captured_call_has_room_for_longer_requests(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
