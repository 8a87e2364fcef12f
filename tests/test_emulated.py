"""The CUDA C++ decode kernels themselves, run on the CPU (emulator.py), against the float32 model."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

import emulator
from conftest import HAS_GPU
from decode_model import Case, case_of, check, filled
from kvstrata import DecodePlan, PagedCache, decode_attention
from kvstrata.attention.decode import cuda as decode_cuda
from kvstrata.attention.decode import op, stages
from kvstrata.attention.decode.stages import FEW, Cut, begin_cost, cost, few_begin, few_cost, stage_tokens
from kvstrata.jit import tuned
from kvstrata.layout import Format
from kvstrata.tools.bench import synthetic

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="the kernels run on the GPU here"),
    pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing())),
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend without CUDA: three multiprocessors."""
    emulator.decode_without_cuda(monkeypatch)


FULL = dict(page_tokens=64, recent=0, plain=False)
CASES: dict[str, tuple[list[int], dict]] = {
    "four tiers": ([150, 1, 97], dict(tiers=("K8V8", "K4V4", "K3V3", "K2V2"), page_tokens=64, group=4)),
    "queries, softcap": ([70, 33], dict(q_len=3, group=4, options=dict(softcap=5.0), tiers=("K4V4", "K2V4"))),
    "hidden in full pages": ([128], dict(q_len=4, group=4, tiers=("K4V4",), dim=128) | FULL),
    "window in full pages": ([128], dict(tiers=("K2V2",), options=dict(sliding_window=70)) | FULL),
    "odd head_dim, window": ([70, 21], dict(dim=80, tiers=("K3V2",), page_tokens=32, options=dict(sliding_window=33))),
    "D 128": ([200], dict(dim=128, tiers=("K8V4", "K3V3"), page_tokens=64, group=8)),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated_decode_of_tiers_equals_the_model(name: str) -> None:
    lengths, options = CASES[name]
    check(case_of(lengths, dtype=torch.bfloat16, **options), "cuda")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_emulated_decode_over_a_paged_cache_equals_the_model(layout: str) -> None:
    shape = (9, 32, 2, 64) if layout == "NHD" else (9, 2, 32, 64)
    k, v = torch.randn(2, *shape).half()
    table = torch.tensor([[3, 1, 8], [5, 0, -7]], dtype=torch.int32)
    lengths = torch.tensor([70, 33], dtype=torch.int32)
    cache = PagedCache(k, v, table, lengths, layout=layout)
    case = Case(cache, torch.randn(2, 2, 6, 64).half(), [0, 1], [70, 33], options=dict(sliding_window=40))
    check(case, "cuda")


def test_fixed_split_is_batch_invariant() -> None:
    cache = filled([300, 20, 150], dtype=torch.bfloat16)
    q = torch.randn(3, 1, 6, 64).bfloat16()
    together = DecodePlan(cache, 6, fixed_split=64)
    together.update()
    out = decode_attention(q, cache, plan=together, backend="cuda")
    assert together.cuda().chunks > 3
    for request in range(3):
        alone = DecodePlan(cache, 6, requests=[request], fixed_split=64)
        alone.update()
        one = decode_attention(q[request : request + 1], cache, requests=[request], plan=alone, backend="cuda")
        assert torch.equal(out[request : request + 1], one)


def test_one_list_for_all_layers() -> None:
    cache = filled([70, 33], layers=2, dtype=torch.bfloat16, tiers=("K4V4",))
    step = DecodePlan(cache, 6)
    step.update()
    q = torch.randn(2, 1, 6, 64).bfloat16()
    for layer in range(2):
        got = decode_attention(q, cache, layer, plan=step, backend="cuda")
        assert torch.equal(got, decode_attention(q, cache, layer, backend="cuda"))


@pytest.mark.parametrize("combine", [1, 8])
def test_launch_configuration_of_a_tuned_table(combine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a step is cut, the result is the same."""
    cut = Cut(warps=2, resident=8, width=1, waves=3, combine=combine)  # 12 columns read pages twice
    monkeypatch.setattr(tuned, "lookup", lambda op, gpu, shape: asdict(cut))
    case = case_of([150, 40], dtype=torch.bfloat16, tiers=("K4V4", "K2V2"), page_tokens=64, group=4, q_len=3)
    check(case, "cuda")
    assert [plan.cut for plan in decode_cuda._OWNED[case.cache].values()] == [cut]


@pytest.mark.parametrize("dim", [32, 80, 256])
def test_one_warp_combines_a_column(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More partials than it takes at a time, requests with none, and a sink."""
    cut = Cut(warps=1, resident=8, width=1, waves=4, combine=1)
    monkeypatch.setattr(tuned, "lookup", lambda op, gpu, shape: asdict(cut))
    options = dict(sinks=torch.tensor([0.5, -1.0, -torch.inf, 2.0]))
    check(case_of([200, 0, 33], dim=dim, dtype=torch.bfloat16, tiers=("K4V4",), group=2, options=options), "cuda")


@pytest.mark.parametrize("counts", [[64, 3000, 12, 12], [5, 1, 0, 70], [40, 700, 500, 300], [3, 0, 0, 1]])
def test_work_list_covers_every_stage_once(counts: list[int]) -> None:
    """Every stage is in one chunk, a group's partial results are those its chunks write, and short groups count."""
    tiers, requests = ("K16V16", "K8V8", "K4V4", "K2V2"), 24
    held = torch.tensor(counts).expand(requests, 2, 4).clone()
    held[::3, 0] //= 2
    formats = tuple(Format.parse(name, 128) for name in tiers)
    buckets = synthetic.layer(formats, held, torch.bfloat16, torch.device("cpu"), 0)
    rows = list(range(requests))
    q = torch.randn(requests, 1, 8, 128).bfloat16()
    job = op.Job(q, buckets, None, rows, 2, max(counts), 1.0, None, None, None, False, False)
    step = decode_cuda.WorkPlan(decode_cuda.Source.of(job), tuple(rows), 2, 8, 1)
    step.parts.fill_(-1)
    step.update()
    groups = step.stages[0, :, 2].tolist()
    per_stage = [stage_tokens(f) for f in formats]
    expected = [-(-int(held[row, head, t]) // per_stage[t]) for t in range(4) for row in rows for head in range(2)]
    total = sum(expected)
    assert [groups[:total].count(g) for g in range(len(expected))] == expected
    few = total <= FEW * step.chunks
    price, begin = (few_cost, few_begin(formats[0])) if few else (cost, begin_cost(formats[0]))

    places = [(number, at, end, place) for place, (at, end, number) in enumerate(step.parts[0, :, 4:7].tolist())]
    live = sorted(chunk for chunk in places if chunk[2] > chunk[1])
    assert [at for _, at, _, _ in live] == [0, *(end for _, _, end, _ in live[:-1])]
    assert live[-1][2] == total
    workers = step.chunks // step.multiprocessors
    on_each = [sum(place // workers == m for *_, place in live) for m in range(step.multiprocessors)]
    assert max(on_each) - min(on_each) <= max(1, -(-len(live) // step.multiprocessors) // 2), "all get some"
    written: dict[int, list[int]] = {}
    loads = []
    for number, first, end, place in live:
        own_groups = groups[first:end]
        assert step.parts[0, place, :4].tolist() == step.stages[0, first].tolist()
        for group in sorted(set(own_groups)):
            written.setdefault(group, []).append(number + group)
        loads.append(sum(price(formats[g // 48]) for g in own_groups) + len(set(own_groups)) * begin)
    for group, (first, count) in enumerate(step.slots[0].tolist()):
        assert written.get(group, []) == list(range(first, first + count))
    share, largest = sum(loads) / len(loads), max(map(price, formats))
    assert max(loads) <= max(1.1 * share, 2 * largest) + largest + 2 * begin


def test_costs_past_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of hundreds of GB is cut as a small one is: sums of costs are of 64 bits."""
    formats = tuple(Format.parse(name, 128) for name in ("K16V16", "K4V4"))
    held = torch.tensor([64, 9000]).expand(8, 2, 2).clone()
    held[::3, 0] //= 2
    buckets = synthetic.layer(formats, held, torch.bfloat16, torch.device("cpu"), 0)
    rows = tuple(range(8))
    job = op.Job(
        torch.randn(8, 1, 8, 128).bfloat16(), buckets, None, list(rows), 2, 9064, 1.0, *[None] * 3, False, False
    )
    lists = []
    for factor in (1, 1 << 21):
        for name in ("cost", "begin_cost", "few_cost", "few_begin"):
            own = getattr(stages, name)
            monkeypatch.setattr(decode_cuda, name, lambda f, own=own, factor=factor: factor * own(f))
        step = decode_cuda.WorkPlan(decode_cuda.Source.of(job), rows, 2, 8, 1)
        step.parts.fill_(-1)
        step.update()
        lists.append((step.parts[0, :, 4:7], step.slots))
    assert (lists[0][0][:, 1] > 0).sum() > 30
    assert all(map(torch.equal, *lists))
