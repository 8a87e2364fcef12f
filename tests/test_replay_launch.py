"""CopyPlan's launches: merged dimensions, descriptors and registers of the kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvstrata import jit
from kvstrata.replay import copies
from kvstrata.replay import cuda as copy_cuda


def test_contiguous_copies_merge() -> None:
    def move(source: torch.Tensor, target: torch.Tensor, fill=None) -> copies.Move:
        return copies.move_of(copies.Signature.of(source), copies.Signature.of(target), fill, False)

    pool = torch.zeros(6, 5, 7)
    assert move(torch.zeros(4, 5, 7), pool).size == (1, 1, 140)
    assert move(torch.zeros(4, 5, 6), pool).size == (20, 1, 6)
    assert move(torch.zeros(4, 4, 6), pool).size == (4, 4, 6)
    assert move(torch.zeros(4, 3, 7), pool).size == (4, 1, 21)
    filled = move(torch.zeros(4, 5, 7), pool, 0.0)
    assert (filled.size, filled.extent) == ((1, 1, 140), (1, 1, 210))
    filled = move(torch.zeros(4, 3, 7), pool, 0.0)
    assert (filled.size, filled.extent) == ((4, 1, 21), (6, 1, 35))


KERNELS = [(8, False, False), (28, False, False), (28, True, False), (28, False, True)]  # copies, casts, staged


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
@pytest.mark.parametrize(("count", "casts", "staged"), KERNELS)
def test_copy_kernel_does_not_spill(count: int, casts: bool, staged: bool, arch: str) -> None:
    """No spills and no stack: descriptors are read where they are, in the parameters."""
    pytest.importorskip("cuda.core")
    usage = jit.usage(copy_cuda.SOURCE, copy_cuda.entry_of(count, casts, staged), arch=arch)
    assert usage.spill_bytes == usage.stack_bytes == 0, usage
    assert 0 < usage.registers <= 64, usage  # 1024 threads on a multiprocessor
    assert usage.shared_bytes <= (32 if staged else 0), usage


def test_host_and_kernel_agree_on_the_threads_of_a_block() -> None:
    assert f"constexpr int kThreads = {copy_cuda.THREADS};" in copy_cuda.SOURCE.read_text()


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
    move = copies.move_of(copies.Signature.of(torch.zeros(3)), copies.Signature.of(torch.zeros(4)), None, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        move.itemsize = 3  # type: ignore[misc]
