"""Kernels of the settle benchmark: calls that are repeated, as a timer repeats them, move the same tokens each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import emulator
from kvstrata.cache.move import moves_cuda, phases, repack_cuda, whole_pages
from kvstrata.quant import op as quantize_op
from kvstrata.tools.bench.cases import settle


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A GPU, or the CPU with the kernels of moves emulated."""
    for where in emulator.kernels_here(monkeypatch, moves_cuda, quantize_op, repack_cuda, phases, whole_pages):
        if where == "cpu":
            monkeypatch.setattr(quantize_op, "ROUNDS", {256: 0})
            monkeypatch.setattr(settle, "missing", lambda backend, device: None)
        yield torch.device(where)


@pytest.mark.parametrize("lossy", [0.0, 0.5])
def test_repeated_moves_move_the_same_tokens(device: torch.device, lossy: float) -> None:
    """Launches change the tables that they read: run on what they left, they read and write past the ends of lists."""
    state = settle.State(2, 512, 1, 2, 64, lossy, device)
    assert state.settling is not None
    wanted = torch.from_numpy(state.buckets.host_count).to(device)
    for plan in (False, False, True, True, False):
        state.run_whole(plan)
        assert torch.equal(state.buckets.count, wanted)
        assert torch.equal(state.buckets.page_table, torch.from_numpy(state.buckets.host_table).to(device))
    for call in (state.run, lambda: state.run_whole(plan=False), lambda: state.run_whole(plan=True), state.run):
        state.restore()
        call()
        state.assert_moved()
    assert torch.equal(state.buckets.page_table, state.tables[0])  # moves alone leave the tables as they are
