"""The tiered cache: what goes in and out, what kernels read, what is refused. K's centre: test_cache_centre.py; random
orders: test_cache_machine.py."""

from __future__ import annotations

import math

import pytest
import torch

from cache_model import by_head, fingerprint, make, rows, same
from kvstrata.cache import TieredCache
from kvstrata.cache.policy import prices
from kvstrata.quant import reference as quant

# Append and read back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_budget_compresses_nothing(dtype: torch.dtype) -> None:
    for budget in (None, 1.0, 1):
        cache = make(budget=budget, dtype=dtype)
        k, v = rows(200, dtype=dtype)
        cache.append(0, k, v)
        cache.settle()
        cache.check()
        got = cache.gather(0)
        assert torch.equal(got[0], by_head(k))
        assert torch.equal(got[1], by_head(v))
        assert torch.equal(got[2], torch.arange(200).expand(2, -1))
        assert (cache.tier_map(0) == 0).all()


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 35, 36, 37, 63, 64, 65, 500])
@pytest.mark.parametrize("policy", ["importance", "recency", "uniform"])
def test_any_prompt_length(tokens: int, policy: str) -> None:
    """Around pages of 16, 32 recent tokens with 4 sink tokens, and where a head is settled for the first time."""
    cache = make(budget=0.25, policy=policy)
    k, v = rows(tokens)
    cache.append(0, k, v)
    cache.check()
    assert cache.length(0) == tokens
    got, _, positions = cache.gather(0)
    assert torch.equal(positions, torch.arange(tokens).expand(2, -1))
    tiers = cache.tier_map(0)
    kept = torch.tensor([i < 4 or i >= tokens - 32 for i in range(tokens)], dtype=torch.bool)
    assert (tiers[:, kept] == 0).all()
    assert torch.equal(got[tiers == 0], by_head(k)[tiers == 0])


def test_an_empty_cache() -> None:
    cache = make()
    cache.check()
    assert cache.requests == ()
    assert cache.length(0) == 0
    assert cache.memory().kinds["slabs"] == 0
    cache.settle()
    request = cache.add_request()
    cache.check()
    k, v, positions = cache.gather(0, request)
    assert k.shape == v.shape == (2, 0, 64)
    assert positions.shape == (2, 0)
    cache.crop(request, 0)
    cache.free_request(request)
    with pytest.raises(ValueError, match=r"request: expected one of \(\), got 0"):
        cache.gather(0)


def test_chunks_and_single_tokens_give_the_same_tokens() -> None:
    """Codes of a row do not depend on how tokens were chunked once the centre is fixed."""
    k, v = rows(400)
    whole, steps = (make(policy="recency", tiers=("K4V4",), recent_tokens=64) for _ in range(2))
    for cache in (whole, steps):
        cache.append(0, k[:150], v[:150])
        assert (cache.tier_map(0) == 1).any()
    whole.append(0, k[150:], v[150:])
    for i in range(150, 400):
        steps.append(0, k[i : i + 1], v[i : i + 1])
        assert steps.memory().total <= steps.memory().allowed
    steps.check()
    both = (whole.tier_map(0) == 1) & (steps.tier_map(0) == 1)
    assert both.sum() > 300
    assert torch.equal(whole.gather(0)[0][both], steps.gather(0)[0][both])


def test_a_request_does_not_depend_on_the_rest_of_the_batch() -> None:
    """With a fraction: alone and in a ragged batch, bit for bit."""
    parts = [rows(n, seed=n) for n in (7, 300, 0, 129)]
    batch, lengths = make(max_requests=4), [7, 300, 0, 129]
    batch.append(0, torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts]), seq_lens=lengths)
    batch.check()
    for i, (k, v) in enumerate(parts):
        alone = make(max_requests=4)
        alone.append(0, k, v)
        for a, b in zip(batch.gather(0, i), alone.gather(0), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(batch.tier_map(0, i), alone.tier_map(0))


def decoded_beside(cache: TieredCache, neighbours: list[int]) -> torch.Tensor:
    """Tiers of request 0 after a prompt and some steps, in a batch with others of these lengths."""
    lengths = [300, *neighbours]
    parts = [[torch.randn(2, 340, 2, 32, generator=torch.Generator().manual_seed(n)) for n in lengths] for _ in "kv"]
    for layer in range(2):
        k, v = (torch.cat([x[layer, :n] for x, n in zip(side, lengths, strict=True)]) for side in parts)
        cache.append(layer, k, v, seq_lens=lengths)
    for step in range(40):
        for layer in range(2):
            cache.append(layer, *(torch.stack([x[layer, 300 + step] for x in side]).unsqueeze(1) for side in parts))
    return torch.stack([cache.tier_map(layer) for layer in range(2)])


def test_when_a_request_settles_does_not_depend_on_the_batch() -> None:
    """Also where all layers settle at once, and one of the others finds no room so; nor on who was there before."""
    options = dict(layers=2, dim=32, budget=0.6, recent_tokens=28, sink_tokens=4, settle_every=16, max_requests=3)
    alone = decoded_beside(make(**options), [])
    for neighbours in ([33], [33, 290], [0, 120]):
        cache = make(**options)
        assert torch.equal(decoded_beside(cache, neighbours), alone), neighbours
        for request in cache.requests:
            cache.crop(request, 0)
        assert torch.equal(decoded_beside(cache, []), alone)
        cache.select([])
        assert torch.equal(decoded_beside(cache, []), alone)
        cache.check()


def test_append_of_a_dense_batch_assigns_rows_to_requests() -> None:
    cache = make(max_requests=3)
    k, v = torch.randn(2, 3, 50, 2, 64)
    cache.append(0, k, v)
    cache.append(0, k[1:2, :1], v[1:2, :1], requests=[2])
    assert [cache.length(r) for r in range(3)] == [50, 50, 51]
    assert torch.equal(cache.gather(0, 2)[0][:, -1], k[1, 0])


def test_order_of_operations_is_deterministic() -> None:
    def run() -> TieredCache:
        cache = make(max_requests=2, debug=True)
        cache.append(0, *rows(300))
        cache.update_importance(0, torch.rand(1, 2, 4096, generator=torch.Generator().manual_seed(1)))
        cache.append(0, *rows(200, seed=1))
        cache.fork(0)
        cache.append(0, *rows(100, seed=2), requests=[1])
        return cache

    assert same(fingerprint(run()), fingerprint(run()))  # every byte, free ones included


# What comes out


def test_quantised_rows_are_as_good_as_their_format() -> None:
    cache = make(heads=3, budget=0.3, tiers=("K4V3", "K3V2", "K2V2"), dtype=torch.float32)
    k, v = rows(2000, heads=3)
    k += 5 * torch.randn(3, 64)  # what the centre is for
    for part in range(0, 2000, 250):
        cache.append(0, k[part : part + 250], v[part : part + 250])
    got_k, got_v, _ = cache.gather(0)
    tiers = cache.tier_map(0)
    for tier, (k_bits, v_bits) in enumerate([(4, 3), (3, 2), (2, 2)], 1):
        at = tiers == tier
        if at.sum() < 50:
            continue
        for got, want, bits in ((got_k, by_head(k), k_bits), (got_v, by_head(v), v_bits)):
            centre = cache.centre[0, 0].unsqueeze(1).expand_as(want) if want is not by_head(v) and got is got_k else 0
            signal = (want - centre)[at].square().sum() if got is got_k else want[at].square().sum()
            noise = (got - want)[at].square().sum()
            # A token may have come through every tier above, each of which left its error.
            floor = -10 * math.log10(sum(10 ** (-prices.SQNR_DB[b] / 10) for b in range(bits, 5)))
            assert 10 * math.log10(signal / noise) > floor - 0.7


@pytest.mark.parametrize("fill", [0.0, 6e4, -3e38, math.inf, math.nan])
def test_a_non_finite_row_affects_no_other_row(fill: float) -> None:
    k, v = rows(1300)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[1100], bad_v[200] = fill, fill  # of K one that has no part in the centre
    good, bad = make(policy="recency"), make(policy="recency")
    good.append(0, k, v)
    bad.append(0, bad_k, bad_v)
    assert torch.equal(good.tier_map(0), bad.tier_map(0))
    others = torch.ones(1300, dtype=torch.bool)
    others[[1100, 200]] = False
    for a, b in zip(good.gather(0)[:2], bad.gather(0)[:2], strict=True):
        assert torch.equal(a[:, others], b[:, others])
        assert b.isfinite().all()


# What kernels read


def test_bucket_views_show_the_current_state() -> None:
    cache = make(layers=2, max_requests=2, dtype=torch.bfloat16)
    view = cache.bucket_views(1)
    addresses = [t.data_ptr() for t in (view.page_table, view.count, view.slab_pointers, view.centre, view.seq_lens)]
    cache.append(1, *rows(700, dtype=torch.bfloat16))
    cache.append(1, *rows(900, dtype=torch.bfloat16, seed=1), requests=[1])
    again = cache.bucket_views(1)
    assert addresses == [
        t.data_ptr() for t in (again.page_table, again.count, again.slab_pointers, again.centre, again.seq_lens)
    ]
    assert view.seq_lens.tolist() == [700, 900]
    assert (view.count.sum(-1) == view.seq_lens.unsqueeze(1)).all()
    # A kernel's way to a page, by hand: pointer table and offset, against the slab it means.
    k_all, v_all, positions = cache.gather(1, 1)
    tiers = cache.tier_map(1, 1)
    for tier, f in enumerate(view.formats):
        handle = int(view.page_table[1, 0, tier, 0])
        if handle < 0:
            continue
        slab = view.slabs[handle // view.units]
        assert int(view.slab_pointers[handle // view.units]) == slab.data_ptr()
        at = handle % view.units * 64
        page = slab[at : at + f.page_bytes]
        k, v = quant.dequantize_page(page, f, torch.bfloat16 if f.plain else None)
        if not f.plain:
            k, v = quant.restore(k, v, f, view.centre[1, 0])
        side = slab[at + view.position_offsets[tier] :][: 16 * view.position_dtype.itemsize].view(view.position_dtype)
        used = min(16, int(view.count[1, 0, tier]))
        for slot in range(used):
            column = int((positions[0] == int(side[slot])).nonzero())
            assert int(tiers[0, column]) == tier
            assert torch.equal(k[slot].bfloat16(), k_all[0, column])
            assert torch.equal(v[slot].bfloat16(), v_all[0, column])


def test_positions_use_int32_beyond_32768_tokens() -> None:
    assert make(max_tokens=32768).position_dtype == torch.int16
    cache = make(max_tokens=32769, heads=1, dim=32)
    assert cache.position_dtype == torch.int32
    cache.append(0, *rows(100, heads=1, dim=32))
    cache.check()


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(budget=0), r"budget: expected a fraction in \(0, 1\] or None, got 0; bytes are budget_bytes"),
        (dict(budget=1.5), r"budget: expected a fraction in \(0, 1\] or None, got 1.5$"),
        (dict(budget=500_000), r"budget: expected a fraction in \(0, 1\] or None, got 500000; bytes are budget_bytes"),
        (dict(budget=True), "budget: expected a fraction"),
        (dict(budget="0.25"), "budget: expected a fraction"),
        (dict(budget_bytes=10), "budget_bytes: expected at least .* for tables and slabs, got 10"),
        (dict(budget_bytes=0), "budget_bytes: expected an int of at least 1, got 0"),
        (dict(budget_bytes=True), "budget_bytes: expected an int of at least 1, got True"),
        (dict(budget_bytes=0.25), "budget_bytes: expected an int, got 0.25; a fraction of 16 bit is budget"),
        (
            dict(budget=0.25, budget_bytes=10**9),
            "budget: expected to be left out, since budget_bytes is given",
        ),
        (dict(tiers=("K2V2", "K4V4")), "tiers: expected none that is wider .* got K4V4 after K2V2"),
        (dict(tiers=("K3V4", "K4V2")), "tiers: expected none that is wider .* got K4V2 after K3V4"),
        (dict(tiers=("K2V8", "K2V4", "K4V2")), "tiers: expected none that is wider .* got K4V2 after K2V4"),
        (dict(tiers=5), "tiers: expected a list of formats .* got 5"),
        (dict(tiers=(4,)), "tiers: expected formats such as 'K4V2', got 4"),
        (dict(tiers=("K4V4", "4")), r"tiers: expected formats such as 'K4V2', got '4' \(name: expected K<bits>V<bits>"),
        (dict(tiers=("K9V2",)), r"tiers: expected formats such as 'K4V2', got 'K9V2' \(k_bits: expected"),
        (dict(tiers="K4V4"), r"tiers: expected a list of formats .* got 'K4V4'"),
        (dict(dtype="float16"), "dtype: expected one of .* got 'float16'"),
        (dict(tiers=()), "tiers: expected at least one"),
        (dict(tiers=("K2V2",) * 8), "tiers: expected at most 7 formats beside plain rows, got 8"),
        (dict(recent_tokens=0), "recent_tokens: expected an int of at least 1, got 0"),
        (dict(sink_tokens=-1), "sink_tokens: expected"),
        (dict(dtype=torch.float64), "dtype: expected one of"),
        (dict(policy="best"), "policy: expected one of"),
        (dict(importance="sum"), "importance: expected one of"),
        (dict(page_tokens=48), "page_tokens: expected one of"),
        (dict(slab_bytes=64), "slab_bytes: expected"),
        (dict(hysteresis=-1.0), "hysteresis: expected"),
        (dict(rope=[0.1] * 33), "rope: expected up to 32 numbers, head_dim / 2, got 33"),
        (dict(rope=[1.0, math.nan]), "rope: expected a number in .* got nan"),
        (dict(rope=10000.0), "rope: expected a row of numbers .* got 10000.0"),
        (dict(hysteresis=float("inf")), "hysteresis: expected a number in .* got inf"),
        (dict(hysteresis="a"), "hysteresis: expected a number in .* got 'a'"),
        (dict(decay=1.0), "decay: expected"),
        (dict(decay="a"), "decay: expected a number in .* got 'a'"),
        (dict(settle_every=0), "settle_every: expected"),
        (dict(max_tokens=2**31), "max_tokens: expected an int from 1 to 2147483647, got 2147483648"),
        (
            dict(max_tokens=2**31 - 1, max_requests=9),
            "max_tokens: expected fewer than [0-9,]+ for 9 requests, .* tiers, got",
        ),
        (dict(device="tpu9"), "device: expected one that torch knows, such as 'cpu' or 'cuda', got 'tpu9'"),
        (dict(device="meta"), "device: expected one that torch knows, .* got 'meta'"),
    ],
)
def test_invalid_constructor_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("name", ["per_head", "evict", "debug"])
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'no'"):
        make(**{name: "no"})


def test_requests_are_whole_numbers() -> None:
    cache = make(max_requests=2)
    k, v = rows(4)
    cache.append(0, k, v, requests=torch.tensor([0]), seq_lens=torch.tensor([4], dtype=torch.int32))
    before = fingerprint(cache)
    for requests, lengths in (([0.9], [4]), ([0], [3.7]), ("0", [4]), ([0], "4"), ([float("inf")], [4]), (0, [4])):
        with pytest.raises(ValueError, match=r"(requests|seq_lens): expected whole numbers, got"):
            cache.append(0, k, v, requests=requests, seq_lens=lengths)
    for call in (cache.fork, cache.free_request, lambda r: cache.gather(0, r), lambda r: cache.crop(r, 1)):
        for request in (0.0, [0], "0", None, False):
            with pytest.raises(ValueError, match=r"request: expected one of \(0,\), got"):
                call(request)
    for call in (lambda r: cache.settle(requests=r), lambda r: cache.update_importance(0, torch.rand(1, 2, 4), r)):
        for requests in (0, [0.0], "0"):
            with pytest.raises(ValueError, match="requests: expected whole numbers, got"):
                call(requests)
    for indices in ([0.2], None):
        with pytest.raises(ValueError, match="indices: expected whole numbers, got"):
            cache.reorder(indices)
    assert same(before, fingerprint(cache))


def test_an_absent_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="device: expected one that torch sees, got cuda, and it sees no CUDA"):
        make(device="cuda")


def test_invalid_append_arguments_are_named() -> None:
    cache = make(max_requests=2, max_tokens=64)
    k, v = rows(10)
    before = fingerprint(cache)
    for call, error, message in [
        (lambda: cache.append(1, k, v), ValueError, "layer: expected an int from 0 to 0, got 1"),
        (lambda: cache.append(0, k[:, :1], v), ValueError, r"k: expected \[tokens, 2, 64\]"),
        (lambda: cache.append(0, k, v[:5]), ValueError, "v: expected shape"),
        (lambda: cache.append(0, k.half(), v.half()), TypeError, "k: expected torch.float32, got torch.float16"),
        (lambda: cache.append(0, k, v, seq_lens=[3, 3]), ValueError, "seq_lens: expected numbers that sum to 10"),
        (lambda: cache.append(0, k, v, seq_lens=[-1, 11]), ValueError, "seq_lens: expected"),
        (lambda: cache.append(0, k[None], v[None], seq_lens=[10]), ValueError, "seq_lens: expected None"),
        (lambda: cache.append(0, k, v, requests=[2]), ValueError, "requests: expected numbers below 2"),
        (lambda: cache.append(0, k, v, requests=[0, 0], seq_lens=[5, 5]), ValueError, "requests: expected 2 distinct"),
        (lambda: cache.append(0, k, v, requests=[0, 1]), ValueError, r"requests: expected 1, .* come with seq_lens"),
        (lambda: cache.append(0, k, v, requests="a"), ValueError, "requests: expected whole numbers, got 'a'"),
        (lambda: cache.append(0, k, v, seq_lens=["a"]), ValueError, r"seq_lens: expected whole numbers, got \['a'\]"),
        (lambda: cache.append(0, [1], v), TypeError, "k: expected a tensor, got list"),
        (lambda: cache.append(0, k, v.to("meta")), ValueError, "v: expected a tensor on cpu, got one on meta"),
        (lambda: cache.append(0, k, v, mass=1.0), TypeError, "mass: expected a tensor, got float"),
        (lambda: cache.append(0, *rows(65)), ValueError, r"at most 64 more tokens for request 0 \(max_tokens 64\)"),
        (lambda: cache.update_importance(0, torch.rand(1, 2, 5)), ValueError, r"mass: expected \[0, 2, at least 0\]"),
        (lambda: cache.settle(requests=[0]), ValueError, "requests: expected one of"),
        (lambda: cache.fork(1), ValueError, "request: expected one of"),
        (lambda: cache.select([1]), ValueError, "indices: expected one of"),
        (lambda: cache.select("a"), ValueError, "indices: expected whole numbers, got 'a'"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert same(before, fingerprint(cache))
