"""``prefill_attention`` in Triton: the portable GPU path, the Hopper path by descriptors, and in CI the interpreter's.

A program owns BLOCK_M queries of one head. Their sums stay in registers while it walks over blocks of BLOCK_N keys with
an online softmax in base 2; scores never reach memory. Blocks that every query of the program sees as a whole run
without any mask:

    keys ->   |  window's edge  |  seen by all  |  diagonal, end of the keys  |
                   masked            no mask               masked

    k, v      by pointers (any strides, ragged sequences), or TMA: blocks come by tensor descriptors, and what lies
              past the end of a sequence is zero without a mask (dense, 16-byte strides, sm_90)
    PERSISTENT a program walks over many tiles; else a tile is a program
    ORDER     0: the tiles of a head side by side; 1: the longest tiles of all heads first; 2: as 1, every second
              round of the multiprocessors backwards, so that a causal triangle weighs the same on each
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .configs import Config, config_of, default_of, processors_of
from .launch import Launch, Run, empty, heads_first, look, moved, remembered
from .op import PrefillJob, Result, lse_strides, strides_of

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3e38)  # the maximum of no score: finite, so that a score of -inf less it is -inf and weighs 0


@triton.jit
def _rows(base, desc, batch, head, start, count, stride_row, BLOCK: tl.constexpr, DIM: tl.constexpr,
          WIDE: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """``[BLOCK, WIDE]`` from row ``start`` on; zero past DIM, and past ``count`` where MASKED or by descriptors."""
    if TMA:
        x = desc.load([batch, head, start, 0]).reshape(BLOCK, WIDE)
    else:
        offs, dim = tl.arange(0, BLOCK), tl.arange(0, WIDE)
        ptrs = base + start.to(tl.int64) * stride_row + offs[:, None] * stride_row + dim[None, :]
        if MASKED:
            x = tl.load(ptrs, mask=((start + offs) < count)[:, None] & (dim < DIM)[None, :], other=0.0)
        elif DIM != WIDE:
            x = tl.load(ptrs, mask=(dim < DIM)[None, :], other=0.0)
        else:
            x = tl.load(ptrs)
    return x


@triton.jit
def _blocks(
    q, own, top, total, acc, k, k_desc, v, v_desc, batch, kv_head, low, high, keys, stride_ks, stride_vs, factor,
    softcap, window,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys ``low .. high`` (low is a multiple of BLOCK_N) join the sums. ``factor``: of a raw score, to base 2."""
    for start in tl.range(low, high, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        key = _rows(k, k_desc, batch, kv_head, start, keys, stride_ks, BLOCK_N, DIM, WIDE, MASKED, TMA)
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        scaled = factor
        if CAPPED:  # factor: 2 scale / softcap; softcap tanh(s scale / softcap), already in base 2
            s = (softcap - 2.0 * softcap / (tl.exp2(s * (factor * LOG2E)) + 1.0)) * LOG2E
            scaled = 1.0
        if MASKED:
            position = start + tl.arange(0, BLOCK_N)[None, :]
            seen = position < keys
            if CAUSAL:
                seen = seen & (position <= own[:, None])
            if WINDOWED:
                seen = seen & (position > own[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * scaled)
        p = tl.exp2(s * scaled - new_top[:, None])
        old = tl.exp2(top - new_top)
        value = _rows(v, v_desc, batch, kv_head, start, keys, stride_vs, BLOCK_N, DIM, WIDE, MASKED, TMA)
        acc = acc * old[:, None]
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def _tile(
    block, head, batch, q, k, v, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, stride_lb,
    stride_lh, stride_ls, queries, keys, factor, softcap, window,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    RAGGED: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries ``block * BLOCK_M ..`` of a head."""
    kv_head = head // GROUP
    batch = batch.to(tl.int64)
    if RAGGED:
        first_q, first_k = tl.load(cu_q_ptr + batch), tl.load(cu_k_ptr + batch)
        queries, keys = tl.load(cu_q_ptr + batch + 1) - first_q, tl.load(cu_k_ptr + batch + 1) - first_k
        q_at, out_at, lse_at = first_q.to(tl.int64) * stride_qs, first_q.to(tl.int64) * stride_os, first_q * stride_ls
        k_at, v_at = first_k.to(tl.int64) * stride_ks, first_k.to(tl.int64) * stride_vs
    else:
        q_at, out_at, lse_at = batch * stride_qb, batch * stride_ob, batch * stride_lb
        k_at, v_at = batch * stride_kb, batch * stride_vb
    begin = block * BLOCK_M
    if begin < queries:
        own = begin + tl.arange(0, BLOCK_M) + (keys - queries)
        if TMA:
            q_base, k_base, v_base = out_ptr, out_ptr, out_ptr  # not used
        else:
            q_base, far = q + q_at + tl.cast(head, tl.int64) * stride_qh, tl.cast(kv_head, tl.int64)
            k_base, v_base = k + k_at + far * stride_kh, v + v_at + far * stride_vh
        at, at_kv = batch.to(tl.int32), kv_head.to(tl.int32)
        query = _rows(q_base, q, at, head, begin, queries, stride_qs, BLOCK_M, DIM, WIDE, True, TMA)
        top = tl.full((BLOCK_M,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, WIDE), tl.float32)
        low, full, end = 0, keys // BLOCK_N * BLOCK_N, keys
        if CAUSAL:
            first = begin + keys - queries  # position of the first query
            full = tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N
            end = tl.maximum(tl.minimum(keys, first + BLOCK_M), 0)
        if WINDOWED:
            low = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
            edge = tl.cdiv(tl.maximum(first + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N
            edge = tl.minimum(edge, full)
            top, total, acc = _blocks(
                query, own, top, total, acc, k_base, k, v_base, v, at, at_kv, low, edge, keys, stride_ks, stride_vs,
                factor, softcap, window, DIM, WIDE, BLOCK_N, True, CAUSAL, True, CAPPED, TMA, PRECISION,
            )  # fmt: skip
            low = tl.maximum(low, edge)
        top, total, acc = _blocks(
            query, own, top, total, acc, k_base, k, v_base, v, at, at_kv, low, full, keys, stride_ks, stride_vs,
            factor, softcap, window, DIM, WIDE, BLOCK_N, False, CAUSAL, WINDOWED, CAPPED, TMA, PRECISION,
        )  # fmt: skip
        if TAIL:
            top, total, acc = _blocks(
                query, own, top, total, acc, k_base, k, v_base, v, at, at_kv, tl.maximum(low, full), end, keys,
                stride_ks, stride_vs, factor, softcap, window, DIM, WIDE, BLOCK_N, True, CAUSAL, WINDOWED, CAPPED, TMA,
                PRECISION,
            )  # fmt: skip
        row = begin + tl.arange(0, BLOCK_M)
        live = row < queries
        if SINKS:
            sink = tl.load(sinks_ptr + head) * LOG2E
            new_top = tl.maximum(top, sink)
            old = tl.exp2(top - new_top)
            total = total * old + tl.exp2(sink - new_top)
            acc = acc * old[:, None]
            top = new_top
        some = tl.where(total == 0.0, 1.0, total)
        acc = acc * (1.0 / some)[:, None]
        dim = tl.arange(0, WIDE)
        out_ptrs = out_ptr + out_at + tl.cast(head, tl.int64) * stride_oh
        out_ptrs += row[:, None].to(tl.int64) * stride_os + dim[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dim < DIM)[None, :])
        if LSE:
            lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * LN2)
            tl.store(lse_ptr + lse_at + head * stride_lh + row.to(tl.int64) * stride_ls, lse, mask=live)


@triton.jit
def _place(tile, sequences, blocks, processors, HEADS: tl.constexpr, CAUSAL: tl.constexpr, ORDER: tl.constexpr):
    """Block, head and sequence of a tile."""
    if ORDER == 2:
        line, place = tile // processors, tile % processors
        wide = tl.minimum(processors, sequences * HEADS * blocks - line * processors)
        tile = tl.where(line % 2 == 1, line * processors + wide - 1 - place, tile)
    if ORDER == 0:
        block, head, batch = tile % blocks, tile // blocks % HEADS, tile // blocks // HEADS
    else:
        block, head, batch = tile // (sequences * HEADS), tile % HEADS, tile // HEADS % sequences
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    return block, head, batch


# Sizes come in all values, and a kernel for each kind of them would be compiled anew; strides keep their alignment.
@triton.jit(
    do_not_specialize=[
        "stride_lb", "stride_lh", "stride_ls", "sequences", "queries", "keys", "blocks", "processors", "window",
    ]
)  # fmt: skip
def prefill_kernel(
    q, k, v, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh,
    stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh, stride_ls,
    sequences, queries, keys, blocks, processors, factor, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, RAGGED: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr,
    PERSISTENT: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``q, k, v``: pointers, or with TMA descriptors ``[B, H, S, D]``. ``blocks``: of a sequence's queries."""
    if PERSISTENT:
        for tile in range(tl.program_id(0), sequences * HEADS * blocks, tl.num_programs(0)):
            block, head, batch = _place(tile, sequences, blocks, processors, HEADS, CAUSAL, ORDER)
            _tile(
                block, head, batch, q, k, v, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, stride_qb, stride_qh,
                stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh,
                stride_os, stride_lb, stride_lh, stride_ls, queries, keys, factor, softcap, window, GROUP, DIM, WIDE,
                BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, CAPPED, SINKS, LSE, RAGGED, TAIL, TMA, PRECISION,
            )  # fmt: skip
    else:
        block, head, batch = _place(tl.program_id(0), sequences, blocks, processors, HEADS, CAUSAL, ORDER)
        _tile(
            block, head, batch, q, k, v, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, stride_qb, stride_qh,
            stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh,
            stride_os, stride_lb, stride_lh, stride_ls, queries, keys, factor, softcap, window, GROUP, DIM, WIDE,
            BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, CAPPED, SINKS, LSE, RAGGED, TAIL, TMA, PRECISION,
        )  # fmt: skip


def missing(job: PrefillJob) -> str | None:
    """Nothing: every job runs."""
    return None


def takes_descriptors(job: PrefillJob) -> bool:
    """Whether the memory is as the copy engine wants it: dense, 16-byte strides and addresses, no empty axis."""
    size = job.q.element_size()
    tensors = (job.q, job.k, job.v)
    return not job.ragged and all(
        x.data_ptr() % 16 == 0 and x.numel() > 0 and all(s > 0 and s * size % 16 == 0 for s in x.stride()[:3])
        for x in tensors
    )


def run(job: PrefillJob, config: Config | None = None) -> Result:
    """Launch for a checked job; a config that is given is taken as it is."""
    out, lse = job.outputs()
    if out.numel() == 0 or job.sequences == 0 or job.max_seqlen_q == 0:
        return out, lse
    processors, hopper = processors_of(job.q.device)
    config = config or config_of(job, processors, hopper)
    launch = remembered((config, *look(job)), lambda: _plan(job, config, out, lse, processors, hopper))
    with torch.cuda.device_of(job.q):
        launch(job, out, lse)
    return out, lse


def has_gluon() -> bool:
    """Whether this Triton is new enough for the kernels in Gluon."""
    return tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 6)


def _plan(
    job: PrefillJob, config: Config, out: torch.Tensor, lse: torch.Tensor | None, processors: int, hopper: bool
) -> Run:
    """How jobs that look like this one run."""
    if config.specialize:
        if has_gluon():
            from . import gluon as prefill_gluon

            if prefill_gluon.missing(job) is None:
                return prefill_gluon.plan(job, config, out, lse)
        config = default_of(job.head_dim, hopper)
    if config.tma and not takes_descriptors(job):
        config = config._replace(tma=False)
    blocks = triton.cdiv(job.max_seqlen_q, config.block_m)
    tiles = job.sequences * job.heads * blocks
    dim, wide = job.head_dim, triton.next_power_of_2(job.head_dim)
    factor = job.scale * LOG2E.value if job.softcap is None else 2 * job.scale / job.softcap
    tail = job.ragged or job.causal or job.max_seqlen_k % config.block_n != 0
    precise = job.q.dtype == torch.float32
    grid = (
        min(tiles, 2 * processors if config.warps == 4 else processors) if config.persistent and processors else tiles
    )
    numbers = (
        *strides_of(job.q), *strides_of(job.k), *strides_of(job.v), *strides_of(out), *lse_strides(lse),
        job.sequences, job.max_seqlen_q, job.max_seqlen_k, blocks, max(processors, 1), factor, job.softcap or 0.0,
        job.sliding_window or 0,
    )  # fmt: skip
    constants = dict(
        HEADS=job.heads, GROUP=job.heads // job.kv_heads, DIM=dim, WIDE=wide, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, CAUSAL=job.causal, WINDOWED=job.sliding_window is not None,
        CAPPED=job.softcap is not None, SINKS=job.sinks is not None, LSE=lse is not None, RAGGED=job.ragged,
        TAIL=tail, TMA=config.tma, PERSISTENT=config.persistent, ORDER=config.order,
        PRECISION="ieee" if precise else "tf32",
    )  # fmt: skip
    options: dict[str, Any] = dict(num_warps=config.warps, num_stages=config.stages)
    if config.registers is not None:
        options["maxnreg"] = config.registers
    launch = Launch(prefill_kernel, grid, numbers, constants, options)
    if not config.tma:

        def run(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None) -> None:
            launch(job.q, job.k, job.v, out, *_others(job, out, lse))

        return run
    first = _descriptors(job, config, wide)

    def run_by_descriptors(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        blocks = (moved(x, tensor) for x, tensor in zip(first, (job.q, job.k, job.v), strict=True))
        launch(*blocks, out, *_others(job, out, lse))

    return run_by_descriptors


def _others(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """lse, sinks, ends of queries and keys; in the place of what is not there anything."""
    sinks, cu_q, cu_k = job.sinks, job.cu_seqlens_q, job.cu_seqlens_k
    return (
        out if lse is None else lse,
        out if sinks is None else sinks,
        out if cu_q is None else cu_q,
        out if cu_k is None else cu_k,
    )


def _descriptors(job: PrefillJob, config: Config, wide: int) -> tuple[Any, ...]:
    """Of the blocks that a program asks for."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    sizes = (config.block_m, config.block_n, config.block_n)
    return tuple(
        empty(TensorDescriptor(x, *heads_first(x), [1, 1, rows, wide]))
        for x, rows in zip((job.q, job.k, job.v), sizes, strict=True)
    )
