"""First prompts of layers: planned in groups of layers and, on a GPU, stored while later layers compute.

    layer      0    1    2    3    4    5
    attention  ███  ███  ███  ███  ███  ███
    plan                 0-2            3-5    balance, mass and plan of a group: queued without waiting
    store                               0-2    pages and codes, when the next group is planned or the cache is used

While the host waits for the counts of a plan, later layers are already queued, so the device is never idle. A group
is one layer of a long prompt, and all layers of a short one, which is host-bound. Until a group is planned, its K
and V are held in the model's dtype. On a CPU a group is stored as soon as it is planned: what layers share are the
thousands of small operations that each would take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvstrata.cache import TieredCache
from kvstrata.cache.ops.append_layers import LayersAppend, supports
from kvstrata.cache.policy import settle_cuda
from kvstrata.quant.calibration import exponents, factors
from kvstrata.quant.reference import aims, direction_of

from . import balance
from .guard import Guard
from .logits import Logits
from .mass import prompt_mass, sampled_queries, triton_mass
from .steps import stored_rows

ALL_LAYERS_BYTES = 256 << 20  # if K and V of all layers take at most this many bytes, a prompt is one group
GROUP_BYTES = 128 << 20  # otherwise, maximum bytes of K and V in a group
CPU_BYTES = 16 << 20  # on a CPU, maximum bytes of K and V in a group
LOST = (
    "past_key_values: expected a cache with all tokens of its prompt, got one whose prompt could not be stored ({});"
    " reset() empties it"
)
BALANCE_ROWS = 4  # rows whose balance torch estimates at a time, since it copies their queries


class PromptSettings(NamedTuple):
    """Settings of a prompt, the same in all layers that are stored together."""

    limit: int | None  # maximum number of queries sampled for mass; None computes no mass
    estimates: bool  # True if the balance of K is estimated from the prompt
    is_interleaved: bool | None  # how RoPE pairs channels, see `rope.interleaved`
    has_rope: bool  # see `rope.applies`


class QueuedLayer(NamedTuple):
    """A layer that has attended and is not stored yet."""

    layer: int
    first: torch.Tensor  # queries that the balance is estimated from, [rows, heads, n, D]
    sampled: torch.Tensor  # queries sampled for mass; on a CPU the mass itself, [rows, kv_heads, columns]
    key: torch.Tensor  # [rows, kv_heads, columns, D]
    value: torch.Tensor
    guarded: tuple[Guard, torch.Tensor] | None  # what checks the layer, and all queries


class PromptColumns:
    """Token mask of a prompt's columns; ``real`` bool ``[rows, columns]``, False for padding."""

    def __init__(self, cache: TieredCache, real: np.ndarray) -> None:
        self.real, self.lengths = real, real.sum(1).tolist()
        self.balance_columns = balance.columns_needed(real)
        # Columns that are tokens, row by row, and the arguments of `triton_mass`; None without padding.
        self.tokens: torch.Tensor | None = None
        self.positions: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if not real.all():
            upload = cache.pool.to_device
            number = real.cumsum(1) - 1
            column = np.where(real, number, -1)
            self.tokens = upload(np.flatnonzero(real))
            self.positions = upload(number.astype(np.int32)), upload(column.astype(np.int32)).unsqueeze(1), upload(real)

    def in_layers(self, layers: int) -> tuple[torch.Tensor, ...] | None:
        """``positions`` repeated for ``layers`` layers."""
        if self.positions is None or layers == 1:
            return self.positions
        return tuple(x.repeat(layers, *[1] * (x.dim() - 1)) for x in self.positions)

    def mass(self, query: torch.Tensor, key: torch.Tensor, logits: Logits, limit: int) -> torch.Tensor:
        """`prompt_mass` of one layer: float32 ``[rows, kv_heads, columns]``."""
        number = torch.arange(query.shape[2], device=query.device).expand(len(query), -1)
        positions = number, number.unsqueeze(1), torch.ones_like(number, dtype=torch.bool)
        if self.positions is not None:
            positions = self.positions[0].long(), self.positions[1].long(), self.positions[2]
        return prompt_mass(query, key, *positions, logits, limit, in_order=self.positions is None)


class Prompts:
    """The part of a cache's prompt that is not stored yet."""

    def __init__(self) -> None:
        self.drop()

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompts, ()  # everything is stored before a cache is copied

    def drop(self) -> None:
        """Drop everything."""
        self._cache: TieredCache | None = None
        self._waiting: list[QueuedLayer] = []
        self._planned: LayersAppend | None = None
        self._columns: PromptColumns | None = None
        self._setting: tuple[PromptSettings, Logits] | None = None
        self._lost: Exception | None = None
        self._next: tuple[TieredCache, int] | None = None  # the layer that may be deferred next, if all before it were
        self._all_wait = False

    def supports(self, cache: TieredCache, layer: int, real: np.ndarray) -> bool:
        """True if the prompt ``real [rows, columns]``, False for padding, may be stored later."""
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
        settings: PromptSettings,
        guard: Guard | None,
    ) -> None:
        """Queue the prompt of a layer, which `supports` allows; raises what storing an earlier layer raises.

        ``query [rows, heads, columns, D]``, ``key, value [rows, kv_heads, columns, D]``: K and V must not change before
        they are stored. ``guard`` also checks the layer.
        """
        follows = not self._waiting or (self._waiting[-1].layer == layer - 1 and self._setting == (settings, logits))
        if not follows:
            self._plan()
        if self._next != (cache, layer) or self._columns is None:
            self._columns = PromptColumns(cache, real)
            rest = range(layer, cache.layers)
            self._all_wait = supports(cache, rest, range(len(real)), self._columns.lengths)
        self._next = (cache, layer + 1) if self._all_wait else None
        self._cache, self._setting = cache, (settings, logits)
        on_cpu = not settle_cuda.supports(cache)
        alone = logits.sinks is not None or (guard is not None and not on_cpu)
        group = 1 if alone else group_of(cache.layers, key.nbytes + value.nbytes, on_cpu)
        first = query[:, :, : self._columns.balance_columns if settings.estimates else 0]
        sampled = query[:, :, :0]
        if settings.limit is not None and on_cpu:
            sampled = self._columns.mass(query, key, logits, settings.limit)
        elif settings.limit is not None:
            sampled = sampled_queries(query, key.shape[1], settings.limit)
        if group > 1:  # otherwise all queries would be kept alive
            first = first.clone()
        first, sampled, key, value = (x.detach() for x in (first, sampled, key, value))
        guarded = None if guard is None else (guard, query)
        self._waiting.append(QueuedLayer(layer, first, sampled, key, value, guarded))
        if len(self._waiting) >= group or layer == cache.layers - 1:
            self._plan()
            if on_cpu:
                self._guarded(self._store)

    def finish(self) -> None:
        """Store everything; raises RuntimeError if that failed, since tokens are then missing until `drop`."""
        if self._lost is not None:
            raise RuntimeError(LOST.format(self._lost)) from self._lost
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

    def _plan(self) -> None:
        self._guarded(self._store)
        self._guarded(self._queue)

    def _store(self) -> None:
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.finish()

    def _queue(self) -> None:
        """Queue the plan of all waiting layers."""
        group, self._waiting = self._waiting, []
        cache, columns = self._cache, self._columns
        assert cache is not None
        assert columns is not None
        assert self._setting is not None
        settings, logits = self._setting
        layers, rows = [x.layer for x in group], len(columns.real)
        raw = _stacked([x.key.transpose(1, 2) for x in group])  # [layers, rows, columns, kv_heads, D]
        by_head = raw.flatten(0, 1).transpose(1, 2)
        if settings.estimates:
            self._balance(cache, _stacked([x.first for x in group]), by_head, columns, settings, layers)
        for x in group:
            if x.guarded is not None:
                guard, query = x.guarded
                real = torch.from_numpy(columns.real).to(query.device)
                guard.add(x.layer, query, x.key, x.value, real, logits)
        mass = None
        if settings.limit is not None:
            mass, count = _stacked([x.sampled for x in group]).flatten(0, 1), columns.real.shape[1]
            if settle_cuda.supports(cache):
                mass = triton_mass(mass, count, by_head, logits, settings.limit, columns.in_layers(len(group)))
            mass = mass.transpose(1, 2).reshape(len(group), -1, cache.kv_heads)
        # From here on the rows are copies: a compiled model may overwrite its own before they are stored.
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
        settings: PromptSettings,
        layers: list[int],
    ) -> None:
        """Fix balance and direction of all rows in these layers; ``first [layers, rows, heads, n, D]``."""
        rows, count = first.shape[1], columns.balance_columns
        real = torch.ones(1, columns.real.shape[1], dtype=torch.bool, device=first.device).expand(rows, -1)
        if columns.positions is not None:
            real = columns.positions[2]
        assert cache.balance is not None
        assert cache.direction is not None
        step = len(layers) if first.device.type == "cuda" else max(1, BALANCE_ROWS // rows)
        for begin in range(0, len(layers), step):
            query = first[begin : begin + step].flatten(0, 1)
            key = by_head[begin * rows : (begin + step) * rows, :, :count]
            many = len(query) // rows
            present, has_tiers = real.repeat(many, 1), settings.limit is not None
            rope = cache.rope if settings.has_rope else ()
            along = aims(cache.formats)
            own, _ = balance.from_prompt(query, key, present, rope, settings.is_interleaved, has_tiers, along)
            of_layers = slice(layers[begin], layers[begin] + many)
            direction = direction_of(own.query * own.balance * along, cache.formats[-1].rotate)
            for table, values in ((cache.balance, exponents(own.balance)), (cache.direction, direction)):
                table[:rows, of_layers] = values.unflatten(0, (many, rows)).transpose(0, 1)


def group_of(layers: int, nbytes: int, on_cpu: bool = False) -> int:
    """Number of layers planned together, for a model with ``layers`` layers of ``nbytes`` bytes of K and V each."""
    if on_cpu:
        return max(1, min(layers, CPU_BYTES // nbytes))
    return layers if layers * nbytes <= ALL_LAYERS_BYTES else max(1, GROUP_BYTES // nbytes)


def _owned(rows: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The rows, copied if they still share memory with ``given``."""
    return (
        rows.contiguous() if rows.data_ptr() != given.data_ptr() else rows.clone(memory_format=torch.contiguous_format)
    )


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
