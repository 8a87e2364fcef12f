"""``repack`` in Triton: the portable GPU path, run by the interpreter in CI.

A program processes one side of one chain of moves. Formats are data: positions of fields come from a table
(layout/fragments.py), widths and offsets from another, so one kernel serves all tiers. A word is shared with tokens
that other programs move at the same time: the difference of the field is added to it, and sums of differences of
disjoint fields are correct in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kvstrata.layout import fragments
from kvstrata.layout.format import Format
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_triton import page_address, scale_index
from kvstrata.quant.reference import GAUSSIAN_STEP, K_GAIN, V_GAIN, aim_factor
from kvstrata.quant.triton import clean, factor_of, quantize_rows, transform

from .repack_job import Job


@triton.jit
def _field(page, places_ptr, index, width, mask):
    """Word, shift and value of a field of every dim; a width of 0 means no field."""
    mask = mask & (width > 0)
    bit = tl.load(places_ptr + index, mask=mask, other=0)
    word = page.to(tl.pointer_type(tl.int32)) + bit // 32
    value = tl.load(word, mask=mask, other=0)
    return word, bit % 32, (value >> (bit % 32)) & ((1 << width) - 1)


@triton.jit
def _scale_ptr(page, scale_offset, slot, SIDE: tl.constexpr):
    return (page + scale_offset).to(tl.pointer_type(tl.float16)) + scale_index(slot, SIDE)


@triton.jit
def _put(page, places_ptr, index, width, new, mask):
    """Write one plane of the codes by adding the difference to the field."""
    word, shift, old = _field(page, places_ptr, index, width, mask)
    change = ((new & ((1 << width) - 1)) - old) << shift
    tl.atomic_add(word, change, mask=mask & (width > 0))


@triton.jit
def _follow(
    move, packed_ptr, pointers_ptr, fresh_ptr, fresh_row, centre_ptr, direction_ptr, places_ptr, formats_ptr, steps_ptr,
    side_ptr, units, DIM: tl.constexpr, WIDE: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
    ROW: tl.constexpr, DTYPE: tl.constexpr, POSITION_BYTES: tl.constexpr, IMPORTANCE: tl.constexpr,
    CENTRED: tl.constexpr, AIMED: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Process one side of a chain, starting with its first move."""
    offs, one = tl.arange(0, WIDE)[None, :], tl.arange(0, 1)
    mask = offs < DIM
    ELEMENT: tl.constexpr = tl.float32 if DTYPE == "float32" else tl.float16 if DTYPE == "float16" else tl.bfloat16
    INTEGER: tl.constexpr = tl.int32 if DTYPE == "float32" else tl.int16
    while move >= 0:
        line = packed_ptr + move.to(tl.int64) * COLUMNS
        source_slot, source_tier = tl.load(line + 1), tl.load(line + 2)
        slot, tier = tl.load(line + 4), tl.load(line + 5)
        source = page_address(pointers_ptr, tl.load(line), units)
        page = page_address(pointers_ptr, tl.load(line + 3), units)
        # Per format: width, low and high plane, for K and V; offsets of V and of the scales.
        old_ptr, new_ptr = formats_ptr + tl.maximum(source_tier, 0) * 8, formats_ptr + tier * 8
        if source_tier < 0:
            address = fresh_ptr.to(tl.int64) + source_slot.to(tl.int64) * fresh_row
        else:
            address = source + SIDE * tl.load(old_ptr + 6) + source_slot * ROW
        if tier == 0:
            raw = tl.load(address.to(tl.pointer_type(INTEGER)) + offs, mask=mask)
            to = (page + SIDE * tl.load(new_ptr + 6) + slot * ROW).to(tl.pointer_type(INTEGER))
            tl.debug_barrier()
            tl.store(to + offs, raw, mask=mask)
        else:
            bits = tl.load(new_ptr + 3 * SIDE)
            if source_tier > 0:
                was = tl.load(old_ptr + 3 * SIDE)
                index = ((source_tier * 2 + SIDE) * 2 * PAGE + source_slot) * DIM + offs
                _, _, low = _field(source, places_ptr, index, tl.load(old_ptr + 3 * SIDE + 1), mask)
                _, _, high = _field(source, places_ptr, index + PAGE * DIM, tl.load(old_ptr + 3 * SIDE + 2), mask)
                codes = low | (high << 2)
                scale = tl.load(_scale_ptr(source, tl.load(old_ptr + 7), source_slot, SIDE) + one)
                longer = scale.to(tl.float32) * ROTATED**0.5
                x = (codes.to(tl.float32) - ((1 << was) - 1).to(tl.float32) * 0.5) * longer[:, None]
                x = tl.where(mask, x, 0.0)
            else:
                was = bits * 0
                codes = tl.zeros((1, WIDE), tl.int32)
                scale = tl.zeros((1,), tl.float16)
                x = tl.load(address.to(tl.pointer_type(ELEMENT)) + offs, mask=mask, other=0.0).to(tl.float32)
                centre = tl.zeros((1, WIDE), tl.float32)
                if CENTRED:
                    row = tl.load(line + 6).to(tl.int64) * DIM
                    centre = tl.load(centre_ptr + row + offs, mask=mask, other=0.0)
                x = transform(clean(x), centre, 1, WIDE, ROTATED, CENTRED)
            if was != bits:
                step, factor = tl.load(steps_ptr + bits), tl.load(steps_ptr + 9 * (1 + SIDE) + bits)
                weights, per_gain = tl.zeros((1, WIDE), tl.int32), 0
                if AIMED:
                    row = tl.load(line + 6).to(tl.int64) * DIM
                    weights = tl.load(direction_ptr + row + offs, mask=mask & (bits < 8), other=0).to(tl.int32)
                    per_gain = tl.load(steps_ptr + 27 + bits).to(tl.int32)
                codes, scale = quantize_rows(
                    x, bits, step, factor, 1, DIM, WIDE, ROTATED, weights, per_gain, AIMED
                )  # fmt: skip
            tl.debug_barrier()
            index = ((tier * 2 + SIDE) * 2 * PAGE + slot) * DIM + offs
            _put(page, places_ptr, index, tl.load(new_ptr + 3 * SIDE + 1), codes, mask)
            _put(page, places_ptr, index + PAGE * DIM, tl.load(new_ptr + 3 * SIDE + 2), codes >> 2, mask)
            tl.store(_scale_ptr(page, tl.load(new_ptr + 7), slot, SIDE) + one, scale)
        if SIDE == 0:
            POSITION: tl.constexpr = tl.int16 if POSITION_BYTES == 2 else tl.int32
            positions = (page + tl.load(side_ptr + 2 * tier)).to(tl.pointer_type(POSITION))
            tl.store(positions + slot, tl.load(line + 9).to(POSITION))
            if IMPORTANCE:
                values = (page + tl.load(side_ptr + 2 * tier + 1)).to(tl.pointer_type(tl.int32))
                tl.store(values + slot, tl.load(line + 10))
        tl.debug_barrier()
        move = tl.load(line + 7)


@triton.jit
def repack_kernel(
    packed_ptr, pointers_ptr, k_ptr, v_ptr, k_row, v_row, centre_ptr, direction_ptr, places_ptr, formats_ptr, steps_ptr,
    side_ptr, units, DIM: tl.constexpr, WIDE: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
    ROW: tl.constexpr, DTYPE: tl.constexpr, POSITION_BYTES: tl.constexpr, IMPORTANCE: tl.constexpr,
    CENTRED: tl.constexpr, AIMED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    move = tl.program_id(0)
    if tl.load(packed_ptr + move.to(tl.int64) * COLUMNS + 8) == 0:
        move = -1
    if tl.program_id(1) == 0:
        _follow(
            move, packed_ptr, pointers_ptr, k_ptr, k_row, centre_ptr, direction_ptr, places_ptr, formats_ptr, steps_ptr,
            side_ptr, units, DIM, WIDE, ROTATED, PAGE, ROW, DTYPE, POSITION_BYTES, IMPORTANCE, CENTRED, AIMED, COLUMNS,
            0,
        )  # fmt: skip
    else:
        _follow(
            move, packed_ptr, pointers_ptr, v_ptr, v_row, centre_ptr, direction_ptr, places_ptr, formats_ptr, steps_ptr,
            side_ptr, units, DIM, WIDE, ROTATED, PAGE, ROW, DTYPE, POSITION_BYTES, IMPORTANCE, False, False, COLUMNS, 1,
        )  # fmt: skip


@functools.cache  # graphs may hold its address
def tables(formats: tuple[Format, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bit of every value ``[tiers, 2 sides, 2 planes, P, D]``; numbers of a format ``[tiers, 8]``; steps, factors."""
    p, dim = formats[0].page_tokens, formats[0].head_dim
    places = torch.zeros(len(formats), 2, 2, p, dim, dtype=torch.int32)
    numbers = torch.zeros(len(formats), 8, dtype=torch.int32)
    for tier, f in enumerate(formats):
        numbers[tier, 6], numbers[tier, 7] = f.v_offset, f.scale_offset
        sides: tuple[tuple[fragments.Side, int, int], ...] = (
            ("k", f.k_bits, f.k_offset),
            ("v", f.v_bits, f.v_offset),
        )
        for side, (name, bits, offset) in enumerate(sides):
            if f.plain:
                continue
            numbers[tier, 3 * side] = bits
            planes = zip(fragments.planes(bits), fragments.places(bits, dim, p, name), strict=True)
            for plane, ((width, _), (byte, bit)) in enumerate(planes):
                numbers[tier, 3 * side + 1 + plane] = width
                places[tier, side, plane] = (offset + byte) * 8 + bit
    steps = torch.zeros(4, 9, dtype=torch.float32, device="cpu")
    for bits, step in GAUSSIAN_STEP.items():
        factors = (factor_of(gain[bits], dim, formats[-1].rotate) for gain in (K_GAIN, V_GAIN))
        steps[:, bits] = torch.tensor([step, *factors, aim_factor(K_GAIN[bits])])
    return places.to(device), numbers.to(device), steps.to(device)


def prepare(job: Job) -> Callable[[], None]:
    """One program per side of a move; those whose move begins a chain do the work."""
    formats, kind, device = tuple(kind.format for kind in job.page_formats), job.page_formats[0], job.pool.device
    lossy = formats[-1]
    places, numbers, steps = tables(formats, device)
    k, v = (job.packed if x is None else x.detach() for x in (job.k, job.v))
    offsets = torch.tensor([[kind.position_offset, kind.importance_offset] for kind in job.page_formats])
    offsets, centre, dim = offsets.to(device, non_blocking=True), job.centre.contiguous(), lossy.head_dim
    direction = centre if job.direction is None else job.direction.contiguous()

    def run() -> None:
        with torch.cuda.device_of(job.packed):
            repack_kernel[(len(job.packed), 2)](
                job.packed, job.pool.pointers, k, v, k.stride(0) * k.element_size(), v.stride(0) * v.element_size(),
                centre, direction, places, numbers, steps, offsets, job.pool.units,
                DIM=dim, WIDE=triton.next_power_of_2(dim), ROTATED=block_of(dim) if lossy.rotate else 1,
                PAGE=lossy.page_tokens, ROW=kind.row_bytes, DTYPE=str(kind.dtype).removeprefix("torch."),
                POSITION_BYTES=kind.position_dtype.itemsize, IMPORTANCE=kind.keeps_importance, CENTRED=lossy.centre,
                AIMED=job.direction is not None, COLUMNS=job.packed.shape[1], num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip

    return run
