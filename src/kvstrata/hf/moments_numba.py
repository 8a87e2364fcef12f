"""`moments.sums` on the CPU in one compiled loop over tokens; torch would take 60 passes over all rows."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.loops import fast

from .moments import PromptSample, channels


def sums(sample: PromptSample) -> torch.Tensor:
    """`moments.sums` up to rounding: float32 ``[rows, kv_heads, 10, pairs]``."""
    query, key, weight, number, (cos, sin), largest, is_interleaved = sample
    rows, kv_heads, _, dim = key.shape
    every = np.arange(dim)
    pairs = channels(cos.shape[1], dim, is_interleaved=is_interleaved)
    first, second = (np.concatenate([every[pair[i]] for pair in pairs]) for i in (0, 1))
    out = torch.zeros(rows, kv_heads, 10, dim // 2, dtype=torch.float32, device="cpu")
    k, q = (x.detach().float().transpose(1, 2).contiguous().numpy() for x in (key, query))
    _add(
        q, k, weight.contiguous().numpy(), number.contiguous().numpy(), cos.contiguous().numpy(),
        sin.contiguous().numpy(), np.float32(largest), first, second, out.numpy(),
    )  # fmt: skip
    return out


@fast
def _clean(row, channel, largest, out):
    """Selected channels of a row; values that are not finite become 0."""
    for p in range(len(out)):
        value = row[channel[p]]
        value = value if abs(value) < np.float32(np.inf) else np.float32(0)
        value = value if value < largest else largest
        out[p] = value if value > -largest else -largest


@fast
def _add(query, key, weight, number, cos, sin, largest, first, second, out):
    """Add up rows ``[rows, n, heads, D]``, token by token."""
    pairs, turned, group = len(first), cos.shape[1], query.shape[2] // key.shape[2]
    c, s = np.ones(pairs, np.float32), np.zeros(pairs, np.float32)
    a, b = np.empty(pairs, np.float32), np.empty(pairs, np.float32)
    squares = np.empty((3, pairs), np.float32)
    for row in range(len(key)):
        for i in range(key.shape[1]):
            w = weight[row, i]
            if w <= 0:
                continue
            position = min(max(number[row, i], 0), len(cos) - 1)
            for p in range(turned):
                c[p], s[p] = cos[position, p], sin[position, p]
            for head in range(key.shape[2]):
                to = out[row, head]
                _clean(key[row, i, head], first, largest, a)
                _clean(key[row, i, head], second, largest, b)
                _add_key(a, b, c, s, w, to)
                squares[:] = 0
                for g in range(head * group, head * group + group):
                    _clean(query[row, i, g], first, largest, a)
                    _clean(query[row, i, g], second, largest, b)
                    _add_squares(a, b, squares[0], squares[1], squares[2])
                _add_query(squares[0], squares[1], squares[2], c, s, w / np.float32(group), to)


@fast
def _add_key(a, b, c, s, w, to):
    for p in range(len(a)):
        x, y = a[p] * c[p] + b[p] * s[p], b[p] * c[p] - a[p] * s[p]
        to[0, p] += w * (a[p] * a[p])
        to[1, p] += w * (b[p] * b[p])
        to[2, p] += w * x
        to[3, p] += w * y
        to[4, p] += w * (x * x - y * y)
        to[5, p] += w * (np.float32(2) * x * y)


@fast
def _add_squares(a, b, first, second, product):
    for p in range(len(a)):
        first[p] += a[p] * a[p]
        second[p] += b[p] * b[p]
        product[p] += a[p] * b[p]


@fast
def _add_query(first, second, product, c, s, w, to):
    for p in range(len(first)):
        cos, sin = c[p] * c[p] - s[p] * s[p], np.float32(2) * c[p] * s[p]
        unlike, cross = first[p] - second[p], np.float32(2) * product[p]
        to[6, p] += w * first[p]
        to[7, p] += w * second[p]
        to[8, p] += w * (unlike * cos + cross * sin)
        to[9, p] += w * (cross * cos - unlike * sin)
