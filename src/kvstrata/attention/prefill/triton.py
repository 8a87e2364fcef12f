"""``prefill_attention`` in Triton: the portable GPU path, run by the interpreter in CI.

A program owns BLOCK_M queries of one head. Their sums stay in registers while it loops over blocks of BLOCK_N keys with
an online softmax in base 2; scores never reach memory. Blocks that are fully visible to every query of the program run
without a mask:

    keys ->   |  window's edge  |  seen by all  |  diagonal, end of the keys  |
                   masked            no mask               masked

    ORDER     0: the tiles of a head are adjacent; 1: the longest tiles of all heads first; 2: as 1, with every second
              round of the multiprocessors reversed, so that a causal triangle is balanced over them
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvstrata.call_cache import Bounded

from .configs import config_of, default_of, processors_of
from .job import PrefillJob, Result, Run, lse_strides, strides_of
from .launch import Launch, signature
from .tiles import Config

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3e38)  # initial maximum: finite, so that a score of -inf minus it is -inf, with weight 0


@triton.jit
def _rows(base, start, count, stride_row, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """``[BLOCK, WIDE]`` from row ``start`` on; zero past DIM and, if MASKED, past ``count``."""
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
    q, own, top, total, acc, k, v, low, high, keys, stride_ks, stride_vs, factor, softcap, window,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys ``low .. high`` to the sums; low is a multiple of BLOCK_N. ``factor`` converts a raw score to base 2."""
    for start in tl.range(low, high, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        key = _rows(k, start, keys, stride_ks, BLOCK_N, DIM, WIDE, MASKED)
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
        value = _rows(v, start, keys, stride_vs, BLOCK_N, DIM, WIDE, MASKED)
        acc = acc * old[:, None]
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def _place(tile, sequences, blocks, processors, HEADS: tl.constexpr, CAUSAL: tl.constexpr, ORDER: tl.constexpr):
    """Block, head and sequence of tile ``tile``."""
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


# Sizes are not specialized, since that would compile a kernel for each kind of value. Strides keep their alignment.
@triton.jit(
    do_not_specialize=[
        "stride_lb", "stride_lh", "stride_ls", "sequences", "queries", "keys", "blocks", "processors", "window",
    ]
)  # fmt: skip
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, stride_qb, stride_qh, stride_qs, stride_kb,
    stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    stride_ls, sequences, queries, keys, blocks, processors, factor, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, RAGGED: tl.constexpr, TAIL: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of a head; ``blocks``: tiles per sequence."""
    block, head, batch = _place(tl.program_id(0), sequences, blocks, processors, HEADS, CAUSAL, ORDER)
    kv_head = head // GROUP
    batch = batch.to(tl.int64)
    if RAGGED:
        first_q, first_k = tl.load(cu_q_ptr + batch), tl.load(cu_k_ptr + batch)
        queries, keys = tl.load(cu_q_ptr + batch + 1) - first_q, tl.load(cu_k_ptr + batch + 1) - first_k
        wide_q, wide_k = first_q.to(tl.int64), first_k.to(tl.int64)
        q_start, out_start, lse_start = wide_q * stride_qs, wide_q * stride_os, wide_q * stride_ls
        k_start, v_start = wide_k * stride_ks, wide_k * stride_vs
    else:
        q_start, out_start, lse_start = batch * stride_qb, batch * stride_ob, batch * stride_lb
        k_start, v_start = batch * stride_kb, batch * stride_vb
    begin = block * BLOCK_M
    if begin < queries:
        own = begin + tl.arange(0, BLOCK_M) + (keys - queries)
        q_ptr += q_start + tl.cast(head, tl.int64) * stride_qh
        k_ptr += k_start + tl.cast(kv_head, tl.int64) * stride_kh
        v_ptr += v_start + tl.cast(kv_head, tl.int64) * stride_vh
        query = _rows(q_ptr, begin, queries, stride_qs, BLOCK_M, DIM, WIDE, True)
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
                query, own, top, total, acc, k_ptr, v_ptr, low, edge, keys, stride_ks, stride_vs, factor, softcap,
                window, DIM, WIDE, BLOCK_N, True, CAUSAL, True, CAPPED, PRECISION,
            )  # fmt: skip
            low = tl.maximum(low, edge)
        top, total, acc = _blocks(
            query, own, top, total, acc, k_ptr, v_ptr, low, full, keys, stride_ks, stride_vs, factor, softcap, window,
            DIM, WIDE, BLOCK_N, False, CAUSAL, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        if TAIL:
            top, total, acc = _blocks(
                query, own, top, total, acc, k_ptr, v_ptr, tl.maximum(low, full), end, keys, stride_ks, stride_vs,
                factor, softcap, window, DIM, WIDE, BLOCK_N, True, CAUSAL, WINDOWED, CAPPED, PRECISION,
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
        divisor = tl.where(total == 0.0, 1.0, total)
        acc = acc * (1.0 / divisor)[:, None]
        dim = tl.arange(0, WIDE)
        out_ptrs = out_ptr + out_start + tl.cast(head, tl.int64) * stride_oh
        out_ptrs += row[:, None].to(tl.int64) * stride_os + dim[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dim < DIM)[None, :])
        if LSE:
            lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(divisor)) * LN2)
            tl.store(lse_ptr + lse_start + head * stride_lh + row.to(tl.int64) * stride_ls, lse, mask=live)


def missing(job: PrefillJob) -> str | None:
    """None: the kernel runs every job."""
    return None


_plans: Bounded[Run] = Bounded()


def run(job: PrefillJob, config: Config | None = None) -> Result:
    """Launch a checked job; a given ``config`` is not checked."""
    out, lse = job.outputs()
    if out.numel() == 0 or job.sequences == 0 or job.max_seqlen_q == 0:
        return out, lse
    launch = prepare(job, out, lse, config)
    with torch.cuda.device_of(job.q):
        launch(job, out, lse)
    return out, lse


def prepare(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None, config: Config | None = None) -> Run:
    """Launch for jobs with this `signature` on the current device; the job is not empty."""
    processors, hopper = processors_of(job.q.device)
    config = config or config_of(job, processors, hopper)
    key = (config, *signature(job))
    launch = _plans.get(key)
    if launch is None:
        launch = _plans[key] = _plan(job, config, out, lse, processors, hopper)
    return launch


def has_gluon() -> bool:
    """True if this Triton is new enough for the Gluon kernels."""
    return tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 6)


def _plan(
    job: PrefillJob, config: Config, out: torch.Tensor, lse: torch.Tensor | None, processors: int, hopper: bool
) -> Run:
    """Launch for every job with this `signature`."""
    if config.specialize:
        if has_gluon():
            from . import gluon as prefill_gluon

            if prefill_gluon.missing(job) is None:
                return prefill_gluon.plan(job, config, out, lse)
        config = default_of(job.head_dim, hopper)
    blocks = triton.cdiv(job.max_seqlen_q, config.block_m)
    tiles = job.sequences * job.heads * blocks
    dim, wide = job.head_dim, triton.next_power_of_2(job.head_dim)
    factor = job.scale * LOG2E.value if job.softcap is None else 2 * job.scale / job.softcap
    tail = job.ragged or job.causal or job.max_seqlen_k % config.block_n != 0
    precise = job.q.dtype == torch.float32
    numbers = (
        *strides_of(job.q), *strides_of(job.k), *strides_of(job.v), *strides_of(out), *lse_strides(lse),
        job.sequences, job.max_seqlen_q, job.max_seqlen_k, blocks, max(processors, 1), factor, job.softcap or 0.0,
        job.sliding_window or 0,
    )  # fmt: skip
    constants = dict(
        HEADS=job.heads, GROUP=job.heads // job.kv_heads, DIM=dim, WIDE=wide, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, CAUSAL=job.causal, WINDOWED=job.sliding_window is not None,
        CAPPED=job.softcap is not None, SINKS=job.sinks is not None, LSE=lse is not None, RAGGED=job.ragged,
        TAIL=tail, ORDER=config.order, PRECISION="ieee" if precise else "tf32",
    )  # fmt: skip
    options: dict[str, Any] = dict(num_warps=config.warps, num_stages=config.stages)
    if config.registers is not None:
        options["maxnreg"] = config.registers
    launch = Launch(prefill_kernel, tiles, numbers, constants, options)

    def run(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        sinks, cu_q, cu_k = job.sinks, job.cu_seqlens_q, job.cu_seqlens_k
        launch(
            job.q, job.k, job.v, out, out if lse is None else lse, out if sinks is None else sinks,
            out if cu_q is None else cu_q, out if cu_k is None else cu_k,
        )  # fmt: skip

    return run
