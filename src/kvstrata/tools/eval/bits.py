"""A StrataCache whose budget is the mean code width, for comparing rules and formats at equal widths.

A byte budget also pays for recent tokens, pages and tables, so at short lengths it leaves older tokens few bits, and
more later. Here all tokens between sink and recent ones have the same mean width at every length, whatever the rest
costs; `mean_bits` returns the actual width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstrata.cache import TieredCache
from kvstrata.cache.policy.budget import Budget, tiers_for
from kvstrata.cache.policy.shares import by_slack
from kvstrata.hf import StrataCache


@dataclasses.dataclass(frozen=True)
class CodeBudget(Budget):
    """``old_price`` bytes per token and head beyond sink and recent tokens, which have whole plain pages."""

    old_price: float = 0.0
    floor_extra = 0.0  # the width applies at every length

    def granted(self, tokens: int) -> int:
        plain = -(-min(tokens, self.kept + 1) // self.page_tokens) * self.page_price[0]
        old = max(tokens - self.kept, 0)
        # One more page of the narrowest tier: pages are charged whole, but here the width is what is specified.
        return self.overhead + self.kv_heads * int(plain + old * self.old_price + self.page_price[-1])

    @functools.cached_property
    def granted_by_length(self) -> np.ndarray:
        return np.array([self.granted(tokens) for tokens in range(self.max_tokens + self.look_ahead + 1)], np.int64)


def code_budget(cache: TieredCache, bits: float, sensitivity: Sequence[float] | None = None) -> CodeBudget:
    """Budget with which older tokens have ``bits`` per value, averaged over K and V and over layers."""
    given = {f.name: getattr(cache.budget, f.name) for f in dataclasses.fields(Budget)}
    widths = [(f.k_bits + f.v_bits) / 2 for f in cache.formats[1:]]
    if not min(widths) <= bits <= max(widths):
        raise ValueError(f"bits: expected {min(widths):g} to {max(widths):g} with these tiers, got {bits!r}")
    pairs = sorted(zip(widths, cache.budget.page_price[1:], strict=True))
    price = float(np.interp(bits, [width for width, _ in pairs], [price for _, price in pairs]))
    low, high = (cache.budget.page_price[tier] for tier in (-1, 1))
    slack, most = (price - low) / cache.page_tokens, (high - low) / cache.page_tokens
    given["shares"] = () if sensitivity is None else by_slack(sensitivity, slack, most, cache.head_dim)
    return CodeBudget(**given | {"amount": 0.5}, old_price=price / cache.page_tokens)


def mean_bits(cache: TieredCache) -> float:
    """Code bits per value of tokens beyond sink and recent ones; those that are still plain count in full."""
    tokens = cache.memory().tokens
    kept = sum(
        min(cache.length(request, layer), cache.recent_tokens + cache.sink_tokens)
        for request in cache.requests
        for layer in range(cache.layers)
    )
    plain = max(tokens[cache.formats[0].name] - kept * cache.kv_heads, 0)
    coded = [(tokens[f.name], (f.k_bits + f.v_bits) / 2) for f in cache.formats[1:]]
    total = plain + sum(n for n, _ in coded)
    return (16 * plain + sum(n * bits for n, bits in coded)) / total if total else 0.0


class BitsCache(StrataCache):
    """``StrataCache(config, ...)`` with ``bits`` instead of a budget; without ``tiers`` those for these bits."""

    def __init__(self, config: Any, bits: float, **options: Any) -> None:
        given = {"tiers": tiers_for(bits)} | options | {"settle_every": 1}
        super().__init__(config, budget=0.5, **given)
        self.bits = bits

    def _check_budget(self, tiered: TieredCache) -> None:
        """Nothing to check: the fraction is replaced."""

    def build(self, key: torch.Tensor) -> None:
        fresh = self._tiered is None
        super().build(key)
        if fresh:
            sensitivity = None if self.calibration is None else self.calibration.sensitivity
            self.tiered.budget = code_budget(self.tiered, self.bits, sensitivity)
