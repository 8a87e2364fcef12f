"""The centre of K: one vector per request, layer and KV head, subtracted before K is quantised.

It is the mean of the first tokens that are there when the first of them is quantised, and must not change while tokens
that were quantised with it are alive. Values that are not finite, or too large for fp16, do not take part: one broken
token would shift all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import quantize_reference as quant
from .buckets import DROP, NEW, Tokens
from .pages import Rows

if TYPE_CHECKING:
    from .cache import TieredCache

CENTRE_TOKENS = 64


def fix_centres(
    cache: TieredCache, layer: int, requests: list[int], tokens: Tokens, target: torch.Tensor, fresh: Rows | None
) -> None:
    """Set K's centre for requests whose first tokens are about to be quantised."""
    if cache._centred[requests, layer].all():
        return
    plain = tokens.tier <= 0
    first = plain & (tokens.position < CENTRE_TOKENS) & (target != DROP)
    for i, request in enumerate(requests):
        mine = tokens.bucket // cache.kv_heads == i
        if cache._centred[request, layer] or not bool((plain & mine & (target > 0)).any()):
            continue
        for head in range(cache.kv_heads):
            at = (first & (tokens.bucket == i * cache.kv_heads + head)).nonzero().flatten()
            some = tokens[at[torch.argsort(tokens.position[at])]]
            k = torch.zeros(len(at), cache.head_dim, device=cache.device)
            new = some.tier == NEW
            if fresh is not None:
                k[new] = fresh.k[some.slot[new]].float()
            stored = (~new).nonzero().flatten()
            if len(stored):
                k[stored] = cache.buckets.read(layer, requests, some[stored], 0).k.float()
            finite = k.isfinite() & (k.abs() <= quant.LARGEST)
            sums = torch.where(finite, k, 0.0).sum(0)
            cache.centre[request, layer, head] = sums / finite.sum(0).clamp(min=1)
        cache._centred[request, layer] = True
