"""`write_rows` on the CPU in a compiled loop: a decode step writes few bytes, and torch would take ten operations."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.layout.format import UNIT
from kvstrata.layout.unpack_numba import BFLOAT16, FLOAT16, FLOAT32, TO_FLOAT, compiled

from .append_job import Written

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
SMALLEST_NORMAL = np.float32(2.0**-14)  # of fp16
NO_REQUESTS, NO_BALANCE = np.empty(0, np.int32), np.empty((0, 0, 0, 0), np.int8)


def write_rows(written: Written) -> None:
    """`append.write_rows` of a cache on the CPU."""
    buckets, page = written.buckets, written.buckets.page_formats[0]
    space = buckets.pool.space
    assert space is not None, "the loops need a pool on the CPU"
    k, v = (x.detach().contiguous() for x in (written.k, written.v))
    words = np.uint32 if k.dtype == torch.float32 else np.uint16
    k, v = (x.view(torch.int32 if k.dtype == torch.float32 else torch.int16).numpy().view(words) for x in (k, v))
    _write(
        space.typed(words), space.typed(np.int16), space.typed(np.int32), space.typed(np.float32), k, v,
        NO_REQUESTS if written.requests is None else written.requests.numpy(), written.layer, buckets.host_table,
        buckets.host_count, written.device_length.numpy(),
        NO_BALANCE if written.balance is None else written.balance.numpy(),
        KINDS[written.k.dtype], buckets.page_tokens, page.v_offset, page.position_offset,
        page.position_dtype.itemsize == 4, page.importance_offset if page.keeps_importance else -1, written.reciprocal,
    )  # fmt: skip


@compiled
def _write(
    rows, short_positions, positions, importance, k, v, requests, layer, table, count, length, balance, kind,
    page_tokens, v_offset, position_offset, wide, importance_offset, reciprocal,
):  # fmt: skip
    heads, dim = k.shape[1:]
    size = k.itemsize
    for i in range(len(k)):
        request = np.int64(requests[i]) if len(requests) else i
        if request < 0 or request >= len(count) or count[request, layer, :, 0].min() <= 0:
            continue
        tokens = length[request, layer]
        for head in range(heads):
            slot = np.int64(count[request, layer, head, 0]) - 1
            page = np.int64(table[request, layer, head, 0, slot // page_tokens]) * UNIT
            row = slot % page_tokens
            first = page // size + row * dim
            for d in range(dim):
                rows[first + d] = k[i, head, d]
                rows[first + v_offset // size + d] = v[i, head, d]
            if len(balance):
                _scale(rows[first : first + dim], balance[request, layer, head], kind)
            if wide:
                positions[(page + position_offset) // 4 + row] = tokens - 1
            else:
                short_positions[(page + position_offset) // 2 + row] = tokens - 1
            if importance_offset >= 0:
                start = np.float32(1) / np.float32(tokens) if reciprocal else np.float32(0)
                importance[(page + importance_offset) // 4 + row] = start


@compiled
def _scale(row, exponents, kind):
    """Divide numbers, given as bits, by ``2 ** exponents``; rounds as torch does, and leaves infinities and NaN."""
    number, factor = np.empty(1, np.uint32), np.empty(1, np.uint32)
    value, times = number.view(np.float32), factor.view(np.float32)
    for d in range(len(row)):
        if exponents[d] == 0:
            continue
        factor[0] = np.uint32(127 - np.int32(exponents[d])) << np.uint32(23)
        bits = np.uint32(row[d])
        if kind == FLOAT32:
            number[0] = bits
            value[0] *= times[0]
            row[d] = number[0]
        elif kind == BFLOAT16:
            number[0] = bits << np.uint32(16)
            value[0] *= times[0]
            odd = (number[0] >> np.uint32(16)) & np.uint32(1)
            if bits & np.uint32(0x7F80) != np.uint32(0x7F80):
                row[d] = (number[0] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        elif bits & np.uint32(0x7C00) != np.uint32(0x7C00):
            number[0] = (bits & np.uint32(0x7FFF)) << np.uint32(13)
            value[0] *= TO_FLOAT * times[0]
            if value[0] < SMALLEST_NORMAL:
                size = np.uint32(np.rint(value[0] * np.float32(2.0**24)))
            else:
                odd = (number[0] >> np.uint32(13)) & np.uint32(1)
                size = (number[0] - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
            row[d] = (bits & np.uint32(0x8000)) | min(size, np.uint32(0x7C00))
