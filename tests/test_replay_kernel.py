"""The tests of CopyPlan and HostStage with ``copy.cu`` in the emulator."""

from __future__ import annotations

import functools
import struct

import pytest
import torch
from hypothesis import given, settings

import emulator
import test_replay
import test_replay_graph
import test_replay_stage
from conftest import HAS_GPU
from kvstrata import backends
from kvstrata.replay import copies, plan, staging
from kvstrata.replay import cuda as copy_cuda
from replay_model import Copies, check
from replay_model import copies as any_copies

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the GPU runs it itself")
CPU = torch.device("cpu")


@functools.cache
def kernels() -> dict[str, emulator.Kernel]:
    """Every instantiation of the kernel that these tests launch, by entry."""
    plain = [copy_cuda.entry_of(room, casts, False) for room in copy_cuda.CAPACITIES for casts in (False, True)]
    staged = [copy_cuda.entry_of(room, False, True) for room in copy_cuda.CAPACITIES]
    return emulator.build(copy_cuda.SOURCE, [*plain, *staged], sanitize=True)


class EmulatedCopies(copy_cuda.Copies):
    """`Copies` that launches in the emulator."""

    def __init__(self, count: int, casts: bool, device: torch.device, stage: bytes | None = None) -> None:
        self.count, self.room = count, copy_cuda.capacity(count)
        self.kernel = kernels()[copy_cuda.entry_of(count, casts, stage is not None)]
        self.params = bytearray(copy_cuda.empty_params(self.room, stage))
        self.write = struct.Struct(f"<{count}Q").pack_into
        self._tail_at, self.grid = 8 * self.room, 0

    def go(self) -> None:
        if self.grid:
            self.kernel.start(bytes(self.params), self.grid, 1, copy_cuda.THREADS, 0)


@pytest.fixture(params=[copy_cuda.BLOCK_BYTES, 64], ids="blocks of {} bytes".format, autouse=True)
def on_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := emulator.missing():
        pytest.skip(reason)
    kernels()  # built here: a failure inside a property test would be shrunk
    monkeypatch.setattr(copy_cuda, "Copies", EmulatedCopies)
    monkeypatch.setattr(copy_cuda, "BLOCK_BYTES", request.param)  # 64: small copies take several blocks
    monkeypatch.setattr(backends, "missing", lambda backend, device: None)
    assert plan.resolve("cuda", CPU) == "cuda"


def test_any_copies_equal_the_loop() -> None:
    @settings(max_examples=100)
    @given(any_copies(CPU, most=12))
    def run(call: Copies) -> None:
        check(call, "cuda")

    run()


def test_the_cases_of_copy_plan() -> None:
    test_replay.test_more_copies_than_a_launch_holds_all_arrive("cuda")
    test_replay.test_shapes_shrink_and_grow_and_pointers_change("cuda")
    test_replay.test_one_source_to_many_and_columns_of_one_buffer("cuda")
    test_replay.test_only_live_pages_of_a_page_table_are_copied("cuda")
    test_replay.test_live_rows_come_from_the_device("cuda")
    test_replay.test_nothing_to_copy_writes_nothing("cuda")
    for source in copies.KINDS:
        for target in copies.KINDS:
            test_replay.test_casts_as_torch_does(source, target, "cuda")


def test_the_cases_of_host_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: staging.Scatter, stage: staging.HostStage, dst: list[torch.Tensor]) -> None:
        self._stage, self._dst = stage, tuple(dst)
        self._copies = self._launch()

    monkeypatch.setattr(staging.Scatter, "__init__", launch)
    cases = test_replay_stage.TestHostStage()
    cases.test_steps_of_any_shape_arrive_in_order()
    cases.test_host_runs_one_step_ahead_and_no_further()
    cases.test_views_save_the_copy()
    test_replay_graph.replays_equal_eager("host", 25)
