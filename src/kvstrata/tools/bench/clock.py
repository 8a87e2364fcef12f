"""Timing of one call, on a GPU and on a CPU.

On CUDA a sample is  flush | start event | call | end event  on one stream, with no synchronisation. The flush
writes more than the L2 and keeps the device busy while the host enqueues the rest, so the two events measure device
time only. This is checked: if the start event has already completed when the end event is in the queue, the device
was waiting for the host, and the sample is repeated with a longer flush. A callable that outruns every flush (or
synchronises) is host-bound and is reported as such. On a CPU a sample is wall-clock time; on a GPU it can be, from an
idle device to an idle device, for calls that include the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[int], Any]
Mark = tuple[Any, Any]

LONGEST_LEAD = 32  # flushes; each is 256 MB, 57 us at an H200's write bandwidth of 4.7 TB/s
TRIES = 8  # with 1, 2, 4, 8, 16, 32, 32, 32 flushes; then the call is host-bound


class CudaClock:
    warm_seconds = 0.1  # time given to an idle GPU to raise its clocks

    def __init__(self, device: torch.device, buffer: torch.Tensor) -> None:
        self.device, self.buffer = device, buffer
        self.reset()

    def reset(self) -> None:
        self.lead: dict[str, int] = {}  # number of flushes before each contender
        self.host_bound: set[str] = set()

    def time(self, name: str, call: Call, i: int, before: Call | None = None) -> Mark:
        """Enqueue one cold call; returns a mark for `us`, to be read after `synchronize`."""
        stream = torch.cuda.current_stream(self.device)
        for _ in range(TRIES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            lead = self.lead.setdefault(name, 1)
            for _ in range(lead):
                self.buffer.zero_()
            if before:
                before(i)
            start.record(stream)
            call(i)
            end.record(stream)
            if name in self.host_bound or not start.query():
                return start, end
            self.lead[name] = min(2 * lead, LONGEST_LEAD)
        self.host_bound.add(name)
        self.lead[name] = 1
        return start, end

    def us(self, mark: Mark) -> float:
        return 1e3 * float(mark[0].elapsed_time(mark[1]))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class CpuClock:
    warm_seconds = 0.0

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.host_bound: set[str] = set()

    def reset(self) -> None:
        pass

    def time(self, name: str, call: Call, i: int, before: Call | None = None) -> Mark:
        self.buffer.zero_()
        if before:
            before(i)
        self.synchronize()
        start = time.perf_counter()
        call(i)
        self.synchronize()
        return start, time.perf_counter()

    def us(self, mark: Mark) -> float:
        return 1e6 * float(mark[1] - mark[0])

    def synchronize(self) -> None:
        pass


class WallClock(CpuClock):
    """Wall-clock time on a GPU, until the device has finished the call."""

    warm_seconds = CudaClock.warm_seconds

    def __init__(self, device: torch.device, buffer: torch.Tensor) -> None:
        super().__init__(buffer)
        self.device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
