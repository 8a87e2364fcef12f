"""``prefill_attention`` on Hopper in Gluon, with warp specialization: producer and consumer warps.

    producer        one warp copies blocks of K and V into a ring in shared memory (TMA), as stages become free
    CONSUMERS       warpgroups of 64 queries each loop over the ring. The product q k of the next block and p v of this
                    one are both in flight while the softmax of the next is computed; with PINGPONG one warpgroup
                    issues its products while another computes its softmax, alternating

    ring   k_full[stage] <- copy arrived          k_empty[stage] <- every consumer has read it          (same for v)
    turn[i]                warpgroup i may issue its products

Blocks of keys run from the last to the first: those that need a mask (diagonal, end of the keys) come first. Rows past
the end of a sequence arrive as zeros and are not written. Supports dense 16-bit inputs without sliding window and soft
cap whose queries all see a key; everything else is left to triton.py. Needs Triton 3.6.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .job import PrefillJob, Run, lse_strides
from .launch import Launch, empty, heads_first, moved
from .tiles import Config

ROWS = 64  # queries of a warpgroup
COPIER = 24  # registers per thread of the producer
LOG2E = 1.4426950408889634
LOWEST = gl.constexpr(-3e38)  # as in triton.py
NO, END, CAUSAL_MASK, PLACED = (gl.constexpr(i) for i in range(4))  # what softmax masks


@gluon.jit
def fill(i, coordinates, ring, STAGES: gl.constexpr):
    """Copy block i of K and V, at ``coordinates`` of the descriptors, into its stage of the ring once that is free."""
    k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    stage, phase = i % STAGES, (i // STAGES) & 1
    mbarrier.wait(k_empty.index(stage), phase ^ 1)
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, coordinates, k_full.index(stage), k_smem.index(stage))
    mbarrier.wait(v_empty.index(stage), phase ^ 1)
    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, coordinates, v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _produce(copies, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Producer warp: copies the queries of every consumer, then all blocks of K and V."""
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty = copies[:11]
    batch, head, kv_head, begin, blocks = copies[11:]
    mbarrier.expect(q_full, CONSUMERS * q_desc.block_type.nbytes)
    for who in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(q_desc, [batch, head, begin + who * 64, 0], q_full, q_smem.index(who))
    ring = (k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    for i in range(blocks):
        fill(i, [batch, kv_head, (blocks - 1 - i) * BLOCK_N, 0], ring, STAGES)


@gluon.jit
def softmax(s, top, total, own, start, keys, factor, BLOCK_N: gl.constexpr, MASK: gl.constexpr):
    """Weights, the new maximum and sum, and the factor that rescales the old sums.

    MASK: NO, END (of the keys), CAUSAL_MASK, or PLACED: ``keys`` points to the position of each key.
    """
    layout: gl.constexpr = s.type.layout
    if MASK != NO:
        position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        if MASK == PLACED:
            seen = gl.load(keys + position)[None, :] <= own[:, None]
        elif MASK == CAUSAL_MASK:
            seen = (position[None, :] < keys) & (position[None, :] <= own[:, None])
        else:
            seen = (position[None, :] < keys) & (own[:, None] == own[:, None])
        s = gl.where(seen, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - new_top[:, None])
    old = gl.exp2(top - new_top)
    total = total * old + gl.sum(p, 1)
    return p, new_top, total, old


@gluon.jit
def step(
    i, start, q, ring, turn, p, top, total, acc, own, keys, factor,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    MASK: gl.constexpr, PINGPONG: gl.constexpr, S_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of block i, overlapped with the product p v of block i - 1."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    stage, phase = i % STAGES, (i // STAGES) & 1
    before = (i - 1) % STAGES
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    k = k_smem.index(stage)._reinterpret(k_smem.dtype, [BLOCK_N, DIM], TILE).permute((1, 0))
    v = v_smem.index(before)._reinterpret(v_smem.dtype, [BLOCK_N, DIM], TILE)
    mbarrier.wait(k_full.index(stage), phase)
    if PINGPONG:
        mbarrier.wait(turn.index(WHO), (i & 1) if WHO == 0 else ((i + 1) & 1))
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turn.index((WHO + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, top, total, old = softmax(s, top, total, own, start, keys, factor, BLOCK_N, MASK)
    after = gl.convert_layout(weights.to(k_smem.dtype), P_LAYOUT)
    # For the next step; placed here, since the compiler would otherwise move the wait for p v above the softmax.
    mbarrier.wait(v_full.index(stage), phase)
    acc, p, after = warpgroup_mma_wait(0, deps=(acc, p, after))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(old, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
    return after, top, total, acc


@gluon.jit
def add_sink(sink, top, total, acc, ACC_LAYOUT: gl.constexpr):
    """Add an attention-sink logit to the softmax denominator."""
    sink = sink * 1.4426950408889634
    new_top = gl.maximum(top, sink)
    old = gl.exp2(top - new_top)
    total = total * old + gl.exp2(sink - new_top)
    return new_top, total, acc * gl.convert_layout(old, gl.SliceLayout(1, ACC_LAYOUT))[:, None]


@gluon.jit
def _consume(
    work,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    TAIL: gl.constexpr, CAUSAL: gl.constexpr, PINGPONG: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: its 64 queries over all blocks. ``whole``: number of leading key blocks without a mask."""
    q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turn, out_desc, lse_ptr, sinks_ptr = work[:12]
    batch, head, begin, blocks, whole, queries, keys, lse_by, factor = work[12:]
    ring = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    row = begin + WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    own = row + (keys - queries)
    top = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([64, DIM], gl.float32, ACC_LAYOUT)
    q = q_smem.index(WHO)._reinterpret(q_smem.dtype, [64, DIM], TILE)
    mbarrier.wait(q_full, 0)

    mbarrier.wait(k_full.index(0), 0)
    k = k_smem.index(0)._reinterpret(k_smem.dtype, [BLOCK_N, DIM], TILE).permute((1, 0))
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    start = (blocks - 1) * BLOCK_N
    MASK: gl.constexpr = CAUSAL_MASK if CAUSAL else END
    weights, top, total, _ = softmax(s, top, total, own, start, keys, factor, BLOCK_N, MASK if TAIL else NO)
    p = gl.convert_layout(weights.to(k_smem.dtype), P_LAYOUT)
    mbarrier.wait(v_full.index(0), 0)
    masked = 1
    if TAIL:
        masked = gl.maximum(blocks - whole, 1)
        for i in range(1, masked):
            start = (blocks - 1 - i) * BLOCK_N
            p, top, total, acc = step(
                i, start, q, ring, turn, p, top, total, acc, own, keys, factor, WHO, CONSUMERS, DIM, BLOCK_N, STAGES,
                MASK, PINGPONG, S_LAYOUT, ACC_LAYOUT, TILE,
            )  # fmt: skip
    for i in range(masked, blocks):
        p, top, total, acc = step(
            i, 0, q, ring, turn, p, top, total, acc, own, keys, factor, WHO, CONSUMERS, DIM, BLOCK_N, STAGES, NO,
            PINGPONG, S_LAYOUT, ACC_LAYOUT, TILE,
        )  # fmt: skip
    v = v_smem.index((blocks - 1) % STAGES)._reinterpret(v_smem.dtype, [BLOCK_N, DIM], TILE)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))

    if SINKS:
        top, total, acc = add_sink(gl.load(sinks_ptr + head), top, total, acc, ACC_LAYOUT)
    share = 1.0 / gl.where(total == 0.0, 1.0, total)  # all scores are -inf: sums of 0, lse of -inf
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
    q.store(acc.to(q_smem.dtype))  # the queries are no longer needed
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [batch, head, begin + WHO * 64, 0], q_smem.index(WHO))
    if LSE:
        stride_lb, stride_lh, stride_ls = lse_by
        lse_ptrs = lse_ptr + batch.to(gl.int64) * stride_lb + head * stride_lh + row.to(gl.int64) * stride_ls
        gl.store(lse_ptrs, (top + gl.log2(total)) * 0.6931471805599453, mask=row < queries)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["stride_lb", "stride_lh", "stride_ls", "sequences", "queries", "keys", "tiles_m"])
def specialized_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, stride_lb, stride_lh, stride_ls, sequences, queries, keys,
    tiles_m, factor,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr, PINGPONG: gl.constexpr, ORDER: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """CONSUMERS * 64 queries of a head. ORDER as in triton.py, 0 or 1."""
    tile = gl.program_id(0)
    if ORDER == 0:
        block, head, batch = tile % tiles_m, tile // tiles_m % HEADS, tile // tiles_m // HEADS
    else:
        block, head, batch = tile // (sequences * HEADS), tile % HEADS, tile // HEADS % sequences
    if CAUSAL:
        block = tiles_m - 1 - block  # the longest first
    kv_head = head // GROUP
    begin = block * (CONSUMERS * 64)
    end, whole = keys, keys // BLOCK_N
    if CAUSAL:
        first = begin + keys - queries  # position of the first query
        end = gl.minimum(keys, first + CONSUMERS * 64)
        whole = (first + 1) // BLOCK_N
    blocks = (end + BLOCK_N - 1) // BLOCK_N

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, 64, DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()

    copies = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, batch, head,
              kv_head, begin, blocks)  # fmt: skip
    work = (q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turn, out_desc, lse_ptr, sinks_ptr, batch,
            head, begin, blocks, whole, queries, keys, (stride_lb, stride_lh, stride_ls), factor)  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (work, 0, CONSUMERS, DIM, BLOCK_N, STAGES, TAIL, CAUSAL, PINGPONG, SINKS, LSE)),
            (_produce, (copies, BLOCK_N, STAGES, CONSUMERS)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (work, 0, CONSUMERS, DIM, BLOCK_N, STAGES, TAIL, CAUSAL, PINGPONG, SINKS, LSE)),
            (_consume, (work, 1, CONSUMERS, DIM, BLOCK_N, STAGES, TAIL, CAUSAL, PINGPONG, SINKS, LSE)),
            (_produce, (copies, BLOCK_N, STAGES, CONSUMERS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (work, 0, CONSUMERS, DIM, BLOCK_N, STAGES, TAIL, CAUSAL, PINGPONG, SINKS, LSE)),
            (_consume, (work, 1, CONSUMERS, DIM, BLOCK_N, STAGES, TAIL, CAUSAL, PINGPONG, SINKS, LSE)),
            (_consume, (work, 2, CONSUMERS, DIM, BLOCK_N, STAGES, TAIL, CAUSAL, PINGPONG, SINKS, LSE)),
            (_produce, (copies, BLOCK_N, STAGES, CONSUMERS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def missing(job: PrefillJob) -> str | None:
    """Reason why the kernel cannot run this job, or None."""
    size = job.q.element_size()
    if job.ragged or size != 2:
        return "the kernel takes dense 16-bit tensors"
    if job.sliding_window is not None or job.softcap is not None:
        return "the kernel has no sliding window and no softcap"
    if job.max_seqlen_k == 0 or (job.causal and job.max_seqlen_q > job.max_seqlen_k):
        return "the kernel needs a key for every query"
    for x in (job.q, job.k, job.v, *(() if job.out is None else (job.out,))):
        if x.data_ptr() % 16 or any(s <= 0 or s * size % 16 for s in x.stride()[:3]):
            return "the kernel needs 16-byte strides and addresses"
    return None


def registers_of(consumers: int, limit: int | None) -> int:
    """Registers per consumer thread, after the producer has released its own; ``limit``: per thread at launch."""
    limit = limit or 65536 // (128 * (consumers + 1)) // 8 * 8
    return min(((consumers + 1) * limit - COPIER) // consumers // 8 * 8, 240)


def plan(job: PrefillJob, config: Config, out: torch.Tensor, lse: torch.Tensor | None) -> Run:
    """Launch for every job with this `signature` that the kernel can run; ``config.block_m`` is 64, 128 or 192."""
    wide, consumers = triton.next_power_of_2(job.head_dim), config.block_m // ROWS
    dtype = gl.float16 if job.q.dtype == torch.float16 else gl.bfloat16

    def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
        block = [1, 1, rows, wide]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return empty(TensorDescriptor(x, *heads_first(x), block, layout))

    tiles = triton.cdiv(job.max_seqlen_q, config.block_m)
    numbers = (*lse_strides(lse), job.sequences, job.max_seqlen_q, job.max_seqlen_k, tiles, job.scale * LOG2E)
    constants = dict(
        HEADS=job.heads, GROUP=job.heads // job.kv_heads, DIM=wide, BLOCK_N=config.block_n, STAGES=config.stages,
        CONSUMERS=consumers, CAUSAL=job.causal, TAIL=job.causal or job.max_seqlen_k % config.block_n != 0,
        PINGPONG=config.pingpong and consumers > 1, ORDER=min(config.order, 1), SINKS=job.sinks is not None,
        LSE=lse is not None,
        REGISTERS=registers_of(consumers, config.registers),
    )  # fmt: skip
    options = dict(num_warps=4) if config.registers is None else dict(num_warps=4, maxnreg=config.registers)
    launch = Launch(specialized_kernel, tiles * job.heads * job.sequences, numbers, constants, options)
    q_like, k_like = descriptor(job.q, ROWS), descriptor(job.k, config.block_n)
    v_like, out_like = descriptor(job.v, config.block_n), descriptor(out, ROWS)

    def run(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        blocks = (moved(q_like, job.q), moved(k_like, job.k), moved(v_like, job.v), moved(out_like, out))
        launch(*blocks, out if lse is None else lse, out if job.sinks is None else job.sinks)

    return run
