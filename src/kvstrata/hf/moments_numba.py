"""`moments.sums` on the CPU in one compiled loop over tokens; torch would take 60 passes over all rows."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.loops import fast

from .moments import PromptSample, channels

# Scratch memory of a loop: PAIRS numbers each of the channels of a pair, cos and sin, squares of query heads, and sums.
# LLVM makes vectors of a loop over several arrays only if it can show that they do not overlap: here distances are
# constants.
PAIRS = np.uint64(128)
FIRST, SECOND, COS, SIN, FIRST_SQUARE, SECOND_SQUARE, PRODUCT = (PAIRS * np.uint64(i) for i in range(7))
SUMS = tuple(PAIRS * np.uint64(i) for i in range(7, 17))


def sums(sample: PromptSample) -> torch.Tensor:
    """`moments.sums` up to rounding: float32 ``[rows, kv_heads, 10, pairs]``."""
    query, key, weight, number, (cos, sin), largest, is_interleaved = sample
    rows, kv_heads, _, dim = key.shape
    pairs = channels(cos.shape[1], dim, is_interleaved=is_interleaved)
    every = np.arange(dim, dtype=np.uint64)  # unsigned, otherwise the loop compares every index with 0
    channel = np.stack([np.concatenate([every[pair[i]] for pair in pairs]) for i in (0, 1)])
    out = torch.empty(rows, kv_heads, 10, dim // 2, dtype=torch.float32, device="cpu")
    k, q = (x.detach().float().transpose(1, 2).contiguous().numpy() for x in (key, query))
    _add_rows(
        q, k, weight.contiguous().numpy(), number.contiguous().numpy(), cos.contiguous().numpy(),
        sin.contiguous().numpy(), np.float32(largest), channel, out.numpy(),
    )  # fmt: skip
    return out


@fast
def _add_rows(query, key, weight, number, cos, sin, largest, channel, out):
    """Add up rows ``[rows, n, heads, D]``, token by token; ``channel [2, pairs]``: those of each pair."""
    turned, heads, group = cos.shape[1], key.shape[2], query.shape[2] // key.shape[2]
    pairs, clean = np.uint64(channel.shape[1]), np.empty(key.shape[3], np.float32)
    for row in range(len(key)):
        spaces = np.zeros((heads, np.int64(PAIRS) * 17), np.float32)
        for i in range(key.shape[1]):
            w = weight[row, i]
            if w <= 0:
                continue
            position = min(max(number[row, i], 0), len(cos) - 1)
            for head in range(heads):
                space = spaces[head]
                for p in range(pairs):
                    rotated = p < turned
                    space[COS + p] = cos[position, p] if rotated else np.float32(1)
                    space[SIN + p] = sin[position, p] if rotated else np.float32(0)
                _load(key[row, i, head], channel, largest, clean, space)
                _add_key(space, pairs, w)
                for g in range(head * group, head * group + group):
                    _load(query[row, i, g], channel, largest, clean, space)
                    _add_squares(space, pairs)
                _add_query(space, pairs, w / np.float32(group))
        for head in range(heads):
            for n in range(10):
                for p in range(pairs):
                    out[row, head, n, p] = spaces[head, PAIRS * np.uint64(7 + n) + p]


@fast
def _load(row, channel, largest, clean, space):
    """Load the pairs of a row; values that are not finite become 0."""
    for d in range(len(clean)):
        value = row[d]
        value = value if abs(value) < np.float32(np.inf) else np.float32(0)
        value = value if value < largest else largest
        clean[d] = value if value > -largest else -largest
    for p in range(np.uint64(channel.shape[1])):
        space[FIRST + p], space[SECOND + p] = clean[channel[0, p]], clean[channel[1, p]]


@fast
def _add_key(space, pairs, w):
    for p in range(pairs):
        a, b, c, s = space[FIRST + p], space[SECOND + p], space[COS + p], space[SIN + p]
        x, y = a * c + b * s, b * c - a * s
        space[SUMS[0] + p] += w * (a * a)
        space[SUMS[1] + p] += w * (b * b)
        space[SUMS[2] + p] += w * x
        space[SUMS[3] + p] += w * y
        space[SUMS[4] + p] += w * (x * x - y * y)
        space[SUMS[5] + p] += w * (np.float32(2) * x * y)


@fast
def _add_squares(space, pairs):
    for p in range(pairs):
        a, b = space[FIRST + p], space[SECOND + p]
        space[FIRST_SQUARE + p] += a * a
        space[SECOND_SQUARE + p] += b * b
        space[PRODUCT + p] += a * b


@fast
def _add_query(space, pairs, w):
    """Add the squares of the query heads of a KV head, and clear them."""
    for p in range(pairs):
        c, s = space[COS + p], space[SIN + p]
        first, second, cross = space[FIRST_SQUARE + p], space[SECOND_SQUARE + p], np.float32(2) * space[PRODUCT + p]
        cos, sin, unlike = c * c - s * s, np.float32(2) * c * s, first - second
        space[SUMS[6] + p] += w * first
        space[SUMS[7] + p] += w * second
        space[SUMS[8] + p] += w * (unlike * cos + cross * sin)
        space[SUMS[9] + p] += w * (cross * cos - unlike * sin)
        space[FIRST_SQUARE + p] = space[SECOND_SQUARE + p] = space[PRODUCT + p] = 0
