"""Tokens from page to page: the plan against a model of slots, every backend of this machine against the reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import emulator
import gates
import test_cache_machine
from conftest import HAS_GPU
from kvstrata import backends
from kvstrata.cache import TieredCache
from kvstrata.cache.move import apply, moves, repack_cuda, repack_op, repack_reference
from kvstrata.cache.storage.page import PageFormat, Rows
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.cache.storage.pool import Pool
from kvstrata.cache.storage.tokens import DROP, NEW, Tokens
from kvstrata.cache.storage.transaction import Transaction
from kvstrata.layout import Format
from kvstrata.quant import op as quantize_op
from kvstrata.quant.reference import direction_of

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["triton"] + (["cuda"] if HAS_GPU else [])


# The plan


def tokens_of(counts: list[list[int]], new: list[int]) -> Tokens:
    """Buckets with these counts per tier, as a snapshot lists them, and new tokens; positions are just numbers."""
    lines = [(b, t, s) for t in range(len(counts[0])) for b in range(len(counts)) for s in range(counts[b][t])]
    lines += [(b, NEW, i) for i, b in enumerate(new)]
    columns = torch.tensor(lines, dtype=torch.int64).view(-1, 3)
    n = len(lines)
    return Tokens(columns[:, 0], columns[:, 1], columns[:, 2], torch.arange(n), torch.zeros(n))


@settings(max_examples=150)
@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=3),
    new=st.integers(0, 6),
    leave=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    drop=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_chains_in_any_order_do_what_all_at_once_does(counts, new, leave, drop, seed) -> None:
    """A model of slots: reads and writes happen as the chains say, and nothing is lost or read after it was written."""
    rng = random.Random(seed)
    tokens = tokens_of(counts, [rng.randrange(len(counts)) for _ in range(new)])
    target = []
    for tier in tokens.tier.tolist():
        stays = tier >= 0 and rng.random() >= leave
        target.append(tier if stays else DROP if rng.random() < drop and tier >= 0 else rng.randint(max(tier, 0), 2))
    target = torch.tensor(target, dtype=torch.int64)
    before = torch.tensor(counts).flatten()
    change = moves.change(tokens, target, before, 3)
    left, came, holes = change.to_host()
    plan = moves.plan(change, tokens, target, int(came.sum()), int(holes.sum()))
    count = (before - torch.from_numpy(left) + torch.from_numpy(came)).tolist()

    places = zip(tokens.head_cache.tolist(), tokens.tier.tolist(), tokens.slot.tolist(), strict=True)
    where = {(head_cache * 3 + t, s): i for i, (head_cache, t, s) in enumerate(places) if t >= 0}
    slots = dict(where)
    chains = []
    for first in plan.head.nonzero().flatten().tolist():
        chain = [first]
        while plan.after[chain[-1]] >= 0:
            chain.append(int(plan.after[chain[-1]]))
        chains.append(chain)
    assert sorted(move for chain in chains for move in chain) == list(range(len(plan))), "each move in one chain"
    while chains:  # a step of any chain at a time
        chain = rng.choice(chains)
        move = chain.pop(0)
        token = int(plan.token[move])
        if tokens.tier[token] >= 0:
            source = int(tokens.head_cache[token] * 3 + tokens.tier[token]), int(tokens.slot[token])
            assert slots[source] == token, "read after somebody wrote there"
        slots[int(plan.bucket[move]), int(plan.slot[move])] = token
        chains = [c for c in chains if c]

    found = {}
    for bucket, n in enumerate(count):
        for slot in range(n):
            found[slots[bucket, slot]] = bucket
    kept = [i for i, t in enumerate(target.tolist()) if t != DROP]
    want = {i: int(tokens.head_cache[i]) * 3 + int(target[i]) for i in kept}
    assert found == want, "pages are not full up to the count"


def test_no_moves() -> None:
    tokens = tokens_of([[3, 2, 0]], [])
    change = moves.change(tokens, tokens.tier, torch.tensor([3, 2, 0]), 3)
    left, came, holes = change.to_host()
    assert not left.any()
    assert not came.any()
    assert len(moves.plan(change, tokens, tokens.tier, 0, 0)) == int(holes.sum()) == 0


# The backends


class Setup:
    """Buckets of some requests and layers with random tokens in all tiers, always the same for a seed."""

    def __init__(self, tiers: tuple[str, ...], dim: int = 32, page_tokens: int = 16, dtype: torch.dtype = torch.float32,
                 tokens: int = 24, wide: bool = False, keeps: bool = True, directed: bool = False, centre: bool = True,
                 seed: int = 0) -> None:  # fmt: skip
        plain = f"K{8 * dtype.itemsize}V{8 * dtype.itemsize}"
        position = torch.int32 if wide else torch.int16
        formats = [replace(Format.parse(name, dim, page_tokens), centre=centre) for name in (plain, *tiers)]
        self.page_formats = [PageFormat(f, dtype, position, keeps, DEVICE) for f in formats]
        strides = [kind.stride for kind in self.page_formats]
        self.pool = Pool(strides, 2 * strides[0], 64, DEVICE, debug=True)
        self.buckets = Buckets(self.pool, self.page_formats, 3, 2, 2, 8)
        self.where = [0, 1, 2], [2, 0, 1]  # layers and requests
        self.random = torch.Generator().manual_seed(seed)
        self.centre = torch.randn(6, dim, generator=self.random).to(DEVICE)
        queries = torch.randn(6, dim, generator=torch.Generator().manual_seed(seed + 1))
        self.direction = direction_of(queries, formats[-1].rotate).to(DEVICE) if directed else None
        self.dtype, self.dim = dtype, dim
        self.layers, self.requests = [1, 0, 1], [2, 0, 1]
        coming = self.fresh(6 * tokens)
        bucket = torch.arange(6).repeat_interleave(tokens)
        target = torch.randint(0, len(self.page_formats), (6 * tokens,), generator=self.random)
        self.move(self.new(bucket, 0), target, coming, "reference")

    def fresh(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.randn(2, n, self.dim, generator=self.random) + 1).to(self.dtype).to(DEVICE)
        return k, v

    def new(self, bucket: torch.Tensor, first: int) -> Tokens:
        n = len(bucket)
        tier = torch.full((n,), NEW)
        importance = torch.rand(n, generator=self.random)
        return Tokens(*(x.to(DEVICE) for x in (bucket, tier, torch.arange(n), first + torch.arange(n), importance)))

    def tokens(self) -> Tokens:
        """All of them, places in the order of `requests`."""
        parts = []
        for i, (layer, request) in enumerate(zip(self.layers, self.requests, strict=True)):
            part = self.buckets.snapshot(layer, [request])
            parts.append(Tokens(part.head_cache + 2 * i, part.tier, part.slot, part.position, part.importance))
        return Tokens.cat(parts)

    def move(self, tokens: Tokens, target: torch.Tensor, rows, backend: str) -> None:
        fresh = None if rows is None else Rows(*rows, None, None, tokens.position, tokens.importance)
        self.buckets.backend = backend
        with Transaction(self.pool) as change:
            places = self.layers, self.requests
            apply.move(self.buckets, change, *places, tokens, target.to(DEVICE), fresh, self.centre, self.direction)

    def demote(self, backend: str, leave: float, new: int = 0) -> None:
        """Each token goes down with this chance, a fifth of those out; new tokens come to any tier."""
        tokens = self.tokens()
        n, tiers = len(tokens), len(self.page_formats)
        dice = torch.rand(3, n, generator=self.random)
        down = tokens.tier.cpu() + 1 + (dice[1] * (tiers - 1 - tokens.tier.cpu())).long()
        down[(dice[2] < 0.2) | (down >= tiers)] = DROP
        target = torch.where(dice[0] < leave, down, tokens.tier.cpu())
        rows = None
        if new:
            coming = self.new(torch.randint(0, 6, (new,), generator=self.random), 1000)
            rows = self.fresh(new)
            tokens = Tokens.cat([tokens, coming])
            target = torch.cat([target, torch.randint(0, tiers, (new,), generator=self.random)])
        self.move(tokens, target, rows, backend)

    def state(self) -> list[torch.Tensor]:
        """Codes or rows, scales, positions and importance by place, tier, bucket and slot; and the counts."""
        parts = [torch.from_numpy(self.buckets.host_count.copy())]
        for layer, request in zip(self.layers, self.requests, strict=True):
            tokens = self.buckets.snapshot(layer, [request])
            for tier in range(len(self.page_formats)):
                some = tokens[(tokens.tier == tier).nonzero().flatten()]
                rows = self.buckets.read(layer, [request], some, tier)
                found = (rows.k, rows.v, rows.k_scale, rows.v_scale, rows.position, rows.importance)
                parts += [x.cpu() for x in found if x is not None]
        return parts

    def check(self) -> None:
        """Owners, tables and counts, here and on the device."""
        table = self.buckets.host_table
        handles, owned = np.unique(table[table >= 0], return_counts=True)
        assert (self.pool.owners(handles) == owned).all()
        assert int((self.pool.refs > 0).sum()) == len(handles)
        assert torch.equal(self.buckets.page_table.cpu(), torch.from_numpy(table))
        assert torch.equal(self.buckets.count.cpu(), torch.from_numpy(self.buckets.host_count))


CASES = {
    "three tiers": dict(tiers=("K4V4", "K3V3", "K2V2")),
    "a direction": dict(tiers=("K8V8", "K4V4", "K3V3", "K2V2"), dtype=torch.bfloat16, directed=True),
    "a direction, shared words, no centre": dict(tiers=("K4V3", "K4V2", "K2V2"), dim=48, directed=True, centre=False),
    "all widths, bf16": dict(tiers=("K8V8", "K8V3", "K4V2", "K2V2"), dtype=torch.bfloat16),
    "shared words": dict(tiers=("K3V3", "K2V3"), dim=48),
    "a width that stays": dict(tiers=("K4V4", "K4V2"), dtype=torch.float16, wide=True, keeps=False),
}
MORE = {
    "pages of 64": dict(tiers=("K4V4", "K3V3", "K2V2"), dim=128, page_tokens=64, dtype=torch.bfloat16, tokens=300),
    "blocks of 16": dict(tiers=("K8V4", "K3V4", "K2V3"), dim=80, page_tokens=32, dtype=torch.float16, tokens=150),
    "256 dims, a direction": dict(
        tiers=("K4V4", "K3V3", "K2V2"), dim=256, dtype=torch.float16, tokens=60, directed=True
    ),
    "256 dims": dict(tiers=("K8V8", "K4V4", "K3V2"), dim=256, page_tokens=64, dtype=torch.float32, tokens=150),
    "192 dims": dict(tiers=("K4V3", "K2V2"), dim=192, dtype=torch.bfloat16, tokens=100),
    "one tier": dict(tiers=("K2V2",), dim=64, tokens=200, dtype=torch.bfloat16),
}


def assert_equal(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> None:
    for a, b in zip(ours, reference, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(CASES) + (list(MORE) if HAS_GPU else []))
def test_moves_are_those_of_the_reference(name: str, backend: str) -> None:
    """Leavers, fillers and arrivals of middle tiers at once, new rows among them, twice in a row."""
    options = (CASES | MORE)[name]
    small = {} if HAS_GPU else dict(tokens=7)
    ours, reference = Setup(**(options | small)), Setup(**(options | small))
    for leave, new in ((0.4, 9), (0.5, 0)):
        ours.demote(backend, leave, new)
        reference.demote("reference", leave, new)
        ours.check()
        reference.check()
        assert_equal(ours.state(), reference.state())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if HAS_GPU:
        pytest.skip("the kernels run on the GPU here")
    for _ in emulator.settling_kernels(monkeypatch):
        yield


@pytest.mark.parametrize("name", list(CASES))
def test_cuda_moves_are_those_of_the_reference(emulated: None, name: str) -> None:
    """Kernels for single tokens and for whole pages give equal bytes."""
    ours, reference = (Setup(**(CASES[name] | dict(tokens=40))) for _ in range(2))
    for leave, new in ((0.4, 9), (0.9, 0)):
        ours.demote("cuda", leave, new)
        reference.demote("reference", leave, new)
        ours.check()
        assert_equal(ours.state(), reference.state())


@pytest.mark.parametrize("dim", [32, 80, 96, 256])
@pytest.mark.parametrize("tiers", [("K4V4", "K3V2"), ("K3V3", "K2V8"), ("K4V4", "K4V2"), ("K8V8", "K8V2")])
def test_single_moves_take_the_direction(request: pytest.FixtureRequest, tiers: tuple[str, str], dim: int) -> None:
    """Of plain, new and coded tokens, to pages that are there; zeros are no direction, and 8 bits take none."""
    if not HAS_GPU:
        request.getfixturevalue("emulated")
    made = []
    given = Setup(tiers, dim=dim, tokens=0, directed=True).direction
    for backend, direction in (
        ("cuda", given),
        ("reference", given),
        ("cuda", torch.zeros_like(given)),
        ("reference", None),
    ):
        setup = Setup(tiers, dim=dim, page_tokens=64, tokens=12)
        setup.direction = direction
        setup.demote(backend, 0.5, 9)
        made.append(setup.state())
    assert_equal(made[0], made[1])
    assert_equal(made[2], made[3])
    assert all(map(torch.equal, made[1], made[3])) == (tiers[0] == "K8V8")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("leave", [0.0, 1.0])
def test_demoting_all_or_no_tokens_equals_the_reference(backend: str, leave: float) -> None:
    ours, reference = (Setup(("K4V4", "K2V2"), dim=64, tokens=90) for _ in range(2))
    ours.demote(backend, leave)
    reference.demote("reference", leave)
    ours.check()
    assert_equal(ours.state(), reference.state())


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_any_buckets_on_a_gpu(seed: int) -> None:
    rng = random.Random(seed)
    names = sorted({f"K{rng.choice([8, 4, 3, 2])}V{rng.choice([8, 4, 3, 2])}" for _ in range(4)}, reverse=True)
    options = dict(
        tiers=tuple(names), dim=rng.choice(range(32, 257, 16)), page_tokens=rng.choice([16, 32, 64]),
        tokens=rng.randint(1, 99),
        dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]), seed=seed, wide=rng.random() < 0.5,
    )  # fmt: skip
    ours, reference = Setup(**options), Setup(**options)
    for _ in range(3):
        leave, new = rng.random(), rng.randint(0, 60)
        ours.demote("cuda", leave, new)
        reference.demote("reference", leave, new)
        ours.check()
    assert_equal(ours.state(), reference.state())


def test_bad_backends_are_named() -> None:
    setup = Setup(("K4V4",), tokens=1)
    with pytest.raises(ValueError, match="backend: expected one of"):
        setup.demote("fast", 1.0)
    if not HAS_GPU:
        with pytest.raises(RuntimeError, match="cuda needs CUDA tensors"):
            setup.demote("cuda", 1.0)


# The cache above it


@pytest.fixture
def page_to_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a GPU, where moves read their tokens when they are launched, with the reference in the kernel's
    place. It allocates then, which a kernel does not."""

    def prepare(job: repack_op.Job, backend: str) -> Callable[[], None]:
        assert backend == "triton"
        return lambda: repack_reference.put(job, repack_reference.take(job))()

    monkeypatch.setattr(repack_op, "prepare", prepare)
    monkeypatch.setattr(backends, "resolve", lambda backend, device: "triton")
    monkeypatch.setattr(test_cache_machine.Machine, "refuses_memory", False)


@pytest.mark.skipif(HAS_GPU, reason="the kernels run on the GPU here")
def test_state_machine_in_the_order_of_a_gpu(page_to_page: None) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        test_cache_machine.Machine, settings=settings(max_examples=15, stateful_step_count=20, phases=[Phase.generate])
    )


def through(backend: str, device: torch.device, **options) -> TieredCache:
    """Append, settle, fork, crop, reorder and free."""
    options = (
        dict(budget=0.3, recent_tokens=16, page_tokens=16, dtype=torch.bfloat16, max_requests=4, max_tokens=1024)
        | options
    )
    cache = TieredCache(2, 2, 64, device=device, debug=True, **options)
    cache.buckets.backend = backend
    random = torch.Generator().manual_seed(0)

    def append(requests: list[int], lengths: list[int]) -> None:
        for layer in range(2):
            k, v = torch.randn(2, sum(lengths), 2, 64, generator=random).bfloat16().to(device)
            cache.append(layer, k, v, requests, lengths)
        cache.check()

    append([0, 1], [300, 45])
    for layer in range(2):
        mass = torch.rand(2, 2, 1024, generator=random)
        cache.update_importance(layer, (mass / 1024).to(device))
    append([1, 0], [100, 1])
    twin = cache.fork(0)
    append([0, 1, twin], [1, 1, 1])
    append([twin], [40])
    cache.settle()
    cache.check()
    cache.crop(twin, 310)
    cache.check()
    cache.reorder([1, 0, 2])
    append([0, 1, 2], [5, 0, 17])
    cache.free_request(1)
    cache.compact()
    cache.check()
    append([0], [200])
    return cache


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "recency"},
        {"budget": None, "budget_bytes": 400_000},
        {"evict": True, "budget": 0.1},
        {"per_head": False},
    ],
    ids=str,
)
def test_the_cache_on_a_gpu_holds_what_it_holds_on_the_cpu(backend: str, options: dict) -> None:
    ours, wanted = through(backend, DEVICE, **options), through("auto", torch.device("cpu"), **options)
    assert ours.requests == wanted.requests
    for request in wanted.requests:
        for layer in range(2):
            assert ours.length(request, layer) == wanted.length(request, layer)
            same = ours.tier_map(layer, request).cpu() == wanted.tier_map(layer, request)
            assert same.float().mean() > 0.98, "sums on another device may move a few tokens"
            exact = bool(same.all()) and torch.equal(ours.centre.cpu(), wanted.centre)  # or they moved its last bit
            for a, b in zip(ours.gather(layer, request)[:2], wanted.gather(layer, request)[:2], strict=True):
                off = (a.cpu().float() - b.float()).abs()[same].amax(-1)
                assert (off > 0.02).float().mean() < 0.02
                assert not (exact and off.any())


def test_a_cache_runs_every_operation() -> None:
    cache = through("auto", DEVICE)
    assert cache.length(0) > 300


# What the compiler made of it

GATES = [
    (torch.bfloat16, 128, 64),
    (torch.float16, 64, 64),
    (torch.bfloat16, 80, 16),
    (torch.float32, 256, 64),
    (torch.float32, 48, 16),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
@pytest.mark.parametrize(("dtype", "dim", "page_tokens"), GATES)
def test_repack_kernel_compiles_within_resource_limits(
    dtype: torch.dtype, dim: int, page_tokens: int, arch: str
) -> None:
    """No spills; few enough registers for 32 warps a multiprocessor."""
    pytest.importorskip("cuda.core")
    cpu, bits = torch.device("cpu"), 8 * dtype.itemsize
    plain, lossy = (PageFormat(Format(b, b, dim, page_tokens), dtype, torch.int16, True, cpu) for b in (bits, 3))
    usage = gates.usage(repack_cuda.SOURCE, repack_cuda.entry_of(plain, lossy), arch=arch)
    assert usage.spill_bytes == usage.stack_bytes == usage.shared_bytes == 0, usage
    assert 0 < usage.registers <= 64, usage


@pytest.mark.parametrize(("arch", "dim", "rotated"), [(80, 128, 128), (90, 80, 16)])
def test_triton_compiles_ahead_of_time(arch: int, dim: int, rotated: int) -> None:
    from ahead import compile_triton

    types = {f"{name}_ptr": "*i32" for name in ("packed", "places", "formats")}
    types |= {"pointers_ptr": "*i64", "side_ptr": "*i64", "k_ptr": "*bf16", "v_ptr": "*bf16"}
    types |= {"centre_ptr": "*fp32", "direction_ptr": "*i8", "steps_ptr": "*fp32"}
    constants = dict(
        DIM=dim, WIDE=128, ROTATED=rotated, PAGE=64, ROW=2 * dim, DTYPE="bfloat16", POSITION_BYTES=2, IMPORTANCE=True,
        CENTRED=True, AIMED=False, COLUMNS=len(moves.COLUMNS),
    )  # fmt: skip
    kernel = "kvstrata.cache.move.repack_triton", "repack_kernel"
    used = compile_triton(*kernel, arch, types, constants, enable_fp_fusion=False)
    assert 0 < used["REG"] <= 255, used
    assert used["LOCAL"] == 0, used


@pytest.mark.parametrize(
    ("name", "dim", "registers", "arch"),
    [("K4V4", 128, 128, "sm_80"), ("K4V4", 128, 128, "sm_90"), ("K3V3", 64, 80, "sm_90"), ("K2V2", 80, 168, "sm_90")],
)
def test_whole_page_kernel_compiles_within_resource_limits(name: str, dim: int, registers: int, arch: str) -> None:
    """The call for tokens that come as codes may spill a little."""
    pytest.importorskip("cuda.core")
    entry = quantize_op.entry_of(Format.parse(name, dim), torch.bfloat16, by_address=True)
    usage = gates.usage(quantize_op.SOURCE, entry, arch=arch)
    assert usage.spill_bytes <= 640, usage
    assert 0 < usage.registers <= registers, usage
