"""``decode_attention`` on the CPU in compiled loops: for each request and KV head one pass over K, a softmax, one pass
over V, the heads shared out over as many threads as torch has. For a `TieredCache`; where numba is not installed, and
for a `PagedCache`, there is the reference.

The tokens of a KV head stand side by side in the order of tiers, pages and slots, without gaps; rows are its query
heads, query by query:

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

from .job import Job, Result

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
CODES = -1  # in the place of a kind
THREADED = 2048  # tokens of all KV heads: fewer are done before another thread has begun


class _Tier(NamedTuple):
    """A row of the table that the loops read; offsets are bytes from the begin of a page."""

    kind: int
    k_bits: int
    v_bits: int
    k_words: int  # of a lane
    v_words: int
    v_offset: int
    scale_offset: int
    position_offset: int


def missing(job: Job) -> str | None:
    """Why this job is not for numba, or None."""
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
    """out, lse or None, mass or None."""
    buckets, (batch, q_len, heads, dim) = job.buckets, job.q.shape
    assert buckets is not None
    assert buckets.space is not None
    space = buckets.space.numpy()
    turn = _turn(dim)
    q = torch.empty(2, batch, q_len, heads, dim, dtype=torch.float32, device="cpu")
    torch.mul(job.q, job.scale, out=q[0])
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
        buckets.centre.numpy(),
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
    units = batch * job.kv_heads
    threads = torch.get_num_threads() if units * job.max_length >= THREADED else 1
    share_out(_decode, arguments, units, threads)
    made = out[0].add_(out[1] @ turn).to(job.q.dtype)
    return made, torch.from_numpy(lse) if job.return_lse else None, torch.from_numpy(mass) if job.return_mass else None


@compiled
def _decode(
    words, halves, wide, requests, length, table, count, centre, tiers, page_tokens, q, window, softcap, sinks, out,
    lse, mass, listens, first, last,
):  # fmt: skip
    """(Request, KV head) pairs ``first`` to ``last``. q and out ``[2, B, q_len, Hq, D]``: in the model's space and in
    that of codes."""
    q_len, heads, dim = q.shape[2:]
    kv_heads = table.shape[1]
    group, rows = heads // kv_heads, q_len * (heads // kv_heads)
    some_q = np.empty((2, rows, dim), np.float32)
    sums = np.empty((2, rows, dim), np.float32)
    ordered = window > 0 or q_len > 1
    for unit in range(first, last):
        b, head = unit // kv_heads, unit % kv_heads
        request = requests[b]
        pages, counts, n = table[request, head], count[request, head], 0
        for tier in range(len(counts)):
            n += counts[tier]
        scores, at = np.empty((rows, n), np.float32), np.empty(n, np.int64)
        for space in range(2):
            for r in range(rows):
                for d in range(dim):
                    some_q[space, r, d] = q[space, b, r // group, head * group + r % group, d]
        if ordered or listens:
            _positions(words, halves, wide, pages, counts, tiers, page_tokens, at)
        _keys(words, halves, pages, counts, tiers, page_tokens, centre[request], head, some_q, scores)
        for r in range(rows):
            own = length[request] - q_len + r // group
            to = head * group + r % group
            if softcap > 0:
                soften(scores[r], np.float32(softcap))
            if ordered:
                hide(scores[r], at, own, own - window if window > 0 else -1)
            sink = sinks[to] if len(sinks) else np.float32(-np.inf)
            lse[b, r // group, to] = softmax(scores[r], sink)
            if listens:
                to_mass, weights = mass[b, head], scores[r]
                for i in range(n):
                    to_mass[at[i]] += weights[i]
        for r in range(rows):
            for d in range(dim):
                sums[0, r, d] = 0
        _values(words, halves, pages, counts, tiers, page_tokens, scores, sums)
        for space in range(2):
            for r in range(rows):
                for d in range(dim):
                    out[space, b, r // group, head * group + r % group, d] = sums[space, r, d]


@compiled
def _positions(words, halves, wide, pages, counts, tiers, page_tokens, found):
    at = 0
    for tier in range(len(tiers)):
        left, offset = counts[tier], tiers[tier, 7]
        for page in range((left + page_tokens - 1) // page_tokens):
            base, some = np.int64(pages[tier, page]) * UNIT + offset, min(left - page * page_tokens, page_tokens)
            for i in range(some):
                found[at + i] = np.int64(words[base // 4 + i]) if wide else np.int64(halves[base // 2 + i])
            at += some


@compiled
def _dot(q, r, rows, at):
    total = np.float32(0)
    for i in range(rows.shape[1]):
        total += q[0, r, i] * rows[at, i]
    return total


@compiled
def _add(found, by, at, sums, to):
    """The columns of a fragment ``[4, 64]`` times ``by[r, at]``, added to ``sums[r, to]``, for every row r."""
    a, b, c, d = found[0], found[1], found[2], found[3]
    for r in range(len(sums)):
        e, f, g, h, mine = by[r, at, 0], by[r, at, 1], by[r, at, 2], by[r, at, 3], sums[r, to]
        for i in range(len(mine)):
            mine[i] += (a[i] * e[i] + b[i] * f[i]) + (c[i] * g[i] + d[i] * h[i])


@compiled
def _spread(values, first, by, r, at):
    """16 numbers, by token (V) or dim (K) of a fragment, to the columns ``by[r, at]`` that they are multiplied with."""
    for row in range(ROWS):
        i = first + 8 * (row // 2) + row % 2
        a, b, c, d = values[r, i], values[r, i + 2], values[r, i + 4], values[r, i + 6]
        for lane in range(by.shape[3] // 4):
            by[r, at, row, 4 * lane], by[r, at, row, 4 * lane + 1] = a, b
            by[r, at, row, 4 * lane + 2], by[r, at, row, 4 * lane + 3] = c, d


@compiled
def _four(sums, r, at, i):
    """The columns of a token (K) or dim (V) added up."""
    return (sums[r, at, 4 * i] + sums[r, at, 4 * i + 1]) + (sums[r, at, 4 * i + 2] + sums[r, at, 4 * i + 3])


@compiled
def _keys(words, halves, pages, counts, tiers, page_tokens, centre, head, q, scores):
    _, rows, dim = q.shape
    steps, fragments = dim // 16, page_tokens // 16 * (dim // 16)
    bits, scale_bits = np.empty(page_tokens * dim, np.uint32), np.empty(2 * page_tokens, np.uint32)
    flat, scale = bits.view(np.float32), scale_bits.view(np.float32)
    plain = flat.reshape(page_tokens, dim)
    lanes = np.empty((2 * fragments, LANES), np.uint32)
    fields = np.empty((8, LANES), np.float32)
    found = fields.reshape(ROWS, COLUMNS)
    sums, by = np.empty((rows, 1, COLUMNS), np.float32), np.empty((rows, steps, ROWS, COLUMNS), np.float32)
    middle, turned = np.empty(rows, np.float32), q[1]
    for r in range(rows):
        middle[r] = _dot(q, r, centre, head)
        for step in range(steps):
            _spread(turned, 16 * step, by, r, step)
    at = 0
    for tier in range(len(tiers)):
        kind, k_bits, k_words, scale_offset = tiers[tier, 0], tiers[tier, 1], tiers[tier, 3], tiers[tier, 6]
        left = counts[tier]
        for page in range((left + page_tokens - 1) // page_tokens):
            base, some = np.int64(pages[tier, page]) * UNIT, min(left - page * page_tokens, page_tokens)
            if kind != CODES:
                floats(words, halves, base, some * dim, kind, bits, flat)
                for i in range(some):
                    for r in range(rows):
                        scores[r, at + i] = _dot(q, r, plain, i)
                at += some
                continue
            lanes_of(words[base // 4 :], k_words, lanes)
            floats(words, halves, base + scale_offset, 2 * page_tokens, FLOAT16, scale_bits, scale)
            for tile in range((some + 15) // 16):
                for r in range(rows):
                    for c in range(COLUMNS):
                        sums[r, 0, c] = 0
                for step in range(steps):
                    levels(lanes, k_bits, tile * steps + step, fragments, fields)
                    _add(found, by, step, sums, 0)
                here = min(some - 16 * tile, 16)
                for i in range(here):
                    of = scale[scale_index(16 * tile + i, 0)]
                    for r in range(rows):
                        scores[r, at + i] = _four(sums, r, 0, i) * of + middle[r]
                at += here


@compiled
def _values(words, halves, pages, counts, tiers, page_tokens, weights, out):
    _, rows, dim = out.shape
    steps, fragments = dim // 16, page_tokens // 16 * (dim // 16)
    bits, scale_bits = np.empty(page_tokens * dim, np.uint32), np.empty(2 * page_tokens, np.uint32)
    flat, scale = bits.view(np.float32), scale_bits.view(np.float32)
    plain = flat.reshape(page_tokens, dim)
    lanes = np.empty((2 * fragments, LANES), np.uint32)
    fields = np.empty((8, LANES), np.float32)
    found = fields.reshape(ROWS, COLUMNS)
    sums, by = np.zeros((rows, steps, COLUMNS), np.float32), np.empty((rows, 1, ROWS, COLUMNS), np.float32)
    some_weights = np.empty((rows, 16), np.float32)
    at = 0
    for tier in range(len(tiers)):
        kind, v_bits, v_words, v_offset = tiers[tier, 0], tiers[tier, 2], tiers[tier, 4], tiers[tier, 5]
        scale_offset = tiers[tier, 6]
        left = counts[tier]
        for page in range((left + page_tokens - 1) // page_tokens):
            base, some = np.int64(pages[tier, page]) * UNIT, min(left - page * page_tokens, page_tokens)
            if kind != CODES:
                floats(words, halves, base + v_offset, some * dim, kind, bits, flat)
                for i in range(some):
                    for r in range(rows):
                        weight = weights[r, at + i]
                        for d in range(plain.shape[1]):
                            out[0, r, d] += weight * plain[i, d]
                at += some
                continue
            lanes_of(words[(base + v_offset) // 4 :], v_words, lanes)
            floats(words, halves, base + scale_offset, 2 * page_tokens, FLOAT16, scale_bits, scale)
            for tile in range((some + 15) // 16):
                here = min(some - 16 * tile, 16)
                for i in range(16):
                    of = scale[scale_index(16 * tile + i, 1)]
                    for r in range(rows):  # the scales of slots without a token may be NaN
                        some_weights[r, i] = weights[r, at + i] * of if i < here else np.float32(0)
                for r in range(rows):
                    _spread(some_weights, 0, by, r, 0)
                for step in range(steps):
                    levels(lanes, v_bits, tile * steps + step, fragments, fields)
                    _add(found, by, 0, sums, step)
                at += here
    for r in range(rows):
        for d in range(dim):
            out[1, r, d] = _four(sums, r, d // 16, d % 16)
