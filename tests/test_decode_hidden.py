"""decode_attention where a sliding window or causal order hides whole pages: a column's softmax begins with the first
token that it sees, however low its score is. Backends against the reference, CUDA C++ in the emulator where there is no
GPU."""

from __future__ import annotations

import pytest
import torch

import emulator
from conftest import HAS_GPU
from decode_model import DEVICE
from kvstrata import PagedCache, TieredCache, decode_attention

MANY = dict(requests=8, kv_heads=8, tokens=4096) if HAS_GPU else dict(requests=2, kv_heads=2, tokens=768)
GROUP = 4 if HAS_GPU else 2  # one block of 8 columns with four queries, too: one kernel less to build
KERNELS = ["cuda"] if not HAS_GPU else ["triton", "cuda"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        if reason := emulator.missing():
            pytest.skip(reason)
        emulator.decode_without_cuda(monkeypatch)


def rows_with_scores(scores: torch.Tensor, shape: tuple[int, ...], dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of K ``[tokens, *shape, dim]`` whose product with the second tensor ``[dim]`` is near the scores."""
    direction = torch.nn.functional.normalize(torch.randn(dim), dim=0)
    return scores.view(-1, *[1] * len(shape), 1) * direction + 0.5 * torch.randn(len(scores), *shape, dim), direction


def queries(direction: torch.Tensor, requests: int, q_len: int, heads: int) -> torch.Tensor:
    return direction + 0.02 * torch.randn(requests, q_len, heads, len(direction))


def paged(dtype: torch.dtype, score: float, q_len: int) -> tuple[PagedCache, torch.Tensor]:
    requests, kv_heads, tokens = MANY.values()
    k, direction = rows_with_scores(torch.full((requests * tokens,), score), (kv_heads,), 64)
    v = torch.randn_like(k)
    pages = (x.view(-1, 32, kv_heads, 64).to(dtype).to(DEVICE) for x in (k, v))
    table = torch.randperm(requests * tokens // 32).view(requests, -1).int().to(DEVICE)
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device=DEVICE)
    q = queries(direction, requests, q_len, kv_heads * GROUP)
    return PagedCache(*pages, table, lengths), q.to(dtype).to(DEVICE)


def tiered(drop: float, recent: int, q_len: int) -> tuple[TieredCache, torch.Tensor]:
    """The last ``recent`` tokens have scores lower than all others by ``drop``."""
    requests, kv_heads, tokens = MANY.values()
    score = torch.zeros(requests, tokens)
    score[:, -recent:] = -drop
    k, direction = rows_with_scores(score.flatten(), (kv_heads,), 64)
    cache = TieredCache(
        1, kv_heads, 64, budget=0.35, tiers=["K4V4"], recent_tokens=16, page_tokens=32, max_requests=requests,
        max_tokens=tokens, dtype=torch.float16, device=DEVICE,
    )  # fmt: skip
    k, v = (x.half().to(DEVICE).view(requests, tokens, kv_heads, 64) for x in (k, torch.randn_like(k)))
    cache.append(0, k, v)
    return cache, queries(direction, requests, q_len, kv_heads * GROUP).half().to(DEVICE)


def compare(cache: PagedCache | TieredCache, q: torch.Tensor, window: int, backend: str) -> None:
    options = dict(scale=1.0, sliding_window=window, return_lse=True)
    want, want_lse, _ = decode_attention(q, cache, backend="reference", **options)
    out, lse, _ = decode_attention(q, cache, backend=backend, **options)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-2)
    torch.testing.assert_close(out.float(), want.float(), rtol=0.02, atol=0.02 * float(want.float().abs().max()))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "score"), [(torch.float16, -20.0), (torch.float16, -95.0), (torch.bfloat16, -95.0)], ids=str
)
def test_low_scores_behind_hidden_pages(backend: str, q_len: int, dtype: torch.dtype, score: float) -> None:
    torch.manual_seed(q_len)
    compare(*paged(dtype, score, q_len), 40, backend)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("q_len", [1, 4])
def test_low_scores_behind_hidden_packed_tokens(backend: str, q_len: int) -> None:
    torch.manual_seed(q_len)
    compare(*tiered(40.0, 128, q_len), 96, backend)


@pytest.mark.skipif(HAS_GPU, reason="Triton runs with the others on a GPU")
@pytest.mark.parametrize("q_len", [1, 4])
def test_low_scores_in_the_interpreter(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MANY, "requests", 1)
    monkeypatch.setitem(MANY, "tokens", 256)
    torch.manual_seed(q_len)
    compare(*paged(torch.float16, -95.0, q_len), 40, "triton")
    compare(*tiered(40.0, 64, q_len), 48, "triton")
