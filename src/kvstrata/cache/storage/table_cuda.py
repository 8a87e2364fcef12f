"""Launches of ``table.cu``: tables on the device that follow the host's at a decode step, without waiting for it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from kvstrata import jit

from .pool import Pool

SOURCE = Path(__file__).with_name("table.cu")
KERNELS = ("count_up", "new_pages")
THREADS = 256
VECTOR = 16  # bytes that a thread clears at once
# struct Params: count, length, table, pointers, requests, entries; int32 sizes.
PARAMS = struct.Struct("6Q 6i")


def kernels_needed() -> list[jit.Named]:
    """Kernels of a decode step's tables."""
    return [(SOURCE, entry) for entry in KERNELS]


class Tables(Protocol):
    """The part of a cache's buckets that the kernels change."""

    pool: Pool
    page_table: torch.Tensor
    count: torch.Tensor


@functools.lru_cache(maxsize=16)
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry, jit.arch_of(device))


def count_up(buckets: Tables, requests: torch.Tensor, length: torch.Tensor) -> Callable[[], None]:
    """A launch that counts one more plain token of int32 ``requests [n]`` in every layer; may run again and again."""
    return _launch("count_up", buckets, len(requests), requests=requests, length=length)


def new_pages(buckets: Tables, entries: torch.Tensor) -> Callable[[], None]:
    """A launch that clears plain pages and enters them in the table: int64 ``entries [2, n]``, index and handle."""
    return _launch("new_pages", buckets, entries.shape[1], entries=entries)


def _launch(
    entry: str,
    buckets: Tables,
    grid: int,
    requests: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    length: torch.Tensor | None = None,
) -> Callable[[], None]:
    _, layers, heads, tiers, _ = buckets.page_table.shape
    pool, device = buckets.pool, buckets.page_table.get_device()
    tensors = (buckets.count, length, buckets.page_table, pool.pointers, requests, entries)
    params = PARAMS.pack(
        *(0 if x is None else x.data_ptr() for x in tensors),
        layers, heads, tiers, pool.units, grid, pool.strides[0] // VECTOR,
    )  # fmt: skip
    with torch.cuda.device(device):
        jit.bind_context(device)
        launch = jit.Launch(_kernel(entry, device), grid, THREADS, params)

    def run(_kept: object = tensors) -> None:
        with torch.cuda.device(device):
            jit.bind_context(device)
            launch(jit.current_stream(device))

    return run
