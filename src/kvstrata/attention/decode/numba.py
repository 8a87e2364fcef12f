"""``decode_attention`` on the CPU in compiled loops, for a `TieredCache`: per request and KV head one pass over K, a
softmax and one pass over V, distributed over torch's number of threads. The reference takes over for a `PagedCache` and
without numba.

The tokens of a KV head are contiguous in the order of tiers, pages and slots; rows are its query heads, query by query:

    pages ──keys──▶ scores [rows, N], positions [N] ──softmax──▶ weights [rows, N] ──values──▶ sums of rows and of codes
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstrata.attention.softmax_numba import hide, soften, softmax
from kvstrata.cache.move.append_numba import KINDS, NO_BALANCE
from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.layout.format import UNIT, Format
from kvstrata.layout.fragments import STEP_DIMS, TILE_TOKENS, words_per_lane
from kvstrata.layout.products_numba import BLOCK, add_products, arrange
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_numba import (
    floats,
    lanes_of,
    page_buffers,
    powers_of_two,
    rotate,
    scales_of,
)
from kvstrata.loops import fast
from kvstrata.threads import share_out

from .job import Job, Result

CODES = -1  # instead of a kind
THREADED = 2048  # tokens of all KV heads; with fewer, starting another thread takes longer than the work
NO_SINKS = np.empty(0, np.float32)


class _Tier(NamedTuple):
    """Row of the table that the loops read; offsets are bytes from the start of a page."""

    kind: int
    k_bits: int
    v_bits: int
    k_words: int  # per lane
    v_words: int
    v_offset: int
    scale_offset: int
    position_offset: int


def missing(job: Job) -> str | None:
    """Reason why numba cannot run this job, or None."""
    if job.buckets is None or job.buckets.space is None:
        return "numba reads a TieredCache on the CPU"
    return None


@functools.lru_cache(maxsize=64)
def _tiers(formats: tuple[Format, ...], offsets: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    rows = []
    for f, position in zip(formats, offsets, strict=True):
        if f.plain:
            rows.append(_Tier(KINDS[dtype], 0, 0, 0, 0, f.v_offset, 0, position))
        else:
            assert f.rotate, "codes of a TieredCache are of rotated, centred rows"
            k_words, v_words = (words_per_lane(bits, f.head_dim, f.page_tokens) for bits in (f.k_bits, f.v_bits))
            rows.append(_Tier(CODES, f.k_bits, f.v_bits, k_words, v_words, f.v_offset, f.scale_offset, position))
    return np.array(rows, np.int64)


def decode(job: Job) -> Result:
    """Compute out, lse or None, and mass or None."""
    buckets, (batch, q_len, heads, _) = job.buckets, job.q.shape
    assert buckets is not None
    q = job.q.float().contiguous()
    out, lse = np.empty(q.shape, np.float32), np.empty((batch, q_len, heads), np.float32)
    mass = np.zeros((batch, job.kv_heads, job.max_length if job.return_mass else 0), np.float32)
    arguments = (
        *views(buckets, job.q.dtype),
        np.array(job.requests, np.int64),
        q.numpy(),
        np.float32(job.scale),
        job.sliding_window or 0,
        np.float32(job.softcap or 0.0),
        NO_SINKS if job.sinks is None else job.sinks.float().contiguous().numpy(),
        out,
        lse,
        mass,
        job.return_mass,
    )
    head_caches = batch * job.kv_heads
    threads = torch.get_num_threads() if head_caches * job.max_length >= THREADED else 1
    share_out(decode_heads, arguments, head_caches, threads)
    result = torch.from_numpy(out).to(job.q.dtype)
    lse_or_none = torch.from_numpy(lse) if job.return_lse else None
    return result, lse_or_none, torch.from_numpy(mass) if job.return_mass else None


def views(buckets: BucketedCacheLayer, dtype: torch.dtype) -> tuple[Any, ...]:
    """First arguments of `decode_heads`: numpy views of a layer and the table of its tiers, made once."""
    kept = buckets.kept
    if dtype not in kept:
        assert buckets.space is not None
        space, balance, page = buckets.space.numpy(), buckets.balance, buckets.formats[0]
        tensors = (buckets.seq_lens, buckets.page_table, buckets.count, buckets.centre)
        arrays, layers = zip(*map(_all_layers, tensors if balance is None else (*tensors, balance)), strict=True)
        assert len(set(layers)) == 1, "tables of different layers"
        kept[dtype] = (
            space.view(np.uint32),
            space.view(np.uint16),
            buckets.position_dtype == torch.int32,
            layers[0],
            *arrays,
            *([NO_BALANCE] if balance is None else []),
            _tiers(buckets.formats, buckets.position_offsets, dtype),
            page.page_tokens,
            block_of(page.head_dim),
        )
    return kept[dtype]


def _all_layers(x: torch.Tensor) -> tuple[np.ndarray, int]:
    """The ``[requests, layers, ...]`` tensor that ``x [requests, ...]`` is a layer of, and the layer.

    A single layer is in C order only if the cache has one layer; all layers together always are, so the loops are
    compiled once.
    """
    inner = max(x[:1].numel(), 1)
    layers, layer = max(x.stride(0) // inner, 1), x.storage_offset() % max(x.stride(0), inner) // inner
    whole = x.as_strided(
        (x.shape[0], layers, *x.shape[1:]), (layers * inner, inner, *x.stride()[1:]), x.storage_offset() - layer * inner
    )
    return whole.numpy(), layer


@fast
def decode_heads(
    words, halves, wide, layer, length, table, count, centre, balance, tiers, page_tokens, block, requests, q, scale,
    window, softcap, sinks, out, lse, mass, want_mass, first, last,
):  # fmt: skip
    """Decode head caches ``first`` to ``last``; q and out are float32 ``[B, q_len, Hq, D]``."""
    q_len, heads, dim = q.shape[1:]
    kv_heads = table.shape[2]
    group, rows = heads // kv_heads, q_len * (heads // kv_heads)
    head_q, turned = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
    sums, coded = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
    middle, factor = np.empty((1, dim), np.float32), np.empty(dim, np.float32)
    for d in range(dim):
        factor[d] = 1
    ordered = window > 0 or q_len > 1
    for head_cache in range(first, last):
        b, head = head_cache // kv_heads, head_cache % kv_heads
        request = requests[b]
        pages, counts, n = table[request, layer, head], count[request, layer, head], 0
        for tier in range(len(counts)):
            n += counts[tier]
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
        if ordered or want_mass:
            _positions(words, halves, wide, pages, counts, tiers, page_tokens, positions)
        _keys(words, halves, pages, counts, tiers, page_tokens, middle, head_q, turned, scores)
        for r in range(rows):
            own = length[request, layer] - q_len + r // group
            q_head = head * group + r % group
            if softcap > 0:
                soften(scores[r], softcap)
            if ordered:
                hide(scores[r], positions, own, own - window if window > 0 else -1)
            sink = sinks[q_head] if len(sinks) else np.float32(-np.inf)
            lse[b, r // group, q_head] = softmax(scores[r], sink)
        if want_mass:
            _add_mass(scores, positions, mass[b, head])
        _values(words, halves, pages, counts, tiers, page_tokens, scores, sums, coded)
        rotate(coded, block)
        for r in range(rows):
            for d in range(dim):
                out[b, r // group, head * group + r % group, d] = sums[r, d] + coded[r, d]


@fast
def _add_mass(weights, positions, mass):
    """Add the weights of all rows to the mass of their positions."""
    total = np.empty(len(positions), np.float32)
    for i in range(len(total)):
        total[i] = 0
    for r in range(len(weights)):
        row = weights[r]
        for i in range(len(total)):
            total[i] += row[i]
    for i in range(len(total)):
        mass[positions[i]] += total[i]


@fast
def _positions(words, halves, wide, pages, counts, tiers, page_tokens, positions):
    index = 0
    for tier in range(len(tiers)):
        left, offset = counts[tier], tiers[tier, 7]
        for page in range((left + page_tokens - 1) // page_tokens):
            base, tokens = np.int64(pages[tier, page]) * UNIT + offset, min(left - page * page_tokens, page_tokens)
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
def _keys(words, halves, pages, counts, tiers, page_tokens, centre, q, turned, scores):
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
            base, page_count = np.int64(pages[tier, page]) * UNIT, min(left - page * page_tokens, page_tokens)
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
def _values(words, halves, pages, counts, tiers, page_tokens, weights, out, coded):
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
            base, page_count = np.int64(pages[tier, page]) * UNIT, min(left - page * page_tokens, page_tokens)
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
