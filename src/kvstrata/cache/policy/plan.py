"""The planner: assigns a tier to every token, so that the pages of a scope fit its bytes with the least expected error.

    tokens ──keys──▶ survey: tokens per tier that stay, that may move ──split──▶ bytes per head ──choose──▶ targets

A scope is a set of requests that share a sum of bytes: one request in a layer (fraction) or all requests of a layer
(absolute). `split` gives each of its head caches the bytes of its cheapest assignment, and part of the rest in
proportion to its tokens. From there on every head cache is planned separately: heads differ in the size of q, k and v,
so their masses are not comparable.

Within a head cache, tokens minimise sum(weight * error) + price * bytes for the lowest price (a Lagrange multiplier)
that fits. A token's `key` is its weight as an integer, the bits of a float32; the price is also bisected as such an
integer, with the exact bytes of whole pages, so that every device chooses the same tiers. `uniform` uses the same
search over ages. Empty slots that are paid for are filled with the tokens of greatest weight from lower tiers. The
search takes
that into account: the tier at a given price decreases with the weight, so counts alone say how many tokens leave which
tier.

Sink and recent tokens stay at the model's precision as long as they have it; quantised tokens may only move to cheaper
tiers. With hysteresis h a quantised token counts 1 + h times its weight, so that a small change of importance does not
re-encode it.

plan_reference.py is the definition, plan_numba.py has loops for the CPU, plan.cu kernels; plan_op.py dispatches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.cache.storage.tokens import Tokens

from .prices import Prices, hull

POLICIES = ("importance", "recency", "uniform")
FLOOR = 0.2  # fraction of a head's mean weight added to each token: one without attention so far may get some later
TIE = 1e-3  # relative weight, over the length of the context: of two equal tokens the newer one is worth more
LARGEST = 64.0  # cap on mass per query; more than a query of 64 heads can give
MASS_BITS = 37  # fraction bits of mass summed as integers
AGE_BITS = 24  # fraction bits of a key under `uniform`
GAP = 64  # the bisection ends when its bounds are this close: 8 millionths of a weight
FIXED = 0x7FFFFFFF  # key of a token that may not move: above all others
KEEP, CHOOSE, EVICT, FAIL = range(4)  # outcome of `split` for a scope


@dataclass(frozen=True)
class Policy:
    """Settings of a cache that decide how it settles."""

    name: str
    mode: str  # mode of importance
    per_head: bool
    evict: bool
    recent_tokens: int
    sink_tokens: int
    hysteresis: float
    settle_every: int
    prices: Prices
    error: tuple[float, ...]
    floor: float = FLOOR
    leave_plain: bool = False  # old tokens leave 16 bit when a scope settles, even if bytes are left for some

    @functools.cached_property
    def ladder(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tiers after 0, 1, .. steps down, and the slope of each step: weights below ``price / slope`` take it."""
        if self.name == "uniform":
            return tuple(range(len(self.prices.page))), (1.0,) * (len(self.prices.page) - 1)
        tiers, slopes = hull([page / self.prices.page_tokens for page in self.prices.page], self.error)
        steep = np.maximum(np.array(slopes, np.float64), 1e-30)
        relative = np.maximum.accumulate(steep / steep[:1]).astype(np.float32)
        return tuple(tiers), tuple(relative.tolist())

    @property
    def steepest(self) -> float:
        return self.ladder[1][-1] if self.ladder[1] else 1.0

    @property
    def fills(self) -> bool:
        """True if empty slots of pages that are already paid for are filled."""
        return self.name == "importance" and self.per_head


@dataclass(frozen=True)
class Scopes:
    """Tokens that share bytes of pages; the head caches of a scope are contiguous.

    ``numbers``: int64 ``[3, head_caches]`` on the host: lengths, queries, and lengths at the last report of mass.
    ``head_caches`` (their number) and ``allowed`` bytes are per scope.
    """

    tokens: Tokens
    numbers: np.ndarray
    kv_heads: int
    head_caches: tuple[int, ...]
    allowed: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.head_caches)


@dataclass(frozen=True)
class Plans:
    """Targets of all tokens, and the outcome per scope.

    ``needed`` is the bytes of the cheapest assignment if even that exceeds the allowance, else None; ``spare`` is the
    number of further plain tokens per head cache that fit.
    """

    target: torch.Tensor
    needed: list[int | None]
    spare: list[int]


@dataclass(frozen=True)
class Split:
    """Action of each scope (KEEP, ..) and byte share of each head cache."""

    kind: np.ndarray  # [scopes]
    spare: np.ndarray  # [scopes]
    needed: np.ndarray  # [scopes], bytes of the cheapest assignment
    share: np.ndarray  # [head_caches]


def whole_pages(settle_every: int, kept: int, page_tokens: int) -> int:
    """Room for about ``settle_every`` tokens in addition to plain ones, so that together they fill whole pages.

    At least half and at most twice ``settle_every``; ``settle_every`` itself if no number of pages allows that.
    """
    room = (kept + settle_every) // page_tokens * page_tokens - kept
    if 2 * room < settle_every:
        room += page_tokens
    return room if room <= 2 * settle_every else settle_every


def split(
    fixed: np.ndarray, moving: np.ndarray, head_caches: np.ndarray, allowed: np.ndarray, policy: Policy, headroom: int
) -> Split:
    """Divide the bytes of scopes between their head caches.

    Args:
        fixed, moving: int ``[head_caches, tiers]``, tokens that stay and tokens that may move, by their tier now.
        head_caches: ``[scopes]``, number of head caches.
        allowed: ``[scopes]``, bytes.
        policy: provides prices, ladder and ``evict``.
        headroom: plain tokens per head cache to leave room for; halved until they fit.
    """
    prices, lowest = policy.prices, policy.ladder[0][-1]
    scope = np.repeat(np.arange(len(head_caches)), head_caches)
    spare = np.full(len(head_caches), headroom, np.int64)
    kind = np.full(len(head_caches), FAIL)
    share = np.zeros(len(scope), np.int64)
    least = fixed.copy()
    for tier in range(fixed.shape[1]):
        least[:, max(tier, lowest)] += moving[:, tier]
    many = moving.sum(1).astype(np.int64)

    def of_scope(x: np.ndarray) -> np.ndarray:
        return np.bincount(scope, x, len(head_caches)).astype(np.int64)

    def give(chosen: np.ndarray, price: np.ndarray, total: np.ndarray) -> None:
        """Divide the bytes beyond ``price`` between head caches in proportion to their tokens that may move."""
        room = ((allowed - total)[scope] * many) // np.maximum(of_scope(many), 1)[scope]
        share[chosen[scope]] = (price + room)[chosen[scope]]

    needed = of_scope(prices.each(least))
    pending = of_scope(fixed.sum(1) + many) > 0
    kind[~pending] = KEEP
    for choice, counts in ((CHOOSE, least), (EVICT, fixed)):
        if choice == EVICT and not policy.evict:
            break
        spare[pending] = headroom
        trying = pending.copy()
        while trying.any():
            price = prices.each(counts, spare[scope])
            total = of_scope(price)
            keeps = trying & (of_scope(prices.each(fixed + moving, spare[scope])) <= allowed)
            kind[keeps] = KEEP
            solved = trying & ~keeps & (total <= allowed)
            kind[solved] = choice
            give(solved, price, total)
            pending &= ~(keeps | solved)
            trying = pending & (spare > 0) & trying
            spare[trying] //= 2
    return Split(kind, spare, needed, share)
