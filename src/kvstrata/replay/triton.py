"""The copies of a plan in Triton: the portable GPU path, run by the interpreter in CI.

Triton has no structs by value, so descriptors are a table of int64 on the device, cached per set of source
addresses: a new set costs a small upload, so it must have run once before graph capture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .copies import BITS, Bound, Move

BLOCK = 1024
FIELDS = tl.constexpr(32)
NO_BLOCK = (1 << 31) - 1


@triton.jit
def _move(source, target, last, fill, mask_copy, mask_fill, has_last, TYPE: tl.constexpr):
    """Copy and fill elements of one width as integers, which preserves every bit pattern."""
    x = tl.load(source.to(tl.pointer_type(TYPE)), mask=mask_copy)
    tl.store(target.to(tl.pointer_type(TYPE)), x, mask=mask_copy)
    value = tl.load(last.to(tl.pointer_type(TYPE)), mask=mask_fill & has_last, other=0)
    value = tl.where(has_last, value, fill.to(TYPE))
    tl.store(target.to(tl.pointer_type(TYPE)), value, mask=mask_fill)


@triton.jit
def _to_bf16(x):
    """Bits of bf16 from fp32, rounded to nearest even; the interpreter's conversion is wrong."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).to(tl.uint16)


@triton.jit
def _cast(source, target, source_kind, target_kind, mask):
    """Convert a value from one dtype to another through int64 or float32."""
    whole = tl.zeros(source.shape, tl.int64)
    real = tl.zeros(source.shape, tl.float32)
    if (source_kind == 0) | (source_kind == 8):
        whole = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int64)
    if source_kind == 1:
        whole = tl.load(source.to(tl.pointer_type(tl.int8)), mask=mask, other=0).to(tl.int64)
    if source_kind == 2:
        whole = tl.load(source.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int64)
    if source_kind == 3:
        whole = tl.load(source.to(tl.pointer_type(tl.int32)), mask=mask, other=0).to(tl.int64)
    if source_kind == 4:
        whole = tl.load(source.to(tl.pointer_type(tl.int64)), mask=mask, other=0)
    if source_kind == 5:
        real = tl.load(source.to(tl.pointer_type(tl.float16)), mask=mask, other=0).to(tl.float32)
    if source_kind == 6:
        bits = tl.load(source.to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
        real = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if source_kind == 7:
        real = tl.load(source.to(tl.pointer_type(tl.float32)), mask=mask, other=0)
    from_real = (source_kind >= 5) & (source_kind != 8)
    truth = tl.where(from_real, real != 0, whole != 0)
    as_real = tl.where(from_real, real, whole.to(tl.float32))
    as_whole = tl.where(from_real, real.to(tl.int64), whole)
    if (target_kind == 0) | (target_kind == 1):
        tl.store(target.to(tl.pointer_type(tl.uint8)), as_whole.to(tl.uint8), mask=mask)
    if target_kind == 2:
        tl.store(target.to(tl.pointer_type(tl.int16)), as_whole.to(tl.int16), mask=mask)
    if target_kind == 3:
        tl.store(target.to(tl.pointer_type(tl.int32)), as_whole.to(tl.int32), mask=mask)
    if target_kind == 4:
        tl.store(target.to(tl.pointer_type(tl.int64)), as_whole, mask=mask)
    if target_kind == 5:
        tl.store(target.to(tl.pointer_type(tl.float16)), as_real.to(tl.float16), mask=mask)
    if target_kind == 6:
        tl.store(target.to(tl.pointer_type(tl.uint16)), _to_bf16(as_real), mask=mask)
    if target_kind == 7:
        tl.store(target.to(tl.pointer_type(tl.float32)), as_real, mask=mask)
    if target_kind == 8:
        tl.store(target.to(tl.pointer_type(tl.uint8)), truth.to(tl.uint8), mask=mask)


@triton.jit
def _live(pointer, wide, per, extra, mask):
    """Counts of a bound at addresses: ``ceil(count / per) + extra``; negative counts cover nothing."""
    narrow = tl.load(pointer.to(tl.pointer_type(tl.int32)), mask=mask & (wide == 0), other=0).to(tl.int64)
    count = tl.load(pointer.to(tl.pointer_type(tl.int64)), mask=mask & (wide != 0), other=0)
    count = tl.where(wide != 0, count, narrow)
    return tl.where(count > 0, (count + per - 1) // per, -((-count) // per)) + extra


@triton.jit
def copy_kernel(table_ptr, copies, COPIES: tl.constexpr, CASTS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs_copy = tl.arange(0, COPIES)
    first = tl.load(table_ptr + offs_copy * FIELDS, mask=offs_copy < copies, other=2147483647)
    index = tl.sum((first <= pid).to(tl.int32), 0) - 1
    entry = table_ptr + index * FIELDS
    source, target = tl.load(entry + 1), tl.load(entry + 2)
    lengths, rows = tl.load(entry + 3), tl.load(entry + 4)
    size0, size1, size2 = tl.load(entry + 12), tl.load(entry + 13), tl.load(entry + 14)
    extent0, extent1, extent2 = tl.load(entry + 15), tl.load(entry + 16), tl.load(entry + 17)
    itemsize, source_kind = tl.load(entry + 23), tl.load(entry + 24)
    target_kind, flags = tl.load(entry + 25), tl.load(entry + 26)

    n = (pid - tl.load(entry)) * BLOCK + tl.arange(0, BLOCK)
    mask = n < extent0 * extent1 * extent2
    row, column = n // extent2, n % extent2
    i0, i1 = row // extent1, row % extent1
    inside = mask & (i0 < size0) & (i1 < size1)
    end = tl.where(inside, size2, 0)
    bounded = inside & (rows != 0)
    alive = _live(rows + i0 * 0, flags & 4, tl.load(entry + 21), tl.load(entry + 22), bounded)
    end = tl.where(bounded & (i0 >= alive), 0, end)
    bounded = inside & (lengths != 0)
    length = _live(lengths + i0 * tl.load(entry + 18), flags & 2, tl.load(entry + 19), tl.load(entry + 20), bounded)
    end = tl.where(bounded, tl.minimum(end, tl.maximum(length, 0)), end)

    mask_copy = mask & (column < end)
    mask_fill = mask & (column >= end) & ((flags & 1) != 0)
    stride2 = tl.load(entry + 7)
    row_ptr = source + i0 * tl.load(entry + 5) + i1 * tl.load(entry + 6)
    from_ = row_ptr + column * stride2
    last = row_ptr + (end - 1) * stride2
    to = target + i0 * tl.load(entry + 8) + i1 * tl.load(entry + 9) + column * tl.load(entry + 10)
    fill = tl.load(entry + 11)
    has_last = ((flags & 8) != 0) & (end > 0)
    casts = target_kind != 255
    if CASTS:
        mask_cast = mask_copy | (mask_fill & has_last)
        _cast(tl.where(mask_copy, from_, last), to, source_kind, target_kind, mask_cast & casts)
    mask_copy = mask_copy & (casts == 0)
    mask_fill = mask_fill & ((casts == 0) | (has_last == 0))
    has_last = has_last & (casts == 0)
    if itemsize == 1:
        _move(from_, to, last, fill, mask_copy, mask_fill, has_last, tl.uint8)
    if itemsize == 2:
        _move(from_, to, last, fill, mask_copy, mask_fill, has_last, tl.int16)
    if itemsize == 4:
        _move(from_, to, last, fill, mask_copy, mask_fill, has_last, tl.int32)
    if itemsize == 8:
        _move(from_, to, last, fill, mask_copy, mask_fill, has_last, tl.int64)
    if itemsize == 16:
        _move(from_, to, last, fill, mask_copy, mask_fill, has_last, tl.int64)
        _move(from_ + 8, to + 8, last, fill, mask_copy, mask_fill, has_last, tl.int64)


def blocks_of(move: Move) -> int:
    return triton.cdiv(move.elements, BLOCK)


def row_of(
    first: int, source: int, target: int, move: Move, lengths: Bound | None, lengths_step: int, rows: Bound | None
) -> list[int]:
    """A row of the table, in the order the kernel reads it."""
    flags = (move.fill is not None) | (move.fill_last << 3)
    flags |= (lengths is not None and lengths.tensor.dtype == torch.int64) << 1
    flags |= (rows is not None and rows.tensor.dtype == torch.int64) << 2
    fill = move.fill or 0
    line = [
        first, source, target, lengths.tensor.data_ptr() if lengths else 0, rows.tensor.data_ptr() if rows else 0,
        *move.source_stride, *move.target_stride, fill - (1 << 64) if fill >> 63 else fill, *move.size, *move.extent,
        lengths_step, lengths.per if lengths else 1, lengths.extra if lengths else 0,
        rows.per if rows else 1, rows.extra if rows else 0,
        move.itemsize, move.source_kind, move.target_kind, flags,
    ]  # fmt: skip
    return line + [0] * (FIELDS.value - len(line))


def launch(table: torch.Tensor, grid: int, casts: bool) -> None:
    if grid == 0:
        return
    copies = table.shape[0]
    with torch.cuda.device_of(table):
        copy_kernel[(grid,)](table, copies, COPIES=triton.next_power_of_2(copies), CASTS=casts, BLOCK=BLOCK)


def has_casts(moves: Sequence[Move]) -> bool:
    return any(move.target_kind != BITS for move in moves)
