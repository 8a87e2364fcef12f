"""Launches of ``table.cu``: update the device's tables to the host's at a decode step, without waiting."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from kvstrata import jit

from .pool import Pool

SOURCE = Path(__file__).with_name("table.cu")
KERNELS = ("count_up", "new_pages", "next_pages")
THREADS, BLOCKS = 256, 1024
VECTOR = 16  # bytes that a thread clears at once
# struct Params: count, length, table, pointers, requests, entries; int32 sizes.
PARAMS = struct.Struct("6Q 6i")
ADDRESS, SIZE = struct.Struct("Q"), struct.Struct("i")
ENTRIES_OFFSET, PAGES_OFFSET = 5 * 8, 6 * 8 + 4 * 4
REQUESTS, PAGES, PAGE_BLOCKS = 16, 4096, 512  # maxima per launch of `next_pages`, and its number of blocks
# struct Next: table, pointers; requests, buckets, list, units, vectors; requests, page numbers and handles follow.
NEXT = struct.Struct("2Q 6i")
COUNT, FIRST_REQUEST, FIRST_HANDLE = 4, NEXT.size // 4, NEXT.size // 4 + 2 * REQUESTS  # as int32 of the struct


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
    """Launch that counts one more plain token of int32 ``requests [n]`` in every layer; may run repeatedly."""
    return _launch("count_up", buckets, len(requests), requests, length)[1]


class NewPages:
    """Launch that clears plain pages and enters them in the table, prepared once per cache."""

    def __init__(self, buckets: Tables) -> None:
        self._launch, self.run = _launch("new_pages", buckets, BLOCKS)

    def prepare(self, entries: torch.Tensor) -> Callable[[], None]:
        """Function that launches it for int64 ``entries [2 * n]``, indices and handles."""

        def run() -> None:
            ADDRESS.pack_into(self._launch.params, ENTRIES_OFFSET, entries.data_ptr())
            SIZE.pack_into(self._launch.params, PAGES_OFFSET, entries.numel() // 2)
            self.run()

        return run


class NextPages:
    """Launch that clears a plain page for each bucket of a few requests and enters it, prepared once per cache."""

    def __init__(self, buckets: Tables) -> None:
        _, layers, heads, tiers, max_pages = buckets.page_table.shape
        pool, self._buckets, self._device = buckets.pool, layers * heads, buckets.page_table.get_device()
        self.most = min(REQUESTS, PAGES // self._buckets)  # requests in one launch, 0 if one has too many buckets
        self._kept = (buckets.page_table, pool.pointers)
        self._params = bytearray(4 * (FIRST_HANDLE + PAGES))
        self._values = np.frombuffer(self._params, np.int32)
        sizes = (0, self._buckets, tiers * max_pages, pool.units, pool.strides[0] // VECTOR, 0)
        NEXT.pack_into(self._params, 0, *(x.data_ptr() for x in self._kept), *sizes)
        with torch.cuda.device(self._device):
            jit.bind_context(self._device)
            self._launch = jit.Launch(_kernel("next_pages", self._device), PAGE_BLOCKS, THREADS, self._params)

    def __call__(self, requests: np.ndarray, numbers: np.ndarray, handles: np.ndarray) -> None:
        """Enter int32 ``handles [requests * buckets]`` in the lists of requests, at these page indices."""
        n, values = len(requests), self._values
        values[COUNT] = n
        values[FIRST_REQUEST : FIRST_REQUEST + n] = requests
        values[FIRST_REQUEST + REQUESTS : FIRST_REQUEST + REQUESTS + n] = numbers
        values[FIRST_HANDLE : FIRST_HANDLE + len(handles)] = handles
        jit.launch_on(self._device, self._launch)


def _launch(
    entry: str,
    buckets: Tables,
    grid: int,
    requests: torch.Tensor | None = None,
    length: torch.Tensor | None = None,
) -> tuple[jit.Launch, Callable[[], None]]:
    _, layers, heads, tiers, _ = buckets.page_table.shape
    pool, device = buckets.pool, buckets.page_table.get_device()
    tensors = (buckets.count, length, buckets.page_table, pool.pointers, requests, None)
    params = PARAMS.pack(
        *(0 if x is None else x.data_ptr() for x in tensors),
        layers, heads, tiers, pool.units, 0, pool.strides[0] // VECTOR,
    )  # fmt: skip
    with torch.cuda.device(device):
        jit.bind_context(device)
        launch = jit.Launch(_kernel(entry, device), grid, THREADS, params)

    def run(_kept: object = tensors) -> None:
        jit.launch_on(device, launch)

    return launch, run
