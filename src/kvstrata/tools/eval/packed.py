"""One format with a 16-bit tail, as an engine would hold it: packed pages, through the bytes of `store_packed`.

A chunk sees its own tokens exactly and older ones as stored. With chunks of ``page_tokens`` tokens that begin at page
edges, every token therefore sees the same as when decoding token by token with a tail of one page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvstrata.hf import projections
from kvstrata.hf.rope import frequencies
from kvstrata.hf.weights import calibration_of
from kvstrata.layout import Format
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import Calibration, LayerCalibration
from kvstrata.store import PlainRows, store_packed

from .contenders import Contender, layer_bytes, strata
from .sizes import ModelSizes, replaced_layers


class PackedLayer(DynamicLayer):
    """``pages`` holds full pages of all rows, ``tail`` and ``sinks`` 16-bit rows; nothing else is kept."""

    is_croppable = False

    def __init__(self, name: str, page_tokens: int, sink_tokens: int, calibration: LayerCalibration | None) -> None:
        super().__init__()
        self.name, self.page_tokens, self.sink_tokens, self.calibration = name, page_tokens, sink_tokens, calibration
        self.length = 0
        self.sinks: PlainRows | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        rows, heads, _, dim = key_states.shape
        self.format = Format.parse(self.name, dim, self.page_tokens)
        if self.calibration is not None:
            self.calibration = self.calibration.to(key_states.device)
        self.slots = torch.arange(rows, dtype=torch.int32, device=key_states.device)
        k, v = key_states.new_zeros(2, rows, heads, self.page_tokens, dim)
        self.tail, self.sinks = PlainRows(k, v, self.slots), None
        if self.sink_tokens:
            k, v = key_states.new_zeros(2, rows, heads, self.sink_tokens, dim)
            self.sinks = PlainRows(k, v, self.slots)
        size = (rows, 0, heads, self.format.page_bytes)
        self.pages = torch.zeros(size, dtype=torch.uint8, device=key_states.device)  # [rows, pages, heads, bytes]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all of K and V ``[rows, heads, tokens, D]``, old tokens as stored; then store the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self._read()
        k, v = (torch.cat([x.to(new.dtype), new], -2) for x, new in zip(old, (key_states, value_states), strict=True))
        self._store(key_states, value_states)
        return k, v

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        full = self.length // self.page_tokens
        k, v = quant.restore(*quant.dequantize_page(self.pages[:, :full].transpose(1, 2), self.format), self.format)
        k, v = k.flatten(2, 3), v.flatten(2, 3)  # [rows, heads, tokens, D]
        if self.calibration is not None and self.calibration.centre is not None:
            k = k + self.calibration.centre.unsqueeze(1)
        if self.calibration is not None and self.calibration.balance is not None:
            k = k * self.calibration.balance.unsqueeze(1)
        left = self.length % self.page_tokens
        out = []
        for x, side in ((k, "k"), (v, "v")):
            if self.sinks is not None:
                count = min(self.sink_tokens, x.shape[2])
                x = torch.cat([getattr(self.sinks, side)[:, :, :count].float(), x[:, :, count:]], 2)
            out.append(torch.cat([x, getattr(self.tail, side)[:, :, :left].float()], 2))
        return out[0], out[1]

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        rows, heads, new, dim = k.shape
        before, self.length = self.length, self.length + new
        missing = -(-self.length // self.page_tokens) - self.pages.shape[1]
        more = self.pages.new_zeros(rows, missing, heads, self.format.page_bytes)
        self.pages = torch.cat([self.pages, more], 1)
        position = torch.arange(before, self.length, device=k.device)
        slot = torch.arange(rows, device=k.device).unsqueeze(1) * self.pages.shape[1] * self.page_tokens + position
        store_packed(
            k.transpose(1, 2).reshape(rows * new, heads, dim), v.transpose(1, 2).reshape(rows * new, heads, dim),
            self.pages.flatten(0, 1), slot.flatten(), self.format, calibration=self.calibration, tail=self.tail,
            sink_tokens=self.sinks, seq_lens=torch.full_like(self.slots, self.length),
        )  # fmt: skip

    def get_seq_length(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes of full pages, and of the tail and sink rows at 16 bit."""
        if not self.is_initialized:
            return 0
        rows, _, heads, size = self.pages.shape
        plain = self.page_tokens + self.sink_tokens
        return rows * heads * (self.length // self.page_tokens * size + 4 * plain * self.format.head_dim)


def check_packed(name: str) -> None:
    """Raise ValueError for a name that is not a quantised format."""
    try:
        plain = Format.parse(name, 64).plain
    except ValueError as error:
        raise ValueError(f"--packed: expected a format such as K4V4, got {name!r} ({error})") from None
    if plain:
        raise ValueError(f"--packed: expected a quantised format such as K4V4, got {name!r}")


def by_weights(model: Any, sizes: ModelSizes) -> list[LayerCalibration]:
    """Calibration of each layer with K and V from the model's weights, as engines do it without a file."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * sizes.count
    modules = {
        module.layer_idx: module
        for module in model.get_decoder().modules()
        if hasattr(module, "layer_idx") and None not in projections.linears(module)
    }
    own = []
    for place, (kv_heads, dim, _) in zip(sizes.places, sizes.layers, strict=True):
        rope = frequencies(config, dim, kinds[place]) or ()
        found = place in modules
        own.append(calibration_of(modules[place], kv_heads, dim, rope) if found else LayerCalibration())
    return own


def at_bytes(
    name: str, sizes: ModelSizes, tokens: int, weights: Sequence[LayerCalibration], calibration: Calibration | None
) -> list[Contender]:
    """Packed pages of one format, and tiers under a budget of as many bytes.

    Both keep 64 tokens at 16 bit, 4 of them the first ones; the tail has up to 64 after those. Both use a calibration
    if there is one; layers that it leaves out have that of ``weights`` in pages, and the prompt's in tiers. ValueError
    for a model whose layers cannot all be packed, and for a calibration of a model with other sizes.
    """
    if sizes.mixed:
        raise ValueError(f"--packed: expected layers of attention or of other states, got {sizes.mixed}")
    for layer in sizes.layers:
        if layer.k_dim != layer.v_dim:
            raise ValueError(f"--packed: expected K and V of one size, got {layer.k_dim} and {layer.v_dim}")
        if layer.k_dim % 16 or not 32 <= layer.k_dim <= 256:
            raise ValueError(f"--packed: expected head_dim to be a multiple of 16 from 32 to 256, got {layer.k_dim}")
    shapes, own = sorted(set(sizes.layers)), list(weights)
    if calibration is not None:
        if len(shapes) > 1:
            raise ValueError(
                f"--packed: expected layers of one shape with --calibration, got {shapes[0][:2]} and {shapes[1][:2]}"
            )
        if not calibration.has_rows:
            raise ValueError("--calibration: expected balance and centres with --packed, got sensitivities alone")
        of_model = calibration.of_model(sizes.count, shapes[0][:2])
        own = [
            of_model[place] if of_model[place].packs else other for place, other in zip(sizes.places, own, strict=True)
        ]
    ours = packed(name, own, calibrated=calibration is not None)
    full = 2 * sum(layer.values for layer in sizes.layers)  # bytes of a token at 16 bit
    codes = sum(layer.kv_heads * Format.parse(name, layer.k_dim).bytes_per_token for layer in sizes.layers)
    share = codes * (tokens // 64 * 64) / (full * tokens) + (64 + 4) / tokens
    budget = math.floor(1000 * share) / 1000
    options: dict[str, Any] = dict(recent_tokens=60, sink_tokens=4, page_tokens=16, settle_every=1)
    label = f"tiers at the bytes of {name}" + (", calibrated" if calibration is not None else "")
    tiers = strata(budget, label, "variant", calibration, **options)
    return [ours, replace(tiers, options=options | {"calibrated": calibration is not None})]


def packed(
    name: str,
    layers: Sequence[LayerCalibration] = (),
    calibrated: bool = False,
    page_tokens: int = 64,
    sink_tokens: int = 4,
) -> Contender:
    """One format in packed pages with a tail and sink tokens.

    ``layers``: calibration of all layers with K and V, or nothing; ``calibrated`` if it is from a file.
    """
    options = dict(format=name, page_tokens=page_tokens, sink_tokens=sink_tokens, calibrated=calibrated)

    def make(config: Any, rows: int, tokens: int) -> Any:
        given = iter(layers)
        return Cache(
            layers=replaced_layers(config, lambda: PackedLayer(name, page_tokens, sink_tokens, next(given, None)))
        )

    label = f"packed {name}, tail {page_tokens}" + (", calibrated" if calibrated else "")
    return Contender(label, "ours", make, layer_bytes, None, options)
