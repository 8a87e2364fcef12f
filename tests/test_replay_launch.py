"""CopyPlan's launches: merged dimensions, descriptors, registers of the kernels, and how the work is cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvstrata import jit
from kvstrata.jit import tuned
from kvstrata.replay import CopyPlan, copies, space
from kvstrata.replay import cuda as copy_cuda
from replay_model import DEVICE, int32


def test_contiguous_copies_merge() -> None:
    def move(source: torch.Tensor, target: torch.Tensor, fill=None) -> copies.Move:
        return copies.move_of(copies.Look.of(source), copies.Look.of(target), fill, False)

    pool = torch.zeros(6, 5, 7)
    assert move(torch.zeros(4, 5, 7), pool).size == (1, 1, 140)
    assert move(torch.zeros(4, 5, 6), pool).size == (20, 1, 6)
    assert move(torch.zeros(4, 4, 6), pool).size == (4, 4, 6)
    assert move(torch.zeros(4, 3, 7), pool).size == (4, 1, 21)
    filled = move(torch.zeros(4, 5, 7), pool, 0.0)
    assert (filled.size, filled.extent) == ((1, 1, 140), (1, 1, 210))
    filled = move(torch.zeros(4, 3, 7), pool, 0.0)
    assert (filled.size, filled.extent) == ((4, 1, 21), (6, 1, 35))


CUT, WARPS = copy_cuda.DEFAULT, copy_cuda.Config("warp", 128, 4096)

KERNELS = [(8, False, False, CUT), (28, False, False, CUT), (28, True, False, CUT), (28, False, True, CUT),
           (8, False, False, WARPS)]  # copies, casts, staged, cut  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
@pytest.mark.parametrize(("count", "casts", "staged", "cut"), KERNELS)
def test_copy_kernel_does_not_spill(count: int, casts: bool, staged: bool, cut: copy_cuda.Config, arch: str) -> None:
    """No spills and no stack: descriptors are read where they are, in the parameters."""
    pytest.importorskip("cuda.core")
    usage = jit.usage(copy_cuda.SOURCE, copy_cuda.entry_of(count, casts, staged, cut), arch=arch)
    assert usage.spill_bytes == usage.stack_bytes == 0, usage
    assert 0 < usage.registers <= 64, usage  # 1024 threads on a multiprocessor
    assert usage.shared_bytes <= (32 if staged else 0), usage


def test_a_tuned_table_cuts_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of copies and the bytes of their buffers; far from what was measured, the default."""
    choice = dict(worker="warp", threads=128, share=4096)
    entry = dict(case="fa-64x4096", shape=copy_cuda.features(2, 4096, False), choice=choice)
    monkeypatch.setattr(tuned, "table", lambda gpu: {"replay": [entry]})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU of its own")
    near, far = torch.zeros(2, 640, dtype=torch.int32), torch.zeros(2, 1 << 16, dtype=torch.int32)
    cuda = torch.device("cuda")
    assert copy_cuda.config_of(list(near), False, cuda) == copy_cuda.Config(**choice)
    assert copy_cuda.config_of(list(far), False, cuda) == copy_cuda.DEFAULT
    assert copy_cuda.config_of(list(near), True, cuda) == copy_cuda.DEFAULT
    assert copy_cuda.config_of(list(near), False, torch.device("cpu")) == copy_cuda.DEFAULT


def test_cuts_that_make_no_sense_are_named() -> None:
    assert space.invalid(copy_cuda.DEFAULT) is None
    assert "less than 4 for each of 1024 threads" in (space.invalid(copy_cuda.Config(threads=1024, share=2048)) or "")
    with pytest.raises(ValueError, match="worker: expected block or warp, got 'thread'"):
        copy_cuda.Config("thread")


@pytest.mark.gpu
@pytest.mark.parametrize("worker", ["block", "warp"])
@pytest.mark.parametrize("threads", space.CHOICES["threads"])
def test_every_cut_copies_the_same(worker: str, threads: int) -> None:
    src = [int32(n, seed=n) for n in (1, 33, 700, 0)] + [int32(5, 3001, seed=7), None]
    for share in (1024, 32768):
        dst = [torch.full((n,), 99, dtype=torch.int32, device=DEVICE) for n in (1, 40, 700, 3)]
        dst += [torch.full((6, 3333), 99, dtype=torch.int32, device=DEVICE), torch.zeros(2, device=DEVICE)]
        want = [buffer.clone() for buffer in dst]
        CopyPlan(want, fill=[None, -1, None, "last", None, None], backend="reference").run(src)
        plan = CopyPlan(dst, fill=[None, -1, None, "last", None, None], backend="cuda")
        plan.configure(copy_cuda.Config(worker, threads, share)).run(src)
        assert all(map(torch.equal, dst, want)), share


def test_descriptors_fit_the_parameters() -> None:
    assert copy_cuda.COPY.size == len(copy_cuda.NOTHING) == 128
    assert copy_cuda.MOST * (8 + 128 + 4) + copy_cuda.STAGE.size <= 4096
    assert (copy_cuda.MOST + 1) * (8 + 128 + 4) + copy_cuda.STAGE.size > 4000


@pytest.mark.parametrize("arch", [80, 90])
def test_triton_copy_compiles_ahead_of_time(arch: int) -> None:
    from ahead import compile_triton

    constants = dict(COPIES=8, CASTS=True, BLOCK=1024)
    types = {"table_ptr": "*i64", "copies": "i32"}
    used = compile_triton("kvstrata.replay.triton", "copy_kernel", arch, types, constants)
    assert 0 < used["REG"] <= 255, used


def test_descriptors_are_immutable() -> None:
    move = copies.move_of(copies.Look.of(torch.zeros(3)), copies.Look.of(torch.zeros(4)), None, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        move.itemsize = 3  # type: ignore[misc]
