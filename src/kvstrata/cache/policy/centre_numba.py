"""Means of the first rows of K for its centre, on the CPU in compiled loops; bit-identical to those of centre.py."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.loops import exact
from kvstrata.quant.reference import LARGEST

MOST = np.float32(LARGEST)
MOST_BITS, SIGN = np.float32(LARGEST).view(np.int32), np.int32(0x7FFFFFFF)


def means(
    k: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor], head_caches: int, positions: int, stride: int,
    rope_tables: tuple[torch.Tensor, torch.Tensor], far: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Means of rows ``k [n, D]`` as they are, and rotated back by RoPE for both ways of pairing channels.

    ``slots``: head cache and position of each row. ``rope_tables``: cos and sin, float32 ``[positions, pairs]``. Rows
    beyond ``far`` times the median magnitude of their head cache take no part.
    Returns ``[head_caches, D]``, then two pairs of ``[head_caches, pairs]``, as `centre._means` does.
    """
    cos, sin = (x.contiguous().numpy() for x in rope_tables)
    pairs, dim = cos.shape[1], k.shape[1]
    row_at = np.full((head_caches, positions), -1, np.int64)
    row_at[slots[0].numpy(), slots[1].numpy()] = np.arange(len(k))
    out = torch.empty(head_caches, dim + 4 * pairs, dtype=torch.float32, device="cpu")
    rows = k.contiguous().numpy()
    _leave_out_far(rows.view(np.int32), row_at, np.float32(far))
    _add(rows, row_at, stride, cos, sin, out.numpy())
    return list(out.split([dim, *[pairs] * 4], 1))


@exact
def _leave_out_far(bits, row_at, far):
    """Set ``row_at`` to -1 where `centre._without_far_rows` leaves rows out; ``bits`` of float32 order magnitudes."""
    magnitude = np.empty(row_at.shape[1], np.int32)
    for rows in row_at:
        for position in range(len(rows)):
            largest = np.int32(-1)  # of no value
            if rows[position] >= 0:
                row = bits[rows[position]]
                for d in range(len(row)):
                    size = np.int32(row[d] & SIGN)
                    largest = max(largest, np.int32(size if size <= MOST_BITS else np.int32(-1)))
            magnitude[position] = largest
        present = magnitude[magnitude >= 0].view(np.float32)
        if len(present) == 0 or present.max() <= far * present.min():
            continue
        median = np.sort(present)[(len(present) - 1) // 2]
        for position in range(len(rows)):
            if magnitude[position] >= 0 and median > 0 and magnitude.view(np.float32)[position] > far * median:
                rows[position] = -1


@exact
def _add(k, row_at, stride, cos, sin, out):
    pairs, dim, columns = cos.shape[1], k.shape[1], out.shape[1]
    row, flags = np.empty(dim, np.float32), np.empty(dim, np.float32)
    values, part = np.empty((2, columns), np.float32), np.empty((2, columns), np.float32)  # sums and their counts
    total = np.empty((2, columns), np.float32)
    for head_cache in range(len(row_at)):
        total[:] = 0
        for first in range(0, row_at.shape[1], stride):
            part[:] = 0
            for position in range(first, min(first + stride, row_at.shape[1])):
                i = row_at[head_cache, position]
                if i < 0:
                    continue
                for d in range(dim):
                    value = k[i, d]
                    takes_part = abs(value) <= MOST
                    row[d] = value if takes_part else np.float32(0)
                    flags[d] = np.float32(1) if takes_part else np.float32(0)
                for d in range(dim):
                    values[0, d], values[1, d] = row[d], flags[d]
                c, s = cos[position], sin[position]
                _turn(row[:pairs], row[pairs : 2 * pairs], flags[:pairs], flags[pairs : 2 * pairs], c, s,
                      values[:, dim : dim + 2 * pairs])  # fmt: skip
                _turn(row[: 2 * pairs : 2], row[1 : 2 * pairs : 2], flags[: 2 * pairs : 2], flags[1 : 2 * pairs : 2],
                      c, s, values[:, dim + 2 * pairs :])  # fmt: skip
                _plus(part, values)
            _plus(total, part)
        for j in range(columns):
            count = total[1, j]
            out[head_cache, j] = total[0, j] / (count if count > np.float32(1) else np.float32(1))


@exact
def _turn(x, y, has_x, has_y, c, s, to):
    """Rotate pairs of channels back, if both channels take part."""
    pairs = len(c)
    for p in range(pairs):
        both = has_x[p] * has_y[p]
        one, two = x[p] * both, y[p] * both
        to[0, p] = one * c[p] + two * s[p]
        to[0, pairs + p] = two * c[p] - one * s[p]
        to[1, p] = both
        to[1, pairs + p] = both


@exact
def _plus(total, more):
    for i in range(total.shape[0]):
        for j in range(total.shape[1]):
            total[i, j] += more[i, j]
