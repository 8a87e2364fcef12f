"""The plan of moves.py made by ``moves.cu``: a block per head cache, two launches and one wait between them.

    targets ──count──▶ three numbers a bucket ──▶ the host allocates pages and offsets of lists ──place──▶ lists

Moves are lists by phase, not chains. A phase is the fillers of a tier, or its arrivals; phases go from the last tier to
the first, fillers first. Then no move writes where a later one reads: the holes of a tier are those of tokens that went
on to later tiers, and arrivals take slots of these or of its fillers. Pages in which all slots are free for arrivals
are written whole.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.cache.storage.tokens import Fresh, Tokens
from kvstrata.layout.format import MAX_TIERS

from .launches import kernel, prepare
from .moves import COLUMNS, pick

SOURCE = Path(__file__).with_name("moves.cu")
THREADS = 256
# struct Params of moves.cu, in its order.
POINTERS = (
    "target", "head_cache", "tier", "slot", "position", "importance", "order", "new_first", "fresh", "mass", "starts",
    "before", "numbers", "first", "places", "old_table", "new_table", "pointers", "k", "v", "copies", "packed", "k_at",
    "v_at",
    "sides",
)  # fmt: skip
PARAMS = struct.Struct(f"{len(POINTERS)}Q 3q 8i {2 * MAX_TIERS}i")


def entry_of(plain: PageFormat) -> str:
    position = "short" if plain.position_dtype == torch.int16 else "int"
    return f"place<{position}, {str(plain.keeps_importance).lower()}>"


def kernels_needed(plain: PageFormat) -> list[jit.Named]:
    """Kernels that list the moves of a plan."""
    return [(SOURCE, entry) for entry in ("count<>", "find<>", entry_of(plain))]


@dataclass(frozen=True)
class Lists:
    """Moves by phase; see moves.cu."""

    copies: torch.Tensor  # int32 [n, 4], fillers
    packed: torch.Tensor  # int32 [n, 12], arrivals that are not whole
    ranges: np.ndarray  # [3, tiers, 2]: of fillers in `copies`, arrivals in `packed`, `whole`; by tier first and end
    whole: torch.Tensor  # int32 [3, pages]: handle, tier and head cache of pages that are written whole
    k_at: torch.Tensor  # int64 [pages, page_tokens], of rows or codes, -1 for an empty slot
    v_at: torch.Tensor | None
    sides: torch.Tensor  # int32 [pages, page_tokens, 2]


@dataclass
class Plan:
    """Plan of the moves of all tokens of places, each a (request, layer); launches the count at once."""

    buckets: Buckets
    places: np.ndarray  # request * layers + layer
    before: np.ndarray  # [buckets]
    target: torch.Tensor  # int8 [n]
    tokens: Tokens | None = None  # all tokens; None: the planner's order, in which buckets begin at `starts`
    starts: torch.Tensor | None = None  # int64 [buckets]
    fresh: Fresh | None = None  # new tokens, beside `starts`
    rows: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # k and v of new tokens
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Launch the kernels that count."""
        buckets, pool, n_buckets = self.buckets, self.buckets.pool, len(self.before)
        tensors, device = self._tensors, self.buckets.device
        tensors["target"] = self.target
        tensors["before"] = pool.to_device(self.before.astype(np.int32))
        tensors["places"] = pool.to_device(self.places.astype(np.int32))
        tensors["pointers"] = pool.pointers
        tensors["numbers"] = torch.empty(3, n_buckets, dtype=torch.int32, device=device)
        tensors |= {name: x for name, x in zip(("k", "v"), self.rows, strict=True) if x is not None}
        if self.tokens is None:
            assert self.starts is not None
            tensors["starts"] = self.starts
            if self.fresh is not None:
                tensors["fresh"] = pool.to_device(self.fresh.packed())
                if self.fresh.importance is not None:
                    tensors["mass"] = self.fresh.importance
        else:
            self._find(self.tokens)
        self._launch("count<>", n_buckets // len(buckets.page_formats))

    def _find(self, tokens: Tokens) -> None:
        """Find the first token of each bucket, and sort the new ones by head cache."""
        n_buckets, tensors, device = len(self.before), self._tensors, self.buckets.device
        for name in ("head_cache", "tier", "slot", "position", "importance"):
            tensors[name] = getattr(tokens, name).contiguous()
        new = len(tokens) - int(self.before.sum())
        if new:
            order = pick(tokens.tier < 0, new)
            head_cache, by_head_cache = torch.sort(tokens.head_cache[order], stable=True)
            every = torch.arange(n_buckets // len(self.buckets.page_formats) + 1, device=device)
            tensors["order"], tensors["new_first"] = order[by_head_cache], torch.searchsorted(head_cache, every)
        tensors["starts"] = torch.zeros(n_buckets, dtype=torch.int64, device=device)
        self._launch("find<>", -(-len(self.target) // THREADS))

    def to_host(self) -> np.ndarray:
        """``left, came, holes`` int64 ``[3, buckets]``; the only time the host waits for the device."""
        return self._tensors["numbers"].cpu().numpy().astype(np.int64)

    def place(self, numbers: np.ndarray, old_table: torch.Tensor, new_table: torch.Tensor) -> Lists:
        """The moves from pages of one table to pages of another. Host work grows with buckets, not with tokens."""
        buckets, device = self.buckets, self.buckets.device
        tiers, p, n_buckets = len(buckets.page_formats), buckets.page_tokens, len(self.before)
        left, came, holes = numbers
        kept, coded = self.before - left, np.arange(n_buckets) % tiers > 0
        # Pages of codes past the kept tokens are whole; tokens that come into the page where these end are not.
        begun = -(-kept // p)
        pages = np.where(coded, np.maximum(-(-(kept + came) // p) - begun, 0), 0)
        rest = np.where(coded, np.minimum(came, -kept % p), came)
        first, ranges = np.zeros((3, n_buckets), np.int64), np.zeros((3, tiers, 2), np.int64)
        for which, sizes in enumerate((holes, rest, pages)):
            by_tier = sizes.reshape(-1, tiers).T.reshape(-1)
            ends = np.cumsum(by_tier)
            first[which] = (ends - by_tier).reshape(tiers, -1).T.reshape(-1)
            ranges[which, :, 1] = ends.reshape(tiers, -1)[:, -1]
            ranges[which, 1:, 0] = ranges[which, :-1, 1]
        first[2] -= begun  # pages are asked for by their index in the bucket
        n_holes, n_rest, n_pages = (int(n) for n in ranges[:, -1, 1])
        self._tensors["first"] = buckets.pool.to_device(first.astype(np.int32))
        shape = (n_pages, p)
        lists = Lists(
            torch.empty(n_holes, 4, dtype=torch.int32, device=device),
            torch.empty(n_rest, len(COLUMNS), dtype=torch.int32, device=device),
            ranges,
            self._whole(pages, n_pages, new_table),
            torch.full(shape, -1, dtype=torch.int64, device=device),
            torch.full(shape, -1, dtype=torch.int64, device=device)
            if {"order", "fresh"} & self._tensors.keys()
            else None,
            torch.full((*shape, 2), -1, dtype=torch.int32, device=device),
        )
        self._tensors |= {"old_table": old_table, "new_table": new_table}
        self._tensors |= {name: getattr(lists, name) for name in ("copies", "packed", "k_at", "sides")}
        if lists.v_at is not None:
            self._tensors["v_at"] = lists.v_at
        self._launch(entry_of(buckets.page_formats[0]), n_buckets // tiers)
        return lists

    def _whole(self, pages: np.ndarray, n: int, table: torch.Tensor) -> torch.Tensor:
        """`Lists.whole`; ``pages``: whole pages of each bucket, ``n`` in all."""
        buckets, device, tensors = self.buckets, self.buckets.device, self._tensors
        tiers, of_place = len(buckets.page_formats), buckets.kv_heads * len(buckets.page_formats)
        repeats = buckets.pool.to_device(pages.reshape(-1, tiers).T.reshape(-1))
        which = torch.repeat_interleave(repeats, output_size=n)  # tier * head_caches + head_cache
        tier, head_cache = which // (len(pages) // tiers), which % (len(pages) // tiers)
        bucket = head_cache * tiers + tier
        page = torch.arange(n, device=device) - tensors["first"][2][bucket]
        row = tensors["places"][bucket // of_place].long() * of_place + bucket % of_place
        return torch.stack([table.view(-1)[row * buckets.max_pages + page].long(), tier, head_cache]).int()

    def _launch(self, entry: str, grid: int) -> None:
        if not grid:
            return
        buckets, page_formats, tensors = self.buckets, self.buckets.page_formats, self._tensors
        offsets = [x for kind in page_formats for x in (kind.position_offset, kind.importance_offset)]
        rows = [tensors.get(name) for name in ("k", "v")]
        params = PARAMS.pack(
            *(tensors[name].data_ptr() if name in tensors else 0 for name in POINTERS),
            len(self.target), *(0 if x is None else x.stride(0) * x.element_size() for x in rows),
            len(self.before), buckets.kv_heads, len(page_formats), buckets.page_tokens, buckets.max_pages,
            buckets.pool.units, page_formats[0].row_bytes, page_formats[0].v_offset, *offsets,
            *[0] * (2 * (MAX_TIERS - len(page_formats))),
        )  # fmt: skip
        device = self.target.get_device()
        prepare(device, lambda: [jit.Launch(kernel(SOURCE, entry, device), grid, THREADS, params)], None).run()
