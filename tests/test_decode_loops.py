"""decode_attention in numba's loops: numbers, threads, and lists of many heads."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import HAS_GPU
from decode_model import (
    DEVICE,
    HAS_NUMBA,
)
from kvstrata import TieredCache, decode_attention
from kvstrata.attention.decode import op
from kvstrata.attention.decode.job import Job
from kvstrata.layout import Format
from kvstrata.tools.bench import synthetic


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
    floats = bits.view(np.float32)
    unpack_numba.floats(bytes_.view(np.uint32), bytes_.view(np.uint16), 0, len(want), KINDS[dtype], bits, floats)
    finite = np.isfinite(want)
    assert np.array_equal(floats[finite], want[finite])
    assert not np.isfinite(floats[~finite]).any()
    assert np.array_equal(np.signbit(floats)[finite], np.signbit(want)[finite])


def cache_of(kv_heads: int, lengths: list[int]) -> TieredCache:
    """Three tiers; a request may be empty."""
    cache = TieredCache(
        1, kv_heads, 64, budget=0.3, page_tokens=16, recent_tokens=16, max_requests=3, max_tokens=400,
        tiers=("K8V8", "K4V3", "K2V2"), dtype=torch.float16,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, sum(lengths), kv_heads, 64, generator=generator).half()
    cache.append(0, k, v, list(range(len(lengths))), lengths)
    cache.settle()
    return cache


@pytest.mark.skipif(not HAS_NUMBA or HAS_GPU, reason="numba, a CPU backend, is not there")
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize(("threads", "how"), [(2, "openmp"), (5, "openmp"), (2, "pool"), (3, "pool"), (9, "pool")])
def test_threads_share_out_the_heads(threads: int, how: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what one thread computes, and what a request gets on its own."""
    from kvstrata import threads as pools
    from kvstrata.attention.decode import numba as decode_numba

    cache = cache_of(kv_heads, [350, 0, 40])
    q = torch.randn(3, 2, 3 * kv_heads, 64).half()
    options = dict(return_lse=True, return_mass=True, backend="numba", sinks=torch.randn(3 * kv_heads))
    alone = decode_attention(q, cache, **options)
    calls: list[int] = []
    team, pool = pools.openmp(), pools._pool
    monkeypatch.setattr(decode_numba, "THREADED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(pools, "_pool", lambda n: calls.append(n) or pool(n))
    if how == "openmp":
        if team is None:
            pytest.skip("torch has no OpenMP here")
        monkeypatch.setattr(decode_numba, "openmp", lambda: lambda *given: calls.append(given[2]) or team(*given))
    else:
        for module in (decode_numba, pools):
            monkeypatch.setattr(module, "openmp", lambda: None)
    for _ in range(20 if how == "openmp" else 1):  # units are taken by whichever thread comes first
        together = decode_attention(q, cache, **options)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert set(calls) == {threads if how == "openmp" else min(threads, len(q) * kv_heads * (1 + kv_heads % 2)) - 1}
    own = decode_attention(q[2:], cache, requests=[2], **options)
    assert torch.equal(own.out, alone.out[2:])
    assert torch.equal(own.mass, alone.mass[2:, :, :40])
    assert decode_attention(q[:0], cache, requests=[], backend="numba").shape == (0, 2, 3 * kv_heads, 64)


FORK = """
import os, sys
import torch
import kvstrata
from kvstrata import threads
from kvstrata.attention.decode import numba

numba.THREADED = 1
torch.set_num_threads(2)
cache = kvstrata.TieredCache(1, 3, 64, budget=None, page_tokens=16, max_tokens=128)
cache.append(0, *torch.randn(2, 100, 3, 64).bfloat16())
q = torch.randn(1, 1, 3, 64).bfloat16()
torch.randn(300, 300) @ torch.randn(300, 300)  # torch's threads exist
before = kvstrata.decode_attention(q, cache, backend="numba")
assert (threads.openmp() is not None) == (sys.platform == "linux")
if os.fork() == 0:
    assert threads.openmp() is None
    same = torch.equal(kvstrata.decode_attention(q, cache, backend="numba"), before)
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not HAS_NUMBA or HAS_GPU or not hasattr(os, "fork"), reason="numba, a CPU backend, is not there")
def test_a_forked_process_does_not_wait_for_threads_that_are_gone() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not HAS_NUMBA or HAS_GPU, reason="numba, a CPU backend, is not there")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["query", "first key", "last key", "value", "sink"])
def test_what_is_not_finite_is_seen_in_the_output(bad: float, where: str) -> None:
    """As in torch: rows that see a NaN or an infinite score are NaN, others are what they were."""
    cache = TieredCache(1, 2, 64, budget=None, page_tokens=16, dtype=torch.float32)
    k, v = torch.rand(2, 70, 2, 64) + 0.1
    q, sinks = torch.rand(1, 1, 6, 64) + 0.1, torch.zeros(6)
    if where == "query":
        q[0, 0, 1, 3] = bad
    elif where == "sink":
        sinks[1] = bad
    else:
        (v if where == "value" else k)[-1 if where == "last key" else 0, 0, 3] = bad
    cache.append(0, k, v)
    got, want = (
        decode_attention(q, cache, sinks=sinks, return_lse=True, return_mass=True, backend=backend)
        for backend in ("numba", "reference")
    )
    assert not want.out.isfinite().all()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


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
