"""Scopes of a cache: which requests share a sum of bytes, what is planned for them, and the plan carried out.

    requests ──▶ scopes ──▶ snapshot of their tokens ──▶ plan (plan.py) ──▶ move (apply.py)

A plan changes nothing, so that all scopes of an operation are planned before the first token moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.move import apply
from kvstrata.cache.storage.page import Rows
from kvstrata.cache.storage.tokens import Tokens

from .budget import BudgetExceeded
from .centre import fix_centres
from .plan import Plans, Scopes
from .plan_op import plan_all
from .room import fits_each, fits_plain

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction

Place = tuple[int, list[int]]  # a layer and the requests of a scope


def scopes_of(cache: CacheState, requests: Sequence[int]) -> list[list[int]]:
    """Requests that share a sum of bytes, if any of the given is among them."""
    if not requests:
        return []
    return [sorted(cache._active | set(requests))] if cache.budget.shared else [[r] for r in requests]


def pairs(places: Sequence[Place]) -> tuple[list[int], list[int]]:
    """Layers and requests of places, scope by scope: what the buckets of their tokens count."""
    return [layer for layer, scope in places for _ in scope], [request for _, scope in places for request in scope]


def make_scopes(cache: CacheState, places: Sequence[Place], tokens: Tokens, lengths: Sequence[Sequence[int]]) -> Scopes:
    """Tokens of requests that will have these lengths, with the bytes they share."""
    layers, requests = pairs(places)
    numbers = np.stack(
        [np.array([n for some in lengths for n in some], np.int64)]
        + [x[requests, layers].astype(np.int64) for x in (cache._queries, cache._reported)]
    ).repeat(cache.kv_heads, 1)
    allowed = {n: cache.budget.pages(n) for n in {some[0] for some in lengths}}
    return Scopes(
        tokens,
        numbers,
        cache.kv_heads,
        tuple(len(scope) * cache.kv_heads for _, scope in places),
        tuple(allowed[some[0]] for some in lengths),
    )


def plan_scopes(
    cache: CacheState, places: Sequence[Place], tokens: Tokens, lengths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Targets for all tokens of places whose requests will have these lengths; or BudgetExceeded."""
    if cache.budget.amount is None:
        return tokens.tier.clamp(min=0)
    scopes = make_scopes(cache, places, tokens, lengths)
    made = plan_all(scopes, cache.policy, cache.policy.settle_every)
    check_plans(cache, places, lengths, scopes, made)
    return made.target


def check_plans(
    cache: CacheState, places: Sequence[Place], lengths: Sequence[Sequence[int]], scopes: Scopes, made: Plans
) -> None:
    """BudgetExceeded for the first place whose tokens do not fit."""
    for (layer, requests), some, allowed, needed in zip(places, lengths, scopes.allowed, made.needed, strict=True):
        if needed is not None:
            where = f"for the pages of layer {layer} and requests {requests} ({sum(some)} tokens)"
            raise BudgetExceeded(where, needed, allowed, cache.budget.advice(needed, sum(some)))


def move_tokens(
    cache: CacheState,
    change: Transaction,
    places: Sequence[Place],
    tokens: Tokens,
    target: torch.Tensor,
    fresh: Rows | None = None,
) -> None:
    """All tokens of places to their targets, in one go; new tokens are rows of ``fresh``.

    The tokens move when the transaction completes, so a place may move once in it.
    """
    layers, requests = pairs(places)
    if requests:
        centre = fix_centres(cache, change, layers, requests, tokens, target, fresh)
        apply.move(cache.buckets, change, layers, requests, tokens, target, fresh, centre)


def settle_scopes(
    cache: CacheState,
    change: Transaction,
    layers: Sequence[int],
    scopes: list[list[int]],
    room: dict[int, int] | None = None,
) -> list[list[int]]:
    """All in one go; with ``room`` those whose requests get it for so many tokens in every layer. Returns which did."""
    if cache.budget.amount is None or not scopes:
        return []
    places = [(at, scope) for at in layers for scope in scopes]
    lengths = [[int(cache._lengths[r, at]) for r in scope] for at, scope in places]
    scopes_ = make_scopes(cache, places, cache.buckets.snapshots(*pairs(places)), lengths)
    made = plan_all(scopes_, cache.policy, cache.policy.settle_every)
    if room is not None:
        wanted = [max(room.get(r, 0) for r in scope) for _, scope in places]
        found = [
            needed is None and spare >= n for needed, spare, n in zip(made.needed, made.spare, wanted, strict=True)
        ]
        able = [scope for i, scope in enumerate(scopes) if all(found[i :: len(scopes)])]
        if len(able) < len(scopes):  # what they get does not depend on the others
            return settle_scopes(cache, change, layers, able, room) if able else []
    check_plans(cache, places, lengths, scopes_, made)
    move_tokens(cache, change, places, scopes_.tokens, made.target)
    return scopes


def settle_ahead(cache: CacheState, change: Transaction, layer: int, requests: list[int], lengths: list[int]) -> bool:
    """Make room in all layers at once when one needs it: a step of a model brings them all to the same point.

    One search for all costs little more than for one. Only requests that have no room settle: when one does, does
    not depend on the others. Where no room is found, it is not tried again for a while. Those that settled have room:
    if others have none, only these are left to plan.
    """
    if cache.layers == 1 or cache.policy.name != "importance" or not cache.policy.per_head:
        return False
    room = dict(zip(requests, lengths, strict=True))
    if cache.budget.shared:
        if not cache._active.issuperset(requests):
            return False
    else:
        fits = fits_each(cache, layer, requests, lengths)
        room = {r: n for (r, n), fit in zip(room.items(), fits, strict=True) if not fit and r in cache._active}
    waiting = {r for r in room if cache._lengths[r, layer] < cache._ahead_from[r]}
    scopes = [scope for scope in scopes_of(cache, list(room)) if waiting.isdisjoint(scope)]
    if not scopes:
        return False
    settled = settle_scopes(cache, change, range(cache.layers), scopes, room)
    failed = [r for scope in scopes if scope not in settled for r in scope if r in room]
    change.set(cache._ahead_from, failed, cache._lengths[failed, layer] + cache.policy.settle_every)
    return bool(settled) and fits_plain(cache, layer, requests, lengths)
