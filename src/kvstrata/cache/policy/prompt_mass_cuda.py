"""Appends prompts with mass to one layer with launches prepared by the first.

    first layer   plan, centres ──▶ kept
    others        importance ──▶ the same launches plan for other addresses ──one wait──▶ pages, lists, moves

With mass each layer has its own plan: its counts determine the number of pages, so the host waits for them once.
Nothing
else is uploaded for the plan: the places stay those of the first layer, and tables begin where the layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.move import apply, moves_cuda
from kvstrata.cache.move.launches import Launches
from kvstrata.cache.storage.page import NewRows

from . import centre_cuda, plan_cuda, settle_cuda
from .centre_cuda import Centres
from .prompt_cuda import ADDRESS, Prepared
from .scopes import check_plans

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


def supports(cache: CacheState, planned: settle_cuda.Planned) -> bool:
    """True if the launches of a plan for prompts with mass can be reused for other layers."""
    fresh, device = planned.fresh, planned.outcome.device
    if fresh is None or fresh.importance is None or device.params is None or planned.counted.counting is None:
        return False
    return not cache.budget.shared and len(device.target) <= settle_cuda.LARGEST_KEPT


class PreparedPlan(Prepared):
    """Launches of plan and centres that the first layer of prompts with mass prepared."""

    def __init__(
        self,
        cache: CacheState,
        layer: int,
        requests: np.ndarray,
        rows: NewRows,
        centres: Centres,
        planned: settle_cuda.Planned,
        centred: np.ndarray,
    ) -> None:
        """``centred``: whether each of the requests had a centre before."""
        device, counting = planned.outcome.device, planned.counted.counting
        assert counting is not None
        assert device.params is not None
        assert planned.fresh is not None
        super().__init__(cache, layer, requests, rows, counting.device, centred)
        self._outcome, self._centres = device, centres
        self._fresh = replace(planned.fresh, importance=None)  # each layer has its own importance
        self._plan = Launches(counting.device, (*device.launches, *counting.launches), device)
        count = counting.launches[0].params
        self._of_k.append((centres.params, centre_cuda.OFFSETS["k"]))
        self._add_layer_addresses(cache, device.params, plan_cuda.OFFSETS)
        self._add_layer_addresses(cache, count, moves_cuda.OFFSETS)
        self._add_layer_addresses(cache, centres.params, centre_cuda.OFFSETS)
        self._of_mass = ((device.params, plan_cuda.OFFSETS["mass"]), (count, moves_cuda.OFFSETS["mass"]))

    def prepare(
        self,
        cache: CacheState,
        change: Transaction,
        layer: int,
        rows: NewRows,
        importance: torch.Tensor,
        lengths: Sequence[int],
    ) -> None:
        """Plan, wait, allocate pages; tokens are written when the transaction completes. Raises BudgetExceeded.

        ``importance [tokens, kv_heads]`` float32, ``lengths`` of the requests.
        """
        self._point(layer, rows)
        for params, offset in self._of_mass:
            ADDRESS.pack_into(params, offset, importance.data_ptr())
        self._plan.run()
        outcome = settle_cuda.Outcome(self._outcome)
        self._centres.compute.run()  # while the outcome is copied to the host
        layers, fresh = np.full_like(self._requests, layer), replace(self._fresh, importance=importance)
        planned = settle_cuda.reuse_plan(cache, outcome, layers, self._requests, fresh, rows)
        places = [(layer, [request]) for request in self._requests.tolist()]
        check_plans(cache, places, [[n] for n in lengths], planned.needed)
        begun = settle_cuda.coded(cache, planned) & ~self._centred
        if not np.array_equal(begun, self._centred_after & ~self._centred):  # other centres than the first layer's
            settle_cuda.move(cache, change, planned, rows)
            return
        change.set(cache._centred, (self._requests, layer), self._centred_after)
        if self._centres.store is not None:
            change.launch(self._centres.store.run)
        moved = apply.prepare_counted(
            cache.buckets, change, layers, self._requests, planned.counted, outcome.values[2], self._centres.rows,
            self._centres.directions,
        )  # fmt: skip
        if moved is not None:
            change.launch(moved.run)
