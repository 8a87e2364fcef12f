"""The balance of K: exact where rows are plain, the same codes as of rows that come balanced, on every backend."""

from __future__ import annotations

import pytest
import torch

import emulator
import kvstrata
from conftest import HAS_GPU
from kvstrata.cache import TieredCache
from kvstrata.cache.move import append as append_op
from kvstrata.cache.move import apply
from kvstrata.cache.policy import settle_cuda
from kvstrata.quant.calibration import Calibration, LayerCalibration, exponents, factors

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["reference", "triton"] + (["cuda"] if HAS_GPU else ["numba", "emulated"])
HEADS, GROUP, DIM = 2, 3, 64
LENGTHS = [70, 20, 45]
BALANCES = torch.randint(-5, 6, (3, HEADS, DIM), generator=torch.Generator().manual_seed(5)).float().exp2().to(DEVICE)


def build(balance: bool, **options) -> TieredCache:
    options = dict(
        budget=0.3, recent_tokens=16, page_tokens=16, max_requests=3, max_tokens=1024, settle_every=16,
        dtype=torch.bfloat16, device=DEVICE, balance=balance, debug=True,
    ) | options  # fmt: skip
    return TieredCache(2, HEADS, DIM, **options)


def rows(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return (k + 2 * torch.linspace(-1, 1, DIM, device=DEVICE)).to(dtype), v.to(dtype)


def fill(cache: TieredCache, by: torch.Tensor | None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Prompts and single tokens of three requests in layer 1; ``by``: K is divided by it here."""
    lengths = LENGTHS
    parts = [rows(n, i, dtype) for i, n in enumerate(lengths)]
    if by is not None:
        parts = [((k / by[i]).to(dtype), v) for i, (k, v) in enumerate(parts)]
    cache.append(1, *(torch.cat(x) for x in zip(*parts, strict=True)), requests=[0, 1, 2], seq_lens=lengths)
    for step in range(5):
        k, v = rows(3, 10 + step, dtype)
        cache.append(1, k if by is None else (k / by).to(dtype), v, requests=[0, 1, 2], seq_lens=[1, 1, 1])


def pair(**options) -> tuple[TieredCache, TieredCache]:
    """A cache with a balance, and one without that is given balanced rows."""
    balanced, plain = build(True, **options), build(False, **options)
    balanced.set_balance(1, BALANCES, [0, 1, 2])
    dtype = options.get("dtype", torch.bfloat16)
    fill(balanced, None, dtype)
    fill(plain, BALANCES, dtype)
    return balanced, plain


def test_exponents_round_trip():
    x = torch.arange(-8, 9).float().exp2()
    assert exponents(x).tolist() == list(range(-8, 9))
    assert torch.equal(factors(exponents(x)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_bytes_equal_those_of_balanced_rows(dtype):
    balanced, plain = pair(dtype=dtype, rope=None)
    balanced.check()
    assert (balanced.tier_map(1, 0) > 0).any(), "nothing was quantised"
    for request in range(3):
        assert torch.equal(balanced.tier_map(1, request), plain.tier_map(1, request))
        (k, v, position), (other_k, other_v, other) = balanced.gather(1, request), plain.gather(1, request)
        assert torch.equal(position, other)
        assert torch.equal(v, other_v)
        assert torch.equal(k, other_k * BALANCES[request].unsqueeze(1).to(dtype))


CALLS = [(1, {}, torch.bfloat16), (3, {"softcap": 5.0}, torch.float16)]


def queries(q_len: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    q = torch.randn(3, q_len, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(3))
    return q.to(DEVICE, dtype)


def balanced_queries(q: torch.Tensor) -> torch.Tensor:
    return (q.float() * BALANCES.repeat_interleave(GROUP, 1).unsqueeze(1)).to(q.dtype)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize(("q_len", "options", "dtype"), CALLS)
def test_decode_equals_attention_with_balanced_queries(backend, q_len, options, dtype):
    """The products are the same numbers; only the order of sums may differ."""
    balanced, plain = pair(dtype=dtype)
    q = queries(q_len, dtype)
    options = dict(return_lse=True, return_mass=True, backend=backend) | options
    one = kvstrata.decode_attention(q, balanced, 1, **options)
    two = kvstrata.decode_attention(balanced_queries(q), plain, 1, **options)
    without = kvstrata.decode_attention(q, plain, 1, **options)
    for a, b in ((one.out, two.out), (one.lse, two.lse), (one.mass, two.mass)):
        torch.testing.assert_close(a, b, rtol=8e-3, atol=1e-4)  # sums may differ in the last place of bfloat16
    assert not torch.allclose(one.out, without.out, atol=0.05), "the balance made no difference"


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_cached_prefill_equals_attention_with_balanced_queries(backend):
    balanced, plain = pair(dtype=torch.float32)
    q = queries(12, torch.float32)
    one = kvstrata.prefill_attention_cached(q, balanced, 1, backend=backend)
    two = kvstrata.prefill_attention_cached(balanced_queries(q), plain, 1, backend=backend)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    exact = kvstrata.prefill_attention_cached(q, balanced, 1, backend="reference")
    torch.testing.assert_close(one, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["reference", "numba", "triton"])
def test_plain_rows_give_the_same_scores_with_a_balance(backend):
    """Without quantised tokens a balance changes no bit of an output."""
    if HAS_GPU and backend == "numba":
        pytest.skip("numba reads caches on the CPU")
    if not HAS_GPU or backend == "triton":
        one, two = build(True, budget=None), build(False, budget=None)
        one.set_balance(1, BALANCES, [0, 1, 2])
        fill(one, None)
        fill(two, None)
        out = [kvstrata.decode_attention(queries(), cache, 1, backend=backend) for cache in (one, two)]
        assert torch.equal(*out)
        assert torch.equal(one.gather(1, 2)[0], two.gather(1, 2)[0])


@pytest.mark.parametrize("backend", ["triton"] + (["cuda"] if HAS_GPU else []))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_append_kernels_apply_the_balance(backend, dtype, monkeypatch):
    want = build(True, budget=None, dtype=dtype)
    want.set_balance(1, BALANCES, [0, 1, 2])
    if not HAS_GPU:
        fill(want, None, dtype)
    prepare = append_op.prepare_append
    monkeypatch.setattr(apply, "prepare_append", lambda job: prepare(job, backend))
    got = build(True, budget=None, dtype=dtype)
    got.set_balance(1, BALANCES, [0, 1, 2])
    fill(got, None, dtype)
    for request, n in enumerate(LENGTHS):
        k = rows(n, request, dtype)[0]
        assert torch.equal(got.gather(1, request)[0][:, :n], k.transpose(0, 1))
        if not HAS_GPU:
            assert torch.equal(got.gather(1, request)[0], want.gather(1, request)[0])
    stored = got.buckets.read(1, [0], got.buckets.snapshot(1, [0])[:1], 0).k
    assert not torch.equal(stored.cpu()[0], rows(LENGTHS[0], 0, dtype)[0][0, 0].cpu()), "stored without the balance"


@pytest.mark.parametrize("backend", ["reference", "triton"] + (["cuda"] if HAS_GPU else []))
def test_a_written_step_applies_the_balance(backend):
    if HAS_GPU and backend == "reference":
        pytest.skip("the reference writes to caches on the CPU")
    cache = build(True, budget=None)
    cache.set_balance(0, BALANCES, [0, 1, 2])
    cache.set_balance(1, BALANCES, [0, 1, 2])
    for layer in range(2):
        k, v = rows(30, layer)
        cache.append(layer, k, v, requests=[0, 2], seq_lens=[10, 20])
    cache.advance([0, 2])
    k, v = rows(3, 50)
    from kvstrata.cache.move.append import write_rows
    from kvstrata.cache.move.append_job import Written

    for layer in range(2):
        ids = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
        write_rows(
            Written(cache.buckets, layer, k, v, ids, cache._device_lengths, False, cache.balance), backend=backend
        )
    assert torch.equal(cache.gather(1, 2)[0][:, -1], k[0])
    assert torch.equal(cache.gather(0, 0)[0][:, -1], k[2])


def test_requests_keep_their_balance(tmp_path):
    cache, _ = pair()
    cache.free_request(1)
    assert not cache.balance[1].any()
    twin = cache.fork(0)
    assert twin == 1
    for a, b in zip(cache.gather(1, twin), cache.gather(1, 0), strict=True):
        assert torch.equal(a, b)
    cache.save(tmp_path / "r", 0)
    other = build(True)
    other.load(tmp_path / "r")
    for a, b in zip(cache.gather(1, 0), other.gather(1, 0), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="balance=True"):
        build(False).load(tmp_path / "r")
    cache.crop(0, 0)
    assert not cache.balance[0].any()


def test_set_balance_is_checked():
    cache = build(True)
    cache.append(1, *rows(3, 0))
    with pytest.raises(ValueError, match="without tokens in layer 1, got 0, which has 3"):
        cache.set_balance(1, BALANCES[0], [0])
    cache.set_balance(0, BALANCES[0], [0])
    for bad, error in ((BALANCES[0] * 3, ValueError), (BALANCES[0].half(), TypeError), (BALANCES[0, :1], ValueError)):
        with pytest.raises(error, match="balance"):
            cache.set_balance(0, bad, [0])
    with pytest.raises(ValueError, match="balance=True"):
        build(False).set_balance(0, BALANCES[0], [0])
    with pytest.raises(ValueError, match="requests"):
        cache.set_balance(0, BALANCES[0], [3])


def calibration() -> Calibration:
    centre = torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(8))
    return Calibration([LayerCalibration(BALANCES[0].cpu(), centre), LayerCalibration(BALANCES[1].cpu(), centre)])


def test_with_a_calibration_codes_depend_on_rows_alone():
    """Equal rows at equal positions give equal bytes in two requests whose other tokens differ."""
    options = dict(tiers=["K4V4"], policy="uniform", calibration=calibration(), sink_tokens=0)
    cache = build(True, **options)
    k, v = rows(200, 0)
    other_k, other_v = rows(200, 1)
    other_k[:64], other_v[:64] = k[:64], v[:64]
    cache.append(1, torch.cat([k, other_k]), torch.cat([v, other_v]), requests=[0, 1], seq_lens=[200, 200])
    same = [cache.gather(1, r)[0][:, :64] for r in range(2)]
    assert (cache.tier_map(1, 0)[:, :64] == 1).all()
    assert torch.equal(*same)
    free = build(True, **options | {"calibration": None})
    free.append(1, torch.cat([k, other_k]), torch.cat([v, other_v]), requests=[0, 1], seq_lens=[200, 200])
    assert not torch.equal(*[free.gather(1, r)[0][:, :64] for r in range(2)]), "they agree without one, too"
    cache.free_request(0)
    assert cache._centred[0].all(), "the next request begins with the calibration again"
    assert torch.equal(cache.centre[0], cache.centre[2])


@pytest.fixture
def settling(monkeypatch):
    """CUDA kernels that settle, emulated without a GPU."""
    yield from emulator.settling_kernels(monkeypatch)


@pytest.mark.parametrize("by_kernels", [True] if HAS_GPU else [False, True])
def test_with_a_calibration_the_way_through_the_tiers_decides(by_kernels, request):
    """A prompt at once and in chunks: rows straight from 16 bit are the same, those from K8V8 are encoded from it."""
    options = dict(tiers=["K8V8", "K4V4"], policy="recency", calibration=calibration(), sink_tokens=0, budget=0.4)
    cache = build(True, **options)
    if by_kernels:
        request.getfixturevalue("settling")
        cache.buckets.backend = "cuda"
    assert settle_cuda.supports(cache) == by_kernels
    k, v = rows(400, 0)
    cache.append(1, k, v, requests=[0])
    at_once = cache.tier_map(1, 0).cpu()
    former = []
    for i in range(0, 400, 40):
        cache.append(1, k[i : i + 40], v[i : i + 40], requests=[1])
        tiers = torch.zeros(HEADS, 400, dtype=torch.int64)
        tiers[:, : i + 40] = cache.tier_map(1, 1).cpu()
        former.append(tiers)
    came_by_8 = (torch.stack(former) == 1).any(0) & (former[-1] == 2)
    both = (at_once == former[-1]) & (former[-1] > 0)
    first, second = (cache.gather(1, request)[0].float().cpu() for request in (0, 1))
    equal = (first == second).all(-1)
    direct = both & ~came_by_8
    assert equal[direct].all()
    assert (both & came_by_8).any()
    assert (~equal[both & came_by_8]).float().mean() > 0.5


def test_a_calibration_of_another_model_is_refused():
    with pytest.raises(ValueError, match="calibration: expected 3 layers"):
        TieredCache(3, HEADS, DIM, calibration=calibration())
    with pytest.raises(TypeError, match="calibration: expected a Calibration"):
        TieredCache(2, HEADS, DIM, calibration="file")


def test_the_reference_is_the_exact_attention():
    """Scores of balanced K and Q against float64 on the model's own rows, all tokens in 16 bit."""
    cache = build(True, budget=None, dtype=torch.float32)
    cache.set_balance(1, BALANCES, [0, 1, 2])
    k, v = rows(50, 0, torch.float32)
    cache.append(1, k, v, requests=[2], seq_lens=[50])
    q = torch.randn(1, 1, HEADS * GROUP, DIM).to(DEVICE)
    out = kvstrata.decode_attention(q, cache, 1, requests=[2], backend="triton" if HAS_GPU else "reference")
    keys, values = (x.double().transpose(0, 1).repeat_interleave(GROUP, 0) for x in (k, v))
    scores = torch.einsum("hd,hnd->hn", q[0, 0].double(), keys) * DIM**-0.5
    want = torch.einsum("hn,hnd->hd", scores.softmax(-1), values)
    torch.testing.assert_close(out[0, 0].double(), want, rtol=1e-4, atol=1e-5)
