"""The planner in compiled loops, one head cache at a time: chooses exactly what plan_reference.py does."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.cache.storage.tokens import DROP
from kvstrata.loops import exact

from .plan import AGE_BITS, CHOOSE, EVICT, FIXED, GAP, LARGEST, MASS_BITS, TIE, Policy, Scopes, Split, split

MOST_FREE = 64  # slots of a page


def chosen(scopes: Scopes, policy: Policy, headroom: int) -> tuple[torch.Tensor, Split]:
    """Targets of all tokens, and the result of `split`."""
    tokens, tiers, n = scopes.tokens, len(policy.prices.page), scopes.numbers.shape[1]
    tier, position = tokens.tier.numpy(), tokens.position.numpy()
    order, first = _sorted(tokens.head_cache.numpy(), tier, n, tiers)
    moves = np.empty(len(order), np.bool_)
    fixed, moving = np.zeros((2, n, tiers), np.int64)
    length = scopes.numbers[0]
    _survey(order, first, position, length, policy.sink_tokens, policy.recent_tokens, moves, fixed, moving)
    parts = split(fixed, moving, np.array(scopes.head_caches), np.array(scopes.allowed, np.int64), policy, headroom)
    target = np.maximum(tier, 0)
    scope = np.repeat(np.arange(len(scopes)), scopes.head_caches)
    kind = parts.kind[scope]
    if ((kind == CHOOSE) | (kind == EVICT)).any():
        key = np.empty(len(order), np.int32)
        importance = tokens.importance.numpy()
        _keys(
            order, first, position, importance, moves, kind, scopes.numbers, scopes.kv_heads, policy.name == "uniform",
            policy.name == "recency", policy.mode == "ema", policy.per_head, np.float32(1.0 + policy.hysteresis),
            np.float32(policy.floor), key,
        )  # fmt: skip
        _choose(
            order, first, position, key, kind, parts.spare[scope], parts.share, fixed,
            np.array(policy.prices.page, np.int64), policy.prices.page_tokens, np.array(policy.ladder[0]),
            np.array(policy.ladder[1], np.float32), np.float32(policy.steepest), policy.name == "uniform",
            policy.leave_plain, policy.fills, target,
        )  # fmt: skip
    return torch.from_numpy(target), parts


@exact
def _sorted(head_cache, tier, n, tiers):
    """Tokens sorted by head cache and tier, new ones as plain, and the start of each bucket ``[n * tiers + 1]``."""
    first = np.zeros(n * tiers + 1, np.int64)
    for i in range(len(tier)):
        first[head_cache[i] * tiers + max(tier[i], 0) + 1] += 1
    for bucket in range(n * tiers):
        first[bucket + 1] += first[bucket]
    ahead = np.empty(n * tiers, np.int64)
    for bucket in range(n * tiers):
        ahead[bucket] = first[bucket]
    order = np.empty(len(tier), np.int64)
    for i in range(len(tier)):
        bucket = head_cache[i] * tiers + max(tier[i], 0)
        order[ahead[bucket]] = i
        ahead[bucket] += 1
    return order, first


@exact
def _survey(order, first, position, length, sinks, recent, moves, fixed, moving):
    """Mark the tokens that may move, in sorted order, and count per tier those that may and may not."""
    n, tiers = fixed.shape
    for head_cache in range(n):
        for tier in range(tiers):
            bucket = head_cache * tiers + tier
            for i in range(first[bucket], first[bucket + 1]):
                token_position = position[order[i]]
                kept = tier == 0 and (token_position < sinks or token_position >= length[head_cache] - recent)
                moves[i] = not kept
                fixed[head_cache, tier] += kept
            moving[head_cache, tier] = first[bucket + 1] - first[bucket] - fixed[head_cache, tier]


@exact
def _keys(
    order, first, position, importance, moves, kind, numbers, heads, uniform, recency, ema, per_head, settled, floor,
    key,
):  # fmt: skip
    """`plan_reference.keys`, in sorted order."""
    n = len(kind)
    tiers = (len(first) - 1) // n
    weight = np.empty(len(order), np.float32)
    longest = np.int64(1)
    for head_cache in range(n):
        longest = max(longest, numbers[0, head_cache])
    table = np.empty(1 if per_head else longest, np.float32)  # `_together` clears what it reads
    for head_cache in range(n):
        begin, end = first[head_cache * tiers], first[(head_cache + 1) * tiers]
        length, queries, reported = numbers[0, head_cache], numbers[1, head_cache], numbers[2, head_cache]
        if uniform:
            for i in range(begin, end):
                whole = ((2 * position[order[i]] + 1) << (AGE_BITS - 1)) // length
                key[i] = whole if moves[i] else FIXED
            continue
        if recency:
            for i in range(begin, end):
                weight[i] = np.float32(1.0) / np.float32(length - position[order[i]])
        else:
            even = np.float32(1.0) / np.float32(max(length, 1))
            total, many = np.int64(0), np.int64(0)
            for i in range(begin, end):
                state, token_position = importance[order[i]], position[order[i]]
                if ema:
                    mass = max(state, np.float32(0.0)) + np.float32(1e-3) * even
                else:
                    seen = max(min(queries, reported - token_position), 0)
                    mass = (state + even) / (np.float32(seen) + np.float32(1.0))
                weight[i] = min(mass, np.float32(LARGEST))
                if moves[i]:
                    total += np.int64(np.float64(weight[i]) * 2.0**MASS_BITS)
                    many += 1
            if many == 0:
                many = np.int64(1)
            mean = np.float32(total / many * 2.0**-MASS_BITS)
            mean = max(mean, np.float32(2.0**-MASS_BITS))
            for i in range(begin, end):
                weight[i] = weight[i] / mean + floor
        if per_head or recency:
            _as_keys(order, position, moves, weight, first, head_cache, tiers, length, recency, settled, key)
        elif head_cache % heads == heads - 1:
            _together(order, position, weight, first, head_cache - heads + 1, heads, tiers, table)
            for each in range(head_cache - heads + 1, head_cache + 1):
                _as_keys(order, position, moves, weight, first, each, tiers, numbers[0, each], recency, settled, key)


@exact
def _together(order, position, weight, first, head_cache, heads, tiers, table):
    """Replace the weights of a request's heads by their sum per position."""
    begin, end = first[head_cache * tiers], first[(head_cache + heads) * tiers]
    for i in range(begin, end):
        table[position[order[i]]] = np.float32(0.0)
    for i in range(begin, end):
        table[position[order[i]]] += weight[i]
    for i in range(begin, end):
        weight[i] = table[position[order[i]]]


@exact
def _as_keys(order, position, moves, weight, first, head_cache, tiers, length, recency, settled, key):
    bits = weight.view(np.int32)
    for tier in range(tiers):
        bucket = head_cache * tiers + tier
        for i in range(first[bucket], first[bucket + 1]):
            if not recency:
                part = np.float32(position[order[i]]) / np.float32(length)
                weight[i] = weight[i] * (np.float32(1.0) + np.float32(TIE) * part)
                if tier > 0:
                    weight[i] = weight[i] * settled
            key[i] = bits[i] if moves[i] else FIXED


@exact
def _limits(price, slopes, uniform, limit):
    """Keys below which tokens take each step down."""
    if uniform:
        for step in range(len(slopes)):
            limit[step] = min(max(price - (step << AGE_BITS), 0), 1 << AGE_BITS)
        return
    number, out = np.empty(1, np.int32), np.empty(1, np.float32)
    number[0] = price
    for step in range(len(slopes)):
        out[0] = number.view(np.float32)[0] / slopes[step]
        limit[step] = out.view(np.int32)[0]


@exact
def _bytes(moved, fixed, spare, page, page_tokens, fills):
    """Bytes of whole pages, with empty slots filled as by `plan_reference._counts_filled`; overwrites ``moved``."""
    tiers = len(page)
    counts = np.empty(tiers, np.int64)
    for tier in range(tiers):
        counts[tier] = fixed[tier]
    counts[0] += spare
    for tier in range(tiers):
        for target in range(tiers):
            counts[target] += moved[tier, target]
    if fills:
        for tier in range(1, tiers):
            for target in range(tiers):
                moved[tier, target] += moved[tier - 1, target]
        for tier in range(tiers - 1):
            free = -counts[tier] % page_tokens
            for other in range(tier + 1, tiers):
                filled = min(free, moved[tier, other])
                free -= filled
                counts[tier] += filled
                counts[other] -= filled
                for below in range(tier, tiers):
                    moved[below, other] -= filled
    total = 0
    for tier in range(tiers):
        total += (counts[tier] + page_tokens - 1) // page_tokens * page[tier]
    return total


@exact
def _choose(
    order, first, position, key, kind, spare, share, fixed, page, page_tokens, ladder, slopes, steepest,
    uniform, leave_plain, fills, target,
):  # fmt: skip
    """`plan_reference.chosen`, starting from the keys."""
    tiers, steps = len(page), len(slopes)
    limit, moved = np.empty(steps, np.int64), np.empty((tiers, tiers), np.int64)
    number, out = np.empty(1, np.int32), np.empty(1, np.float32)
    widest = 1 if leave_plain else 0
    for head_cache in range(len(kind)):
        if kind[head_cache] != CHOOSE and kind[head_cache] != EVICT:
            continue
        begin, end = first[head_cache * tiers], first[(head_cache + 1) * tiers]
        least, most = FIXED, 0
        for i in range(begin, end):
            if key[i] != FIXED:
                least, most = min(least, key[i]), max(most, key[i])
        if most == 0 and least == FIXED:
            continue
        evict = kind[head_cache] == EVICT
        low, high = np.int64(least), np.int64(most)
        if evict:
            low -= 1
        elif uniform:
            low, high = np.int64(0), np.int64((tiers - 1) << AGE_BITS)
        else:
            number[0] = most
            out[0] = number.view(np.float32)[0] * steepest * np.float32(2.0)
            high = np.int64(out.view(np.int32)[0])
        middle = low
        while True:
            for tier in range(tiers):
                for other in range(tiers):
                    moved[tier, other] = 0
            if evict:
                _count_left(key, first, head_cache, tiers, middle, max(ladder[-1], widest), moved)
            else:
                _limits(middle, slopes, uniform, limit)
                _count_moving(key, first, head_cache, tiers, limit, ladder, widest, moved)
            if _bytes(moved, fixed[head_cache], spare[head_cache], page, page_tokens, fills) <= share[head_cache]:
                high = middle
            else:
                low = middle
            if high - low <= GAP:
                break
            middle = (low + high) // 2
        if not evict:
            _limits(high, slopes, uniform, limit)
        for tier in range(tiers):
            bucket = head_cache * tiers + tier
            for i in range(first[bucket], first[bucket + 1]):
                if key[i] == FIXED:
                    continue
                if evict:
                    target[order[i]] = DROP if key[i] <= high else max(tier, max(ladder[-1], widest))
                    continue
                step = 0
                while step < steps and key[i] < limit[step]:
                    step += 1
                target[order[i]] = max(max(tier, widest), ladder[step])
        if fills:
            _fill(order, first, position, key, head_cache, tiers, spare[head_cache], page_tokens, target)


@exact
def _count_moving(key, first, head_cache, tiers, limit, ladder, widest, moved):
    """Tokens that may move, by tier and target, when those below the limits step down."""
    for tier in range(tiers):
        bucket = head_cache * tiers + tier
        keys = key[first[bucket] : first[bucket + 1]]
        here = max(tier, widest)
        above = 0
        for i in range(len(keys)):
            above += keys[i] < FIXED
        last = here
        for step in range(len(limit)):
            if ladder[step + 1] <= here:
                continue
            below = 0
            for i in range(len(keys)):
                below += keys[i] < limit[step]
            moved[tier, last] += above - below
            above, last = below, ladder[step + 1]
        moved[tier, last] += above


@exact
def _count_left(key, first, head_cache, tiers, limit, lowest, moved):
    """Count moves per (tier, target) when tokens up to the limit are dropped and the others go to the lowest tier."""
    for tier in range(tiers):
        bucket = head_cache * tiers + tier
        for i in range(first[bucket], first[bucket + 1]):
            if limit < key[i] < FIXED:
                moved[tier, max(tier, lowest)] += 1


@exact
def _fill(order, first, position, key, head_cache, tiers, spare, page_tokens, target):
    """`plan_reference._filled` for a head cache: the greatest keys are kept in a short sorted list."""
    begin, end = first[head_cache * tiers], first[(head_cache + 1) * tiers]
    best = np.empty(MOST_FREE, np.int64)
    for tier in range(tiers - 1):
        filled = spare if tier == 0 else 0
        for i in range(begin, end):
            filled += target[order[i]] == tier
        free, many = -filled % page_tokens, 0
        if free == 0:
            continue
        for i in range(begin, first[head_cache * tiers + tier + 1]):  # tokens that are not in a lower tier now
            if key[i] == FIXED or target[order[i]] <= tier:
                continue
            if many == free:
                last = best[many - 1]
                if key[i] < key[last] or (key[i] == key[last] and position[order[i]] < position[order[last]]):
                    continue
                many -= 1
            slot = many
            while slot > 0:
                other = best[slot - 1]
                if key[i] < key[other] or (key[i] == key[other] and position[order[i]] < position[order[other]]):
                    break
                best[slot] = other
                slot -= 1
            best[slot] = i
            many += 1
        for slot in range(many):
            target[order[best[slot]]] = tier
