"""``append_rows`` and ``write_rows`` on the CPU: rows are elements of numpy views of the pool's address space."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from kvstrata.layout.format import UNIT
from kvstrata.quant.calibration import factors

from .append_job import Job, Written

FEW_ROWS = 32  # up to this many rows, one memmove each is faster than an indexed write
ALIGNMENT = 32  # bytes: every row of a plain page begins at a multiple of this


def prepare_append(job: Job) -> Callable[[], None]:
    """Function that writes the rows without allocating."""
    buckets, layer, kind = job.buckets, job.layer, job.buckets.page_formats[0]
    space, p = buckets.pool.space, buckets.page_tokens
    assert space is not None, "the reference needs a pool on the CPU"
    if (job.lengths == 1).all():
        request, slot, position, importance = job.requests, job.count, job.position, job.importance
    else:
        index, number = job.rows()
        request, slot = job.requests[index], job.count[index] + number[:, None]
        position, importance = job.position[index] + number, job.importance[index]
    page, row = np.divmod(slot, p)
    handle = buckets.host_table[request[:, None], layer, buckets.heads, 0, page].astype(np.int64)
    size, few = kind.row_bytes, handle.size <= FEW_ROWS
    step = kind.position_dtype.itemsize
    positions = space.typed(np.int16 if step == 2 else np.int32)
    position_index = handle * (UNIT // step) + (row + kind.position_offset // step)
    by_token = None if job.by_token is None else job.by_token.numpy()
    k = job.k
    if job.balance is not None:
        k = k.detach() * factors(-job.balance[torch.from_numpy(request), layer]).to(k.dtype)
    sides = ((k, 0), (job.v, kind.v_offset))
    if few:
        to, heads = (handle * UNIT + row * size + space.address).reshape(-1).tolist(), handle.shape[1]
    else:
        row_index = handle * (UNIT // ALIGNMENT) + row * (size // ALIGNMENT)
        rows = [x.detach().contiguous().view(torch.int16).numpy().view(f"V{size}")[..., 0] for x, _ in sides]

    def write() -> None:
        if few:
            for x, start in sides:
                base, token, head = x.data_ptr(), x.stride(0) * x.element_size(), x.stride(1) * x.element_size()
                for i, address in enumerate(to):
                    ctypes.memmove(address + start, base + i // heads * token + i % heads * head, size)
        else:
            for values, (_, start) in zip(rows, sides, strict=True):
                space.runs(start, size, ALIGNMENT)[row_index] = values
        positions[position_index] = position[:, None]
        if kind.keeps_importance:
            values = importance[:, None] if by_token is None else by_token
            space.typed(np.float32)[handle * (UNIT // 4) + (row + kind.importance_offset // 4)] = values

    return write


def write_rows(written: Written) -> None:
    buckets, layer, n = written.buckets, written.layer, written.k.shape[0]
    ids = np.arange(n) if written.requests is None else written.requests.numpy().astype(np.int64)
    row = np.flatnonzero((ids >= 0) & (ids < len(buckets.host_count)))
    row = row[buckets.host_count[ids[row], layer, :, 0].min(1) > 0]
    if not len(row):
        return
    requests, ones = ids[row], np.ones(len(row), np.int64)
    length = written.device_length.numpy()[requests, layer].astype(np.int64)
    importance = (1 / length.astype(np.float32)) if written.reciprocal else np.zeros(len(row), np.float32)
    count = buckets.host_count[requests, layer, :, 0].astype(np.int64) - 1
    k, v = (x[torch.from_numpy(row)] for x in (written.k.detach(), written.v.detach()))
    places = (length - 1, count, k, v, importance, None, written.device_length, written.balance)
    prepare_append(Job(buckets, layer, requests, ones, *places))()
