"""`write_rows` on the CPU in a compiled loop: a decode step writes few bytes, and torch would need ten operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstrata.cache.storage.page_table import Buckets
from kvstrata.layout.format import UNIT
from kvstrata.layout.unpack_numba import BFLOAT16, FLOAT16, FLOAT32, TO_FLOAT
from kvstrata.loops import fast

from .append_job import Written

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
NO_REQUESTS, NO_BALANCE = np.empty(0, np.int32), np.empty((0, 0, 0, 0), np.int8)


def write_rows(written: Written) -> None:
    """`append.write_rows` of a cache on the CPU."""
    k, v = (x.detach().float().contiguous().numpy() for x in (written.k, written.v))
    requests = NO_REQUESTS if written.requests is None else written.requests.numpy()
    arguments = (
        *places(written.buckets, written.layer, written.device_length, written.balance), *offsets(written.buckets),
        KINDS[written.k.dtype], written.reciprocal, k, v, False, requests,
    )  # fmt: skip
    write(*arguments)


def places(buckets: Buckets, layer: int, lengths: torch.Tensor, balance: torch.Tensor | None) -> tuple[Any, ...]:
    """The pool as 4-byte, 2-byte and importance views; and tables of all layers, which are in C order."""
    space = buckets.pool.space
    assert space is not None, "the loops need a pool on the CPU"
    return (
        space.typed(np.uint32), space.typed(np.uint16), space.typed(np.float32), layer, buckets.host_table,
        buckets.host_count, lengths.numpy(), NO_BALANCE if balance is None else balance.numpy(),
    )  # fmt: skip


def offsets(buckets: Buckets) -> tuple[int, int, int, bool, int]:
    """Tokens of a page, and the offsets of V, positions and importance in plain pages, -1 for none."""
    page = buckets.page_formats[0]
    wide = page.position_dtype == torch.int32
    return buckets.page_tokens, page.v_offset, page.position_offset, wide, page.importance_offset


@fast
def write(
    words, halves, importance, layer, table, count, length, balance, page_tokens, v_offset, position_offset, wide,
    importance_offset, kind, reciprocal, k, v, clamp, requests,
):  # fmt: skip
    """Write float32 rows ``[n, heads, D]`` to the last slots of their requests; one compilation serves every dtype."""
    heads, dim = k.shape[1:]
    bits_k, bits_v = np.empty(dim, np.uint32), np.empty(dim, np.uint32)
    for i in range(len(k)):
        request = np.int64(requests[i]) if len(requests) else i
        if request < 0 or request >= len(count):
            continue
        tokens, least = length[request, layer], count[request, layer, 0, 0]
        for head in range(heads):
            least = min(least, count[request, layer, head, 0])
        if least <= 0:
            continue
        for head in range(heads):
            round_row(k[i, head], kind, clamp, bits_k)
            round_row(v[i, head], kind, clamp, bits_v)
            if len(balance):
                _scale(bits_k, balance[request, layer, head], kind)
            slot = np.int64(count[request, layer, head, 0]) - 1
            page, row = np.int64(table[request, layer, head, 0, slot // page_tokens]) * UNIT, slot % page_tokens
            if kind == FLOAT32:
                first, second = page // 4 + row * dim, (page + v_offset) // 4 + row * dim
                for d in range(dim):
                    words[first + d], words[second + d] = bits_k[d], bits_v[d]
            else:
                first, second = page // 2 + row * dim, (page + v_offset) // 2 + row * dim
                for d in range(dim):
                    halves[first + d], halves[second + d] = bits_k[d], bits_v[d]
            if wide:
                words[(page + position_offset) // 4 + row] = tokens - 1
            else:
                halves[(page + position_offset) // 2 + row] = tokens - 1
            if importance_offset >= 0:
                start = np.float32(1) / np.float32(tokens) if reciprocal else np.float32(0)
                importance[(page + importance_offset) // 4 + row] = start


@fast
def round_row(values, kind, clamp, out):
    """Convert float32 values to bits of ``kind`` in uint32, rounded to nearest even; ``clamp``: fp16 stays finite."""
    bits = values.view(np.uint32)
    for d in range(len(values)):
        if kind == FLOAT32:
            out[d] = bits[d]
        elif kind == BFLOAT16:
            odd = (bits[d] >> np.uint32(16)) & np.uint32(1)
            whole = (bits[d] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            out[d] = whole if values[d] == values[d] else np.uint32(0x7FC0)
        else:
            out[d] = _half(values[d], bits[d])
            if clamp and out[d] & 0x7FFF == 0x7C00:
                out[d] -= 1


@fast
def _half(value, bits):
    """Bits of a float32 as fp16."""
    size, sign = bits & np.uint32(0x7FFFFFFF), (bits >> np.uint32(16)) & np.uint32(0x8000)
    if size > np.uint32(0x7F800000):
        return sign | np.uint32(0x7E00)
    if size < np.uint32(113 << 23):  # subnormal
        return sign | np.uint32(np.rint(abs(value) * np.float32(2.0**24)))
    odd = (size >> np.uint32(13)) & np.uint32(1)
    size = min(size, np.uint32(143 << 23))
    return sign | ((size - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13))


@fast
def _scale(row, exponents, kind):
    """Divide values, given as bits, by ``2 ** exponents``, rounded as in torch; infinities and NaN stay."""
    number, factor = np.empty(1, np.uint32), np.empty(1, np.uint32)
    value, times = number.view(np.float32), factor.view(np.float32)
    for d in range(len(row)):
        factor[0] = np.uint32(127 - np.int32(exponents[d])) << np.uint32(23)
        bits = row[d]
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
            row[d] = (bits & np.uint32(0x8000)) | _half(value[0], number[0])
