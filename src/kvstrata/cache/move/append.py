"""New rows into the plain bucket: the slots after the last token, in pages that are there, for all heads in one launch.

    k, v [T, H, D] ──▶ page table[request, head, 0, slot // P], row slot % P,  slot = count[request, head, 0] + j

for row j of a request's new rows. Position and first importance go into the page, too. On a GPU the same kernel sets
the counts and the lengths; what it has to be told comes in one small copy, and the host never waits. For a decode step,
one token a request, it has to be told nothing new: it goes by the counts and lengths on the device.

`write_rows` writes the last token of each request, whose counts and lengths are there already (step.py): a kernel that
changes no count, and reads on the device which requests the rows are of.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata import jit
from kvstrata.backends import resolve

if TYPE_CHECKING:
    from kvstrata.cache.storage.page_table import Buckets

SOURCE = Path(__file__).with_name("append.cu")
FEW = 32  # rows
STEP = 32  # bytes: every row of a plain page begins at a multiple
WARPS = 8  # a block; a warp copies K and V of one token and head
# struct Params: k, v, pointers, table, count, length, meta, importance; strides in bytes; int32 sizes.
PARAMS = struct.Struct("8Q 4q 13i4x")
Step = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """Rows of one layer; the pages they go to are in the tables and have no other owner."""

    buckets: Buckets
    layer: int
    requests: np.ndarray  # int64 [R]
    lengths: np.ndarray  # int64 [R], tokens of each
    position: np.ndarray  # int64 [R], of the first of them
    count: np.ndarray  # int64 [R, H], plain tokens before
    k: torch.Tensor  # [T, H, D], inner stride 1
    v: torch.Tensor
    importance: np.ndarray  # float32 [R], for all new tokens of a request
    by_token: torch.Tensor | None  # float32 [T, H] contiguous, in its place
    device_length: torch.Tensor  # int32 [requests, layers]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Index of its request, and its number among the new ones, of every row."""
        index = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first = np.cumsum(self.lengths) - self.lengths
        return index, np.arange(len(index)) - first[index]


@dataclass(frozen=True)
class Written:
    """Rows of one layer, each the last token of its request."""

    buckets: Buckets
    layer: int
    k: torch.Tensor  # [R, H, D], inner stride 1
    v: torch.Tensor
    requests: torch.Tensor | None  # int32 [R] on the device, negative for none; None: 0, 1, ..
    device_length: torch.Tensor  # int32 [requests, layers]
    reciprocal: bool  # whether importance begins as 1 / length, else as 0


def write_rows(written: Written, backend: str = "auto") -> None:
    """Write the rows; safe under graph capture. Requests without a token, and numbers that are none, are skipped."""
    backend = resolve(backend, written.buckets.device)
    if written.k.shape[0] == 0:
        return
    if backend == "reference":
        _write_reference(written)
    elif backend == "triton":
        from .append_triton import write_rows as run

        run(written)
    else:
        _write_cuda(written)


def append_rows(job: Job, backend: str = "auto") -> None:
    """Write the rows; ``auto`` takes CUDA C++, then Triton, on a GPU. Safe for any strides of k and v."""
    prepare_append(job, backend)()


def prepare_append(job: Job, backend: str = "auto") -> Step:
    """What writes the rows; calling it allocates nothing."""
    device = job.buckets.device
    backend = resolve(backend, device)
    if job.k.shape[0] == 0:
        return lambda: None
    if backend == "reference":
        return _reference(job)
    if backend == "triton":
        from .append_triton import prepare_append as prepare

        return prepare(job)
    return _cuda(job)


def _reference(job: Job) -> Step:
    """The CPU path: rows are single elements of numpy views of the pool's space."""
    buckets, layer, kind = job.buckets, job.layer, job.buckets.page_formats[0]
    space, p = buckets.pool.space, buckets.page_tokens
    assert space is not None, "the reference needs a pool on the CPU"
    if (job.lengths == 1).all():  # a token each
        request, slot, position, importance = job.requests, job.count, job.position, job.importance
    else:
        index, number = job.rows()
        request, slot = job.requests[index], job.count[index] + number[:, None]
        position, importance = job.position[index] + number, job.importance[index]
    page, row = np.divmod(slot, p)
    handle = buckets.host_table[request[:, None], layer, buckets.heads, 0, page].astype(np.int64)
    size, few = kind.row_bytes, handle.size <= FEW
    step = kind.position_dtype.itemsize
    positions = space.typed(np.int16 if step == 2 else np.int32)
    position_at = handle * (64 // step) + (row + kind.position_offset // step)
    by_token = None if job.by_token is None else job.by_token.numpy()
    sides = ((job.k, 0), (job.v, kind.v_offset))
    if few:  # a copy each is sooner done than an indexed write
        to, heads = (handle * 64 + row * size + space.address).reshape(-1).tolist(), handle.shape[1]
    else:
        at = handle * (64 // STEP) + row * (size // STEP)
        rows = [x.detach().contiguous().view(torch.int16).numpy().view(f"V{size}")[..., 0] for x, _ in sides]

    def write() -> None:
        if few:
            for x, start in sides:
                base, token, head = x.data_ptr(), x.stride(0) * x.element_size(), x.stride(1) * x.element_size()
                for i, address in enumerate(to):
                    ctypes.memmove(address + start, base + i // heads * token + i % heads * head, size)
        else:
            for values, (_, start) in zip(rows, sides, strict=True):
                space.runs(start, size, STEP)[at] = values
        positions[position_at] = position[:, None]
        if kind.keeps_importance:
            values = importance[:, None] if by_token is None else by_token
            space.typed(np.float32)[handle * 16 + (row + kind.importance_offset // 4)] = values

    return write


def _write_reference(written: Written) -> None:
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
    job = Job(buckets, layer, requests, ones, length - 1, count, k, v, importance, None, written.device_length)
    _reference(job)()


def meta_of(job: Job) -> np.ndarray:
    """int32: [R, 8] request, first position, first row, tokens, importance's bits; [R, H] counts; [T] index in R."""
    table = np.zeros((len(job.requests), 8), np.int32)
    table[:, 0], table[:, 1] = job.requests, job.position
    table[:, 2], table[:, 3] = np.cumsum(job.lengths) - job.lengths, job.lengths
    table[:, 4] = job.importance.astype(np.float32).view(np.int32)
    index = np.repeat(np.arange(len(job.lengths), dtype=np.int32), job.lengths)
    return np.concatenate([table.reshape(-1), job.count.reshape(-1).astype(np.int32), index])


def width_of(k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes of the widest access that rows and strides allow: 16, 8, 4 or 2."""
    size = k.element_size()
    together = 16 | k.shape[2] * size
    for x in (k, v):
        together |= x.data_ptr() | x.stride(0) * size | x.stride(1) * size
    return together & -together


KERNELS = ("append_rows", "append_one", "write_last")


def entry_of(
    head_dim: int, itemsize: int, width: int, position_bytes: int, keeps_importance: bool, kernel: str = KERNELS[0]
) -> str:
    kept = str(keeps_importance).lower()
    return f"{kernel}<{head_dim * itemsize}, {width}, {'short' if position_bytes == 2 else 'int'}, {kept}>"


def _ids(job: Job) -> torch.Tensor:
    """The requests on the device, int32; the same from step to step, so they are kept."""
    kept, key = job.buckets.ids, job.requests.tobytes()
    if key not in kept:
        if len(kept) >= 64:
            kept.clear()
        kept[key] = job.buckets.pool.to_device(job.requests.astype(np.int32))
    return kept[key]


@functools.lru_cache(maxsize=64)
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry, jit.arch_of(device))


def _cuda(job: Job) -> Step:
    ones = (job.position + 1).astype(np.float32)
    reciprocal = bool(job.importance.any())
    one = job.by_token is None and bool((job.lengths == 1).all())
    one = one and np.array_equal(job.importance, 1 / ones if reciprocal else np.zeros_like(ones))
    meta = _ids(job) if one else job.buckets.pool.to_device(meta_of(job))
    kernel, about = KERNELS[one], (meta, job.by_token, len(job.requests), reciprocal)
    return _prepare(kernel, job.buckets, job.layer, job.k, job.v, job.device_length, *about)


def _write_cuda(written: Written) -> None:
    given = len(written.buckets.host_count)  # requests that there are
    about = (written.requests, None, given, written.reciprocal)
    _prepare("write_last", written.buckets, written.layer, written.k, written.v, written.device_length, *about)()


def _prepare(
    kernel: str,
    buckets: Buckets,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    device_length: torch.Tensor,
    meta: torch.Tensor | None,
    by_token: torch.Tensor | None,
    given: int,
    reciprocal: bool,
) -> Step:
    """A launch that keeps what it reads."""
    kind, pool, size, device = buckets.page_formats[0], buckets.pool, k.element_size(), k.get_device()
    tokens, heads, dim = k.shape
    _, layers, _, tiers, max_pages = buckets.page_table.shape
    params = PARAMS.pack(
        k.data_ptr(), v.data_ptr(), pool.pointers.data_ptr(), buckets.page_table.data_ptr(), buckets.count.data_ptr(),
        device_length.data_ptr(), *(0 if x is None else x.data_ptr() for x in (meta, by_token)),
        *(n * size for x in (k, v) for n in x.stride()[:2]),
        tokens, heads, given, layer, layers, tiers, max_pages, buckets.page_tokens, pool.units,
        kind.format.v_offset, kind.position_offset, kind.importance_offset, reciprocal,
    )  # fmt: skip
    entry = entry_of(dim, size, width_of(k, v), kind.position_dtype.itemsize, kind.keeps_importance, kernel)
    together = kernel == "append_rows"
    grid, warps = (-(-tokens * heads // WARPS), WARPS) if together else (tokens, min(heads, WARPS))
    with torch.cuda.device(device):
        jit.bind_context(device)
        launch = jit.Launch(_kernel(entry, device), grid, 32 * warps, params)

    def run(_kept: object = (k, v, meta, by_token)) -> None:
        with torch.cuda.device(device):
            jit.bind_context(device)
            launch(jit.current_stream(device))

    return run
