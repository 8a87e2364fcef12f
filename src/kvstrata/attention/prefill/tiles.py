"""Tile sizes of the three prefill kernels, and their form in a tuned table.

`Config` is for triton.py and gluon.py, `Tile` is a template argument of prefill.cu. A tuned table holds
plain values instead (a `Choice`, whose names space.py lists): `of_choice` and `choice_of` translate, `invalid` checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstrata.jit.tuned import Choice


class Config(NamedTuple):
    """Tile of a Triton or Gluon kernel; ``specialize`` selects gluon.py."""

    block_m: int  # queries per program; in gluon.py 64, 128 or 192
    block_n: int  # keys per step
    warps: int  # warps of triton.py
    stages: int
    specialize: bool = False
    pingpong: bool = False  # gluon.py: warpgroups alternate in issuing their products
    order: int = 0  # order of tiles, see triton.py
    registers: int | None = None  # maximum per thread


@dataclass(frozen=True)
class Tile:
    """Tile of prefill.cu: ``block_m`` queries of a head, tiles of ``block_n`` keys, prefetched ``stages`` ahead."""

    head_dim: int
    block_m: int = 64
    block_n: int = 64
    warps: int = 4
    kv_warps: int = 1  # warps along the keys: they alternate between tiles
    stages: int = 2
    resident: int = 3  # blocks per multiprocessor that the register limit allows for

    @property
    def name(self) -> str:
        sizes = (self.head_dim, self.block_m, self.block_n, self.warps, self.kv_warps, self.stages, self.resident)
        return f"Tile<{','.join(map(str, sizes))}>"

    def shared(self, checked: bool = False) -> int:
        """Bytes of shared memory per block, as prefill_tile.cuh lays them out; ``checked``: of the checking build."""
        row = 2 * self.head_dim
        query, stage = self.block_m * row, 2 * self.block_n * row
        scores = self.block_m * self.kv_warps * (self.block_n + 8) * 4 if checked else 0
        return query + self.kv_warps * self.stages * stage + (self.kv_warps - 1) * self.block_m * 8 + scores


# Within 48 KB and 96 registers per thread at D 64; wider heads need more registers: the output of 16 queries alone
# takes D / 2 of them, the queries D / 4.
PORTABLE = {
    64: Tile(64, 64, 32, 4, 1, 2, 5),
    96: Tile(96, 64, 32, 4, 1, 2, 3),
    128: Tile(128, 64, 32, 4, 1, 2, 2),
    256: Tile(256, 32, 16, 2, 1, 2, 4),
}
FEW = {
    64: Tile(64, 64, 32, 8, 2, 2, 2)
}  # for no more blocks than multiprocessors: two KV warps hide each other's waits


def tile_of(head_dim: int, blocks: int, multiprocessors: int, tuned: Tile | None = None) -> Tile:
    """Tile for ``blocks`` blocks of 64 queries; a tuned one wins."""
    return tuned or (FEW if blocks <= multiprocessors else PORTABLE).get(head_dim, PORTABLE[head_dim])


# Limits of a choice: queries and keys per tile, stages, shared memory of a block on sm_90, warps per multiprocessor.
BLOCKS = {"triton": ((64, 128), (64, 128)), "gluon": ((64, 128, 192), (64, 128)), "cuda": ((32, 64, 128), (32, 64))}
STAGES = {"triton": (2, 3), "gluon": (2, 3), "cuda": (1, 2, 3, 4)}
SHARED_BYTES = 227 * 1024
WARPS = 64


def of_choice(choice: Choice, dim: int) -> Config | Tile:
    """Tile that a choice of a tuned table represents, for this head size."""
    kernel, m, n, stages = (choice[name] for name in ("kernel", "block_m", "block_n", "stages"))
    if kernel == "cuda":
        return Tile(dim, m, n, m // 16 * choice["kv_warps"], choice["kv_warps"], stages, choice["resident"])
    registers = choice["registers"] or None
    if kernel == "gluon":
        return Config(m, n, 4, stages, specialize=True, pingpong=bool(choice["pingpong"]), registers=registers)
    return Config(m, n, m // 16, stages, order=choice["order"], registers=registers)


def choice_of(tile: Config | Tile) -> Choice:
    """Inverse of `of_choice`."""
    sizes = dict(block_m=tile.block_m, block_n=tile.block_n, stages=tile.stages)
    if isinstance(tile, Tile):
        return {"kernel": "cuda", **sizes, "kv_warps": tile.kv_warps, "resident": tile.resident}
    registers = tile.registers or 0
    if tile.specialize:
        return {"kernel": "gluon", **sizes, "registers": registers, "pingpong": int(tile.pingpong)}
    return {"kernel": "triton", **sizes, "order": tile.order, "registers": registers}


def invalid(choice: Choice, dim: int) -> str | None:
    """Reason why a choice cannot run, or None."""
    kernel, block_m, block_n = choice["kernel"], choice["block_m"], choice["block_n"]
    queries, keys = BLOCKS[kernel]
    if block_m not in queries or block_n not in keys:
        return f"{kernel} has no blocks of {block_m} by {block_n}"
    if choice["stages"] not in STAGES[kernel]:
        return f"{kernel} has no {choice['stages']} stages"
    if choice.get("registers") and block_m != 64:
        return "a limit of registers is for blocks of 64 queries"
    if choice.get("pingpong") and block_m == 64:
        return "a single warpgroup cannot alternate"
    tile = of_choice(choice, dim)
    if isinstance(tile, Tile):
        if tile.kv_warps > 1 and block_m > tile.stages * block_n:
            return "the output of a KV warp does not fit its stages"
        fits = tile.resident * (tile.shared() + 1024) <= SHARED_BYTES and tile.resident * tile.warps <= WARPS
        return None if fits else "so many blocks do not fit"
    needed = 2 * dim * (block_m + 2 * choice["stages"] * block_n)
    return None if needed <= SHARED_BYTES else f"{needed} bytes of shared memory, there are {SHARED_BYTES}"
