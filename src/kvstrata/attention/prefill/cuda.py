"""Prefill attention in CUDA C++ (prefill.cu, sm_80 and newer): one launch, tiles by shape.

`Tile` and `Ideas` name a template instantiation; `tile_of` picks the tile of a shape.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstrata import jit
from kvstrata.attention.decode.stages import NAMES

from .launch import REMEMBERED, look
from .op import lse_strides, strides_of

if TYPE_CHECKING:
    from .op import PrefillJob, Result

SOURCE = Path(__file__).parent / "prefill.cu"
DIMS = (64, 96, 128, 256)
SECTION_BYTES = 16 << 20  # keys and values of heads that are worked on together: less than L2
POINTERS = struct.Struct("9q")  # q, k, v, out, lse, sinks, ends of queries and keys, counters: what PARAMS begins with
PARAMS = struct.Struct("9q" + "2qI4x" * 5 + "12I6i2f")


@dataclass(frozen=True)
class Tile:
    """``block_m`` queries of a head; ``groups`` of warps take turns at tiles of ``block_n`` keys, ``stages`` ahead."""

    head_dim: int
    block_m: int = 64
    block_n: int = 64
    warps: int = 4
    groups: int = 1
    stages: int = 2
    resident: int = 3  # blocks of a multiprocessor, for which registers are kept
    padded: bool = False  # rows in shared memory 16 bytes longer, instead of swizzled

    @property
    def name(self) -> str:
        sizes = (self.head_dim, self.block_m, self.block_n, self.warps, self.groups, self.stages, self.resident)
        return f"Tile<{','.join(map(str, sizes))}{',true' if self.padded else ''}>"

    def shared(self, ideas: Ideas) -> int:
        """Bytes of shared memory of a block, as prefill_tile.cuh lays them out."""
        row = 2 * self.head_dim + (16 if self.padded else 0)
        query, stage = self.block_m * row, 2 * self.block_n * row
        scores = 0 if ideas.scores == "registers" else self.block_m * self.groups * (self.block_n + 8) * 4
        return query + self.groups * self.stages * stage + (self.groups - 1) * self.block_m * 8 + scores


SCORES = {"registers": "kInRegisters", "shared": "kInShared", "checked": "kChecked"}


@dataclass(frozen=True)
class Ideas:
    """What the kernel does that can be left out, to see what it brings; overlap of copies is `Tile.stages` above 1."""

    persistent: bool = False  # a block goes on to the next item; else there are as many blocks as items
    width: int = 16  # bytes of an access: 4, 8 or 16
    scores: str = "registers"  # or "shared": by way of shared memory; "checked": and compared there

    def name(self, softcap: bool) -> str:
        flags = ",".join(str(flag).lower() for flag in (softcap, self.persistent, self.width))
        return f"Ideas<{flags},{SCORES[self.scores]}>"


IDEAS = Ideas()


def entry(dtype: torch.dtype, tile: Tile, ideas: Ideas, softcap: bool) -> str:
    return f"prefill<{NAMES[dtype]},{tile.name},{ideas.name(softcap)}>"


# Within 48 KB and 96 registers a thread at D 64; wider heads need more registers: the output of 16 queries alone takes
# D / 2 of them, the queries D / 4.
PORTABLE = {
    64: Tile(64, 64, 32, 4, 1, 2, 5),
    96: Tile(96, 64, 32, 4, 1, 2, 3),
    128: Tile(128, 64, 32, 4, 1, 2, 2),
    256: Tile(256, 32, 16, 2, 1, 2, 4),
}
FEW = {64: Tile(64, 64, 32, 8, 2, 2, 2)}  # for no more blocks than multiprocessors: two groups hide each other's waits


def tile_of(head_dim: int, blocks: int, multiprocessors: int, tuned: Tile | None = None) -> Tile:
    """The tile for ``blocks`` blocks of 64 queries: the tuned one, if there is one."""
    return tuned or (FEW if blocks <= multiprocessors else PORTABLE).get(head_dim, PORTABLE[head_dim])


def missing(job: PrefillJob) -> str | None:
    """Why the kernel cannot run the job, or None."""
    if reason := jit.missing():
        return reason
    if job.q.dtype not in NAMES:
        return f"cuda: expected q in float16 or bfloat16, got {job.q.dtype}"
    if job.head_dim not in DIMS:
        return f"cuda: expected a head_dim of {DIMS}, got {job.head_dim}"
    for name, x in (("q", job.q), ("k", job.k), ("v", job.v)):
        if any(2 * n % 16 for n in x.stride()[:-1]) or x.data_ptr() % 16:
            return f"cuda: expected rows of {name} at multiples of 16 bytes, got strides {x.stride()}"
        token = x.stride(-3)
        if 2 * token >= 1 << 32:
            return f"cuda: expected tokens of {name} less than 4 GiB apart, got a stride of {token}"
    return None


@functools.lru_cache(maxsize=256)
def divisor(by: int) -> tuple[int, int, int]:
    """``n // by == (n * factor // 2**32 + n) >> shift`` for 0 <= n < 2**31."""
    shift = (by - 1).bit_length()
    return by, (1 << 32) * ((1 << shift) - by) // by + 1, shift


@functools.lru_cache(maxsize=1024)
def section_of(units: int, bytes_each: int) -> int:
    """How many units are worked on together: a divisor of all of them."""
    most = max(SECTION_BYTES // max(bytes_each, 1), 1)
    return max(n for n in range(1, min(units, most) + 1) if units % n == 0)


@functools.lru_cache(maxsize=256)
def _kernel(dtype: torch.dtype, tile: Tile, ideas: Ideas, softcap: bool, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry(dtype, tile, ideas, softcap), jit.arch_of(device))


class _Launches(threading.local):
    """A thread's launches: they are filled in place, so threads do not share them."""

    def __init__(self) -> None:
        self.known: dict[tuple[Hashable, ...], jit.Launch] = {}


_launches = _Launches()


def run(
    job: PrefillJob, tile: Tile | None = None, ideas: Ideas | None = None, check: torch.Tensor | None = None
) -> Result:
    """out, lse or None; ``check``: int32 [4], the counters of the checking build."""
    out, lse = job.outputs()
    if not job.sequences or not job.heads or not job.max_seqlen_q or not job.q.numel():
        return out, lse
    device = job.q.get_device()
    with torch.cuda.device(device):
        if tile is None:
            tile = _tile(job, device)
        ideas = ideas or IDEAS
        key = (tile, ideas, *look(job))
        launch = _launches.known.get(key)
        if launch is None:
            if len(_launches.known) >= REMEMBERED:
                _launches.known.clear()
            launch = _launches.known[key] = _plan(job, tile, ideas, out, lse, device)
        tensors = (job.q, job.k, job.v, out, lse, job.sinks, job.cu_seqlens_q, job.cu_seqlens_k, check)
        POINTERS.pack_into(launch.params, 0, *(0 if x is None else x.data_ptr() for x in tensors))
        jit.bind_context(device)
        launch(jit.current_stream(device))
    return out, lse


def _tile(job: PrefillJob, device: int) -> Tile:
    from .configs import tuned_tile

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    blocks = job.sequences * job.heads * -(-job.max_seqlen_q // 64)
    return tile_of(job.head_dim, blocks, processors, tuned_tile(job))


def _plan(
    job: PrefillJob, tile: Tile, ideas: Ideas, out: torch.Tensor, lse: torch.Tensor | None, device: int
) -> jit.Launch:
    """The launch of jobs that look like this one, without addresses."""
    properties = torch.cuda.get_device_properties(device)
    units, blocks = job.sequences * job.heads, -(-job.max_seqlen_q // tile.block_m)
    section = section_of(units, 4 * job.max_seqlen_k * job.head_dim // (job.heads // job.kv_heads))
    log2e, softcap = math.log2(math.e), job.softcap or 0.0
    byte_strides = [n * x.element_size() for x in (job.q, job.k, job.v, out) for n in strides_of(x)]
    byte_strides += [4 * n for n in lse_strides(lse)]
    divisors = (section * blocks, section, job.heads, job.heads // job.kv_heads)
    params = PARAMS.pack(
        *[0] * 9, *byte_strides, *(n for by in divisors for n in divisor(by)),
        units * blocks, blocks, job.max_seqlen_q, job.max_seqlen_k, job.causal, job.sliding_window or 0,
        job.scale * log2e, softcap * log2e,
    )  # fmt: skip
    shared = tile.shared(ideas)
    grid = units * blocks
    if ideas.persistent:
        fit = properties.shared_memory_per_multiprocessor // (shared + 1024)
        grid = min(grid, properties.multi_processor_count * max(min(tile.resident, fit), 1))
    kernel = _kernel(job.q.dtype, tile, ideas, softcap > 0, device)
    jit.bind_context(device)
    return jit.Launch(kernel, grid, 32 * tile.warps, params, shared=shared, overlap=True)
