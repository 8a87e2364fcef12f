"""Settling: from importance or age to the tier of every token, under the bytes of a scope.

A scope is what shares one sum of bytes: a request in a layer (fraction) or all requests of a layer (absolute).
By importance each head has its own part of them, as much per token as the others: heads differ in the size of q, k and
v, so that the mass of one says nothing beside that of another.
Sink and recent tokens stay at the model's precision as long as they are; what was quantised before may only get
cheaper. With hysteresis h a quantised token counts 1 + h times its weight, so that a small change of importance does
not re-encode it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from kvstrata.cache.storage.page_table import DROP, Tokens

from . import assign as allocate
from .importance import estimate

POLICIES = ("importance", "recency", "uniform")
TIE = 1e-3  # of a weight, over the length of the context: among equals the newer one is worth more
TOGETHER = 1 << 24  # head caches times positions that are planned in one go: 16 bytes each
SEARCHED = 1 << 12  # head caches likewise: some 40 KB each
FLOOR = 0.2  # of the mean weight of a head's tokens, added to each: what was not asked for yet may be tomorrow


@dataclass(frozen=True)
class Policy:
    name: str
    mode: str  # of the importance
    per_head: bool
    evict: bool
    recent_tokens: int
    sink_tokens: int
    hysteresis: float
    settle_every: int
    prices: allocate.Prices
    error: tuple[float, ...]
    leave_plain: bool = False  # old tokens leave 16 bit when a scope settles, also where bytes are left for some


@dataclass(frozen=True)
class Scopes:
    """Tokens that share bytes of pages; the head caches of a scope are neighbours, its tokens need not be.

    ``numbers``: int64 ``[3, head_caches]``, lengths, queries and lengths reported. ``head_caches`` (how many),
    ``allowed`` bytes and the ``longest`` of the lengths are per scope, on the host.
    """

    tokens: Tokens
    numbers: torch.Tensor
    kv_heads: int
    head_caches: tuple[int, ...]
    allowed: tuple[int, ...]
    longest: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.head_caches)

    @property
    def length(self) -> torch.Tensor:
        return self.numbers[0]

    def split(self, ends: Sequence[int]) -> Iterator[tuple[Scopes, torch.Tensor | slice]]:
        """Parts that end before these scopes, and where their tokens are."""
        if list(ends) == [len(self)]:
            yield self, slice(None)
            return
        edges = list(accumulate(self.head_caches, initial=0))
        bounds = torch.tensor([edges[end] for end in ends]).to(self.tokens.head_cache.device)
        part, order = torch.sort(torch.bucketize(self.tokens.head_cache, bounds, right=True), stable=True)
        sizes = torch.searchsorted(part, torch.arange(len(ends), device=part.device), right=True).tolist()
        for begin, end, at in zip([0, *ends], ends, (slice(*x) for x in pairwise([0, *sizes])), strict=False):
            first, last = edges[begin], edges[end]
            tokens = self.tokens[order[at]]
            tokens = replace(tokens, head_cache=tokens.head_cache - first)
            head_caches, allowed, longest = (x[begin:end] for x in (self.head_caches, self.allowed, self.longest))
            yield Scopes(tokens, self.numbers[:, first:last], self.kv_heads, head_caches, allowed, longest), order[at]


@dataclass(frozen=True)
class Plan:
    """Targets ``[n]``; ``needed`` is set when even the cheapest assignment takes more than is allowed.

    ``spare``: so many more plain tokens per head cache have room.
    """

    target: torch.Tensor
    needed: int | None = None
    spare: int = 0


@dataclass(frozen=True)
class Plans:
    """The same of several scopes: targets of all tokens, and a list of each of the others."""

    target: torch.Tensor
    needed: list[int | None]
    spare: list[int]


def whole_pages(settle_every: int, kept: int, page_tokens: int) -> int:
    """Room for about ``settle_every`` tokens beside those that stay plain, so that together they fill their pages.

    At least half and at most twice as much; ``settle_every`` itself where no number of pages gives that.
    """
    room = (kept + settle_every) // page_tokens * page_tokens - kept
    if 2 * room < settle_every:
        room += page_tokens
    return room if room <= 2 * settle_every else settle_every


def _movable(scope: Scopes, policy: Policy) -> torch.Tensor:
    """Tokens that may settle: not sink and recent ones, as long as these are plain."""
    tokens, length = scope.tokens, scope.length[scope.tokens.head_cache]
    recent = (tokens.position < policy.sink_tokens) | (tokens.position >= length - policy.recent_tokens)
    return ~((tokens.tier <= 0) & recent)


def _widest_tiers(scope: Scopes, policy: Policy, movable: torch.Tensor) -> torch.Tensor:
    """The widest tier that each token may have after settling."""
    return torch.where(movable & policy.leave_plain, scope.tokens.tier.clamp(min=1), scope.tokens.tier.clamp(min=0))


def _weights(scope: Scopes, policy: Policy, movable: torch.Tensor) -> torch.Tensor:
    """What an error in each token counts, float64, positive, no two positions of a head cache alike."""
    tokens = scope.tokens
    length, queries, reported = scope.numbers[:, tokens.head_cache]
    age = (length - tokens.position).double()
    if policy.name != "importance":
        return 1 / age
    weight = estimate(policy.mode, tokens.importance, tokens.position, length, queries, reported).double()
    mean = _sums(weight * movable, scope) / allocate.count(tokens.head_cache, len(scope.length), movable).clamp(min=1)
    weight = weight / mean.clamp(min=torch.finfo(torch.float32).tiny)[tokens.head_cache] + FLOOR
    if not policy.per_head:
        table = _table(weight, scope, max(scope.longest)).unflatten(0, (-1, scope.kv_heads))
        weight = table.sum(1)[tokens.head_cache // scope.kv_heads, tokens.position]
    weight = weight * (1 + TIE * tokens.position.double() / length)
    return torch.where(tokens.tier > 0, weight * (1 + policy.hysteresis), weight)


def _table(x: torch.Tensor, scope: Scopes, width: int) -> torch.Tensor:
    """A number of every token by head cache and position. Summed so: on a GPU a sum by index would add in any order."""
    table = torch.zeros(len(scope.length), width, dtype=x.dtype, device=x.device)
    table[scope.tokens.head_cache, scope.tokens.position] = x
    return table


def _sums(x: torch.Tensor, scope: Scopes) -> torch.Tensor:
    """Sum over the tokens of each head cache; a pairwise tree sum, so the result does not depend on its neighbours."""
    width = 1 << (max(scope.longest) - 1).bit_length()
    table = _table(x, scope, width)
    while width > 1:
        width //= 2
        table = table[:, :width] + table[:, width:]
    return table[:, 0]


def _fill(
    target: torch.Tensor,
    current: torch.Tensor,
    movable: torch.Tensor,
    weight: torch.Tensor,
    scope: Scopes,
    policy: Policy,
    spare: torch.Tensor,
) -> torch.Tensor:
    """Slots that are paid for and empty go to the weightiest tokens of lower tiers; no page is taken by it."""
    prices, head_caches = policy.prices, len(scope.length)
    order = torch.sort((scope.tokens.head_cache + 1 << allocate.BITS) - allocate.rank(weight), stable=True).indices
    head_cache, movable, current, found = (x[order] for x in (scope.tokens.head_cache, movable, current, target))
    first = torch.searchsorted(head_cache, torch.arange(head_caches, device=head_cache.device))
    for tier in range(len(prices.page) - 1):
        counts = allocate.count(head_cache, head_caches, found == tier) + (spare if tier == 0 else 0)
        able = (movable & (found > tier) & (current <= tier)).long()
        upto = able.cumsum(0)
        before = torch.cat([upto - able, upto[-1:]])  # candidates of earlier head_caches, and of this one
        end = before[first] + -counts % prices.page_tokens  # of those that find a free slot
        found = torch.where((able > 0) & (before[:-1] < end[head_cache]), tier, found)
    return target.index_copy(0, order, found)


def plan(scope: Scopes, policy: Policy, headroom: int) -> Plan:
    """The least bad assignment by one number for all of the scope, with room for as many as ``headroom`` more plain
    tokens per head cache: of recency, of one choice for all heads, and of eviction.

    Less headroom is left where it does not fit. Nothing is changed here.
    """
    tokens, prices = scope.tokens, policy.prices
    [allowed] = scope.allowed
    current = tokens.tier.clamp(min=0)
    if len(tokens) == 0:
        return Plan(current, spare=headroom)
    head_caches = len(scope.length)
    movable = _movable(scope, policy)
    widest = _widest_tiers(scope, policy, movable)
    weight = _weights(scope, policy, movable)
    spare = headroom

    def fits(target: torch.Tensor) -> bool:
        return prices.total(prices.counts(tokens.head_cache, target, head_caches), spare) <= allowed

    if fits(current):
        return Plan(current, spare=spare)
    wanted: allocate.Family
    if policy.name == "uniform":
        low, high = 0.0, len(prices.page) - 1.0
        wanted = allocate.by_age(_age(scope), len(prices.page))
    elif bool(movable.any()):
        cost = [price / prices.page_tokens for price in prices.page]
        within, least, most = allocate.by_weight(weight[movable], cost, policy.error)
        low, high = float(weight[movable].min()) * least, float(weight[movable].max()) * most

        def wanted(x: float) -> torch.Tensor:
            return torch.zeros_like(current).masked_scatter(movable, within(x))
    else:
        low, high = 0.0, 1.0

        def wanted(x: float) -> torch.Tensor:
            return current

    def family(x: float) -> torch.Tensor:
        return torch.where(movable, torch.maximum(widest, wanted(x)), current)

    def search(kind: allocate.Family, low: float, high: float) -> torch.Tensor | None:
        nonlocal spare
        spare = headroom
        while (target := allocate.cheapest(kind, fits, low, high)) is None and spare:
            spare //= 2
            if fits(current):
                return current
        return target

    target = search(family, low, high)
    if target is None and policy.evict:
        lowest = family(high)
        # Equal over the heads where they choose alike, so that they go together; else one by one.
        rank = weight if not policy.per_head else torch.empty_like(weight)
        if policy.per_head:
            order = torch.sort(weight, stable=True).indices
            rank[order] = torch.arange(1, len(weight) + 1, device=weight.device).double()

        def evicted(x: float) -> torch.Tensor:
            return torch.where(movable & (rank <= x), DROP, lowest)

        target = search(evicted, float(rank.min()) / 2, float(rank.max()))
    if target is not None:
        if policy.name == "importance" and policy.per_head:
            target = _fill(target, current, movable, weight, scope, policy, torch.full_like(scope.length, spare))
        return Plan(target, spare=spare)
    spare = 0
    return Plan(current, prices.total(prices.counts(tokens.head_cache, family(high), head_caches)))


def plan_all(scopes: Scopes, policy: Policy, headroom: int) -> Plans:
    """The plans of many scopes, in one search where it can be: what a scope gets does not depend on the others."""
    alone = policy.name == "recency" or (policy.name == "importance" and not policy.per_head)
    made = Plans(torch.empty_like(scopes.tokens.tier), [], [])
    for some, at in scopes.split(_batches(scopes, alone)):
        if alone:
            one = plan(some, policy, headroom)
            found = Plans(one.target, [one.needed], [one.spare])
        else:
            found = _together(some, policy, headroom)
        made.target[at] = found.target
        made.needed.extend(found.needed)
        made.spare.extend(found.spare)
    return made


def _batches(scopes: Scopes, alone: bool) -> list[int]:
    """Where the scopes end that are planned in one go."""
    ends: list[int] = []
    head_caches = longest = 0
    for i in range(len(scopes)):
        head_caches, longest = head_caches + scopes.head_caches[i], max(longest, scopes.longest[i])
        if i and (alone or head_caches > SEARCHED or head_caches * longest > TOGETHER):
            ends.append(i)
            head_caches, longest = scopes.head_caches[i], scopes.longest[i]
    return [*ends, len(scopes)] if len(scopes) else ends


def _age(scope: Scopes) -> torch.Tensor:
    """From 0, the newest token, to 1."""
    return 1 - (scope.tokens.position.double() + 0.5) / scope.length[scope.tokens.head_cache]


def _together(scopes: Scopes, policy: Policy, headroom: int) -> Plans:
    """By importance a number for every head, which has its own part of the bytes; else one for every scope."""
    tokens, prices, device = scopes.tokens, policy.prices, scopes.length.device
    head_caches, head_cache = len(scopes.length), tokens.head_cache
    of = torch.repeat_interleave(torch.tensor(scopes.head_caches)).to(device)  # the scope of a head cache
    allowed = torch.tensor(scopes.allowed, device=device)
    current, movable = tokens.tier.clamp(min=0), _movable(scopes, policy)
    spare = torch.full_like(allowed, headroom)

    def price(target: torch.Tensor) -> torch.Tensor:
        return prices.each(prices.counts(head_cache, target, head_caches), spare[of])

    def summed(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(allowed).index_add_(0, of, x)

    used = allocate.count(head_cache, head_caches)
    target, pending = current, (summed(price(current)) > allowed) & (summed(used) > 0)
    if bool(pending.any()) and len(at := movable.nonzero().flatten()):
        by_head = policy.name == "importance"
        widest = _widest_tiers(scopes, policy, movable)
        if by_head:
            weight = _weights(scopes, policy, movable)
            columns = len(prices.page)
            ranked = allocate.Ranked(allocate.rank(weight[at]), head_cache[at], widest[at], prices, policy.error)
            fixed = prices.counts(head_cache, torch.where(movable, DROP, current), head_caches)
            least = current.index_copy(0, at, ranked.lowest())
        else:
            part, aged = of[head_cache[at]], allocate.by_age(_age(scopes)[at], len(prices.page))
            least = torch.where(movable, len(prices.page) - 1, current)

            def family(x: torch.Tensor) -> torch.Tensor:
                return torch.maximum(widest, torch.zeros_like(current).index_copy(0, at, aged(x[part])))

        count = allocate.count(head_cache[at], head_caches)
        while bool(pending.any()):
            lowest = price(least)
            room = allowed - summed(lowest)
            solved = pending & (room >= 0)
            if bool(solved.any()):
                if by_head:
                    share = lowest + room[of] * count // summed(count).clamp(min=1)[of]
                    others = fixed + torch.nn.functional.pad(spare[of, None], (0, columns - 1))
                    found = current.index_copy(0, at, ranked.cheapest_each(others, share))
                else:
                    found = allocate.cheapest_parts(
                        family, lambda x: summed(price(x)), of[head_cache], allowed, len(prices.page) - 1
                    )
                target = torch.where(solved[of][head_cache], found, target)
            pending &= ~solved & (spare > 0)  # without any headroom: below, one by one
            spare = torch.where(pending, spare // 2, spare)
            pending &= summed(price(current)) > allowed
        if by_head:
            target = _fill(target, current, movable, weight, scopes, policy, spare[of])
    fits = (summed(price(target)) <= allowed).tolist()
    needed: list[int | None] = [None] * len(scopes)
    left = spare.tolist()
    if not all(fits):
        target = target.clone()
        for i, (one, its) in enumerate(scopes.split(range(1, len(scopes) + 1))):
            if not fits[i]:
                made = plan(one, policy, headroom)
                target[its], needed[i], left[i] = made.target, made.needed, made.spare
    return Plans(target, needed, left)
