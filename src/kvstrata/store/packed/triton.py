"""``store_packed`` in Triton: the portable GPU path, run by the interpreter in CI.

A program stores one side of a KV head for a few tokens. A table gives the position of fields (layout/fragments.py); a
word also has fields of tokens that other programs write, so each field is cleared and set with atomics.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kvstrata.layout import Format, fragments
from kvstrata.layout.fragments import Side
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_triton import scale_index
from kvstrata.quant.reference import GAUSSIAN_STEP, K_GAIN, V_GAIN
from kvstrata.quant.triton import clean, factor_of, quantize_rows, transform

from .job import Job


@triton.jit
def _put(page, places_ptr, codes, live, WIDTH: tl.constexpr):
    """Replace one plane of the codes: ``page [TOK]`` addresses, ``places_ptr [TOK, WIDE]`` pointers to bit numbers."""
    bit = tl.load(places_ptr, mask=live, other=0)
    word = page[:, None].to(tl.pointer_type(tl.int32)) + bit // 32
    MASK: tl.constexpr = (1 << WIDTH) - 1
    field = tl.full(bit.shape, MASK, tl.int32) << (bit % 32)
    tl.atomic_and(word, ~field, mask=live, sem="relaxed")
    tl.atomic_or(word, (codes & MASK) << (bit % 32), mask=live, sem="relaxed")


@triton.jit
def _store_side(
    x_ptr, balance_ptr, centre_ptr, places_ptr, page, slot, token, stride_token, live_token,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOK: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr,
    STEP: tl.constexpr, GAIN: tl.constexpr, ROTATED: tl.constexpr, BALANCED: tl.constexpr, CENTRED: tl.constexpr,
    CODE_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Quantise and store one side, as in quant/reference.py."""
    offs_d = tl.arange(0, WIDE)[None, :]
    mask_d = offs_d < DIM
    live = live_token[:, None] & mask_d
    x = tl.load(x_ptr + token[:, None] * stride_token + offs_d, mask=live, other=0.0).to(tl.float32)
    if BALANCED:
        balance = tl.load(balance_ptr + offs_d, mask=mask_d, other=1.0)
        x = x * tl.div_rn(tl.full((1, WIDE), 1.0, tl.float32), balance)
    centre = tl.zeros((1, WIDE), tl.float32)
    if CENTRED:
        centre = tl.load(centre_ptr + offs_d, mask=mask_d, other=0.0)
    x = transform(clean(x), centre, TOK, WIDE, ROTATED, CENTRED)
    codes, scale = quantize_rows(x, BITS, STEP, GAIN, TOK, DIM, WIDE, ROTATED)
    scale_ptr = (page + SCALE_OFFSET).to(tl.pointer_type(tl.float16)) + scale_index(slot, SIDE)
    tl.store(scale_ptr, scale, mask=live_token)
    places = places_ptr + slot[:, None] * DIM + offs_d
    if BITS == 3:
        _put(page + CODE_OFFSET, places, codes, live, 2)
        _put(page + CODE_OFFSET, places + TOKENS * DIM, codes >> 2, live, 1)
    else:
        _put(page + CODE_OFFSET, places, codes, live, BITS)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, pages_ptr, slot_mapping_ptr, balance_ptr, centre_ptr, k_places_ptr, v_places_ptr,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head, stride_block, stride_head, stride_slot, tokens, slots,
    block_size,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOK: tl.constexpr, TOKENS: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, K_GAIN: tl.constexpr, V_GAIN: tl.constexpr,
    V_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, PAGE_BYTES: tl.constexpr, ROTATED: tl.constexpr,
    BALANCED: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOK + tl.arange(0, TOK)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token.to(tl.int64) * stride_slot, mask=token < tokens, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < slots)
    slot = tl.where(live, slot, 0)
    token = token.to(tl.int64)
    block, offset = slot // block_size, slot % block_size
    page = pages_ptr.to(tl.int64) + block * stride_block + head * stride_head + offset // TOKENS * PAGE_BYTES
    in_page = offset % TOKENS
    if tl.program_id(2) == 0:
        _store_side(
            k_ptr + head * k_stride_head, balance_ptr + head * DIM, centre_ptr + head * DIM, k_places_ptr, page,
            in_page, token, k_stride_token, live, DIM, WIDE, TOK, TOKENS, K_BITS, K_STEP, K_GAIN, ROTATED, BALANCED,
            CENTRED, 0, SCALE_OFFSET, 0,
        )  # fmt: skip
    else:
        _store_side(
            v_ptr + head * v_stride_head, balance_ptr, centre_ptr, v_places_ptr, page, in_page, token, v_stride_token,
            live, DIM, WIDE, TOK, TOKENS, V_BITS, V_STEP, V_GAIN, ROTATED, False, False, V_OFFSET, SCALE_OFFSET, 1,
        )  # fmt: skip


@functools.cache  # never freed: graphs may hold its address
def _places(format: Format, side: Side, device: torch.device) -> torch.Tensor:
    """Bit number of every code's field from the start of the side's codes: int32 ``[planes, page_tokens, D]``."""
    bits = format.k_bits if side == "k" else format.v_bits
    tables = fragments.places(bits, format.head_dim, format.page_tokens, side)
    return torch.stack([(byte * 8 + bit).int() for byte, bit in tables]).to(device)


def store_packed(job: Job) -> None:
    """Launch for checked arguments."""
    f, blocks, tokens = job.format, job.blocks, job.k.shape[0]
    wide = triton.next_power_of_2(f.head_dim)
    tok = 1024 // wide
    grid = (triton.cdiv(tokens, tok), blocks.kv_heads, 2)
    device = job.pages.device
    k_gain, v_gain = (factor_of(gain, f.head_dim, f.rotate) for gain in (K_GAIN[f.k_bits], V_GAIN[f.v_bits]))
    with torch.cuda.device_of(job.pages):
        store_kernel[grid](
            job.k, job.v, job.pages, job.slot_mapping, job.k if job.balance is None else job.balance,
            job.k if job.centre is None else job.centre, _places(f, "k", device), _places(f, "v", device),
            *job.k.stride()[:2], *job.v.stride()[:2], blocks.block_stride, blocks.head_stride,
            job.slot_mapping.stride(0), tokens, blocks.slots, blocks.block_size,
            DIM=f.head_dim, WIDE=wide, TOK=tok, TOKENS=f.page_tokens, K_BITS=f.k_bits, V_BITS=f.v_bits,
            K_STEP=GAUSSIAN_STEP[f.k_bits], V_STEP=GAUSSIAN_STEP[f.v_bits], K_GAIN=k_gain, V_GAIN=v_gain,
            V_OFFSET=f.v_offset, SCALE_OFFSET=f.scale_offset, PAGE_BYTES=f.page_bytes,
            ROTATED=block_of(f.head_dim) if f.rotate else 1, BALANCED=job.balance is not None,
            CENTRED=job.centre is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
