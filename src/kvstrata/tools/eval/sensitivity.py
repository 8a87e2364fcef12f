"""Sensitivity of each layer, and of K against V, to quantisation.

One side of one layer at a time is rounded to codes of a width, all others stay exact; the KL of the predictions is
that side's sensitivity. Rows are quantised as in pages: K balanced and centred by a calibration, both rotated, scales
with their gains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from kvstrata.hf.balance import ENOUGH
from kvstrata.hf.calibrate import calibrate
from kvstrata.hf.layer import StrataLayer
from kvstrata.layout import rotate
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import Calibration, LayerCalibration

from .measure import decode
from .model import first_token

SINK_TOKENS = 4


@dataclass(frozen=True)
class Sensitivity:
    """Mean KL in nats with one side of one layer at ``bits``: ``k`` and ``v`` by layer; only ``compressed`` layers are
    measured, the others have 0."""

    bits: int
    k: list[float]
    v: list[float]
    compressed: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Cost of an error in K relative to one in V; 1 if neither has one."""
        return (sum(self.k) + 1e-12) / (sum(self.v) + 1e-12)


def round_trip(x: torch.Tensor, bits: int, is_k: bool, calibration: LayerCalibration | None = None) -> torch.Tensor:
    """``x [rows, heads, n, D]`` rounded to codes; the first tokens stay as they are. Without a calibration, K's centre
    is its mean, and there is no balance."""
    balance = centre = direction = None
    if is_k:
        own = LayerCalibration() if calibration is None else calibration.to(x.device)
        ones = torch.ones(x.shape[1], x.shape[-1], device=x.device)
        of_centre = ones if own.balance is None else own.balance
        balance = of_centre if own.aimed is None else own.aimed
        if own.query is not None:
            direction = quant.direction_of(own.query * balance, True).unsqueeze(1)
        if own.centre is not None:
            centre = (own.centre * of_centre / balance).unsqueeze(1)
        balance = balance.unsqueeze(1)
        if centre is None:
            centre = (x.float() / balance).mean(-2, keepdim=True)
    gain = (quant.K_GAIN if is_k else quant.V_GAIN)[bits]
    rows = x if balance is None else x.float() / balance
    codes, scale = quant.quantize_plain(rows, centre, bits, True, gain, direction)
    restored = rotate(quant.decode(codes, scale, bits))
    if balance is not None and centre is not None:
        restored = (restored + centre) * balance
    return torch.cat([x[..., :SINK_TOKENS, :], restored[..., SINK_TOKENS:, :].to(x.dtype)], -2)


def round_side(layer: Any, side: str, bits: int, calibration: LayerCalibration | None) -> None:
    """Let a layer of a DynamicCache pass K or V rounded to attention; it keeps both exact."""
    update = layer.update

    def rounded(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = update(*args, **kwargs)
        return (round_trip(k, bits, True, calibration), v) if side == "k" else (k, round_trip(v, bits, False))

    layer.update = rounded


def measure_sensitivity(
    model: Any,
    ids: torch.Tensor,
    calibration: Calibration | None = None,
    *,
    bits: int = 2,
    tick: Callable[[str, int], None] = lambda name, done: None,
) -> Sensitivity:
    """One forward per layer and side over ``ids [rows, tokens]``.

    Without a calibration one is computed from ``ids``, if these are enough tokens. ValueError for a calibration of
    another model.
    """
    tokens = ids.shape[1]
    layers = first_token(model, calibration).layers
    compressed = {layer.place: layer.index for layer in layers if isinstance(layer, StrataLayer)}
    if calibration is None and compressed and tokens >= ENOUGH:
        calibration = calibrate(model, ids)
    _, exact = decode(model, ids, DynamicCache(config=model.config), chunk=tokens, keep=True)
    assert exact is not None

    def rounded(place: int, side: str) -> float:
        if place not in compressed:
            return 0.0
        cache = DynamicCache(config=model.config)
        own = None if calibration is None else calibration.layers[compressed[place]]
        round_side(cache.layers[place], side, bits, own)
        scores, _ = decode(model, ids, cache, chunk=tokens, exact=exact)
        kl = sum(map(sum, scores.kl)) / (len(scores.kl) * sum(scores.count))
        return max(kl, 0.0)  # the rounding of float32 can be below 0; NaN stays

    by_side: dict[str, list[float]] = {"k": [], "v": []}
    for side, values in by_side.items():
        for place in range(len(layers)):
            values.append(rounded(place, side))
            tick(f"{side.upper()} of layer {place}", len(by_side["k"]) + len(by_side["v"]))
    return Sensitivity(bits, by_side["k"], by_side["v"], list(compressed))
