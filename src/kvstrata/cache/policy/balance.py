"""Balance of K: a power of two per channel; stored K is divided by it and queries are multiplied by it.

All rows of a cache are divided, including plain ones. Division is exact, so plain rows give the same scores as without
a balance, a token that is quantised later needs only its stored row, and decode multiplies one query for all tiers. The
balance of a request in a layer is fixed by its first token there, and with it the direction along which the error of
quantised K has hardly a component: that of the mean query, which would otherwise meet the same error in every score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.quant.calibration import check_balance, exponents, factors
from kvstrata.quant.reference import aims, direction_of

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState


def factors_of(cache: CacheState, layer: int, requests: Sequence[int] | np.ndarray) -> torch.Tensor | None:
    """Balance of requests, float32 ``[requests, kv_heads, head_dim]``; None if the cache has none."""
    if cache.balance is None:
        return None
    ids = np.asarray(requests, np.int64)
    return factors(cache.balance[cache.pool.to_device(ids), layer])


def directions_of(cache: CacheState, layers: Sequence[int], requests: Sequence[int]) -> torch.Tensor | None:
    """Directions of requests, each in its layer, int8 ``[pairs * kv_heads, D]``; None if K is not rounded along one."""
    if cache.direction is None or not aims(cache.formats):
        return None
    places = np.array(requests, np.int64) * cache.layers + np.array(layers, np.int64)
    return cache.direction.flatten(0, 1)[cache.pool.to_device(places)].flatten(0, 1)


def divided(
    cache: CacheState, layer: int, k: torch.Tensor, requests: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """Rows of K ``[tokens, kv_heads, head_dim]``, packed request after request, as they are stored."""
    if cache.balance is None:
        return k
    count = np.asarray(lengths, np.int64)
    by_request = factors(-cache.balance[cache.pool.to_device(np.asarray(requests, np.int64)), layer]).to(k.dtype)
    if len(count) == 1:
        return k * by_request
    index = cache.pool.to_device(np.repeat(np.arange(len(count)), count))
    return k * by_request[index]


def set_balance(
    cache: CacheState, layer: int, balance: torch.Tensor, requests: Sequence[int], query: torch.Tensor | None = None
) -> None:
    """`TieredCache.set_balance` of checked requests."""
    if cache.balance is None:
        raise ValueError("balance: expected a cache made with balance=True, got one without")
    shape = (cache.kv_heads, cache.head_dim)
    if not isinstance(balance, torch.Tensor) or balance.dtype != torch.float32:
        given = getattr(balance, "dtype", type(balance).__name__)
        raise TypeError(f"balance: expected a float32 tensor, got {given}")
    if tuple(balance.shape) not in (shape, (len(requests), *shape)):
        raise ValueError(f"balance: expected {shape} or {(len(requests), *shape)}, got {tuple(balance.shape)}")
    check_balance("balance", balance)
    if query is not None:
        if not isinstance(query, torch.Tensor) or query.dtype != torch.float32:
            raise TypeError(f"query: expected a float32 tensor, got {getattr(query, 'dtype', type(query).__name__)}")
        if query.shape != balance.shape:
            raise ValueError(f"query: expected shape {tuple(balance.shape)} as balance, got {tuple(query.shape)}")
    for request in requests:
        if cache._lengths[request, layer]:
            raise ValueError(
                f"requests: expected some without tokens in layer {layer}, got {request}, which has"
                f" {cache._lengths[request, layer]}"
            )
        if cache._calibrated.centred[layer]:
            raise ValueError(f"layer: expected one whose centre the calibration does not fix, got {layer}")
    put_balance(cache, layer, balance, requests, query)


def put_balance(
    cache: CacheState, layer: int, balance: torch.Tensor, requests: Sequence[int], query: torch.Tensor | None = None
) -> None:
    """`set_balance` without checks."""
    assert cache.balance is not None
    assert cache.direction is not None
    index = cache.pool.to_device(np.asarray(requests, np.int64))
    cache.balance[index, layer] = exponents(balance).to(cache.device)
    if query is None or not aims(cache.formats):
        cache.direction[index, layer] = 0
    else:
        own = direction_of(query.to(cache.device) * balance.to(cache.device), cache.formats[-1].rotate)
        cache.direction[index, layer] = own
