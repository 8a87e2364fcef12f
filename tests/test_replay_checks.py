"""CopyPlan's errors, and the memory that tensors share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kvstrata.replay import Bound, CopyPlan, memory
from replay_model import DEVICE, Copies, buffers
from replay_model import copies as any_copies

ONE = torch.zeros(1, dtype=torch.int32, device=DEVICE)

BAD = {
    "dst is a tensor": (lambda d: CopyPlan(d[1]), TypeError, r"dst: expected a list .* one tensor of shape \[8, 16\]"),
    "dst is no list": (lambda d: CopyPlan(3), TypeError, "dst: expected a list of tensors, got int"),
    "src is a tensor": (lambda d: CopyPlan(d, d[1][:2].clone()), TypeError, "src: expected a list of tensors, got one"),
    "run of a tensor": (lambda d: CopyPlan(d).run(d[1][:2].clone()), TypeError, "src: expected a list of tensors"),
    "not a tensor": (lambda d: CopyPlan([d[0], 3]), TypeError, r"dst\[1\]: expected a tensor, got int"),
    "four dimensions": (lambda d: CopyPlan([d[1].reshape(2, 4, 4, 4)]), ValueError, "at most 3 dimensions"),
    "expanded": (lambda d: CopyPlan([d[0][:1].expand(4)]), ValueError, "expected elements that do not share"),
    "folded": (lambda d: CopyPlan([d[0].as_strided((3, 3), (1, 2))]), ValueError, "do not share memory"),
    "dst twice": (lambda d: CopyPlan([d[0], d[1], d[0]]), ValueError, r"dst\[2\]: expected separate memory.* dst\[0\]"),
    "dst overlap": (lambda d: CopyPlan([d[0][:5], d[0][4:]]), ValueError, r"dst\[1\]: expected separate memory"),
    "columns overlap": (lambda d: CopyPlan([d[1][:, :5], d[1][:, 4:]]), ValueError, "separate memory"),
    "src is dst": (lambda d: CopyPlan(d, [d[0], None]), ValueError, r"src\[0\]: expected memory that no copy writes"),
    "src in another dst": (lambda d: CopyPlan(d, [d[1][2, :8], None]), ValueError, r"src\[0\].* got some of dst\[1\]"),
    "too few": (lambda d: CopyPlan(d, [None]), ValueError, "src: expected 2 tensors, one for each of dst, got 1"),
    "no sources": (lambda d: CopyPlan(d).run(), ValueError, "src: expected a tensor for each"),
    "type": (lambda d: CopyPlan(d, [None, [1]]), TypeError, r"src\[1\]: expected a tensor or None, got list"),
    "rank": (lambda d: CopyPlan(d, [None, d[0].clone()]), ValueError, r"src\[1\]: expected 2 dimensions"),
    "too large": (lambda d: CopyPlan([d[0][:4]], [d[0].clone()]), ValueError, r"src\[0\]: expected at most \[4\]"),
    "dtype": (lambda d: CopyPlan([d[0]], [d[0].long()]), TypeError, r"expected torch.int32 .* torch.int64; cast=True"),
    "no cast": (lambda d: CopyPlan([d[0]], [d[0].double()], cast=True), TypeError, r"src\[0\]: expected one of"),
    "device": (lambda d: CopyPlan([d[0]], [d[0].to("meta")]), ValueError, r"src\[0\]: expected a tensor on"),
    "fills": (lambda d: CopyPlan(d, fill=[0]), ValueError, "fill: expected one value or 2"),
    "fill type": (lambda d: CopyPlan(d, fill=[0, ONE]), TypeError, r"fill\[1\]: expected a number"),
    "fill word": (lambda d: CopyPlan(d, fill=["first", 0]), ValueError, r"fill\[0\]: .* got 'first'"),
    "last in 2-D": (lambda d: CopyPlan(d, fill="last"), ValueError, r"fill\[1\]: expected 'last' for a 1-D"),
    "fill range": (lambda d: CopyPlan(d, fill=2**31), ValueError, r"fill\[0\]: expected a value of torch.int32"),
    "fill half": (lambda d: CopyPlan(d, fill=0.5), ValueError, r"fill\[0\]: expected a whole number"),
    "rows type": (lambda d: CopyPlan(d, rows=3), TypeError, r"rows\[0\]: expected a tensor, a Bound or None, got int"),
    "rows dtype": (lambda d: CopyPlan(d, rows=ONE.float()), TypeError, r"rows\[0\]: expected torch.int32"),
    "rows shape": (lambda d: CopyPlan(d, rows=d[0].clone()), ValueError, r"rows\[0\]: expected one element"),
    "rows written": (lambda d: CopyPlan(d, rows=d[0][:1]), ValueError, r"rows\[0\]: expected memory that no copy"),
    "per": (lambda d: CopyPlan(d, rows=Bound(ONE, per=0)), ValueError, "expected per of at least 1"),
    "lengths and rows": (lambda d: CopyPlan([d[0]], rows=ONE, lengths=ONE), ValueError, r"lengths\[0\]: expected None"),
    "lengths of 3-D": (lambda d: CopyPlan([d[1][None]], lengths=ONE), ValueError, "expected None for a 3-D copy"),
    "too few lengths": (lambda d: CopyPlan([d[1]], [d[1].clone()], lengths=ONE), ValueError, "at least 8"),
    "backend": (lambda d: CopyPlan(d, backend="fast"), ValueError, "backend: expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(buffers())


def test_a_missing_backend_raises() -> None:
    with pytest.raises(RuntimeError, match="cuda needs CUDA tensors, got some on cpu"):
        CopyPlan([torch.zeros(3)], backend="cuda")


def test_new_sources_are_checked_in_a_plan_that_ran() -> None:
    dst = buffers()
    plan = CopyPlan(dst)
    good = [t.clone() for t in dst]
    for _ in range(3):
        plan.run(good)
    with pytest.raises(ValueError, match=r"src\[0\]: expected memory that no copy writes"):
        plan.run([dst[0], good[1]])
    with pytest.raises(TypeError, match="cast=True"):
        plan.run([good[0].float(), good[1]])
    with pytest.raises(ValueError, match="got 1"):
        plan.run(good[:1])
    plan.run(good)


@settings(max_examples=300)
@given(any_copies(torch.device("cpu"), most=1))
def test_runs_and_overlap_equal_sets_of_addresses(call: Copies) -> None:
    """Runs, overlap and folding against sets of byte addresses."""
    for dst in call.dst:
        other = dst.as_strided(dst.shape, dst.stride(), max(dst.storage_offset() - 2, 0))

        def touched(t: torch.Tensor) -> list[int]:
            at = torch.zeros(t.shape, dtype=torch.int64)
            for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
                at += (torch.arange(n) * stride).reshape([-1 if d == dim else 1 for d in range(t.dim())])
            starts = (at.flatten() * t.itemsize + t.data_ptr()).tolist()
            return [start + b for start in starts for b in range(t.itemsize)]

        bytes_of_dst, bytes_of_other = touched(dst), touched(other)
        assert memory.self_overlaps(dst) == (len(set(bytes_of_dst)) < len(bytes_of_dst))
        assert memory.overlap(dst, other) == bool(set(bytes_of_dst) & set(bytes_of_other))
        assert sorted(b for start, end in memory.runs(dst).tolist() for b in range(start, end)) == sorted(bytes_of_dst)


def test_columns_overlap_only_where_they_share_bytes() -> None:
    pool = torch.zeros(64, 64)
    assert memory.overlap(pool[:, :33], pool[:, 32:])
    assert not memory.overlap(pool[:, :32], pool[:, 32:])
    assert not memory.overlap(pool[::2], pool[1::2])
    assert memory.overlap(pool[:, 3], pool[5])
    assert not memory.overlap(pool[:3, 3], pool[5])
