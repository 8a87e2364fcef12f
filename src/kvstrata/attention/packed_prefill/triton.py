"""``prefill_packed`` on GPUs: unpacks the prefix to rows once, appends the new rows, and calls prefill attention.

    pages, k_new, v_new --unpack_kernel--> k, v [tokens of all requests, KV heads, D] --prefill_attention--> out

A chunk of new tokens reads every row of the prefix many times, so unpacking is cheap compared with attention. If the
rows of all KV heads would take more than STAGED bytes, heads are processed a few at a time. Rows whose head_dim
prefill_attention does not support are padded to the next one that it does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.packed_decode.triton import row_arguments, split_at
from kvstrata.attention.prefill.configs import processors_of
from kvstrata.attention.prefill.launch import launch
from kvstrata.attention.prefill.op import HEAD_DIMS, prefill_attention
from kvstrata.attention.prefill_cached.staging_triton import _rows, _signs, stage_warps
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_triton import whole_pages

from .job import STAGED, Job, Result, padded_dim
from .split_triton import attend_in_parts, parts_of

WHOLE_BLOCKS = 256  # rows before a sliding window that prefill kernels may read, since they read whole blocks of keys
NO_WINDOW = 0x7FFFFFFF  # tokens in a window that hides nothing


@triton.jit
def _lengths(length_ptr, cu_q_ptr, request, mask, max_tokens):
    """Tokens before a request's new ones, limited by its row of the block table, and its number of new ones."""
    new = tl.load(cu_q_ptr + request + 1, mask=mask, other=0) - tl.load(cu_q_ptr + request, mask=mask, other=0)
    prefix = tl.load(length_ptr + request, mask=mask, other=0) - new
    return tl.minimum(tl.maximum(prefix, 0), max_tokens).to(tl.int32), new


@triton.jit(do_not_specialize=["requests", "total"])
def sums_kernel(length_ptr, cu_q_ptr, cu_k_ptr, requests, max_tokens, total, BLOCK: tl.constexpr):
    """Prefix sums of the rows of each request, at most ``total``."""
    tl.store(cu_k_ptr, 0)
    before = 0
    for first in range(0, requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        prefix, new = _lengths(length_ptr, cu_q_ptr, request, request < requests, max_tokens)
        ends = before + tl.cumsum(prefix + new, 0)
        tl.store(cu_k_ptr + 1 + request, tl.minimum(ends, total), mask=request < requests)
        before += tl.sum(prefix + new)


@triton.jit
def _overlay(rows, ptr, mask):
    """Replace the rows selected by a mask with those in memory."""
    return tl.where(mask, tl.load(ptr, mask=mask, other=0.0), rows)


@triton.jit(do_not_specialize=["first_head", "longest", "total", "max_tokens", "seen", "written"])
def unpack_kernel(
    k_out_ptr, v_out_ptr, pages_ptr, table_ptr, length_ptr, cu_q_ptr, cu_k_ptr, k_new_ptr, v_new_ptr, balance_ptr,
    centre_ptr, hadamard_ptr, tail_k_ptr, tail_v_ptr, tail_slots_ptr, sink_k_ptr, sink_v_ptr, sink_slots_ptr,
    tail_requests, tail_stride, tail_stride_head, sink_requests, sink_stride, sink_stride_head, stride_table,
    stride_block, stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head, first_head, longest, total,
    max_tokens, seen, written,
    DENSE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    V_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, PAGE_BYTES: tl.constexpr, BALANCED: tl.constexpr,
    CENTRED: tl.constexpr,
    WHOLE: tl.constexpr, TAIL: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """TOKENS positions of one request and KV head, of K or V: from a page, from plain rows, or from new rows.

    ``seen``: positions that a query sees, its own included; pages before them are not read. ``written``: positions that
    it can make a kernel read, zeros where they are not seen; rows before them are not written.
    PADDED: elements of an output row, DIM or more; those past DIM are zeros. DENSE: all requests have
    ``longest`` tokens, and there is no cu_k.
    """
    per_request = tl.cdiv(longest, TOKENS)
    request, number = tl.program_id(0) // per_request, tl.program_id(0) % per_request
    head, is_k = tl.program_id(1).to(tl.int64), tl.program_id(2) == 0
    prefix, new_tokens = _lengths(length_ptr, cu_q_ptr, request, request >= 0, max_tokens)
    length = prefix + new_tokens
    begin_q = tl.load(cu_q_ptr + request)
    if DENSE:
        begin_k = request * longest
    else:
        begin_k = tl.load(cu_k_ptr + request)
    if (number * TOKENS < length) & ((number + 1) * TOKENS > prefix - written):
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
        coded = number * TOKENS < tl.minimum(prefix, end)  # a page with tokens of the prefix, one of which is seen
        coded &= (number + 1) * TOKENS > prefix - seen + 1
        entry = table_ptr + request.to(tl.int64) * stride_table + number * TOKENS // BLOCK_SIZE
        handle = tl.load(entry, mask=coded, other=0).to(tl.int64)
        page = pages_ptr.to(tl.int64) + handle * stride_block + in_head * stride_head
        page += number * TOKENS % BLOCK_SIZE // TOKENS * PAGE_BYTES
        scale_ptr = (page + SCALE_OFFSET).to(tl.pointer_type(tl.float16))
        row = begin_k + position
        out = (row.to(tl.int64) * HEADS + head)[:, None] * PADDED + dim[None, :]
        live = ((position < length) & (row < total))[:, None] & (dim < PADDED)[None, :]
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
            tl.store(k_out_ptr + out, new if PADDED == DIM else tl.where(mask_d, new, 0.0), mask=live)
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
            tl.store(v_out_ptr + out, new if PADDED == DIM else tl.where(mask_d, new, 0.0), mask=live)


def missing(job: Job) -> str | None:
    """Reason why these kernels cannot run the job, or None."""
    if job.format.head_dim > HEAD_DIMS[-1]:
        return f"triton: expected a head_dim of at most {HEAD_DIMS[-1]}, got {job.format.head_dim}"
    return None


class Bounds(NamedTuple):
    """Upper bounds of a request's queries and tokens, and of all tokens; ``exact``: they are exact values."""

    max_q: int
    max_k: int
    total: int
    exact: bool

    def dense(self, job: Job) -> bool:
        """True if all requests have equally many new tokens and equally long prefixes."""
        requests = job.tensors.seq_lens.shape[0]
        return self.exact and requests * self.max_q == job.tensors.q.shape[0] and requests * self.max_k == self.total

    def clipped(self, job: Job) -> Bounds:
        """Bounds of rows that are there: a prefix has no more tokens than the block table lists."""
        most = job.max_tokens + self.max_q
        if self.max_k <= most:
            return self
        dense = self.dense(job)
        return Bounds(self.max_q, most, job.tensors.seq_lens.shape[0] * most if dense else self.total, dense)


def bounds_of(job: Job) -> Bounds:
    """Bounds as given, within the block table, or read from the device."""
    options, (seq_lens, cu) = job.options, (job.tensors.seq_lens, job.tensors.cu_seqlens_q)
    given = [options.max_seqlen_q, options.max_seqlen_k, options.total_tokens]
    max_q, max_k, total = given
    if max_q is not None and max_k is not None and total is not None:
        return Bounds(max_q, max_k, total, options.exact_lengths).clipped(job)
    new = cu.diff()
    lengths = (seq_lens - new).clamp(0, job.max_tokens) + new  # as `_lengths`
    read = torch.stack([new.max(), lengths.max(), lengths.sum()]).tolist()
    bounds = [old if old is not None else new for old, new in zip(given, read, strict=True)]
    return Bounds(bounds[0], bounds[1], bounds[2], bounds == read)


def heads_at_once(job: Job, total: int) -> int:
    """KV heads whose unpacked rows fit the workspace, or STAGED bytes."""
    workspace, q = job.tensors.workspace, job.tensors.q
    needed = 2 * max(total, 1) * padded_dim(job.format.head_dim) * q.element_size()  # bytes of one head
    room = STAGED if workspace is None else workspace.numel()
    if workspace is not None and (room < needed or workspace.data_ptr() % 16):
        raise ValueError(
            f"workspace: expected at least {needed} bytes at a multiple of 16, got {room} at {workspace.data_ptr():#x}"
        )
    return max(1, min(job.blocks.kv_heads, room // needed))


class Unpack(NamedTuple):
    """A launch of `unpack_kernel`: its grid, tensors, numbers and constants."""

    grid: tuple[int, int, int]
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def unpack_of(
    job: Job, bounds: Bounds, cu_seqlens_k: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, first: int,
    count: int,
) -> Unpack:  # fmt: skip
    """Launch that writes ``count`` KV heads from ``first`` on to k and v."""
    t, f, blocks, q = job.tensors, job.format, job.blocks, job.tensors.q
    dim, padded = f.head_dim, padded_dim(f.head_dim)
    grid = (t.seq_lens.shape[0] * -(-max(bounds.max_k, 1) // f.page_tokens), count, 2)
    constants = dict(
        DENSE=cu_seqlens_k is None, HEADS=count, DIM=dim, WIDE=triton.next_power_of_2(padded), PADDED=padded,
        K_BITS=f.k_bits, V_BITS=f.v_bits, TOKENS=f.page_tokens, BLOCK_SIZE=blocks.block_size,
        BLOCK=block_of(dim) if f.rotate else 1, V_OFFSET=f.v_offset,
        SCALE_OFFSET=f.scale_offset, PAGE_BYTES=f.page_bytes, BALANCED=t.balance is not None,
        CENTRED=t.centre is not None, WHOLE=whole_pages(dim, f.page_tokens, {f.k_bits, f.v_bits}),
        TAIL=t.rows.tail_tokens, SINK=t.rows.sink_tokens,
    )  # fmt: skip
    rows = row_arguments(q, t.rows)
    tensors = (
        k, v, t.pages, t.block_table, t.seq_lens, t.cu_seqlens_q, t.seq_lens if cu_seqlens_k is None else cu_seqlens_k,
        t.k_new, t.v_new, q if t.balance is None else t.balance, q if t.centre is None else t.centre,
        _signs(dim, q.device), *rows[:6],
    )  # fmt: skip
    seen = NO_WINDOW if job.options.sliding_window is None else job.options.sliding_window
    numbers = (
        *rows[6:], t.block_table.stride(0), blocks.block_stride, blocks.head_stride,
        *t.k_new.stride()[:2], *t.v_new.stride()[:2], first, max(bounds.max_k, 1), bounds.total, job.max_tokens,
        seen, min(seen + WHOLE_BLOCKS, NO_WINDOW),
    )  # fmt: skip
    return Unpack(grid, tensors, numbers, constants)  # type: ignore[arg-type]


def unpack(
    job: Job, bounds: Bounds, cu_seqlens_k: torch.Tensor | None, rows: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of ``count`` KV heads from ``first`` on, ``[total, count, D]``: prefixes, each followed by its new rows.

    D is that of `padded_dim`; ``rows`` ``[2, at least total * count * D]`` is written to.
    """
    padded = padded_dim(job.format.head_dim)
    k, v = (x[: max(bounds.total, 1) * count * padded].view(-1, count, padded) for x in rows)
    given = unpack_of(job, bounds, cu_seqlens_k, k, v, first, count)
    with torch.cuda.device_of(k):
        args = (*given.tensors, *given.numbers)
        launch(unpack_kernel, given.grid, args, given.constants, num_warps=stage_warps(job.format.head_dim))
    return k, v


def staging(job: Job, bounds: Bounds) -> tuple[torch.Tensor | None, torch.Tensor, int]:
    """Prefix sums of the lengths unless all are equal, memory for rows, and the number of KV heads it holds."""
    q, seq_lens, heads = job.tensors.q, job.tensors.seq_lens, heads_at_once(job, bounds.total)
    cu_k = job.cu_seqlens_k
    if bounds.dense(job):
        cu_k = None
    elif cu_k is None:
        requests = seq_lens.shape[0]
        cu_k = torch.empty(requests + 1, dtype=torch.int32, device=q.device)
        arguments = (seq_lens, job.tensors.cu_seqlens_q, cu_k, requests, job.max_tokens, bounds.total)
        with torch.cuda.device_of(q):
            launch(sums_kernel, (1, 1, 1), arguments, dict(BLOCK=128), num_warps=4)
    size = (2, max(bounds.total, 1) * heads * padded_dim(job.format.head_dim))
    if job.tensors.workspace is None:
        return cu_k, torch.empty(size, dtype=q.dtype, device=q.device), heads
    used = job.tensors.workspace[: 2 * size[1] * q.element_size()]
    return cu_k, used.view(q.dtype).view(size), heads


def _attend(
    job: Job, bounds: Bounds, cu_k: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, **scoring: Any,
) -> torch.Tensor | None:  # fmt: skip
    """Attention of ``q [T, heads, D]`` over unpacked rows ``[total, KV heads, D]``, written to ``out``; returns lse."""
    window, return_lse = job.options.sliding_window, job.options.return_lse
    if not bounds.dense(job):
        result = prefill_attention(
            q, k, v, cu_seqlens_q=job.tensors.cu_seqlens_q, cu_seqlens_k=cu_k, max_seqlen_q=bounds.max_q,
            max_seqlen_k=bounds.max_k, sliding_window=window, return_lse=return_lse, out=out, **scoring,
        )  # fmt: skip
    elif parts := parts_of(job, bounds.max_q, bounds.max_k, q.shape[1], processors_of(q.device)[0]):
        return attend_in_parts(q, k, v, parts, out, return_lse, scoring)
    else:  # kernels that do not support ragged rows
        q, out = (x.unflatten(0, (-1, bounds.max_q)) for x in (q, out))
        k, v = (x.unflatten(0, (-1, bounds.max_k)) for x in (k, v))
        result = prefill_attention(q, k, v, sliding_window=window, return_lse=return_lse, out=out, **scoring)
    lse = result.lse if isinstance(result, AttentionOutput) else None
    return None if lse is None else lse.view(-1, q.shape[-2])


def run(job: Job, backend: str) -> Result:
    """Unpack and attend; ``backend`` is that of `prefill_attention`."""
    t, dim, kv_heads = job.tensors, job.format.head_dim, job.blocks.kv_heads
    group, bounds, padding = t.q.shape[1] // kv_heads, bounds_of(job), padded_dim(dim) - dim
    cu_k, rows, heads = staging(job, bounds)
    q = torch.nn.functional.pad(t.q, (0, padding)) if padding else t.q
    given = None if padding else job.out
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if given is None else given
    scale = dim**-0.5 if job.options.scale is None else job.options.scale
    parts = []
    for first in range(0, kv_heads, heads):
        count = min(heads, kv_heads - first)
        k, v = unpack(job, bounds, cu_k, rows, first, count)
        some = slice(first * group, (first + count) * group)
        lse = _attend(
            job, bounds, cu_k, q[:, some], k, v, out[:, some], scale=scale, softcap=job.options.softcap,
            sinks=None if t.sinks is None else t.sinks[some], backend=backend,
        )  # fmt: skip
        parts += [] if lse is None else [lse]
    if padding:
        out = out[..., :dim].contiguous() if job.out is None else job.out.copy_(out[..., :dim])
    return out, torch.cat(parts, 1) if job.options.return_lse else None
