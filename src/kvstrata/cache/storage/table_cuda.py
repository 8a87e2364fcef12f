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
THREADS, BLOCKS = 256, 1024
VECTOR = 16  # bytes that a thread clears at once
# struct Params: count, length, table, pointers, requests, entries; int32 sizes.
PARAMS = struct.Struct("6Q 6i")
ADDRESS, SIZE = struct.Struct("Q"), struct.Struct("i")
ENTRIES_OFFSET, PAGES_OFFSET = 5 * 8, 6 * 8 + 4 * 4


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
    return _launch("count_up", buckets, len(requests), requests, length)[1]


class NewPages:
    """A launch that clears plain pages and enters them in the table, prepared once for a cache."""

    def __init__(self, buckets: Tables) -> None:
        self._launch, self.run = _launch("new_pages", buckets, BLOCKS)

    def prepare(self, entries: torch.Tensor) -> Callable[[], None]:
        """A function that launches it for int64 ``entries [2 * n]``, indices and handles."""

        def run() -> None:
            ADDRESS.pack_into(self._launch.params, ENTRIES_OFFSET, entries.data_ptr())
            SIZE.pack_into(self._launch.params, PAGES_OFFSET, entries.numel() // 2)
            self.run()

        return run


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
        with torch.cuda.device(device):
            jit.bind_context(device)
            launch(jit.current_stream(device))

    return launch, run
