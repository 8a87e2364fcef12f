"""Repeated calls of prefill_packed: kept launches get the arguments that a checked call would have given them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata import Format
from kvstrata.attention.packed_prefill import repeat, split_triton
from kvstrata.attention.packed_prefill import triton as packed_triton
from kvstrata.attention.packed_prefill.job import Job, Options, Tensors, check
from kvstrata.attention.packed_repeat import KnownCall, Recent

FMT = Format.parse("K4V4", 64, 16)


class Kernel:
    """A Triton kernel that is compiled by being launched, and only notes its arguments."""

    def __init__(self, kernel: Any, launches: list[tuple]) -> None:
        names = list(kernel.arg_names)
        self.arg_names, self.launches = names, launches
        self.params = [type("Param", (), {"do_not_specialize": False}) for _ in names]

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*args: Any, num_warps: int = 0, **constants: Any) -> Any:
            in_order = [constants[name] for name in self.arg_names if name in constants]
            self.launches.append(
                (grid, *(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in (*args, *in_order)))
            )
            return self

        return launch


def job_of(new: list[int], prefix: int, seed: int, **options: Any) -> Job:
    generator = torch.Generator().manual_seed(seed)
    lengths, total = [prefix + n for n in new], sum(new)
    q = torch.randn(total, 4, 64, generator=generator).half()
    k, v = torch.randn(2, total, 2, 64, generator=generator).half()
    pages = torch.zeros(16, 2, FMT.page_bytes, dtype=torch.uint8)
    table = torch.zeros(len(new), 8, dtype=torch.int32)
    cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    tensors = Tensors(q, k, v, pages, table, torch.tensor(lengths, dtype=torch.int32), cu)
    bounds = dict(max_seqlen_q=max(new), max_seqlen_k=max(lengths), total_tokens=sum(lengths))
    return check(tensors, FMT, Options(**bounds, **options))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    noted: list[tuple] = []
    for name in ("unpack_kernel", "sums_kernel"):
        kernel = Kernel(getattr(packed_triton, name), noted)
        for module in (packed_triton, repeat):
            monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return noted


@pytest.mark.parametrize(("new", "exact"), [([12, 12], True), ([12, 5], False)])
def test_kept_launches_get_the_same_arguments(
    new: list[int], exact: bool, launches: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    attended: list[tuple] = []
    monkeypatch.setattr(repeat, "prepare", lambda *job: lambda *other: attended.append(other))
    job, other = (job_of(new, 30, seed, exact_lengths=exact, return_lse=True) for seed in range(2))
    assert repeat.keeps(job)
    packed_triton.run(job, "reference")
    kept = repeat.Repeat(job)
    assert kept.complete
    assert len(launches) == (1 if exact else 2)  # nothing was launched to keep it
    first, launches[:] = list(launches), []
    packed_triton.run(other, "reference")
    wanted, launches[:] = list(launches), []
    out, lse = kept.run((*other.tensors, None))
    assert [len(x) for x in launches] == [len(x) for x in wanted] == [len(x) for x in first]
    differ = [
        [i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b] for pair in zip(wanted, launches, strict=True)
    ]
    # A launch's grid is first; then memory of the call: sums, then k, v and the sums again.
    if exact:
        assert set(differ[0]) <= {1, 2, *absent(other)}
    else:
        assert set(differ[0]) <= {3}
        assert set(differ[1]) <= {1, 2, 7, *absent(other)}
    (attention, into, lse_into), q = attended[0], other.tensors.q
    assert attention.q.data_ptr() == q.data_ptr()
    assert into.data_ptr() == out.data_ptr()
    assert lse is not None
    assert lse_into.data_ptr() == lse.data_ptr()
    assert lse.shape == q.shape[:2]
    assert attention.q.shape[:-2] == ((2, 12) if exact else (17,))
    assert attention.k.shape[:-2] == ((2, 42) if exact else (77,))
    assert (attention.cu_seqlens_k is None) == exact


def test_kept_launches_of_a_split_prefix(launches: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of parts, the rest with the causal mask, and their merge, from the same memory."""
    for name in ("SHORTEST", "ALIGNED"):
        monkeypatch.setattr(split_triton, name, 16)
    for module in (packed_triton, repeat):
        monkeypatch.setattr(module, "processors_of", lambda device: (13, False))
    monkeypatch.setattr(split_triton, "merge_kernel", Kernel(split_triton.merge_kernel, launches))
    attended: list[tuple] = []
    monkeypatch.setattr(split_triton, "prepare", lambda *job: lambda *other: attended.append(other))
    job, other = (job_of([7], 110, seed, exact_lengths=True, softcap=4.0) for seed in range(2))
    packed_triton.run(job, "reference")
    kept = repeat.Repeat(job)
    assert kept.complete
    launches.clear()
    packed_triton.run(other, "reference")
    wanted, launches[:] = list(launches), []
    out, lse = kept.run((*other.tensors, None))
    assert lse is None
    far, near = attended
    assert (far[0].q.shape, far[0].k.shape) == ((3, 7, 4, 64), (3, 32, 2, 64))
    assert torch.equal(far[0].q, other.tensors.q.expand(3, -1, -1, -1))
    assert near[0].q.data_ptr() == other.tensors.q.data_ptr()
    assert near[0].k.shape == (1, 21, 2, 64)
    assert near[0].k.data_ptr() == far[0].k.data_ptr() + far[0].k.nbytes
    assert [x[0].causal for x in attended] == [False, True]
    assert [x[0].softcap for x in attended] == [4.0, 4.0]
    merged, checked = launches[-1], wanted[-1]
    assert merged[1:6] == (*(x.data_ptr() for x in (*far[1:], *near[1:])), out.data_ptr())
    assert merged[7:] == checked[7:]  # sizes, strides and constants
    assert merged[0] == checked[0]


def absent(job: Job) -> list[int]:
    """Places of unpack_kernel's arguments, grid included, that stand for tensors which the call does not have."""
    return [1 + i for i in (9, 10, *range(12, 18))]


@pytest.mark.parametrize("change", [dict(max_seqlen_q=None), dict(total_tokens=0)])
def test_calls_whose_launches_are_not_kept(change: dict) -> None:
    job = job_of([12], 30, 0)
    assert repeat.keeps(job)
    assert not repeat.keeps(job._replace(options=job.options._replace(**change)))


def test_recent_calls_by_signature() -> None:
    recent, x = Recent(), torch.zeros(4)
    device = torch._C._cuda_getDevice() if torch.cuda.is_available() else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getDevice", lambda: device, raising=False)
        for number in range(12):
            result = (torch.full((1,), float(number)), None)
            recent.remember(KnownCall((number,), (x, None), set(), lambda memory, result=result: result, device))
        assert recent.repeat((3,), (x, None)) is None  # eight are remembered
        for number in (11, 5, 11, 4):
            again = recent.repeat((number,), (x, None))
            assert again is not None
            assert int(again[0]) == number
        assert recent.repeat((11,), (x, x)) is None
        assert recent.repeat((11,), (x.double(), None)) is None
        assert recent.repeat((11,), (torch.zeros(16)[1:5], None)) is not None  # an address of 4 bytes is enough for q
        patch.setattr(torch._C, "_cuda_getDevice", lambda: device + 1, raising=False)
        assert recent.repeat((11,), (x, None)) is None
