"""Loops of ``decode_attention`` on the CPU, for units of work: parts of the head caches of a `TieredCache`.

    pages ──keys──▶ scores [rows, n] ──exponents──▶ weights [rows, n] ──values──▶ sums of a unit
                                                                        units ──merge──▶ out, lse, mass of a head

`rows` are the queries of one KV head. `work` runs units as an OpenMP region of the library that torch uses. After an
operation, a worker thread of torch keeps its core busy for a while, waiting for the next one: another thread would
compete with it, and would need the GIL to start.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from kvstrata.attention.softmax_numba import exponents, hide, merged, soften
from kvstrata.layout.format import UNIT
from kvstrata.layout.fragments import STEP_DIMS, TILE_TOKENS
from kvstrata.layout.products_numba import BLOCK, add_products, arrange
from kvstrata.layout.unpack_numba import floats, lanes_of, page_buffers, powers_of_two, rotate, scales_of
from kvstrata.loops import callback, fast
from kvstrata.region_numba import carray, count_up, pointer_to

CODES = -1  # instead of a kind

# Fields of `work`: where they begin.
LAYER, REQUESTS, QUERIES, SCALE, WINDOW, SOFTCAP, SINKS, OUT, FIELDS = slice(2, 37), 37, 39, 44, 45, 46, 47, 62, 75
ADDRESSES = np.array([50, 54, 58, 67, 71])  # of sums, stats, weights, lse and mass


@fast
def decode_units(
    words, halves, wide, layer, length, table, count, centre, balance, tiers, page_tokens, block, requests, q, scale,
    window, softcap, sinks, parts, sums, stats, weights, out, lse, mass, first, last,
):  # fmt: skip
    """Decode units ``first`` to ``last``, each a part of a head cache; with one part, also what `merge_heads` does.

    q and out are float32 ``[B, q_len, Hq, D]``. Of each unit and row, ``sums [units, rows, D]`` are values weighted by
    exponentials of scores less their maximum, and ``stats`` that maximum and the sum of the exponentials, which are
    kept in ``weights [units, rows, tokens]`` if mass is wanted.
    """
    q_len, heads, dim = q.shape[1:]
    kv_heads, want_mass = table.shape[2], mass.shape[2] > 0
    group, rows = heads // kv_heads, q_len * (heads // kv_heads)
    head_q, turned = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
    plain, coded = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
    middle, factor = np.empty((1, dim), np.float32), np.empty(dim, np.float32)
    begin, own_count = np.empty(len(tiers), np.int64), np.empty(len(tiers), np.int64)
    for d in range(dim):
        factor[d] = 1
    ordered = window > 0 or q_len > 1
    for unit in range(first, last):
        head_cache = unit // parts
        b, head = head_cache // kv_heads, head_cache % kv_heads
        request = requests[b]
        pages = table[request, layer, head]
        n = _part(count[request, layer, head], page_tokens, unit % parts, parts, begin, own_count)
        scores, positions = np.empty((rows, n), np.float32), np.empty(n, np.int64)
        if len(balance):
            powers_of_two(balance[request, layer, head], factor)
        for d in range(dim):
            middle[0, d] = centre[request, layer, head, d] / factor[d]
        for r in range(rows):
            given = q[b, r // group, head * group + r % group]
            for d in range(dim):
                head_q[r, d] = given[d] * scale * factor[d]
                turned[r, d] = head_q[r, d]
        rotate(turned, block)
        if ordered:
            _positions(words, halves, wide, pages, begin, own_count, tiers, page_tokens, positions)
        _keys(words, halves, pages, begin, own_count, tiers, page_tokens, middle, head_q, turned, scores)
        for r in range(rows):
            own = length[request, layer] - q_len + r // group
            if softcap > 0:
                soften(scores[r], softcap)
            if ordered:
                hide(scores[r], positions, own, own - window if window > 0 else -1)
            stats[unit, r, 0], stats[unit, r, 1] = exponents(scores[r])
            for i in range(n if want_mass else 0):
                weights[unit, r, i] = scores[r, i]
        _values(words, halves, pages, begin, own_count, tiers, page_tokens, scores, plain, coded)
        rotate(coded, block)
        for r in range(rows):
            for d in range(dim):
                sums[unit, r, d] = plain[r, d] + coded[r, d]
        if parts == 1:
            merge_heads(
                words, halves, wide, layer, length, table, count, centre, balance, tiers, page_tokens, block, requests,
                q, scale, window, softcap, sinks, parts, sums, stats, weights, out, lse, mass, unit, unit + 1,
            )  # fmt: skip


@fast
def merge_heads(
    words, halves, wide, layer, length, table, count, centre, balance, tiers, page_tokens, block, requests, q, scale,
    window, softcap, sinks, parts, sums, stats, weights, out, lse, mass, first, last,
):  # fmt: skip
    """Output, log of the sum and mass of head caches ``first`` to ``last`` from their parts; see `decode_units`.

    As in torch, a row is NaN if a score or its sink is NaN or +inf. It is zero if nothing is visible.
    """
    q_len, heads, dim = q.shape[1:]
    kv_heads, want_mass = table.shape[2], mass.shape[2] > 0
    group, rows = heads // kv_heads, q_len * (heads // kv_heads)
    by = np.empty((rows, parts), np.float32)  # of each part's sums
    begin, own_count = np.empty(len(tiers), np.int64), np.empty(len(tiers), np.int64)
    for head_cache in range(first, last):
        b, head, unit = head_cache // kv_heads, head_cache % kv_heads, head_cache * parts
        for r in range(rows):
            q_head = head * group + r % group
            top, total = merged(stats[unit : unit + parts, r], sinks[q_head] if len(sinks) else -np.inf, by[r])
            lse[b, r // group, q_head] = top + math.log(total) if total > 0 else top
            row = out[b, r // group, q_head]
            for d in range(dim):
                row[d] = 0
            for part in range(parts):
                for d in range(dim):
                    row[d] += sums[unit + part, r, d] * by[r, part]
        for part in range(parts if want_mass else 0):
            n = _part(count[requests[b], layer, head], page_tokens, part, parts, begin, own_count)
            positions = np.empty(n, np.int64)
            _positions(
                words, halves, wide, table[requests[b], layer, head], begin, own_count, tiers, page_tokens, positions
            )
            _add_mass(weights[unit + part], by[:, part], positions, mass[b, head])


@fast
def _part(counts, page_tokens, part, parts, begin, own_count):
    """Pages of each tier that belong to a part, by the first one and the tokens; returns the number of all tokens."""
    n = 0
    for tier in range(len(counts)):
        pages, odd = (counts[tier] + page_tokens - 1) // page_tokens, tier % 2 * (parts - 1)
        begin[tier] = (pages * part + odd) // parts
        end = (pages * (part + 1) + odd) // parts
        own_count[tier] = max(min(np.int64(counts[tier]), end * page_tokens) - begin[tier] * page_tokens, 0)
        n += own_count[tier]
    return n


@fast
def _add_mass(weights, by, positions, mass):
    """Add the weights of all rows, each multiplied with ``by``, to the mass of their positions."""
    total = np.zeros(len(positions), np.float32)
    for r in range(len(weights)):
        row, factor = weights[r], by[r]
        for i in range(len(total)):
            total[i] += row[i] * factor
    for i in range(len(total)):
        mass[positions[i]] += total[i]


@fast
def _positions(words, halves, wide, pages, begin, counts, tiers, page_tokens, positions):
    index = 0
    for tier in range(len(tiers)):
        left, offset = counts[tier], tiers[tier, 7]
        for page in range((left + page_tokens - 1) // page_tokens):
            base = np.int64(pages[tier, begin[tier] + page]) * UNIT + offset
            tokens = min(left - page * page_tokens, page_tokens)
            for i in range(tokens):
                positions[index + i] = np.int64(words[base // 4 + i]) if wide else np.int64(halves[base // 2 + i])
            index += tokens


@fast
def _clear(rows):
    for r in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            rows[r, d] = 0


@fast
def _dot(q, r, rows, index):
    total = np.float32(0)
    for i in range(rows.shape[1]):
        total += q[r, i] * rows[index, i]
    return total


@fast
def _keys(words, halves, pages, begin, counts, tiers, page_tokens, centre, q, turned, scores):
    """Scores of all tokens for ``q [rows, D]`` and ``turned``, the rotated query."""
    rows, dim = q.shape
    zero, one = np.int64(0), np.int64(1)  # as literals they would be types, with a function compiled for each
    steps = dim // STEP_DIMS
    above = (page_tokens // TILE_TOKENS * steps + 1) // 2
    bits, lanes, scale_bits = page_buffers(page_tokens, dim)
    flat, by = bits.view(np.float32), np.empty((rows, steps, BLOCK), np.float32)
    plain, scale = flat.reshape(page_tokens, dim), np.empty(page_tokens, np.float32)
    sums, middle, lowest = (
        np.empty((rows, page_tokens), np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
    )
    for r in range(rows):
        middle[r] = _dot(q, r, centre, zero)
    token = 0
    for tier in range(len(tiers)):
        kind, k_bits, k_words, scale_offset = tiers[tier, 0], tiers[tier, 1], tiers[tier, 3], tiers[tier, 6]
        left = counts[tier]
        if left > 0 and kind == CODES:
            arrange(turned, k_bits, by)
            for r in range(rows):
                total = np.float32(0)
                for d in range(dim):
                    total += turned[r, d]
                lowest[r] = total * np.float32(0.5) * np.float32((1 << k_bits) - 1)
        for page in range((left + page_tokens - 1) // page_tokens):
            base = np.int64(pages[tier, begin[tier] + page]) * UNIT
            page_count = min(left - page * page_tokens, page_tokens)
            if kind != CODES:
                floats(words, halves, base, page_count * dim, kind, bits, flat)
                for i in range(page_count):
                    for r in range(rows):
                        scores[r, token + i] = _dot(q, r, plain, i)
                token += page_count
                continue
            lanes_of(words[base // 4 :], k_words, lanes)
            scales_of(words, halves, base + scale_offset, zero, scale_bits, scale)
            _clear(sums)
            for tile in range((page_count + TILE_TOKENS - 1) // TILE_TOKENS):
                add_products(lanes, k_bits, above, tile * steps, one, steps, by, zero, sums, tile * TILE_TOKENS)
            for r in range(rows):
                row, own, less, more = scores[r, token : token + page_count], sums[r], lowest[r], middle[r]
                for i in range(len(row)):
                    row[i] = (own[i] - less) * scale[i] + more
            token += page_count


@fast
def _values(words, halves, pages, begin, counts, tiers, page_tokens, weights, out, coded):
    """Sums of rows weighted by ``weights [rows, n]``: of plain ones to ``out [rows, D]``, of codes to ``coded``."""
    rows, dim = out.shape
    steps, tiles = dim // STEP_DIMS, page_tokens // TILE_TOKENS
    above = (tiles * steps + 1) // 2
    bits, lanes, scale_bits = page_buffers(page_tokens, dim)
    flat, by = bits.view(np.float32), np.empty((rows, tiles, BLOCK), np.float32)
    plain, scale = flat.reshape(page_tokens, dim), np.empty(page_tokens, np.float32)
    scaled, lowest = np.empty((rows, page_tokens), np.float32), np.empty(rows, np.float32)
    sums = np.empty((rows, dim), np.float32)
    _clear(out)
    _clear(coded)
    zero, one = np.int64(0), np.int64(1)
    token = 0
    for tier in range(len(tiers)):
        kind, v_bits, v_words, v_offset = tiers[tier, 0], tiers[tier, 2], tiers[tier, 4], tiers[tier, 5]
        scale_offset, half = tiers[tier, 6], np.float32(0.5) * np.float32((1 << v_bits) - 1)
        left = counts[tier]
        for page in range((left + page_tokens - 1) // page_tokens):
            base = np.int64(pages[tier, begin[tier] + page]) * UNIT
            page_count = min(left - page * page_tokens, page_tokens)
            if kind != CODES:
                floats(words, halves, base + v_offset, page_count * dim, kind, bits, flat)
                for i in range(page_count):
                    for r in range(rows):
                        weight = weights[r, token + i]
                        for d in range(plain.shape[1]):
                            out[r, d] += weight * plain[i, d]
                token += page_count
                continue
            lanes_of(words[(base + v_offset) // 4 :], v_words, lanes)
            scales_of(words, halves, base + scale_offset, one, scale_bits, scale)
            for r in range(rows):
                row, own, total = weights[r, token : token + page_count], scaled[r], np.float32(0)
                for i in range(len(row)):
                    own[i] = row[i] * scale[i]
                    total += own[i]
                for i in range(page_count, page_tokens):
                    own[i] = 0  # the scales of slots without a token may be NaN
                lowest[r] = half * total
            arrange(scaled, v_bits, by)
            used = (page_count + TILE_TOKENS - 1) // TILE_TOKENS
            _clear(sums)
            for step in range(steps):
                add_products(lanes, v_bits, above, step, steps, used, by, zero, sums, step * STEP_DIMS)
            for r in range(rows):  # page by page: codes are not negative, so a long sum would lose digits
                own, page_sums, less = coded[r], sums[r], lowest[r]
                for d in range(len(own)):
                    own[d] += page_sums[d] - less
            token += page_count


def work(data):
    """Function of an OpenMP region: each thread takes the next unit that is left, and the last one merges.

    ``data``: the numbers of units taken and done, then the arguments of `decode_units` up to ``mass``: of an array its
    address and shape, of a number its value, all int64; of scale and softcap the bits.
    """
    p, numbers = carray(data, (FIELDS,), np.int64), carray(data, (2 * FIELDS,), np.float32)
    words, halves = carray(pointer_to(p[2]), (p[3],), np.uint32), carray(pointer_to(p[4]), (p[5],), np.uint16)
    wide, layer = p[6] != 0, p[7]
    length = carray(pointer_to(p[8]), (p[9], p[10]), np.int32)
    table = carray(pointer_to(p[11]), (p[12], p[13], p[14], p[15], p[16]), np.int32)
    count = carray(pointer_to(p[17]), (p[18], p[19], p[20], p[21]), np.int32)
    centre = carray(pointer_to(p[22]), (p[23], p[24], p[25], p[26]), np.float32)
    balance = carray(pointer_to(p[27]), (p[28], p[29], p[30], p[31]), np.int8)
    tiers = carray(pointer_to(p[32]), (p[33], p[34]), np.int64)
    page_tokens, block = p[35], p[36]
    requests = carray(pointer_to(p[37]), (p[38],), np.int64)
    q = carray(pointer_to(p[39]), (p[40], p[41], p[42], p[43]), np.float32)
    scale, window, softcap = numbers[2 * 44], p[45], numbers[2 * 46]
    sinks, parts = carray(pointer_to(p[47]), (p[48],), np.float32), p[49]
    sums = carray(pointer_to(p[50]), (p[51], p[52], p[53]), np.float32)
    stats = carray(pointer_to(p[54]), (p[55], p[56], p[57]), np.float32)
    weights = carray(pointer_to(p[58]), (p[59], p[60], p[61]), np.float32)
    out = carray(pointer_to(p[62]), (p[63], p[64], p[65], p[66]), np.float32)
    lse = carray(pointer_to(p[67]), (p[68], p[69], p[70]), np.float32)
    mass = carray(pointer_to(p[71]), (p[72], p[73], p[74]), np.float32)
    units, counters = len(sums), p.ctypes.data
    unit = count_up(counters)
    while unit < units:
        decode_units(
            words, halves, wide, layer, length, table, count, centre, balance, tiers, page_tokens, block, requests, q,
            scale, window, softcap, sinks, parts, sums, stats, weights, out, lse, mass, unit, unit + 1,
        )  # fmt: skip
        if count_up(counters + 8) == units - 1 and parts > 1:
            merge_heads(
                words, halves, wide, layer, length, table, count, centre, balance, tiers, page_tokens, block, requests,
                q, scale, window, softcap, sinks, parts, sums, stats, weights, out, lse, mass, 0, units // parts,
            )  # fmt: skip
        unit = count_up(counters)


@functools.cache
def address_of_work() -> int:
    """Address of the compiled `work`, for C."""
    return callback(work)
