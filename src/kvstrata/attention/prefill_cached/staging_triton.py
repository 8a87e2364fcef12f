"""Rows of a chunk of cached tokens, unpacked from pages of all tiers by `stage_kernel`; and the sums between chunks.

Hundreds of queries read the same tokens, so a token is unpacked once, to the model's space, by whole pages: levels
times a Hadamard matrix of +-1, which tensor cores compute exactly, then scale and centre. The tokens of a (request, KV
head) are numbered page by page, tier by tier; the order does not matter, since positions determine what a query sees.
Slots of a page without a token get the position AFTER_ALL. The smallest and largest position of every page are kept, so
that blocks which all queries see run without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvstrata.attention.decode.job import Job
from kvstrata.attention.decode.source_triton import on_device, paged, tiered
from kvstrata.attention.decode.triton import _positions
from kvstrata.attention.prefill.launch import launch
from kvstrata.layout.rotation import hadamard
from kvstrata.layout.unpack_triton import (
    load_factors,
    load_levels,
    load_scales,
    page_address,
    page_levels,
    whole_pages,
    widen,
)

from .job import CachedJob

AFTER_ALL = tl.constexpr(0x7FFFFFFF)
ALL = 1 << 30  # more slots than a chunk has
# Strides that change with the sizes of a cache; kernels are not specialized on them.
COUNTS = ("stride_length", "stride_count_r", "stride_count_h")
TABLES = ("stride_table_r", "stride_table_h", "stride_table_t")


@triton.jit
def pages_of(count_ptr, length, TIERS: tl.constexpr, TOKENS: tl.constexpr):
    """Number of pages of a (request, KV head)."""
    if TIERS == 0:
        total = tl.cdiv(length, TOKENS)
    else:
        total = 0
        for tier in tl.static_range(TIERS):
            total += tl.cdiv(tl.load(count_ptr + tier), TOKENS)
    return total


@triton.jit
def _restore(levels, scales, hadamard_ptr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows in the model's space, float32, from levels ``[TOKENS, WIDE]`` and their scales."""
    if BLOCK > 1:
        dim = tl.arange(0, WIDE)
        inside = (dim < DIM)[:, None] & (dim < DIM)[None, :]
        turn = tl.load(hadamard_ptr + dim[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        levels = tl.dot(levels.to(tl.float16), turn)  # both exact in float16
        scales *= BLOCK**-0.5
    return levels * scales[:, None]


@triton.jit
def _rows(page, scale_ptr, live, hadamard_ptr, DTYPE: tl.constexpr, BITS: tl.constexpr, IS_K: tl.constexpr,
          DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """K or V of a page as float32 rows, without K's centre; BITS 0: plain. Either begins at a multiple of 16 bytes."""
    token, dim = tl.arange(0, TOKENS), tl.arange(0, WIDE)
    mask = live[:, None] & (dim < DIM)[None, :]
    if BITS == 0:
        pair = token[:, None] * DIM + dim[None, :]
        rows = tl.load(tl.multiple_of(page.to(tl.pointer_type(DTYPE)), 16) + pair, mask=mask, other=0.0).to(tl.float32)
    else:
        words = tl.multiple_of(page.to(tl.pointer_type(tl.int32)), 16)
        if WHOLE:
            levels = page_levels(words, BITS, DIM, TOKENS, IS_K)
        else:
            levels = load_levels(words, token[:, None], dim[None, :], mask, BITS, DIM, TOKENS, IS_K)
        scales = load_scales(scale_ptr, token, live, 0 if IS_K else 1)
        rows = _restore(levels, scales, hadamard_ptr, DIM, WIDE, BLOCK)
    return rows


@triton.jit
def _place(position_ptr, bounds_ptr, position):
    """Store the positions of a page, and the smallest and largest of them."""
    tl.store(position_ptr, position)
    tl.store(bounds_ptr, tl.min(position, 0))
    tl.store(bounds_ptr + 1, tl.max(position, 0))


@triton.jit(do_not_specialize=[*COUNTS, *TABLES, "first", "units", "slots", "block_n"])
def stage_kernel(
    k_rows_ptr, v_rows_ptr, position_ptr, bounds_ptr, requests_ptr, length_ptr, table_ptr, count_ptr, centre_ptr,
    balance_ptr, pointers_ptr, offsets_ptr, hadamard_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_length,
    stride_table_r, stride_table_h, stride_table_t, stride_count_r, stride_count_h, stride_centre_r, stride_centre_h,
    stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head, units, first, slots,
    block_n,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TIERS: tl.constexpr, FORMATS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, BALANCED: tl.constexpr,
    POSITION_BYTES: tl.constexpr, MANTISSA: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Unpack page ``first + program_id(1)`` of a (request, KV head) to its rows of the chunk: K and positions, or V.

    TIERS 0: TOKENS tokens of a PagedCache, whose own pages have PAGE slots.
    """
    head_cache, place, is_k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) == 0
    batch, kv_head = head_cache // KV_HEADS, head_cache % KV_HEADS
    request = tl.load(requests_ptr + batch).to(tl.int64)
    length = tl.load(length_ptr + request * stride_length)
    count_ptr += request * stride_count_r + kv_head * stride_count_h
    total = pages_of(count_ptr, length, TIERS, TOKENS)
    token, dim = tl.arange(0, TOKENS), tl.arange(0, WIDE)
    mask_d = (dim < DIM)[None, :]
    number = first + place  # page number; past the last one, the rest of the block is zeros
    row = head_cache * slots + place * TOKENS + token
    out = row[:, None] * DIM + dim[None, :]
    k_out, v_out = k_rows_ptr + out, v_rows_ptr + out
    mask_out = mask_d & (token >= 0)[:, None]
    position_ptr += row
    bounds_ptr += (head_cache * (slots // TOKENS) + place) * 2
    DTYPE: tl.constexpr = k_rows_ptr.dtype.element_ty
    if number >= total:
        if place * TOKENS < tl.cdiv(tl.maximum(total - first, 1) * TOKENS, block_n) * block_n:
            zero = tl.zeros((TOKENS, WIDE), DTYPE)
            if is_k:
                tl.store(k_out, zero, mask=mask_out)
                _place(position_ptr, bounds_ptr, tl.full((TOKENS,), AFTER_ALL, tl.int32))
            else:
                tl.store(v_out, zero, mask=mask_out)
    elif TIERS == 0:
        position = number * TOKENS + token
        live = position < length
        entry = table_ptr + request * stride_table_r + position // PAGE
        page, slot = tl.load(entry, mask=live, other=0).to(tl.int64), (position % PAGE).to(tl.int64)
        mask = live[:, None] & mask_d
        scale = 1.0
        if is_k:
            if SCALED > 0:
                scale = tl.load(k_scale_ptr + kv_head % SCALED)
            source = page * stride_k_page + slot * stride_k_row + kv_head * stride_k_head
            k = widen(tl.load(k_ptr + source[:, None] + dim[None, :], mask=mask, other=0), MANTISSA) * scale
            tl.store(k_out, k.to(DTYPE), mask=mask_out)
            _place(position_ptr, bounds_ptr, tl.where(live, position, AFTER_ALL))
        else:
            if SCALED > 0:
                scale = tl.load(v_scale_ptr + kv_head % SCALED)
            source = page * stride_v_page + slot * stride_v_row + kv_head * stride_v_head
            v = widen(tl.load(v_ptr + source[:, None] + dim[None, :], mask=mask, other=0), MANTISSA) * scale
            tl.store(v_out, v.to(DTYPE), mask=mask_out)
    else:
        pages_ptr = table_ptr + request * stride_table_r + kv_head * stride_table_h
        before = 0
        for tier in tl.static_range(TIERS):
            count = tl.load(count_ptr + tier)
            index = number - before  # index of the page in its tier
            before += tl.cdiv(count, TOKENS)
            if (index >= 0) & (number < before):
                page = page_address(pointers_ptr, tl.load(pages_ptr + tier * stride_table_t + index), units)
                live = index * TOKENS + token < count
                tier_offsets = offsets_ptr + 4 * tier  # offsets of V, the scales, the positions, the importance
                K_BITS: tl.constexpr = 0 if tier == 0 else (FORMATS >> (8 * tier)) & 15
                V_BITS: tl.constexpr = 0 if tier == 0 else (FORMATS >> (8 * tier + 4)) & 15
                scale_ptr = (page + tl.load(tier_offsets + 1)).to(tl.pointer_type(tl.float16))
                if is_k:
                    k = _rows(page, scale_ptr, live, hadamard_ptr, DTYPE, K_BITS, True, DIM, WIDE, TOKENS, BLOCK, WHOLE)
                    offs_c = request * stride_centre_r + kv_head * stride_centre_h + dim
                    if BALANCED:
                        k *= load_factors(balance_ptr + offs_c, dim < DIM)[None, :]
                    if CENTRED and tier > 0:
                        k += tl.load(centre_ptr + offs_c, mask=dim < DIM, other=0.0)[None, :]
                    tl.store(k_out, k.to(DTYPE), mask=mask_out)
                    position = _positions(page, tl.load(tier_offsets + 2), token, live, POSITION_BYTES)
                    _place(position_ptr, bounds_ptr, tl.where(live, position, AFTER_ALL))
                else:
                    page += tl.load(tier_offsets)
                    v = _rows(
                        page, scale_ptr, live, hadamard_ptr, DTYPE, V_BITS, False, DIM, WIDE, TOKENS, BLOCK, WHOLE
                    )
                    tl.store(v_out, v.to(DTYPE), mask=mask_out)


@functools.cache  # graphs may hold its address
def _signs(dim: int, device: torch.device) -> torch.Tensor:
    """Hadamard matrix without its factor: 1, -1 and, between blocks, 0."""
    return hadamard(dim, "cpu").sign().half().to(device)


def _source(job: CachedJob) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Tensors, numbers and constants that locate the tokens, as for decode's kernel."""
    q = job.q.unsqueeze(0)
    sizes = (job.kv_heads, job.max_length, job.scale, None, None, None, False, False)
    decode_job = Job(q, job.buckets, job.paged, job.requests, *sizes)
    return tiered(decode_job) if job.buckets is not None else paged(decode_job)


def stage_warps(dim: int) -> int:
    """Warps of stage_kernel: few, so that more programs run, as long as registers suffice."""
    return 4 if dim <= 128 else 8


class Staging(NamedTuple):
    """Rows of one chunk of tokens of every (request, KV head), and the function that fills them."""

    k: torch.Tensor  # [head_caches, slots, D]
    v: torch.Tensor
    positions: torch.Tensor  # int32 [head_caches, slots]
    bounds: torch.Tensor  # int32 [head_caches, pages, 2]: smallest and largest position
    wide: int  # D, or the power of two above it
    chunks: int
    page_tokens: int
    tiers: int
    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # requests, lengths, tokens of every tier
    count_strides: tuple[int, int, int]
    fill: Callable[[int], None]  # unpacks chunk i


def stage(job: CachedJob, block_n: int, max_bytes: int, keys_only: bool = False) -> Staging:
    """Allocate rows for chunks of up to ``max_bytes``, in blocks of ``block_n`` tokens; at least one block.

    ``keys_only``: without V; slots of a chunk without a token hold zeros at position AFTER_ALL.
    """
    sides = 1 if keys_only else 2
    q, device, head_caches = job.q, job.q.device, len(job.requests) * job.kv_heads
    dim, size = q.shape[2], q.element_size()
    tensors, numbers, constants = _source(job)
    length, table, count, centre, balance, pointers, offsets, k, v, k_scale, v_scale = tensors
    tiers, constants["PAGE"] = constants["TIERS"], constants["TOKENS"]
    if tiers == 0:
        constants["TOKENS"] = 16 if device.type != "cuda" else 64
    page_tokens = constants["TOKENS"]
    formats = job.buckets.formats[1:] if job.buckets is not None else ()
    whole = whole_pages(dim, page_tokens, {bits for f in formats for bits in (f.k_bits, f.v_bits)})
    # Blocks for all tokens, with a partial page in every tier; a chunk is a whole number of blocks and pages.
    needed = -(-(job.max_length + max(tiers, 1) * page_tokens) // block_n)
    chunks = -(-needed // max(max_bytes // (head_caches * dim * size * sides * block_n), 1))
    slots = -(-needed // chunks) * block_n
    wide = 1 << (dim - 1).bit_length()
    rows = torch.empty(sides, head_caches, slots, dim, dtype=q.dtype, device=device)
    positions = torch.empty(head_caches, slots, dtype=torch.int32, device=device)
    bounds = torch.empty(head_caches, slots // page_tokens, 2, dtype=torch.int32, device=device)
    requests = on_device(tuple(job.requests), device)

    pointers_and_rows = (rows[0], rows[-1], positions, bounds, requests, length, table, count, centre, balance,
                         pointers, offsets, _signs(dim, device), k, v, k_scale, v_scale)  # fmt: skip
    constants |= dict(KV_HEADS=job.kv_heads, DIM=dim, WIDE=wide, WHOLE=whole)

    def fill(chunk: int) -> None:
        grid = (head_caches, slots // page_tokens, sides)
        args = (*pointers_and_rows, *numbers, chunk * slots // page_tokens, slots, ALL if keys_only else block_n)
        launch(stage_kernel, grid, args, constants, num_warps=stage_warps(dim))

    return Staging(
        rows[0], rows[-1], positions, bounds, wide, -(-needed * block_n // slots), page_tokens, tiers,
        (requests, length, count), (numbers[0], numbers[4], numbers[5]), fill,
    )  # fmt: skip


def unpack(job: CachedJob) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unpack all tokens, tier by tier and page by page: k, v ``[B, Hkv, N, D]`` and positions ``[B, Hkv, N]``."""
    staged = stage(job, 64, 1 << 62)
    with torch.cuda.device_of(job.q):
        staged.fill(0)
    shape = (len(job.requests), job.kv_heads)
    return staged.k.unflatten(0, shape), staged.v.unflatten(0, shape), staged.positions.unflatten(0, shape)


def key_chunks(job: CachedJob, max_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Unpack K in chunks of up to ``max_bytes``: rows ``[B, Hkv, n, D]`` and positions ``[B, Hkv, n]``.

    Slots without a token are at AFTER_ALL. A chunk overwrites the previous one.
    """
    staged = stage(job, 128, max_bytes, keys_only=True)
    shape = (len(job.requests), job.kv_heads)
    for chunk in range(staged.chunks):
        with torch.cuda.device_of(job.q):
            staged.fill(chunk)
        yield staged.k.unflatten(0, shape), staged.positions.unflatten(0, shape)


class Sums(NamedTuple):
    """Unnormalised sums of every query row, between chunks."""

    acc: torch.Tensor  # float32 [rows, D]
    stats: torch.Tensor  # float32 [rows, 2]: maximum and sum
    starts: torch.Tensor  # int32 [B + 1]: each request's first new token
    factor: float  # from raw scores to base 2
