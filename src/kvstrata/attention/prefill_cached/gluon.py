"""chunk_kernel of triton.py for Hopper, warp-specialized as prefill/gluon.py.

Two things differ from dense prefill. A row is one query head of a KV head's group, so each warpgroup loads its own rows
into shared memory. And any block may hold a token that some query must not see, or no token at all: `order_kernel`
lists the blocks of a chunk, those that need a mask first, and only these are masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvstrata.attention.prefill.gluon import LOWEST, NO, PLACED, add_sink, fill, registers_of, softmax, step
from kvstrata.attention.prefill.launch import launch

from .job import CachedJob
from .staging_triton import COUNTS, Staging, Sums, pages_of

BLOCK_M, BLOCK_N, STAGES = 128, 128, 3
CONSUMERS = BLOCK_M // 64


@triton.jit(do_not_specialize=[*COUNTS, "first", "slots"])
def order_kernel(
    order_ptr, block_counts_ptr, bounds_ptr, requests_ptr, starts_ptr, length_ptr, count_ptr, stride_length,
    stride_count_r, stride_count_h, first, slots,
    KV_HEADS: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """Order the blocks of a (request, KV head), masked ones first.

    ``block_counts``: number of masked blocks, number of all blocks. Without tokens there is one block, which is hidden.
    """
    head_cache = tl.program_id(0).to(tl.int64)
    batch, kv_head = head_cache // KV_HEADS, head_cache % KV_HEADS
    request = tl.load(requests_ptr + batch).to(tl.int64)
    length = tl.load(length_ptr + request * stride_length)
    new = tl.load(starts_ptr + batch + 1) - tl.load(starts_ptr + batch)
    count_ptr += request * stride_count_r + kv_head * stride_count_h
    pages = tl.minimum(tl.maximum(pages_of(count_ptr, length, TIERS, TOKENS) - first, 0), slots // TOKENS)
    blocks = tl.maximum(tl.cdiv(pages * TOKENS, BLOCK_N), 1)
    block = tl.arange(0, MAX_BLOCKS)
    live = block < blocks
    EACH: tl.constexpr = BLOCK_N // TOKENS
    bounds_ptr += head_cache * (slots // TOKENS) * 2
    latest = tl.zeros((MAX_BLOCKS,), tl.int32)
    for page in tl.static_range(EACH):
        latest = tl.maximum(latest, tl.load(bounds_ptr + (block * EACH + page) * 2 + 1, mask=live, other=0))
    before = length if BESIDE else length - new
    hidden = live & (latest > before)  # position after the request's first new token
    masked = tl.sum(hidden.to(tl.int32), 0)
    place = tl.cumsum(hidden.to(tl.int32), 0) - 1
    place = tl.where(hidden, place, masked + block - place - 1)
    tl.store(order_ptr + head_cache * (slots // BLOCK_N) + place, block, mask=live)
    tl.store(block_counts_ptr + head_cache * 2, masked)
    tl.store(block_counts_ptr + head_cache * 2 + 1, blocks)


@gluon.jit
def _produce(k_desc, v_desc, ring, order_ptr, head_cache, blocks, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Producer warp: copies the blocks of K and V, in order."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    places = (k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    for i in range(blocks):
        fill(i, [0, head_cache, gl.load(order_ptr + i) * BLOCK_N, 0], places, STAGES)


@gluon.jit
def _consume(
    work, WHO: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
    BESIDE: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: its 64 query rows over the blocks of the chunk."""
    q_ptr, acc_ptr, stats_ptr, out_ptr, lse_ptr, sinks_ptr, stride_qt, stride_qh, rows_of_all, factor = work[:10]
    q_smem, ring, order_ptr, position_ptr, kv_head, start_row, begin, new, before, masked, blocks = work[10:21]
    is_first, is_last = work[21:]
    k_smem, v_smem, k_full, k_empty, v_full, _ = ring
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    IN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])

    q = q_smem.index(WHO)
    row = start_row + WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, IN))
    dim = gl.arange(0, WIDE, layout=gl.SliceLayout(0, IN))
    head = kv_head * GROUP + row % GROUP
    source = (begin + row // GROUP).to(gl.int64) * stride_qt + head * stride_qh
    q.store(gl.load(q_ptr + source[:, None] + dim[None, :], mask=(row < new * GROUP)[:, None] & (dim < DIM)[None, :],
                    other=0.0))  # fmt: skip
    fence_async_shared()

    s_row = start_row + WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    own = before + s_row // GROUP
    acc_row = start_row + WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_LAYOUT))
    dim = gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC_LAYOUT))
    mask_acc = (acc_row < new * GROUP)[:, None] & (dim < DIM)[None, :]
    first_state = kv_head * rows_of_all + begin.to(gl.int64) * GROUP
    stats = stats_ptr + (first_state + s_row) * 2
    accs = acc_ptr + (first_state + acc_row)[:, None] * DIM + dim[None, :]
    out_row = (begin + acc_row // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + acc_row % GROUP
    outs = out_ptr + out_row[:, None] * DIM + dim[None, :]
    lse_row = (begin + s_row // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + s_row % GROUP
    if is_first != 0:
        if BESIDE:
            lse = gl.load(lse_ptr + lse_row, mask=s_row < new * GROUP, other=0.0)
            total = gl.where(lse == float("-inf"), 0.0, 1.0)
            top = gl.maximum(lse * 1.4426950408889634, LOWEST)
            acc = gl.load(outs, mask=mask_acc, other=0.0).to(gl.float32)
        else:
            top = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
            acc = gl.zeros([64, WIDE], gl.float32, ACC_LAYOUT)
    else:
        top = gl.load(stats, mask=s_row < new * GROUP, other=LOWEST)
        total = gl.load(stats + 1, mask=s_row < new * GROUP, other=0.0)
        acc = gl.load(accs, mask=mask_acc, other=0.0)

    mbarrier.wait(k_full.index(0), 0)
    k = k_smem.index(0)._reinterpret(k_smem.dtype, [BLOCK_N, WIDE], TILE).permute((1, 0))
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    start = gl.load(order_ptr) * BLOCK_N
    weights, top, total, old = softmax(s, top, total, own, start, position_ptr, factor, BLOCK_N, PLACED)
    acc = acc * gl.convert_layout(old, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
    p = gl.convert_layout(weights.to(k_smem.dtype), P_LAYOUT)
    mbarrier.wait(v_full.index(0), 0)
    for i in range(1, masked):
        start = gl.load(order_ptr + i) * BLOCK_N
        p, top, total, acc = step(
            i, start, q, ring, None, p, top, total, acc, own, position_ptr, factor, WHO, CONSUMERS, WIDE, BLOCK_N,
            STAGES, PLACED, False, S_LAYOUT, ACC_LAYOUT, TILE,
        )  # fmt: skip
    for i in range(gl.maximum(masked, 1), blocks):
        p, top, total, acc = step(
            i, 0, q, ring, None, p, top, total, acc, own, position_ptr, factor, WHO, CONSUMERS, WIDE, BLOCK_N, STAGES,
            NO, False, S_LAYOUT, ACC_LAYOUT, TILE,
        )  # fmt: skip
    v = v_smem.index((blocks - 1) % STAGES)._reinterpret(v_smem.dtype, [BLOCK_N, WIDE], TILE)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))

    if is_last != 0:
        if SINKS:
            sink = gl.load(sinks_ptr + kv_head * GROUP + s_row % GROUP)
            top, total, acc = add_sink(sink, top, total, acc, ACC_LAYOUT)
        share = 1.0 / gl.where(total == 0.0, 1.0, total)  # all scores are -inf: sums of 0, lse of -inf
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        gl.store(outs, acc.to(out_ptr.dtype.element_ty), mask=mask_acc)
        if LSE:
            gl.store(lse_ptr + lse_row, (top + gl.log2(total)) * 0.6931471805599453, mask=s_row < new * GROUP)
    else:
        gl.store(stats, top, mask=s_row < new * GROUP)
        gl.store(stats + 1, total, mask=s_row < new * GROUP)
        gl.store(accs, acc, mask=mask_acc)


@gluon.jit(do_not_specialize=["slots", "rows_of_all", "stride_length", "is_first", "is_last"])
def specialized_chunk_kernel(
    k_desc, v_desc, q_ptr, position_ptr, order_ptr, block_counts_ptr, acc_ptr, stats_ptr, out_ptr, lse_ptr, sinks_ptr,
    requests_ptr, starts_ptr, length_ptr, stride_qt, stride_qh, stride_length, slots, rows_of_all, factor, is_first,
    is_last,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, BESIDE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """CONSUMERS * 64 query rows of a (request, KV head) over the chunk; the last arguments as in triton.py."""
    head_cache = gl.program_id(1)
    batch, kv_head = head_cache // KV_HEADS, head_cache % KV_HEADS
    begin = gl.load(starts_ptr + batch)
    new = gl.load(starts_ptr + batch + 1) - begin
    start_row = gl.program_id(0) * (CONSUMERS * 64)
    length = gl.load(length_ptr + gl.load(requests_ptr + batch).to(gl.int64) * stride_length)
    before = length if BESIDE else length - new
    masked, blocks = gl.load(block_counts_ptr + head_cache * 2), gl.load(block_counts_ptr + head_cache * 2 + 1)
    if start_row >= new * GROUP:  # no such rows: read one block, write nothing
        blocks = 1
        masked = 1
    order_ptr += head_cache * (slots // BLOCK_N)
    position_ptr += head_cache.to(gl.int64) * slots

    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, 64, WIDE], TILE)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, WIDE], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, WIDE], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    ring = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    work = (q_ptr, acc_ptr, stats_ptr, out_ptr, lse_ptr, sinks_ptr, stride_qt, stride_qh, rows_of_all, factor, q_smem,
            ring, order_ptr, position_ptr, kv_head, start_row, begin, new, before, masked, blocks,
            is_first, is_last)  # fmt: skip
    gl.warp_specialize([
        (_consume, (work, 0, KV_HEADS, GROUP, DIM, WIDE, BLOCK_N, STAGES, CONSUMERS, SINKS, LSE, BESIDE)),
        (_consume, (work, 1, KV_HEADS, GROUP, DIM, WIDE, BLOCK_N, STAGES, CONSUMERS, SINKS, LSE, BESIDE)),
        (_produce, (k_desc, v_desc, ring, order_ptr, head_cache, blocks, BLOCK_N, STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def missing(job: CachedJob) -> str | None:
    """Reason why the kernel cannot run this job, or None."""
    _, heads, dim = job.q.shape
    if job.q.element_size() != 2 or not 64 <= dim <= 128 or dim % 8:
        return "the kernel takes 16-bit heads of 64 to 128, in whole chunks of 16 bytes"
    if heads * job.q.stride(1) >= 1 << 31:
        return "the kernel takes heads of a query that are less than 2^31 elements apart"
    if job.sliding_window is not None or job.softcap is not None:
        return "the kernel has no sliding window and no softcap"
    return None


class Attend:
    """Launches order_kernel and specialized_chunk_kernel, once per chunk; the job must not be `missing`."""

    def __init__(self, job: CachedJob, staged: Staging, sums: Sums, out: torch.Tensor, lse: torch.Tensor | None):
        self.job, self.staged, self.sums, self.out, self.lse = job, staged, sums, out, lse
        head_caches, slots, _ = staged.k.shape
        blocks = slots // BLOCK_N
        ints = torch.empty(head_caches * (blocks + 2), dtype=torch.int32, device=job.q.device)
        self.order, self.block_counts = ints[: head_caches * blocks], ints[head_caches * blocks :]
        self.max_blocks = 1 << (blocks - 1).bit_length()
        dtype = gl.float16 if job.q.dtype == torch.float16 else gl.bfloat16
        block = [1, 1, BLOCK_N, staged.wide]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        self.k, self.v = (
            TensorDescriptor(x, [1, *x.shape], [x.numel(), *x.stride()], block, layout) for x in (staged.k, staged.v)
        )

    def __call__(self, chunk: int) -> None:
        job, staged, out, lse = self.job, self.staged, self.out, self.lse
        requests, length, count = staged.counts
        tokens, heads, dim = job.q.shape
        head_caches, slots, group = *staged.k.shape[:2], heads // job.kv_heads
        places = (requests, self.sums.starts, length)
        args = (self.order, self.block_counts, staged.bounds, *places, count, *staged.count_strides,
                chunk * slots // staged.page_tokens, slots)  # fmt: skip
        sizes = dict(
            TIERS=staged.tiers, TOKENS=staged.page_tokens, BLOCK_N=BLOCK_N, MAX_BLOCKS=self.max_blocks,
            BESIDE=job.k_new is not None,
        )  # fmt: skip
        launch(order_kernel, (head_caches, 1, 1), args, dict(KV_HEADS=job.kv_heads, **sizes), num_warps=1)
        attend_args = (
            self.k, self.v, job.q, staged.positions, self.order, self.block_counts, self.sums.acc, self.sums.stats, out,
            out if lse is None else lse, out if job.sinks is None else job.sinks, *places, *job.q.stride()[:2],
            staged.count_strides[0], slots, tokens * group, self.sums.factor, int(chunk == 0),
            int(chunk == staged.chunks - 1),
        )  # fmt: skip
        constants = dict(
            KV_HEADS=job.kv_heads, GROUP=group, DIM=dim, WIDE=staged.wide, BLOCK_N=BLOCK_N, STAGES=STAGES,
            CONSUMERS=CONSUMERS, SINKS=job.sinks is not None, LSE=job.return_lse, BESIDE=job.k_new is not None,
            REGISTERS=registers_of(CONSUMERS, None),
        )  # fmt: skip
        grid = (-(-max(job.new) * group // BLOCK_M), head_caches, 1)
        launch(specialized_chunk_kernel, grid, attend_args, constants, num_warps=4)
