"""Repeated eager decode calls, layer by layer and step by step, without a `DecodePlan`.

The parameters of a layer's three launches (list, decode, combine) are kept from its first call. As long as queries,
requests and cache have the same form, only the output, three addresses and the launches remain. Any other call takes
the normal path. A cache keeps its last call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvstrata import jit
from kvstrata.cache import TieredCache
from kvstrata.call_cache import guard_of

from . import cuda

DECODE_QUERY, COMBINE_OUT, COMBINE_QUERY = 0, 3, 6  # words of cuda.DECODE and cuda.COMBINE


class Repeat:
    """Calls of one shape over the layers of a cache, on one stream of one thread."""

    def __init__(
        self,
        q: torch.Tensor,
        cache: TieredCache,
        requests: list[int] | None,
        rows: Sequence[int],
        scale: float | None,
        plan: cuda.WorkPlan,
        launches: tuple[jit.Launch, jit.Launch, jit.Launch],
    ) -> None:
        self.requests, self.known, self.scale, self.plan = requests, frozenset(rows), scale, plan
        self.rows, self.balance, self.guard = plan.requests, cache.balance, guard_of((q,))
        self.active = cache._active  # requests for which the call is known to be valid
        self.stream, self.thread = jit.current_stream(plan.device), threading.get_ident()
        self.launches = launches
        self.layers: dict[int, tuple[bytes, bytes, bytes]] = {}  # parameters of the launches
        self._decode, self._combine = (memoryview(launch.params).cast("q") for launch in launches[1:])

    def fits(self, q: torch.Tensor, cache: TieredCache, requests: Sequence[int] | None, scale: float | None) -> bool:
        """True if a call has the same form as this one."""
        if requests is not self.requests and (type(requests) is not list or requests != self.requests):
            return False
        if cache._active is not self.active:
            if cache._active != self.known and (requests is None or not self.known <= cache._active):
                return False
            self.active = cache._active
        plan = self.plan
        return (
            scale == self.scale
            and cache.balance is self.balance
            and plan.requests is self.rows
            and type(q) is torch.Tensor
            and self.guard(q)
            and jit.current_device() == plan.device
            and jit.current_stream(plan.device) == self.stream
            and threading.get_ident() == self.thread
            and not jit.is_capturing()
        )

    def repeat(
        self, q: torch.Tensor, cache: TieredCache, layer: int, requests: Sequence[int] | None, scale: float | None
    ) -> torch.Tensor | None:
        """Output of a call of the same form; None if it differs."""
        kept = self.layers.get(layer) if type(layer) is int else None
        if kept is None or not self.fits(q, cache, requests, scale) or (query := q.data_ptr()) % 4:
            return None
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        worklist, decode, combine = self.launches
        worklist.params[:], decode.params[:], combine.params[:] = kept
        words = self._combine
        self._decode[DECODE_QUERY] = words[COMBINE_QUERY] = query
        words[COMBINE_OUT] = out.data_ptr()
        stream = self.stream
        worklist(stream)
        decode(stream)
        combine(stream)
        return out


def remember(
    q: torch.Tensor,
    cache: TieredCache,
    layer: int,
    requests: Sequence[int] | None,
    scale: float | None,
    rows: Sequence[int],
) -> None:
    """Keep the parameters of the call that has just run with its own plan."""
    plans = cuda._OWNED.get(cache)
    if not plans or cuda._aligned(q) is not q or not (requests is None or type(requests) is list):
        return
    plan = next(reversed(plans.values()))
    key = (q.dtype, False, plan.q_len > 1, False, cache.balance is not None)
    if not plan.head_caches or plan.requests != tuple(rows) or key not in plan._launches:
        return
    launches = (plan._worklist, plan._launches[key], plan._launches[q.dtype])
    last: Repeat | None = cache._decoded
    if last is None or last.plan is not plan or not last.fits(q, cache, requests, scale):
        given = None if requests is None else list(requests)
        cache._decoded = last = Repeat(q, cache, given, rows, scale, plan, launches)
    parameters = [bytes(launch.params) for launch in launches]
    last.layers[layer] = (parameters[0], parameters[1], parameters[2])
