"""A simulated CUDA queue, a host clock and a device clock: timing is tested without a GPU."""

import types

import torch

from kvstrata.tools.bench import Timer, timer
from kvstrata.tools.bench.clock import CudaClock


class Queue:
    """A device that executes in order what the host enqueues; times in microseconds."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0
        self.synchronisations = 0
        queue = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert stream == "stream"
                queue.host += 1
                self.at = max(queue.host, queue.device)

            def query(self):
                return self.at <= queue.host

            def elapsed_time(self, end):
                assert end.at <= queue.host, "read before the synchronisation"
                return (end.at - self.at) / 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(timer, "time", types.SimpleNamespace(perf_counter=lambda: 1e-6 * self.host))
        self.clock = CudaClock(torch.device("cpu"), types.SimpleNamespace(zero_=self.kernel(60)))
        self.clock.warm_seconds = 0.0
        self.timer = Timer("cpu", flush_bytes=1 << 12)
        self.timer.clock = self.clock

    def kernel(self, us, host=5.0):
        def call(*_):
            self.host += host
            self.device = max(self.host, self.device) + us

        return call

    def synchronize(self, device=None):
        self.synchronisations += 1
        self.host = max(self.host, self.device)
