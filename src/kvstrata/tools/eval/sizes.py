"""Shapes of the K and V that a model's layers store, and which layers of a cache may be replaced by others.

Layers may differ (Gemma 4), share the K and V of others (Gemma 3n), keep states instead (Qwen3-Next) or be fewer than
the config says, so shapes are those of one token of the model, not those of its config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvstrata.hf import support

from .model import first_token

ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
STATES = ("conv_states", "recurrent_states")


class LayerSizes(NamedTuple):
    """Shape of K and V of a token in one layer."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def values(self) -> int:
        """Values of K and V together."""
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the K, V and other states that a cache of a model holds."""

    layers: tuple[LayerSizes, ...]  # of layers that store K and V, with a window or not
    tiers: tuple[int, int, int] | None  # layers with tiers in a `StrataCache`, KV heads, head_dim; None: windows only
    states: int = 0  # bytes of other states of one row, which no cache compresses
    mixed: str = ""  # kind of layers that keep K and V and other states, if there are some
    places: tuple[int, ...] = ()  # numbers of ``layers`` in the model
    count: int = 0  # layers of the model

    def full_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of these tokens with K and V at 16 bit in all layers, those with a window included, and of states."""
        return rows * (2 * tokens * sum(layer.values for layer in self.layers) + self.states)


@torch.no_grad()
def sizes_of(model: Any) -> ModelSizes:
    """Sizes of a model, from one token through a DynamicCache and one through a `StrataCache`."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    has_rows = [torch.is_tensor(getattr(layer, "keys", None)) and layer.keys.numel() > 0 for layer in cache.layers]
    kept = {place: layer for place, layer in enumerate(cache.layers) if has_rows[place]}
    layers = tuple(LayerSizes(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in kept.values())
    tiered = first_token(model)._tiered
    tiers = None if tiered is None else (tiered.layers, tiered.kv_heads, tiered.head_dim)
    mixed = {type(x).__name__ for x in cache.layers if _is_mixed(x)}
    count = max(support.size(model.config.get_text_config(decoder=True), "num_hidden_layers") or 0, len(cache.layers))
    states = sum(map(state_bytes, cache.layers))
    return ModelSizes(layers, tiers, states, ", ".join(sorted(mixed)), tuple(kept), count)


def state_bytes(layer: Any) -> int:
    """Bytes of a layer's states other than K and V."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return 0
    return sum(x.nbytes for name in STATES for x in getattr(layer, name).values() if torch.is_tensor(x))


def _is_mixed(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, DynamicLayer)


def replaced_layers(config: Any, make: Callable[[], CacheLayerMixin]) -> list[Any]:
    """Layers of a DynamicCache, with ``make()`` in place of those of attention; those with other states are kept.

    ValueError for layers that are neither, such as those with attention and other states in one.
    """
    layers: list[Any] = DynamicCache(config=config).layers
    if other := sorted({type(x).__name__ for x in layers if type(x) not in (*ATTENTION, LinearAttentionLayer)}):
        raise ValueError(f"config: expected layers of attention or of other states, got {', '.join(other)}")
    return [make() if type(layer) in ATTENTION else layer for layer in layers]
