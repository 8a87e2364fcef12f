"""Shared by the cases of attention: SDPA and FlashInfer as peers, the check of an output, a cache of clean lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .case import Absent
from .clock import Call
from .machine import cache_bytes

PEER_PAGE = 16  # tokens of FlashInfer's pages
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


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]


def in_two_parts(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last keys' queries with what aligns masks to the first key: the earlier keys without a
    mask, then their own with one, added up by the log-sum-exp of either. ``attend(q, k, v, causal) -> out, lse``."""
    earlier = k.shape[2] - q.shape[2]
    (a, top), (b, own) = (
        attend(q, k[:, :, :earlier], v[:, :, :earlier], False),
        attend(q, k[:, :, earlier:], v[:, :, earlier:], True),
    )
    share = torch.sigmoid(top - own).reshape(*q.shape[:3], 1)
    return torch.lerp(b.float(), a.float(), share).to(q.dtype)


def cudnn_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = op(q, k, v, None, True, 0.0, causal, False, scale=q.shape[-1] ** -0.5)[:2]
    return out, lse


def add_unpacked(
    contenders: dict[str, Call], q: torch.Tensor, rows: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, str]:
    """Add "unpack then flash" and "unpack then cudnn" over ``rows() -> k, v [1, heads, n, dim]``, unpacked by every
    call, for the queries ``[new, heads, dim]`` of the last keys; returns the reason if one of them cannot run."""
    queries = q.unsqueeze(0).transpose(1, 2)

    def with_flash(i: int) -> torch.Tensor:
        # aligned to the last key, as scaled_dot_product_attention is not
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(queries, *rows(), 0.0, True, scale=q.shape[-1] ** -0.5)[0][0].transpose(0, 1)

    def with_cudnn(i: int) -> torch.Tensor:
        return in_two_parts(cudnn_with_lse, queries, *rows())[0].transpose(0, 1)

    contenders["unpack then flash"] = with_flash
    try:
        with_cudnn(0)
    except RuntimeError as error:
        return {"unpack then cudnn": str(absent(error))}
    contenders["unpack then cudnn"] = with_cudnn
    return {}


def flashinfer_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], dtype: torch.dtype
) -> Call:
    """FlashInfer over K and V in ``dtype``: ``q [requests, heads, dim]``, K and V ``[pages, kv_heads, PEER_PAGE, dim]``
    with the pages of one request after those of another."""
    if q.device.type != "cuda":
        raise Absent("needs a CUDA device")
    import flashinfer as library

    pages = tuple(x.to(dtype).contiguous() for x in (k, v))
    ints = partial(torch.tensor, dtype=torch.int32, device=q.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 30, dtype=torch.uint8, device=q.device), "HND", use_tensor_cores=True
    )
    starts = [*accumulate((-(-n // PEER_PAGE) for n in lengths), initial=0)]
    last = [(n - 1) % PEER_PAGE + 1 for n in lengths]
    wrapper.plan(
        ints(starts), torch.arange(starts[-1], dtype=torch.int32, device=q.device), ints(last), q.shape[1],
        k.shape[1], q.shape[2], PEER_PAGE, q_data_type=q.dtype, kv_data_type=dtype,
    )  # fmt: skip
    return lambda i: wrapper.run(q, pages)
