"""The settle benchmark: whole operations of a cache (`bench.whole`), and their kernels alone.

``settle`` cases have 16,384 tokens per request and 8 KV heads of 128; a twentieth of all tokens, chosen at random,
moves down a tier. The time is that of the moves of all layers together, given their lists, phase by phase. Bytes are
those of the tokens that move, including fillers, read and written once; lists of moves are not counted. ``with lists``
also
fills the lists and updates the tables: all launches of a settling. ``with plan`` also counts, which the host waits for,
and prepares the launches; the pages are already allocated. The baseline processes chains of moves layer by layer
(moves.py). ``append`` cases write one token for each request and all heads, and are compared with ``store_kv`` of the
same rows: ``kvstrata`` is the kernel with prepared arguments, ``append`` all of `TieredCache.append` to a cache that
grows.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch

import kvstrata
from kvstrata import jit
from kvstrata.backends import missing
from kvstrata.cache import TieredCache
from kvstrata.cache.move import append as append_op
from kvstrata.cache.move import apply, moves, moves_cuda, repack_op, repack_reference
from kvstrata.cache.move import phases as repack_phases
from kvstrata.cache.move.append_job import Job as AppendJob
from kvstrata.cache.move.launches import Launches, prepare
from kvstrata.cache.move.repack_job import Job
from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.cache.storage.pool import Pool
from kvstrata.cache.storage.tokens import Tokens
from kvstrata.cache.storage.transaction import Transaction
from kvstrata.layout import Format
from kvstrata.quant.reference import quantize_page
from kvstrata.tools.bench import Bench, Case, runner, sets_for, whole
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.render import verdict
from kvstrata.tools.bench.results import Report

POISON = 0xFF
LONGEST = 1 << 15  # tokens per request; more than an append is repeated
LIMIT = 130.0  # seconds after which no case begins
CHECKED = 1024  # moves of a layer compared with the reference
TIERS = ("K16V16", "K4V4", "K2V2")
SHARES = (0.1, 0.5, 0.4)  # shares of the tokens per tier, before


class Planned(NamedTuple):
    """Moves of one layer, as chains and as targets."""

    job: Job  # moves in chains
    tokens: Tokens
    target: torch.Tensor  # int8 [n], tier of each token
    moves: moves.Moves
    numbers: np.ndarray  # [3, buckets]: tokens that leave and come, holes


class Settling(NamedTuple):
    """Launches that build the lists of moves, that move tokens, and that update the tables."""

    lists: Launches
    moves: Launches
    tables: Launches

    def run(self) -> None:
        for launches in self:
            launches.run()


class State:
    """Buckets with pages of random tokens, and the plan of settling every layer once."""

    def __init__(self, requests: int, tokens: int, layers: int, heads: int, dim: int, lossy: float,
                 device: torch.device) -> None:  # fmt: skip
        self.random = torch.Generator(device).manual_seed(0)
        self.layers, self.requests, self.lossy, self.device = layers, list(range(requests)), lossy, device
        formats = [Format.parse(name, dim) for name in TIERS]
        self.page_formats = [PageFormat(f, torch.bfloat16, torch.int16, True, device) for f in formats]
        strides, p = [kind.stride for kind in self.page_formats], formats[0].page_tokens
        counts = [int(share * tokens) // p * p + p // 2 for share in SHARES]
        groups = requests * layers * heads
        arriving = -(-tokens // 20 // p) + 1
        needed = sum(groups * (-(-n // p) + arriving) * stride for n, stride in zip(counts, strides, strict=True))
        slab = strides[0] * (1024 if needed > 1 << 30 else 4)
        self.pool = Pool(strides, slab, int(1.02 * needed) // slab + 8, device)
        self.buckets = Buckets(self.pool, self.page_formats, requests, layers, heads, -(-tokens // p) + arriving)
        for tier, n in enumerate(counts):
            pages = -(-n // p)
            handles = self.pool.allocate(tier, groups * pages).reshape(requests, layers, heads, pages)
            self.buckets.host_table[:, :, :, tier, :pages] = handles
            self.buckets.host_count[:, :, :, tier] = n
        self.buckets.page_table.copy_(torch.from_numpy(self.buckets.host_table))
        self.buckets.count.copy_(torch.from_numpy(self.buckets.host_count))
        self.centre = torch.randn(requests * heads, dim, generator=self.random, device=device)
        self._fill()
        self.places = np.tile(self.requests, layers), np.repeat(np.arange(layers), requests)  # requests, layers
        self.before = self.buckets.host_count[self.places].reshape(-1).astype(np.int64)
        self.centres = self.centre.repeat(layers, 1)
        tables = self.buckets.page_table.clone(), self.buckets.count.clone()
        planned = [self._chains(layer) for layer in range(layers)]
        self.chains = [layer.job for layer in planned]
        self.target = torch.cat([layer.target for layer in planned])
        numbers = np.concatenate([layer.numbers for layer in planned], 1)
        with Transaction(self.pool) as change:
            self.exchanged = self.buckets.exchange(change, *self.places, *numbers)
        after = torch.from_numpy(self.buckets.host_table).to(device)
        self.moved = 0
        size = torch.tensor([k.format.bytes_per_token + 6 for k in self.page_formats], device=device)
        for index, layer in enumerate(planned):
            packed, plan = layer.job.packed, layer.moves
            packed[:, 3] = self.buckets.handles_at(self._table_offsets(index), plan.bucket, plan.slot, after)
            self.moved += int((size[packed[:, 2].long()] + size[packed[:, 5].long()]).sum())
        self.tables = tables  # tables before the moves
        self.buckets.page_table, self.buckets.count = (x.clone() for x in tables)
        self.settling: Settling | None = None
        if missing("cuda", device) is None:
            every = Tokens.cat([layer.tokens for layer in planned], [requests * heads] * layers)
            first = (every.slot == 0).nonzero().flatten()
            self.starts = torch.zeros(groups * len(formats), dtype=torch.int64, device=device)
            self.starts[every.head_cache[first] * len(formats) + every.tier[first]] = first
            self.settling = self.plan()
            self.listed = self.plan()  # its lists refer to the pages as they are now
            self.listed.lists.run()
            self.rewind()
        self.saved = [None if s is None else s.clone() for s in self.pool.slabs]
        self.expected: list[tuple[torch.Tensor, repack_reference.Taken]] = []
        self.ran = False  # True if the device's tables are those after the moves

    def _fill(self) -> None:
        """Fill the slabs with pages of random rows: one slab per tier, repeated."""
        for tier, kind in enumerate(self.page_formats):
            f, n = kind.format, self.pool.per_slab[tier]
            shape = (n, f.page_tokens, f.head_dim)
            k, v = torch.randn(2, *shape, generator=self.random, device=self.device).bfloat16()
            pages = torch.zeros(n, kind.stride, dtype=torch.uint8, device=self.device)
            pages[:, : f.page_bytes] = quantize_page(k, v, f)
            kind.positions(pages)[:] = torch.arange(f.page_tokens, device=self.device).short()
            kind.importance(pages)[:] = torch.rand(n, f.page_tokens, generator=self.random, device=self.device)
            for index in np.flatnonzero(self.pool.tier == tier).tolist():
                slab = self.pool.slabs[index]
                assert slab is not None
                slab[: n * kind.stride] = pages.flatten()

    def _table_offsets(self, layer: int) -> torch.Tensor:
        return self.buckets.table_offsets(np.array(self.requests), np.full(len(self.requests), layer))

    def _chains(self, layer: int) -> Planned:
        """Plan a layer's moves; destination pages are set once allocated."""
        tokens, tiers = self.buckets.snapshot(layer, self.requests), len(self.page_formats)
        dice = torch.rand(len(tokens), generator=self.random, device=self.device)
        # A twentieth of all tokens: of the plain ones, and if requested part of those of the middle tier.
        chances = torch.tensor([0.05 * (1 - self.lossy) / SHARES[0], 0.05 * self.lossy / SHARES[1], 0.0])
        target = torch.where(dice < chances.to(self.device)[tokens.tier], tokens.tier + 1, tokens.tier)
        before = self.pool.to_device(self.buckets.host_count[:, layer].reshape(-1).astype(np.int64))
        change = moves.change(tokens, target, before, tiers)
        numbers = np.stack(change.to_host())
        plan = moves.plan(change, tokens, target, int(numbers[1].sum()), int(numbers[2].sum()))
        packed = apply.pack(self.buckets, plan, tokens, self._table_offsets(layer))
        job = Job(self.pool, self.page_formats, packed, None, None, self.centre)
        return Planned(job, tokens, target.to(torch.int8), plan, numbers)

    def plan(self) -> Settling:
        """Prepare launches from the targets like `apply.prepare_counted`, with already allocated pages."""
        requests, layers = self.places
        places, lease = requests * self.layers + layers, self.buckets.arena.lease()
        counted = moves_cuda.Moves(self.buckets, places, self.target, lease, starts=self.starts)
        numbers, parts = counted.to_host(), list[list[jit.Launch]]()

        def build() -> list[jit.Launch]:
            lists, before, after = counted.place(numbers, self.exchanged)
            parts.extend([before, list(repack_phases.phases(self.buckets, lists, (None, None), self.centres)), after])
            return []

        kept = prepare(self.target.get_device(), build, counted)
        return Settling(*(Launches(kept.device, tuple(part), kept) for part in parts))

    def restore(self) -> None:
        """Restore slabs and tables, and compute the expected result of some moves."""
        for slab, saved in zip(self.pool.slabs, self.saved, strict=True):
            if slab is not None and saved is not None:
                slab.copy_(saved)
        self.rewind()
        self.expected = []
        for job in self.chains:
            n = len(job.packed)
            checked = torch.linspace(0, n - 1, min(n, CHECKED), device=self.device).long().unique()
            self.expected.append((checked, repack_reference.take(job._replace(packed=job.packed[checked]))))

    def rewind(self) -> None:
        """Restore the tables: the launches change them, and move tokens from where the tables say they are."""
        for table, saved in zip((self.buckets.page_table, self.buckets.count), self.tables, strict=True):
            table.copy_(saved)
        self.ran = False

    def assert_moved(self) -> None:
        for job, (checked, taken) in zip(self.chains, self.expected, strict=True):
            packed = job.packed[checked]
            for indices, tier, want in taken:
                kind = self.page_formats[tier]
                handles, place = np.unique(packed[indices, 3].cpu().numpy(), return_inverse=True)
                pages = self.pool.read(handles, 0, kind.stride)
                got = kind.read(pages, self.pool.to_device(place.reshape(-1)), packed[indices, 4].long())
                assert torch.equal(got.position, want.position), "a position is wrong"
                assert torch.equal(got.importance, want.importance), "an importance is wrong"
                for side, a, b in (("k", got.k, want.k), ("v", got.v, want.v)):
                    assert torch.equal(a, b), f"a row of {side} is wrong"
                for x, y in ((got.k_scale, want.k_scale), (got.v_scale, want.v_scale)):
                    assert x is None or y is None or torch.equal(x, y), "a scale is wrong"

    def run(self) -> None:
        """Run the moves with prepared lists."""
        if self.settling is None:
            self.run_chains("reference")
        else:
            self.listed.moves.run()

    def run_whole(self, plan: bool) -> None:
        """Run all launches of a settling; with ``plan`` also prepare them."""
        if self.ran:  # the previous call was not rewound
            self.rewind()
        settling = self.plan() if plan else self.settling
        assert settling is not None
        settling.run()
        self.ran = True

    def run_chains(self, backend: str) -> None:
        for job in self.chains:
            repack_op.prepare(job, backend)()


def build_settle(make: partial[State], expected: int, device: torch.device) -> Bench:
    whole.free_caches(device)
    state = make(device=device)
    assert abs(state.moved / expected - 1) < (0.02 if expected > 1 << 30 else 0.5), "the bytes of the case are wrong"
    cuda = device.type == "cuda"
    baseline = "triton" if cuda else "reference"
    contenders: dict[str, Call] = {"kvstrata": lambda i: state.run(), baseline: lambda i: state.run_chains(baseline)}
    bench = Bench(
        contenders=contenders,
        poison=lambda name, i: state.restore(),
        check=lambda name, i, out: state.assert_moved(),
        ours="kvstrata",
        baseline=baseline,
        host={"kvstrata": contenders["kvstrata"]},
        burst=1,
        before=lambda i: state.rewind(),
    )
    if state.settling is not None:
        contenders["with lists"] = lambda i: state.run_whole(plan=False)
        contenders["with plan"] = lambda i: state.run_whole(plan=True)
        bench.variants |= {"with lists", "with plan"}
    return bench


class Appends:
    """Requests with plain tokens and room in their last page, and one more token for each."""

    def __init__(self, requests: int, heads: int, dim: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def rows(n: int) -> torch.Tensor:
            return torch.randn(2, n, heads, dim, generator=generator, device=device).bfloat16()

        lengths = [1 + (7 * i + seed) % 62 for i in range(requests)]
        k, v = rows(sum(lengths))
        self.cache, self.grows = (
            TieredCache(1, heads, dim, budget=None, max_requests=requests, max_tokens=LONGEST, device=device)
            for _ in range(2)
        )
        for cache in (self.cache, self.grows):
            cache.append(0, k, v, list(range(requests)), lengths)
        self.k, self.v = rows(requests)
        ids, before = np.arange(requests), np.array(lengths)
        count = self.cache.buckets.room(0, ids, np.ones_like(ids))
        assert count is not None
        self.job = AppendJob(
            self.cache.buckets, 0, ids, np.ones_like(ids), before, count, self.k, self.v,
            np.zeros(requests, np.float32), None, self.cache._device_lengths,
        )  # fmt: skip
        # Calls that are not rewound continue with the next slots; every page table entry is this one page.
        self.cache.buckets.page_table[:, 0, :, 0] = self.cache.buckets.page_table[:, 0, :, 0, :1].clone()
        self.count = self.cache.buckets.count[:, 0, :, 0].clone()
        self.length = self.cache._device_lengths[:, 0].clone()
        self.caches = torch.zeros(2, requests, 64, heads, dim, dtype=torch.bfloat16, device=device)
        self.slots = torch.tensor([64 * i + n for i, n in enumerate(lengths)], dtype=torch.int32, device=device)

    def append(self) -> None:
        self.grows.append(0, self.k.unsqueeze(1), self.v.unsqueeze(1))

    def store(self) -> None:
        kvstrata.store_kv(self.k, self.v, self.caches[0], self.caches[1], self.slots)

    def poison(self) -> None:
        self.caches.view(torch.uint8).fill_(POISON)
        for slab in (*self.cache.pool.slabs, *self.grows.pool.slabs):
            if slab is not None:
                slab.fill_(POISON)
        self.rewind()

    def rewind(self) -> None:
        """Restore counts and lengths, so that the next call writes the same slots."""
        self.cache.buckets.count[:, 0, :, 0] = self.count
        self.cache._device_lengths[:, 0] = self.length

    def assert_appended(self, name: str) -> None:
        if name.startswith("store"):
            for x, cache in zip((self.k, self.v), self.caches, strict=True):
                assert torch.equal(cache.flatten(0, 1)[self.slots.long()], x), "a row is wrong"
            return
        cache = self.cache if name == "kvstrata" else self.grows
        buckets, kind, heads = cache.buckets, cache.page_formats[0], np.arange(cache.kv_heads)
        count, lengths = self.job.count, self.job.position
        if cache is self.grows:  # the newest
            count = buckets.host_count[:, 0, :, 0].astype(np.int64) - 1
            lengths = cache._lengths[:, 0].astype(np.int64) - 1
        page, slot = np.divmod(count.reshape(len(lengths), -1), cache.page_tokens)
        handles = buckets.host_table[self.job.requests[:, None], 0, heads, 0, page].reshape(-1).astype(np.int64)
        pages = cache.pool.read(handles, 0, kind.stride)
        slots = cache.pool.to_device(slot.reshape(-1))
        got = kind.read(pages, torch.arange(len(slots), device=slots.device), slots)
        assert torch.equal(got.k, self.k.flatten(0, 1)), "a row of k is wrong"
        assert torch.equal(got.v, self.v.flatten(0, 1)), "a row of v is wrong"
        position = cache.pool.to_device(lengths).repeat_interleave(cache.kv_heads)
        assert torch.equal(got.position, position), "a position is wrong"
        assert torch.equal(got.importance, torch.zeros_like(got.importance)), "an importance is wrong"


def build_append(requests: int, heads: int, dim: int, sets: int, device: torch.device) -> Bench:
    whole.free_caches(device)
    inputs = [Appends(requests, heads, dim, device, seed) for seed in range(sets)]
    contenders: dict[str, Call] = {
        "kvstrata": lambda i: append_op.append_rows(inputs[i].job),
        "store_kv": lambda i: inputs[i].store(),
        "append": lambda i: inputs[i].append(),
    }
    return Bench(
        contenders=contenders,
        poison=lambda name, i: inputs[i].poison(),
        check=lambda name, i, out: inputs[i].assert_appended(name),
        ours="kvstrata",
        baseline="store_kv",
        variants={"append"},
        host=dict(contenders),
        before=lambda i: inputs[i].rewind(),
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    heads, dim, requests = (8, 128, 256) if cuda else (2, 64, 16)
    moved = requests * heads * (2 * dim * 2 * 2 + 6)
    sets = sets_for(moved, device)
    listed = [
        Case(
            "settle", f"append-{requests}", {"what": "append", "requests": requests, "layers": 1}, moved,
            partial(build_append, requests, heads, dim, sets), sets=sets,
        )
    ]  # fmt: skip
    shapes = [(64, 16384, 32)] if cuda and not quick else [(8, 16384, 4)] if cuda else [(2, 512, 1)]
    for many, tokens, layers in shapes:
        for name, lossy in (("plain", 0.0), ("mixed", 0.5)):
            state = partial(State, many, tokens, layers, heads, dim, lossy)
            params = {"what": name, "requests": many, "layers": layers, "T": tokens}
            moved = bytes_of(many * tokens * layers * heads, dim, lossy)
            case = f"settle-{name}-{many}x{tokens}x{layers}"
            listed.append(Case("settle", case, params, moved, partial(build_settle, state, moved), seconds=3.0))
    return [*whole.cases(device, quick), *listed]  # a run that is cut short has the complete operations


run = partial(runner.run, seconds=LIMIT)


def bytes_of(tokens: int, dim: int, lossy: float) -> int:
    """Expected bytes of the moves: a twentieth of the tokens moves down, and fillers take the holes they leave.

    Half of the plain tokens leave, so half of the holes are before the new end; in the middle tier as many as arrive.
    """
    plain, middle, low = (Format.parse(name, dim).bytes_per_token + 6 for name in TIERS)
    down = 0.05 * (1 - lossy)
    leave = down / SHARES[0]
    total = down * (plain + middle) + down * (1 - leave) * 2 * plain
    if lossy:
        also = 0.05 * lossy
        total += also * (middle + low) + also * (1 - also / SHARES[1]) * 2 * middle
    return int(tokens * total)


def summary(report: Report) -> str:
    """The verdict, and median, mean and slowest time of complete operations, some of which settle."""
    lines = [verdict(report)]
    for case in report.cases:
        row = case.row("ours")
        if row is None or "B" not in case.params or not row.samples:
            continue
        assert row.us is not None
        host_us = case.host.get(row.name)
        host = f", host {host_us.median:,.0f} us, p95 {host_us.p95:,.0f} us" if host_us else ""
        ms = [1e-3 * us for us in (row.us.median, sum(row.samples) / len(row.samples), max(row.samples))]
        lines.append(f"{case.name}: median {ms[0]:.2f} ms, mean {ms[1]:.2f} ms, slowest {ms[2]:.2f} ms{host}")
    return "\n".join(lines)
