"""decode_attention: queries over a ragged tiered cache, against dense attention over what `gather` returns."""

from __future__ import annotations

import torch

import kvstrata

from .draw import CLOSE, DIMS, FLOATS, Draw, unsupported_errors
from .oracle import attention

BACKENDS = ("reference", "numba", "triton", "cuda")
SANITIZED = ("cuda",)


def trial(draw: Draw, backend: str) -> str:
    heads, group, dim, q_len = draw.size(1, 3), draw.one(1, 2, 4, 7), draw.one(*DIMS), draw.size(1, 3)
    dtype = draw.one(*FLOATS) if backend != "cuda" else draw.one(torch.float16, torch.bfloat16)
    lengths = [draw.size(q_len, 200) for _ in range(draw.size(1, 3))]
    window = draw.one(None, None, 33)
    softcap = draw.one(None, None, 20.0)
    what = f"lengths {lengths}, {heads * group}/{heads} heads, D {dim}, q_len {q_len}, {dtype}, window {window}"
    cache = kvstrata.TieredCache(
        1, heads, dim, budget=0.3, recent_tokens=16, sink_tokens=2, page_tokens=16, dtype=dtype, device=draw.device,
        max_requests=len(lengths), max_tokens=256, tiers=("K8V8", "K4V4", "K3V3", "K2V2"),
    )  # fmt: skip
    k, v = draw.normal(2, sum(lengths), heads, dim).to(dtype).to(draw.device)
    cache.append(0, k, v, list(range(len(lengths))), lengths)
    q = draw.normal(len(lengths), q_len, heads * group, dim).to(dtype).to(draw.device)
    options = dict(sliding_window=window, softcap=softcap, return_lse=True, return_mass=True)
    with unsupported_errors(RuntimeError, "backend: "):
        out, lse, mass = kvstrata.decode_attention(q, cache, backend=backend, **options)  # type: ignore[arg-type]
    assert lse is not None
    assert mass is not None
    assert out.shape == q.shape
    assert not bool(out.isnan().any()), f"an output is NaN: {what}"
    for request, length in enumerate(lengths):
        keys, values, position = (x.cpu() for x in cache.gather(0, request))
        want, want_lse, want_mass = dense(q[request].cpu(), keys, values, position, length, window, softcap)
        pairs = (("out", out[request], want), ("lse", lse[request], want_lse))
        for name, a, b in (*pairs, ("mass", mass[request, :, :length], want_mass)):
            off = float((a.cpu().float() - b).norm() / b.norm().clamp(min=1e-6))
            assert off <= CLOSE[dtype], f"{name} of request {request} is off by {off:.1e}: {what}"
    return what


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, length: int, window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output, lse and mass of one request: q ``[q_len, Hq, D]``, k and v ``[H, n, D]``, positions ``[H, n]``."""
    own = length - len(q) + torch.arange(len(q))
    out, lse, weight = attention(q, k, v, own, position, window=window, softcap=softcap)
    mass = torch.zeros(len(k), length)
    return out, lse, mass.scatter_add_(1, position, weight.sum(0).view(len(k), -1, k.shape[1]).sum(1))
