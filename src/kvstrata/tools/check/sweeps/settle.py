"""TieredCache under a budget: ragged appends, then decode steps that settle and observe; the cache chooses kernels.

The steps run as in a captured graph: `advance` (tables, plans made ahead, moves), `write`, and `decode_attention`
with a `DecodePlan` that adds attention mass to importance.
"""

from __future__ import annotations

from typing import Any

import torch

import kvstrata

from .decode import dense
from .draw import AGAIN, CLOSE, DIMS, FLOATS, WORST, Draw
from .quantize import AIMED

BACKENDS = ("auto",)
SANITIZED = ("auto",)
LAYERS, STEPS = 2, 6


def trial(draw: Draw, backend: str) -> str:
    """The budget holds, every token is stored, each row is as close as its tier allows; decode reads what is stored."""
    heads, dim, dtype = draw.size(1, 3), draw.one(*DIMS), draw.one(*FLOATS)
    requests, recent = draw.size(1, 3), draw.size(4, 24)
    policy = draw.one("importance", "importance", "recency", "uniform")
    budget, rope = draw.one(0.3, 0.5), draw.one(None, [10.0 ** (-4 * i / dim) for i in range(dim // 2)])
    what = f"{requests} requests, {heads} heads, D {dim}, {dtype}, budget {budget}, {recent} recent, {policy}"
    cache = kvstrata.TieredCache(
        LAYERS, heads, dim, budget=budget, recent_tokens=recent, sink_tokens=2, page_tokens=16, dtype=dtype,
        device=draw.device, max_requests=requests, max_tokens=512, policy=policy, tiers=("K8V8", "K4V4", "K2V2"),
        settle_every=4, rope=rope, debug=True, balance=draw.one(True, False),
    )  # fmt: skip
    rows = list(range(requests))
    if cache.balance is not None:
        what += ", aimed"
        for layer in range(LAYERS):
            query = draw.normal(requests, heads, dim).to(draw.device)
            cache.set_balance(layer, torch.ones_like(query), rows, query=query)
    kept: list[list[list[torch.Tensor]]] = [[[] for _ in rows] for _ in range(LAYERS)]  # [layer][request]: [2, n, H, D]
    for most in (100, 1, 60, 1):
        lengths = [draw.size(0, most) for _ in rows]
        for layer in range(LAYERS):
            given = draw.normal(2, sum(lengths), heads, dim).to(dtype)
            k, v = given.to(draw.device)
            cache.append(layer, k, v, rows, lengths)
            for request, part in enumerate(given.split(lengths, 1)):
                kept[layer][request].append(part)
        _check_bytes(cache, what)
    plan, ids = kvstrata.DecodePlan(cache, 2 * heads, requests=rows, observe=1), torch.tensor(rows, dtype=torch.int32)
    for _ in range(STEPS):
        cache.advance(rows)
        plan.update(ids.to(draw.device))
        for layer in range(LAYERS):
            given = draw.normal(2, requests, heads, dim).to(dtype)
            k, v = given.to(draw.device)
            cache.write(layer, k, v)
            for request in rows:
                kept[layer][request].append(given[:, request : request + 1])
            q = draw.normal(requests, 1, 2 * heads, dim).to(dtype)
            out: Any = kvstrata.decode_attention(q.to(draw.device), cache, layer, requests=rows, plan=plan)
    for request in rows:
        keys, values, position = (x.cpu() for x in cache.gather(LAYERS - 1, request))
        want, _, _ = dense(q[request], keys, values, position, cache.length(request))
        off = float((out[request].cpu().float() - want).norm() / want.norm().clamp(min=1e-6))
        assert off <= CLOSE[dtype], f"the output of request {request} is off by {off:.1e}: {what}"
    _check_bytes(cache, what)
    for layer in range(LAYERS):
        for request, parts in enumerate(kept[layer]):
            _check_rows(cache, layer, request, torch.cat(parts, 1), recent, what)
    return what


def _check_bytes(cache: kvstrata.TieredCache, what: str) -> None:
    cache.check()
    memory = cache.memory()
    assert memory.allowed is not None
    assert memory.total <= memory.allowed, f"{memory.total} bytes, {memory.allowed} allowed: {what}"


def _check_rows(
    cache: kvstrata.TieredCache, layer: int, request: int, truth: torch.Tensor, recent: int, what: str
) -> None:
    """Compare K and V of a request with the rows that were appended, ``truth [2, n, heads, dim]``."""
    length, heads = truth.shape[1:3]
    bits = torch.tensor([[f.k_bits, f.v_bits] for f in cache.formats])
    *held, position = (x.cpu() for x in cache.gather(layer, request))
    tier = cache.tier_map(layer, request).cpu()
    assert torch.equal(position, torch.arange(length).expand(heads, length)), f"tokens are missing: {what}"
    assert bool((tier[:, max(length - recent, 0) :] == 0).all()), f"a recent token is quantised: {what}"
    for side, (stored, want) in enumerate(zip(held, truth.transpose(1, 2), strict=True)):
        off = (stored.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp(min=1e-6)
        allowed = (AGAIN if cache.balance is None else AGAIN * AIMED) * torch.tensor(
            [WORST[int(b)] for b in bits[:, side]]
        )[tier]
        assert bool((off <= allowed).all()), f"{'kv'[side]}: a row is off by {float((off - allowed).max()):.3f}: {what}"
