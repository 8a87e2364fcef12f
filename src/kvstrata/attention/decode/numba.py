"""``decode_attention`` on the CPU in compiled loops, for a `TieredCache`: per request and KV head one pass over K, a
softmax and one pass over V, distributed over torch's number of threads. The reference takes over for a `PagedCache` and
without numba.

The tokens of a KV head lie side by side in the order of tiers, pages and slots, without gaps; rows are its query heads,
query by query:

    pages ──keys──▶ scores [rows, N], positions [N] ──softmax──▶ weights [rows, N] ──values──▶ sums of rows and of codes
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from kvstrata.attention.softmax_numba import hide, soften, softmax
from kvstrata.attention.threads import share_out
from kvstrata.layout.format import UNIT, Format
from kvstrata.layout.fragments import words_per_lane
from kvstrata.layout.rotation import hadamard
from kvstrata.layout.unpack_numba import (
    BFLOAT16,
    COLUMNS,
    FLOAT16,
    FLOAT32,
    LANES,
    ROWS,
    compiled,
    floats,
    lanes_of,
    levels,
    scale_index,
)
from kvstrata.quant.calibration import factors

from .job import Job, Result
from .parts import stored_centre

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
CODES = -1  # instead of a kind
THREADED = 2048  # tokens of all KV heads; fewer are done before another thread would start


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


@functools.lru_cache(maxsize=64)
def _turn(head_dim: int) -> torch.Tensor:
    return hadamard(head_dim, "cpu")


def decode(job: Job) -> Result:
    """Compute out, lse or None, and mass or None."""
    buckets, (batch, q_len, heads, dim) = job.buckets, job.q.shape
    assert buckets is not None
    assert buckets.space is not None
    space = buckets.space.numpy()
    turn = _turn(dim)
    q = torch.empty(2, batch, q_len, heads, dim, dtype=torch.float32, device="cpu")
    torch.mul(job.q, job.scale, out=q[0])
    if buckets.balance is not None:
        q[0] *= factors(buckets.balance[job.requests]).repeat_interleave(job.group, 1).unsqueeze(1)
    torch.matmul(q[0], turn, out=q[1])
    out = torch.empty_like(q)
    lse = np.empty((batch, q_len, heads), np.float32)
    mass = np.zeros((batch, job.kv_heads, job.max_length if job.return_mass else 0), np.float32)
    arguments = (
        space.view(np.uint32),
        space.view(np.uint16),
        buckets.position_dtype == torch.int32,
        np.array(job.requests, np.int64),
        buckets.seq_lens.numpy(),
        buckets.page_table.numpy(),
        buckets.count.numpy(),
        stored_centre(buckets).numpy(),
        _tiers(buckets.formats, buckets.position_offsets, job.q.dtype),
        buckets.formats[0].page_tokens,
        q.numpy(),
        job.sliding_window or 0,
        job.softcap or 0.0,
        np.empty(0, np.float32) if job.sinks is None else job.sinks.numpy(),
        out.numpy(),
        lse,
        mass,
        job.return_mass,
    )
    head_caches = batch * job.kv_heads
    threads = torch.get_num_threads() if head_caches * job.max_length >= THREADED else 1
    share_out(_decode, arguments, head_caches, threads)
    result = out[0].add_(out[1] @ turn).to(job.q.dtype)
    lse_or_none = torch.from_numpy(lse) if job.return_lse else None
    return result, lse_or_none, torch.from_numpy(mass) if job.return_mass else None


@compiled
def _decode(
    words, halves, wide, requests, length, table, count, centre, tiers, page_tokens, q, window, softcap, sinks, out,
    lse, mass, want_mass, first, last,
):  # fmt: skip
    """Decode head caches ``first`` to ``last``. q and out are ``[2, B, q_len, Hq, D]``: in the model's space and in the
    space of codes."""
    q_len, heads, dim = q.shape[2:]
    kv_heads = table.shape[1]
    group, rows = heads // kv_heads, q_len * (heads // kv_heads)
    head_q = np.empty((2, rows, dim), np.float32)
    sums = np.empty((2, rows, dim), np.float32)
    ordered = window > 0 or q_len > 1
    for head_cache in range(first, last):
        b, head = head_cache // kv_heads, head_cache % kv_heads
        request = requests[b]
        pages, counts, n = table[request, head], count[request, head], 0
        for tier in range(len(counts)):
            n += counts[tier]
        scores, positions = np.empty((rows, n), np.float32), np.empty(n, np.int64)
        for space in range(2):
            for r in range(rows):
                for d in range(dim):
                    head_q[space, r, d] = q[space, b, r // group, head * group + r % group, d]
        if ordered or want_mass:
            _positions(words, halves, wide, pages, counts, tiers, page_tokens, positions)
        _keys(words, halves, pages, counts, tiers, page_tokens, centre[request], head, head_q, scores)
        for r in range(rows):
            own = length[request] - q_len + r // group
            q_head = head * group + r % group
            if softcap > 0:
                soften(scores[r], np.float32(softcap))
            if ordered:
                hide(scores[r], positions, own, own - window if window > 0 else -1)
            sink = sinks[q_head] if len(sinks) else np.float32(-np.inf)
            lse[b, r // group, q_head] = softmax(scores[r], sink)
            if want_mass:
                head_mass, weights = mass[b, head], scores[r]
                for i in range(n):
                    head_mass[positions[i]] += weights[i]
        for r in range(rows):
            for d in range(dim):
                sums[0, r, d] = 0
        _values(words, halves, pages, counts, tiers, page_tokens, scores, sums)
        for space in range(2):
            for r in range(rows):
                for d in range(dim):
                    out[space, b, r // group, head * group + r % group, d] = sums[space, r, d]


@compiled
def _positions(words, halves, wide, pages, counts, tiers, page_tokens, positions):
    index = 0
    for tier in range(len(tiers)):
        left, offset = counts[tier], tiers[tier, 7]
        for page in range((left + page_tokens - 1) // page_tokens):
            base, tokens = np.int64(pages[tier, page]) * UNIT + offset, min(left - page * page_tokens, page_tokens)
            for i in range(tokens):
                positions[index + i] = np.int64(words[base // 4 + i]) if wide else np.int64(halves[base // 2 + i])
            index += tokens


@compiled
def _dot(q, r, rows, index):
    total = np.float32(0)
    for i in range(rows.shape[1]):
        total += q[0, r, i] * rows[index, i]
    return total


@compiled
def _add(fragment, by, index, sums, to):
    """Add the columns of a fragment ``[4, 64]`` times ``by[r, index]`` to ``sums[r, to]``, for every row r."""
    a, b, c, d = fragment[0], fragment[1], fragment[2], fragment[3]
    for r in range(len(sums)):
        e, f, g, h, row_sums = by[r, index, 0], by[r, index, 1], by[r, index, 2], by[r, index, 3], sums[r, to]
        for i in range(len(row_sums)):
            row_sums[i] += (a[i] * e[i] + b[i] * f[i]) + (c[i] * g[i] + d[i] * h[i])


@compiled
def _spread(values, first, by, r, index):
    """Spread 16 numbers, by token (V) or dim (K) of a fragment, to the columns ``by[r, index]`` that multiply it."""
    for row in range(ROWS):
        i = first + 8 * (row // 2) + row % 2
        a, b, c, d = values[r, i], values[r, i + 2], values[r, i + 4], values[r, i + 6]
        for lane in range(by.shape[3] // 4):
            by[r, index, row, 4 * lane], by[r, index, row, 4 * lane + 1] = a, b
            by[r, index, row, 4 * lane + 2], by[r, index, row, 4 * lane + 3] = c, d


@compiled
def _four(sums, r, index, i):
    """Sum of the columns of a token (K) or dim (V)."""
    return (sums[r, index, 4 * i] + sums[r, index, 4 * i + 1]) + (sums[r, index, 4 * i + 2] + sums[r, index, 4 * i + 3])


@compiled
def _page_buffers(page_tokens, dim):
    """Scratch of one page: bits of plain rows, bits of scales, words by lane, levels of a fragment."""
    lanes = np.empty((page_tokens // 8 * (dim // 16), LANES), np.uint32)
    bits, scale_bits = np.empty(page_tokens * dim, np.uint32), np.empty(2 * page_tokens, np.uint32)
    return bits, scale_bits, lanes, np.empty((8, LANES), np.float32)


@compiled
def _keys(words, halves, pages, counts, tiers, page_tokens, centre, head, q, scores):
    _, rows, dim = q.shape
    steps, fragments = dim // 16, page_tokens // 16 * (dim // 16)
    bits, scale_bits, lanes, fields = _page_buffers(page_tokens, dim)
    flat, scale, fragment = bits.view(np.float32), scale_bits.view(np.float32), fields.reshape(ROWS, COLUMNS)
    plain = flat.reshape(page_tokens, dim)
    sums, by = np.empty((rows, 1, COLUMNS), np.float32), np.empty((rows, steps, ROWS, COLUMNS), np.float32)
    middle, turned = np.empty(rows, np.float32), q[1]
    for r in range(rows):
        middle[r] = _dot(q, r, centre, head)
        for step in range(steps):
            _spread(turned, 16 * step, by, r, step)
    token = 0
    for tier in range(len(tiers)):
        kind, k_bits, k_words, scale_offset = tiers[tier, 0], tiers[tier, 1], tiers[tier, 3], tiers[tier, 6]
        left = counts[tier]
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
            floats(words, halves, base + scale_offset, 2 * page_tokens, FLOAT16, scale_bits, scale)
            for tile in range((page_count + 15) // 16):
                for r in range(rows):
                    for c in range(COLUMNS):
                        sums[r, 0, c] = 0
                for step in range(steps):
                    levels(lanes, k_bits, tile * steps + step, fragments, fields)
                    _add(fragment, by, step, sums, 0)
                tile_count = min(page_count - 16 * tile, 16)
                for i in range(tile_count):
                    token_scale = scale[scale_index(16 * tile + i, 0)]
                    for r in range(rows):
                        scores[r, token + i] = _four(sums, r, 0, i) * token_scale + middle[r]
                token += tile_count


@compiled
def _values(words, halves, pages, counts, tiers, page_tokens, weights, out):
    _, rows, dim = out.shape
    steps, fragments = dim // 16, page_tokens // 16 * (dim // 16)
    bits, scale_bits, lanes, fields = _page_buffers(page_tokens, dim)
    flat, scale, fragment = bits.view(np.float32), scale_bits.view(np.float32), fields.reshape(ROWS, COLUMNS)
    plain = flat.reshape(page_tokens, dim)
    sums, by = np.zeros((rows, steps, COLUMNS), np.float32), np.empty((rows, 1, ROWS, COLUMNS), np.float32)
    tile_weights = np.empty((rows, 16), np.float32)
    token = 0
    for tier in range(len(tiers)):
        kind, v_bits, v_words, v_offset = tiers[tier, 0], tiers[tier, 2], tiers[tier, 4], tiers[tier, 5]
        scale_offset = tiers[tier, 6]
        left = counts[tier]
        for page in range((left + page_tokens - 1) // page_tokens):
            base, page_count = np.int64(pages[tier, page]) * UNIT, min(left - page * page_tokens, page_tokens)
            if kind != CODES:
                floats(words, halves, base + v_offset, page_count * dim, kind, bits, flat)
                for i in range(page_count):
                    for r in range(rows):
                        weight = weights[r, token + i]
                        for d in range(plain.shape[1]):
                            out[0, r, d] += weight * plain[i, d]
                token += page_count
                continue
            lanes_of(words[(base + v_offset) // 4 :], v_words, lanes)
            floats(words, halves, base + scale_offset, 2 * page_tokens, FLOAT16, scale_bits, scale)
            for tile in range((page_count + 15) // 16):
                tile_count = min(page_count - 16 * tile, 16)
                for i in range(16):
                    token_scale = scale[scale_index(16 * tile + i, 1)]
                    for r in range(rows):  # the scales of slots without a token may be NaN
                        tile_weights[r, i] = weights[r, token + i] * token_scale if i < tile_count else np.float32(0)
                for r in range(rows):
                    _spread(tile_weights, 0, by, r, 0)
                for step in range(steps):
                    levels(lanes, v_bits, tile * steps + step, fragments, fields)
                    _add(fragment, by, 0, sums, step)
                token += tile_count
    for r in range(rows):
        for d in range(dim):
            out[1, r, d] = _four(sums, r, d // 16, d % 16)
