"""Sensitivity of each layer, and of K against V, to quantisation.

One side of one layer at a time goes through the codes of a width, all others stay exact; the KL of the predictions is
that side's sensitivity. The rows are quantised as pages hold them: K centred, both rotated, scales with their gains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from kvstrata.layout import rotate
from kvstrata.quant import reference as quant

from .measure import Exact, decode

SINKS = 4


@dataclass(frozen=True)
class Sensitivity:
    """Mean KL in nats with one side of one layer at ``bits``: ``k`` and ``v`` by layer."""

    bits: int
    k: list[float]
    v: list[float]

    @property
    def ratio(self) -> float:
        """Cost of an error in K relative to one in V."""
        return sum(self.k) / max(sum(self.v), 1e-12)


def round_trip(x: torch.Tensor, bits: int, is_k: bool) -> torch.Tensor:
    """``x [rows, heads, n, D]`` through codes; the first tokens stay as they are."""
    centre = x.float().mean(-2, keepdim=True) if is_k else None
    rows = rotate(quant.clean(x, centre))
    codes = quant.encode(rows, quant.step_of(rows, bits), bits)
    gain = (quant.K_GAIN if is_k else quant.V_GAIN)[bits]
    back = rotate(quant.decode(codes, quant.refit(rows, codes, bits, gain), bits))
    back = back if centre is None else back + centre
    return torch.cat([x[..., :SINKS, :], back[..., SINKS:, :].to(x.dtype)], -2)


class RoundedLayer(DynamicLayer):
    """Layer that hands K or V to attention rounded, and keeps both exact."""

    def __init__(self, side: str, bits: int) -> None:
        super().__init__()
        self.side, self.bits = side, bits

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().update(key_states, value_states, *args, **kwargs)
        if self.side == "k":
            return round_trip(k, self.bits, True), v
        return k, round_trip(v, self.bits, False)


def measure_sensitivity(
    model: Any, ids: torch.Tensor, bits: int = 2, tick: Callable[[str, int], None] = lambda name, done: None
) -> Sensitivity:
    """One forward per layer and side over ``ids [rows, tokens]``."""
    tokens = ids.shape[1]
    _, exact = decode(model, ids, DynamicCache(config=model.config), chunk=tokens, keep=True)
    assert exact is not None
    layers = DynamicCache(config=model.config).layers
    by_side: dict[str, list[float]] = {"k": [], "v": []}
    for side, values in by_side.items():
        for place, layer in enumerate(layers):
            values.append(_one(model, ids, layer, place, side, bits, exact))
            tick(f"{side.upper()} of layer {place}", len(by_side["k"]) + len(by_side["v"]))
    return Sensitivity(bits, by_side["k"], by_side["v"])


def _one(
    model: Any, ids: torch.Tensor, layer: CacheLayerMixin, place: int, side: str, bits: int, exact: Exact
) -> float:
    if type(layer) is not DynamicLayer:
        return 0.0  # a layer that a StrataCache does not compress
    cache = Cache(
        layers=[type(x)() if type(x) is DynamicLayer else x for x in DynamicCache(config=model.config).layers]
    )
    cache.layers[place] = RoundedLayer(side, bits)
    scores, _ = decode(model, ids, cache, chunk=ids.shape[1], exact=exact)
    return sum(map(sum, scores.kl)) / (len(scores.kl) * sum(scores.count))
