"""Settling on a CUDA device: kernels plan and move, and there are no lists of tokens; the host waits once, for counts.

places ──plan_cuda.py──▶ targets, in device memory ──move/apply.py──▶ counts ──▶ pages, launches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata import backends
from kvstrata.cache.move import apply
from kvstrata.cache.storage.page import NewRows
from kvstrata.cache.storage.tokens import Fresh

from .centre import centres_of_places
from .plan_cuda import DevicePlan, plan_places

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


@dataclass(frozen=True)
class Planned:
    """A plan for places, not carried out yet. ``needed`` and ``spare`` are per scope, as in `plan.Plans`."""

    layers: np.ndarray  # [places]
    requests: np.ndarray
    fresh: Fresh | None
    device: DevicePlan
    needed: list[int | None]
    spare: list[int]


def supports(cache: CacheState) -> bool:
    """True if kernels plan for this cache."""
    return backends.resolve(cache.buckets.backend, cache.device) == "cuda"


def plan(
    cache: CacheState,
    places: Sequence[tuple[int, list[int]]],
    lengths: Sequence[Sequence[int]],
    fresh: Fresh | None = None,
) -> Planned:
    """Plan places, a layer and the requests of a scope each, whose requests will have these lengths."""
    layers = np.array([layer for layer, scope in places for _ in scope])
    requests = np.array([request for _, scope in places for request in scope])
    allowed = {n: cache.budget.pages(n) for n in {scope[0] for scope in lengths}}
    device = plan_places(
        cache.buckets,
        cache.policy,
        requests * cache.layers + layers,
        np.array([n for scope in lengths for n in scope], np.int64),
        cache.reports,
        [len(scope) for _, scope in places],
        [allowed[scope[0]] for scope in lengths],
        cache.policy.settle_every,
        fresh,
    )
    return Planned(layers, requests, fresh, device, *device.outcome())


def move(cache: CacheState, change: Transaction, planned: Planned, rows: NewRows | None = None) -> None:
    """Carry out a plan when the transaction completes; ``rows`` are those of new tokens.

    Without them, tokens that were planned as new are left out: they have room and come later.
    """
    layers, requests = planned.layers, planned.requests

    def centres(coded: np.ndarray) -> torch.Tensor:
        return centres_of_places(cache, change, layers, requests, coded, planned.fresh, rows)

    fresh = None if rows is None else planned.fresh
    target, starts = planned.device.target, planned.device.starts
    apply.move_planned(cache.buckets, change, layers, requests, target, starts, fresh, rows, centres)
