"""Uploads small host arrays through a ring of pinned memory, so that the host neither waits nor pins memory again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

RING_BYTES = 4 << 20  # two halves; larger arrays are pinned on their own
ALIGNMENT = 64


class Uploads:
    """Copies of host arrays to one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring: torch.Tensor | None = None
        self._bytes = np.zeros(0, np.uint8)  # the ring's memory
        self._next = 0
        self._read: list[list[torch.cuda.Event]] = [[], []]  # per half: recorded after its copies

    def copy(self, array: np.ndarray, streams: Iterable[torch.cuda.Stream]) -> torch.Tensor:
        """Device copy of ``array``, in the order of the current stream; ``streams``: all streams that upload."""
        array = np.ascontiguousarray(array)
        if 2 * array.nbytes > RING_BYTES // 2:
            return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)
        source = torch.from_numpy(array)
        pinned = self._pinned(array, source.dtype, streams).view(source.shape)
        return torch.empty(source.shape, dtype=source.dtype, device=self.device).copy_(pinned, non_blocking=True)

    def fill(self, target: torch.Tensor, array: np.ndarray, streams: Iterable[torch.cuda.Stream]) -> None:
        """Copy a contiguous ``array`` of the same bytes into ``target``, flat, in the order of the current stream."""
        source = torch.from_numpy(array)
        large = 2 * array.nbytes > RING_BYTES // 2
        target.copy_(source.pin_memory() if large else self._pinned(array, source.dtype, streams), non_blocking=True)

    def _pinned(self, array: np.ndarray, dtype: torch.dtype, streams: Iterable[torch.cuda.Stream]) -> torch.Tensor:
        """A flat copy of a contiguous array in the ring."""
        if self._ring is None:
            self._ring = torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)
            self._bytes = self._ring.numpy()
        first = self._reserve(array.nbytes, streams)
        self._bytes[first : first + array.nbytes] = array.reshape(-1).view(np.uint8)
        return self._ring[first : first + array.nbytes].view(dtype)

    def _reserve(self, nbytes: int, streams: Iterable[torch.cuda.Stream]) -> int:
        """Offset of free bytes in the ring; waits for copies that were queued a whole half ago."""
        half, first = RING_BYTES // 2, self._next
        before = max(first - 1, 0) // half  # the half of the last upload, also if that filled it to the end
        if first + nbytes > (before + 1) * half:
            self._read[before] = [stream.record_event() for stream in streams]
            before = 1 - before
            for event in self._read[before]:
                event.synchronize()
            first = before * half
        self._next = first + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return first
