"""Decode steps of a `StrataCache`, one token in every row: a host part, then operators only.

    begin    on the host, before the first layer: room in all layers, settling where it is due; lengths increase
    decode   on the device, layer by layer: ``kvstrata::strata_decode`` writes K and V into that room and attends

Compiled and captured forwards contain the operator. Pages are allocated and freed, so they are not its arguments: it
looks up the cache whose forward is running in this thread (`Steps.forward`), and declares that it mutates ``state``,
which represents the whole cache. Code compiled for one cache therefore also serves the next one. Eager forwards call
`decode` directly, so their tokens are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

import kvstrata
from kvstrata.cache import TieredCache

from . import support
from .logits import Logits

OBSERVED = 2  # layers per step, in rotation, whose attention mass is added to importance
LARGEST = torch.finfo(torch.float16).max
COMPILED = 1 << 14  # minimum size for which a compiled loop converts values

_running = threading.local()  # .steps of the forward that is running in this thread


@lru_cache(maxsize=8)
def _cpu_loops(device: str) -> ModuleType | None:
    """The module of compiled steps; None on a GPU and without numba."""
    if device != "cpu" or find_spec("numba") is None:
        return None
    from kvstrata.attention.decode import step_numba

    return step_numba


@lru_cache(maxsize=8)
def _halves(device: str) -> ModuleType | None:
    """The module that converts rows to fp16; None on a GPU and without numba."""
    if device != "cpu" or find_spec("numba") is None:
        return None
    from kvstrata.layout import half_numba

    return half_numba


class Steps:
    """Decode steps of one cache. Copies and pickles start without a plan."""

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return Steps, ()

    def forget(self) -> None:
        """Forget the cache; the next step creates a plan for the one it is given."""
        self.tiered: TieredCache | None = None
        self.plan: Any = None  # DecodePlan, or the StepSlots of a model with sliding windows only
        self.layers: dict[int, Any] = {}  # on the CPU: compiled steps of the plan's layers
        self.state: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None  # bool [rows, columns or more]: padding so far, True beyond
        self.windows: list[Any] = []  # layers with a sliding window, in a step
        self.slots: dict[Any, Any] = {}  # where their tokens go, by geometry and device: window_step.py
        self.is_open = False  # room was made, but not all layers are written yet
        self.ahead = False  # the running forward contains operators only

    def begin(self, tiered: TieredCache) -> None:
        """Make room for one token of every row in all layers; raises what `TieredCache.advance` raises."""
        tiered.advance()
        if self.tiered is not tiered:
            self._put_state(tiered.device)
            self.tiered, self.plan = tiered, None
        self.is_open = True

    def begin_windows(self, layers: list[Any], alone: bool) -> None:
        """Begin a step of layers with a sliding window; ``alone``: the model has no others."""
        self.windows = layers
        if alone and self.plan is not layers[0].slots:
            self._put_state(layers[0].device)
            self.plan = layers[0].slots  # what a graph of these layers reads

    def _put_state(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.state = torch.zeros(1, dtype=torch.int32, device=device)

    def has_plan(self, plan: Any) -> bool:
        """True if the next step uses ``plan``."""
        if plan is None or plan is not self.plan:
            return False
        return self.tiered is None or (plan.cache is self.tiered and self._serves(plan))

    def _serves(self, plan: kvstrata.DecodePlan) -> bool:
        return self.tiered is not None and plan.requests == self.tiered.requests

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward after `begin`: its layers read no lengths or masks, and call the operator."""
        before = getattr(_running, "steps", None)
        _running.steps, self.ahead = self, True
        try:
            yield
        finally:
            _running.steps, self.ahead = before, False

    def decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logits: Logits
    ) -> torch.Tensor:
        """Write K and V of a layer and attend; shapes as in `strata_decode`. Capturable after an eager step."""
        tiered, heads = self.tiered, query.shape[1]
        if tiered is None or not self.is_open:
            raise RuntimeError("past_key_values: expected a cache with room for a token, got one without")
        support.check_shape(key, tiered.kv_heads, tiered.head_dim)  # compiled loops do not
        if self.plan is None or not self._serves(self.plan) or self.plan.heads != heads:
            observe = OBSERVED if tiered.budget.amount is not None else 0
            self.plan, self.layers = kvstrata.DecodePlan(tiered, heads, observe=observe), {}
            self.plan.update()
        elif layer == 0:
            self.plan.update()
        if (loops := _cpu_loops(tiered.device.type)) is not None:
            if layer not in self.layers:
                self.layers[layer] = loops.LayerStep(tiered, layer, self.plan)
            return self.layers[layer](query, key, value, *logits)
        tiered.write(layer, stored_rows(key, tiered.dtype), stored_rows(value, tiered.dtype))
        q = query.transpose(1, 2).to(tiered.dtype)
        out = kvstrata.decode_attention(
            q, tiered, layer, scale=logits.scale, softcap=logits.softcap, sinks=logits.sinks, plan=self.plan
        )
        assert isinstance(out, torch.Tensor)
        return out.to(query.dtype)


def stored_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[rows, kv_heads, n, D]`` of the model as ``[rows, n, kv_heads, D]`` in the cache's ``dtype``."""
    is_long = dtype == torch.float16 and x.dtype == torch.float32 and x.numel() >= COMPILED
    if is_long and (loops := _halves(x.device.type)) is not None:
        return loops.to_half(x.transpose(1, 2))
    rows = x.transpose(1, 2).to(dtype)
    if dtype == torch.float16 and x.dtype != dtype:
        rows.clamp_(-LARGEST, LARGEST)  # values that overflowed; in place, since a prompt is large
    return rows


def running(operator: str) -> Steps:
    """Steps of the cache whose forward is running in this thread; RuntimeError outside one."""
    steps = getattr(_running, "steps", None)
    if steps is None:
        raise RuntimeError(f"{operator}: expected to run in the forward of a StrataCache, got a call outside one")
    return steps


# CUDA graphs captured by others would replay the device part without the host part.
TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define(
    "strata_decode(Tensor query, Tensor key, Tensor value, Tensor(a!) state, int layer, float scale,"
    " float? softcap, Tensor? sinks) -> Tensor",
    tags=TAGS,
)


def _operator(query: Any, key: Any, value: Any, state: Any, layer: int, scale: float, softcap: Any,
              sinks: Any) -> torch.Tensor:  # fmt: skip
    return running("strata_decode").decode(layer, query, key, value, Logits(scale, softcap, sinks))


_library.impl("strata_decode", _operator, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::strata_decode", lib=_library)
def _fake(query: Any, key: Any, value: Any, state: Any, layer: int, scale: float, softcap: Any,
          sinks: Any) -> torch.Tensor:  # fmt: skip
    rows, heads, queries, dim = query.shape
    return query.new_empty(rows, queries, heads, dim)


def strata_decode(
    steps: Steps, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logits: Logits
) -> torch.Tensor:
    """Store one token of every row, and return its attention output ``[rows, 1, heads, D]``.

    Args:
        steps: the cache's steps, inside `Steps.forward`. The cache is mutated.
        layer: its index in the TieredCache; layers come in order.
        query: ``[rows, heads, 1, D]``.
        key, value: ``[rows, kv_heads, 1, D]``.
        logits: how scores become logits.

    Safe under ``torch.compile(fullgraph=True)``, and under CUDA-graph capture after an eager step. Raises RuntimeError
    if no room was made.
    """
    return torch.ops.kvstrata.strata_decode(
        query, key, value, steps.state, layer, logits.scale, logits.softcap, logits.sinks
    )
