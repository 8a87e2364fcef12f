"""``prefill_packed`` on GPUs: the prefix is unpacked to rows once, new rows are put behind it, and prefill attends.

    pages, k_new, v_new --unpack_kernel--> k, v [tokens of all requests, KV heads, D] --prefill_attention--> out

A chunk of new tokens reads every row of the prefix many times, so unpacking costs little beside the attention. KV heads
are done a few at a time where the rows of all would take more than STAGED bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.packed_decode.triton import row_arguments, split_at
from kvstrata.attention.prefill.op import HEAD_DIMS, prefill_attention
from kvstrata.attention.prefill_cached.staging_triton import _rows, _signs, stage_warps
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_triton import whole_pages

from .job import Job, Result

STAGED = 512 << 20  # bytes of K and V rows at a time


@triton.jit
def _overlay(rows, ptr, mask):
    """Replace the rows that a mask names by those in memory."""
    return tl.where(mask, tl.load(ptr, mask=mask, other=0.0), rows)


@triton.jit
def unpack_kernel(
    k_out_ptr, v_out_ptr, pages_ptr, table_ptr, length_ptr, cu_q_ptr, cu_k_ptr, k_new_ptr, v_new_ptr, balance_ptr,
    centre_ptr, hadamard_ptr, tail_k_ptr, tail_v_ptr, tail_slots_ptr, sink_k_ptr, sink_v_ptr, sink_slots_ptr,
    tail_requests, tail_stride, tail_stride_head, sink_requests, sink_stride, sink_stride_head, stride_table,
    stride_block, stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head, first_head, longest, total,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, V_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr, PAGE_BYTES: tl.constexpr, BALANCED: tl.constexpr, CENTRED: tl.constexpr,
    WHOLE: tl.constexpr, TAIL: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """TOKENS positions of one request and KV head, of K or V: from a page, plain rows beside it, or new rows."""
    per_request = tl.cdiv(longest, TOKENS)
    request, number = tl.program_id(0) // per_request, tl.program_id(0) % per_request
    head, is_k = tl.program_id(1).to(tl.int64), tl.program_id(2) == 0
    length = tl.load(length_ptr + request)
    begin_q = tl.load(cu_q_ptr + request)
    prefix = length - (tl.load(cu_q_ptr + request + 1) - begin_q)
    begin_k = tl.load(cu_k_ptr + request)
    if number * TOKENS < length:
        token, dim = tl.arange(0, TOKENS), tl.arange(0, WIDE)
        position = number * TOKENS + token
        mask_d = (dim < DIM)[None, :]
        packed, fresh = position < prefix, (position >= prefix) & (position < length)
        in_head = (first_head + head).to(tl.int64)
        tail, sink, end, sinks = split_at(tail_slots_ptr, sink_slots_ptr, request, length, tail_requests, sink_requests,
                                          TOKENS, TAIL, SINK)  # fmt: skip
        in_tail, in_sinks = packed & (position >= end), packed & (position < sinks)
        tail_row = tail * tail_stride + in_head * tail_stride_head + (position % max(TAIL, 1))[:, None] * DIM
        sink_row = sink * sink_stride + in_head * sink_stride_head + position[:, None] * DIM
        coded = number * TOKENS < tl.minimum(prefix, end)  # a page with tokens of the prefix
        entry = table_ptr + request.to(tl.int64) * stride_table + number * TOKENS // BLOCK_SIZE
        handle = tl.load(entry, mask=coded, other=0).to(tl.int64)
        page = pages_ptr.to(tl.int64) + handle * stride_block + in_head * stride_head
        page += number * TOKENS % BLOCK_SIZE // TOKENS * PAGE_BYTES
        scale_ptr = (page + SCALE_OFFSET).to(tl.pointer_type(tl.float16))
        row = begin_k + position
        out = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
        live = ((position < length) & (row < total))[:, None] & mask_d
        new_row = (begin_q + position - prefix).to(tl.int64)[:, None]
        mask_new = fresh[:, None] & mask_d
        DTYPE: tl.constexpr = k_out_ptr.dtype.element_ty
        if is_k:
            new = tl.load(k_new_ptr + new_row * k_stride_token + in_head * k_stride_head + dim[None, :], mask=mask_new,
                          other=0.0).to(DTYPE)  # fmt: skip
            if coded:
                rows = _rows(
                    page, scale_ptr, packed, hadamard_ptr, DTYPE, K_BITS, True, DIM, WIDE, TOKENS, BLOCK, WHOLE
                )
                if CENTRED:
                    rows += tl.load(centre_ptr + in_head * DIM + dim, mask=dim < DIM, other=0.0)[None, :]
                if BALANCED:
                    rows *= tl.load(balance_ptr + in_head * DIM + dim, mask=dim < DIM, other=0.0)[None, :]
                new = tl.where(packed[:, None], rows.to(DTYPE), new)
            if TAIL > 0:
                new = _overlay(new, tail_k_ptr + tail_row + dim[None, :], in_tail[:, None] & mask_d)
            if SINK > 0:
                new = _overlay(new, sink_k_ptr + sink_row + dim[None, :], in_sinks[:, None] & mask_d)
            tl.store(k_out_ptr + out, new, mask=live)
        else:
            new = tl.load(v_new_ptr + new_row * v_stride_token + in_head * v_stride_head + dim[None, :], mask=mask_new,
                          other=0.0).to(DTYPE)  # fmt: skip
            if coded:
                rows = _rows(page + V_OFFSET, scale_ptr, packed, hadamard_ptr, DTYPE, V_BITS, False, DIM, WIDE, TOKENS,
                             BLOCK, WHOLE)  # fmt: skip
                new = tl.where(packed[:, None], rows.to(DTYPE), new)
            if TAIL > 0:
                new = _overlay(new, tail_v_ptr + tail_row + dim[None, :], in_tail[:, None] & mask_d)
            if SINK > 0:
                new = _overlay(new, sink_v_ptr + sink_row + dim[None, :], in_sinks[:, None] & mask_d)
            tl.store(v_out_ptr + out, new, mask=live)


def missing(job: Job) -> str | None:
    """Reason why these kernels cannot run the job, or None."""
    if job.format.head_dim not in HEAD_DIMS:
        return f"triton: expected a head_dim of {HEAD_DIMS}, got {job.format.head_dim}"
    return None


def _bounds(job: Job) -> tuple[int, int, int]:
    """Upper bounds of a request's queries and tokens, and of all tokens: as given, or read from the device."""
    options, (seq_lens, cu) = job.options, (job.tensors.seq_lens, job.tensors.cu_seqlens_q)
    given = [options.max_seqlen_q, options.max_seqlen_k, options.total_tokens]
    if None in given:
        read = torch.stack([cu.diff().max(), seq_lens.max(), seq_lens.sum()]).tolist()
        given = [old if old is not None else new for old, new in zip(given, read, strict=True)]
    return given[0], given[1], given[2]  # type: ignore[return-value]


def run(job: Job, backend: str) -> Result:
    """Unpack and attend; ``backend`` is that of `prefill_attention`."""
    t, options, f, blocks = job.tensors, job.options, job.format, job.blocks
    q, device, dim = t.q, t.q.device, f.head_dim
    max_q, max_k, total = _bounds(job)
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device) if options.return_lse else None
    group = q.shape[1] // blocks.kv_heads
    cu_k = torch.zeros(t.seq_lens.shape[0] + 1, dtype=torch.int32, device=device)
    torch.cumsum(t.seq_lens, 0, dtype=torch.int32, out=cu_k[1:])
    heads = max(1, min(blocks.kv_heads, STAGED // max(2 * total * dim * q.element_size(), 1)))
    rows = torch.empty(2, max(total, 1), heads, dim, dtype=q.dtype, device=device)
    whole = whole_pages(dim, f.page_tokens, {f.k_bits, f.v_bits})
    signs = _signs(dim, device)
    for first in range(0, blocks.kv_heads, heads):
        count = min(heads, blocks.kv_heads - first)
        k, v = (x.flatten()[: max(total, 1) * count * dim].view(-1, count, dim) for x in rows)
        grid = (t.seq_lens.shape[0] * -(-max(max_k, 1) // f.page_tokens), count, 2)
        with torch.cuda.device_of(q):
            unpack_kernel[grid](
                k, v, t.pages, t.block_table, t.seq_lens, t.cu_seqlens_q, cu_k, t.k_new, t.v_new,
                q if t.balance is None else t.balance, q if t.centre is None else t.centre, signs,
                *row_arguments(q, t.rows),
                t.block_table.stride(0), blocks.block_stride, blocks.head_stride, *t.k_new.stride()[:2],
                *t.v_new.stride()[:2], first, max(max_k, 1), total,
                HEADS=count, DIM=dim, WIDE=triton.next_power_of_2(dim), K_BITS=f.k_bits, V_BITS=f.v_bits,
                TOKENS=f.page_tokens, BLOCK_SIZE=blocks.block_size, BLOCK=block_of(dim) if f.rotate else 1,
                V_OFFSET=f.v_offset, SCALE_OFFSET=f.scale_offset, PAGE_BYTES=f.page_bytes,
                BALANCED=t.balance is not None, CENTRED=t.centre is not None, WHOLE=whole,
                TAIL=t.rows.tail_tokens, SINK=t.rows.sink_tokens, num_warps=stage_warps(dim),
            )  # fmt: skip
        of_heads = slice(first * group, (first + count) * group)
        result = prefill_attention(
            q[:, of_heads], k, v, scale=options.scale, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=cu_k,
            max_seqlen_q=max_q, max_seqlen_k=max_k, sliding_window=options.sliding_window, softcap=options.softcap,
            sinks=None if t.sinks is None else t.sinks[of_heads], return_lse=True, backend=backend,
        )  # fmt: skip
        assert isinstance(result, AttentionOutput)
        out[:, of_heads] = result.out
        if lse is not None and result.lse is not None:
            lse[:, of_heads] = result.lse
    return out, lse
