"""Sizes of a decode plan's scratch memory: work lists of several layers, and the partials of one.

    stages        [layers at once, capacity, 4] int32     16 bytes for every stage that the page tables can list
    chunks        [layers at once, chunks, 8] int32
    slots         [layers at once, buckets, 2] int32
    partial_out   [chunks + buckets, columns, head_dim] float32
    partial_sum   [chunks + buckets, columns, 2] float32

Small lists are built for all layers in one launch. Larger ones are built `layers_at_once` layers at a time: as many as
fill the multiprocessors, so that a step takes as many waves of blocks as in one launch. On an H200 the kernel has 54
registers per thread, so one block of 1,024 threads is resident: 32 layers of 16 blocks each take four waves of 128
blocks in one launch, and four launches take one wave each.
"""

from __future__ import annotations

from typing import NamedTuple

LIST_BYTES = 32 << 20  # up to this size, one launch builds all lists


class Sizes(NamedTuple):
    layers: int  # layers whose lists are held at once
    capacity: int  # stages of a layer
    chunks: int
    buckets: int
    columns: int
    head_dim: int

    @property
    def nbytes(self) -> int:
        lists = self.layers * list_bytes(self.capacity, self.chunks, self.buckets)
        return lists + (self.chunks + self.buckets) * self.columns * (self.head_dim + 2) * 4


def list_bytes(capacity: int, chunks: int, buckets: int) -> int:
    """Bytes of the work list of one layer."""
    return 16 * capacity + 32 * chunks + 8 * buckets


def layers_at_once(layers: int, layer_bytes: int, blocks: int, multiprocessors: int) -> int:
    """Number of layers whose lists one launch builds, ``blocks`` thread blocks and ``layer_bytes`` bytes each."""
    return min(layers, max(LIST_BYTES // max(layer_bytes, 1), multiprocessors // blocks, 1))
