"""decode_attention in numba's loops: numbers, threads, and lists of many heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import HAS_GPU
from decode_model import (
    DEVICE,
    HAS_NUMBA,
    filled,
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


@pytest.mark.skipif(not HAS_NUMBA or HAS_GPU, reason="numba, a CPU backend, is not there")
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_threads_share_out_the_heads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata import threads as pools
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
