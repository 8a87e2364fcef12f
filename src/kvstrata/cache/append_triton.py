"""``append_rows`` in Triton: the portable GPU path, and in CI the one that runs under the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .append_op import Job, meta_of
from .pages_triton import page_address

INTEGER = {2: torch.int16, 4: torch.int32}


@triton.jit
def append_kernel(
    k_ptr, v_ptr, pointers_ptr, table_ptr, count_ptr, length_ptr, meta_ptr, importance_ptr,
    k_token, k_head, v_token, v_head, given, layer, layers, tiers, max_pages, units,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    V_OFFSET: tl.constexpr, POSITION_OFFSET: tl.constexpr, POSITION_BYTES: tl.constexpr,
    IMPORTANCE_OFFSET: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    index = tl.load(meta_ptr + given * (8 + HEADS) + token)
    about = meta_ptr + index * 8
    request, position, first, tokens = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    number = (token - first).to(tl.int32)
    slot = tl.load(meta_ptr + given * 8 + index * HEADS + head) + number
    bucket = ((request.to(tl.int64) * layers + layer) * HEADS + head) * tiers
    page = page_address(pointers_ptr, tl.load(table_ptr + bucket * max_pages + slot // PAGE), units)
    row = slot % PAGE
    offs = tl.arange(0, WIDE)
    mask = offs < DIM
    element: tl.constexpr = k_ptr.dtype
    k = tl.load(k_ptr + token * k_token + head * k_head + offs, mask=mask)
    tl.store((page + row * ROW).to(element) + offs, k, mask=mask)
    v = tl.load(v_ptr + token * v_token + head * v_head + offs, mask=mask)
    tl.store((page + V_OFFSET + row * ROW).to(element) + offs, v, mask=mask)
    POSITION: tl.constexpr = tl.int16 if POSITION_BYTES == 2 else tl.int32
    tl.store((page + POSITION_OFFSET).to(tl.pointer_type(POSITION)) + row, (position + number).to(POSITION))
    if IMPORTANCE_OFFSET >= 0:
        if BY_TOKEN:
            value = tl.load(importance_ptr + token * HEADS + head)
        else:
            value = tl.load(about + 4).to(tl.float32, bitcast=True)
        tl.store((page + IMPORTANCE_OFFSET).to(tl.pointer_type(tl.float32)) + row, value)
    if number == tokens - 1:
        tl.store(count_ptr + bucket, slot + 1)
        if head == 0:
            tl.store(length_ptr + request.to(tl.int64) * layers + layer, position + tokens)


def append_rows(job: Job) -> None:
    """Launch; one program per row and head."""
    buckets, kind = job.buckets, job.buckets.kinds[0]
    tokens, heads, dim = job.k.shape
    integer = INTEGER[kind.dtype.itemsize]
    k, v = (x.detach().view(integer) for x in (job.k, job.v))
    _, layers, _, tiers, max_pages = buckets.table.shape
    meta = buckets.pool.to_device(meta_of(job))
    with torch.cuda.device_of(k):
        append_kernel[(tokens, heads)](
            k, v, buckets.pool.pointers, buckets.table, buckets.count, job.device_length, meta,
            meta if job.by_token is None else job.by_token, *k.stride()[:2], *v.stride()[:2],
            len(job.requests), job.layer, layers, tiers, max_pages, buckets.pool.units,
            HEADS=heads, DIM=dim, WIDE=triton.next_power_of_2(dim), PAGE=buckets.page_tokens, ROW=kind.row_bytes,
            V_OFFSET=kind.format.v_offset, POSITION_OFFSET=kind.position_offset,
            POSITION_BYTES=kind.position_dtype.itemsize, IMPORTANCE_OFFSET=kind.importance_offset,
            BY_TOKEN=job.by_token is not None, num_warps=1,
        )  # fmt: skip
