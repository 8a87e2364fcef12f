"""The centre of K: one vector per request, layer and KV head, subtracted before K is quantised.

It is the mean of the first tokens that are there when the first of them is quantised, and must not change while tokens
that were quantised with it are alive. Values that are not finite, or too large for fp16, do not take part: one broken
token would shift all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from . import quantize_reference as quant
from .pages import Rows
from .tokens import DROP, NEW, Tokens

if TYPE_CHECKING:
    from .cache import TieredCache

CENTRE_TOKENS = 64


def fix_centres(
    cache: TieredCache, jobs: Sequence[tuple[int, list[int], Tokens, torch.Tensor]], fresh: Rows | None
) -> None:
    """Set K's centre for requests whose first tokens are about to be quantised; jobs are `scopes.Targets`."""
    by_layer: dict[int, list[tuple[list[int], Tokens, torch.Tensor]]] = {}
    for layer, requests, tokens, target in jobs:
        if not cache._centred[requests, layer].all():
            by_layer.setdefault(layer, []).append((requests, tokens, target))
    for layer, some in by_layer.items():
        requests, parts = [], []
        for scope, tokens, _ in some:
            parts.append(replace(tokens, bucket=tokens.bucket + len(requests) * cache.kv_heads))
            requests += scope
        _fix(cache, layer, requests, Tokens.cat(parts), torch.cat([target for *_, target in some]), fresh)


def _fix(
    cache: TieredCache, layer: int, requests: list[int], tokens: Tokens, target: torch.Tensor, fresh: Rows | None
) -> None:
    """The same in one layer, of all these requests at once."""
    plain, heads = tokens.tier <= 0, cache.kv_heads
    begins = torch.zeros(len(requests), dtype=torch.int32, device=cache.device)
    begins.index_add_(0, tokens.bucket // heads, (plain & (target > 0)).int())
    begun = [i for i, n in enumerate(begins.tolist()) if n and not cache._centred[requests[i], layer]]
    if not begun:
        return
    at = (plain & (tokens.position < CENTRE_TOKENS) & (target != DROP)).nonzero().flatten()
    first = tokens[at]
    k = torch.zeros(len(requests) * heads, CENTRE_TOKENS, cache.head_dim, device=cache.device)
    new = (first.tier == NEW).nonzero().flatten()
    if len(new):
        assert fresh is not None
        some = first[new]
        k[some.bucket, some.position] = fresh.k[some.slot].float()
    stored = (first.tier != NEW).nonzero().flatten()
    if len(stored):
        some = first[stored]
        k[some.bucket, some.position] = cache.buckets.read(layer, requests, some, 0).k.float()
    there = torch.zeros(k.shape[:2], dtype=torch.bool, device=cache.device)
    there[first.bucket, first.position] = True
    finite = k.isfinite() & (k.abs() <= quant.LARGEST) & there.unsqueeze(-1)
    k = torch.where(finite, k, 0.0)
    sums = torch.zeros_like(k[:, 0])
    for row in k.unbind(1):  # one by one: in an order that does not depend on how many requests there are
        sums += row
    mean = (sums / finite.sum(1).clamp(min=1)).unflatten(0, (len(requests), heads))
    cache.centre[[requests[i] for i in begun], layer] = mean[begun]
    cache._centred[[requests[i] for i in begun], layer] = True
