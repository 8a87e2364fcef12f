"""Sums over a prompt's tokens that its balance needs, in Triton: one launch, and no float32 copies of queries.

A program owns the channel pairs of a KV head in one row, and some columns. Channels that RoPE does not rotate are also
processed in pairs, with an angle of zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .moments import PromptSample

SPAN = 128  # columns per program
SUMS = 10  # sums per pair


@triton.jit
def _clean(ptr, mask, largest):
    """Values in float32, zero if they are masked, NaN or infinite, clamped to ``largest``."""
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return tl.minimum(tl.maximum(x, -largest), largest)


@triton.jit(do_not_specialize=["columns"])
def moments_kernel(
    q_ptr, k_ptr, weight_ptr, number_ptr, cos_ptr, sin_ptr, out_ptr, stride_qr, stride_qh, stride_qn, stride_kr,
    stride_kh, stride_kn, columns, largest,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr, POSITIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Weighted sums ``[rows * kv_heads, splits, SUMS, PAIRS]``; ``weight``, ``number`` are ``[rows, columns]``."""
    head_cache, split = tl.program_id(0), tl.program_id(1)
    row, head = (head_cache // KV_HEADS).to(tl.int64), (head_cache % KV_HEADS).to(tl.int64)
    pair = tl.arange(0, WIDE)
    real, turned = pair < PAIRS, pair < TURNED
    one, two = 2 * pair, 2 * pair + 1
    if not INTERLEAVED:
        one, two = tl.where(turned, pair, one), tl.where(turned, pair + TURNED, two)
    q_ptr += row * stride_qr + head * GROUP * stride_qh
    k_ptr += row * stride_kr + head * stride_kh
    weight_ptr += row * columns
    number_ptr += row * columns
    k_one = tl.zeros((BLOCK_N, WIDE), tl.float32)
    k_two, x_sum, y_sum, k_unlike, k_cross = k_one, k_one, k_one, k_one, k_one
    q_one, q_two, q_unlike, q_cross = k_one, k_one, k_one, k_one
    for start in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, columns), BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
        number = tl.load(number_ptr + column, mask=column < columns, other=0)
        number = tl.minimum(tl.maximum(number, 0), POSITIONS - 1).to(tl.int32)
        used = (weight > 0)[:, None] & real[None, :]
        offs_turn = number[:, None] * TURNED + pair[None, :]
        cos = tl.load(cos_ptr + offs_turn, mask=used & turned[None, :], other=1.0)
        sin = tl.load(sin_ptr + offs_turn, mask=used & turned[None, :], other=0.0)
        w = weight[:, None]
        rows_k = k_ptr + column.to(tl.int64)[:, None] * stride_kn
        a, b = _clean(rows_k + one[None, :], used, largest), _clean(rows_k + two[None, :], used, largest)
        x, y = a * cos + b * sin, b * cos - a * sin
        k_one += w * a * a
        k_two += w * b * b
        x_sum += w * x
        y_sum += w * y
        k_unlike += w * (x * x - y * y)
        k_cross += w * 2.0 * x * y
        cos_2, sin_2 = cos * cos - sin * sin, 2.0 * cos * sin
        for g in tl.static_range(GROUP):
            rows_q = q_ptr + g * stride_qh + column.to(tl.int64)[:, None] * stride_qn
            a, b = _clean(rows_q + one[None, :], used, largest), _clean(rows_q + two[None, :], used, largest)
            unlike, cross = a * a - b * b, 2.0 * a * b
            q_one += w * a * a
            q_two += w * b * b
            q_unlike += w * (unlike * cos_2 + cross * sin_2)
            q_cross += w * (cross * cos_2 - unlike * sin_2)
    out_ptr += ((head_cache.to(tl.int64) * tl.num_programs(1) + split) * SUMS) * PAIRS + pair
    tl.store(out_ptr, tl.sum(k_one, 0), mask=real)
    tl.store(out_ptr + PAIRS, tl.sum(k_two, 0), mask=real)
    tl.store(out_ptr + 2 * PAIRS, tl.sum(x_sum, 0), mask=real)
    tl.store(out_ptr + 3 * PAIRS, tl.sum(y_sum, 0), mask=real)
    tl.store(out_ptr + 4 * PAIRS, tl.sum(k_unlike, 0), mask=real)
    tl.store(out_ptr + 5 * PAIRS, tl.sum(k_cross, 0), mask=real)
    tl.store(out_ptr + 6 * PAIRS, tl.sum(q_one, 0) / GROUP, mask=real)
    tl.store(out_ptr + 7 * PAIRS, tl.sum(q_two, 0) / GROUP, mask=real)
    tl.store(out_ptr + 8 * PAIRS, tl.sum(q_unlike, 0) / GROUP, mask=real)
    tl.store(out_ptr + 9 * PAIRS, tl.sum(q_cross, 0) / GROUP, mask=real)


def sums(sample: PromptSample) -> torch.Tensor:
    """`moments.sums`. Does not synchronise, and no launch depends on values."""
    query, key, weight, number, tables, largest, is_interleaved = sample
    (rows, heads, columns, dim), kv_heads = query.shape, key.shape[1]
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    (positions, turned), pairs, splits = tables[0].shape, dim // 2, -(-columns // SPAN)
    out = torch.empty(rows, kv_heads, splits, SUMS, pairs, dtype=torch.float32, device=key.device)
    wide = triton.next_power_of_2(pairs)
    with torch.cuda.device(key.device) if key.device.type == "cuda" else torch.no_grad():
        moments_kernel[(rows * kv_heads, splits)](
            query, key, weight.contiguous(), number.contiguous(), *tables, out, *query.stride()[:3], *key.stride()[:3],
            columns, largest, KV_HEADS=kv_heads, GROUP=heads // kv_heads, PAIRS=pairs, TURNED=turned,
            POSITIONS=max(1, positions), INTERLEAVED=is_interleaved, WIDE=wide, BLOCK_N=max(4, 512 // wide),
            SPAN=SPAN, SUMS=SUMS, num_warps=4,
        )  # fmt: skip
    return out[:, :, 0] if splits == 1 else out.sum(2)
