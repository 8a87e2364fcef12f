"""Softmax on the CPU in compiled loops, one row of scores at a time, in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvstrata.loops import fast

LOG2E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
LEAST = np.float32(-87.0)  # exp of anything below is 0 here
LANES = 32  # independent maxima: a single one would serialise the comparisons


def _bitcast(typing, bits):
    """The float32 with these bits, int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_float_of: Any = intrinsic(_bitcast)


@fast
def soften(scores, softcap):
    for i in range(len(scores)):
        scores[i] = softcap * math.tanh(scores[i] / softcap)


@fast
def hide(scores, position, last, before):
    """Set scores to -inf except for tokens at positions ``before < p <= last``."""
    for i in range(len(scores)):
        if position[i] > last or position[i] <= before:
            scores[i] = -np.inf


@fast
def exponents(scores):
    """Turn scores into exponentials of their distance to the maximum; returns the maximum and their sum.

    The maximum is NaN if a score is; exponentials are NaN if it is NaN or +inf, and zero if it is -inf.
    """
    top = greatest(scores)
    if any_nan(scores):
        top = np.float32(np.nan)
    if top != top or top == np.inf:
        for i in range(len(scores)):
            scores[i] = np.nan
        return top, np.float32(np.nan)
    return top, exponentials(scores, top)


@fast
def merged(stats, sink, by):
    """Softmax over parts and a sink: maximum and sum of all, from ``stats [parts, 2]`` of `exponents`.

    Sets ``by [parts]`` to what the parts' sums of exponentials are multiplied with. If a score or the sink is NaN or
    +inf, all of ``by`` is NaN and the sum is 0, so that the log of the sum is the maximum, as in torch.
    """
    top, known = np.float32(sink), sink == sink
    for part in range(len(stats)):
        known = known and stats[part, 0] == stats[part, 0]
        top = max(top, stats[part, 0])
    if not known or top == np.inf:
        for part in range(len(stats)):
            by[part] = np.nan
        return (top if known else np.float32(np.nan)), np.float32(0)
    if top == -np.inf:
        for part in range(len(stats)):
            by[part] = 0
        return top, np.float32(0)
    total = np.float32(math.exp(sink - top))
    for part in range(len(stats)):
        by[part] = math.exp(stats[part, 0] - top)
        total += stats[part, 1] * by[part]
    for part in range(len(stats)):
        by[part] /= total
    return top, total


@fast
def any_nan(scores):
    count = 0
    for i in range(len(scores)):
        count += scores[i] != scores[i]
    return count > 0


@fast
def greatest(scores):
    """Maximum, -inf if empty; NaN is ignored."""
    lanes = np.empty(min(LANES, len(scores)), np.float32)  # independent lanes, see LANES
    for i in range(len(lanes)):
        lanes[i] = -np.inf
    for first in range(0, len(scores) - len(lanes) + 1, max(len(lanes), 1)):
        some = scores[first : first + len(lanes)]
        for i in range(len(lanes)):
            lanes[i] = some[i] if some[i] > lanes[i] else lanes[i]
    top = np.float32(-np.inf)
    for i in range(len(lanes)):
        top = max(top, lanes[i], scores[len(scores) - 1 - i])
    return top


@fast
def exponentials(scores, top):
    """Turn scores into exp(score - top) and return their sum; all zeros if ``top`` is -inf."""
    if top == -np.inf:
        for i in range(len(scores)):
            scores[i] = 0
        return np.float32(0)
    # exp(x) = 2 ** n * exp(rest), |rest| <= ln(2) / 2, in float32 vectors; 2 ** n is built from its bits.
    total = np.float32(0)
    for i in range(len(scores)):
        x = scores[i] - top
        x = x if x > LEAST else LEAST
        n = np.floor(x * LOG2E + np.float32(0.5))
        rest = x - n * LN2_HIGH - n * LN2_LOW
        power = _float_of(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
        p = np.float32(1.9875691500e-4)
        p = p * rest + np.float32(1.3981999507e-3)
        p = p * rest + np.float32(8.3334519073e-3)
        p = p * rest + np.float32(4.1665795894e-2)
        p = p * rest + np.float32(1.6666665459e-1)
        p = p * rest + np.float32(0.5)
        p = (p * rest * rest + rest + np.float32(1)) * power
        p = p if x > LEAST else np.float32(0)
        scores[i] = p
        total += p
    return total
