"""``decode_attention`` in Triton: the portable GPU path, run by the interpreter in CI.

    decode_kernel    a program per (request, KV head, block of query rows, split) loops over every ``SPLITS``-th block
                     of tokens of all tiers with an online softmax; quantised tiers first, in the rotated space, then
                     the accumulator is rotated back and plain rows follow
    combine_kernel   a program per query row combines the splits

Mass takes a second pass of decode_kernel over K, with the final log-sum-exp: it is written to a tensor by position, or,
in a layer that is observed in this step (observe.py), added to the importance in the pages.

All arithmetic is float32. The two products use tensor cores in TF32 for 16-bit queries.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from kvstrata.layout.unpack_triton import load_factors, load_levels, load_scales, page_address, rotate_rows, widen

from .job import Job, Result
from .source_triton import on_device, paged, tiered


@triton.jit
def _cap(s, softcap, CAPPED: tl.constexpr):
    """softcap * tanh(s / softcap)"""
    if CAPPED:
        return softcap - 2.0 * softcap / (tl.exp(2.0 * s / softcap) + 1.0)
    return s


@triton.jit
def _seen(live, position, own, window, ORDERED: tl.constexpr, WINDOWED: tl.constexpr):
    """Mask ``[ROWS, TOK]``: tokens that the queries at ``own [ROWS, 1]`` see."""
    seen = live & (own == own)
    if ORDERED:
        seen = seen & (position <= own)
    if WINDOWED:
        seen = seen & (position > own - window)
    return seen


@triton.jit
def _step(s, v, v_scale, top, total, acc, PRECISION: tl.constexpr):
    """Online softmax: add scores ``[ROWS, TOK]``, -inf where hidden, and values ``[TOK, WIDE]`` to the running sums."""
    new_top = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.exp(top - safe)
    p = tl.exp(s - safe[:, None])
    total = total * old + tl.sum(p, 1)
    acc = tl.dot(p * v_scale[None, :], v, acc * old[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _add_mass(s, seen, lse, mass_ptr, position, live):
    """Add the weights of a block, summed over rows, to the mass of their positions."""
    p = tl.exp(tl.where(seen, s - lse[:, None], float("-inf")))
    tl.atomic_add(mass_ptr + position, tl.sum(p, 0), mask=live)


@triton.jit
def _add_importance(
    s, seen, lse, importance_start, token, position, live, length, weight, first_block, log2_decay,
    Q_LEN: tl.constexpr, EMA: tl.constexpr,
):  # fmt: skip
    """Add the weights of a block, summed over rows, to the importance of its tokens, as `observe_mass` does."""
    p = tl.exp(tl.where(seen, s - lse[:, None], float("-inf")))
    mass = tl.sum(p, 0)
    mass = tl.where(mass < 3.0e38, mass, 0.0)  # NaN and infinity count as 0
    could = length - position
    mass = mass * tl.minimum(weight, could).to(tl.float32) / tl.minimum(Q_LEN, could).to(tl.float32)
    importance_ptr = importance_start.to(tl.pointer_type(tl.float32)) + token
    old = tl.load(importance_ptr, mask=live, other=0.0)
    if EMA:
        w = weight.to(tl.float32)
        before = tl.where(first_block == 0, old, 0.0)  # the decay applies once
        new = old + (mass / w - before) * (1.0 - tl.exp2(w * log2_decay))
    else:
        new = tl.minimum(old + mass, 3.4028234e38)
    tl.store(importance_ptr, new, mask=live)


@triton.jit
def _speaks(requests_ptr, weights_ptr, earlier_rows, lists_ptr, stride_table_r, index, handle):
    """False if an earlier row that gives mass has the same page; owners have it at the same index of their lists."""
    earlier = 0
    for row in range(earlier_rows):
        request = tl.load(requests_ptr + row).to(tl.int64)
        same = tl.load(lists_ptr + request * stride_table_r + index) == handle
        earlier += (same & (tl.load(weights_ptr + row) > 0)).to(tl.int32)
    return earlier == 0


@triton.jit
def _positions(page, offset, token, live, POSITION_BYTES: tl.constexpr):
    if POSITION_BYTES == 2:
        position_ptr = (page + offset).to(tl.pointer_type(tl.int16))
    else:
        position_ptr = (page + offset).to(tl.pointer_type(tl.int32))
    return tl.load(position_ptr + token, mask=live, other=0).to(tl.int32)


@triton.jit
def _coded_tier(
    q, q_centre, own, row_live, lse, top, total, acc, mass_ptr, lists_ptr, request, stride_table_r, count, offsets_ptr,
    pointers_ptr, units, softcap, window, split, requests_ptr, weights_ptr, earlier_rows, weight, first_block,
    log2_decay, length,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    TOK: tl.constexpr, SPLITS: tl.constexpr, POSITION_BYTES: tl.constexpr, ORDERED: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASS: tl.constexpr, OBSERVE: tl.constexpr, EMA: tl.constexpr,
    Q_LEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process the blocks of a quantised bucket that belong to this split."""
    v_offset, scale_offset, position_offset, importance_offset = (
        tl.load(offsets_ptr), tl.load(offsets_ptr + 1), tl.load(offsets_ptr + 2), tl.load(offsets_ptr + 3),
    )  # fmt: skip
    pages_ptr = lists_ptr + request * stride_table_r
    offs, dim = tl.arange(0, TOK), tl.arange(0, WIDE)
    mask_d = dim < DIM
    for block in range(split, tl.cdiv(count, TOK), SPLITS):
        slot = block * TOK + offs
        live = slot < count
        token = slot % TOKENS
        index = block * TOK // TOKENS
        handle = tl.load(pages_ptr + index)
        if OBSERVE:
            live &= _speaks(requests_ptr, weights_ptr, earlier_rows, lists_ptr, stride_table_r, index, handle)
        page = page_address(pointers_ptr, handle, units)
        k_ptr = page.to(tl.pointer_type(tl.int32))
        scale_ptr = (page + scale_offset).to(tl.pointer_type(tl.float16))
        k = load_levels(k_ptr, token[None, :], dim[:, None], mask_d[:, None] & live[None, :], K_BITS, DIM, TOKENS, True)
        s = tl.dot(q, k, input_precision=PRECISION) * load_scales(scale_ptr, token, live, 0)[None, :]
        s = _cap(s + q_centre[:, None], softcap, CAPPED)
        position = tl.zeros((TOK,), tl.int32)
        if ORDERED or WINDOWED or MASS:
            position = _positions(page, position_offset, token, live, POSITION_BYTES)
        seen = _seen(live[None, :], position[None, :], own[:, None], window, ORDERED, WINDOWED)
        if OBSERVE:
            _add_importance(
                s, seen & row_live[:, None], lse, page + importance_offset, token, position, live, length, weight,
                first_block, log2_decay, Q_LEN, EMA,
            )  # fmt: skip
        elif MASS:
            _add_mass(s, seen & row_live[:, None], lse, mass_ptr, position, live)
        else:
            v_ptr = (page + v_offset).to(tl.pointer_type(tl.int32))
            v = load_levels(
                v_ptr, token[:, None], dim[None, :], mask_d[None, :] & live[:, None], V_BITS, DIM, TOKENS, False
            )
            s = tl.where(seen, s, float("-inf"))
            top, total, acc = _step(s, v, load_scales(scale_ptr, token, live, 1), top, total, acc, PRECISION)
    return top, total, acc


@triton.jit
def _plain_block(
    q, own, row_live, lse, top, total, acc, mass_ptr, k_rows, v_rows, k_scale, v_scale, live, position, softcap, window,
    importance_start, token, length, weight, first_block, log2_decay,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOK: tl.constexpr, MANTISSA: tl.constexpr, ORDERED: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASS: tl.constexpr, OBSERVE: tl.constexpr, EMA: tl.constexpr,
    Q_LEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process a block of plain tokens, whose rows start at the pointers ``k_rows, v_rows [TOK]``."""
    dim = tl.arange(0, WIDE)
    mask_d = dim < DIM
    k = widen(tl.load(k_rows[None, :] + dim[:, None], mask=mask_d[:, None] & live[None, :], other=0), MANTISSA)
    s = _cap(tl.dot(q, k, input_precision=PRECISION) * k_scale, softcap, CAPPED)
    seen = _seen(live[None, :], position[None, :], own[:, None], window, ORDERED, WINDOWED)
    if OBSERVE:
        _add_importance(
            s, seen & row_live[:, None], lse, importance_start, token, position, live, length, weight, first_block,
            log2_decay, Q_LEN, EMA,
        )  # fmt: skip
    elif MASS:
        _add_mass(s, seen & row_live[:, None], lse, mass_ptr, position, live)
    else:
        v = widen(tl.load(v_rows[:, None] + dim[None, :], mask=mask_d[None, :] & live[:, None], other=0), MANTISSA)
        s = tl.where(seen, s, float("-inf"))
        ones = tl.full((TOK,), 1.0, tl.float32) * v_scale
        top, total, acc = _step(s, v, ones, top, total, acc, PRECISION)
    return top, total, acc


@triton.jit
def decode_kernel(
    q_ptr, requests_ptr, length_ptr, table_ptr, count_ptr, centre_ptr, balance_ptr, pointers_ptr, offsets_ptr, k_ptr,
    v_ptr, k_scale_ptr, v_scale_ptr, partial_ptr, stats_ptr, lse_ptr, mass_ptr, stride_qb, stride_ql, stride_qh,
    stride_length, stride_table_r, stride_table_h, stride_table_t, stride_count_r, stride_count_h, stride_centre_r,
    stride_centre_h, stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head, units,
    max_length, scale, softcap, window, weights_ptr, state_ptr, log2_decay, first_block,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, ROW_BLOCKS: tl.constexpr, TIERS: tl.constexpr, FORMATS: tl.constexpr, TOKENS: tl.constexpr,
    TOK: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, BALANCED: tl.constexpr,
    POSITION_BYTES: tl.constexpr, MANTISSA: tl.constexpr, SCALED: tl.constexpr, ORDERED: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASS: tl.constexpr, OBSERVE: tl.constexpr, EMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one split of a block of query rows. TIERS 0: PagedCache with blocks of TOKENS rows; BLOCK: size of the
    rotation, 1 for none; OBSERVE: a mass pass that writes importance, from ``first_block`` of the query rows on."""
    head_cache, split = tl.program_id(0) // ROW_BLOCKS, tl.program_id(1)
    batch, kv_head = head_cache // KV_HEADS, head_cache % KV_HEADS
    request = tl.load(requests_ptr + batch).to(tl.int64)
    length = tl.load(length_ptr + request * stride_length)
    row = (tl.program_id(0) % ROW_BLOCKS + first_block) * ROWS + tl.arange(0, ROWS)
    row_live = row < Q_LEN * GROUP
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    own = length - Q_LEN + query
    dim, offs = tl.arange(0, WIDE), tl.arange(0, TOK)
    mask_q = row_live[:, None] & (dim < DIM)[None, :]
    offs_q = batch.to(tl.int64) * stride_qb + query[:, None] * stride_ql + head[:, None] * stride_qh + dim[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0).to(tl.float32) * scale
    lse = tl.zeros((ROWS,), tl.float32)
    if MASS:
        offs_lse = (batch * Q_LEN + query) * (KV_HEADS * GROUP) + head
        lse = tl.load(lse_ptr + offs_lse, mask=row_live, other=0.0)
        mass_ptr += head_cache.to(tl.int64) * max_length
    weight, alive, earlier_rows = 0, 1, 0
    if OBSERVE:
        weight = tl.load(weights_ptr + batch)
        alive = (weight > 0).to(tl.int32)
        earlier_rows = batch * tl.load(state_ptr + 1)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    if TIERS > 0:
        offs_c = request * stride_centre_r + kv_head * stride_centre_h + dim
        lists_ptr = table_ptr + kv_head * stride_table_h
        pages_ptr = lists_ptr + request * stride_table_r
        count_ptr += request * stride_count_r + kv_head * stride_count_h
        q_centre = tl.zeros((ROWS,), tl.float32)
        if CENTRED:
            q_centre = tl.sum(q * tl.load(centre_ptr + offs_c, mask=dim < DIM, other=0.0)[None, :], 1)
        if BALANCED:
            q = q * load_factors(balance_ptr + offs_c, dim < DIM)[None, :]
        if TIERS > 1:
            turned = rotate_rows(q, ROWS, WIDE, BLOCK) if BLOCK > 1 else q
            for tier in tl.static_range(1, TIERS):
                top, total, acc = _coded_tier(
                    turned, q_centre, own, row_live, lse, top, total, acc, mass_ptr, lists_ptr + tier * stride_table_t,
                    request, stride_table_r, tl.load(count_ptr + tier) * alive, offsets_ptr + 4 * tier, pointers_ptr,
                    units, softcap, window, split, requests_ptr, weights_ptr, earlier_rows, weight, first_block,
                    log2_decay, length,
                    (FORMATS >> (8 * tier)) & 15, (FORMATS >> (8 * tier + 4)) & 15, DIM, WIDE, TOKENS, TOK, SPLITS,
                    POSITION_BYTES, ORDERED, WINDOWED, CAPPED, MASS, OBSERVE, EMA, Q_LEN, PRECISION,
                )  # fmt: skip
            if BLOCK > 1 and not MASS:
                acc = rotate_rows(acc, ROWS, WIDE, BLOCK)
        count = tl.load(count_ptr) * alive
        v_offset, position_offset = tl.load(offsets_ptr), tl.load(offsets_ptr + 2)
        importance_offset = tl.load(offsets_ptr + 3)
        for block in range(split, tl.cdiv(count, TOK), SPLITS):
            slot = block * TOK + offs
            live = slot < count
            token = slot % TOKENS
            index = block * TOK // TOKENS
            handle = tl.load(pages_ptr + index)
            if OBSERVE:
                live &= _speaks(requests_ptr, weights_ptr, earlier_rows, lists_ptr, stride_table_r, index, handle)
            page = page_address(pointers_ptr, handle, units)
            position = tl.zeros((TOK,), tl.int32)
            if ORDERED or WINDOWED or MASS:
                position = _positions(page, position_offset, token, live, POSITION_BYTES)
            k_rows = page.to(tl.pointer_type(q_ptr.dtype.element_ty)) + token * DIM
            v_rows = (page + v_offset).to(tl.pointer_type(q_ptr.dtype.element_ty)) + token * DIM
            top, total, acc = _plain_block(
                q, own, row_live, lse, top, total, acc, mass_ptr, k_rows, v_rows, 1.0, 1.0, live, position, softcap,
                window, page + importance_offset, token, length, weight, first_block, log2_decay, DIM, WIDE, TOK, 0,
                ORDERED, WINDOWED, CAPPED, MASS, OBSERVE, EMA, Q_LEN, PRECISION,
            )  # fmt: skip
    else:
        k_scale, v_scale = 1.0, 1.0
        if SCALED > 0:
            k_scale = tl.load(k_scale_ptr + kv_head % SCALED)
            v_scale = tl.load(v_scale_ptr + kv_head % SCALED)
        first = 0
        if WINDOWED:
            first = tl.maximum(length - Q_LEN - window + 1, 0) // TOK
        for block in range(first + split, tl.cdiv(length, TOK), SPLITS):
            position = block * TOK + offs
            live = position < length
            page = tl.load(table_ptr + request * stride_table_r + position // TOKENS, mask=live, other=0).to(tl.int64)
            token, side = (position % TOKENS).to(tl.int64), kv_head.to(tl.int64)
            k_rows = k_ptr + page * stride_k_page + token * stride_k_row + side * stride_k_head
            v_rows = v_ptr + page * stride_v_page + token * stride_v_row + side * stride_v_head
            top, total, acc = _plain_block(
                q, own, row_live, lse, top, total, acc, mass_ptr, k_rows, v_rows, k_scale, v_scale, live, position,
                softcap, window, page, token, length, weight, first_block, log2_decay, DIM, WIDE, TOK, MANTISSA,
                ORDERED, WINDOWED, CAPPED, MASS, False, False, Q_LEN, PRECISION,
            )  # fmt: skip

    if not MASS:
        offs_row = (head_cache.to(tl.int64) * SPLITS + split) * (Q_LEN * GROUP) + row
        tl.store(partial_ptr + offs_row[:, None] * DIM + dim[None, :], acc, mask=mask_q)
        tl.store(stats_ptr + offs_row * 2, top, mask=row_live)
        tl.store(stats_ptr + offs_row * 2 + 1, total, mask=row_live)


@triton.jit
def combine_kernel(
    partial_ptr, stats_ptr, sinks_ptr, out_ptr, lse_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SPLITS: tl.constexpr, WIDE_SPLITS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Combine the partials of one query row, rescaled to their common maximum, with the sink in the denominator."""
    head_cache, row = tl.program_id(0), tl.program_id(1)
    head = head_cache % KV_HEADS * GROUP + row % GROUP
    out_row = (head_cache // KV_HEADS * Q_LEN + row // GROUP) * (KV_HEADS * GROUP) + head
    offs, dim = tl.arange(0, WIDE_SPLITS), tl.arange(0, WIDE)
    rows = (head_cache.to(tl.int64) * SPLITS + offs) * (Q_LEN * GROUP) + row
    tops = tl.load(stats_ptr + rows * 2, mask=offs < SPLITS, other=float("-inf"))
    totals = tl.load(stats_ptr + rows * 2 + 1, mask=offs < SPLITS, other=0.0)
    top = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp(tops - safe), 0)
    if SINKS:
        total += tl.exp(sink - safe)
    acc = tl.zeros((WIDE,), tl.float32)
    for split in range(SPLITS):
        offs_split = (head_cache.to(tl.int64) * SPLITS + split) * (Q_LEN * GROUP) + row
        weight = tl.exp(tl.load(stats_ptr + offs_split * 2) - safe)
        acc += weight * tl.load(partial_ptr + offs_split * DIM + dim, mask=dim < DIM, other=0.0)
    denominator = tl.where(total == 0.0, 1.0, total)
    acc = acc / denominator
    tl.store(out_ptr + out_row.to(tl.int64) * DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=dim < DIM)
    if LSE:
        tl.store(lse_ptr + out_row, tl.where(total == 0.0, float("-inf"), safe + tl.log(denominator)))


def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """Number of splits: enough programs to fill the device about twice, at least two blocks per split."""
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return max(1, min(triton.cdiv(wanted, max(programs, 1)), triton.cdiv(blocks, 2), 64))


def decode(job: Job) -> Result:
    """Launch the kernels of a checked job."""
    q = job.q
    batch, q_len, heads, dim = q.shape
    device, group, head_caches = q.device, job.group, batch * job.kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
    observation = job.observation
    lse = floats(batch, q_len, heads) if job.return_lse or job.return_mass or observation is not None else None
    mass = floats(batch, job.kv_heads, job.max_length).zero_() if job.return_mass else None
    if batch == 0:
        return out, lse if job.return_lse else None, mass
    tensors, numbers, constants = tiered(job) if job.buckets is not None else paged(job)
    rows, wide = q_len * group, max(16, triton.next_power_of_2(dim))
    block_rows = 32 if rows > 16 and wide <= 128 else 16
    row_blocks = triton.cdiv(rows, block_rows)
    tokens = constants["TOKENS"] if job.buckets is not None else 64
    block_tokens = min(tokens, max(16, 4096 // wide))
    tiers = max(constants["TIERS"], 1)
    blocks = triton.cdiv(job.max_length, block_tokens) + tiers
    splits = _splits(head_caches * row_blocks, blocks, device)
    partial = floats(head_caches * splits * rows * dim)
    stats = floats(head_caches * splits * rows * 2)
    exact = q.dtype == torch.float32 or torch.version.hip is not None
    shape = dict(KV_HEADS=job.kv_heads, GROUP=group, Q_LEN=q_len, DIM=dim, WIDE=wide)
    options = dict(
        ROWS=block_rows, TOK=block_tokens, SPLITS=splits, ORDERED=q_len > 1,
        WINDOWED=job.sliding_window is not None, CAPPED=job.softcap is not None, PRECISION="ieee" if exact else "tf32",
        num_warps=8, num_stages=1,  # more stages need more shared memory than a consumer GPU has
    )  # fmt: skip
    weights, state, decay, ema = q, q, 0.0, False
    if observation is not None:
        cache = observation.cache
        weights, state, ema = observation.weights[job.layer], cache.reports.state, cache.policy.mode == "ema"
        decay = math.log2(cache.decay) if cache.decay > 0 else -math.inf

    def launch(mass_pass: bool, block: int | None = None) -> None:
        """Run all blocks of query rows, or one that adds its mass to importance, since all write the same entries."""
        blocks = row_blocks if block is None else 1
        decode_kernel[(head_caches * blocks, splits)](
            q, on_device(tuple(job.requests), device), *tensors, partial, stats, partial if lse is None else lse,
            partial if mass is None else mass, *q.stride()[:3], *numbers, job.max_length, job.scale,
            job.softcap or 0.0, job.sliding_window or 0, weights, state, decay, block or 0, **shape, **constants,
            **options, ROW_BLOCKS=blocks, MASS=mass_pass, OBSERVE=block is not None, EMA=ema,
        )  # fmt: skip

    with torch.cuda.device_of(q):
        launch(False)
        combine_kernel[(head_caches, rows)](
            partial, stats, partial if job.sinks is None else job.sinks, out, partial if lse is None else lse,
            **shape, SPLITS=splits, WIDE_SPLITS=triton.next_power_of_2(splits), SINKS=job.sinks is not None,
            LSE=lse is not None, num_warps=1 if dim <= 64 else 4,
        )  # fmt: skip
        if mass is not None and job.max_length:
            launch(True)
        if observation is not None:
            for block in range(row_blocks):
                launch(True, block)
    return out, lse if job.return_lse else None, mass
