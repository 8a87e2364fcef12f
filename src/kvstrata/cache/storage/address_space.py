"""Address range for all slabs of a CPU pool: memory is committed when written and returned slab by slab.

Pages anywhere in it are one indexed read or write, across slabs. Reserved addresses cost nothing.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import torch

# Linux: do not count the range against the commit limit; Python names the flag from 3.13 on.
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0


class Space:
    """``nbytes`` of addresses, a multiple of 64, zero where nothing was written."""

    def __init__(self, nbytes: int) -> None:
        try:
            if sys.platform == "win32":
                self._map = mmap.mmap(-1, nbytes)
            else:
                self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise RuntimeError(
                f"pool: expected {nbytes} bytes of addresses, the system refused ({error});"
                " use fewer max_requests or max_tokens"
            ) from error
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self._typed: dict[type, np.ndarray] = {}
        self._runs: dict[tuple[int, int, int], np.ndarray] = {}

    def runs(self, start: int, size: int, step: int = 64) -> np.ndarray:
        """``runs(..)[i]`` are the ``size`` bytes from ``i * step + start`` on, as one element."""
        key = (start, size, step)
        if key not in self._runs:
            whole = self.bytes.numpy()
            n = (whole.nbytes - start - size) // step + 1
            self._runs[key] = np.ndarray(n, f"V{size}", whole.data, start, (step,))
        return self._runs[key]

    def typed(self, dtype: type) -> np.ndarray:
        """The whole range as numbers."""
        if dtype not in self._typed:
            self._typed[dtype] = self.bytes.numpy().view(dtype)
        return self._typed[dtype]

    def forget(self, start: int, size: int) -> None:
        """Return the memory of a run to the system; reads there give zeros or the old bytes."""
        if not hasattr(self._map, "madvise") or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
