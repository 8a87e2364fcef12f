"""The copies of a plan in CUDA C++: descriptors packed for ``copy.cu``, launched with the grid that shapes require."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from kvstrata import jit

from .copies import BITS, Bound, Move

SOURCE = Path(__file__).with_name("copy.cu")
CAPACITIES = (8, 28)  # copies that fit a launch: 4 KB of parameters hold 28 descriptors
MOST = CAPACITIES[-1]
# struct Copy: target, lengths, rows; strides; fill; sizes, extents; lengths' step, per, extra; rows' per, extra; bytes,
# kinds, flags.
COPY = struct.Struct("<3Q 6q Q 6I 5i 4B")
STAGE = struct.Struct("<3Q q")  # turn, done, number, bytes of a slot
NOTHING = COPY.pack(*(0,) * 3, *(0,) * 6, 0, *(0,) * 3, *(0,) * 3, 0, 1, 0, 1, 0, 1, BITS, BITS, 0)
NO_BLOCK = 0xFFFFFFFF
THREADS, BLOCK_BYTES = 256, 8192  # per block; docs/replay.md has the times with other sizes
FILL, WIDE_LENGTHS, WIDE_ROWS, FILL_LAST, SKIPS = 1, 2, 4, 8, 16


def capacity(copies: int) -> int:
    """Capacity of the smallest launch that holds ``copies`` copies."""
    return next(most for most in CAPACITIES if copies <= most)


def entry_of(copies: int, casts: bool, staged: bool) -> str:
    return f"copy_all<{capacity(copies)}, {str(casts).lower()}, {str(staged).lower()}>"


def blocks_of(move: Move) -> int:
    """Number of blocks for a copy."""
    return -(-move.elements * move.itemsize // BLOCK_BYTES)


def pack(
    move: Move, target: int, lengths: Bound | None, lengths_step: int, rows: Bound | None, skips: bool = False
) -> bytes:
    """One descriptor; steps in bytes. ``skips``: a count below zero leaves the target unchanged."""
    flags = (FILL if move.fill is not None else 0) | (FILL_LAST if move.fill_last else 0)
    flags |= SKIPS if skips else 0
    flags |= WIDE_LENGTHS if lengths and lengths.tensor.dtype == torch.int64 else 0
    flags |= WIDE_ROWS if rows and rows.tensor.dtype == torch.int64 else 0
    return COPY.pack(
        target, lengths.tensor.data_ptr() if lengths else 0, rows.tensor.data_ptr() if rows else 0,
        *move.source_stride, *move.target_stride, move.fill or 0, *move.size, *move.extent,
        lengths_step, lengths.per if lengths else 1, lengths.extra if lengths else 0,
        rows.per if rows else 1, rows.extra if rows else 0,
        move.itemsize, move.source_kind, move.target_kind, flags,
    )  # fmt: skip


def empty_params(room: int, stage: bytes | None) -> bytes:
    """Bytes of struct Params without copies."""
    firsts = struct.pack(f"<{room}I", *(NO_BLOCK,) * room)
    return bytes(8 * room) + (stage or bytes(STAGE.size)) + NOTHING * room + firsts


class Copies:
    """Up to ``MOST`` copies in one launch; the parameters stay in place and are rewritten where they change.

    Not for use by two threads at once.
    """

    def __init__(self, count: int, casts: bool, device: torch.device, stage: bytes | None = None) -> None:
        self.count, self.room = count, capacity(count)
        self.device = device.index if device.index is not None else torch.cuda.current_device()
        with torch.cuda.device(self.device):
            jit.bind_context(self.device)
            kernel = jit.load(SOURCE, entry_of(count, casts, stage is not None), jit.arch_of(device))
        self._tail_at = 8 * self.room
        self.launch = jit.Launch(kernel, 1, THREADS, empty_params(self.room, stage))
        self.params, self.args = self.launch.params, self.launch.args
        # jit.Launch has a fixed grid; here the grid depends on the shapes.
        self._call, self._function = kernel.driver.cuLaunchKernel, kernel.function
        self.write = struct.Struct(f"<{count}Q").pack_into
        self.grid = 0

    def tail(self, descriptors: Sequence[bytes], blocks: Sequence[int]) -> tuple[bytes, int]:
        """Parameter bytes after the pointers and the stage (descriptors, first blocks), and the grid."""
        *first, grid = accumulate(blocks, initial=0)
        empty = self.room - len(descriptors)
        firsts = struct.pack(f"<{self.room}I", *first, *(NO_BLOCK,) * empty)
        return b"".join(descriptors) + NOTHING * empty + firsts, grid

    def load(self, tail: bytes, grid: int) -> None:
        start = self._tail_at + STAGE.size
        self.params[start : start + len(tail)] = tail
        self.grid = grid

    def go(self) -> None:
        """Launch with the current parameters, on torch's current stream."""
        if self.grid == 0:
            return
        if torch._C._cuda_getDevice() == self.device:
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            (error,) = self._call(self._function, self.grid, 1, 1, THREADS, 1, 1, 0, stream, self.args, 0)
            if int(error):
                self.launch.fail(error)
        else:
            with torch.cuda.device(self.device):
                self.go()
