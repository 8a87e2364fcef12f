"""Settling on a CUDA device: kernels plan and move without token lists; the host waits once, for counts.

    places ──plan_cuda.py──▶ targets ──moves_cuda.py──▶ counts ──▶ host: pages ──▶ launches of the moves

The counts are copied to pinned memory behind an event, so a plan can be made one step ahead and awaited in the next.
The plan of a prompt without mass depends only on its length: it is made for the first layer and holds for all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata import backends
from kvstrata.cache.move import apply
from kvstrata.cache.move.moves_cuda import Moves
from kvstrata.cache.storage.page import NewRows
from kvstrata.cache.storage.tokens import Fresh

from .centre_cuda import Centres, centres_of_places, stored_centres
from .plan_cuda import DevicePlan, plan_places

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


LARGEST_KEPT = 1 << 22  # maximum new tokens x heads of a prompt whose plan is kept for the next layer


class Outcome:
    """Results of a plan's kernels, being copied to the host."""

    def __init__(self, device: DevicePlan) -> None:
        self.device = device
        self._results, self._event = device.results, None
        if device.results.is_cuda:
            self._results = torch.empty(device.results.shape, dtype=torch.uint8, pin_memory=True)
            self._results.copy_(device.results, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @functools.cached_property
    def values(self) -> tuple[list[int | None], list[int], np.ndarray]:
        """``needed`` and ``spare`` per scope as in `plan.Plans`, and the numbers of `Moves`; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self.device.read(self._results.numpy())


@dataclass(frozen=True)
class Planned:
    """A plan for places, not executed yet; its kernels and the copy of its outcome are queued."""

    layers: np.ndarray  # [places]
    requests: np.ndarray
    fresh: Fresh | None
    outcome: Outcome
    counted: Moves

    @property
    def needed(self) -> list[int | None]:
        return self.outcome.values[0]

    @property
    def spare(self) -> list[int]:
        return self.outcome.values[1]


def supports(cache: CacheState) -> bool:
    """True if kernels plan for this cache."""
    return backends.resolve(cache.buckets.backend, cache.device) == "cuda"


def plan(
    cache: CacheState,
    places: Sequence[tuple[int, list[int]]],
    lengths: Sequence[Sequence[int]],
    fresh: Fresh | None = None,
    rows: NewRows | None = None,
    unwritten: np.ndarray | None = None,
) -> Planned:
    """Plan places, each a layer and the requests of a scope, whose requests will have these lengths.

    ``rows``: K and V of ``fresh``. Without them, tokens planned as new are left out when the plan is executed: they
    have room and are written later. ``unwritten``: 1 for each place whose last token is counted but not written yet.
    """
    layers = np.array([layer for layer, scope in places for _ in scope])
    requests = np.array([request for _, scope in places for request in scope])
    key = None
    if rows is not None and fresh is not None and fresh.importance is None:
        key = _prompt(cache, layers, requests, lengths, fresh)
        if key is not None and cache._prompt is not None and cache._prompt[0] == key:
            return reuse_plan(cache, cache._prompt[1], layers, requests, fresh, rows)
    planned = _queue(
        cache,
        layers,
        requests,
        np.array([n for scope in lengths for n in scope], np.int64),
        np.array([len(scope) for _, scope in places]),
        np.array(cache.budget.pages_at([layer for layer, _ in places], [scope[0] for scope in lengths]), np.int64),
        fresh,
        rows,
        unwritten,
    )
    if key is not None:  # without the rows
        cache._prompt = (key, planned.outcome)
    return planned


def plan_each(
    cache: CacheState,
    layers: np.ndarray,
    requests: np.ndarray,
    lengths: np.ndarray,
    fresh: Fresh,
    unwritten: np.ndarray | None = None,
) -> Planned:
    """`plan` of places that do not share their bytes, all arrays ``[places]``; rows of ``fresh`` are written later."""
    allowed = cache.budget.granted_at(layers, lengths) - cache.budget.overhead
    return _queue(cache, layers, requests, lengths, np.ones_like(layers), allowed, fresh, None, unwritten)


def _queue(
    cache: CacheState,
    layers: np.ndarray,
    requests: np.ndarray,
    lengths: np.ndarray,
    scopes: np.ndarray,
    allowed: np.ndarray,
    fresh: Fresh | None,
    rows: NewRows | None,
    unwritten: np.ndarray | None,
) -> Planned:
    """Queue the kernels that plan and count, and the copy of their results; arrays as for `plan_places`."""
    where, headroom = requests * cache.layers + layers, cache.policy.settle_every
    device = plan_places(
        cache.buckets, cache.policy, where, lengths, cache.reports, scopes, allowed, headroom, fresh, unwritten
    )
    addresses = {"places": device.places, "numbers": device.numbers}
    if rows is not None and fresh is not None:
        addresses["fresh"] = device.fresh
    counted = Moves(
        cache.buckets,
        where,
        device.target,
        device.lease,
        starts=device.starts,
        fresh=None if rows is None else fresh,
        rows=apply.aligned_rows(rows),
        addresses=addresses,
        memory=device.uploaded,
    )
    return Planned(layers, requests, fresh, Outcome(device), counted)


def _prompt(
    cache: CacheState, layers: np.ndarray, requests: np.ndarray, lengths: Sequence[Sequence[int]], fresh: Fresh
) -> tuple[object, ...] | None:
    """Cache key of a plan for prompts; None if there are other tokens, or too many new ones to keep it."""
    if cache.buckets.host_count[requests, layers].any():
        return None
    if int(fresh.counts.sum()) * cache.kv_heads > LARGEST_KEPT:
        return None
    shares = tuple(cache.budget.shares[layer] for layer in layers) if cache.budget.shares else ()
    return (tuple(map(tuple, lengths)), fresh.packed().tobytes(), shares)


def is_prompt(cache: CacheState, planned: Planned) -> bool:
    """True if a plan is for prompts with separate allowances: it then holds in layers with the same share."""
    return not cache.budget.shared and cache._prompt is not None and cache._prompt[1] is planned.outcome


def reuse_plan(
    cache: CacheState, same: Outcome, layers: np.ndarray, requests: np.ndarray, fresh: Fresh, rows: NewRows
) -> Planned:
    """A plan for the same requests in another layer, whose outcome is known or being copied."""
    device = same.device
    counted = Moves(
        cache.buckets,
        requests * cache.layers + layers,
        device.target,
        device.lease,
        starts=device.starts,
        fresh=fresh,
        rows=apply.aligned_rows(rows),
        addresses={"numbers": device.numbers, "fresh": device.fresh},
        memory=device.uploaded,
        counts=False,
    )
    return Planned(layers, requests, fresh, same, counted)


def coded(cache: CacheState, planned: Planned, numbers: np.ndarray | None = None) -> np.ndarray:
    """True for each place that gets tokens as codes; ``numbers`` default to those of the plan."""
    came = (planned.outcome.values[2] if numbers is None else numbers)[1]
    return came.reshape(len(planned.layers), -1, len(cache.page_formats))[:, :, 1:].any((1, 2))


def move(
    cache: CacheState,
    change: Transaction,
    planned: Planned,
    rows: NewRows | None = None,
    without: np.ndarray | None = None,
) -> tuple[Centres, apply.CountedMoves | None]:
    """Execute a plan when the transaction completes; ``rows`` of new tokens are those it was planned with.

    ``without``: True for each place that stays as it is. Returns what will run; None for moves if there are none.
    """
    layers, requests, numbers = planned.layers, planned.requests, planned.outcome.values[2]
    if without is not None and without.any():
        numbers = numbers.copy()
        numbers.reshape(3, len(layers), -1)[:, without] = 0
        planned.counted.leave_out(without)
    device = planned.outcome.device
    if planned.counted.counts and cache._centred[requests, layers].all():
        centres = stored_centres(cache, device.places, len(layers), device.lease)
    else:
        get_codes = coded(cache, planned, numbers)
        centres = centres_of_places(cache, change, layers, requests, get_codes, planned.fresh, rows)
    moved = apply.prepare_counted(
        cache.buckets, change, layers, requests, planned.counted, numbers, centres.rows, centres.directions
    )
    if moved is not None:
        change.launch(moved.run)
    return centres, moved
