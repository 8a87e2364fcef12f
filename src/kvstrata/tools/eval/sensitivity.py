"""Sensitivity of each layer, and of K against V, to quantisation.

One side of one layer at a time is rounded to codes of a width, all others stay exact; the KL of the predictions is
that side's sensitivity. Rows are quantised as in pages: K balanced and centred by a calibration, both rotated, scales
with their gains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from kvstrata.hf.balance import ENOUGH
from kvstrata.hf.calibrate import calibrate
from kvstrata.layout import rotate
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import Calibration, LayerCalibration

from .measure import decode

SINK_TOKENS = 4


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


def round_trip(x: torch.Tensor, bits: int, is_k: bool, calibration: LayerCalibration | None = None) -> torch.Tensor:
    """``x [rows, heads, n, D]`` rounded to codes; the first tokens stay as they are. Without a calibration, K's centre
    is its mean, and there is no balance."""
    balance = centre = None
    if is_k:
        balance, centre = (None, None) if calibration is None else (calibration.balance, calibration.centre)
        balance = torch.ones(x.shape[1], x.shape[-1]) if balance is None else balance
        balance = balance.to(x.device).unsqueeze(1)
        mean = (x.float() / balance).mean(-2, keepdim=True)
        centre = mean if centre is None else centre.to(x.device).unsqueeze(1)
    gain = (quant.K_GAIN if is_k else quant.V_GAIN)[bits]
    codes, scale = quant.quantize_plain(x if balance is None else x.float() / balance, centre, bits, True, gain)
    restored = rotate(quant.decode(codes, scale, bits))
    if balance is not None and centre is not None:
        restored = (restored + centre) * balance
    return torch.cat([x[..., :SINK_TOKENS, :], restored[..., SINK_TOKENS:, :].to(x.dtype)], -2)


class RoundedLayer(DynamicLayer):
    """Layer that passes K or V rounded to attention, and keeps both exact."""

    def __init__(self, side: str, bits: int, calibration: LayerCalibration | None) -> None:
        super().__init__()
        self.side, self.bits, self.calibration = side, bits, calibration

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().update(key_states, value_states, *args, **kwargs)
        if self.side == "k":
            return round_trip(k, self.bits, True, self.calibration), v
        return k, round_trip(v, self.bits, False)


def measure_sensitivity(
    model: Any,
    ids: torch.Tensor,
    calibration: Calibration | None = None,
    *,
    bits: int = 2,
    tick: Callable[[str, int], None] = lambda name, done: None,
) -> Sensitivity:
    """One forward per layer and side over ``ids [rows, tokens]``.

    Without a calibration one is computed from ``ids``, if these are enough tokens. A calibration that does not have a
    layer for each full-attention layer of the model is not used, since its layers cannot be identified.
    """
    tokens = ids.shape[1]
    if calibration is None and tokens >= ENOUGH:
        calibration = calibrate(model, ids)
    _, exact = decode(model, ids, DynamicCache(config=model.config), chunk=tokens, keep=True)
    assert exact is not None
    layers = DynamicCache(config=model.config).layers
    compressed = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    fits = calibration is not None and len(calibration.layers) == len(compressed)
    by_index = dict(zip(compressed, calibration.layers, strict=True)) if calibration is not None and fits else {}

    def rounded(index: int, side: str) -> float:
        kinds = DynamicCache(config=model.config).layers
        cache = Cache(layers=[type(x)() if type(x) is DynamicLayer else x for x in kinds])
        cache.layers[index] = RoundedLayer(side, bits, by_index.get(index))
        scores, _ = decode(model, ids, cache, chunk=tokens, exact=exact)
        return sum(map(sum, scores.kl)) / (len(scores.kl) * sum(scores.count))

    by_side: dict[str, list[float]] = {"k": [], "v": []}
    for side, values in by_side.items():
        for index in range(len(layers)):
            # StrataCache does not compress the other layers
            values.append(rounded(index, side) if index in compressed else 0.0)
            tick(f"{side.upper()} of layer {index}", len(by_side["k"]) + len(by_side["v"]))
    return Sensitivity(bits, by_side["k"], by_side["v"])
