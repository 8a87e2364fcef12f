"""Initial state of a request: balance and centres of a calibration, or none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvstrata.quant.calibration import Calibration, exponents, factors


class Calibrated(NamedTuple):
    """Balance and centres of a request without tokens, and whether the centres are fixed."""

    balance: torch.Tensor | None  # int8 [layers, kv_heads, head_dim], on the cache's device
    centre: torch.Tensor  # float32, in the space of the model's K
    centred: np.ndarray  # bool [layers]


def calibrated(
    calibration: Calibration | None, shape: tuple[int, int, int], device: torch.device, balance: bool
) -> Calibrated:
    """Initial state of a cache's requests; with ``balance`` there is room for balances that are set later."""
    own = torch.zeros(shape, dtype=torch.int8, device=device)
    centre, centred = torch.zeros(shape, dtype=torch.float32, device=device), np.zeros(shape[0], bool)
    for layer, given in enumerate([] if calibration is None else calibration.layers):
        if given.balance is not None:
            own[layer] = exponents(given.balance).to(device)
            balance = True
        if given.centre is not None:
            centre[layer] = given.centre.to(device) * factors(own[layer])
            centred[layer] = True
    return Calibrated(own if balance else None, centre, centred)
