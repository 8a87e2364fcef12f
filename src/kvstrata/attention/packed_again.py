"""Repeated calls of the packed attention ops: what a call must look like to go without checks, and its launches.

Checking a call, choosing kernels and preparing their arguments takes the host longer than the launches do. All of it
depends on shapes, strides, dtypes, options and the alignment of addresses alone, which a guard compares at once.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from kvstrata.call_cache import PerThread, guard_of
from kvstrata.layout.blocks import ALIGNMENT

Result = tuple[torch.Tensor, torch.Tensor | None]
Memory = tuple[torch.Tensor | None, ...]  # the tensors of a call, then its output or None
Look = tuple[Any, ...]  # format, backend and options
RECENT = 8  # kinds of calls that a thread remembers: layers may take turns


class Seen:
    """A call on a GPU: ``run`` launches another one that looks like it.

    A guard sees the tensors that are there; the others must be None again. ``wide``: indices of memory whose address
    must be a multiple of 16 bytes, where it is there; the first tensor's must be one of 4.
    """

    def __init__(
        self, look: Look, memory: Memory, wide: set[int], run: Callable[[Memory], Result], device: int
    ) -> None:
        self.look, self.launch, self.device = look, run, device
        present = [i for i, x in enumerate(memory) if x is not None]
        absent = [i for i, x in enumerate(memory) if x is None]
        self.given = itemgetter(*present)
        self.left_out = itemgetter(*absent, absent[0]) if absent else lambda memory: ()  # of one index: no tuple
        self.nothing = (None,) * (len(absent) + 1 if absent else 0)
        self.guard = guard_of(self.given(memory))
        self.wide = [i for i in present if i in wide]

    def run(self, look: Look, memory: Memory) -> Result | None:
        """Run a call that looks like this one; None if it does not."""
        if look != self.look or self.left_out(memory) != self.nothing or not self.guard(*self.given(memory)):
            return None
        bits = memory[0].data_ptr() << 2  # type: ignore[union-attr]
        for i in self.wide:
            bits |= memory[i].data_ptr()  # type: ignore[union-attr]
        if bits % ALIGNMENT or torch._C._cuda_getDevice() != self.device:
            return None
        return self.launch(memory)


class Recent(PerThread[Any]):
    """Recent calls of a thread, and its launches: parameters are written in place, so threads do not share them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Seen] = []  # the latest first

    def again(self, look: Look, memory: Memory) -> Result | None:
        """Run a call that looks like a recent one, without checks; None if there is none."""
        for i, seen in enumerate(self.calls):
            if (result := seen.run(look, memory)) is not None:
                if i:
                    self.calls.insert(0, self.calls.pop(i))
                return result
        return None

    def remember(self, seen: Seen) -> None:
        self.calls = [seen, *self.calls[: RECENT - 1]]
