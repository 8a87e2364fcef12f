"""A plan made one step ahead by kernels (ahead.py), if each request has its own bytes: arrays instead of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstrata.cache.storage.tokens import Fresh

from . import settle_cuda
from .importance import initial_of

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


def supports(cache: CacheState) -> bool:
    """True if kernels plan the places of this cache, each place on its own."""
    return not cache.budget.shared and settle_cuda.supports(cache)


class DeviceAhead:
    """A plan for places, each a (request, layer), with one more token; ``valid`` requests are unchanged since."""

    def __init__(self, cache: CacheState, ids: np.ndarray, wanted: np.ndarray) -> None:
        """``wanted [requests, layers]``: places to plan; the last token of each is counted but not written yet."""
        self._cache, self._ids, self.valid = cache, ids, set(ids.tolist())
        layers, row = np.nonzero(wanted.T)
        requests = ids[row]
        lengths = cache._lengths[requests, layers].astype(np.int64)
        ones = np.ones_like(lengths)
        fresh = Fresh(ones, np.zeros_like(ones), lengths, initial_of(cache.policy.mode, lengths + 1))
        self._planned = settle_cuda.plan_each(cache, layers, requests, lengths + 1, fresh, unwritten=ones)

    def forget(self, requests: Sequence[int]) -> None:
        self.valid.difference_update(requests)

    def carry_out(self, change: Transaction, ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Move the tokens of wanted places that are planned and fit; True for those, ``[requests, layers]``."""
        planned, done = self._planned, np.zeros_like(wanted)
        row = np.full(self._cache.max_requests, -1)
        row[ids] = np.arange(len(ids))
        if len(self.valid) < len(self._ids):
            row[[r for r in self._ids.tolist() if r not in self.valid]] = -1
        rows = row[planned.requests]
        chosen = (rows >= 0) & wanted[rows, planned.layers]
        if not chosen.any():  # return without waiting for the device
            return done
        chosen &= [needed is None for needed in planned.needed]
        if chosen.any():
            settle_cuda.move(self._cache, change, planned, without=~chosen)
            done[rows[chosen], planned.layers[chosen]] = True
        return done
