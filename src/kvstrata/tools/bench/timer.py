"""Interleaved sampling: every contender once per round, in random order, on rotating input sets.

Drift of clocks and temperature affects all contenders alike, and no input stays in a cache.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Mapping

import numpy as np
import torch

from kvstrata.replay.graph import gc_disabled

from .clock import Call, CpuClock, CudaClock, WallClock
from .machine import cache_bytes
from .stats import Array

BATCH = 16  # rounds between two synchronisations
MIN_ROUNDS = 5  # minimum number of rounds and bursts, even when the time is up
LONG_ROUND = 0.05  # seconds per round from which on every round is synchronised
BURST = 50  # calls in one host burst: launches of one kernel, far below the depth of the launch queue


class Timer:
    """Takes cold, interleaved samples in microseconds on one device.

    >>> Timer("cpu").sample({"add": lambda i: x[i].add(1), "mul": lambda i: x[i].mul(2)}, rounds=20, sets=len(x))
    """

    def __init__(self, device: torch.device | str, flush_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        self.flush_bytes = flush_bytes or max(2 * cache_bytes(self.device), (256 if cuda else 64) << 20)
        buffer = torch.zeros(self.flush_bytes // 4, dtype=torch.int32, device=self.device)
        self.clock = CudaClock(self.device, buffer) if cuda else CpuClock(buffer)

    def by_wall(self) -> Timer:
        """A timer whose samples are wall-clock time until the device is done, including the host's part."""
        other = copy.copy(self)
        if self.device.type == "cuda":
            other.clock = WallClock(self.device, self.clock.buffer)
        return other

    @property
    def host_bound(self) -> frozenset[str]:
        """Contenders of the last `sample` whose device time includes waiting for the host."""
        return frozenset(self.clock.host_bound)

    def sample(
        self,
        calls: Mapping[str, Call],
        rounds: int,
        sets: int = 1,
        seed: int = 0,
        warmup: int = 2,
        seconds: float = 20.0,
        before: Call | None = None,
    ) -> dict[str, Array]:
        """Microseconds of each call, `rounds` samples each, or fewer (at least 5) after `seconds`.

        `before` runs ahead of every sample, after the flush and outside the measured time.
        """
        order = random.Random(seed)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        batch = BATCH if self._warm(calls, sets, warmup, before) < LONG_ROUND else 1  # synchronised once per batch
        with gc_disabled():
            limit = time.perf_counter() + seconds
            for first in range(0, rounds, batch):
                marks = []
                for r in range(first, min(first + batch, rounds)):
                    if r >= MIN_ROUNDS and time.perf_counter() > limit:
                        break
                    for name in order.sample(list(calls), len(calls)):
                        marks.append((name, self.clock.time(name, calls[name], r % sets, before)))
                self.clock.synchronize()
                for name, mark in marks:
                    samples[name].append(self.clock.us(mark))
        return {name: np.asarray(us) for name, us in samples.items()}

    def host(
        self,
        calls: Mapping[str, Call],
        sets: int = 1,
        bursts: int = 20,
        burst: int = BURST,
        before: Call | None = None,
        seconds: float = 20.0,
    ) -> dict[str, Array]:
        """Microseconds the host spends per call, one value per burst; the device is idle when a burst begins.

        A ``burst`` of calls has to fit the launch queue, otherwise the host waits for the device. ``before`` runs ahead
        of each burst, outside the measured time. Fewer bursts (at least 5) are taken after ``seconds``.
        """
        samples: dict[str, list[float]] = {name: [] for name in calls}
        with gc_disabled():
            limit = time.perf_counter() + seconds
            for number in range(bursts + 1):
                if number > MIN_ROUNDS and time.perf_counter() > limit:
                    break
                for name, call in calls.items():
                    if before:
                        before(0)
                    self.clock.synchronize()
                    start = time.perf_counter()
                    for i in range(burst):
                        call(i % sets)
                    samples[name].append(1e6 * (time.perf_counter() - start) / burst)
            self.clock.synchronize()
        return {name: np.asarray(us[1:]) for name, us in samples.items()}  # the first burst warms up

    def capture(self, call: Call, sets: int = 1) -> Call:
        """Capture a call as CUDA graphs, one per input set; a replay returns what the captured call returned."""
        graphs = []
        with torch.cuda.device(self.device):
            for i in range(sets):
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # lazy initialisation is not allowed inside a capture
                    call(i)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with gc_disabled(), torch.cuda.graph(graph):
                    out = call(i)
                graphs.append((graph, out))

        def replay(i: int, kept: Call = call) -> object:  # keeps alive what the graphs read
            graph, out = graphs[i]
            graph.replay()
            return out

        return replay

    def _warm(self, calls: Mapping[str, Call], sets: int, rounds: int, before: Call | None) -> float:
        """Run every call a few times; returns the seconds of the last round."""
        for call in calls.values():
            for i in range(sets):
                call(i)
        self.clock.synchronize()
        self.clock.reset()
        limit = time.perf_counter() + self.clock.warm_seconds
        r, seconds = 0, 0.0
        while r < rounds or time.perf_counter() < limit:
            start = time.perf_counter()
            for name, call in calls.items():
                self.clock.time(name, call, r % sets, before)
            self.clock.synchronize()
            seconds = time.perf_counter() - start
            r += 1
        return seconds
