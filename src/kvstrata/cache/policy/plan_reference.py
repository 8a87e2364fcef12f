"""The planner in torch operations over all tokens at once: the definition that loops and kernels must match."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvstrata.cache.storage.tokens import DROP

from .importance import estimate
from .plan import (
    AGE_BITS,
    CHOOSE,
    EVICT,
    FAIL,
    FIXED,
    GAP,
    KEEP,
    LARGEST,
    MASS_BITS,
    TIE,
    Policy,
    Scopes,
    Split,
    split,
)

Fits = Callable[[torch.Tensor], torch.Tensor]


def movable(scopes: Scopes, policy: Policy) -> torch.Tensor:
    """Tokens that may settle: all but sink and recent tokens that are still plain."""
    tokens = scopes.tokens
    length = torch.from_numpy(scopes.numbers[0]).to(tokens.position.device)[tokens.head_cache]
    kept = (tokens.position < policy.sink_tokens) | (tokens.position >= length - policy.recent_tokens)
    return ~((tokens.tier <= 0) & kept)


def count(index: torch.Tensor, n: int) -> torch.Tensor:
    """Number of occurrences of each integer below ``n``."""
    return torch.zeros(n, dtype=torch.int64, device=index.device).scatter_add_(0, index, torch.ones_like(index))


def keys(scopes: Scopes, policy: Policy, moves: torch.Tensor) -> torch.Tensor:
    """Weight of every token as an integer, int64; FIXED for tokens that may not move."""
    tokens = scopes.tokens
    numbers = torch.from_numpy(scopes.numbers).to(tokens.position.device)
    length, queries, reported = numbers[:, tokens.head_cache]
    if policy.name == "uniform":
        key = ((2 * tokens.position + 1) << (AGE_BITS - 1)) // length
    else:
        key = _weights(scopes, policy, moves, length, queries, reported).view(torch.int32).long()
    return torch.where(moves, key, FIXED)


def _weights(
    scopes: Scopes,
    policy: Policy,
    moves: torch.Tensor,
    length: torch.Tensor,
    queries: torch.Tensor,
    reported: torch.Tensor,
) -> torch.Tensor:
    """Weight of an error in each token, float32 and positive; each operation rounds separately."""
    tokens, n = scopes.tokens, scopes.numbers.shape[1]
    if policy.name == "recency":
        return 1.0 / (length - tokens.position).float()
    mass = estimate(policy.mode, tokens.importance, tokens.position, length, queries, reported).clamp(max=LARGEST)
    whole = torch.where(moves, (mass.double() * 2.0**MASS_BITS).long(), 0)
    total = torch.zeros(n, dtype=torch.int64, device=mass.device).scatter_add_(0, tokens.head_cache, whole)
    many = torch.zeros_like(total).scatter_add_(0, tokens.head_cache, moves.long()).clamp(min=1)
    mean = (total.double() / many.double() * 2.0**-MASS_BITS).float().clamp(min=2.0**-MASS_BITS)
    weight = mass / mean[tokens.head_cache] + policy.floor
    if not policy.per_head:
        weight = _summed(weight, scopes)
    weight = weight * (1.0 + TIE * (tokens.position.float() / length.float()))
    return torch.where(tokens.tier > 0, weight * (1.0 + policy.hysteresis), weight)


def _summed(weight: torch.Tensor, scopes: Scopes) -> torch.Tensor:
    """Sum over the heads of a request, by position, head by head."""
    tokens, heads = scopes.tokens, scopes.kv_heads
    table = torch.zeros(
        scopes.numbers.shape[1] // heads, int(scopes.numbers[0].max()), dtype=weight.dtype, device=weight.device
    )
    request, head = tokens.head_cache // heads, tokens.head_cache % heads
    for each in range(heads):
        chosen = head == each
        table[request[chosen], tokens.position[chosen]] += weight[chosen]
    return table[request, tokens.position]


def limits(price: torch.Tensor, policy: Policy) -> torch.Tensor:
    """Keys below which tokens take each step down, for prices ``[n]``: ``[n, steps]``, descending."""
    _, slopes = policy.ladder
    if policy.name == "uniform":
        step = torch.arange(len(slopes), device=price.device) << AGE_BITS
        return (price[:, None] - step).clamp(0, 1 << AGE_BITS)
    slope = torch.tensor(slopes, dtype=torch.float32, device=price.device)
    return (price.int().view(torch.float32)[:, None] / slope).view(torch.int32).long()


def chosen(scopes: Scopes, policy: Policy, headroom: int) -> tuple[torch.Tensor, Split]:
    """Targets of all tokens, and the result of `split`."""
    tokens, tiers, n = scopes.tokens, len(policy.prices.page), scopes.numbers.shape[1]
    device = tokens.head_cache.device
    current, moves = tokens.tier.clamp(min=0), movable(scopes, policy)
    bucket = tokens.head_cache * tiers + current
    fixed, moving = (count(bucket[which], n * tiers).view(n, tiers) for which in (~moves, moves))
    widest = torch.where(moves, current.clamp(min=int(policy.leave_plain)), current)
    parts = split(
        fixed.cpu().numpy(),
        moving.cpu().numpy(),
        np.array(scopes.head_caches),
        np.array(scopes.allowed, np.int64),
        policy,
        headroom,
    )
    scope = np.repeat(np.arange(len(scopes)), scopes.head_caches)
    kind, spare, share = (torch.from_numpy(x).to(device) for x in (parts.kind[scope], parts.spare[scope], parts.share))
    if not len(tokens) or not bool(((kind == CHOOSE) | (kind == EVICT)).any()):
        return current, parts
    key = keys(scopes, policy, moves)
    ladder = torch.tensor(policy.ladder[0], device=device)
    page = torch.tensor(policy.prices.page, device=device)
    plain = torch.zeros(n, tiers, dtype=torch.int64, device=device)
    plain[:, 0] = spare

    def fits(target: torch.Tensor) -> torch.Tensor:
        held = target != DROP
        counts = count((bucket * tiers + target)[held & moves], n * tiers * tiers).view(n, tiers, tiers)
        counts = _counts_filled(counts, fixed + plain, policy)
        return (-(-counts // policy.prices.page_tokens) * page).sum(1) <= share

    def settled(price: torch.Tensor) -> torch.Tensor:
        steps = (key[:, None] < limits(price, policy)[tokens.head_cache]).sum(1)
        return torch.where(moves, torch.maximum(widest, ladder[steps]), current)

    least, most = _bounds(key, moves, tokens.head_cache, n)
    if policy.name == "uniform":
        low, high = torch.zeros_like(least), torch.full_like(most, (tiers - 1) << AGE_BITS)
    else:
        low = least
        high = (most.int().view(torch.float32) * policy.steepest * 2.0).view(torch.int32).long()
    target = settled(_least(low, high, lambda price: fits(settled(price))))
    evicts = kind == EVICT
    if bool(evicts.any()):
        lowest = torch.where(moves, widest.clamp(min=policy.ladder[0][-1]), current)

        def evicted(limit: torch.Tensor) -> torch.Tensor:
            return torch.where(moves & (key <= limit[tokens.head_cache]), DROP, lowest)

        limit = _least(least - 1, most, lambda limit: fits(evicted(limit)))
        target = torch.where(evicts[tokens.head_cache], evicted(limit), target)
    if policy.fills:
        target = _filled(target, current, moves, key, scopes, policy, plain)
    keeps = (kind == KEEP) | (kind == FAIL)
    return torch.where(keeps[tokens.head_cache], current, target), parts


def _counts_filled(moved: torch.Tensor, others: torch.Tensor, policy: Policy) -> torch.Tensor:
    """Tokens per tier ``[head_caches, tiers]`` when empty slots are filled, as `_filled` does.

    ``moved [head_caches, tiers, tiers]`` are tokens that may move, by current tier and target;
    ``others [head_caches, tiers]`` are the rest.
    """
    counts, tiers = others + moved.sum(1), others.shape[1]
    if not policy.fills:
        return counts
    able = moved.cumsum(1)  # per target, tokens in this tier or a wider one
    for tier in range(tiers - 1):
        free = -counts[:, tier] % policy.prices.page_tokens
        for other in range(tier + 1, tiers):
            filled = torch.minimum(free, able[:, tier, other])
            free = free - filled
            counts[:, tier] += filled
            counts[:, other] -= filled
            able[:, tier:, other] -= filled[:, None]
    return counts


def _bounds(key: torch.Tensor, moves: torch.Tensor, head_cache: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """Least and greatest key of the tokens that may move; 1 if there are none."""
    heads = head_cache[moves]
    none = count(heads, n) == 0
    least, most = (
        torch.ones(n, dtype=torch.int64, device=key.device).scatter_reduce(
            0, heads, key[moves], how, include_self=False
        )
        for how in ("amin", "amax")
    )
    return torch.where(none, 1, least), torch.where(none, 1, most)


def _least(low: torch.Tensor, high: torch.Tensor, fits: Fits) -> torch.Tensor:
    """Bisect, for each head cache, the least number that fits; ``high`` fits."""
    first = fits(low)
    high = torch.where(first, low, high)
    while bool((searching := high - low > GAP).any()):
        middle = torch.where(searching, (low + high) // 2, high)
        fit = fits(middle)
        low, high = torch.where(searching & ~fit, middle, low), torch.where(searching & fit, middle, high)
    return high


def _filled(
    target: torch.Tensor,
    current: torch.Tensor,
    moves: torch.Tensor,
    key: torch.Tensor,
    scopes: Scopes,
    policy: Policy,
    plain: torch.Tensor,
) -> torch.Tensor:
    """Fill empty slots of pages with the tokens of greatest weight from lower tiers, newer ones first; adds no page.

    ``plain [head_caches, tiers]`` is the room that stays empty.
    """
    tokens, (n, tiers), p = scopes.tokens, plain.shape, policy.prices.page_tokens
    order = torch.argsort(tokens.position, descending=True, stable=True)
    order = order[torch.argsort(key[order], descending=True, stable=True)]
    order = order[torch.argsort(tokens.head_cache[order], stable=True)]
    head_cache, moves, current, chosen_tier = (x[order] for x in (tokens.head_cache, moves, current, target))
    first = torch.searchsorted(head_cache, torch.arange(n, device=head_cache.device))
    for tier in range(tiers - 1):
        counts = count(head_cache[chosen_tier == tier], n) + plain[:, tier]
        able = (moves & (chosen_tier > tier) & (current <= tier)).long()
        upto = able.cumsum(0)
        before = torch.cat([upto - able, upto[-1:]])  # able tokens before each, over all head caches
        end = before[first] + -counts % p
        chosen_tier = torch.where((able > 0) & (before[:-1] < end[head_cache]), tier, chosen_tier)
    return target.index_copy(0, order, chosen_tier)
