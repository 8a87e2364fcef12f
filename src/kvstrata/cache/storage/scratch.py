"""Scratch memory that kernels keep for a cache, so that the cache can report its bytes.

`Arena` is the scratch memory of settling: named buffers that are kept from call to call and only grow. The registry of
a cache's scratch memory holds only weak references: entries vanish with the cache or the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

KEPT = 2  # sets of buffers that an arena keeps: one plan is made while another waits to be executed


class Scratch(Protocol):
    @property
    def nbytes(self) -> int: ...


_LIVE: WeakKeyDictionary[object, WeakSet[Scratch]] = WeakKeyDictionary()


def register(cache: object, scratch: Scratch) -> None:
    """Count ``scratch`` as the cache's until it is freed."""
    _LIVE.setdefault(cache, WeakSet()).add(scratch)


def scratch_bytes(cache: object) -> int:
    """Bytes of all scratch of a cache that is allocated now."""
    return sum(scratch.nbytes for scratch in _LIVE.get(cache, ()))


class Arena:
    """Device buffers of plans. A plan leases a set of them and returns it when it is dropped."""

    def __init__(self, device: torch.device, streams: Mapping[int, torch.cuda.Stream] | None = None) -> None:
        self.device = device
        self._streams = {} if streams is None else streams  # streams that may still read a dropped buffer
        self.nbytes = 0
        self._free: list[dict[str, torch.Tensor]] = []

    def lease(self) -> Lease:
        return Lease(self, self._free.pop() if self._free else {})

    def give_back(self, buffers: dict[str, torch.Tensor]) -> None:
        """Keep buffers for the next lease, or free them. Work that reads them is already queued on the stream."""
        if len(self._free) < KEPT:
            self._free.append(buffers)
        else:
            for buffer in buffers.values():
                self.drop(buffer)

    def drop(self, buffer: torch.Tensor) -> None:
        """Free a buffer; its memory is reused when the streams that used it are done."""
        self.nbytes -= buffer.nbytes
        for stream in self._streams.values():
            buffer.record_stream(stream)


class Lease:
    """Buffers of one plan, by name; valid until it is garbage-collected."""

    def __init__(self, arena: Arena, buffers: dict[str, torch.Tensor]) -> None:
        self._arena, self._buffers = arena, buffers

    def take(self, name: str, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A flat tensor of ``size`` elements, uninitialised; the same memory at every call with this name."""
        bytes_needed = size * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.nbytes < bytes_needed:
            size = bytes_needed
            if held is not None:
                size = size * 5 // 4  # sizes grow slowly, token by token
                self._arena.drop(self._buffers.pop(name))
            with torch.inference_mode(False):
                held = torch.empty(-(-size // 512) * 512, dtype=torch.uint8, device=self._arena.device)
            self._arena.nbytes += held.nbytes
            self._buffers[name] = held
        return held[:bytes_needed].view(dtype)

    def __del__(self) -> None:
        self._arena.give_back(self._buffers)
