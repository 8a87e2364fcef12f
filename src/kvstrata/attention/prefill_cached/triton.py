"""``prefill_attention_cached`` in Triton: unpacks the cache to rows chunk by chunk, and attends to each chunk.

    pages of all tiers ──stage_kernel──▶ rows of a chunk ──chunk_kernel──▶ sums ──▶ next chunk .. ──▶ out

A program of chunk_kernel owns query rows of one KV head: its query heads, query by query. Its sums stay in memory
between chunks. staging_triton.py fills the rows; on Hopper gluon.py replaces chunk_kernel. New rows outside the cache
are attended to first, with prefill_attention: sums start with its output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from kvstrata.attention.decode.source_triton import on_device
from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.prefill.configs import processors_of
from kvstrata.attention.prefill.job import Result
from kvstrata.attention.prefill.launch import launch
from kvstrata.attention.prefill.op import prefill_attention
from kvstrata.attention.prefill.triton import LN2, LOG2E, has_gluon

from .job import CachedJob
from .staging_triton import COUNTS, Staging, Sums, pages_of, stage

STAGED = 72 << 20  # maximum bytes of K and V rows in a chunk; at least one block per (request, KV head)


@triton.jit(do_not_specialize=[*COUNTS, "first", "slots", "rows_of_all", "window", "is_first", "is_last"])
def chunk_kernel(
    q_ptr, k_ptr, v_ptr, position_ptr, bounds_ptr, acc_ptr, stats_ptr, out_ptr, lse_ptr, sinks_ptr, requests_ptr,
    starts_ptr, length_ptr, count_ptr, stride_qt, stride_qh, stride_length, stride_count_r, stride_count_h, first,
    slots, rows_of_all, factor, softcap, window, is_first, is_last,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TIERS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, BESIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M query rows of a (request, KV head) over a chunk; the first starts the sums, the last writes the output.

    BESIDE: the cache does not hold the new tokens; sums start with their attention to each other, from out and lse.
    """
    head_cache = tl.program_id(1).to(tl.int64)
    batch, kv_head = head_cache // KV_HEADS, head_cache % KV_HEADS
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
        before = length if BESIDE else length - new
        own = before + query
        first_own = before + start_row // GROUP
        mask_q = mask_row[:, None] & (dim < DIM)[None, :]
        token = (begin + query).to(tl.int64)
        q = tl.load(q_ptr + (token * stride_qt + head * stride_qh)[:, None] + dim[None, :], mask=mask_q, other=0.0)
        state = kv_head * rows_of_all + begin.to(tl.int64) * GROUP + row
        out_row = token * (KV_HEADS * GROUP) + head
        out_ptrs = out_ptr + out_row[:, None] * DIM + dim[None, :]
        if is_first != 0:
            if BESIDE:
                top = tl.load(lse_ptr + out_row, mask=mask_row, other=float("-inf")) * LOG2E
                total = tl.where(top == float("-inf"), 0.0, 1.0)
                acc = tl.load(out_ptrs, mask=mask_q, other=0.0).to(tl.float32)
            else:
                top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
                acc = tl.zeros((BLOCK_M, WIDE), tl.float32)
        else:
            top = tl.load(stats_ptr + state * 2, mask=mask_row, other=float("-inf"))
            total = tl.load(stats_ptr + state * 2 + 1, mask=mask_row, other=0.0)
            acc = tl.load(acc_ptr + state[:, None] * DIM + dim[None, :], mask=mask_q, other=0.0)
        pages = tl.minimum(tl.maximum(pages_of(count_ptr, length, TIERS, TOKENS) - first, 0), slots // TOKENS)
        offs = tl.arange(0, BLOCK_N)
        k_base, v_base = k_ptr + head_cache * slots * DIM, v_ptr + head_cache * slots * DIM
        position_ptr += head_cache * slots
        bounds_ptr += head_cache * (slots // TOKENS) * 2
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
        if is_last != 0:
            if SINKS:
                sink = tl.load(sinks_ptr + head) * LOG2E
                new_top = tl.maximum(top, sink)
                safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                old = tl.exp2(top - safe)
                total = total * old + tl.exp2(sink - safe)
                acc = acc * old[:, None]
                top = new_top
            divisor = tl.where(total == 0.0, 1.0, total)
            tl.store(out_ptrs, (acc / divisor[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)
            if LSE:
                lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(divisor)) * LN2)
                tl.store(lse_ptr + out_row, lse, mask=mask_row)
        else:
            tl.store(stats_ptr + state * 2, top, mask=mask_row)
            tl.store(stats_ptr + state * 2 + 1, total, mask=mask_row)
            tl.store(acc_ptr + state[:, None] * DIM + dim[None, :], acc, mask=mask_q)


class Attend:
    """Launches chunk_kernel, once per chunk."""

    def __init__(self, job: CachedJob, staged: Staging, sums: Sums, out: torch.Tensor, lse: torch.Tensor | None):
        self.job, self.staged, self.sums, self.out, self.lse = job, staged, sums, out, lse
        self.block_m, self.block_n, self.narrow = _blocks(job)

    def __call__(self, chunk: int) -> None:
        job, staged, sums, out, lse = self.job, self.staged, self.sums, self.out, self.lse
        requests, length, count = staged.counts
        tokens, heads, dim = job.q.shape
        head_caches, slots, group = *staged.k.shape[:2], heads // job.kv_heads
        args = (
            job.q, staged.k, staged.v, staged.positions, staged.bounds, sums.acc, sums.stats, out,
            out if lse is None else lse, out if job.sinks is None else job.sinks, requests, sums.starts, length, count,
            *job.q.stride()[:2], *staged.count_strides, chunk * slots // staged.page_tokens, slots, tokens * group,
            sums.factor, job.softcap or 0.0, job.sliding_window or 0, int(chunk == 0), int(chunk == staged.chunks - 1),
        )  # fmt: skip
        constants = dict(
            KV_HEADS=job.kv_heads, GROUP=group, DIM=dim, WIDE=staged.wide, TIERS=staged.tiers,
            TOKENS=staged.page_tokens, BLOCK_M=self.block_m, BLOCK_N=self.block_n,
            WINDOWED=job.sliding_window is not None, CAPPED=job.softcap is not None,
            SINKS=job.sinks is not None, LSE=job.return_lse, BESIDE=job.k_new is not None,
            PRECISION="ieee" if job.q.element_size() == 4 else "tf32",
        )  # fmt: skip
        grid = (-(-max(job.new) * group // self.block_m), head_caches, 1)
        stages, warps = (1, 4) if self.narrow else (2, 8)
        launch(chunk_kernel, grid, args, constants, num_warps=warps, num_stages=stages)


def _blocks(job: CachedJob) -> tuple[int, int, bool]:
    """BLOCK_M and BLOCK_N of chunk_kernel, and True if wide rows leave it few registers."""
    dim, hopper = job.q.shape[2], processors_of(job.q.device)[1]
    if job.q.device.type != "cuda":
        return 16, 64, False
    if job.q.element_size() == 4 or (dim > 128 and not hopper):
        return 64, 64, True
    return 128, 128 if hopper and dim <= 128 else 64, False


def _specialized(job: CachedJob) -> bool:
    """True if gluon.py runs the job; it is imported on Hopper only."""
    if not processors_of(job.q.device)[1] or not has_gluon():
        return False
    from . import gluon as cached_gluon

    return cached_gluon.missing(job) is None


def _among_new(job: CachedJob, out: torch.Tensor) -> torch.Tensor:
    """Write the attention of the new tokens to each other to ``out``, without sinks; returns its lse."""
    assert job.k_new is not None
    assert job.v_new is not None
    rows: tuple[torch.Tensor, ...] = (job.q, job.k_new, job.v_new, out)
    options: dict[str, Any] = {}
    if len(set(job.new)) == 1:  # kernels that do not support ragged rows
        rows = tuple(x.unflatten(0, (len(job.new), job.new[0])) for x in rows)
    else:
        starts = on_device(tuple(accumulate(job.new, initial=0)), out.device)
        longest = max(job.new)
        options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)
    result = prefill_attention(
        *rows[:3], scale=job.scale, sliding_window=job.sliding_window, softcap=job.softcap, return_lse=True,
        out=rows[3], backend="auto" if out.is_cuda else "triton", **options,
    )  # fmt: skip
    assert isinstance(result, AttentionOutput)
    assert result.lse is not None
    return result.lse


def run(job: CachedJob) -> Result:
    """Launch a checked job: two kernels per chunk, three on Hopper; one more for new rows outside the cache."""
    q, device = job.q, job.q.device
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device) if job.return_lse else None
    if tokens == 0:
        return out, lse
    if job.k_new is not None:
        lse = _among_new(job, out)
    staged = stage(job, _blocks(job)[1], STAGED)
    rows = tokens * heads if staged.chunks > 1 else 1
    sums = torch.empty(rows * (dim + 2), dtype=torch.float32, device=device)
    starts = on_device(tuple(accumulate(job.new, initial=0)), device)
    factor = job.scale * LOG2E.value if job.softcap is None else 2 * job.scale / job.softcap
    state = Sums(sums[2 * rows :], sums[: 2 * rows], starts, factor)
    with torch.cuda.device_of(q):
        if _specialized(job):
            from . import gluon as cached_gluon

            attend: Callable[[int], None] = cached_gluon.Attend(job, staged, state, out, lse)
        else:
            attend = Attend(job, staged, state, out, lse)
        for chunk in range(staged.chunks):
            staged.fill(chunk)
            attend(chunk)
    return out, lse if job.return_lse else None
