"""Attention mass of sampled queries in Triton: two launches, without materialising queries x columns.

    lse    a program owns queries of a KV head's group and a range of columns: log-sum-exp of what they see there
    mass   a program owns columns of a KV head and loops over all queries that see them: sums of exp(logit - lse)

If attention has already returned the lse and keys come in chunks, only the second kernel runs (`put_mass`). Queries are
sampled evenly: query s of head 0 of a group is at column ``first + s * every``, that of head g ``g * every // group``
earlier, and sees no later column. It is row ``s * group + g``, so that a program skips the queries before its columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvstrata.attention.prefill.launch import launch

from .logits import Logits

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3e38)  # initial maximum; finite, so that -inf minus it is -inf, with weight 0
SPAN = 2048  # columns per program of the lse kernel, a multiple of BLOCK_N


@triton.jit
def _queries(q_ptr, block, count, stride_qh, stride_qs, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
             BLOCK_M: tl.constexpr):  # fmt: skip
    """Rows ``[BLOCK_M, WIDE]`` of queries, zero past ``count``; their indices among the sampled queries."""
    row, dim = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, WIDE)
    at = (row // GROUP).to(tl.int64) * stride_qs + (row % GROUP) * stride_qh
    return tl.load(q_ptr + at[:, None] + dim[None, :], mask=(row < count)[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def _keys(k_ptr, start, columns, stride_kn, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    column, dim = start + tl.arange(0, BLOCK_N), tl.arange(0, WIDE)
    ptrs = k_ptr + column.to(tl.int64)[:, None] * stride_kn + dim[None, :]
    return tl.load(ptrs, mask=(column < columns)[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def _in_base_2(s, factor, softcap, CAPPED: tl.constexpr):
    """Raw scores as logits in base 2; ``factor`` is scale * LOG2E, or 2 scale / softcap."""
    if CAPPED:
        return (softcap - 2.0 * softcap / (tl.exp2(s * (factor * LOG2E)) + 1.0)) * LOG2E
    return s * factor


@triton.jit
def _columns(offs, sampled, first, every, GROUP: tl.constexpr):
    """Columns of query rows; rows past the last query have a column of that query."""
    return first + tl.minimum(offs // GROUP, sampled - 1) * every - offs % GROUP * every // GROUP


@triton.jit(do_not_specialize=["stride_cr", "stride_ch", "sampled", "first", "every", "columns", "span"])
def lse_kernel(
    q_ptr, k_ptr, place_ptr, column_place_ptr, lse_ptr, stride_qr, stride_qh, stride_qs, stride_kr, stride_kh,
    stride_kn, stride_cr, stride_ch, sampled, first, every, columns, span, factor, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAPPED: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp ``[splits, rows * kv_heads, sampled * group]`` of BLOCK_M queries over ``span`` columns."""
    head_cache, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (head_cache // KV_HEADS).to(tl.int64), (head_cache % KV_HEADS).to(tl.int64)
    count = sampled * GROUP
    q = _queries(q_ptr + row * stride_qr + head * GROUP * stride_qh, block, count, stride_qh, stride_qs, GROUP, DIM,
                 WIDE, BLOCK_M)  # fmt: skip
    offs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    own = _columns(offs, sampled, first, every, GROUP)
    if PLACED:
        place = tl.load(place_ptr + row * count + offs, mask=offs < count, other=-1)
        column_place_ptr += row * stride_cr + head * stride_ch
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    end = tl.minimum(tl.minimum(split * span + span, columns), tl.max(own, 0) + 1)
    for start in tl.range(split * span, end, BLOCK_N):
        k = _keys(k_ptr + row * stride_kr + head * stride_kh, start, columns, stride_kn, DIM, WIDE, BLOCK_N)
        s = _in_base_2(tl.dot(q, tl.trans(k)), factor, softcap, CAPPED)
        column = start + tl.arange(0, BLOCK_N)
        seen = (column[None, :] <= own[:, None]) & (column < columns)[None, :]
        if PLACED:
            column_place = tl.load(column_place_ptr + column, mask=column < columns, other=-1)
            seen = seen & (column_place >= 0)[None, :] & (column_place[None, :] <= place[:, None])
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(s - new_top[:, None]), 1)
        top = new_top
    at = (split.to(tl.int64) * tl.num_programs(0) + head_cache) * count + offs
    tl.store(lse_ptr + at, (top + tl.log2(total)) * LN2, mask=offs < count)


@triton.jit(do_not_specialize=["stride_cr", "stride_ch", "sampled", "first", "every", "columns", "positions"])
def mass_kernel(
    q_ptr, k_ptr, place_ptr, column_place_ptr, weight_ptr, lse_ptr, out_ptr, stride_qr, stride_qh, stride_qs, stride_kr,
    stride_kh, stride_kn, stride_cr, stride_ch, sampled, first, every, columns, positions, factor, softcap, weight,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAPPED: tl.constexpr, PLACED: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """Mass ``[rows, columns, kv_heads]`` of BLOCK_N columns; queries count ``weight`` times, or each by its own weight.

    BY_POSITION: written at the positions of the columns, ``[rows, positions, kv_heads]``; others are not written.
    """
    head_cache, block = tl.program_id(0), tl.program_id(1)
    row, head = (head_cache // KV_HEADS).to(tl.int64), (head_cache % KV_HEADS).to(tl.int64)
    count, start = sampled * GROUP, block * BLOCK_N
    column = start + tl.arange(0, BLOCK_N)
    k = _keys(k_ptr + row * stride_kr + head * stride_kh, start, columns, stride_kn, DIM, WIDE, BLOCK_N)
    q_ptr += row * stride_qr + head * GROUP * stride_qh
    lse_ptr += head_cache.to(tl.int64) * count
    if PLACED:
        column_place = tl.load(column_place_ptr + row * stride_cr + head * stride_ch + column, mask=column < columns,
                               other=-1)  # fmt: skip
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    sees = tl.maximum(start - first + every - 1, 0) // every  # first query that sees one of these columns
    for block_m in tl.range(sees * GROUP // BLOCK_M, (count + BLOCK_M - 1) // BLOCK_M):
        q = _queries(q_ptr, block_m, count, stride_qh, stride_qs, GROUP, DIM, WIDE, BLOCK_M)
        s = _in_base_2(tl.dot(k, tl.trans(q)), factor, softcap, CAPPED)
        offs = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_ptr + offs, mask=offs < count, other=0.0)
        own = _columns(offs, sampled, first, every, GROUP)
        seen = (column[:, None] <= own[None, :]) & ((lse > LOWEST) & (offs < count))[None, :]
        if PLACED:
            place = tl.load(place_ptr + row * count + offs, mask=offs < count, other=-1)
            its_weight = tl.load(weight_ptr + row * count + offs, mask=offs < count, other=0.0)
            seen = seen & (column_place >= 0)[:, None] & (column_place[:, None] <= place[None, :])
            p = tl.exp2(s - (lse * LOG2E)[None, :]) * its_weight[None, :]
            seen = seen & (its_weight > 0)[None, :]
        else:
            p = tl.exp2(s - (lse * LOG2E)[None, :])
        acc += tl.where(seen, p, 0.0)
    mass = tl.sum(acc, 1)
    if not PLACED:
        mass *= weight
    if BY_POSITION:
        at = (row * positions + column_place) * KV_HEADS + head
        tl.store(out_ptr + at, mass, mask=(column_place >= 0) & (column_place < positions))
    else:
        at = (row * columns + column) * KV_HEADS + head
        tl.store(out_ptr + at, mass, mask=column < columns)


def blocks(dim: int) -> dict[str, int]:
    """Tile sizes and warps by head_dim."""
    return dict(BLOCK_M=64, BLOCK_N=64 if dim <= 128 else 32, num_warps=4, num_stages=2)


def factor_of(logits: Logits) -> float:
    """Factor of `_in_base_2`."""
    return logits.scale * LOG2E.value if logits.softcap is None else 2 * logits.scale / logits.softcap


def constants_of(query: torch.Tensor, kv_heads: int, logits: Logits) -> dict[str, Any]:
    """Constants and options that both kernels share, for queries ``[rows, heads, sampled, D]``."""
    heads, dim = query.shape[1], query.shape[3]
    sizes = dict(KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, WIDE=triton.next_power_of_2(dim))
    return sizes | dict(CAPPED=logits.softcap is not None) | blocks(dim)


def sampled_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    every: int,
    weight: float | torch.Tensor,
    logits: Logits,
    query_position: torch.Tensor | None = None,
    column_position: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mass of every column, float32 ``[rows, kv_heads, columns]``, contiguous as ``[rows, columns, kv_heads]``.

    Args:
        query: ``[rows, heads, sampled, D]``; the last query of head 0 of a group is at the last column, that of head g
            ``g * every // group`` columns earlier, and the one before it ``every`` earlier.
        key: ``[rows, kv_heads, columns, D]``; both with contiguous channels, other strides free.
        every: number of columns from one query of a head to the next.
        weight: number of queries that each represents; float32 ``[rows, sampled, group]`` if positions are given.
        logits: how scores become logits.
        query_position, column_position: int32 ``[rows, sampled, group]`` and ``[rows, kv_heads or 1, columns]``, -1
            for a column without a token; None without padding, if columns are tokens in order.

    Does not synchronise, and no launch depends on values.
    """
    (rows, heads, sampled, _), (kv_heads, columns) = query.shape, key.shape[1:3]
    group, device = heads // kv_heads, key.device
    first = columns - 1 - (sampled - 1) * every
    out = torch.empty(rows, columns, kv_heads, dtype=torch.float32, device=device)
    if not out.numel():
        return out.transpose(1, 2)
    splits = -(-columns // SPAN)
    lse = torch.empty(splits, rows, heads * sampled, dtype=torch.float32, device=device)
    place, column_place, weights, stride_c = query, query, query, (0, 0)  # not read
    if query_position is not None:
        assert column_position is not None
        assert isinstance(weight, torch.Tensor)
        place, column_place, weights = query_position.contiguous(), column_position, weight.contiguous()
        stride_c = (column_place.stride(0), column_place.stride(1) if column_place.shape[1] > 1 else 0)
    factor = factor_of(logits)
    strides = (*query.stride()[:3], *key.stride()[:3], *stride_c)
    placed = query_position is not None
    constants = constants_of(query, kv_heads, logits) | dict(PLACED=placed)
    cap = float(logits.softcap or 0.0)
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        tiles = (rows * kv_heads, triton.cdiv(sampled * group, constants["BLOCK_M"]), splits)
        lse_kernel[tiles](
            query, key, place, column_place, lse, *strides, sampled, first, every, columns, SPAN, factor, cap,
            **constants,
        )  # fmt: skip
        whole = lse[0] if splits == 1 else lse.logsumexp(0)
        if logits.sinks is not None:
            sinks = logits.sinks.float().view(1, kv_heads, 1, group).expand(rows, -1, sampled, -1)
            whole = torch.logaddexp(whole.view(rows, kv_heads, sampled, group), sinks).contiguous()
        mass_kernel[(rows * kv_heads, triton.cdiv(columns, constants["BLOCK_N"]))](
            query, key, place, column_place, weights, whole, out, *strides, sampled, first, every, columns, 0, factor,
            cap, 0.0 if placed else float(weight), BY_POSITION=False, **constants,
        )  # fmt: skip
    return out.transpose(1, 2)


def put_mass(
    out: torch.Tensor,
    query: torch.Tensor,
    lse: torch.Tensor,
    key: torch.Tensor,
    every: int | None,
    weight: torch.Tensor,
    logits: Logits,
    query_position: torch.Tensor,
    column_position: torch.Tensor,
) -> None:
    """Write the mass of some of the columns that queries see to ``out``, at the positions of these columns.

    Args:
        out: float32 ``[rows, positions, kv_heads]``, contiguous.
        query: ``[rows, heads, sampled, D]``.
        lse: float32 ``[rows, kv_heads, sampled, group]``, contiguous: over everything that a query sees, including
            sinks.
        key: ``[rows, kv_heads, columns, D]``; both with contiguous channels, other strides free.
        every: number of columns from one query of a head to the next, as in `sampled_mass`; None if the columns are in
            no order, and all of them before the queries.
        weight, logits, query_position: as in `sampled_mass`.
        column_position: int32 ``[rows, kv_heads or 1, columns]``; no token if negative or past the end of ``out``.
    """
    (rows, _, sampled, _), (kv_heads, columns) = query.shape, key.shape[1:3]
    first = columns if every is None else columns - 1 - (sampled - 1) * every
    stride_c = (column_position.stride(0), column_position.stride(1) if column_position.shape[1] > 1 else 0)
    constants = constants_of(query, kv_heads, logits)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    args = (
        query, key, query_position, column_position, weight, lse, out, *query.stride()[:3], *key.stride()[:3],
        *stride_c, sampled, first, every or 1, columns, out.shape[1], factor_of(logits), float(logits.softcap or 0.0),
        0.0,
    )  # fmt: skip
    with torch.cuda.device_of(out):
        grid = (rows * kv_heads, triton.cdiv(columns, constants["BLOCK_N"]), 1)
        launch(mass_kernel, grid, args, constants | dict(PLACED=True, BY_POSITION=True), **options)
