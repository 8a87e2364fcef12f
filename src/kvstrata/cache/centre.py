"""The centre of K: one vector per request, layer and KV head, subtracted before K is quantised.

It is the mean of the first tokens that are there when the first of them is quantised, and must not change while tokens
that were quantised with it are alive. Values that are not finite, or too large for fp16, do not take part: one broken
token would shift all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import quantize_reference as quant
from .pages import Rows
from .tokens import DROP, NEW, Tokens

if TYPE_CHECKING:
    from .cache import TieredCache

CENTRE_TOKENS = 1024  # the more, the better: docs/decisions.md
STRIDE = 32  # additions one after the other, and as many of their sums
TABLE = 1 << 24  # values that are added up in one go


def fix_centres(
    cache: TieredCache,
    layers: Sequence[int],
    requests: Sequence[int],
    tokens: Tokens,
    target: torch.Tensor,
    fresh: Rows | None,
) -> None:
    """Set K's centre for requests, each in its layer, whose first tokens are about to be quantised."""
    missing = ~cache._centred[requests, layers]
    for layer in np.unique(np.array(layers)[missing]).tolist():
        mine = np.flatnonzero(missing & (np.array(layers) == layer))
        some, goes = tokens, target
        if len(mine) < len(requests):
            index = np.full(len(requests), -1)
            index[mine] = np.arange(len(mine))
            some = tokens.renumbered(cache.pool.to_device(index), cache.kv_heads)
            at = (some.bucket >= 0).nonzero().flatten()
            some, goes = some[at], target[at]
        _fix(cache, layer, [requests[i] for i in mine.tolist()], some, goes, fresh)


def _fix(
    cache: TieredCache, layer: int, requests: list[int], tokens: Tokens, target: torch.Tensor, fresh: Rows | None
) -> None:
    """The same in one layer, of all these requests at once."""
    plain, heads = tokens.tier <= 0, cache.kv_heads
    begins = torch.zeros(len(requests), dtype=torch.int32, device=cache.device)
    begins.index_add_(0, tokens.bucket // heads, (plain & (target > 0)).int())
    begun = [i for i, n in enumerate(begins.tolist()) if n and not cache._centred[requests[i], layer]]
    first = plain & (tokens.position < CENTRE_TOKENS) & (target != DROP)
    each = max(TABLE // (heads * CENTRE_TOKENS * cache.head_dim), 1)
    for some in (begun[i : i + each] for i in range(0, len(begun), each)):
        row = torch.full((len(requests),), -1, device=cache.device)
        row[some] = torch.arange(len(some), device=cache.device)
        row = row[tokens.bucket // heads]
        at = (first & (row >= 0)).nonzero().flatten()
        k = _first_rows(cache, layer, requests, tokens[at], fresh)
        there = (row[at] * heads + tokens.bucket[at] % heads, tokens.position[at])
        mean = _mean(k, there, len(some) * heads).unflatten(0, (len(some), heads))
        cache.centre[[requests[i] for i in some], layer] = mean
        cache._centred[[requests[i] for i in some], layer] = True


def _first_rows(
    cache: TieredCache, layer: int, requests: list[int], tokens: Tokens, fresh: Rows | None
) -> torch.Tensor:
    """K of plain tokens, new ones among them: float32 ``[n, D]``."""
    k = torch.zeros(len(tokens), cache.head_dim, dtype=torch.float32, device=cache.device)
    new = (tokens.tier == NEW).nonzero().flatten()
    if len(new):
        assert fresh is not None
        k[new] = fresh.k[tokens.slot[new]].float()
    if len(new) < len(tokens):
        stored = (tokens.tier != NEW).nonzero().flatten()
        k[stored] = cache.buckets.read(layer, requests, tokens[stored], 0).k.float()
    return k


def _mean(k: torch.Tensor, there: tuple[torch.Tensor, torch.Tensor], buckets: int) -> torch.Tensor:
    """Of the rows ``k [n, D]`` at bucket and position: float32 ``[buckets, D]``."""
    finite = k.isfinite() & (k.abs() <= quant.LARGEST)
    table = torch.zeros(buckets, CENTRE_TOKENS, k.shape[1], dtype=torch.float32, device=k.device)
    count = torch.zeros_like(table, dtype=torch.bool)
    table[there], count[there] = torch.where(finite, k, 0.0), finite
    # One by one: a sum over a dimension may go in another order when there are more buckets.
    sums = table.unflatten(1, (-1, STRIDE))
    for dim in (2, 1):
        total = torch.zeros_like(sums.select(dim, 0))
        for row in sums.unbind(dim):
            total += row
        sums = total
    return sums / count.sum(1).clamp(min=1)
