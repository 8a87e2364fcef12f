"""Parameters of an observation (observe.py) for CUDA kernels: all of observe.cu's, and the last ones of decode.cu."""

from __future__ import annotations

import math
import struct

from kvstrata.layout.format import MAX_TIERS

from .observe import Observation

BEGIN = struct.Struct("6q6i")
PLACE = struct.Struct(f"qf3i{MAX_TIERS}i")
NOWHERE = PLACE.pack(*[0] * (5 + MAX_TIERS))  # mass is not added to pages


def begin(x: Observation) -> bytes:
    """Parameters of observe.cu, which does what `Observation.begin` does."""
    reports = x.cache.reports
    tensors = (reports.state, reports.numbers, x.cache._device_lengths, x.requests, x.live, x.weights)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return BEGIN.pack(*addresses, x.rows, x.cache.layers, x.layers, x.turns, x.most, 0)


def place(x: Observation, layer: int, block: int) -> bytes:
    """Parameters of decode.cu that add the mass of one block of columns to importance in the pages of a layer."""
    cache, weights = x.cache, x.weights.data_ptr() + 4 * layer * x.weights.stride(0)
    decay = math.log2(cache.decay) if cache.decay > 0 else -math.inf
    offsets = [kind.importance_offset for kind in cache.page_formats]
    pad = [0] * (MAX_TIERS - len(offsets))
    return PLACE.pack(weights, decay, x.rows, cache.policy.mode == "ema", block, *offsets, *pad)
