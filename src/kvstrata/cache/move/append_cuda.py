"""``append_rows`` and ``write_rows`` in CUDA C++: from arguments to one launch of ``append.cu``.

The kernel also sets counts and lengths, so the host never waits. Its metadata arrives in one small copy. A decode step,
one token per request, uploads nothing: counts and lengths are read on the device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.quant.op import CXX

from .append_job import Job, Written, metadata
from .launches import Launches, prepare
from .launches import kernel as kernel_of

SOURCE = Path(__file__).with_name("append.cu")
KERNELS = ("append_rows", "append_one", "write_last")
WARPS = 8  # per block; a warp copies K and V of one token and head
# struct Params: k, v, pointers, table, count, length, meta, importance, balance; strides in bytes; int32 sizes.
PARAMS = struct.Struct("9Q 4q 13i4x")
LAYER = struct.calcsize("9Q 4q 3i") // 4  # index as one of the struct's int32 fields


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


def kernels_needed(plain: PageFormat, balanced: bool) -> list[jit.Named]:
    """Kernels that write rows into pages of a cache, for rows aligned to 16 bytes; ``balanced``: it has a balance."""
    sizes = (plain.format.head_dim, plain.dtype.itemsize, 16, plain.position_dtype.itemsize, plain.keeps_importance)
    return [(SOURCE, entry_of(*sizes, kernel, plain.dtype if balanced else None)) for kernel in KERNELS]


def prepare_append(job: Job) -> Callable[[], None]:
    """Prepared launch; calling it allocates nothing."""
    ones = (job.position + 1).astype(np.float32)
    reciprocal = bool(job.importance.any())
    one = job.by_token is None and bool((job.lengths == 1).all())
    one = one and np.array_equal(job.importance, 1 / ones if reciprocal else np.zeros_like(ones))
    meta = job.buckets.device_ids(job.requests) if one else job.buckets.pool.to_device(metadata(job))
    kernel, arguments = KERNELS[one], (meta, job.by_token, job.balance, len(job.requests), reciprocal)
    return _prepare(kernel, job.buckets, job.layer, job.k, job.v, job.device_length, *arguments).run


def write_rows(written: Written) -> None:
    """Launch ``write_last``."""
    arguments = (written.requests, None, written.balance, len(written.buckets.host_count), written.reciprocal)
    _prepare(
        "write_last", written.buckets, written.layer, written.k, written.v, written.device_length, *arguments
    ).run()


class AppendOne:
    """``append_one`` for the same requests repeatedly: a launch whose addresses and layer are updated in place."""

    def __init__(
        self,
        buckets: Buckets,
        ids: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        device_length: torch.Tensor,
        balance: torch.Tensor | None,
        reciprocal: bool,
    ) -> None:
        launches = _prepare("append_one", buckets, 0, k, v, device_length, ids, None, balance, len(ids), reciprocal)
        self._kept = (ids, device_length, balance)
        self._device = k.get_device()
        [self._launch] = launches.launches
        params = memoryview(self._launch.params)
        self._words, self._numbers = params.cast("Q"), params.cast("i")
        self._mask = width_of(k, v) - 1

    def fits(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """False for rows whose addresses need narrower accesses than those of the first call."""
        return not (k.data_ptr() | v.data_ptr()) & self._mask

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor, stream: int | None = None) -> bool:
        """Launch for rows with the shape and strides of the first, if they fit; on the current stream if None."""
        key, value = k.data_ptr(), v.data_ptr()
        if (key | value) & self._mask:
            return False
        words = self._words
        words[0], words[1], self._numbers[LAYER] = key, value, layer
        jit.launch_on(self._device, self._launch, stream)
        return True


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
) -> Launches:
    """Launch that keeps the tensors it reads alive."""
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

    return prepare(device, build, (k, v, meta, by_token, balance))
