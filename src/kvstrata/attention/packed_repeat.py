"""Repeated calls of the packed attention ops: when a call may skip all checks, and its prepared launches.

Checking a call, choosing kernels and preparing their arguments takes the host longer than the launches. All of it
depends only on shapes, strides, dtypes, options and the alignment of addresses, which one guard compares.
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
Signature = tuple[Any, ...]  # format, backend and options
RECENT = 8  # call signatures that a thread remembers: layers may alternate


class KnownCall:
    """A call on a GPU; ``run`` launches another one with the same signature.

    The guard checks the tensors that were given; the others must be None again. ``wide``: indices of tensors whose
    address must be a multiple of 16 bytes, if given; that of the first tensor must be a multiple of 4.
    """

    def __init__(
        self, signature: Signature, memory: Memory, wide: set[int], run: Callable[[Memory], Result], device: int
    ) -> None:
        self.signature, self.launch, self.device = signature, run, device
        present = [i for i, x in enumerate(memory) if x is not None]
        absent = [i for i, x in enumerate(memory) if x is None]
        self.given = itemgetter(*present)
        self.left_out = itemgetter(*absent, absent[0]) if absent else lambda memory: ()  # always a tuple
        self.nothing = (None,) * (len(absent) + 1 if absent else 0)
        self.guard = guard_of(self.given(memory))
        self.wide = [i for i in present if i in wide]

    def run(self, signature: Signature, memory: Memory) -> Result | None:
        """Run a call with the same signature; None if it differs."""
        if signature != self.signature or self.left_out(memory) != self.nothing or not self.guard(*self.given(memory)):
            return None
        bits = memory[0].data_ptr() << 2  # type: ignore[union-attr]
        for i in self.wide:
            bits |= memory[i].data_ptr()  # type: ignore[union-attr]
        if bits % ALIGNMENT or torch._C._cuda_getDevice() != self.device:
            return None
        return self.launch(memory)


class Recent(PerThread[Any]):
    """Recent calls of a thread and their launches: parameters are written in place, so threads do not share them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[KnownCall] = []  # the latest first

    def repeat(self, signature: Signature, memory: Memory) -> Result | None:
        """Run a call with the signature of a recent one, without checks; None if there is none."""
        for i, call in enumerate(self.calls):
            if (result := call.run(signature, memory)) is not None:
                if i:
                    self.calls.insert(0, self.calls.pop(i))
                return result
        return None

    def remember(self, call: KnownCall) -> None:
        self.calls = [call, *self.calls[: RECENT - 1]]
