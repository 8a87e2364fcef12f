"""``decode_packed`` in Triton: the portable GPU path, run by the interpreter in CI.

    decode_kernel    a program per (request, KV head, block of query rows, split) loops over consecutive blocks of
                     tokens with an online softmax in the rotated space, and rotates its sums back
    combine_kernel   a program per query row combines the splits

All arithmetic is float32. The two products use tensor cores in TF32 for 16-bit queries.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kvstrata.attention.decode.triton import _cap, _splits, _step
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_triton import load_levels, load_scales, rotate_rows
from kvstrata.store.packed.plain_rows import RowTensors

from .job import Job, Result


@triton.jit
def _queries(cu_ptr, batch, RAGGED: tl.constexpr, Q_LEN: tl.constexpr):
    """First query of a request, and its number of queries."""
    if RAGGED:
        begin = tl.load(cu_ptr + batch)
        count = tl.minimum(tl.load(cu_ptr + batch + 1) - begin, Q_LEN)
    else:
        begin = batch * Q_LEN
        count = begin * 0 + Q_LEN
    return begin, count


@triton.jit
def split_at(
    tail_slots_ptr, sink_slots_ptr, batch, length, tail_requests, sink_requests, TOKENS: tl.constexpr,
    TAIL: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Slots of a request's tail and sink rows, end of its positions in pages, and number of sink rows."""
    tail = (length * 0).to(tl.int64)
    sink = tail
    packed, sinks = length, length * 0
    if TAIL > 0:
        tail = tl.load(tail_slots_ptr + batch).to(tl.int64)
        packed = tl.where((tail >= 0) & (tail < tail_requests), length // TOKENS * TOKENS, length)
    if SINK > 0:
        sink = tl.load(sink_slots_ptr + batch).to(tl.int64)
        sinks = tl.where((sink >= 0) & (sink < sink_requests), tl.minimum(packed, SINK), 0)
    return tail, sink, packed, sinks


@triton.jit
def _attend_rows(
    q, k_ptr, v_ptr, begin, end, own, window, softcap, top, total, acc, ROWS_KEPT: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add plain rows of positions ``begin .. end`` to the running sums; position p is row ``p % ROWS_KEPT``."""
    dim, offs = tl.arange(0, WIDE), tl.arange(0, 16)
    for first in range(begin, end, 16):
        position = first + offs
        live = position < end
        at = (position % ROWS_KEPT)[:, None] * DIM + dim[None, :]
        mask = live[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32)
        s = _cap(tl.dot(q, tl.trans(k), input_precision=PRECISION), softcap, CAPPED)
        seen = live[None, :] & (position[None, :] <= own[:, None])
        if WINDOWED:
            seen = seen & (position[None, :] > own[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        top, total, acc = _step(s, v, tl.full((16,), 1.0, tl.float32), top, total, acc, PRECISION)
    return top, total, acc


@triton.jit
def decode_kernel(
    q_ptr, pages_ptr, table_ptr, length_ptr, cu_ptr, balance_ptr, centre_ptr, partial_ptr, stats_ptr, tail_k_ptr,
    tail_v_ptr, tail_slots_ptr, sink_k_ptr, sink_v_ptr, sink_slots_ptr, tail_requests, tail_stride, tail_stride_head,
    sink_requests, sink_stride, sink_stride_head, stride_qt, stride_qh, stride_table,
    stride_block, stride_head, max_tokens, fixed_blocks, scale, softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, ROW_BLOCKS: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOK: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, V_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr, PAGE_BYTES: tl.constexpr, RAGGED: tl.constexpr, BALANCED: tl.constexpr,
    CENTRED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    """Compute one split of a block of query rows. BLOCK: size of the rotation, 1 for none.

    TAIL, SINK: number of plain rows in addition to the pages, 0 for none. The first split processes them.
    """
    head_cache, split = tl.program_id(0) // ROW_BLOCKS, tl.program_id(1)
    batch, kv_head = head_cache // KV_HEADS, head_cache % KV_HEADS
    begin, queries = _queries(cu_ptr, batch, RAGGED, Q_LEN)
    length = tl.minimum(tl.maximum(tl.load(length_ptr + batch), 0), max_tokens)
    row = tl.program_id(0) % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    row_live = row < queries * GROUP
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    own = length - queries + query
    dim, offs = tl.arange(0, WIDE), tl.arange(0, TOK)
    mask_d = dim < DIM
    offs_q = (begin + query).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :]
    q = tl.load(q_ptr + offs_q, mask=row_live[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    plain_q = q * scale
    if BALANCED:
        q = q * tl.load(balance_ptr + kv_head * DIM + dim, mask=mask_d, other=0.0)[None, :]
        q = q.to(q_ptr.dtype.element_ty).to(tl.float32)
    q = q * scale
    q_centre = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        q_centre = tl.sum(q * tl.load(centre_ptr + kv_head * DIM + dim, mask=mask_d, other=0.0)[None, :], 1)
    if BLOCK > 1:
        q = rotate_rows(q, ROWS, WIDE, BLOCK)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    tail, sink, packed, sinks = split_at(tail_slots_ptr, sink_slots_ptr, batch, length, tail_requests, sink_requests,
                                         TOKENS, TAIL, SINK)  # fmt: skip
    first, end = sinks // TOK, tl.cdiv(packed, TOK)
    if WINDOWED:
        first = tl.maximum(first, tl.maximum(length - queries - window + 1, 0) // TOK)
    per_split = tl.where(fixed_blocks > 0, fixed_blocks, tl.cdiv(tl.maximum(end - first, 0), SPLITS))
    start = split * per_split + tl.where(fixed_blocks > 0, 0, first)
    for block in range(tl.maximum(start, first), tl.minimum(start + per_split, tl.where(queries > 0, end, 0))):
        position = block * TOK + offs
        live = (position < packed) & (position >= sinks)
        handle = tl.load(table_ptr + batch.to(tl.int64) * stride_table + block * TOK // BLOCK_SIZE).to(tl.int64)
        in_block, token = block * TOK % BLOCK_SIZE, position % TOKENS
        page = pages_ptr + handle * stride_block + kv_head.to(tl.int64) * stride_head + in_block // TOKENS * PAGE_BYTES
        scale_ptr = (page + SCALE_OFFSET).to(tl.pointer_type(tl.float16))
        k = load_levels(
            page.to(tl.pointer_type(tl.int32)), token[None, :], dim[:, None], mask_d[:, None] & live[None, :], K_BITS,
            DIM, TOKENS, True,
        )  # fmt: skip
        s = tl.dot(q, k, input_precision=PRECISION) * load_scales(scale_ptr, token, live, 0)[None, :]
        s = _cap(s + q_centre[:, None], softcap, CAPPED)
        seen = live[None, :] & (position[None, :] <= own[:, None])
        if WINDOWED:
            seen = seen & (position[None, :] > own[:, None] - window)
        v = load_levels(
            (page + V_OFFSET).to(tl.pointer_type(tl.int32)), token[:, None], dim[None, :],
            mask_d[None, :] & live[:, None], V_BITS, DIM, TOKENS, False,
        )  # fmt: skip
        s = tl.where(seen, s, float("-inf"))
        top, total, acc = _step(s, v, load_scales(scale_ptr, token, live, 1), top, total, acc, PRECISION)
    if BLOCK > 1:
        acc = rotate_rows(acc, ROWS, WIDE, BLOCK)
    plain = (split == 0) & (queries > 0)
    if SINK > 0:
        base = sink * sink_stride + kv_head * sink_stride_head
        top, total, acc = _attend_rows(
            plain_q, sink_k_ptr + base, sink_v_ptr + base, 0, tl.where(plain, sinks, 0), own, window, softcap, top,
            total, acc, SINK, DIM, WIDE, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    if TAIL > 0:
        base = tail * tail_stride + kv_head * tail_stride_head
        top, total, acc = _attend_rows(
            plain_q, tail_k_ptr + base, tail_v_ptr + base, packed, tl.where(plain, length, 0), own, window, softcap,
            top, total, acc, TAIL, DIM, WIDE, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    offs_row = (head_cache.to(tl.int64) * SPLITS + split) * (Q_LEN * GROUP) + row
    tl.store(partial_ptr + offs_row[:, None] * DIM + dim[None, :], acc, mask=row_live[:, None] & mask_d[None, :])
    tl.store(stats_ptr + offs_row * 2, top, mask=row_live)
    tl.store(stats_ptr + offs_row * 2 + 1, total, mask=row_live)


@triton.jit
def combine_kernel(
    partial_ptr, stats_ptr, sinks_ptr, cu_ptr, out_ptr, lse_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SPLITS: tl.constexpr, RAGGED: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Combine the partials of one query row, split by split, with the sink in the denominator."""
    head_cache, row = tl.program_id(0), tl.program_id(1)
    begin, queries = _queries(cu_ptr, head_cache // KV_HEADS, RAGGED, Q_LEN)
    if row < queries * GROUP:
        head = head_cache % KV_HEADS * GROUP + row % GROUP
        out_row = (begin + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head
        dim = tl.arange(0, WIDE)
        top = tl.full((), float("-inf"), tl.float32)
        if SINKS:
            top = tl.load(sinks_ptr + head)
        for split in range(SPLITS):
            offs_split = (head_cache.to(tl.int64) * SPLITS + split) * (Q_LEN * GROUP) + row
            top = tl.maximum(top, tl.load(stats_ptr + offs_split * 2))
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros((), tl.float32)
        if SINKS:
            total = tl.exp(tl.load(sinks_ptr + head) - safe)
        acc = tl.zeros((WIDE,), tl.float32)
        for split in range(SPLITS):
            offs_split = (head_cache.to(tl.int64) * SPLITS + split) * (Q_LEN * GROUP) + row
            weight = tl.exp(tl.load(stats_ptr + offs_split * 2) - safe)
            total += weight * tl.load(stats_ptr + offs_split * 2 + 1)
            acc += weight * tl.load(partial_ptr + offs_split * DIM + dim, mask=dim < DIM, other=0.0)
        denominator = tl.where(total == 0.0, 1.0, total)
        acc = acc / denominator
        tl.store(out_ptr + out_row * DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=dim < DIM)
        if LSE:
            tl.store(lse_ptr + out_row, tl.where(total == 0.0, float("-inf"), safe + tl.log(denominator)))


def row_arguments(q: torch.Tensor, rows: RowTensors) -> list[torch.Tensor | int]:
    """Plain rows as kernel arguments: tensors, q for those that are absent; slots and strides of tail and sinks."""
    sizes = [(0, 0, 0) if x is None else (x.shape[0], *x.stride()[:2]) for x in (rows.tail_k, rows.sink_k)]
    return [*(q if x is None else x for x in rows), *sizes[0], *sizes[1]]


def decode(job: Job) -> Result:
    """Launch the kernels of a checked job."""
    q, f, blocks, device = job.q, job.format, job.blocks, job.q.device
    dim, group, head_caches = f.head_dim, job.group, job.requests * blocks.kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=device) if job.out is None else job.out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device) if job.return_lse else None
    rows, wide = job.most_queries * group, max(16, triton.next_power_of_2(dim))
    block_rows = 32 if rows > 16 and wide <= 128 else 16
    row_blocks = triton.cdiv(rows, block_rows)
    tok = min(f.page_tokens, max(16, 4096 // wide))
    most = triton.cdiv(max(job.max_tokens, 1), tok)
    fixed = 0 if job.fixed_split is None else triton.cdiv(job.fixed_split, tok)
    splits = triton.cdiv(most, fixed) if fixed else _splits(head_caches * row_blocks, most, device)
    sizes = (head_caches * splits * rows * dim, head_caches * splits * rows * 2)
    needed = 4 * sum(sizes)
    scratch = job.workspace
    if scratch is None or scratch.numel() < needed:
        scratch = torch.empty(needed, dtype=torch.uint8, device=device)
    partial, stats = scratch[:needed].view(torch.float32).split(sizes)
    exact = q.dtype == torch.float32 or torch.version.hip is not None
    shape = dict(KV_HEADS=blocks.kv_heads, GROUP=group, Q_LEN=job.most_queries, DIM=dim, WIDE=wide, SPLITS=splits,
                 RAGGED=job.cu_seqlens_q is not None)  # fmt: skip
    or_q = functools.partial(lambda x: q if x is None else x)
    with torch.cuda.device_of(q):
        decode_kernel[(head_caches * row_blocks, splits)](
            q, job.pages, job.block_table, job.seq_lens, or_q(job.cu_seqlens_q), or_q(job.balance), or_q(job.centre),
            partial, stats, *row_arguments(q, job.rows), *q.stride()[:2], job.block_table.stride(0),
            blocks.block_stride, blocks.head_stride, job.max_tokens, fixed, job.scale, job.softcap or 0.0,
            job.sliding_window or 0, **shape,
            ROWS=block_rows, ROW_BLOCKS=row_blocks, K_BITS=f.k_bits, V_BITS=f.v_bits, TOKENS=f.page_tokens,
            BLOCK_SIZE=blocks.block_size, TOK=tok, BLOCK=block_of(dim) if f.rotate else 1, V_OFFSET=f.v_offset,
            SCALE_OFFSET=f.scale_offset, PAGE_BYTES=f.page_bytes, BALANCED=job.balance is not None,
            CENTRED=job.centre is not None, WINDOWED=job.sliding_window is not None, CAPPED=job.softcap is not None,
            PRECISION="ieee" if exact else "tf32", TAIL=job.rows.tail_tokens, SINK=job.rows.sink_tokens,
            num_warps=8, num_stages=1,
        )  # fmt: skip
        combine_kernel[(head_caches, rows)](
            partial, stats, or_q(job.sinks), or_q(job.cu_seqlens_q), out, or_q(lse), **shape,
            SINKS=job.sinks is not None, LSE=lse is not None, num_warps=1 if dim <= 64 else 4,
        )  # fmt: skip
    return out, lse
