"""`roll` and `merge` of a decode step (window_step.py) in Triton: one launch each, for all rows and heads of a layer.

    roll     a program per (row, KV head): one row of K and V leaves the tail, the new one enters, queries are balanced
    merge    a program per (row, KV head, block of query heads): online softmax over the tail, then one more step for
             the output and log-sum-exp of the pages, and for the sinks

All arithmetic is float32; the products use tensor cores in TF32 for 16-bit queries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvstrata.attention.packed_decode.triton import _attend_rows

from .logits import Logits
from .window_rows import LARGEST


@triton.jit
def _saturated(x, LARGEST: tl.constexpr, SATURATES: tl.constexpr):
    if SATURATES:
        return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def roll_kernel(
    q_ptr, k_ptr, v_ptr, slots_ptr, balance_ptr, centre_ptr, tail_k_ptr, tail_v_ptr, own_q_ptr, old_k_ptr,
    old_v_ptr, rows, stride_qr, stride_qh, stride_kr, stride_kh, stride_vr, stride_vh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
    LARGEST: tl.constexpr, SATURATES: tl.constexpr,
):  # fmt: skip
    """SATURATES: the tail is float16, so values beyond LARGEST are clamped."""
    head_cache = tl.program_id(0).to(tl.int64)
    row, head = head_cache // KV_HEADS, head_cache % KV_HEADS
    dim = tl.arange(0, WIDE)
    mask = dim < DIM
    at = (head_cache * SLOTS + tl.load(slots_ptr + row)) * DIM + dim
    old = (head_cache * SLOTS + tl.load(slots_ptr + rows + row)) * DIM + dim
    old_k = tl.load(tail_k_ptr + old, mask=mask, other=0.0).to(tl.float32)
    old_v = tl.load(tail_v_ptr + old, mask=mask, other=0.0)
    balance = tl.load(balance_ptr + head_cache * DIM + dim, mask=mask, other=1.0)
    centre = tl.load(centre_ptr + head_cache * DIM + dim, mask=mask, other=0.0)
    old_k = _saturated(tl.div_rn(old_k, balance) - centre, LARGEST, SATURATES)
    tl.store(old_k_ptr + head_cache * DIM + dim, old_k.to(old_k_ptr.dtype.element_ty), mask=mask)
    tl.store(old_v_ptr + head_cache * DIM + dim, old_v, mask=mask)
    new_k = tl.load(k_ptr + row * stride_kr + head * stride_kh + dim, mask=mask, other=0.0).to(tl.float32)
    new_v = tl.load(v_ptr + row * stride_vr + head * stride_vh + dim, mask=mask, other=0.0).to(tl.float32)
    element = tail_k_ptr.dtype.element_ty
    tl.store(tail_k_ptr + at, _saturated(new_k, LARGEST, SATURATES).to(element), mask=mask)
    tl.store(tail_v_ptr + at, _saturated(new_v, LARGEST, SATURATES).to(element), mask=mask)
    for i in range(GROUP):
        query = head * GROUP + i
        q = tl.load(q_ptr + row * stride_qr + query * stride_qh + dim, mask=mask, other=0.0).to(element).to(tl.float32)
        own = (row * (KV_HEADS * GROUP) + query) * DIM + dim
        tl.store(own_q_ptr + own, (q * balance).to(element), mask=mask)


@triton.jit
def merge_kernel(
    q_ptr, tail_k_ptr, tail_v_ptr, length_ptr, balance_ptr, centre_ptr, packed_ptr, lse_ptr, sinks_ptr, out_ptr,
    stride_qr, stride_qh, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_cache = tl.program_id(0).to(tl.int64)
    row, kv_head = head_cache // KV_HEADS, head_cache % KV_HEADS
    member = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # of the group
    live, head = member < GROUP, kv_head * GROUP + member
    dim = tl.arange(0, WIDE)
    mask = live[:, None] & (dim < DIM)[None, :]
    offs_q = row * stride_qr + head[:, None] * stride_qh + dim[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask, other=0.0).to(tail_k_ptr.dtype.element_ty).to(tl.float32) * scale

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    length, base = tl.load(length_ptr + row), head_cache * SLOTS * DIM
    begin, own = tl.maximum(length - SLOTS + 1, 0), tl.zeros((ROWS,), tl.int32) + length
    top, total, acc = _attend_rows(
        q, tail_k_ptr + base, tail_v_ptr + base, begin, length, own, 0, softcap, top, total, acc, SLOTS, DIM, WIDE,
        False, CAPPED, PRECISION,
    )  # fmt: skip

    offs = row * (KV_HEADS * GROUP) + head
    balance = tl.load(balance_ptr + head_cache * DIM + dim, mask=dim < DIM, other=0.0)
    centre = tl.load(centre_ptr + head_cache * DIM + dim, mask=dim < DIM, other=0.0)
    lse = tl.load(lse_ptr + offs, mask=live, other=float("-inf"))
    lse += tl.sum(q * balance[None, :] * centre[None, :], 1)
    new_top = tl.maximum(top, lse)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=float("-inf"))
        new_top = tl.maximum(new_top, sink)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, weight = tl.exp(top - safe), tl.exp(lse - safe)
    total = total * old + weight
    if SINKS:
        total += tl.exp(sink - safe)
    offs_out = offs[:, None] * DIM + dim[None, :]
    packed = tl.load(packed_ptr + offs_out, mask=mask, other=0.0).to(tl.float32)
    acc = acc * old[:, None] + packed * weight[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + offs_out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _sizes(tail: torch.Tensor, heads: int) -> dict[str, Any]:
    _, kv_heads, slots, dim = tail.shape
    return dict(
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, WIDE=max(16, triton.next_power_of_2(dim)), SLOTS=slots
    )


def _row(x: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, 1, D]`` with an inner stride of 1."""
    return x if x.stride(3) == 1 else x.contiguous()


def roll(
    layer: Any, slots: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `window_step._Reference.roll`."""
    tail, own = layer.tail_k, layer.calibration
    rows, kv_heads, _, dim = tail.shape
    query, key, value = _row(query), _row(key), _row(value)
    q = tail.new_empty(rows, query.shape[1], dim)
    old_k, old_v = tail.new_empty(2, rows, kv_heads, dim)
    with torch.cuda.device_of(tail):
        roll_kernel[(rows * kv_heads,)](
            query, key, value, slots, own.balance, own.centre, tail, layer.tail_v, q, old_k, old_v, rows,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], **_sizes(tail, query.shape[1]),
            LARGEST=LARGEST, SATURATES=tail.dtype == torch.float16, num_warps=1,
        )  # fmt: skip
    return q, old_k, old_v


def merge(
    layer: Any, length: torch.Tensor, query: torch.Tensor, packed: torch.Tensor, lse: torch.Tensor, logits: Logits
) -> torch.Tensor:
    """As `window_step._Reference.merge`."""
    tail, own = layer.tail_k, layer.calibration
    rows, kv_heads, _, dim = tail.shape
    query = _row(query)
    heads = query.shape[1]
    out = torch.empty(rows, 1, heads, dim, dtype=query.dtype, device=query.device)
    exact = tail.dtype == torch.float32 or torch.version.hip is not None
    sinks = lse if logits.sinks is None else logits.sinks.detach().float().contiguous()
    blocks = -(-heads // kv_heads // 16)
    with torch.cuda.device_of(tail):
        merge_kernel[(rows * kv_heads, blocks)](
            query, tail, layer.tail_v, length, own.balance, own.centre, packed, lse, sinks, out, *query.stride()[:2],
            logits.scale, logits.softcap or 0.0, **_sizes(tail, heads), ROWS=16, CAPPED=logits.softcap is not None,
            SINKS=logits.sinks is not None, PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
