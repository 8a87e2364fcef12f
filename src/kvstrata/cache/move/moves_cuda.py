"""The plan of moves.py computed by ``moves.cu``: a block per head cache, and one wait between counting and placing.

    targets ──count──▶ three numbers per bucket ──▶ host allocates pages ──enter──▶ page table ──place──▶ lists
                                                       lists ──phases.py──▶ tokens moved ──leave──▶ page table, counts

Moves are lists by phase, not chains. A phase is the fillers of a tier, or its arrivals; phases go from the last tier to
the first, fillers before arrivals. Then no move writes where a later one reads: the holes of a tier belong to tokens
that already moved to later tiers, and arrivals take slots of these or of its fillers. Pages in which all slots are free
for arrivals are written as whole pages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.page_table import Buckets, Exchanged
from kvstrata.cache.storage.scratch import Lease
from kvstrata.cache.storage.tokens import Fresh, Tokens
from kvstrata.layout.format import MAX_TIERS

from .launches import Launches, kernel, prepare
from .moves import COLUMNS, pick

SOURCE = Path(__file__).with_name("moves.cu")
THREADS = 256
# Few head caches with many tokens have large blocks: with small ones most of the GPU would be idle. For many head
# caches small blocks are faster.
LARGE_BLOCK, FEW_HEAD_CACHES, MANY_TOKENS = 1024, 256, 8192
# struct Params of moves.cu, in its order.
POINTERS = (
    "target", "head_cache", "tier", "slot", "position", "importance", "order", "new_first", "fresh", "mass", "starts",
    "numbers", "first", "places", "count", "table", "entries", "pointers", "k", "v", "copies", "packed", "k_at", "v_at",
    "sides", "pages", "owners", "head_caches",
)  # fmt: skip
PARAMS = struct.Struct(f"{len(POINTERS)}Q 3q 11i {2 * MAX_TIERS}i 4x")
OFFSETS = {name: 8 * i for i, name in enumerate(POINTERS)}  # offsets of the pointers in the struct


def entry_of(plain: PageFormat, threads: int) -> str:
    position = "short" if plain.position_dtype == torch.int16 else "int"
    return f"place<{position}, {str(plain.keeps_importance).lower()}, {threads}>"


def kernels_needed(plain: PageFormat, max_tokens: int) -> list[jit.Named]:
    """Kernels that list the moves of a plan, for requests of up to ``max_tokens`` tokens."""
    entries = ["find<>", "clear<>", "enter<>", "leave<>"]
    for threads in (THREADS, *[LARGE_BLOCK] * (max_tokens > MANY_TOKENS)):
        entries += [f"count<{threads}>", entry_of(plain, threads)]
    return [(SOURCE, entry) for entry in entries]


@dataclass(frozen=True)
class Lists:
    """Moves by phase, filled by the launch of ``place``; see moves.cu."""

    copies: torch.Tensor  # int32 [n, 4], fillers
    packed: torch.Tensor  # int32 [n, 12], arrivals that are not in whole pages
    ranges: np.ndarray  # [3, tiers, 2]: first and end of fillers in `copies`, arrivals in `packed`, whole pages
    k_at: torch.Tensor  # int64 [pages, page_tokens], addresses of rows or codes, -1 for an empty slot
    v_at: torch.Tensor | None
    sides: torch.Tensor  # int32 [pages, page_tokens, 2]
    pages: torch.Tensor  # int64 [pages], addresses in units, of whole pages
    owners: torch.Tensor  # int32 [pages, 2], their handles and tiers
    head_caches: torch.Tensor  # int32 [pages]
    of_rows: list[bytearray] = field(default_factory=list)  # parameters of repack.cu that contain addresses of new rows


@dataclass
class Moves:
    """Moves of all tokens of places, each a (request, layer); launches the counting kernels immediately."""

    buckets: Buckets
    places: np.ndarray  # request * layers + layer
    target: torch.Tensor  # int8 [n]
    lease: Lease
    tokens: Tokens | None = None  # all tokens; None: the planner's order, in which buckets begin at `starts`
    starts: torch.Tensor | None = None  # int64 [buckets]
    fresh: Fresh | None = None  # new tokens, if `starts` is given
    rows: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # k and v of new tokens
    addresses: dict[str, int] = field(default_factory=dict)  # of places, fresh and numbers, if uploaded
    memory: torch.Tensor | None = None  # owner of `addresses`, kept until the deferred launches ran
    counts: bool = True  # False if the numbers are already on the device
    params: bytearray = field(default_factory=bytearray, repr=False)  # parameters of all launches that `place` returns
    packed: np.ndarray = field(init=False, repr=False)  # int32: entries, new plain pages, other inputs
    uploaded: torch.Tensor = field(init=False, repr=False)  # `packed` on the device
    counting: Launches | None = field(default=None, repr=False)  # launches that count again
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Launch the counting kernels."""
        buckets, pool, tensors = self.buckets, self.buckets.pool, self._tensors
        self.n_buckets = len(self.places) * buckets.kv_heads * len(buckets.page_formats)
        tensors |= {"target": self.target, "pointers": pool.pointers}
        tensors |= {"count": buckets.count, "table": buckets.page_table}
        tensors |= {name: x for name, x in zip(("k", "v"), self.rows, strict=True) if x is not None}
        if self.counts and "places" not in self.addresses:
            tensors["places"] = pool.to_device(self.places.astype(np.int32))
        if "numbers" not in self.addresses:
            tensors["numbers"] = self.lease.take("numbers", 3 * self.n_buckets, torch.int32)
        if self.tokens is None:
            assert self.starts is not None
            tensors["starts"] = self.starts
            if self.fresh is not None:
                if "fresh" not in self.addresses:
                    tensors["fresh"] = pool.to_device(self.fresh.packed())
                if self.fresh.importance is not None:
                    tensors["mass"] = self.fresh.importance
        else:
            self._find(self.tokens)
        if self.counts:
            self.counting = self._run(f"count<{self.threads}>", self.head_caches, self.threads)

    @property
    def head_caches(self) -> int:
        return self.n_buckets // len(self.buckets.page_formats)

    @property
    def threads(self) -> int:
        """Threads of a block that goes over the tokens of a head cache."""
        many = len(self.target) > MANY_TOKENS * self.head_caches
        return LARGE_BLOCK if many and self.head_caches <= FEW_HEAD_CACHES else THREADS

    def _find(self, tokens: Tokens) -> None:
        """Find the first token of each bucket, and sort the new ones by head cache."""
        buckets, tensors, device = self.buckets, self._tensors, self.buckets.device
        for name in ("head_cache", "tier", "slot", "position", "importance"):
            tensors[name] = getattr(tokens, name).contiguous()
        layers = buckets.page_table.shape[1]
        stored = int(buckets.host_count[self.places // layers, self.places % layers].sum(dtype=np.int64))
        new = len(tokens) - stored
        if new:
            order = pick(tokens.tier < 0, new)
            head_cache, by_head_cache = torch.sort(tokens.head_cache[order], stable=True)
            every = torch.arange(self.head_caches + 1, device=device)
            tensors["order"], tensors["new_first"] = order[by_head_cache], torch.searchsorted(head_cache, every)
        tensors["starts"] = torch.zeros(self.n_buckets, dtype=torch.int64, device=device)
        self._run("find<>", -(-len(self.target) // THREADS))

    def to_host(self) -> np.ndarray:
        """``left, came, holes`` int64 ``[3, buckets]``; waits for the device."""
        return self._tensors["numbers"].cpu().numpy().reshape(3, -1).astype(np.int64)

    def copy_tables(self) -> None:
        """Let the kernels work on copies, since host and device share the tables if kernels run on the CPU."""
        self._tensors |= {"count": self.buckets.count.clone(), "table": self.buckets.page_table.clone()}

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copies that `copy_tables` made, each with its original."""
        tables = {"count": self.buckets.count, "table": self.buckets.page_table}
        return [(self._tensors[name], x) for name, x in tables.items() if self._tensors[name] is not x]

    def leave_out(self, without: np.ndarray) -> None:
        """Leave out places, which stay as they are; their ``numbers`` passed to `place` must be 0."""
        self._tensors["places"] = self.buckets.pool.to_device(np.where(without, -1, self.places).astype(np.int32))

    def place(self, numbers: np.ndarray, exchanged: Exchanged) -> tuple[Lists, list[jit.Launch], list[jit.Launch]]:
        """Lists of moves into the pages of ``exchanged``, launches that fill them, and launches for after the moves.

        Host work grows with buckets and pages, not with tokens. Launching allocates nothing.
        """
        buckets, lease, tensors = self.buckets, self.lease, self._tensors
        tiers, p = len(buckets.page_formats), buckets.page_tokens
        left, came, holes = numbers
        kept, coded = exchanged.before - left, np.tile(np.arange(tiers) > 0, self.n_buckets // tiers)
        # Pages of codes past the kept tokens are whole; the page in which the kept tokens end is not.
        begun = -(-kept // p)
        pages = np.where(coded, np.maximum(-(-(kept + came) // p) - begun, 0), 0)
        rest = np.where(coded, np.minimum(came, -kept % p), came)
        sizes = np.empty((3, self.n_buckets), np.int64)
        sizes[0], sizes[1], sizes[2] = holes, rest, pages
        by_tier = sizes.reshape(3, -1, tiers).swapaxes(1, 2).reshape(3, -1)
        ends, ranges = by_tier.cumsum(1), np.zeros((3, tiers, 2), np.int64)
        first = (ends - by_tier).reshape(3, tiers, -1).swapaxes(1, 2).reshape(3, -1)
        ranges[:, :, 1] = ends.reshape(3, tiers, -1)[:, :, -1]
        ranges[:, 1:, 0] = ranges[:, :-1, 1]
        first[2] -= begun  # pages are indexed within the bucket
        n_holes, n_rest, n_pages = (int(n) for n in ranges[:, -1, 1])
        entries, plain = np.concatenate([exchanged.entered, exchanged.left]), exchanged.added[0]
        arrays = [entries, plain, first.astype(np.int32)]
        if "places" not in tensors and "places" not in self.addresses:
            arrays.append(self.places.astype(np.int32))
        whole = np.concatenate([x.reshape(-1).view(np.int32) for x in arrays])
        uploaded, ends = lease.take("uploaded", len(whole), torch.int32), np.cumsum([x.nbytes for x in arrays]) // 4
        buckets.pool.fill(uploaded, whole)
        self.packed, self.uploaded = whole, uploaded
        tensors["entries"], tensors["first"] = uploaded, uploaded[int(ends[1]) :]
        if len(arrays) > 3:
            tensors["places"] = uploaded[int(ends[2]) :]
        has_new = bool({"order", "fresh"} & self._tensors.keys()) or "fresh" in self.addresses
        slots = n_pages * p
        lists = Lists(
            lease.take("copies", 4 * n_holes, torch.int32).view(-1, 4),
            lease.take("packed", len(COLUMNS) * n_rest, torch.int32).view(-1, len(COLUMNS)),
            ranges,
            lease.take("k_at", slots, torch.int64).view(-1, p),
            lease.take("v_at", slots, torch.int64).view(-1, p) if has_new else None,
            lease.take("sides", 2 * slots, torch.int32).view(-1, p, 2),
            lease.take("pages", n_pages, torch.int64),
            lease.take("owners", 2 * n_pages, torch.int32).view(-1, 2),
            lease.take("head_caches", n_pages, torch.int32),
        )
        names = ("copies", "packed", "k_at", "v_at", "sides", "pages", "owners", "head_caches")
        tensors |= {name: x for name in names if (x := getattr(lists, name)) is not None}
        entered, gone = len(exchanged.entered), len(exchanged.left)
        self.params = self._params(entered, gone)
        grids = {
            "clear<>": (len(plain) if buckets.by_cuda else 0, THREADS),
            "enter<>": (-(-entered // THREADS), THREADS),
            entry_of(buckets.page_formats[0], self.threads): (self.head_caches, self.threads),
        }
        before = [self._launch(entry, grid, self.params, block) for entry, (grid, block) in grids.items() if grid]
        after = self._launch("leave<>", -(-max(self.n_buckets, gone) // THREADS), self.params)
        return lists, before, [after]

    def _launch(self, entry: str, grid: int, params: bytearray, threads: int = THREADS) -> jit.Launch:
        return jit.Launch(kernel(SOURCE, entry, self.target.get_device()), grid, threads, params)

    def _params(self, *entries: int) -> bytearray:
        buckets, page_formats, tensors = self.buckets, self.buckets.page_formats, self._tensors
        rows = [tensors.get(name) for name in ("k", "v")]
        addresses = self.addresses | {name: x.data_ptr() for name, x in tensors.items()}
        packed = PARAMS.pack(
            *map(addresses.get, POINTERS, repeat(0)),
            len(self.target), *(0 if x is None else x.stride(0) * x.element_size() for x in rows),
            *entries, buckets.pool.strides[0], self.n_buckets, buckets.kv_heads, len(page_formats), buckets.page_tokens,
            buckets.max_pages, buckets.pool.units, page_formats[0].row_bytes, page_formats[0].v_offset,
            *buckets.offsets,
        )  # fmt: skip
        return bytearray(packed)

    def _run(self, entry: str, grid: int, threads: int = THREADS) -> Launches:
        def build() -> list[jit.Launch]:
            return [self._launch(entry, grid, self._params(0, 0), threads)] if grid else []

        launches = prepare(self.target.get_device(), build, None)
        launches.run()
        return launches
