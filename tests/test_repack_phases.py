"""Moves that CUDA C++ plans and makes, phase by phase: on the CPU by the emulator, against moves.py and the reference.

The tests of test_repack.py run the same kernels on a GPU, where "cuda" is one of its backends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import emulator
import gates
import test_repack
from conftest import HAS_GPU
from kvstrata import backends
from kvstrata.cache.move import apply, launches, moves_cuda, repack_cuda, whole_pages
from kvstrata.cache.move import phases as repack_phases
from kvstrata.cache.policy import centre_cuda, plan_cuda
from kvstrata.cache.storage.page import PageFormat, Rows
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.cache.storage.pool import Pool
from kvstrata.cache.storage.tokens import DROP, NEW, Tokens
from kvstrata.cache.storage.transaction import Transaction
from kvstrata.layout import Format
from kvstrata.quant import op as quantize_op
from kvstrata.tools.bench.cases import settle as settle_case
from test_repack import Setup, assert_equal


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA backend without CUDA."""
    if HAS_GPU or emulator.missing() is not None:
        pytest.skip("the kernels run on the GPU here" if HAS_GPU else str(emulator.missing()))
    for module in (launches, moves_cuda, plan_cuda, centre_cuda, quantize_op, repack_cuda, repack_phases, whole_pages):
        monkeypatch.setattr(module, "jit", emulator.launcher())
    launches.kernel.cache_clear()
    monkeypatch.setattr(quantize_op, "ROUNDS", {256: 0})  # a warp makes all pages
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(backends, "resolve", lambda backend, device: "reference" if backend == "auto" else backend)
    yield
    launches.kernel.cache_clear()


def filled(counts: list[list[int]], seed: int) -> Buckets:
    """Buckets of two heads with these counts per tier; positions and importance are any numbers."""
    names, generator = ("K32V32", "K4V4", "K2V2"), torch.Generator().manual_seed(seed)
    formats = [Format.parse(name, 32, 16) for name in names]
    page_formats = [PageFormat(f, torch.float32, torch.int32, True, test_repack.DEVICE) for f in formats]
    strides, most = [kind.stride for kind in page_formats], 2 + sum(map(sum, counts)) // 16
    pages = len(counts) * (most + 4) * 3
    pool = Pool(strides, 4 * strides[0], pages, test_repack.DEVICE)
    buckets = Buckets(pool, page_formats, len(counts) // 2, 1, 2, most)
    for bucket, tiers in enumerate(counts):
        for tier, n in enumerate(tiers):
            handles = pool.allocate(tier, -(-n // 16))
            buckets.host_table[bucket // 2, 0, bucket % 2, tier, : len(handles)] = handles
            buckets.host_count[bucket // 2, 0, bucket % 2, tier] = n
            data = torch.zeros(len(handles), strides[tier], dtype=torch.uint8)
            position = torch.randint(1 << 20, (len(handles), 16), generator=generator).int()
            page_formats[tier].positions(data)[:] = position
            page_formats[tier].importance(data)[:] = torch.rand(len(handles), 16, generator=generator)
            pool.write(handles, 0, data.to(test_repack.DEVICE))
    buckets.push(range(len(counts) // 2))
    return buckets


def chained(buckets: Buckets, tokens: Tokens, target: torch.Tensor, rows: Rows | None) -> set[tuple[int, ...]]:
    """The moves of moves.py: from where, to where, and what stands beside."""
    buckets.backend = "triton"
    requests = range(len(buckets.host_table))
    with Transaction(buckets.pool) as change:
        prepared = apply.prepare(buckets, change, 0, requests, tokens, target, rows, torch.zeros(2 * len(requests), 32))
    return set() if prepared is None else {(*x[:7], *x[9:11]) for x in prepared.job.packed.tolist()}


def phased(buckets: Buckets, lists: moves_cuda.Lists, k: torch.Tensor | None) -> list[set[tuple[int, ...]]]:
    """The same of every phase, in order."""
    pool, (plain, *_) = buckets.pool, buckets.page_formats
    words = pool.space.bytes.view(torch.int32)
    whole: list[set] = [set(), set(), set()]
    pages = lists.owners.tolist(), lists.head_caches.tolist(), lists.k_at.tolist(), lists.sides.tolist()
    for (made, tier), bucket, at, sides in zip(*pages, strict=True):
        for slot, (address, side) in enumerate(zip(at, sides, strict=True)):
            if address < 0:
                continue
            if address >> 62:  # codes: tier, page and slot
                page_at = (address & (1 << 56) - 64) - pool.space.address
                handle = page_at // pool.slab_bytes * pool.units + page_at % pool.slab_bytes // 64
                source = handle, address & 63, address >> 56 & 63
                whole[tier].add((*source, made, slot, tier, bucket, *side))
                continue
            offset = address - pool.space.address
            if 0 <= offset < pool.space.bytes.numel():
                slab, rest = divmod(offset, pool.slab_bytes)
                source = slab * pool.units + rest // plain.stride * plain.stride // 64, rest % plain.stride // 128, 0
            else:
                source = 0, (address - k.data_ptr()) // 128, -1
            whole[tier].add((*source, made, slot, tier, bucket, *side))
    found = []
    for tier in (2, 1, 0):
        (first, end), (begin, last) = lists.ranges[:2, tier].tolist()
        some = set()
        for source, slot, to, there in lists.copies[first:end].tolist():
            at = source * 16 + buckets.page_formats[tier].position_offset // 4 + slot
            some.add((source, slot, tier, to, there, tier, None, int(words[at]), int(words[at + 16])))
        lines = lists.packed[begin:last].tolist()
        assert all((x[5], *x[7:9]) == (tier, -1, 1) for x in lines), "the tier of the phase, and no chain"
        found += [some, whole[tier], {(*x[:7], *x[9:11]) for x in lines}]
    return found


@pytest.mark.parametrize("many", [8192, 0], ids=["small blocks", "large blocks"])
@pytest.mark.parametrize(
    ("counts", "new", "leave", "drop"),
    [
        ([[0, 0, 0], [1, 0, 1]], 0, 1.0, 0.0),
        ([[7, 40, 3], [16, 0, 33], [0, 17, 16], [5, 5, 5]], 0, 0.4, 0.2),
        ([[300, 290, 270], [64, 600, 0]], 0, 0.1, 0.1),
        ([[1100, 30, 0], [2, 260, 1], [0, 0, 0], [65, 64, 63]], 0, 0.9, 0.0),
        ([[700, 100, 300], [10, 0, 0], [0, 0, 0], [31, 64, 300]], 700, 0.3, 0.3),
        ([[40, 40, 40], [40, 40, 40]], 90, 0.0, 0.5),
        ([[50, 50, 50], [20, 0, 90]], 0, 1.0, 1.0),
    ],
)
def test_the_plan_is_that_of_the_reference(emulated: None, monkeypatch: pytest.MonkeyPatch, counts: list[list[int]],
                                           new: int, leave: float, drop: float, many: int) -> None:  # fmt: skip
    """The same tokens to the same slots; and no phase writes where it or a later one reads."""
    monkeypatch.setattr(moves_cuda, "MANY_TOKENS", many)
    seen = []
    monkeypatch.setattr(repack_phases, "phases", lambda *given: seen.append(given) or [])
    ours, reference = filled(counts, 1), filled(counts, 1)
    for buckets in (ours, reference):  # some pages have another owner, and are copied before they change
        used = buckets.host_table[buckets.host_table >= 0]
        buckets.pool.retain(used[::3])
    tokens, random = ours.snapshot(0, range(len(counts) // 2)), torch.Generator().manual_seed(new + len(counts))
    dice = torch.rand(3, len(tokens), generator=random)
    target = torch.minimum(tokens.tier + 1 + (dice[0] * 2).long(), torch.tensor(2))
    target = torch.where((dice[1] < drop) | (tokens.tier == 2), DROP, target)
    target = torch.where(dice[2] < leave, target, tokens.tier)
    rows = None
    if new:
        bucket = torch.randint(len(counts), (new,), generator=random)
        number = torch.randperm(new, generator=random)
        more = Tokens(bucket, torch.full((new,), NEW), number, 5000 + number, torch.rand(new, generator=random))
        tokens = Tokens.cat([tokens, more])
        target = torch.cat([target, torch.randint(-1, 3, (new,), generator=random)])
        k, v = torch.randn(2, new, 32)
        rows = Rows(k, v, None, None, more.position, more.importance)
    wanted = chained(reference, tokens, target, rows)
    ours.backend, table = "cuda", ours.host_table.copy()
    with Transaction(ours.pool) as change:
        centre = torch.zeros(len(counts), 32)
        made = apply.prepare(ours, change, 0, range(len(counts) // 2), tokens, target, rows, centre)
    if made is not None:
        made.run()
    assert np.array_equal(ours.host_table, reference.host_table)
    assert np.array_equal(ours.host_count, reference.host_count)
    if not seen:
        assert not wanted
        assert bool((tokens.tier == target).all())
        return
    [(_, lists, (first, _), *_)] = seen
    found = phased(ours, lists, first)
    copied = (table >= 0) & (ours.host_table >= 0) & (table != ours.host_table)
    original = dict(zip(ours.host_table[copied].tolist(), table[copied].tolist(), strict=True))
    handles, tiers = lists.owners.T.tolist()
    assert {(original.get(x[0], x[0]), *x[1:]) for some in found for x in some} == {
        (*x[:6], None if x[2] == x[5] else x[6], *x[7:]) for x in wanted
    }
    assert sum(map(len, found)) == len(wanted)
    written: set[tuple[int, int]] = set()
    for number, some in enumerate(found):
        reads = {x[:2] for x in some if x[2] >= 0}
        written |= {x[3:5] for x in some}
        if number % 3 == 1:  # all slots of whole pages
            tier = (2, 1, 0)[number // 3]
            written |= {(h, slot) for t, h in zip(tiers, handles, strict=True) if t == tier for slot in range(16)}
        assert not reads & written


def test_whole_pages_are_written_whole(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain tokens that go down, only those that fit a page which is there move one by one."""
    seen = []
    monkeypatch.setattr(repack_phases, "phases", lambda *given: seen.append(given) or [])
    buckets = filled([[100, 10, 0], [100, 10, 0]], 0)
    tokens = buckets.snapshot(0, [0])
    target = torch.where((tokens.tier == 0) & (tokens.slot >= 60), 1, tokens.tier)
    buckets.backend = "cuda"
    with Transaction(buckets.pool) as change:
        made = apply.prepare(buckets, change, 0, [0], tokens, target, None, torch.zeros(2, 32))
    made.run()
    [(_, lists, *_)] = seen
    assert len(lists.copies) == 0
    assert lists.ranges.tolist() == [[[0, 0]] * 3, [[0, 0], [0, 12], [12, 12]], [[0, 0], [0, 6], [6, 6]]]
    assert len(lists.packed) == 2 * 6
    assert lists.k_at.shape == (2 * 3, 16)
    assert int((lists.k_at >= 0).sum()) == 2 * 34
    assert lists.v_at is None


CASES = {
    "three tiers, new rows": (dict(tiers=("K8V8", "K4V2", "K2V2"), dtype=torch.bfloat16, tokens=70), 150),
    "shared words": (dict(tiers=("K3V3", "K3V2"), dim=48, tokens=40, wide=True, keeps=False), 60),
    "directions": (dict(tiers=("K4V3", "K3V2", "K2V2"), dtype=torch.bfloat16, tokens=70, directed=True), 150),
    "directions of pages without a centre": (
        dict(tiers=("K4V3", "K4V2", "K2V2"), dim=64, dtype=torch.float16, tokens=70, directed=True, centre=False),
        150,
    ),
    "directions, shared words": (dict(tiers=("K4V4", "K3V2", "K2V2"), dim=80, tokens=40, directed=True), 60),
}


@pytest.mark.parametrize("warps", [4096, 3], ids=["2 per warp", "many per warp"])
@pytest.mark.parametrize("name", CASES)
def test_phases_do_what_the_reference_does(
    emulated: None, name: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leavers, fillers, arrivals and new rows at once, whole pages among them; and again without new rows."""
    monkeypatch.setattr(repack_phases, "WARPS", warps)
    options, new = CASES[name]
    ours, reference = Setup(**options), Setup(**options)
    for leave, coming in ((0.4, new), (0.5, 0)):
        ours.demote("cuda", leave, coming)
        reference.demote("reference", leave, coming)
        ours.check()
        reference.check()
        assert_equal(ours.state(), reference.state())


class WithZeros(Setup):
    """Some rows are zero: no direction changes their codes."""

    def fresh(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().fresh(n)
        k[::7] = v[::5] = 0
        return k, v


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("tiers", [("K4V4", "K4V2"), ("K3V4", "K3V3"), ("K8V3", "K2V3")])
def test_codes_of_unchanged_width_are_kept(
    request: pytest.FixtureRequest, tiers: tuple[str, str], directed: bool
) -> None:
    """Tokens that go from codes to codes fill whole pages; a side that has its width already is taken as it is."""
    if not HAS_GPU:
        request.getfixturevalue("emulated")
    options = dict(tokens=150, dtype=torch.bfloat16, directed=directed, centre=False)
    ours, reference = (WithZeros(tiers, **options) for _ in range(2))
    for setup, backend in ((ours, "cuda"), (reference, "reference")):
        tokens = setup.tokens()
        setup.move(tokens, torch.where(tokens.tier == 1, 2, tokens.tier), None, backend)
        setup.check()
    assert ours.buckets.host_count[..., 1].sum() == 0
    assert_equal(ours.state(), reference.state())
    first = 11 if tiers[0][1] == tiers[1][1] else 12  # of a place's parts: codes of K or V in the last tier
    for which in (first, first + 2):  # and their scales
        for a, b in zip(ours.state()[which::16], reference.state()[which::16], strict=True):
            assert len(a) > 100
            assert torch.equal(a, b)


@pytest.mark.parametrize("lossy", [0.0, 0.5])
def test_the_benchmark_moves_what_it_says(emulated: None, monkeypatch: pytest.MonkeyPatch, lossy: float) -> None:
    """All layers in a few launches, with the plan made before and made anew."""
    monkeypatch.setattr(settle_case, "missing", lambda backend, device: None)
    state = settle_case.State(2, 2400, 2, 2, 64, lossy, test_repack.DEVICE)
    assert state.settling is not None
    # Pages enter, lists are made, pages leave.
    # K4V4: whole pages, other arrivals; sides; plain fillers. And fillers of K4V4, pages and arrivals of K2V2.
    assert [len(part.launches) for part in state.settling] == [2, 7 if lossy else 4, 1]
    for run in (state.run, lambda: state.plan().run()):
        state.restore()
        with pytest.raises(AssertionError):
            state.assert_moved()
        run()
        state.assert_moved()


def test_a_cache_runs_every_operation(emulated: None) -> None:
    """Forks, crops and appends that settle, with pages that others own, in both ways."""
    options = dict(budget=0.35, tiers=("K4V4", "K2V2"))
    ours, wanted = (test_repack.through(backend, torch.device("cpu"), **options) for backend in ("cuda", "reference"))
    for request in wanted.requests:
        for layer in range(2):
            assert torch.equal(ours.tier_map(layer, request), wanted.tier_map(layer, request))
            for a, b in zip(ours.gather(layer, request)[:2], wanted.gather(layer, request)[:2], strict=True):
                assert ((a.float() - b.float()).abs().amax(-1) > 0.02).float().mean() < 0.02


# What the compiler made of it


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
def test_plan_kernels_compile_within_resource_limits(arch: str) -> None:
    """No spills; at least four blocks of 256 threads a multiprocessor, or one of 1,024."""
    pytest.importorskip("cuda.core")
    small = ("count<256>", "place<short, true, 256>", "place<int, false, 256>")
    for entry in ("find<>", "clear<>", "enter<>", "leave<>", *small, "count<1024>", "place<int, true, 1024>"):
        usage = gates.usage(moves_cuda.SOURCE, entry, arch=arch)
        assert usage.spill_bytes == usage.stack_bytes == 0, usage
        assert usage.shared_bytes <= (1536 if "1024" in entry else 1024), usage
        assert 0 < usage.registers <= (56 if entry.startswith("place") else 32), usage


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
@pytest.mark.parametrize("name", ["K16V16", "K8V8", "K4V4", "K3V3", "K2V2"])
def test_copy_kernels_compile_within_resource_limits(name: str, arch: str) -> None:
    """No spills with many loads on their way."""
    pytest.importorskip("cuda.core")
    cpu = torch.device("cpu")
    for dim in (64, 80, 128, 192, 256) if arch == "sm_90" else (80, 256):
        kind = PageFormat(Format.parse(name, dim), torch.bfloat16, torch.int16, True, cpu)
        entry = repack_phases.entry_of(kind, sides=dim == 64 and name == "K16V16")
        usage = gates.usage(repack_phases.SOURCE, entry, arch=arch)
        assert usage.spill_bytes == usage.stack_bytes == usage.shared_bytes == 0, usage
        assert 0 < usage.registers <= (80 if dim <= 128 else 128), usage
