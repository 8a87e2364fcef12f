"""``append_rows`` and ``write_rows`` in Triton: the portable GPU path, run by the interpreter in CI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kvstrata.cache.storage.page_table import Buckets
from kvstrata.layout.unpack_triton import page_address

from .append_job import Job, Written, metadata

INTEGER = {2: torch.int16, 4: torch.int32}


@triton.jit
def copy_token(
    k_ptr, v_ptr, balance_ptr, pointers_ptr, pages_ptr, slot, position, importance, units,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, V_OFFSET: tl.constexpr,
    POSITION_OFFSET: tl.constexpr, POSITION_BYTES: tl.constexpr, IMPORTANCE_OFFSET: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write one token of one head to its slot; DTYPE: dtype of K if it is divided by a balance, else ""."""
    page = page_address(pointers_ptr, tl.load(pages_ptr + slot // PAGE), units)
    row = slot % PAGE
    offs = tl.arange(0, WIDE)
    mask = offs < DIM
    element: tl.constexpr = k_ptr.dtype
    k = tl.load(k_ptr + offs, mask=mask, other=0)
    if DTYPE != "":
        FLOAT: tl.constexpr = tl.float32 if DTYPE == "float32" else tl.float16 if DTYPE == "float16" else tl.bfloat16
        x = k.to(FLOAT, bitcast=True).to(tl.float32)
        power = tl.load(balance_ptr + offs, mask=mask, other=0).to(tl.int32)
        x = x * ((127 - power) << 23).to(tl.float32, bitcast=True)  # exact
        k = x.to(FLOAT).to(k.dtype, bitcast=True)
    tl.store((page + row * ROW).to(element) + offs, k, mask=mask)
    tl.store((page + V_OFFSET + row * ROW).to(element) + offs, tl.load(v_ptr + offs, mask=mask), mask=mask)
    POSITION: tl.constexpr = tl.int16 if POSITION_BYTES == 2 else tl.int32
    tl.store((page + POSITION_OFFSET).to(tl.pointer_type(POSITION)) + row, position.to(POSITION))
    if IMPORTANCE_OFFSET >= 0:
        tl.store((page + IMPORTANCE_OFFSET).to(tl.pointer_type(tl.float32)) + row, importance)


@triton.jit
def append_kernel(
    k_ptr, v_ptr, balance_ptr, pointers_ptr, table_ptr, count_ptr, length_ptr, meta_ptr, importance_ptr,
    k_token, k_head, v_token, v_head, given, layer, layers, tiers, max_pages, units,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    V_OFFSET: tl.constexpr, POSITION_OFFSET: tl.constexpr, POSITION_BYTES: tl.constexpr,
    IMPORTANCE_OFFSET: tl.constexpr, DTYPE: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    index = tl.load(meta_ptr + given * (8 + HEADS) + token)
    about = meta_ptr + index * 8
    request, position, first, tokens = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    number = (token - first).to(tl.int32)
    slot = tl.load(meta_ptr + given * 8 + index * HEADS + head) + number
    bucket = ((request.to(tl.int64) * layers + layer) * HEADS + head) * tiers
    if BY_TOKEN:
        value = tl.load(importance_ptr + token * HEADS + head)
    else:
        value = tl.load(about + 4).to(tl.float32, bitcast=True)
    copy_token(
        k_ptr + token * k_token + head * k_head, v_ptr + token * v_token + head * v_head,
        balance_ptr + bucket // tiers * DIM, pointers_ptr, table_ptr + bucket * max_pages, slot, position + number,
        value, units, DIM, WIDE, PAGE, ROW, V_OFFSET, POSITION_OFFSET, POSITION_BYTES, IMPORTANCE_OFFSET, DTYPE,
    )  # fmt: skip
    if number == tokens - 1:
        tl.store(count_ptr + bucket, slot + 1)
        if head == 0:
            tl.store(length_ptr + request.to(tl.int64) * layers + layer, position + tokens)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, balance_ptr, pointers_ptr, table_ptr, count_ptr, length_ptr, requests_ptr,
    k_token, k_head, v_token, v_head, given, layer, layers, tiers, max_pages, units,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    V_OFFSET: tl.constexpr, POSITION_OFFSET: tl.constexpr, POSITION_BYTES: tl.constexpr,
    IMPORTANCE_OFFSET: tl.constexpr, DTYPE: tl.constexpr, NUMBERED: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    request = token
    if NUMBERED:
        request = tl.load(requests_ptr + token).to(tl.int64)
    if (request >= 0) & (request < given):
        length = tl.load(length_ptr + request * layers + layer)
        bucket = ((request * layers + layer) * HEADS + head) * tiers
        slot = tl.load(count_ptr + bucket) - 1
        importance = length.to(tl.float32) * 0.0
        if RECIPROCAL:
            importance = tl.div_rn(importance + 1.0, length.to(tl.float32))
        if slot >= 0:
            copy_token(
                k_ptr + token * k_token + head * k_head, v_ptr + token * v_token + head * v_head,
                balance_ptr + bucket // tiers * DIM, pointers_ptr, table_ptr + bucket * max_pages, slot, length - 1,
                importance, units, DIM, WIDE, PAGE, ROW, V_OFFSET, POSITION_OFFSET, POSITION_BYTES, IMPORTANCE_OFFSET,
                DTYPE,
            )  # fmt: skip


def _sizes(buckets: Buckets, k: torch.Tensor, balance: torch.Tensor | None) -> dict[str, Any]:
    """Constexpr sizes of tokens and pages that both kernels take."""
    kind, (_, heads, dim) = buckets.page_formats[0], k.shape
    return dict(
        HEADS=heads, DIM=dim, WIDE=triton.next_power_of_2(dim), PAGE=buckets.page_tokens, ROW=kind.row_bytes,
        V_OFFSET=kind.format.v_offset, POSITION_OFFSET=kind.position_offset,
        POSITION_BYTES=kind.position_dtype.itemsize, IMPORTANCE_OFFSET=kind.importance_offset, num_warps=1,
        DTYPE="" if balance is None else str(kind.dtype).removeprefix("torch."),
    )  # fmt: skip


def prepare_append(job: Job) -> Callable[[], None]:
    """A launch of one program per row and head."""
    buckets = job.buckets
    integer = INTEGER[buckets.page_formats[0].dtype.itemsize]
    k, v = (x.detach().view(integer) for x in (job.k, job.v))
    _, layers, _, tiers, max_pages = buckets.page_table.shape
    meta = buckets.pool.to_device(metadata(job))

    def run() -> None:
        with torch.cuda.device_of(k):
            append_kernel[k.shape[:2]](
                k, v, meta if job.balance is None else job.balance, buckets.pool.pointers, buckets.page_table,
                buckets.count, job.device_length, meta, meta if job.by_token is None else job.by_token, *k.stride()[:2],
                *v.stride()[:2],
                len(job.requests), job.layer, layers, tiers, max_pages, buckets.pool.units,
                BY_TOKEN=job.by_token is not None, **_sizes(buckets, k, job.balance),
            )  # fmt: skip

    return run


def write_rows(written: Written) -> None:
    """Launch; one program per row and head."""
    buckets, requests = written.buckets, written.requests
    integer = INTEGER[buckets.page_formats[0].dtype.itemsize]
    k, v = (x.detach().view(integer) for x in (written.k, written.v))
    given, layers, _, tiers, max_pages = buckets.page_table.shape
    with torch.cuda.device_of(k):
        write_kernel[k.shape[:2]](
            k, v, buckets.count if written.balance is None else written.balance, buckets.pool.pointers,
            buckets.page_table, buckets.count, written.device_length, buckets.count if requests is None else requests,
            *k.stride()[:2], *v.stride()[:2],
            given, written.layer, layers, tiers, max_pages, buckets.pool.units,
            NUMBERED=requests is not None, RECIPROCAL=written.reciprocal, **_sizes(buckets, k, written.balance),
        )  # fmt: skip
