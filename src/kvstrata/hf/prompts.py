"""First prompts of layers on a GPU: planned in groups of layers, and stored while the next layers compute.

    layer      0    1    2    3    4    5
    attention  ███  ███  ███  ███  ███  ███
    plan                 0-2            3-5    balance, mass and plan of a group: queued, nothing to wait for
    store                               0-2    pages and codes, when the next group comes or the cache is used

When the host waits for the counts of a plan, layers behind it are queued on the device, which is never idle. A group is
one layer of a long prompt, and all layers of a short one, whose time is the host's. Until a group is planned, its K and
V are held as the model made them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvstrata.cache import TieredCache
from kvstrata.cache.ops.append_layers import LayersAppend, supports
from kvstrata.quant.calibration import exponents, factors

from . import balance
from .guard import Guard
from .logits import Logits
from .mass import sampled_queries, triton_mass
from .steps import stored_rows

WHOLE = 256 << 20  # bytes of K and V in all layers up to which a prompt is one group
TOGETHER = 128 << 20  # bytes of K and V of a group otherwise
BALANCED = 4  # rows of all layers whose balance is estimated at a time by torch, which copies their queries


class How(NamedTuple):
    """Settings of a prompt, the same in all layers."""

    limit: int | None  # queries that are sampled for mass; None takes no mass
    estimates: bool  # the balance of K comes from the prompt
    turned: bool | None  # how RoPE pairs channels, `balance.interleaved`


class Waiting(NamedTuple):
    """A layer that has attended."""

    layer: int
    first: torch.Tensor  # queries that the balance looks at, [rows, heads, n, D]
    sampled: torch.Tensor  # queries that give mass
    key: torch.Tensor  # [rows, kv_heads, columns, D]
    value: torch.Tensor


class PromptColumns:
    """Tokens and padding of a prompt; ``real`` bool ``[rows, columns]``, False for padding."""

    def __init__(self, cache: TieredCache, real: np.ndarray) -> None:
        self.real, self.lengths = real, real.sum(1).tolist()
        self.looked_at = balance.columns_needed(real)
        # The columns that are tokens, row after row, and what `triton_mass` needs to know: None without padding.
        self.tokens: torch.Tensor | None = None
        self.positions: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if not real.all():
            upload = cache.pool.to_device
            number = real.cumsum(1) - 1
            column = np.where(real, number, -1)
            self.tokens = upload(np.flatnonzero(real))
            self.positions = upload(number.astype(np.int32)), upload(column.astype(np.int32)).unsqueeze(1), upload(real)

    def in_layers(self, layers: int) -> tuple[torch.Tensor, ...] | None:
        """``positions`` of so many layers, one after the other."""
        if self.positions is None or layers == 1:
            return self.positions
        return tuple(x.repeat(layers, *[1] * (x.dim() - 1)) for x in self.positions)


class Prompts:
    """The prompt of one cache as far as it is not stored."""

    def __init__(self) -> None:
        self.drop()

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompts, ()  # a cache is copied when all is stored

    def drop(self) -> None:
        """Forget everything."""
        self._cache: TieredCache | None = None
        self._waiting: list[Waiting] = []
        self._planned: LayersAppend | None = None
        self._columns: PromptColumns | None = None
        self._setting: tuple[How, Logits] | None = None
        self._lost: Exception | None = None
        self._next: tuple[TieredCache, int] | None = None  # the layer that may wait, since all after the first may
        self._all_wait = False

    def supports(self, cache: TieredCache, layer: int, real: np.ndarray) -> bool:
        """True if the prompt ``real [rows, columns]``, False for padding, may wait."""
        columns = self._columns
        if columns is not None and self._next == (cache, layer) and np.array_equal(columns.real, real):
            return True
        rows, lengths = range(len(real)), real.sum(1).tolist()
        return supports(cache, [layer], rows, lengths)

    def add(
        self,
        cache: TieredCache,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: np.ndarray,
        logits: Logits,
        how: How,
        guard: Guard | None,
    ) -> None:
        """Take the prompt of a layer, which `supports` allows; raises what storing an earlier one raises.

        ``query [rows, heads, columns, D]``, ``key, value [rows, kv_heads, columns, D]``: K and V must not change before
        they are stored. ``guard`` looks at the layer, too.
        """
        follows = not self._waiting or (self._waiting[-1].layer == layer - 1 and self._setting == (how, logits))
        if not follows:
            self._plan()
        if self._next != (cache, layer) or self._columns is None:
            self._columns = PromptColumns(cache, real)
            rest = range(layer, cache.layers)
            self._all_wait = supports(cache, rest, range(len(real)), self._columns.lengths)
        self._next = (cache, layer + 1) if self._all_wait else None
        self._cache, self._setting = cache, (how, logits)
        alone = guard is not None or logits.sinks is not None
        group = 1 if alone else group_of(cache.layers, key.nbytes + value.nbytes)
        first = query[:, :, : self._columns.looked_at if how.estimates else 0]
        sampled = query[:, :, :0] if how.limit is None else sampled_queries(query, -(-real.shape[1] // how.limit))
        if group > 1:  # all queries would be held
            first, sampled = first.clone(), sampled.clone()
        self._waiting.append(Waiting(layer, *(x.detach() for x in (first, sampled, key, value))))
        if len(self._waiting) >= group or layer == cache.layers - 1:
            self._plan(None if guard is None else (guard, query))

    def finish(self) -> None:
        """Store everything. RuntimeError where that failed: tokens are missing until `drop`."""
        if self._lost is not None:
            raise RuntimeError(
                "past_key_values: expected a cache with all tokens of its prompt, got one whose prompt could not be"
                f" stored ({self._lost}); reset() empties it"
            ) from self._lost
        if self._waiting:
            self._plan()
        if self._planned is not None:
            self._guarded(self._store)
        self._next = self._columns = None

    def _guarded(self, part: Any, *arguments: Any) -> None:
        try:
            part(*arguments)
        except Exception as error:
            self.drop()
            self._lost = error
            raise

    def _plan(self, guarded: tuple[Guard, torch.Tensor] | None = None) -> None:
        self._guarded(self._store)
        self._guarded(self._queue, guarded)

    def _store(self) -> None:
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.finish()

    def _queue(self, guarded: tuple[Guard, torch.Tensor] | None) -> None:
        """Queue the plan of all that wait."""
        group, self._waiting = self._waiting, []
        cache, columns = self._cache, self._columns
        assert cache is not None
        assert columns is not None
        assert self._setting is not None
        how, logits = self._setting
        layers, rows = [x.layer for x in group], len(columns.real)
        raw = _stacked([x.key.transpose(1, 2) for x in group])  # [layers, rows, columns, kv_heads, D]
        by_head = raw.flatten(0, 1).transpose(1, 2)
        if how.estimates:
            self._balance(cache, _stacked([x.first for x in group]), by_head, columns, how, layers)
        if guarded is not None:
            guard, query = guarded
            real = torch.from_numpy(columns.real).to(query.device)
            guard.add(layers[0], query, group[0].key, group[0].value, real, logits)
        mass = None
        if how.limit is not None:
            sampled, count = _stacked([x.sampled for x in group]).flatten(0, 1), columns.real.shape[1]
            mass = triton_mass(sampled, count, by_head, logits, columns.in_layers(len(group)))
            mass = mass.transpose(1, 2).reshape(len(group), -1, cache.kv_heads)
        # From here on the rows are ours: a compiled model may write to its own before they are stored.
        k = _owned(stored_rows(by_head, cache.dtype), group[0].key)
        if cache.balance is not None:
            power = cache.balance[:rows, layers[0] : layers[-1] + 1].transpose(0, 1).flatten(0, 1)
            k.mul_(factors(-power).to(k.dtype).unsqueeze(1))
        values = _stacked([x.value.transpose(1, 2) for x in group]).flatten(0, 1).transpose(1, 2)
        v = _owned(stored_rows(values, cache.dtype), group[0].value)
        k, v = (x.reshape(len(group), -1, *x.shape[2:]) for x in (k, v))
        if columns.tokens is not None:
            k, v = (x.index_select(1, columns.tokens) for x in (k, v))
            mass = None if mass is None else mass.index_select(1, columns.tokens)
        self._planned = LayersAppend(cache, layers, k, v, range(rows), columns.lengths, mass)

    def _balance(
        self,
        cache: TieredCache,
        first: torch.Tensor,
        by_head: torch.Tensor,
        columns: PromptColumns,
        how: How,
        layers: list[int],
    ) -> None:
        """Fix the balance of all rows in these layers; ``first [layers, rows, heads, n, D]``."""
        rows, count = first.shape[1], columns.looked_at
        real = torch.ones(1, columns.real.shape[1], dtype=torch.bool, device=first.device).expand(rows, -1)
        if columns.positions is not None:
            real = columns.positions[2]
        assert cache.balance is not None
        step = len(layers) if first.device.type == "cuda" else max(1, BALANCED // rows)
        for begin in range(0, len(layers), step):
            query = first[begin : begin + step].flatten(0, 1)
            key = by_head[begin * rows : (begin + step) * rows, :, :count]
            many = len(query) // rows
            own, _ = balance.from_prompt(query, key, real.repeat(many, 1), cache.rope, how.turned)
            power = exponents(own).unflatten(0, (many, rows)).transpose(0, 1)
            cache.balance[:rows, layers[begin] : layers[begin] + many] = power


def group_of(layers: int, nbytes: int) -> int:
    """Layers that are planned together, of a model with so many and so many bytes of K and V in each."""
    return layers if layers * nbytes <= WHOLE else max(1, TOGETHER // nbytes)


def _owned(rows: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The rows, copied if they are still in the memory of ``given``."""
    return (
        rows.contiguous() if rows.data_ptr() != given.data_ptr() else rows.clone(memory_format=torch.contiguous_format)
    )


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
