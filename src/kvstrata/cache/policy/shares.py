"""Shares: layers that suffer more from rounding get more of the bytes, with the same total.

A fraction allows every layer the same bytes per token. Part of them pay for the lowest tier; the rest is slack, which
is distributed over layers. One more bit in K and V has about a third of the squared error, so bytes should grow with
the logarithm of the sensitivity:

    bytes(l) = least + clip(slack + BYTES D (ln s(l) - x), 0, most - least),    mean of bytes(l) = least + slack

x, the Lagrange multiplier of the sum, is bisected. Shares multiply the slack at any length, so no layer is allowed less
than its need, the sum over layers is the same as without shares, and a context without slack has no shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvstrata.checks import check_number

from .budget import Budget

BYTES = 0.075  # per value of head_dim, for a sensitivity e times as high; chosen by KL: docs/decisions.md
RANGE = 1e6  # range of sensitivities: lower ones are raised to the highest divided by this


def check_sensitivity(values: Sequence[float] | None, layers: int) -> tuple[float, ...] | None:
    """One number of at least 0 per layer, or None; raises TypeError or ValueError."""
    if values is None:
        return None
    try:
        given = tuple(values)
    except TypeError:
        raise TypeError(f"sensitivity: expected {layers} numbers, one per layer, got {values!r}") from None
    if len(given) != layers:
        raise ValueError(f"sensitivity: expected {layers} numbers, one per layer, got {len(given)}")
    for value in given:
        check_number("sensitivity", value, "[0, inf)", lambda x: 0 <= x < math.inf)
    return tuple(map(float, given))


def shares_of(budget: Budget, sensitivity: Sequence[float], head_dim: int) -> tuple[float, ...]:
    """Share of a fraction's slack by layer, mean 1; empty if there is nothing to share."""
    lowest, widest = (budget.page_price[tier] / budget.page_tokens for tier in (-1, 1))
    return by_slack(sensitivity, float(budget.amount or 0) * budget.token_bytes - lowest, widest - lowest, head_dim)


def by_slack(sensitivity: Sequence[float], slack: float, most: float, head_dim: int) -> tuple[float, ...]:
    """`shares_of` with ``slack`` bytes per token and KV head above the lowest tier, and ``most`` for the widest."""
    cost = np.array(sensitivity, np.float64)
    if not 0 < slack < most or not cost.any():
        return ()
    wanted = BYTES * head_dim * np.log(np.maximum(cost / cost.max(), 1 / RANGE))
    low, high = wanted.min() - most, wanted.max() + slack
    for _ in range(100):
        middle = (low + high) / 2
        mean = np.clip(slack + wanted - middle, 0, most).mean()
        low, high = (middle, high) if mean > slack else (low, middle)
    return tuple((np.clip(slack + wanted - high, 0, most) / slack).tolist())
