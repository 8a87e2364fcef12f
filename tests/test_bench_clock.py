"""Bench's clock: what a sample contains. On a simulated queue; its figures are asserted exactly and mean nothing beyond
it."""

import contextlib
import types
import weakref

import pytest
import torch

from bench_queue import Queue
from kvstrata.tools.bench import Timer, sets_for, timer
from kvstrata.tools.bench.clock import LONGEST_LEAD

CPU = torch.device("cpu")


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def test_device_time_excludes_the_host(queue):
    us = queue.timer.sample({"a": queue.kernel(10), "b": queue.kernel(20)}, rounds=40)
    assert us["a"] == pytest.approx(10)
    assert us["b"] == pytest.approx(20)
    assert not queue.timer.host_bound
    assert queue.clock.lead == {"a": 1, "b": 1}


def test_no_synchronisation_per_sample(queue):
    queue.timer.sample({"a": queue.kernel(10)}, rounds=48, warmup=1)
    assert queue.synchronisations <= 2 + 3  # warm-up, then one per 16 rounds


def test_a_slow_host_gets_a_longer_flush(queue):
    us = queue.timer.sample({"slow": queue.kernel(10, host=500)}, rounds=20)
    assert us["slow"] == pytest.approx(10)
    assert 8 <= queue.clock.lead["slow"] <= LONGEST_LEAD
    assert not queue.timer.host_bound


def test_a_call_that_synchronises_is_host_bound(queue):
    def call(i):
        queue.kernel(10)()
        queue.synchronize()
        queue.kernel(10)()

    us = queue.timer.sample({"sync": call, "a": queue.kernel(10)}, rounds=20)
    assert queue.timer.host_bound == {"sync"}
    assert (us["sync"] > 20).all()
    assert us["a"] == pytest.approx(10)
    queue.timer.sample({"a": queue.kernel(10)}, rounds=5)
    assert not queue.timer.host_bound


def test_a_sample_with_a_host_stall_is_repeated(queue):
    calls = []

    def call(i):
        calls.append(i)
        queue.kernel(10, host=5000 if len(calls) == 30 else 5)()

    us = queue.timer.sample({"a": call}, rounds=40)
    assert us["a"] == pytest.approx(10)
    assert not queue.timer.host_bound


def test_rounds_are_interleaved_shuffled_and_rotate_inputs():
    log = []
    calls = {name: (lambda i, name=name: log.append((name, i))) for name in "abc"}
    us = Timer("cpu", flush_bytes=1 << 12).sample(calls, rounds=12, sets=4, warmup=0)
    rounds = [log[k : k + 3] for k in range(len(log) - 36, len(log), 3)]
    assert all({name for name, _ in r} == set("abc") for r in rounds)
    assert [{i for _, i in r} for r in rounds] == [{r % 4} for r in range(12)]
    assert len({tuple(name for name, _ in r) for r in rounds}) > 1
    assert all(len(x) == 12 and (x > 0).all() for x in us.values())


def test_time_limit_keeps_a_few_rounds():
    us = Timer("cpu", flush_bytes=1 << 12).sample({"a": lambda i: None}, rounds=1000, seconds=0)
    assert len(us["a"]) == 5


def test_host_cost_is_per_call(watch):
    calls = []

    def call(i):
        calls.append(i)
        watch.sleep(3e-6)

    watch.drive(timer)
    us = Timer("cpu", flush_bytes=1 << 12).host({"a": call}, sets=3, bursts=4)["a"]
    assert us == pytest.approx([3.0] * 4)
    assert len(calls) == 5 * 50
    assert set(calls) == {0, 1, 2}


def test_captured_calls_replay_their_own_input_set(monkeypatch):
    log = []

    class Graph:
        def replay(self):
            log.append(self.captured)

    @contextlib.contextmanager
    def capturing(graph):
        before = len(log)
        yield
        graph.captured = ("replay", *log[before:])
        del log[before:]

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "device": lambda device: contextlib.nullcontext(),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def call(i):
        log.append(i)
        return f"out {i}"

    alive = weakref.ref(call)
    replay = Timer("cpu", flush_bytes=1 << 12).capture(call, sets=2)
    del call
    assert log == [0, 1]  # the warm-up calls
    assert replay(1) == "out 1"
    assert log[-1] == ("replay", 1)
    assert alive() is not None, "the graph reads buffers that its maker owns"


def test_sets_cover_four_caches(monkeypatch):
    monkeypatch.setattr("kvstrata.tools.bench.case.cache_bytes", lambda device: 60 << 20)
    assert sets_for(1 << 10, CPU) == 8
    assert sets_for(60 << 20, CPU) == 4
    assert sets_for(1 << 30, CPU) == 2
    assert sets_for(3 << 30, CPU) == 1
    assert sets_for(9 << 30, CPU) == 1
