"""Scopes of a cache: requests that share a sum of bytes, and planning and moving their tokens.

    requests ──▶ scopes ──▶ snapshot of their tokens ──▶ plan (plan.py) ──▶ move (apply.py)

A plan changes nothing, so all scopes of an operation are planned before the first token moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.move import apply
from kvstrata.cache.storage.page import NewRows
from kvstrata.cache.storage.tokens import Tokens

from . import settle_cuda
from .balance import directions_of
from .budget import BudgetExceeded
from .centre import fix_centres
from .plan import Scopes
from .plan_op import plan_all
from .room import fits_each, fits_plain

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction

Place = tuple[int, list[int]]  # a layer and the requests of a scope


def scopes_of(cache: CacheState, requests: Sequence[int]) -> list[list[int]]:
    """Sets of requests that share a sum of bytes with any of the given ones."""
    if not requests:
        return []
    return [sorted(cache._active | set(requests))] if cache.budget.shared else [[r] for r in requests]


def pairs(places: Sequence[Place]) -> tuple[list[int], list[int]]:
    """Layer and request of each (place, request), scope by scope: the order of their buckets."""
    return [layer for layer, scope in places for _ in scope], [request for _, scope in places for request in scope]


def make_scopes(cache: CacheState, places: Sequence[Place], tokens: Tokens, lengths: Sequence[Sequence[int]]) -> Scopes:
    """Scopes of tokens whose requests will have these lengths, with the bytes they share."""
    layers, requests = pairs(places)
    held = np.array([[n for scope in lengths for n in scope]], np.int64)
    numbers = np.concatenate([held, cache.reports.at(requests, layers)]).repeat(cache.kv_heads, 1)
    return Scopes(
        tokens,
        numbers,
        cache.kv_heads,
        tuple(len(scope) * cache.kv_heads for _, scope in places),
        tuple(cache.budget.pages_at([layer for layer, _ in places], [scope[0] for scope in lengths])),
    )


def plan_scopes(
    cache: CacheState, places: Sequence[Place], tokens: Tokens, lengths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Targets for all tokens of places whose requests will have these lengths; raises BudgetExceeded."""
    if cache.budget.amount is None:
        return tokens.tier.clamp(min=0)
    plans = plan_all(make_scopes(cache, places, tokens, lengths), cache.policy, cache.policy.settle_every)
    check_plans(cache, places, lengths, plans.needed)
    return plans.target


def check_plans(
    cache: CacheState, places: Sequence[Place], lengths: Sequence[Sequence[int]], needed: Sequence[int | None]
) -> None:
    """Raise BudgetExceeded for the first place whose tokens do not fit."""
    for (layer, requests), held, least in zip(places, lengths, needed, strict=True):
        if least is not None:
            where = f"for the pages of layer {layer} and requests {requests} ({sum(held)} tokens)"
            allowed = cache.budget.pages(held[0], layer)
            raise BudgetExceeded(where, least, allowed, cache.budget.advice(least, sum(held)))


def move_tokens(
    cache: CacheState,
    change: Transaction,
    places: Sequence[Place],
    tokens: Tokens,
    target: torch.Tensor,
    fresh: NewRows | None = None,
) -> None:
    """Move all tokens of places to their targets together; new tokens are rows of ``fresh``.

    Tokens move when the transaction completes, so a place may move only once in it.
    """
    layers, requests = pairs(places)
    if requests:
        centre = fix_centres(cache, change, layers, requests, tokens, target, fresh)
        direction = directions_of(cache, layers, requests)
        apply.move(cache.buckets, change, layers, requests, tokens, target, fresh, centre, direction)


def settle_scopes(
    cache: CacheState,
    change: Transaction,
    layers: Sequence[int],
    scopes: list[list[int]],
    room: dict[int, int] | None = None,
) -> list[list[int]]:
    """Settle scopes together; with ``room`` only those that gain it in every layer. Returns which settled."""
    if cache.budget.amount is None or not scopes:
        return []
    places = [(layer, scope) for layer in layers for scope in scopes]
    lengths = [[int(cache._lengths[r, layer]) for r in scope] for layer, scope in places]
    plans = plan_tokens(cache, places, lengths)
    if room is not None:
        wanted = [max(room.get(r, 0) for r in scope) for _, scope in places]
        fits = [
            needed is None and spare >= n for needed, spare, n in zip(plans.needed, plans.spare, wanted, strict=True)
        ]
        able = [scope for i, scope in enumerate(scopes) if all(fits[i :: len(scopes)])]
        if len(able) < len(scopes):  # the plan of a scope does not depend on the others
            return settle_scopes(cache, change, layers, able, room) if able else []
    check_plans(cache, places, lengths, plans.needed)
    plans.move(change)
    return scopes


@dataclass(frozen=True)
class TokenPlans:
    """Plans for the tokens of places, not executed yet."""

    needed: list[int | None]
    spare: list[int]
    move: Callable[[Transaction], object]


def plan_tokens(cache: CacheState, places: Sequence[Place], lengths: Sequence[Sequence[int]]) -> TokenPlans:
    """Plan the existing tokens of places for these lengths: with kernels on a CUDA device, else with a token list."""
    if settle_cuda.supports(cache):
        planned = settle_cuda.plan(cache, places, lengths)
        return TokenPlans(planned.needed, planned.spare, partial(settle_cuda.move, cache, planned=planned))
    tokens = cache.buckets.snapshots(*pairs(places))
    plans = plan_all(make_scopes(cache, places, tokens, lengths), cache.policy, cache.policy.settle_every)
    move = partial(move_tokens, cache, places=places, tokens=tokens, target=plans.target)
    return TokenPlans(plans.needed, plans.spare, move)


def settle_ahead(cache: CacheState, change: Transaction, layer: int, requests: list[int], lengths: list[int]) -> bool:
    """Make room in all layers at once when one needs it, since a step of a model brings all layers to the same length.

    One search for all costs little more than for one. Only requests without room settle, so when a request settles does
    not depend on the others. If no room is found, the search is not repeated for a while. Requests that settled have
    room; if others have none, only those are left to plan.
    """
    if cache.layers == 1 or cache.policy.name != "importance" or not cache.policy.per_head:
        return False
    room, most = dict(zip(requests, lengths, strict=True)), cache.policy.settle_every  # a plan makes no more room
    if cache.budget.shared:
        if not cache._active.issuperset(requests) or max(lengths) > most:
            return False
    else:
        fits = fits_each(cache, layer, requests, lengths)
        short = [(r, n) for (r, n), fit in zip(room.items(), fits, strict=True) if not fit and r in cache._active]
        room = {r: n for r, n in short if n <= most}
    waiting = {r for r in room if cache._lengths[r, layer] < cache._ahead_from[r]}
    scopes = [scope for scope in scopes_of(cache, list(room)) if waiting.isdisjoint(scope)]
    if not scopes:
        return False
    settled = settle_scopes(cache, change, range(cache.layers), scopes, room)
    failed = [r for scope in scopes if scope not in settled for r in scope if r in room]
    change.set(cache._ahead_from, failed, cache._lengths[failed, layer] + cache.policy.settle_every)
    return bool(settled) and fits_plain(cache, layer, requests, lengths)
