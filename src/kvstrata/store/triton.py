"""``store_kv`` in Triton: the portable GPU path, run by the interpreter in CI.

Same-dtype rows move as integers, so every bit pattern survives. fp8 is rounded by integer arithmetic, which gives
the same bytes on every GPU generation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .job import Rows, Task, Tensors

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


@dataclass(frozen=True)
class Config:
    """Elements of a token's row per program, and warps."""

    block: int = 2048
    num_warps: int = 4


@triton.jit
def _to_fp8(x, MANTISSA: tl.constexpr):
    """fp32 to the bits of e4m3fn (MANTISSA 3) or e5m2 (2): nearest even, saturating, NaN to 0x7f."""
    MIN_EXPONENT: tl.constexpr = -6 if MANTISSA == 3 else -14
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    a = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    # Below the smallest normal: the sum's low mantissa bits count subnormal steps, rounded to even by the adder.
    MAGIC_BITS: tl.constexpr = (23 + MIN_EXPONENT - MANTISSA + 127) << 23
    magic = tl.full(x.shape, MAGIC_BITS, tl.uint32).to(tl.float32, bitcast=True)
    subnormal = (a + magic).to(tl.uint32, bitcast=True) - MAGIC_BITS
    a_bits = a.to(tl.uint32, bitcast=True)
    rounded = (a_bits + ((1 << (SHIFT - 1)) - 1) + ((a_bits >> SHIFT) & 1)) >> SHIFT
    normal = rounded - ((MIN_EXPONENT - 1 + 127) << MANTISSA)
    out = tl.where(a_bits < ((MIN_EXPONENT + 127) << 23), subnormal, normal) | sign
    return tl.where(is_nan, 0x7F, out).to(tl.uint8)


@triton.jit
def _store_side(
    source_ptr, cache_ptr, scale_ptr, token, slot,
    stride_token, stride_head, stride_page, stride_row, stride_cache_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    MANTISSA: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < HEADS * DIM
    head, within = (offs // DIM).to(tl.int64), offs % DIM
    x = tl.load(source_ptr + token * stride_token + head * stride_head + within, mask=mask)
    if MANTISSA:
        x = x.to(tl.float32)
        if SCALES:
            scale = tl.load(scale_ptr + (head if SCALES > 1 else head * 0), mask=mask, other=1.0)
            x = x * tl.div_rn(tl.full(x.shape, 1.0, tl.float32), scale)
        x = _to_fp8(x, MANTISSA)
    page = slot // PAGE_SIZE
    row = page * stride_page + (slot - page * PAGE_SIZE) * stride_row
    tl.store(cache_ptr + row + head * stride_cache_head + within, x, mask=mask)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr,
    stride_slot_mapping, slots_in_cache,
    k_stride_token, k_stride_head, k_stride_page, k_stride_row, k_stride_cache_head,
    v_stride_token, v_stride_head, v_stride_page, v_stride_row, v_stride_cache_head,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, MANTISSA: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * stride_slot_mapping).to(tl.int64)
    if (slot >= 0) & (slot < slots_in_cache):
        _store_side(
            k_ptr, k_cache_ptr, k_scale_ptr, token, slot, k_stride_token, k_stride_head, k_stride_page, k_stride_row,
            k_stride_cache_head, HEADS, K_DIM, PAGE_SIZE, MANTISSA, K_SCALES, BLOCK,
        )  # fmt: skip
        if V_DIM:
            _store_side(
                v_ptr, v_cache_ptr, v_scale_ptr, token, slot, v_stride_token, v_stride_head, v_stride_page,
                v_stride_row, v_stride_cache_head, HEADS, V_DIM, PAGE_SIZE, MANTISSA, V_SCALES, BLOCK,
            )  # fmt: skip


def _strides(rows: Rows) -> tuple[int, ...]:
    return rows.source_token, rows.source_head, rows.cache_block, rows.cache_row, rows.cache_head


def store_kv(task: Task, tensors: Tensors, config: Config | None = None) -> None:
    """Launch a checked task; one program per token and ``block`` elements of its row."""
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = tensors
    config = config or Config()
    task = task.merged()
    as_integer = INTEGER[task.cache_dtype.itemsize]
    k_cache = k_cache.view(as_integer)
    v_cache = k_cache if v_cache is None else v_cache.view(as_integer)
    v = k if v is None else v
    if not task.rounds:
        k, v = k.view(as_integer), v.view(as_integer)
    v_rows = task.v or task.k
    v_dim = task.v.dim if task.v else 0
    widest = task.k.heads * max(task.k.dim, v_dim)
    block = min(config.block, triton.next_power_of_2(widest))
    store_kernel[(task.tokens, triton.cdiv(widest, block))](
        k, v, k_cache, v_cache, slot_mapping, k if k_scale is None else k_scale, k if v_scale is None else v_scale,
        slot_mapping.stride(0), task.slots_in_cache, *_strides(task.k), *_strides(v_rows),
        HEADS=task.k.heads, K_DIM=task.k.dim, V_DIM=v_dim, PAGE_SIZE=task.k.block_size,
        MANTISSA=MANTISSA[task.cache_dtype] if task.rounds else 0,
        K_SCALES=0 if k_scale is None else k_scale.numel(), V_SCALES=0 if v_scale is None else v_scale.numel(),
        BLOCK=block, num_warps=config.num_warps,
    )  # fmt: skip
