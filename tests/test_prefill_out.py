"""prefill_attention into the caller's memory: the same bits, the caller's strides, nothing written elsewhere."""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import prefill_attention
from prefill_model import BACKENDS, DEVICE, HALF

each_backend = pytest.mark.parametrize("backend", BACKENDS)
# Queries, keys, head_dim. The last two are of the warp-specialized kernel, which stores whole tiles.
SIZES = [(21, 37, 64), *([(700, 700, 128), (130, 1500, 64)] if HAS_GPU else [])]


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(HALF).to(DEVICE)


def memory_of(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of NaN, and a view of q's shape in it: heads in the middle of others, tokens before and behind."""
    *batch, tokens, heads, dim = q.shape
    room = torch.full((*batch, tokens + 4, heads + 4, dim), torch.nan, dtype=q.dtype, device=DEVICE)
    return room, room[..., 2:-2, 2:-2, :]


@each_backend
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_output_in_given_memory(backend: str, sizes: tuple[int, int, int]) -> None:
    queries, keys, dim = sizes
    q, k, v = rows(2, queries, 4, dim), rows(2, keys, 2, dim), rows(2, keys, 2, dim)
    want = prefill_attention(q, k, v, return_lse=True, backend=backend)
    for _ in range(2):  # a launch is kept
        room, out = memory_of(q)
        got = prefill_attention(q, k, v, return_lse=True, out=out, backend=backend)
        assert got.out is out
        assert torch.equal(out, want.out)
        assert torch.equal(got.lse, want.lse)
        out.fill_(torch.nan)
        assert room.isnan().all()
    flat = torch.full_like(want.out, torch.nan)  # contiguous memory after strided memory
    assert torch.equal(prefill_attention(q, k, v, out=flat, backend=backend), want.out)


@each_backend
def test_ragged_output_in_given_memory(backend: str) -> None:
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=DEVICE) for ends in ([0, 5, 5, 21], [0, 9, 12, 40]))
    q, k, v = rows(21, 4, 64), rows(40, 2, 64), rows(40, 2, 64)
    lengths = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=16, max_seqlen_k=28, backend=backend)
    room, out = memory_of(q)
    assert torch.equal(prefill_attention(q, k, v, out=out, **lengths), prefill_attention(q, k, v, **lengths))
    out.fill_(torch.nan)
    assert room.isnan().all()


def test_memory_that_does_not_fit_is_named() -> None:
    q = torch.randn(1, 3, 2, 64)
    for out, message in (
        (torch.empty(1, 3, 2, 64, dtype=torch.float16), "out: expected torch.float32 as q, got torch.float16"),
        (torch.empty(3, 2, 64), "out: expected shape .1, 3, 2, 64. as q, got .3, 2, 64."),
        (torch.empty(1, 3, 2, 64, device="meta"), "out: expected a tensor on cpu, where q is, got meta"),
        (torch.empty(1, 3, 2, 128)[..., ::2], "out: expected an inner stride of 1, got 2"),
        ("out", "out: expected a tensor, got str"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            prefill_attention(q, q, q, out=out)


def test_operator_writes_into_given_memory() -> None:
    q, k, v = (torch.randn(1, 5, 2, 64) for _ in range(3))
    out = torch.empty_like(q)
    torch.library.opcheck(torch.ops.kvstrata.prefill_attention_into.default, (q, k, v, out), dict(return_lse=True))

    def step(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return prefill_attention(q, k, v, out=out) * 2

    twice = torch.compile(step, fullgraph=True, backend="aot_eager")(q, out.fill_(torch.nan))
    assert torch.equal(out, prefill_attention(q, k, v))
    assert torch.equal(twice, 2 * out)
