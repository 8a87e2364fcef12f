"""CopyPlan against a loop of ``.copy_`` on poisoned memory, on every backend that this machine has."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from conftest import HAS_GPU
from kvstrata import backends, jit
from kvstrata.jit import tuned
from kvstrata.replay import Bound, CopyPlan, copies, memory, space
from kvstrata.replay import cuda as copy_cuda
from kvstrata.replay.copies import Fill
from replay_model import Copies
from replay_model import copies as any_copies

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["reference", "triton"] + ["cuda"] * (HAS_GPU and not backends.missing("cuda", DEVICE))
gpu = pytest.mark.gpu


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor).reshape(-1).view(torch.uint8)
    )


def check(call: Copies, backend: str) -> None:
    """Run with sources given to ``run``, then with those of the plan, and compare every byte of all pools."""
    for bound in (False, True):
        call.poison()
        expected = call.expected()
        before = [None if t is None else t.clone() for t in call.src]
        plan = CopyPlan(call.dst, call.src if bound else None, backend=backend, **call.options)
        for _ in range(2):
            plan.run() if bound else plan.run(call.src)
        for i, (pool, want) in enumerate(zip(call.pools, expected, strict=True)):
            assert torch.equal(pool, want), (i, call.dst[i], call.src[i], call.fill[i], call.rows[i], call.lengths[i])
        for old, new in zip(before, call.src, strict=True):
            if old is not None:
                assert torch.equal(raw(old), raw(new))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_copies_equal_the_loop(backend: str) -> None:
    @settings(max_examples=30 if backend == "triton" and not HAS_GPU else 200)
    @given(any_copies(DEVICE))
    def run(call: Copies) -> None:
        check(call, backend)

    run()


def int32(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int().to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_copies_than_a_launch_holds(backend: str) -> None:
    src = [int32(3 + i, seed=i) for i in range(2 * copy_cuda.MOST + 5)]
    dst = [torch.full((80,), 7, dtype=torch.int32, device=DEVICE) for _ in src]
    CopyPlan(dst, src, backend=backend).run()
    for a, b in zip(dst, src, strict=True):
        assert torch.equal(a[: len(b)], b)
        assert (a[len(b) :] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_shrink_and_grow_and_pointers_change(backend: str) -> None:
    """Lengths, widths, offsets into a pool and optional sources from run to run; the buffers know nothing of before."""
    dst = [torch.empty(17, dtype=torch.int32, device=DEVICE), torch.empty(16, 40, dtype=torch.int32, device=DEVICE)]
    plan = CopyPlan(dst, fill=[None, -1], backend=backend)
    pool = int32(5000)
    for step in range(60):
        bs, width, at = step * 7 % 17, step * 11 % 41, step % 5
        src = [pool[at : at + bs], pool[at * 3 :].as_strided((bs, width), (width + step % 3, 1)) if step % 6 else None]
        for buffer in dst:
            buffer.fill_(99)
        plan.run(src)
        assert torch.equal(dst[0][:bs], src[0])
        assert (dst[0][bs:] == 99).all()
        if src[1] is None:
            assert (dst[1] == 99).all()
        else:
            assert torch.equal(dst[1][:bs, :width], src[1])
            assert (dst[1][bs:] == -1).all()
            assert (dst[1][:, width:] == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_source_to_many_and_columns_of_one_buffer(backend: str) -> None:
    src, pool = int32(5, 4), torch.zeros(8, 12, dtype=torch.int32, device=DEVICE)
    parts = [pool[:, :4], pool[:, 4:8], pool[:, 8:]]
    CopyPlan(parts, [src, src, src + 1], backend=backend).run()
    assert torch.equal(pool[:5], torch.cat([src, src, src + 1], 1))
    assert (pool[5:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_live_pages_of_a_page_table(backend: str) -> None:
    lengths = torch.tensor([33, 0, 16, 1, 160], dtype=torch.int32, device=DEVICE)
    src, dst = int32(5, 9), torch.full((8, 16), -7, dtype=torch.int32, device=DEVICE)
    CopyPlan([dst], [src], lengths=Bound(lengths, per=16), backend=backend).run()
    for row, pages in enumerate((3, 0, 1, 1, 9)):
        assert torch.equal(dst[row, :pages], src[row, :pages])
        assert (dst[row, pages:] == -7).all()
    assert (dst[5:] == -7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_live_rows_come_from_the_device(backend: str) -> None:
    """What a captured plan does: the batch is a number in memory, offsets have one more and end level."""
    live = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ids, cu = int32(8), torch.arange(0, 90, 10, dtype=torch.int32, device=DEVICE)
    to_ids, to_cu = torch.empty_like(ids), torch.empty_like(cu)
    plan = CopyPlan([to_ids, to_cu], [ids, cu], fill=[-1, "last"], rows=[live, Bound(live, extra=1)], backend=backend)
    for bs in (8, 3, 0, 5, 100):
        live.fill_(bs)
        plan.run()
        n = min(bs, 8)
        assert torch.equal(to_ids[:n], ids[:n])
        assert (to_ids[n:] == -1).all()
        assert to_cu.tolist() == [10 * min(i, n) for i in range(9)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_copy(backend: str) -> None:
    CopyPlan([], [], backend="reference").run()
    dst = torch.ones(0, 4, device=DEVICE)
    CopyPlan([dst], [dst.clone()], fill=1.0, backend=backend).run()
    full = torch.ones(3, 4, device=DEVICE)
    plan = CopyPlan([full, dst], backend=backend)
    plan.run([full[:0] * 2, dst])
    plan.run([None, None])
    plan.run([(full * 2)[:, :0], None])
    assert (full == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fill", "want"), [(None, 7), (-1, -1), ("last", 0)])
def test_an_empty_source_covers_nothing(fill: Fill, want: int, backend: str) -> None:
    dst = torch.full((4,), 7, dtype=torch.int32, device=DEVICE)
    plan = CopyPlan([dst], fill=fill, backend=backend)
    plan.run([None])
    assert (dst == 7).all()
    plan.run([dst.new_empty(0)])
    assert (dst == want).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", copies.KINDS)
@pytest.mark.parametrize("source", copies.KINDS)
def test_casts_as_torch_does(source: torch.dtype, target: torch.dtype, backend: str) -> None:
    numbers = [0, 1, 2, 100, 127, 33.5, 0.25, -1, -100, -3.75, 255, 300, 32767, 70000, 2**31 - 1, 2**40 + 1, 1e-7, 1e30]
    real_to_whole = source.is_floating_point and not target.is_floating_point
    if real_to_whole:  # outside of the target's range the result is undefined
        most = 1 if target is torch.bool else torch.iinfo(target).max
        numbers = [x for x in numbers if 0 <= x <= min(most, 60000) or target is torch.bool]
    x = torch.tensor(numbers, dtype=torch.float64)
    whole = not source.is_floating_point
    x = x.long().to(source) if whole else x.to(source)
    if real_to_whole:
        x = x[x.isfinite()]
    want = x.to(target)
    dst = torch.zeros(len(x) + 3, dtype=target, device=DEVICE)
    CopyPlan([dst], [x.to(DEVICE)], cast=True, fill=1, backend=backend).run()
    assert torch.equal(dst[: len(x)].cpu(), want), (dst.cpu(), want)
    assert (dst[len(x) :].float() == 1).all()


def test_every_half_of_bf16_rounds_alike() -> None:
    bits = torch.cat([torch.arange(0, 2**32, 655211), 0x3F807000 + torch.arange(0x2000)])  # ties and their neighbours
    x = bits.to(torch.int64).sub(2**32 * (bits >= 2**31)).to(torch.int32).view(torch.float32)
    x = x[~x.isnan()].to(DEVICE)
    for backend in BACKENDS:
        dst = torch.zeros(len(x), dtype=torch.bfloat16, device=DEVICE)
        CopyPlan([dst], [x], cast=True, backend=backend).run()
        assert torch.equal(dst.view(torch.int16), x.bfloat16().view(torch.int16)), backend


def buffers() -> list[torch.Tensor]:
    return [torch.zeros(8, dtype=torch.int32, device=DEVICE), torch.zeros(8, 16, dtype=torch.int32, device=DEVICE)]


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
    "dst twice": (lambda d: CopyPlan([d[0], d[1], d[0]]), ValueError, r"dst\[2\]: expected memory .* dst\[0\]"),
    "dst overlap": (lambda d: CopyPlan([d[0][:5], d[0][4:]]), ValueError, r"dst\[1\]: expected memory of its own"),
    "columns overlap": (lambda d: CopyPlan([d[1][:, :5], d[1][:, 4:]]), ValueError, "memory of its own"),
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


def test_a_backend_that_is_not_there() -> None:
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
def test_memory_is_exact(call: Copies) -> None:
    """Runs, overlap and folding against sets of byte addresses."""
    for dst in call.dst:
        other = dst.as_strided(dst.shape, dst.stride(), max(dst.storage_offset() - 2, 0))

        def touched(t: torch.Tensor) -> list[int]:
            at = torch.zeros(t.shape, dtype=torch.int64)
            for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
                at += (torch.arange(n) * stride).reshape([-1 if d == dim else 1 for d in range(t.dim())])
            starts = (at.flatten() * t.itemsize + t.data_ptr()).tolist()
            return [start + b for start in starts for b in range(t.itemsize)]

        mine, theirs = touched(dst), touched(other)
        assert memory.folds(dst) == (len(set(mine)) < len(mine))
        assert memory.overlap(dst, other) == bool(set(mine) & set(theirs))
        assert sorted(b for start, end in memory.runs(dst).tolist() for b in range(start, end)) == sorted(mine)


def test_overlap_of_columns() -> None:
    pool = torch.zeros(64, 64)
    assert memory.overlap(pool[:, :33], pool[:, 32:])
    assert not memory.overlap(pool[:, :32], pool[:, 32:])
    assert not memory.overlap(pool[::2], pool[1::2])
    assert memory.overlap(pool[:, 3], pool[5])
    assert not memory.overlap(pool[:3, 3], pool[5])


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
def test_copy_gates(count: int, casts: bool, staged: bool, cut: copy_cuda.Config, arch: str) -> None:
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


@gpu
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


@gpu
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_large_tables_at_every_alignment(backend: str) -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        pool = torch.randint(0, 100, (1 << 22,), device=DEVICE).to(dtype)
        for offset, width in ((0, 4096), (1, 4096), (2, 4093), (4, 4092), (8, 1000)):
            src = pool[offset:].as_strided((257, width), (width, 1))
            dst = torch.full((300, 8192), 7, dtype=dtype, device=DEVICE)
            CopyPlan([dst], [src], fill=3, backend=backend).run()
            want = torch.full_like(dst, 3)
            want[:257, :width] = src
            assert torch.equal(dst, want), (dtype, offset, width)


@gpu
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_captured_runs_follow_the_device(backend: str) -> None:
    live = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    src, dst = int32(64, 100), torch.empty(64, 128, dtype=torch.int32, device=DEVICE)
    plan = CopyPlan([dst], [src], fill=-1, rows=live, backend=backend)
    plan.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        plan.run()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 0, "a run allocated"
    for step in range(200):
        live.fill_(step % 65)
        src.add_(1)
        graph.replay()
        want = torch.full_like(dst, -1)
        want[: step % 65, :100] = src[: step % 65]
        assert torch.equal(dst, want)


@gpu
@pytest.mark.sanitizer
def test_odd_copies_under_the_sanitizer() -> None:
    """Every width, tails of rows, fills, bounds and a cast; every tensor is an allocation of its own there."""
    live = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    for dtype, width in (
        (torch.uint8, 37),
        (torch.int16, 21),
        (torch.int32, 19),
        (torch.int64, 5),
        (torch.float32, 64),
    ):
        src = [torch.ones(5, width, device=DEVICE).to(dtype), torch.ones(width, device=DEVICE).to(dtype)]
        dst = [torch.zeros(7, width + 3, device=DEVICE).to(dtype), torch.zeros(width, device=DEVICE).to(dtype)]
        dst.append(torch.zeros(width, dtype=torch.float16, device=DEVICE))
        options = dict(fill=[2, "last", None], rows=[live, Bound(live, extra=1), None], cast=[False, False, True])
        CopyPlan(dst, [*src, src[1]], backend="cuda", **options).run()
        assert dst[0].float().sum() == 3 * width + 2 * (7 * (width + 3) - 3 * width)
        assert (dst[1] == 1).all()
        assert (dst[2] == 1).all()


@gpu
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_side_stream_does_not_wait(backend: str) -> None:
    src, dst = int32(64, 100), torch.zeros(64, 128, dtype=torch.int32, device=DEVICE)
    plan = CopyPlan([dst], backend=backend)
    plan.run([src])
    dst.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        plan.run([src])
    assert not stream.query(), "the run waited for the stream"
    stream.synchronize()
    assert torch.equal(dst[:, :100], src)


@gpu
def test_first_run_may_be_captured() -> None:
    src, dst = int32(64), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    plan = CopyPlan([dst], [src], backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run()
    assert (dst == 0).all()
    graph.replay()
    assert torch.equal(dst, src)


def test_the_fast_way_is_taken_when_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal run binds nothing; other looks, other places and missing sources do."""
    plan = CopyPlan(buffers(), backend="reference")
    bound = []
    bind = plan._bind
    monkeypatch.setattr(plan, "_bind", lambda src: bound.append(1) or bind(src))
    src = [torch.ones(4, dtype=torch.int32, device=DEVICE), torch.ones(4, 4, dtype=torch.int32, device=DEVICE)]
    less, without = [t[:3] for t in src], [None, src[1]]
    for given_, binds in (
        (src, 1),
        (src, 2),
        (src, 2),
        (less, 3),
        (src, 4),
        (src, 4),
        (without, 5),
        (src, 6),
        (src, 6),
    ):
        plan.run(given_)  # what is seen the second time gets a guard
        assert len(bound) == binds
    moved = [t.clone() for t in src]
    for _ in range(3):
        plan.run(moved)
    assert len(bound) == 7, "a new place is looked at once"


def test_descriptors_are_immutable() -> None:
    move = copies.move_of(copies.Look.of(torch.zeros(3)), copies.Look.of(torch.zeros(4)), None, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        move.itemsize = 3  # type: ignore[misc]
