"""Shared by the cases of attention: SDPA as a peer, the check of an output, and a cache of clean lines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .case import Absent
from .clock import Call
from .machine import cache_bytes

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def absent(error: Exception) -> Absent:
    """The reason why a library cannot take part, from what it raised."""
    return Absent(" ".join(str(error).split())[:120])


def sdpa(backend: SDPBackend, tensors: Callable[[int], Tensors], causal: bool = False) -> Call:
    """torch's attention over q, k and v ``[batch, heads, seq, dim]``; the output is ``[batch, seq, heads, dim]``."""

    def call(i: int) -> torch.Tensor:
        q, k, v = tensors(i)
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    try:
        call(0)
    except RuntimeError as error:
        raise absent(error) from error
    return call


def assert_close(out: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Relative error of the whole output."""
    error = float((out.float() - expected).norm() / expected.norm())
    assert error < limit, f"the relative error is {error:.1e}"


def read(device: torch.device) -> Call:
    """Fill the device's cache with clean lines."""
    weights = torch.ones(max(4 * cache_bytes(device), 1 << 20) // 4, device=device)
    return lambda i: weights.sum()
