"""Appends prompts to several empty layers together, in two halves.

    plan     queues importance, targets and counts of all layers on a CUDA device; the host continues
    finish   waits for the counts, then allocates pages, updates tables and stores tokens

The layers of a model deliver the K and V of a prompt one after the other. The host time is about the same for one layer
as for many, and the host does not idle if the device has work queued after the plan. Without kernels that plan,
`finish` does everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.policy import settle_cuda
from kvstrata.cache.policy.importance import initial, updated
from kvstrata.cache.policy.reports import MOST
from kvstrata.cache.policy.room import fits_each
from kvstrata.cache.policy.scopes import Place, check_plans, move_tokens, plan_scopes
from kvstrata.cache.storage.page import NewRows
from kvstrata.cache.storage.tokens import NEW, Fresh, Tokens

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState


def supports(cache: CacheState, layers: Sequence[int], requests: Sequence[int], lengths: Sequence[int]) -> bool:
    """True if prompts of these lengths can be planned together: into empty layers, none fitting as plain rows."""
    if not settle_cuda.supports(cache) and cache.device.type != "cpu":
        return False
    if cache.budget.amount is None or cache.budget.shared:
        return False
    if min(lengths, default=0) <= cache.policy.settle_every or max(lengths) > cache.max_tokens:
        return False
    where = np.ix_(np.array(requests), np.array(layers))
    if cache._lengths[where].any() or cache.buckets.host_count[where].any():
        return False
    return not fits_each(cache, layers, requests, lengths).any()


class LayersAppend:
    """Prompts that are planned but not stored; until `finish`, no other operation may change their requests.

    Args:
        cache: one that `supports` accepts.
        layers: the layers, ascending.
        k, v: ``[layers, tokens, kv_heads, head_dim]`` in the cache's dtype, packed request after request; K divided by
            the balance. They are read by `finish` and must not change before.
        requests, lengths: the requests and the number of tokens of each.
        mass: float32 ``[layers, tokens, kv_heads]``, attention mass of each token; None if unknown.
    """

    def __init__(
        self,
        cache: CacheState,
        layers: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor,
        requests: Sequence[int],
        lengths: Sequence[int],
        mass: torch.Tensor | None,
    ) -> None:
        self._cache, self._requests = cache, list(requests)
        count, tokens = np.array(lengths, np.int64), sum(lengths)
        self._places: list[Place] = [(layer, [request]) for layer in layers for request in requests]
        self._lengths = [[n] for _ in layers for n in lengths]
        self._rows = NewRows(k.detach().reshape(-1, cache.head_dim), v.detach().reshape(-1, cache.head_dim))
        first = (np.arange(len(layers))[:, None] * tokens + (np.cumsum(count) - count)).reshape(-1)
        counts = np.tile(count, len(layers))
        self._counts = counts
        where = np.array([request * cache.layers + layer for layer, [request] in self._places])
        self._where = where  # [places], index in tables [requests, layers]
        if (held := cache._lengths.reshape(-1)[where]).any():
            layer, [request] = self._places[int(held.argmax())]
            raise ValueError(
                f"layers: expected no tokens of the requests, got {held.max()} of request {request} in layer {layer}"
            )
        cache.pool.note_stream()
        cache._forget(self._requests)
        self._stream = self._current_stream()
        numbers = np.stack([where, np.minimum(counts, MOST), counts]).astype(np.int64)
        self._index, queries, ends = cache.pool.to_device(numbers)
        importance = None
        reports = cache.reports.numbers.view(-1, 2)
        self._reports = reports[self._index]  # for rolling back
        if mass is not None and cache.policy.name == "importance":
            reports[self._index] = torch.stack([queries, ends], 1).to(reports.dtype)
            importance = self._importance(mass.detach().reshape(-1, cache.kv_heads), counts)
        unseen = initial(cache.policy.mode, torch.from_numpy(counts)).numpy()
        fresh = Fresh(counts, first, np.zeros_like(counts), unseen, importance)
        self._planned: settle_cuda.Planned | Tokens
        if settle_cuda.supports(cache):
            self._planned = settle_cuda.plan(cache, self._places, self._lengths, fresh, self._rows)
        else:
            self._planned = _tokens_of(fresh, cache.kv_heads, cache.device)

    def _current_stream(self) -> int:
        return 0 if self._cache.device.type == "cpu" else jit.current_stream(self._cache.device.index or 0)

    def _importance(self, mass: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
        """Importance of new tokens, float32 ``[tokens, kv_heads]``, from mass of all queries of a request."""
        cache, queries = self._cache, torch.ones((), dtype=torch.float32, device="cpu")
        first = torch.zeros((), dtype=torch.float32, device="cpu")
        if cache.policy.mode != "mean":
            queries = cache.pool.to_device(np.repeat(counts, counts)).unsqueeze(1)
            first = initial(cache.policy.mode, queries)
        one = torch.ones((), dtype=torch.float32, device="cpu")
        return updated(cache.policy.mode, first, mass, queries, one, cache.decay).contiguous()

    def finish(self) -> None:
        """Wait for the plan and store the tokens; BudgetExceeded leaves the cache unchanged."""
        cache, planned, rows = self._cache, self._planned, self._rows
        try:
            if isinstance(planned, Tokens):
                target = plan_scopes(cache, self._places, planned, self._lengths)
            else:
                check_plans(cache, self._places, self._lengths, planned.needed)
            self._record_streams()
            with cache._operation() as change:
                cache._activate(change, self._requests)
                if isinstance(planned, Tokens):
                    move_tokens(cache, change, self._places, planned, target, rows)
                else:
                    settle_cuda.move(cache, change, planned, rows)
                requests, layers = np.divmod(self._where, cache.layers)
                change.set(cache._lengths, (requests, layers), self._counts)
                if cache.device.type != "cpu":
                    lengths = cache._device_lengths.view(-1)
                    values = cache.pool.to_device(self._counts).to(lengths.dtype)
                    change.launch(lambda: lengths.__setitem__(self._index, values))
        except BaseException:
            cache.reports.numbers.view(-1, 2)[self._index] = self._reports
            raise

    def _record_streams(self) -> None:
        """Record the stream that reads the rows, if it is not the one they were allocated on."""
        if self._current_stream() != self._stream:
            for x in (self._rows.k, self._rows.v, self._index, self._reports):
                x.record_stream(torch.cuda.current_stream(self._cache.device))


def _tokens_of(fresh: Fresh, kv_heads: int, device: torch.device) -> Tokens:
    """New tokens as a list, place after place, row by row, head by head."""
    counts = torch.from_numpy(fresh.counts)
    place = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    number = torch.arange(len(place), device="cpu") - (counts.cumsum(0) - counts)[place]
    row = torch.from_numpy(fresh.rows)[place] + number
    own = torch.from_numpy(fresh.initial).float()[place].unsqueeze(1)
    place, number, row, own = (x.to(device) for x in (place, number, row, own))
    head = torch.arange(kv_heads, device=device)
    slot = (row.unsqueeze(1) * kv_heads + head).flatten()
    importance = own.expand(-1, kv_heads) if fresh.importance is None else fresh.importance[row]
    return Tokens(
        (place.unsqueeze(1) * kv_heads + head).flatten(),
        torch.full_like(slot, NEW),
        slot,
        number.repeat_interleave(kv_heads),
        importance.flatten(),
    )
