"""``append_rows`` and ``write_rows`` in CUDA C++: from arguments to one launch of ``append.cu``.

The kernel also sets counts and lengths, so the host never waits. What it needs to know arrives in one small copy. A
decode step, one token a request, needs nothing new: counts and lengths are read on the device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.quant.op import CXX

from .append_job import Job, Written, metadata
from .launches import kernel as kernel_of
from .launches import prepare

SOURCE = Path(__file__).with_name("append.cu")
KERNELS = ("append_rows", "append_one", "write_last")
WARPS = 8  # per block; a warp copies K and V of one token and head
# struct Params: k, v, pointers, table, count, length, meta, importance, balance; strides in bytes; int32 sizes.
PARAMS = struct.Struct("9Q 4q 13i4x")


def width_of(k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes of the widest access that addresses and strides allow: 16, 8, 4 or 2."""
    size = k.element_size()
    by_rows = 16 | k.shape[2] * size
    for x in (k, v):
        by_rows |= x.data_ptr() | x.stride(0) * size | x.stride(1) * size
    return by_rows & -by_rows


def entry_of(
    head_dim: int,
    itemsize: int,
    width: int,
    position_bytes: int,
    keeps_importance: bool,
    kernel: str = KERNELS[0],
    balanced: torch.dtype | None = None,
) -> str:
    """The template instantiation for pages of a cache; ``balanced``: dtype of rows whose K has a balance."""
    position, keeps = "short" if position_bytes == 2 else "int", str(keeps_importance).lower()
    dtype = "" if balanced is None else f", {CXX[balanced]}"
    return f"{kernel}<{head_dim * itemsize}, {width}, {position}, {keeps}{dtype}>"


def _ids(job: Job) -> torch.Tensor:
    """The requests on the device, int32, cached: they rarely change from step to step."""
    kept, key = job.buckets.ids, job.requests.tobytes()
    if key not in kept:
        if len(kept) >= 64:
            kept.clear()
        kept[key] = job.buckets.pool.to_device(job.requests.astype(np.int32))
    return kept[key]


def prepare_append(job: Job) -> Callable[[], None]:
    """A prepared launch; calling it allocates nothing."""
    ones = (job.position + 1).astype(np.float32)
    reciprocal = bool(job.importance.any())
    one = job.by_token is None and bool((job.lengths == 1).all())
    one = one and np.array_equal(job.importance, 1 / ones if reciprocal else np.zeros_like(ones))
    meta = _ids(job) if one else job.buckets.pool.to_device(metadata(job))
    kernel, arguments = KERNELS[one], (meta, job.by_token, job.balance, len(job.requests), reciprocal)
    return _prepare(kernel, job.buckets, job.layer, job.k, job.v, job.device_length, *arguments)


def write_rows(written: Written) -> None:
    """Launch ``write_last``."""
    arguments = (written.requests, None, written.balance, len(written.buckets.host_count), written.reciprocal)
    _prepare("write_last", written.buckets, written.layer, written.k, written.v, written.device_length, *arguments)()


def _prepare(
    kernel: str,
    buckets: Buckets,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    device_length: torch.Tensor,
    meta: torch.Tensor | None,
    by_token: torch.Tensor | None,
    balance: torch.Tensor | None,
    given: int,
    reciprocal: bool,
) -> Callable[[], None]:
    """A launch that keeps the tensors it reads alive."""
    kind, pool, size, device = buckets.page_formats[0], buckets.pool, k.element_size(), k.get_device()
    tokens, heads, dim = k.shape
    _, layers, _, tiers, max_pages = buckets.page_table.shape
    params = PARAMS.pack(
        k.data_ptr(), v.data_ptr(), pool.pointers.data_ptr(), buckets.page_table.data_ptr(), buckets.count.data_ptr(),
        device_length.data_ptr(), *(0 if x is None else x.data_ptr() for x in (meta, by_token, balance)),
        *(n * size for x in (k, v) for n in x.stride()[:2]),
        tokens, heads, given, layer, layers, tiers, max_pages, buckets.page_tokens, pool.units,
        kind.format.v_offset, kind.position_offset, kind.importance_offset, reciprocal,
    )  # fmt: skip
    balanced = None if balance is None else k.dtype
    entry = entry_of(dim, size, width_of(k, v), kind.position_dtype.itemsize, kind.keeps_importance, kernel, balanced)
    by_rows = kernel == "append_rows"
    grid, warps = (-(-tokens * heads // WARPS), WARPS) if by_rows else (tokens, min(heads, WARPS))

    def build() -> list[jit.Launch]:
        return [jit.Launch(kernel_of(SOURCE, entry, device), grid, 32 * warps, params)]

    return prepare(device, build, (k, v, meta, by_token, balance)).run
