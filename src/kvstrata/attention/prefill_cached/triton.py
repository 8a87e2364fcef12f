"""``prefill_attention_cached`` in Triton: a chunk of the cache as 16-bit rows, then attention over it, and so on.

    pages of all tiers ──stage_kernel──▶ rows of a chunk ──chunk_kernel──▶ sums ──▶ next chunk .. ──▶ out

Hundreds of queries read the same tokens, so a token is unpacked once, to the model's space, by whole pages: levels
times a Hadamard matrix of +-1, which tensor cores do exactly, then scale and centre. The tokens of a (request, KV head)
are numbered page by page, tier after tier; order does not matter, positions decide what a query sees. Slots of a page
without a token get the position AFTER_ALL. For every page the smallest and largest position are kept, so that blocks
which all queries see run without a mask.

Rows of a program of chunk_kernel: the query heads of one KV head, query by query. Its sums wait in memory between
chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvstrata.attention.decode.job import Job
from kvstrata.attention.decode.triton import _on_device, _positions
from kvstrata.attention.prefill.configs import processors_of
from kvstrata.attention.prefill.launch import launch
from kvstrata.attention.prefill.op import Result
from kvstrata.attention.prefill.triton import LN2, LOG2E, has_gluon
from kvstrata.layout.rotation import hadamard
from kvstrata.layout.unpack_triton import load_levels, load_scales, page_address, page_levels, whole_pages, widen

from .op import CachedJob

AFTER_ALL = tl.constexpr(0x7FFFFFFF)
STAGED = 72 << 20  # bytes of K and V rows in a chunk, at most; but one block of tokens of every (request, KV head)


@triton.jit
def _pages(count_ptr, length, TIERS: tl.constexpr, TOKENS: tl.constexpr):
    """Of a (request, KV head)."""
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
    """K or V of a page, which begin at a multiple of 16 bytes: float32, without K's centre; BITS 0: plain."""
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
    """Positions of a page, and the smallest and largest of them."""
    tl.store(position_ptr, position)
    tl.store(bounds_ptr, tl.min(position, 0))
    tl.store(bounds_ptr + 1, tl.max(position, 0))


@triton.jit(do_not_specialize=["first", "units", "stride_length", "slots"])
def stage_kernel(
    k_rows_ptr, v_rows_ptr, position_ptr, bounds_ptr, requests_ptr, length_ptr, table_ptr, count_ptr, centre_ptr,
    pointers_ptr, offsets_ptr, hadamard_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_length, stride_table_r,
    stride_table_h, stride_table_t, stride_count_r, stride_count_h, stride_centre_r, stride_centre_h, stride_k_page,
    stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head, units, first, slots,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TIERS: tl.constexpr, FORMATS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, POSITION_BYTES: tl.constexpr,
    MANTISSA: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Page ``first + program_id(1)`` of a (request, KV head) to its rows of the chunk: K and positions, or V.

    TIERS 0: TOKENS tokens of a PagedCache, whose own pages have PAGE slots.
    """
    bucket, place, is_k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) == 0
    batch, kv_head = bucket // KV_HEADS, bucket % KV_HEADS
    request = tl.load(requests_ptr + batch).to(tl.int64)
    length = tl.load(length_ptr + request * stride_length)
    count_ptr += request * stride_count_r + kv_head * stride_count_h
    total = _pages(count_ptr, length, TIERS, TOKENS)
    token, dim = tl.arange(0, TOKENS), tl.arange(0, WIDE)
    mask_d = (dim < DIM)[None, :]
    number = first + place  # of the page; past the last, up to a whole block and one at least, rows are empty
    row = bucket * slots + place * TOKENS + token
    out = row[:, None] * DIM + dim[None, :]
    k_out, v_out = k_rows_ptr + out, v_rows_ptr + out
    mask_out = mask_d & (token >= 0)[:, None]
    position_ptr += row
    bounds_ptr += (bucket * (slots // TOKENS) + place) * 2
    DTYPE: tl.constexpr = k_rows_ptr.dtype.element_ty
    if number >= total:
        if place * TOKENS < tl.cdiv(tl.maximum(total - first, 1) * TOKENS, BLOCK_N) * BLOCK_N:
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
            at = page * stride_k_page + slot * stride_k_row + kv_head * stride_k_head
            k = widen(tl.load(k_ptr + at[:, None] + dim[None, :], mask=mask, other=0), MANTISSA) * scale
            tl.store(k_out, k.to(DTYPE), mask=mask_out)
            _place(position_ptr, bounds_ptr, tl.where(live, position, AFTER_ALL))
        else:
            if SCALED > 0:
                scale = tl.load(v_scale_ptr + kv_head % SCALED)
            at = page * stride_v_page + slot * stride_v_row + kv_head * stride_v_head
            v = widen(tl.load(v_ptr + at[:, None] + dim[None, :], mask=mask, other=0), MANTISSA) * scale
            tl.store(v_out, v.to(DTYPE), mask=mask_out)
    else:
        pages_ptr = table_ptr + request * stride_table_r + kv_head * stride_table_h
        before = 0
        for tier in tl.static_range(TIERS):
            count = tl.load(count_ptr + tier)
            mine = number - before
            before += tl.cdiv(count, TOKENS)
            if (mine >= 0) & (number < before):
                page = page_address(pointers_ptr, tl.load(pages_ptr + tier * stride_table_t + mine), units)
                live = mine * TOKENS + token < count
                at = offsets_ptr + 3 * tier
                K_BITS: tl.constexpr = 0 if tier == 0 else (FORMATS >> (8 * tier)) & 15
                V_BITS: tl.constexpr = 0 if tier == 0 else (FORMATS >> (8 * tier + 4)) & 15
                scale_ptr = (page + tl.load(at + 1)).to(tl.pointer_type(tl.float16))
                if is_k:
                    k = _rows(page, scale_ptr, live, hadamard_ptr, DTYPE, K_BITS, True, DIM, WIDE, TOKENS, BLOCK, WHOLE)
                    if CENTRED and tier > 0:
                        centre_ptr += request * stride_centre_r + kv_head * stride_centre_h
                        k += tl.load(centre_ptr + dim, mask=dim < DIM, other=0.0)[None, :]
                    tl.store(k_out, k.to(DTYPE), mask=mask_out)
                    position = _positions(page, tl.load(at + 2), token, live, POSITION_BYTES)
                    _place(position_ptr, bounds_ptr, tl.where(live, position, AFTER_ALL))
                else:
                    page += tl.load(at)
                    v = _rows(
                        page, scale_ptr, live, hadamard_ptr, DTYPE, V_BITS, False, DIM, WIDE, TOKENS, BLOCK, WHOLE
                    )
                    tl.store(v_out, v.to(DTYPE), mask=mask_out)


@triton.jit(do_not_specialize=["first", "slots", "rows_of_all", "window", "stride_length"])
def chunk_kernel(
    q_ptr, k_ptr, v_ptr, position_ptr, bounds_ptr, acc_ptr, stats_ptr, out_ptr, lse_ptr, sinks_ptr, requests_ptr,
    starts_ptr, length_ptr, count_ptr, stride_qt, stride_qh, stride_length, stride_count_r, stride_count_h, first,
    slots, rows_of_all, factor, softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TIERS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M query rows of a (request, KV head) over the chunk; the FIRST of all chunks begins the sums, LAST ends."""
    bucket = tl.program_id(1).to(tl.int64)
    batch, kv_head = bucket // KV_HEADS, bucket % KV_HEADS
    begin = tl.load(starts_ptr + batch)
    new = tl.load(starts_ptr + batch + 1) - begin
    start_row = tl.program_id(0) * BLOCK_M
    if start_row < new * GROUP:
        request = tl.load(requests_ptr + batch).to(tl.int64)
        length = tl.load(length_ptr + request * stride_length)
        count_ptr += request * stride_count_r + kv_head * stride_count_h
        row, dim = start_row + tl.arange(0, BLOCK_M), tl.arange(0, WIDE)
        mask_row = row < new * GROUP
        query, head = row // GROUP, kv_head * GROUP + row % GROUP
        own = length - new + query
        first_own = length - new + start_row // GROUP
        mask_q = mask_row[:, None] & (dim < DIM)[None, :]
        at = (begin + query).to(tl.int64)
        q = tl.load(q_ptr + (at * stride_qt + head * stride_qh)[:, None] + dim[None, :], mask=mask_q, other=0.0)
        state = kv_head * rows_of_all + begin.to(tl.int64) * GROUP + row
        if FIRST:
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, WIDE), tl.float32)
        else:
            top = tl.load(stats_ptr + state * 2, mask=mask_row, other=float("-inf"))
            total = tl.load(stats_ptr + state * 2 + 1, mask=mask_row, other=0.0)
            acc = tl.load(acc_ptr + state[:, None] * DIM + dim[None, :], mask=mask_q, other=0.0)
        pages = tl.minimum(tl.maximum(_pages(count_ptr, length, TIERS, TOKENS) - first, 0), slots // TOKENS)
        offs = tl.arange(0, BLOCK_N)
        k_base, v_base = k_ptr + bucket * slots * DIM, v_ptr + bucket * slots * DIM
        position_ptr += bucket * slots
        bounds_ptr += bucket * (slots // TOKENS) * 2
        mask_d = (dim < DIM)[None, :]
        for start in tl.range(0, pages * TOKENS, BLOCK_N):
            tile = (start + offs)[:, None] * DIM + dim[None, :]
            k = tl.load(k_base + tile) if DIM == WIDE else tl.load(k_base + tile, mask=mask_d, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scaled = factor
            if CAPPED:
                s = (softcap - 2.0 * softcap / (tl.exp2(s * (factor * LOG2E)) + 1.0)) * LOG2E
                scaled = 1.0
            latest = tl.load(bounds_ptr + start // TOKENS * 2 + 1)
            earliest = tl.load(bounds_ptr + start // TOKENS * 2)
            for page in tl.static_range(1, BLOCK_N // TOKENS):
                latest = tl.maximum(latest, tl.load(bounds_ptr + (start // TOKENS + page) * 2 + 1))
                earliest = tl.minimum(earliest, tl.load(bounds_ptr + (start // TOKENS + page) * 2))
            hidden = latest > first_own
            if WINDOWED:
                hidden = hidden | (earliest <= first_own + (BLOCK_M - 1) // GROUP + 1 - window)
            if hidden:
                position = tl.load(position_ptr + start + offs)[None, :]
                seen = position <= own[:, None]
                if WINDOWED:
                    seen = seen & (position > own[:, None] - window)
                s = tl.where(seen, s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1) * scaled)
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(s * scaled - safe[:, None])
            old = tl.exp2(top - safe)
            v = tl.load(v_base + tile) if DIM == WIDE else tl.load(v_base + tile, mask=mask_d, other=0.0)
            total = total * old + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
            top = new_top
        if LAST:
            if SINKS:
                sink = tl.load(sinks_ptr + head) * LOG2E
                new_top = tl.maximum(top, sink)
                safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                old = tl.exp2(top - safe)
                total = total * old + tl.exp2(sink - safe)
                acc = acc * old[:, None]
                top = new_top
            some = tl.where(total == 0.0, 1.0, total)
            at = (begin + query).to(tl.int64) * (KV_HEADS * GROUP) + head
            value = (acc / some[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at[:, None] * DIM + dim[None, :], value, mask=mask_q)
            if LSE:
                lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * LN2)
                tl.store(lse_ptr + at, lse, mask=mask_row)
        else:
            tl.store(stats_ptr + state * 2, top, mask=mask_row)
            tl.store(stats_ptr + state * 2 + 1, total, mask=mask_row)
            tl.store(acc_ptr + state[:, None] * DIM + dim[None, :], acc, mask=mask_q)


@functools.lru_cache(maxsize=16)
def _signs(dim: int, device: torch.device) -> torch.Tensor:
    """The rotation without its factor: 1, -1 and 0."""
    return hadamard(dim, "cpu").sign().half().to(device)


def _source(job: CachedJob) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Tensors, numbers and constants that say where the tokens are; as decode's kernel takes them."""
    from kvstrata.attention.decode.triton import _paged, _tiered

    q = job.q.unsqueeze(0)
    like = Job(q, job.buckets, job.paged, job.requests, job.kv_heads, job.max_length, job.scale, None, None, None,
                  False, False)  # fmt: skip
    return _tiered(like) if job.buckets is not None else _paged(like)


def stage_warps(dim: int) -> int:
    """More programs of fewer warps are faster, as long as their registers suffice."""
    return 4 if dim <= 128 else 8


class Staging(NamedTuple):
    """Rows of a chunk of tokens of every (request, KV head), and how they are filled."""

    k: torch.Tensor  # [buckets, slots, D]
    v: torch.Tensor
    positions: torch.Tensor  # int32 [buckets, slots]
    bounds: torch.Tensor  # int32 [buckets, pages, 2]: smallest and largest position
    wide: int  # D, or the power of two above it
    chunks: int
    page_tokens: int
    tiers: int
    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # requests, lengths, tokens of every tier
    count_strides: tuple[int, int, int]
    fill: Callable[[int], None]  # with chunk i


def stage(job: CachedJob, block_n: int, most: int) -> Staging:
    """``most`` bytes of rows, or less; blocks of ``block_n`` tokens."""
    q, device, buckets = job.q, job.q.device, len(job.requests) * job.kv_heads
    dim, size = q.shape[2], q.element_size()
    tensors, numbers, constants = _source(job)
    length, table, count, centre, pointers, offsets, k, v, k_scale, v_scale = tensors
    tiers, constants["PAGE"] = constants["TIERS"], constants["TOKENS"]
    if tiers == 0:
        constants["TOKENS"] = 16 if device.type != "cuda" else 64
    page_tokens = constants["TOKENS"]
    formats = job.buckets.formats[1:] if job.buckets is not None else ()
    whole = whole_pages(dim, page_tokens, {bits for f in formats for bits in (f.k_bits, f.v_bits)})
    # Slots of a chunk: a whole number of blocks and pages; all tokens, each tier with a page that is not full.
    needed = -(-(job.max_length + max(tiers, 1) * page_tokens) // block_n)
    chunks = -(-needed // max(most // (buckets * dim * size * 2 * block_n), 1))
    slots = -(-needed // chunks) * block_n
    wide = 1 << (dim - 1).bit_length()
    rows = torch.empty(2, buckets, slots, dim, dtype=q.dtype, device=device)
    positions = torch.empty(buckets, slots, dtype=torch.int32, device=device)
    bounds = torch.empty(buckets, slots // page_tokens, 2, dtype=torch.int32, device=device)
    requests = _on_device(tuple(job.requests), device)

    pointed = (rows[0], rows[1], positions, bounds, requests, length, table, count, centre, pointers, offsets,
               _signs(dim, device), k, v, k_scale, v_scale)  # fmt: skip
    constants |= dict(KV_HEADS=job.kv_heads, DIM=dim, WIDE=wide, BLOCK_N=block_n, WHOLE=whole)

    def fill(chunk: int) -> None:
        grid = (buckets, slots // page_tokens, 2)
        args = (*pointed, *numbers, chunk * slots // page_tokens, slots)
        launch(stage_kernel, grid, args, constants, num_warps=stage_warps(dim))

    return Staging(
        rows[0], rows[1], positions, bounds, wide, -(-needed * block_n // slots), page_tokens, tiers,
        (requests, length, count), (numbers[0], numbers[4], numbers[5]), fill,
    )  # fmt: skip


def unpack(job: CachedJob) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens as rows: k, v ``[B, Hkv, N, D]`` and positions ``[B, Hkv, N]``, tier by tier and page by page."""
    staged = stage(job, 64, 1 << 62)
    with torch.cuda.device_of(job.q):
        staged.fill(0)
    shape = (len(job.requests), job.kv_heads)
    return staged.k.unflatten(0, shape), staged.v.unflatten(0, shape), staged.positions.unflatten(0, shape)


class Sums(NamedTuple):
    """Of every row, between chunks."""

    acc: torch.Tensor  # float32 [rows, D]
    stats: torch.Tensor  # float32 [rows, 2]: maximum and sum
    starts: torch.Tensor  # int32 [B + 1]: each request's first new token
    factor: float  # of scores


class Attend:
    """Over one chunk after the other."""

    def __init__(self, job: CachedJob, staged: Staging, sums: Sums, out: torch.Tensor, lse: torch.Tensor | None):
        self.job, self.staged, self.sums, self.out, self.lse = job, staged, sums, out, lse
        self.block_m, self.block_n, self.narrow = _blocks(job)

    def __call__(self, chunk: int) -> None:
        job, staged, sums, out, lse = self.job, self.staged, self.sums, self.out, self.lse
        requests, length, count = staged.counts
        tokens, heads, dim = job.q.shape
        buckets, slots, group = *staged.k.shape[:2], heads // job.kv_heads
        args = (
            job.q, staged.k, staged.v, staged.positions, staged.bounds, sums.acc, sums.stats, out,
            out if lse is None else lse, out if job.sinks is None else job.sinks, requests, sums.starts, length, count,
            *job.q.stride()[:2], *staged.count_strides, chunk * slots // staged.page_tokens, slots, tokens * group,
            sums.factor, job.softcap or 0.0, job.sliding_window or 0,
        )  # fmt: skip
        constants = dict(
            KV_HEADS=job.kv_heads, GROUP=group, DIM=dim, WIDE=staged.wide, TIERS=staged.tiers,
            TOKENS=staged.page_tokens, BLOCK_M=self.block_m, BLOCK_N=self.block_n, FIRST=chunk == 0,
            LAST=chunk == staged.chunks - 1, WINDOWED=job.sliding_window is not None, CAPPED=job.softcap is not None,
            SINKS=job.sinks is not None, LSE=lse is not None, PRECISION="ieee" if job.q.element_size() == 4 else "tf32",
        )  # fmt: skip
        grid = (-(-max(job.new) * group // self.block_m), buckets, 1)
        stages, warps = (1, 4) if self.narrow else (2, 8)
        launch(chunk_kernel, grid, args, constants, num_warps=warps, num_stages=stages)


def _blocks(job: CachedJob) -> tuple[int, int, bool]:
    """Rows and tokens of a program of chunk_kernel, and whether wide values leave it few registers."""
    dim, hopper = job.q.shape[2], processors_of(job.q.device)[1]
    if job.q.device.type != "cuda":
        return 16, 64, False
    if job.q.element_size() == 4 or (dim > 128 and not hopper):
        return 64, 64, True
    return 128, 128 if hopper and dim <= 128 else 64, False


def _specialized(job: CachedJob) -> bool:
    """Whether gluon.py takes the job; not even imported elsewhere than on Hopper."""
    if not processors_of(job.q.device)[1] or not has_gluon():
        return False
    from . import gluon as cached_gluon

    return cached_gluon.missing(job) is None


def run(job: CachedJob) -> Result:
    """Launches for a checked job: two a chunk, three on Hopper."""
    q, device = job.q, job.q.device
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device) if job.return_lse else None
    if tokens == 0:
        return out, lse
    staged = stage(job, _blocks(job)[1], STAGED)
    rows = tokens * heads if staged.chunks > 1 else 1
    sums = torch.empty(rows * (dim + 2), dtype=torch.float32, device=device)
    starts = _on_device(tuple(accumulate(job.new, initial=0)), device)
    factor = job.scale * LOG2E.value if job.softcap is None else 2 * job.scale / job.softcap
    kept = Sums(sums[2 * rows :], sums[: 2 * rows], starts, factor)
    with torch.cuda.device_of(q):
        if _specialized(job):
            from . import gluon as cached_gluon

            attend: Callable[[int], None] = cached_gluon.Attend(job, staged, kept, out, lse)
        else:
            attend = Attend(job, staged, kept, out, lse)
        for chunk in range(staged.chunks):
            staged.fill(chunk)
            attend(chunk)
    return out, lse
