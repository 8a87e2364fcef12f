"""TieredCache: ragged appends under a budget, until tokens settle; it chooses its kernels itself."""

from __future__ import annotations

import torch

import kvstrata

from .draw import AGAIN, DIMS, FLOATS, WORST, Draw

BACKENDS = ("auto",)
SANITIZED = ("auto",)


def trial(draw: Draw, backend: str) -> str:
    """Ragged appends under a budget: the bytes hold, every token is there, each row is as near as its tier allows."""
    heads, dim, dtype = draw.size(1, 3), draw.one(*DIMS), draw.one(*FLOATS)
    requests, recent = draw.size(1, 3), draw.size(4, 24)
    policy = draw.one("importance", "recency", "uniform")
    budget = draw.one(0.3, 0.5)
    what = f"{requests} requests, {heads} heads, D {dim}, {dtype}, budget {budget}, {recent} recent, {policy}"
    cache = kvstrata.TieredCache(
        1, heads, dim, budget=budget, recent_tokens=recent, sink_tokens=2, page_tokens=16, dtype=dtype,
        device=draw.device, max_requests=requests, max_tokens=512, policy=policy, tiers=("K8V8", "K4V4", "K2V2"),
        debug=True,
    )  # fmt: skip
    kept: list[list[torch.Tensor]] = [[] for _ in range(requests)]
    for most in (100, 1, 60, 1):
        lengths = [draw.size(0, most) for _ in range(requests)]
        rows = draw.normal(2, sum(lengths), heads, dim).to(dtype)
        k, v = rows.to(draw.device)
        cache.append(0, k, v, list(range(requests)), lengths)
        for request, part in enumerate(rows.split(lengths, 1)):
            kept[request].append(part)
        cache.check()
        memory = cache.memory()
        assert memory.allowed is not None
        assert memory.total <= memory.allowed, f"{memory.total} bytes, {memory.allowed} allowed: {what}"
    bits = torch.tensor([[f.k_bits, f.v_bits] for f in cache.formats])
    for request, parts in enumerate(kept):
        truth = torch.cat(parts, 1)  # [2, n, heads, dim]
        length = truth.shape[1]
        if not length:
            continue
        *held, position = (x.cpu() for x in cache.gather(0, request))
        tier = cache.tier_map(0, request).cpu()
        assert torch.equal(position, torch.arange(length).expand(heads, length)), f"tokens are missing: {what}"
        assert bool((tier[:, max(length - recent, 0) :] == 0).all()), f"a recent token is quantised: {what}"
        for side, (stored, want) in enumerate(zip(held, truth.transpose(1, 2), strict=True)):
            off = (stored.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp(min=1e-6)
            allowed = AGAIN * torch.tensor([WORST[int(b)] for b in bits[:, side]])[tier]
            assert bool((off <= allowed).all()), (
                f"{'kv'[side]}: a row is off by {float((off - allowed).max()):.3f}: {what}"
            )
    return what
