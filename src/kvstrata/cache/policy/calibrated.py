"""Initial state of a request: balance, direction and centres of a calibration, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvstrata.layout.format import Format
from kvstrata.quant.calibration import Calibration, exponents, factors
from kvstrata.quant.reference import aims, direction_of


class Calibrated(NamedTuple):
    """Balance, direction and centres of a request without tokens, and whether the centres are fixed."""

    balance: torch.Tensor | None  # int8 [layers, kv_heads, head_dim], on the cache's device
    direction: torch.Tensor | None  # int8 of the same shape, see `quant.reference.aim`
    centre: torch.Tensor  # float32, in the space of the model's K
    centred: np.ndarray  # bool [layers]


def calibrated(
    calibration: Calibration | None,
    shape: tuple[int, int, int],
    device: torch.device,
    balance: bool,
    formats: Sequence[Format],
) -> Calibrated:
    """Initial state of a cache's requests; with ``balance`` there is room for balances that are set later."""
    own = torch.zeros(shape, dtype=torch.int8, device=device)
    direction = torch.zeros_like(own)
    centre, centred = torch.zeros(shape, dtype=torch.float32, device=device), np.zeros(shape[0], bool)
    for layer, given in enumerate([] if calibration is None else calibration.layers):
        aimed = given.balance if given.aimed is None or not aims(formats) else given.aimed
        if aimed is not None:
            own[layer] = exponents(aimed).to(device)
            balance = True
        if given.query is not None and aims(formats):
            direction[layer] = direction_of(given.query.to(device) * factors(own[layer]), formats[-1].rotate)
            balance = True
        if given.centre is not None:
            by = 1.0 if given.balance is None else given.balance.to(device)
            centre[layer] = given.centre.to(device) * by
            centred[layer] = True
    return Calibrated(own if balance else None, direction if balance else None, centre, centred)
