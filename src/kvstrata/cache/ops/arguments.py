"""Checks of the arguments of cache operations: errors name the argument, what was expected and what was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvstrata.checks import check_int, check_tensor, whole_numbers

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState


def _check_pair(cache: CacheState, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows of a layer, with inner stride 1."""
    inner = (cache.kv_heads, cache.head_dim)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() not in (3, 4) or tuple(x.shape[-2:]) != inner:
            raise ValueError(
                f"{name}: expected [tokens, {inner[0]}, {inner[1]}] or [requests, tokens, {inner[0]}, {inner[1]}],"
                f" got {tuple(x.shape)}"
            )
        if x.dtype != cache.dtype:
            raise TypeError(f"{name}: expected {cache.dtype}, got {x.dtype}")
        if x.device != cache.device:
            raise ValueError(f"{name}: expected a tensor on {cache.device}, got one on {x.device}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected shape {tuple(k.shape)} as k, got {tuple(v.shape)}")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    return k, v


def check_rows(
    cache: CacheState, k: torch.Tensor, v: torch.Tensor, requests: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per request ``[requests, kv_heads, head_dim]``; reads nothing from the device."""
    k, v = _check_pair(cache, k, v)
    if k.dim() == 4:
        if k.shape[1] != 1:
            raise ValueError(f"k: expected one token of each request, got {tuple(k.shape)}")
        k, v = k.squeeze(1), v.squeeze(1)
    if requests is None:
        if len(k) > cache.max_requests:
            raise ValueError(f"k: expected at most {cache.max_requests} rows (max_requests), got {len(k)}")
        return k, v
    check_tensor("requests", requests)
    if requests.dtype != torch.int32 or requests.device != cache.device:
        raise TypeError(f"requests: expected int32 on {cache.device}, got {requests.dtype} on {requests.device}")
    if tuple(requests.shape) != (len(k),) or not requests.is_contiguous():
        raise ValueError(f"requests: expected [{len(k)}], one for each row of k, got {tuple(requests.shape)}")
    return k, v


def ragged(
    cache: CacheState,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Sequence[int] | None,
    seq_lens: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]]:
    """Packed rows ``[tokens, kv_heads, head_dim]``, the request of each part, and its number of tokens."""
    k, v = _check_pair(cache, k, v)
    if k.dim() == 4:
        if seq_lens is not None:
            raise ValueError("seq_lens: expected None for [requests, tokens, ..], got a list")
        seq_lens = [k.shape[1]] * k.shape[0]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    elif seq_lens is None:
        seq_lens = [k.shape[0]]
    seq_lens = whole_numbers("seq_lens", seq_lens)
    if sum(seq_lens) != k.shape[0] or min(seq_lens, default=0) < 0:
        raise ValueError(f"seq_lens: expected numbers that sum to {k.shape[0]}, the rows of k, got {seq_lens}")
    requests = list(range(len(seq_lens))) if requests is None else whole_numbers("requests", requests)
    if len(requests) != len(seq_lens):
        raise ValueError(
            f"requests: expected {len(seq_lens)}, one for each of seq_lens {seq_lens}, got {requests};"
            " packed rows of several requests come with seq_lens"
        )
    if len(set(requests)) != len(requests):
        raise ValueError(f"requests: expected {len(seq_lens)} distinct ones, got {requests}")
    if max(requests, default=0) >= cache.max_requests:
        raise ValueError(f"requests: expected numbers below {cache.max_requests} (max_requests), got {requests}")
    for request, count in zip(requests, seq_lens, strict=True):
        check_int("requests", request, 0)
        room = cache.max_tokens - int(cache._lengths[request, layer])
        if count > room:
            raise ValueError(
                f"k: expected at most {room} more tokens for request {request} (max_tokens {cache.max_tokens}),"
                f" got {count}"
            )
    return k, v, requests, seq_lens


def check_mass(cache: CacheState, mass: torch.Tensor, requests: int, longest: int) -> torch.Tensor:
    check_tensor("mass", mass)
    if mass.dim() != 3 or tuple(mass.shape[:2]) != (requests, cache.kv_heads) or mass.shape[2] < longest:
        raise ValueError(f"mass: expected [{requests}, {cache.kv_heads}, at least {longest}], got {tuple(mass.shape)}")
    if not mass.is_floating_point():
        raise TypeError(f"mass: expected a floating-point tensor, got {mass.dtype}")
    return mass.detach().to(cache.device)
