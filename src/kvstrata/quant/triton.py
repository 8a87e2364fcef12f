"""``quantize_pages`` in Triton: the portable GPU path, run by the interpreter in CI.

A program writes one side of a page: it quantises the rows, leaves the codes as bytes in its own scratch buffer and
reads them back in the order of the page, which is given by tables (layout/fragments.py). The rotation is a product with
the Hadamard matrix in full float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvstrata.layout import Format, fragments, hadamard
from kvstrata.layout.unpack_triton import UNIT, scale_index

from . import reference
from .job import Job
from .reference import GAUSSIAN_STEP, K_GAIN, V_GAIN

LARGEST: tl.constexpr = tl.constexpr(reference.LARGEST)
SMALLEST_STEP: tl.constexpr = tl.constexpr(reference.SMALLEST_STEP)


@triton.jit
def clean(x):
    """NaN to 0, clamped to +-65504."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST)


@triton.jit
def to_scale(x):
    """Fitted scales clamped to 0 .. 65504 and rounded to fp16."""
    return tl.minimum(tl.maximum(x, 0.0), LARGEST).to(tl.float16)


@triton.jit
def _clean_rows(x_ptr, centre_ptr, row, stride_token, offs_d, mask_d, CENTRED: tl.constexpr):
    """Rows in float32 [P, columns]: centred, NaN to 0, clamped; zero in empty slots."""
    live = (row >= 0)[:, None] & mask_d[None, :]
    offs = tl.maximum(row, 0).to(tl.int64)[:, None] * stride_token + offs_d[None, :]
    x = tl.load(x_ptr + offs, mask=live, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(live, x - tl.load(centre_ptr + offs_d, mask=mask_d, other=0.0)[None, :], 0.0)
    return clean(x)


@triton.jit
def _quantize_side(
    x_ptr, centre_ptr, hadamard_ptr, table_ptr, high_table_ptr, scratch_ptr, code_ptr, scale_ptr, row, stride_token,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
    GAIN: tl.constexpr, ROTATE: tl.constexpr, CENTRED: tl.constexpr, CODE_BYTES: tl.constexpr, BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    offs_d = tl.arange(0, WIDE)
    if ROTATE:
        x = tl.zeros((TOKENS, WIDE), tl.float32)
        for first in tl.static_range(0, DIM, 16):
            offs_k = first + tl.arange(0, 16)
            part = _clean_rows(x_ptr, centre_ptr, row, stride_token, offs_k, offs_k < DIM, CENTRED)
            h = tl.load(hadamard_ptr + offs_k[:, None] * DIM + offs_d[None, :], mask=offs_d[None, :] < DIM, other=0.0)
            x = tl.dot(part, h, x, input_precision="ieee")
        BLOCK_DIM: tl.constexpr = DIM & -DIM
        FACTOR: tl.constexpr = BLOCK_DIM**-0.5
        x = x * FACTOR
    else:
        x = _clean_rows(x_ptr, centre_ptr, row, stride_token, offs_d, offs_d < DIM, CENTRED)
    if BITS == 8:
        step = tl.max(tl.abs(x), axis=1) * (2.0 / 255.0)
    else:
        step = tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=1), tl.full((TOKENS,), DIM, tl.float32))) * STEP
    step = tl.maximum(step, SMALLEST_STEP)
    inverse = tl.div_rn(tl.full((TOKENS,), 1.0, tl.float32), step)
    HALF: tl.constexpr = 1 << (BITS - 1)
    product = x.to(tl.float64) * inverse.to(tl.float64)[:, None]  # exact
    floor = tl.minimum(tl.maximum(tl.floor(product).to(tl.float32), -HALF), HALF - 1)
    level = tl.where(offs_d[None, :] < DIM, floor + 0.5, 0.0)
    scale = tl.div_rn(tl.sum(x * level, axis=1), tl.sum(level * level, axis=1)) * GAIN
    offs_p = tl.arange(0, TOKENS)
    tl.store(scale_ptr + scale_index(offs_p, SIDE), to_scale(scale))

    codes = (floor.to(tl.int32) + HALF).to(tl.uint8)
    tl.store(scratch_ptr + offs_p[:, None] * DIM + offs_d[None, :], codes, mask=offs_d[None, :] < DIM)
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
    k_ptr, v_ptr, pool_ptr, pages_ptr, source_ptr, heads_ptr, centre_ptr, centres_ptr, hadamard_ptr,
    k_table_ptr, k_high_ptr, v_table_ptr, v_high_ptr, scratch_ptr,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, K_GAIN: tl.constexpr, V_GAIN: tl.constexpr, K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr, ROTATE: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0)
    row = tl.load(source_ptr + page * TOKENS + tl.arange(0, TOKENS))
    head = tl.load(heads_ptr + page).to(tl.int64)
    page_ptr = pool_ptr + tl.load(pages_ptr + page).to(tl.int64) * UNIT
    scale_ptr = (page_ptr + K_BYTES + V_BYTES).to(tl.pointer_type(tl.float16))
    scratch_ptr += (page.to(tl.int64) * 2 + tl.program_id(1)) * (TOKENS * DIM)
    if tl.program_id(1) == 0:
        if CENTRED:
            centre_ptr += tl.load(centres_ptr + page).to(tl.int64) * DIM
        _quantize_side(
            k_ptr + head * k_stride_head, centre_ptr, hadamard_ptr, k_table_ptr, k_high_ptr, scratch_ptr, page_ptr,
            scale_ptr, row, k_stride_token, DIM, WIDE, TOKENS, K_BITS, K_STEP, K_GAIN, ROTATE, CENTRED, K_BYTES, BLOCK,
            0,
        )  # fmt: skip
    else:
        _quantize_side(
            v_ptr + head * v_stride_head, centre_ptr, hadamard_ptr, v_table_ptr, v_high_ptr, scratch_ptr,
            page_ptr + K_BYTES, scale_ptr, row, v_stride_token, DIM, WIDE, TOKENS, V_BITS, V_STEP, V_GAIN, ROTATE,
            False, V_BYTES, BLOCK, 1,
        )  # fmt: skip


def _tables(bits: int, format: Format, side: fragments.Side, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes whose low and high planes are in each byte; without a high plane, the low one twice."""
    tables = fragments.sources(bits, format.head_dim, format.page_tokens, side, device)
    return tables[0], tables[-1]


def quantize_pages(job: Job) -> None:
    """Launch for checked arguments; two programs per page."""
    k, v, pool, pages, source, heads, format, centre, centres = job
    dim, tokens, device = format.head_dim, format.page_tokens, pool.device
    scratch = torch.empty(pages.shape[0] * 2 * tokens * dim, dtype=torch.uint8, device=device)
    signs = hadamard(dim, device).sign()
    with torch.cuda.device_of(pool):
        quantize_kernel[(pages.shape[0], 2)](
            k, v, pool, pages, source, heads, signs if centre is None else centre.contiguous(),
            heads if centres is None else centres, signs,
            *_tables(format.k_bits, format, "k", device), *_tables(format.v_bits, format, "v", device), scratch,
            *k.stride()[:2], *v.stride()[:2],
            DIM=dim, WIDE=triton.next_power_of_2(dim), TOKENS=tokens, K_BITS=format.k_bits, V_BITS=format.v_bits,
            K_STEP=GAUSSIAN_STEP[format.k_bits], V_STEP=GAUSSIAN_STEP[format.v_bits],
            K_GAIN=K_GAIN[format.k_bits], V_GAIN=V_GAIN[format.v_bits], K_BYTES=format.k_bytes, V_BYTES=format.v_bytes,
            ROTATE=format.rotate, CENTRED=centre is not None, BLOCK=1024, num_warps=8 if dim > 128 else 4,
        )  # fmt: skip
