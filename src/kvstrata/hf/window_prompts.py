"""First prompts of layers with a sliding window, stored in groups of layers.

    layer      0    1    2    3    4    5
    attention  ███  ███  ███  ███  ███  ███
    store                0-2            3-5    balance, centre, pages and tails of a group

A prompt attends to the model's own K and V. What its rings will hold is copied here, and a group of layers is stored as
if their rows were one batch: the same few hundred small operations, once for all of them. A layer's pages and tail are
slices of its group's. Everything is stored when the forward ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvstrata.layout import Format
from kvstrata.quant.calibration import LayerCalibration

from . import balance
from .attention import AttentionCall
from .prompts import LOST, group_of
from .window_counts import NewColumns, RowCounts
from .window_rings import WindowRings, without_autocast
from .window_rows import RowCalibration


class WindowLayer(Protocol):
    """The part of a layer that its group uses."""

    format: Format
    recent_tokens: int
    ring_blocks: int
    ring: int
    dtype: torch.dtype
    device: torch.device
    counts: RowCounts

    def take(self, rings: WindowRings, first: int, rows: int) -> None: ...


class Setting(NamedTuple):
    """Settings that all layers of a group share."""

    module: Any  # class of the model's attention
    rope: tuple[float, ...]
    interleaved: bool | None
    centres: bool  # K has a centre
    calibrated: bool  # balance and centre are from a calibration
    balanced: bool  # the balance is estimated
    format: Format
    geometry: tuple[int, int]  # tokens in the tail and in the pages
    storage: tuple[torch.dtype, torch.device]  # of the tail
    shapes: tuple[torch.Size, torch.Size, torch.dtype]  # of query and key, and their dtype


class Group(WindowRings):
    """Rings of layers with the same prompt: row ``i * rows + r`` is row r of the i-th layer."""

    def __init__(self, layer: WindowLayer, setting: Setting, real: torch.Tensor | None) -> None:
        self.format, self.dtype, self.device = layer.format, layer.dtype, layer.device
        self.recent_tokens, self.ring_blocks, self.ring = layer.recent_tokens, layer.ring_blocks, layer.ring
        self.setting, self.real, self.room = setting, real, 0
        self.layers: list[WindowLayer] = []
        self.given: list[LayerCalibration | None] = []
        (rows, heads, columns, dim), (_, kv_heads, _, _), dtype = setting.shapes
        self.new = NewColumns.of(real, columns, [0] * rows)
        self.grown = RowCounts.empty(rows).grown(self.new.tokens, self.recent_tokens, self.new.ended)
        self.tokens = np.ones((rows, columns), bool) if real is None else real.cpu().numpy()
        self.useful = self.tokens.sum(1)  # see `balance.useful_tokens`
        first = balance.columns_needed(self.tokens) if setting.balanced else 0
        last = min(columns, self.kept)
        sizes = (heads, first), (kv_heads, first), (kv_heads, last), (kv_heads, last)
        self.sizes = [(rows, *size, dim) for size in sizes]
        self.layer_bytes = sum(map(math.prod, self.sizes)) * dtype.itemsize
        self.held: list[torch.Tensor] = []

    def open(self, room: int) -> None:
        """Make room for ``room`` layers."""
        dtype, self.room = self.setting.shapes[2], room
        self.held = [torch.empty(room, *size, dtype=dtype, device=self.device) for size in self.sizes]

    @torch.no_grad()
    def put(self, layer: WindowLayer, call: AttentionCall, given: LayerCalibration | None) -> None:
        """Copy what is needed of a layer."""
        kept = (self.new.last(x, self.kept) for x in (call.key, call.value))
        query, key = (x[:, :, : self.held[0].shape[3]] for x in (call.query, call.key))
        for into, x in zip(self.held, (query, key, *kept), strict=True):
            into[len(self.layers)].copy_(x)
        self.layers.append(layer)
        self.given.append(given)
        layer.counts = self.grown

    @without_autocast
    @torch.no_grad()
    def finish(self, module: torch.nn.Module, check: Callable[[RowCalibration], None] | None) -> None:
        """Store all layers; `WindowPrompts.add` describes ``check``."""
        layers, rows = len(self.layers), len(self.tokens)
        query, key, *kept = (x[:layers].flatten(0, 1) for x in self.held)
        self.allocate(layers * rows, key.shape[1], key.shape[3])
        parts = [slice(i * rows, (i + 1) * rows) for i in range(layers)]
        own, setting = self.calibration, self.setting
        own.rope, own.interleaved, own.centres = list(setting.rope), setting.interleaved, setting.centres
        if setting.balanced:
            tokens = np.tile(self.tokens, (layers, 1))
            all_real = torch.ones((), dtype=torch.bool, device=self.device).expand(self.tokens.shape)
            real = (all_real if self.real is None else self.real).repeat(layers, 1)
            prompt = query, key, tokens, np.tile(self.useful, layers), module, setting.rope
            own.balance.copy_(balance.of_first_prompt(*prompt, has_tiers=False, real=real).balance)
        self.held = []
        del query, key  # free them
        for part, given in zip(parts, self.given, strict=True):
            if given is not None:
                own.slice(part).adopt(given)
        own.centres = setting.centres and not setting.calibrated
        if check is not None:
            check(own)
        self.store(*kept, self.new.in_layers(layers))
        for layer, part in zip(self.layers, parts, strict=True):
            layer.take(self, part.start, rows)


class WindowPrompts:
    """Prompts of a forward's layers that are not stored yet."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._module: torch.nn.Module | None = None
        self._lost: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowPrompts, ()  # everything is stored before a cache is copied

    def drop(self) -> None:
        """Drop everything."""
        self._group = self._module = self._lost = None

    def add(
        self,
        layer: WindowLayer,
        call: AttentionCall,
        real: torch.Tensor | None,
        setting: Setting,
        given: LayerCalibration | None,
        left: int,
        check: Callable[[RowCalibration], None] | None,
        useful_tokens: Callable[[torch.Tensor, np.ndarray], np.ndarray],
    ) -> None:
        """Take the first prompt of a layer, with ``left`` layers after it.

        ``real`` is the same object in all layers of a forward; None without padding. ``check``, if any, is called with
        the calibration once the balance is known; such a layer is stored alone. Raises what storing raises.
        """
        alone, group = check is not None, self._group
        if group is not None and (alone or group.setting != setting or group.real is not real or layer in group.layers):
            self.finish()
        if self._group is None:
            self._group, self._module = Group(layer, setting, real), call.module
            if setting.balanced:
                self._group.useful = useful_tokens(call.value, self._group.tokens)
                alone = alone or balance.too_short(self._group.useful)
            room = group_of(left + 1, self._group.layer_bytes, layer.device.type == "cpu")
            self._group.open(1 if alone else room)
        self._group.put(layer, call, given)
        if len(self._group.layers) == self._group.room or not left:
            self.finish(check)

    def finish(self, check: Callable[[RowCalibration], None] | None = None) -> None:
        """Store everything; raises RuntimeError if that failed, since tokens are then missing until `drop`."""
        if self._lost is not None:
            raise RuntimeError(LOST.format(self._lost)) from self._lost
        group, self._group = self._group, None
        if group is None:
            return
        assert self._module is not None
        try:
            group.finish(self._module, check)
        except Exception as error:
            self._lost = error
            raise
