"""CopyPlan against a loop of ``.copy_`` on poisoned memory, on every backend that this machine has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from conftest import HAS_GPU
from kvstrata.replay import Bound, CopyPlan, copies
from kvstrata.replay import cuda as copy_cuda
from kvstrata.replay.copies import Fill
from replay_model import BACKENDS, DEVICE, Copies, buffers, check, int32
from replay_model import copies as any_copies

gpu = pytest.mark.gpu


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_copies_equal_the_loop(backend: str) -> None:
    @settings(max_examples=30 if backend == "triton" and not HAS_GPU else 200)
    @given(any_copies(DEVICE))
    def run(call: Copies) -> None:
        check(call, backend)

    run()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_copies_than_a_launch_holds_all_arrive(backend: str) -> None:
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
def test_only_live_pages_of_a_page_table_are_copied(backend: str) -> None:
    lengths = torch.tensor([33, 0, 16, 1, 160], dtype=torch.int32, device=DEVICE)
    src, dst = int32(5, 9), torch.full((8, 16), -7, dtype=torch.int32, device=DEVICE)
    CopyPlan([dst], [src], lengths=Bound(lengths, per=16), backend=backend).run()
    for row, pages in enumerate((3, 0, 1, 1, 9)):
        assert torch.equal(dst[row, :pages], src[row, :pages])
        assert (dst[row, pages:] == -7).all()
    assert (dst[5:] == -7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_live_rows_come_from_the_device(backend: str) -> None:
    """A captured plan reads the batch from memory; offsets have one entry more and are padded with the last."""
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
def test_nothing_to_copy_writes_nothing(backend: str) -> None:
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


def test_the_fast_path_is_taken_if_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
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
