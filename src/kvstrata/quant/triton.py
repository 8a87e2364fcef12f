"""``quantize_pages`` in Triton: the portable GPU path, run by the interpreter in CI.

A program writes one side of a page: it quantises the rows, leaves the codes as bytes in its own scratch buffer and
reads them back in the order of the page, which is given by tables (layout/fragments.py).

The arithmetic of quant/reference.py is here for all Triton kernels that quantise. It gives the same bits only if they
are launched with ``enable_fp_fusion=False``: a product and a sum, each rounded, must not become one operation.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvstrata.layout import Format, fragments
from kvstrata.layout.unpack_triton import UNIT, butterflies, scale_index

from . import reference
from .job import Job
from .reference import GAUSSIAN_STEP, K_GAIN, V_GAIN

LARGEST: tl.constexpr = tl.constexpr(reference.LARGEST)
SMALLEST_STEP: tl.constexpr = tl.constexpr(reference.SMALLEST_STEP)
LEAST_POWER: tl.constexpr = tl.constexpr(reference.LEAST_POWER)


@triton.jit
def clean(x):
    """NaN to 0, clamped to +-65504."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST)


@triton.jit
def on_grid(x, BLOCK: tl.constexpr):
    """Clean rows ``x [ROWS, WIDE]``, rounded to the grid of `reference.on_grid`."""
    most = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST_POWER)
    power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = (power * (3 * BLOCK))[:, None]
    return (x + magic) - magic


@triton.jit
def transform(x, centre, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr):
    """Clean rows ``[ROWS, WIDE]``, rotated in blocks of BLOCK (1: not rotated), less ``centre [1, WIDE]`` if CENTRED.

    They are sqrt(BLOCK) times too long. Columns past the head dim, zero in both, stay zero.
    """
    if BLOCK > 1:
        x = butterflies(on_grid(x, BLOCK), ROWS, WIDE, 1, BLOCK)
    if CENTRED:
        x = x - butterflies(centre, 1, WIDE, 1, BLOCK)
    return x


@triton.jit
def row_sum(x, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Sums ``[ROWS]`` of ``x [ROWS, WIDE]`` in the order of all backends; every ``tl.sum`` adds two values."""
    x = tl.sum(tl.reshape(x, (ROWS, WIDE // 16, 2, 8)), axis=2)
    for i in tl.static_range(4):
        if (32 << i) <= WIDE:  # the second half of the blocks of 16 dims to the first
            x = tl.sum(tl.reshape(x, (ROWS, 2, WIDE // (32 << i), 8)), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 2, 2)), axis=3)
    return tl.sum(tl.sum(x, axis=1), axis=1)


@triton.jit
def aim(z, weights, half, per_gain):
    """Codes of `reference.aim` int32 ``[ROWS, WIDE]``; ``weights`` int32 ``[ROWS or 1, WIDE]``, half of all levels."""
    most = 256 * half - 64
    base = 8 * tl.minimum(tl.maximum(z, -most), most) + 2048 * half
    along = tl.sum(z * weights, axis=1).to(tl.int64) * per_gain
    wanted = (along >> 12).to(tl.int32) + (256 * half - 128) * tl.sum(weights, axis=1)
    rest = wanted - 256 * tl.sum((base >> 11) * weights, axis=1)
    least, shift, best = tl.abs(rest), rest * 0, rest * 0
    for i in tl.static_range(4):  # AIM_STEPS
        shift += tl.where(rest > 0, 8 >> i, -(8 >> i))
        rest = wanted - 256 * tl.sum(((base + shift[:, None] * weights) >> 11) * weights, axis=1)
        best = tl.where(tl.abs(rest) < least, shift, best)
        least = tl.minimum(tl.abs(rest), least)
    return (base + best[:, None] * weights) >> 11


@triton.jit
def quantize_rows(
    x, bits, gaussian_step, factor, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    weights=0, per_gain=0, AIMED: tl.constexpr = False,
):  # fmt: skip
    """Codes int32 ``[ROWS, WIDE]`` and fp16 scales ``[ROWS]`` of transformed rows that are zero past DIM.

    ``bits`` and ``gaussian_step``, that of this width, are constants or known at run time only; so is ``factor``, from
    `factor_of`. BLOCK is that of `transform`. If AIMED, ``weights`` are a direction int32 ``[ROWS or 1, WIDE]``, zero
    past DIM and for 8 bits, and ``per_gain`` is from `reference.aim_factor`.
    """
    if bits == 8:
        step = tl.max(tl.abs(x), axis=1) * (2.0 / 255.0)
    else:
        mean = tl.div_rn(row_sum(x * x, ROWS, WIDE), tl.full((ROWS,), DIM, tl.float32))
        step = tl.sqrt_rn(mean) * gaussian_step
    step = tl.maximum(step, SMALLEST_STEP * BLOCK**0.5)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), step) * 256.0
    z = tl.floor(x.to(tl.float64) * inverse.to(tl.float64)[:, None]).to(tl.int32)  # the product is exact
    half = 1 << (bits - 1)
    if AIMED:
        code = aim(z, weights, half, per_gain) - half
    else:
        code = tl.minimum(tl.maximum(z >> 8, -half), half - 1)
    level = tl.where(tl.arange(0, WIDE)[None, :] < DIM, 2 * code + 1, 0)  # in halves of a step
    ratio = tl.div_rn(tl.sum(z * level, axis=1).to(tl.float32), tl.sum(level * level, axis=1).to(tl.float32))
    scale = tl.minimum(tl.maximum(ratio * (step * factor), 0.0), LARGEST).to(tl.float16)
    return code + half, scale


def factor_of(gain: float, dim: int, rotate: bool) -> float:
    """The constant in `reference.refit`, a float32, for levels counted in halves and values in 1/256 of a step."""
    return float(np.float32(reference.length(dim, rotate)) * np.float32(gain)) / 128


@triton.jit
def _quantize_side(
    x_ptr, centre_ptr, direction_ptr, table_ptr, high_table_ptr, scratch_ptr, code_ptr, scale_ptr, source_ptr,
    stride_token,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
    GAIN: tl.constexpr, ROTATE: tl.constexpr, CENTRED: tl.constexpr, AIM: tl.constexpr, CODE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    offs_d = tl.arange(0, WIDE)[None, :]
    mask_d = offs_d < DIM
    ROTATED: tl.constexpr = (DIM & -DIM) if ROTATE else 1
    ROWS: tl.constexpr = min(TOKENS, (2048 if AIM > 0 else 4096) // WIDE)  # at a time, for the registers
    centre = tl.zeros((1, WIDE), tl.float32)
    if CENTRED:
        centre = tl.load(centre_ptr + offs_d, mask=mask_d, other=0.0)
    weights = tl.zeros((1, WIDE), tl.int32)
    if AIM > 0:
        weights = tl.load(direction_ptr + offs_d, mask=mask_d, other=0).to(tl.int32)
    for first in range(0, TOKENS, ROWS):
        offs_p = first + tl.arange(0, ROWS)
        row = tl.load(source_ptr + offs_p)[:, None]
        x = x_ptr + tl.maximum(row, 0).to(tl.int64) * stride_token + offs_d
        x = clean(tl.load(x, mask=(row >= 0) & mask_d, other=0.0).to(tl.float32))
        x = tl.where(row >= 0, transform(x, centre, ROWS, WIDE, ROTATED, CENTRED), 0.0)  # zero in empty slots
        codes, scale = quantize_rows(x, BITS, STEP, GAIN, ROWS, DIM, WIDE, ROTATED, weights, AIM, AIM > 0)
        tl.store(scale_ptr + scale_index(offs_p, SIDE), scale)
        tl.store(scratch_ptr + offs_p[:, None] * DIM + offs_d, codes.to(tl.uint8), mask=mask_d)
    tl.debug_barrier()
    for first in range(0, CODE_BYTES, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < CODE_BYTES
        WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
        out = tl.zeros((BLOCK,), tl.int32)
        for i in tl.static_range(8 // WIDTH):
            value = tl.load(table_ptr + i * CODE_BYTES + offs, mask=mask, other=TOKENS * DIM)
            code = tl.load(scratch_ptr + value, mask=value < TOKENS * DIM, other=0).to(tl.int32)
            out = out | (code & ((1 << WIDTH) - 1)) << (i * WIDTH)
        if BITS == 3:
            for i in tl.static_range(8):
                value = tl.load(high_table_ptr + i * CODE_BYTES + offs, mask=mask, other=TOKENS * DIM)
                code = tl.load(scratch_ptr + value, mask=value < TOKENS * DIM, other=0).to(tl.int32)
                out = out | (code >> 2) << i
        tl.store(code_ptr + offs, out.to(tl.uint8), mask=mask)


@triton.jit
def quantize_kernel(
    k_ptr, v_ptr, pool_ptr, pages_ptr, source_ptr, heads_ptr, centre_ptr, direction_ptr, centres_ptr,
    k_table_ptr, k_high_ptr, v_table_ptr, v_high_ptr, scratch_ptr,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, K_GAIN: tl.constexpr, V_GAIN: tl.constexpr, K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr, ROTATE: tl.constexpr, CENTRED: tl.constexpr, AIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AIM is `reference.aim_factor` for K, or 0 without a direction."""
    page = tl.program_id(0)
    source_ptr += page * TOKENS
    head = tl.load(heads_ptr + page).to(tl.int64)
    page_ptr = pool_ptr + tl.load(pages_ptr + page).to(tl.int64) * UNIT
    scale_ptr = (page_ptr + K_BYTES + V_BYTES).to(tl.pointer_type(tl.float16))
    scratch_ptr += (page.to(tl.int64) * 2 + tl.program_id(1)) * (TOKENS * DIM)
    if tl.program_id(1) == 0:
        if CENTRED:
            centre_ptr += tl.load(centres_ptr + page).to(tl.int64) * DIM
        if AIM > 0:
            direction_ptr += tl.load(centres_ptr + page).to(tl.int64) * DIM
        _quantize_side(
            k_ptr + head * k_stride_head, centre_ptr, direction_ptr, k_table_ptr, k_high_ptr, scratch_ptr, page_ptr,
            scale_ptr, source_ptr, k_stride_token, DIM, WIDE, TOKENS, K_BITS, K_STEP, K_GAIN, ROTATE, CENTRED, AIM,
            K_BYTES, BLOCK, 0,
        )  # fmt: skip
    else:
        _quantize_side(
            v_ptr + head * v_stride_head, centre_ptr, direction_ptr, v_table_ptr, v_high_ptr, scratch_ptr,
            page_ptr + K_BYTES, scale_ptr, source_ptr, v_stride_token, DIM, WIDE, TOKENS, V_BITS, V_STEP, V_GAIN,
            ROTATE, False, 0, V_BYTES, BLOCK, 1,
        )  # fmt: skip


def _tables(bits: int, format: Format, side: fragments.Side, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes whose low and high planes are in each byte; without a high plane, the low one twice."""
    tables = fragments.sources(bits, format.head_dim, format.page_tokens, side, device)
    return tables[0], tables[-1]


def quantize_pages(job: Job) -> None:
    """Launch for checked arguments; two programs per page."""
    k, v, pool, pages, source, heads, format, centre, centres, direction = job
    dim, tokens, device = format.head_dim, format.page_tokens, pool.device
    scratch = torch.empty(pages.shape[0] * 2 * tokens * dim, dtype=torch.uint8, device=device)
    k_gain, v_gain = K_GAIN[format.k_bits], V_GAIN[format.v_bits]
    aims = direction is not None and format.k_bits != 8
    with torch.cuda.device_of(pool):
        quantize_kernel[(pages.shape[0], 2)](
            k, v, pool, pages, source, heads, k if centre is None else centre.contiguous(),
            k if direction is None else direction.contiguous(), heads if centres is None else centres,
            *_tables(format.k_bits, format, "k", device), *_tables(format.v_bits, format, "v", device), scratch,
            *k.stride()[:2], *v.stride()[:2],
            DIM=dim, WIDE=triton.next_power_of_2(dim), TOKENS=tokens, K_BITS=format.k_bits, V_BITS=format.v_bits,
            K_STEP=GAUSSIAN_STEP[format.k_bits], V_STEP=GAUSSIAN_STEP[format.v_bits],
            K_GAIN=factor_of(k_gain, dim, format.rotate), V_GAIN=factor_of(v_gain, dim, format.rotate),
            K_BYTES=format.k_bytes, V_BYTES=format.v_bytes, ROTATE=format.rotate, CENTRED=centre is not None,
            AIM=reference.aim_factor(k_gain) if aims else 0, BLOCK=1024, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
