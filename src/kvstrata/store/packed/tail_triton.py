"""``store_packed`` with a tail or sink rows in Triton: the portable GPU path, run by the interpreter in CI.

The first programs handle rows: they store those whose page is complete, and copy those that stay in the tail or belong
to the sinks. The rest handle requests: they store the tokens of a page that the call completes from the tail. Such a
program also copies the newer tokens that replace those it read: no other may, since programs run in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvstrata.layout.rotation import block_of
from kvstrata.quant.reference import GAUSSIAN_STEP, K_GAIN, V_GAIN
from kvstrata.quant.triton import factor_of

from .tail_job import TailJob
from .triton import _places, _store_side


@triton.jit
def _slot(slots_ptr, request, mask, requests, THERE: tl.constexpr):
    """Slot of each request, -1 for none."""
    slot = tl.full(request.shape, -1, tl.int32)
    if THERE:
        slot = tl.load(slots_ptr + request, mask=mask, other=-1)
        slot = tl.where((slot >= 0) & (slot < requests), slot, -1)
    return slot.to(tl.int64)


@triton.jit
def _copy_rows(to_ptr, to_row, from_ptr, from_row, stride, mask, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Copy rows of DIM elements; ``to_row`` in elements from ``to_ptr``, ``from_row`` in rows of ``stride``."""
    offs_d = tl.arange(0, WIDE)[None, :]
    live = mask[:, None] & (offs_d < DIM)
    x = tl.load(from_ptr + from_row[:, None] * stride + offs_d, mask=live)
    tl.store(to_ptr + to_row[:, None] + offs_d, x, mask=live)


@triton.jit
def tail_kernel(
    k_ptr, v_ptr, pages_ptr, slot_mapping_ptr, balance_ptr, centre_ptr, k_places_ptr, v_places_ptr, seq_lens_ptr,
    cu_ptr, tail_k_ptr, tail_v_ptr, tail_slots_ptr, sink_k_ptr, sink_v_ptr, sink_slots_ptr,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head, stride_block, stride_head, stride_slot, tokens, slots,
    block_size, requests, each, tail_requests, tail_stride, tail_stride_head, sink_requests, sink_stride,
    sink_stride_head, row_programs,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOK: tl.constexpr, TOKENS: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, K_GAIN: tl.constexpr, V_GAIN: tl.constexpr,
    V_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, PAGE_BYTES: tl.constexpr, ROTATED: tl.constexpr,
    BALANCED: tl.constexpr, CENTRED: tl.constexpr, RAGGED: tl.constexpr, TAIL: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """TAIL, SINKS: number of plain rows in addition to the pages, 0 for none."""
    PER: tl.constexpr = (TOKENS + TOK - 1) // TOK  # programs per request
    program, head, is_k = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) == 0
    of_rows, behind = program < row_programs, tl.cast(program - row_programs, tl.int32)
    if TAIL == 0:  # no programs for requests, and no code for them: Triton 3.6 cannot compile it
        of_rows = True
    offs = tl.arange(0, TOK)
    # The token of each row, and its request.
    token = program * TOK + offs
    request = behind // PER + offs * 0
    if of_rows:
        if RAGGED:
            request = offs * 0
            for first in range(0, requests, 32):
                other = first + tl.arange(0, 32)
                end = tl.load(cu_ptr + other + 1, mask=other < requests, other=2147483647)
                request += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
        else:
            request = tl.cast(token // each, tl.int32)
    known = request < requests
    if RAGGED:
        begin_row = tl.load(cu_ptr + request, mask=known, other=0)
        count = tl.load(cu_ptr + request + 1, mask=known, other=0) - begin_row
        known &= (token >= begin_row) | (not of_rows)
    else:
        begin_row = tl.cast(request * each, tl.int32)
        count = begin_row * 0 + tl.cast(each, tl.int32)
    length = tl.load(seq_lens_ptr + request, mask=known, other=0)
    begin = length - count
    known &= (begin >= 0) & (count > 0)
    begin = tl.where(known, begin, 0)
    tail = _slot(tail_slots_ptr, request, known, tail_requests, TAIL > 0)
    sink = _slot(sink_slots_ptr, request, known, sink_requests, SINKS > 0)
    in_page = begin % TOKENS
    page_start = begin - in_page  # start of the page of the request's first row
    finishes = (tail >= 0) & (in_page > 0) & (page_start + TOKENS <= length)
    # The slot of the request's first row locates that page; without it the page's tokens stay in the tail.
    first_slot = tl.load(slot_mapping_ptr + begin_row.to(tl.int64) * stride_slot, mask=finishes, other=-1)
    finishes &= (first_slot >= 0) & (first_slot < slots)
    # Rows of the call, or tokens of that page in the tail.
    older = behind % PER * TOK + offs
    if of_rows:
        position = begin + token - begin_row
        row, live = token, token < tokens
    else:
        position = page_start + older
        row, live = begin_row, finishes & (older < in_page)
    slot = tl.load(slot_mapping_ptr + row.to(tl.int64) * stride_slot, mask=live, other=-1).to(tl.int64)
    live &= (slot >= 0) & (slot < slots)
    packed = live
    if of_rows:
        packed &= (tail < 0) | (position - position % TOKENS + TOKENS <= length)
    else:
        slot += older - in_page
    slot = tl.where(packed, slot, 0)
    block, offset = slot // block_size, slot % block_size
    page = pages_ptr.to(tl.int64) + block * stride_block + head * stride_head + offset // TOKENS * PAGE_BYTES
    in_tail = tl.where(tail >= 0, tail, 0) * tail_stride + head * tail_stride_head
    source = row.to(tl.int64)
    if is_k:
        x_ptr, stride = k_ptr + head * k_stride_head, tl.cast(k_stride_token, tl.int64)
        if not of_rows:
            x_ptr, stride = tail_k_ptr, stride * 0 + 1
            source = in_tail + position % max(TAIL, 1) * DIM
        _store_side(
            x_ptr, balance_ptr + head * DIM, centre_ptr + head * DIM, k_places_ptr, page, offset % TOKENS, source,
            stride, packed, DIM, WIDE, TOK, TOKENS, K_BITS, K_STEP, K_GAIN, ROTATED, BALANCED, CENTRED, 0,
            SCALE_OFFSET, 0,
        )  # fmt: skip
    else:
        x_ptr, stride = v_ptr + head * v_stride_head, tl.cast(v_stride_token, tl.int64)
        if not of_rows:
            x_ptr, stride = tail_v_ptr, stride * 0 + 1
            source = in_tail + position % max(TAIL, 1) * DIM
        _store_side(
            x_ptr, balance_ptr, centre_ptr, v_places_ptr, page, offset % TOKENS, source, stride, packed, DIM, WIDE, TOK,
            TOKENS, V_BITS, V_STEP, V_GAIN, ROTATED, False, False, V_OFFSET, SCALE_OFFSET, 1,
        )  # fmt: skip
    if TAIL > 0:
        if of_rows:
            kept = live & (tail >= 0) & (position >= length - TAIL)
            kept &= ~(finishes & ((position - page_start) % TAIL < in_page))
        else:
            tl.debug_barrier()  # all rows of the tail have been read
            position += (length - 1 - position) // TAIL * TAIL
            row = begin_row + position - begin
            kept = live & (position >= begin)
            other = tl.load(slot_mapping_ptr + row.to(tl.int64) * stride_slot, mask=kept, other=-1)
            kept &= (other >= 0) & (other < slots)
        to = in_tail + position % TAIL * DIM
        if is_k:
            _copy_rows(tail_k_ptr, to, k_ptr + head * k_stride_head, row.to(tl.int64), k_stride_token, kept, DIM, WIDE)
        else:
            _copy_rows(tail_v_ptr, to, v_ptr + head * v_stride_head, row.to(tl.int64), v_stride_token, kept, DIM, WIDE)
    if SINKS > 0:
        kept = live & (sink >= 0) & (position < SINKS) & of_rows
        to = tl.where(sink >= 0, sink, 0) * sink_stride + head * sink_stride_head + position * DIM
        if is_k:
            _copy_rows(sink_k_ptr, to, k_ptr + head * k_stride_head, row.to(tl.int64), k_stride_token, kept, DIM, WIDE)
        else:
            _copy_rows(sink_v_ptr, to, v_ptr + head * v_stride_head, row.to(tl.int64), v_stride_token, kept, DIM, WIDE)


def store(job: TailJob) -> None:
    """Launch for checked arguments."""
    base, rows = job.store, job.rows
    f, blocks, tokens = base.format, base.blocks, base.k.shape[0]
    wide = triton.next_power_of_2(f.head_dim)
    tok = 1024 // wide
    row_programs = triton.cdiv(tokens, tok)
    of_requests = job.requests * triton.cdiv(f.page_tokens, tok) if rows.tail_k is not None else 0
    device, k = base.pages.device, base.k
    k_gain, v_gain = (factor_of(gain, f.head_dim, f.rotate) for gain in (K_GAIN[f.k_bits], V_GAIN[f.v_bits]))

    def or_k(x: torch.Tensor | None) -> torch.Tensor:
        return k if x is None else x

    def sizes(x: torch.Tensor | None) -> tuple[int, ...]:
        return (0, 0, 0) if x is None else (x.shape[0], *x.stride()[:2])

    with torch.cuda.device_of(base.pages):
        tail_kernel[(row_programs + of_requests, blocks.kv_heads, 2)](
            k, base.v, base.pages, base.slot_mapping, or_k(base.balance), or_k(base.centre), _places(f, "k", device),
            _places(f, "v", device), job.seq_lens, or_k(job.cu_seqlens_q), *(or_k(x) for x in rows),
            *k.stride()[:2], *base.v.stride()[:2], blocks.block_stride, blocks.head_stride,
            base.slot_mapping.stride(0), tokens, blocks.slots, blocks.block_size, job.requests,
            max(tokens // max(job.requests, 1), 1), *sizes(rows.tail_k), *sizes(rows.sink_k), row_programs,
            DIM=f.head_dim, WIDE=wide, TOK=tok, TOKENS=f.page_tokens, K_BITS=f.k_bits, V_BITS=f.v_bits,
            K_STEP=GAUSSIAN_STEP[f.k_bits], V_STEP=GAUSSIAN_STEP[f.v_bits], K_GAIN=k_gain, V_GAIN=v_gain,
            V_OFFSET=f.v_offset, SCALE_OFFSET=f.scale_offset, PAGE_BYTES=f.page_bytes,
            ROTATED=block_of(f.head_dim) if f.rotate else 1, BALANCED=base.balance is not None,
            CENTRED=base.centre is not None, RAGGED=job.cu_seqlens_q is not None, TAIL=rows.tail_tokens,
            SINKS=rows.sink_tokens, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
