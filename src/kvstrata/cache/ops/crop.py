"""Crop: drop the last tokens of a request in every layer; the rest may have to settle into a smaller budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.policy.room import fits_cropped
from kvstrata.cache.policy.scopes import Place, move_tokens, plan_scopes, scopes_of
from kvstrata.cache.storage.tokens import DROP, Tokens

from .fork import assign

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


def crop_request(cache: CacheState, request: int, length: int) -> None:
    """`TieredCache.crop`; plans every layer before it changes any."""
    if length == 0:
        assign(cache, {}, [request])
        cache._use([request])
        return
    cache._forget(cache.requests if cache.budget.shared else [request])
    with cache._operation() as change:
        _crop(cache, change, request, length)


def _crop(cache: CacheState, change: Transaction, request: int, length: int) -> None:
    places: list[Place] = []
    every: list[Tokens] = []
    targets: list[torch.Tensor] = []
    for layer in range(cache.layers):
        if int(cache._lengths[request, layer]) <= length:
            continue
        scope = [request]
        tokens = cache.buckets.snapshot(layer, scope)
        kept = tokens.position < length
        target = torch.where(kept, tokens.tier, DROP)
        if not fits_cropped(cache, layer, request, tokens, target, length):
            [scope] = scopes_of(cache, [request])
            lengths = [length if r == request else int(cache._lengths[r, layer]) for r in scope]
            tokens = cache.buckets.snapshot(layer, scope)
            cropped = tokens.head_cache // cache.kv_heads == scope.index(request)
            kept = ~cropped | (tokens.position < length)
            kept_index = kept.nonzero().flatten()
            target = torch.full_like(tokens.tier, DROP)
            target[kept_index] = plan_scopes(cache, [(layer, scope)], tokens[kept_index], [lengths])
        places.append((layer, scope))
        every.append(tokens)
        targets.append(target)
    if places:
        tokens = Tokens.cat(every, [len(scope) * cache.kv_heads for _, scope in places])
        move_tokens(cache, change, places, tokens, torch.cat(targets))
    ahead_from = min(length + cache.policy.settle_every, cache._ahead_from[request])
    change.set(cache._ahead_from, [request], ahead_from)
    reported = cache.reports.numbers[request, :, 1]

    def forget() -> None:
        reported.clamp_(max=length)

    change.launch(forget)
    for layer, _ in places:
        cache._set_lengths(change, [request], layer, np.array([length]))
