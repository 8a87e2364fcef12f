"""Scopes of a cache: which requests share a sum of bytes, what is planned for them, and the plan carried out.

    requests ──▶ scopes ──▶ snapshot of their tokens ──▶ plan (settle.py) ──▶ move (buckets.py)

A plan changes nothing, so that all scopes of an operation are planned before the first token moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from .budget import BudgetExceeded
from .centre import fix_centres
from .pages import Rows
from .room import fits_each, fits_plain, tidy
from .settle import Plan, Scope, plan_all
from .tokens import Tokens

if TYPE_CHECKING:
    from .cache import TieredCache

Place = tuple[int, list[int]]  # a layer and the requests of a scope
Targets = tuple[int, list[int], Tokens, torch.Tensor]  # layer, requests, their tokens, the tier each goes to


def scopes_of(cache: TieredCache, requests: Sequence[int]) -> list[list[int]]:
    """Requests that share a sum of bytes, if any of the given is among them."""
    if not requests:
        return []
    return [sorted(cache._active | set(requests))] if cache.budget.shared else [[r] for r in requests]


def snapshots(cache: TieredCache, places: Sequence[Place]) -> list[Tokens]:
    """The tokens of each place."""
    if all(len(scope) == 1 for _, scope in places):
        return cache.buckets.snapshots([layer for layer, _ in places], [request for _, [request] in places])
    return [cache.buckets.snapshot(*place) for place in places]


def make_scopes(
    cache: TieredCache, places: Sequence[Place], tokens: Sequence[Tokens], lengths: Sequence[Sequence[int]]
) -> list[Scope]:
    """Tokens of requests that will have these lengths, with the bytes they share."""
    requests = [request for _, scope in places for request in scope]
    layers = [layer for layer, scope in places for _ in scope]
    numbers = np.stack(
        [np.array([n for some in lengths for n in some], np.int64)]
        + [x[requests, layers].astype(np.int64) for x in (cache._queries, cache._reported)]
    ).repeat(cache.kv_heads, 1)
    each = [len(scope) * cache.kv_heads for _, scope in places]
    parts = cache.pool.to_device(numbers).split(each, 1)
    allowed = {n: cache.budget.pages(n) for n in {some[0] for some in lengths}}
    return [
        Scope(its, part[0], part[1], part[2], cache.kv_heads, allowed[some[0]], max(some))
        for its, part, some in zip(tokens, parts, lengths, strict=True)
    ]


def plan_scopes(
    cache: TieredCache, places: Sequence[Place], tokens: Sequence[Tokens], lengths: Sequence[list[int]]
) -> list[Targets]:
    """Targets for all tokens of scopes, each a layer and requests that will have these lengths; or BudgetExceeded."""
    if cache.budget.amount is None:
        return [(*place, its, its.tier.clamp(min=0)) for place, its in zip(places, tokens, strict=True)]
    scopes = make_scopes(cache, places, tokens, lengths)
    plans = plan_all(scopes, cache.policy, cache.policy.settle_every)
    return [_targets(*place, scope, made) for place, scope, made in zip(places, scopes, plans, strict=True)]


def _targets(layer: int, requests: list[int], scope: Scope, made: Plan) -> Targets:
    if made.needed is not None:
        tokens = int(scope.length.sum()) // scope.kv_heads
        where = f"for the pages of layer {layer} and requests {requests} ({tokens} tokens)"
        raise BudgetExceeded(where, made.needed, scope.allowed)
    return layer, requests, scope.tokens, made.target


def move_tokens(cache: TieredCache, jobs: Sequence[Targets], fresh: Rows | None = None) -> None:
    """The targets of several layers and scopes, in one go; new tokens are rows of ``fresh``."""
    layers: list[int] = []
    requests: list[int] = []
    parts, targets = [], []
    fix_centres(cache, jobs, fresh)
    for layer, scope, tokens, target in jobs:
        parts.append(replace(tokens, bucket=tokens.bucket + len(requests) * cache.kv_heads))
        targets.append(target)
        layers += [layer] * len(scope)
        requests += scope
    if requests:
        centre = cache.centre[requests, layers].flatten(0, 1)
        cache.buckets.move(layers, requests, Tokens.cat(parts), torch.cat(targets), fresh, centre)


def settle_scopes(
    cache: TieredCache, layers: Sequence[int], scopes: list[list[int]], room: dict[int, int] | None = None
) -> bool:
    """All of these in one go; with ``room`` only if every request gets it for so many tokens, else False."""
    if cache.budget.amount is None:
        return False
    places = [(at, scope) for at in layers for scope in scopes]
    lengths = [[int(cache._lengths[r, at]) for r in scope] for at, scope in places]
    asked = make_scopes(cache, places, snapshots(cache, places), lengths)
    plans = plan_all(asked, cache.policy, cache.policy.settle_every)
    if room is not None:
        wanted = [max(room.get(r, 0) for r in scope) for _, scope in places]
        if any(made.needed is not None or made.spare < n for made, n in zip(plans, wanted, strict=True)):
            return False
    move_tokens(cache, [_targets(*place, x, made) for place, x, made in zip(places, asked, plans, strict=True)])
    tidy(cache)
    return True


def settle_ahead(cache: TieredCache, layer: int, requests: list[int], lengths: list[int]) -> bool:
    """Make room in all layers at once when one needs it: a step of a model brings them all to the same point.

    One search for all costs little more than for one. Only requests that have no room settle: when one does, does
    not depend on the others. Where no room is found, it is not tried again for a while.
    """
    if len(set(requests)) < len(requests) or not cache._active.issuperset(requests):
        return False
    if cache.layers == 1 or cache.policy.name != "importance" or not cache.policy.per_head:
        return False
    room = dict(zip(requests, lengths, strict=True))
    if not cache.budget.shared:
        fits = fits_each(cache, layer, requests, lengths)
        room = {r: n for (r, n), fit in zip(room.items(), fits, strict=True) if not fit}
    full = list(room)
    if not full or bool((cache._lengths[full, layer] < cache._ahead_from[full]).any()):
        return False
    if not settle_scopes(cache, range(cache.layers), scopes_of(cache, full), room):
        cache._ahead_from[full] = cache._lengths[full, layer] + cache.policy.settle_every
        return False
    return fits_plain(cache, layer, requests, lengths)
