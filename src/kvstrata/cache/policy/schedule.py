"""Schedule of settling: which layers of which requests settle before their next token, spread evenly over steps.

    length % period   0 .. 7      8 .. 14     ..                        period = room that settling makes
    layers            first part  second part ..

A place, a request in a layer, settles in its turn if it lacks room until the next turn, and at any time if the next
token has no room. Turns depend only on the request's own length: the tiers of a request are the same in any batch.
Requests of equal length settle one part of their layers at a time, requests of different lengths settle at
different steps; both spread the work over the period.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .room import fits_plain

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState

PARTS = 8  # parts that layers are divided into: more cost launches, fewer make longer steps


@lru_cache(maxsize=64)
def phases(layers: int, period: int) -> np.ndarray:
    """Length modulo the period at which each layer has its turn, ``[layers]``."""
    parts = min(layers, PARTS, period)
    return np.arange(layers) * parts // layers * period // parts


def due(cache: CacheState, ids: np.ndarray) -> np.ndarray | None:
    """True for places that settle before one more token of each of these requests: ``[requests, layers]``.

    None if there is no such place.
    """
    if cache.budget.amount is None:
        return None
    period = cache.policy.settle_every
    turn = (cache._lengths[ids] + 1) % period == phases(cache.layers, period)
    short = cache.buckets.short(ids)
    if short is None and not turn.any():
        return None
    edge = np.zeros_like(turn)
    if short is not None:
        edge[short.rows] = short.layers
    if cache.budget.shared:
        return _due_together(cache, ids, turn, edge)
    row, layer = np.nonzero(turn | edge)
    wanted = np.zeros_like(turn)
    wanted[row, layer] = _lacks_room(cache, ids[row], layer, np.where(turn[row, layer], period, 1))
    return wanted if wanted.any() else None


def _lacks_room(cache: CacheState, requests: np.ndarray, layers: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """True for places whose budget does not pay for ``tokens`` more plain tokens at some point on the way."""
    p, prices, budget = cache.page_tokens, np.array(cache.policy.prices.page, np.int64), cache.budget
    counts = cache.buckets.host_count[requests, layers].astype(np.int64)  # [n, heads, tiers]
    coded = (-(-counts[:, :, 1:] // p) @ prices[1:]).sum(1)
    last = cache.max_tokens + budget.look_ahead  # beyond max_tokens, so that larger tables give the same turns
    lengths, lacks = cache._lengths[requests, layers].astype(np.int64), np.zeros(len(requests), bool)
    # Bytes grow when a head takes a page; the allowance grows with every token, so it suffices to check there.
    for plain in counts[:, :, 0].T:
        for new in range(int(tokens.max(initial=0)) // p + 1):
            ahead = -plain % p + 1 + new * p
            pages = -(-(counts[:, :, 0] + ahead[:, None]) // p)
            needed = coded + pages.sum(1) * prices[0]
            allowed = budget.granted_at(layers, np.minimum(lengths + ahead, last)) - budget.overhead
            lacks |= (ahead <= tokens) & (needed > allowed)
        if (counts[:, :, 0] == plain[:, None]).all():  # the usual case: all heads have equally many plain tokens
            break
    return lacks


def _due_together(cache: CacheState, ids: np.ndarray, turn: np.ndarray, edge: np.ndarray) -> np.ndarray | None:
    """`due` under a budget in bytes, which all requests of a layer share: a layer settles for all or for none."""
    wanted, given = np.zeros_like(turn), ids.tolist()
    for layer in np.flatnonzero(edge.any(0) | turn[0]).tolist():
        ahead = cache.policy.settle_every if turn[0, layer] else 1
        wanted[:, layer] = not fits_plain(cache, layer, given, [ahead] * len(given))
    return wanted if wanted.any() else None
