"""Shared by the attention cases: SDPA as a peer, the check of an output, and filling the L2 cache with clean lines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvstrata.layout import Format

from .case import Absent, Bench
from .clock import Call
from .machine import cache_bytes

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def absent(error: Exception) -> Absent:
    """The reason why a library cannot take part, from the exception it raised."""
    return Absent(" ".join(str(error).split())[:120])


def sdpa(backend: SDPBackend, tensors: Callable[[int], Tensors], causal: bool = False) -> Call:
    """SDPA over q, k and v ``[batch, heads, seq, dim]``; the output is ``[batch, seq, heads, dim]``."""

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
    """Assert that the relative error of the complete output is below ``limit``."""
    error = float((out.float() - expected).norm() / expected.norm())
    assert error < limit, f"the relative error is {error:.1e}"


def fill_l2(device: torch.device) -> Call:
    """Call that reads enough memory to fill the device's cache with clean lines."""
    weights = torch.ones(max(4 * cache_bytes(device), 1 << 20) // 4, device=device)
    return lambda i: weights.sum()


def suffix_attention(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of the last keys' queries with a backend that aligns masks to the first key: the earlier keys
    without a mask, then their own with one, merged by log-sum-exp. ``attend(q, k, v, causal) -> out, lse``."""
    earlier = k.shape[2] - q.shape[2]
    (a, top), (b, own) = (
        attend(q, k[:, :, :earlier], v[:, :, :earlier], False),
        attend(q, k[:, :, earlier:], v[:, :, earlier:], True),
    )
    share = torch.sigmoid(top - own).reshape(*q.shape[:3], 1)
    return torch.lerp(b.float(), a.float(), share).to(q.dtype)


def _cudnn_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = op(q, k, v, None, True, 0.0, causal, False, scale=q.shape[-1] ** -0.5)[:2]
    return out, lse


def chunk_bench(
    q: torch.Tensor,
    ours: Call,
    rows: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    reference: Call,
    check: Callable[[torch.Tensor], None],
) -> Bench:
    """Bench of a chunk over packed K and V: ``ours`` against unpacking everything and then SDPA.

    ``q [new, heads, dim]`` are the queries of the last keys; ``rows()`` unpacks k and v ``[1, kv heads, tokens, dim]``.
    On a CPU the baseline is ``reference``.
    """
    queries = q.unsqueeze(0).transpose(1, 2)

    def flash(i: int) -> torch.Tensor:
        # aligned to the last key, unlike scaled_dot_product_attention
        op = torch.ops.aten._scaled_dot_product_flash_attention
        return op(queries, *rows(), 0.0, True, scale=q.shape[2] ** -0.5)[0][0].transpose(0, 1)

    def cudnn(i: int) -> torch.Tensor:
        return suffix_attention(_cudnn_with_lse, queries, *rows())[0].transpose(0, 1)

    baseline, other = "unpack then flash", "unpack then cudnn"
    bench = Bench(
        contenders={"kvstrata": ours, baseline: flash if q.is_cuda else reference},
        poison=lambda name, i: None,
        check=lambda name, i, out: check(out),
        ours="kvstrata",
        baseline=baseline,
        before=fill_l2(q.device),
    )
    if q.is_cuda:
        try:
            cudnn(0)
            bench.contenders[other] = cudnn
        except RuntimeError as error:
            bench.absent[other] = str(absent(error))
    return bench


def chunk_cost(fmt: Format, prefix: int, new: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Bytes and operations of a chunk over its prefix, including new rows, queries and outputs."""
    pairs, dim = new * prefix + new * (new + 1) // 2, fmt.head_dim
    moved = kv_heads * (prefix * fmt.bytes_per_token + new * 4 * dim) + 4 * new * heads * dim
    return moved, 4 * heads * pairs * dim
