"""Compiled loops of a decode step on the CPU: products of codes, writing a token, adding mass; all in one call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvstrata
from conftest import HAS_GPU
from kvstrata.cache.move import append_reference
from kvstrata.cache.move.append_job import Written
from kvstrata.cache.policy import mass as masses
from kvstrata.layout import fragments
from kvstrata.quant.calibration import factors

pytest.importorskip("numba", reason="numba is not installed")
pytestmark = pytest.mark.skipif(HAS_GPU, reason="a cache on the CPU")

from kvstrata.attention.decode.step_numba import LayerStep  # noqa: E402
from kvstrata.cache.move import append_numba  # noqa: E402
from kvstrata.layout import products_numba, unpack_numba  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_products_of_codes_equal_float64_sums(bits: int, side: fragments.Side) -> None:
    """Every page size, odd numbers of steps, and rows that are no multiple of four; sums begin where they were."""
    random = np.random.default_rng(bits)
    for dim, tokens, rows in ((64, 64, 3), (48, 16, 1), (80, 32, 7), (32, 64, 4), (128, 32, 2), (256, 64, 5)):
        codes = torch.from_numpy(random.integers(0, 1 << bits, (tokens, dim), np.uint8))
        steps, tiles, count = dim // 16, tokens // 16, fragments.words_per_lane(bits, dim, tokens)
        lanes = np.empty((count, 32), np.uint32)
        unpack_numba.lanes_of(fragments.pack(codes, bits, side).numpy().view(np.uint32), count, lanes)
        matrix = codes.numpy().astype(np.float64)
        matrix = matrix.T if side == "k" else matrix
        by, sums = random.standard_normal((rows, len(matrix)), np.float32), np.ones((rows, matrix.shape[1]), np.float32)
        arranged = np.full((rows, len(matrix) // 16, 16), np.nan, np.float32)
        products_numba.arrange(by, bits, arranged)
        for i in range(tiles if side == "k" else steps):
            walk = (i * steps, 1, steps) if side == "k" else (i, steps, tiles)
            products_numba.add_products(lanes, bits, (tiles * steps + 1) // 2, *walk, arranged, 0, sums, 16 * i)
        np.testing.assert_allclose(sums, 1 + by @ matrix, rtol=0, atol=3e-7 * (abs(by) @ matrix).max())


def as_bits(x: torch.Tensor) -> np.ndarray:
    """Bits of numbers, in uint32."""
    return x.numpy().view(np.uint32) if x.dtype == torch.float32 else x.view(torch.uint16).numpy().astype(np.uint32)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_division_by_powers_of_two(dtype: torch.dtype) -> None:
    """Every 16-bit number by every balance, bit for bit what torch stores."""
    x = torch.arange(2**16).to(torch.uint16).view(torch.int16).view(dtype)
    for exponent in range(-8, 9):
        want = x * factors(torch.tensor(-exponent, dtype=torch.int8)).to(dtype)
        bits = as_bits(x)
        append_numba._scale(bits, np.full(len(bits), exponent, np.int8), append_numba.KINDS[dtype])
        got = torch.from_numpy(bits.astype(np.int16)).view(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [False, True])
def test_rounding_of_new_rows(dtype: torch.dtype, clamp: bool) -> None:
    edges = torch.tensor([0.0, -0.0, 65504, 65519.9, 65520, -7e4, 1e38, -torch.inf, torch.inf, 6e-8, 2.9e-8, 6.1e-5])
    x = torch.cat([edges, torch.randn(20000) * torch.logspace(-12, 6, 20000), torch.arange(2048) * 2.0**-25])
    want = x.to(dtype)
    if clamp and dtype == torch.float16:
        want = want.clamp(-65504, 65504)
    out = np.empty(len(x), np.uint32)
    append_numba.round_row(x.numpy(), append_numba.KINDS[dtype], clamp, out)
    assert np.array_equal(out, as_bits(want))


def cache_of(dtype: torch.dtype, balance: bool, **options: object) -> kvstrata.TieredCache:
    """Two requests of different lengths in two layers, half of them settled."""
    torch.manual_seed(1)
    sizes = {"max_requests": 3, "max_tokens": 512, "recent_tokens": 32, "page_tokens": 16}
    cache = kvstrata.TieredCache(2, 2, 64, budget=0.4, dtype=dtype, balance=balance, **sizes, **options)
    for layer in range(2):
        for request, length in ((0, 200), (1, 130)):
            k, v = torch.randn(2, 1, length, 2, 64)
            cache.append(layer, (k * 3).to(dtype), v.to(dtype), requests=[request])
    return cache


def bytes_of(cache: kvstrata.TieredCache) -> torch.Tensor:
    assert cache.pool.space is not None
    return cache.pool.space.bytes.clone()


def restore(cache: kvstrata.TieredCache, before: torch.Tensor) -> None:
    assert cache.pool.space is not None
    cache.pool.space.bytes.copy_(before)


def both(cache: kvstrata.TieredCache, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Two ways to change the pool give the same bytes, and do change it."""
    before = bytes_of(cache)
    first()
    one = bytes_of(cache)
    restore(cache, before)
    second()
    assert torch.equal(one, bytes_of(cache))
    assert not torch.equal(one, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("balance", [False, True])
def test_rows_are_written_as_by_torch(dtype: torch.dtype, balance: bool) -> None:
    """Padding, requests out of range and requests without tokens are skipped; rows may be strided."""
    cache = cache_of(dtype, balance)
    cache.advance([0, 1])
    if balance:
        assert cache.balance is not None
        cache.balance.copy_(torch.randint(-8, 9, cache.balance.shape))
    k, v = (torch.randn(4, 2, 2, 64).to(dtype)[:, :, 1] for _ in range(2))
    for reciprocal in (False, True):
        for requests in (
            torch.tensor([1, -1, 0, 2], dtype=torch.int32),
            torch.tensor([7, 1, -5, 0], dtype=torch.int32),
        ):
            written = Written(cache.buckets, 1, k, v, requests, cache._device_lengths, reciprocal, cache.balance)
            both(
                cache,
                lambda written=written: append_numba.write_rows(written),
                lambda written=written: append_reference.write_rows(written),
            )


@pytest.mark.parametrize("q_len", [1, 4])
def test_mass_is_added_as_by_torch(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(torch.float16, False)
    mass, weight = torch.rand(2, 2, 200), torch.tensor([15, 0], dtype=torch.int32)
    mass[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -1.0])
    for weights in (weight, weight.flip(0), torch.tensor([1, 300], dtype=torch.int32)):

        def by_torch(weights: torch.Tensor = weights) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(masses, "_numba", lambda: None)
                masses.observe_mass(cache, 1, [0, 1], mass, weights, q_len)

        both(cache, lambda weights=weights: masses.observe_mass(cache, 1, [0, 1], mass, weights, q_len), by_torch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_is_a_write_and_a_decode(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.attention.decode import numba as decode_numba

    monkeypatch.setattr(decode_numba, "THREADED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cache = cache_of(dtype, True)
    plan = kvstrata.DecodePlan(cache, 6, requests=[0, 1], observe=2)
    cache.advance([0, 1])
    plan.update()
    q, k, v = (torch.randn(2, heads, 1, 64).to(dtype) for heads in (6, 2, 2))
    options = {"scale": 0.2, "softcap": 20.0, "sinks": torch.randn(6)}
    outs = []

    def apart() -> None:
        cache.write(1, k.squeeze(2), v.squeeze(2))
        outs.append(kvstrata.decode_attention(q.transpose(1, 2), cache, 1, plan=plan, **options))

    both(cache, lambda: outs.append(LayerStep(cache, 1, plan)(q, k, v, **options)), apart)
    assert torch.equal(*outs)
    assert outs[0].shape == (2, 1, 6, 64)
