"""Which kernel and which tiles a shape of prefill runs with: what `kvstrata tune` found on this GPU, then a table of
what was measured on an H200, and defaults beside it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from kvstrata.jit import tuned

from .cuda import Tile
from .op import PrefillJob


class Config(NamedTuple):
    """How a shape runs. ``specialize`` takes the kernel of gluon.py, else that of triton.py."""

    block_m: int  # queries of a program; of gluon.py 64, 128 or 192
    block_n: int
    warps: int  # of triton.py
    stages: int
    tma: bool = False  # blocks by tensor descriptors, sm_90
    specialize: bool = False
    pingpong: bool = False  # of gluon.py: warpgroups issue products in turns
    split: bool = False  # of gluon.py: two warpgroups share 64 queries; at least 4 stages
    persistent: bool = False
    order: int = 0  # of tiles, see triton.py
    registers: int | None = None  # at most so many a thread


# (head_dim, longest of queries and keys, causal, few): few tiles of 128 queries, no more than multiprocessors. The
# fastest of a sweep on an H200 in float16; other lengths go by `nearest`. None: prefill.cu was faster in the benchmark.
TABLE: dict[tuple[int, int, bool, bool], Config | None] = {
    (64, 128, True, True): None,
    (64, 512, False, True): Config(64, 128, 4, 2, specialize=True, registers=128),
    (64, 512, True, True): Config(64, 128, 4, 2, specialize=True, registers=168),
    (64, 512, False, False): Config(64, 64, 4, 3),
    (64, 512, True, False): Config(64, 64, 4, 3, order=2),
    (64, 1024, False, False): Config(64, 64, 4, 3),
    (64, 1024, True, False): Config(64, 64, 4, 3, order=2, registers=128),
    (128, 128, True, True): None,
    (128, 256, True, False): None,
    (128, 2048, False, False): Config(128, 128, 4, 3, specialize=True),
    (128, 2048, True, False): Config(128, 128, 4, 2, specialize=True),
    (128, 8192, False, False): Config(128, 128, 4, 2, specialize=True),
    (128, 8192, True, False): Config(128, 128, 4, 2, specialize=True),
}


DEFAULT = Config(64, 64, 4, 3)


@functools.cache
def processors_of(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors (0: the interpreter), and whether they are Hopper's."""
    if device.type != "cuda":
        return 0, False
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.major == 9


def default_of(dim: int, hopper: bool) -> Config:
    """What fits without having been measured."""
    if dim <= 64:
        return DEFAULT
    if dim <= 128:
        return Config(128, 64, 8, 3) if hopper else Config(128, 32, 8, 2)
    return Config(128, 32, 8, 2) if hopper else Config(64, 32, 8, 2)


@functools.lru_cache(maxsize=4096)
def nearest(dim: int, length: int, causal: bool, few: bool) -> Config | None:
    """The entry for as few or as many tiles, if there is one, of the nearest length; of a head_dim without any, the
    default. Heads of 96 are padded to 128 in every kernel. None was measured at one length and speaks for those
    around it only, nearer than half a factor of two, and for as few or as many tiles."""

    def far(key: tuple[int, int, bool, bool]) -> tuple[bool, float]:
        return key[3] != few, abs(math.log2(key[1] / max(length, 1)))

    wide = 128 if 64 < dim <= 128 else dim
    known = [key for key, config in TABLE.items() if key[0] == wide and key[2] == causal]
    known = [key for key in known if TABLE[key] is not None or far(key) <= (False, 0.5)]
    return TABLE[min(known, key=far)] if known else default_of(dim, True)


def features(dim: int, length: int, causal: bool, tiles: int) -> dict[str, int | str]:
    """What a tuned table knows a job by; tiles of 128 queries. Other head sizes and masks are other jobs."""
    wide = 128 if 64 < dim <= 128 else dim
    sizes = {"tokens": max(length, 1), "tiles": max(tiles, 1)}
    return {"head_dim": str(wide), "mask": "causal" if causal else "full", **sizes}


def of_choice(choice: tuned.Choice, dim: int) -> Config | Tile:
    """The values of a tuned table (space.py) as a configuration for heads of this size."""
    kernel, m, n, stages = (choice[name] for name in ("kernel", "block_m", "block_n", "stages"))
    if kernel == "cuda":
        return Tile(dim, m, n, m // 16 * choice["groups"], choice["groups"], stages, choice["resident"])
    registers = choice["registers"] or None
    if kernel == "gluon":
        return Config(m, n, 4, stages, specialize=True, pingpong=bool(choice["pingpong"]), registers=registers)
    return Config(m, n, m // 16, stages, order=choice["order"], registers=registers)


@functools.lru_cache(maxsize=4096)
def _allowed(choice: tuple[tuple[str, tuned.Value], ...], dim: int) -> Config | Tile | None:
    """Of a table what makes sense: it is no way around the checks."""
    from .space import invalid

    return None if invalid(dict(choice), dim) else of_choice(dict(choice), dim)


@functools.cache
def _name_of(device: torch.device) -> str:
    """Of the GPU; nothing under the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def choice_of(job: PrefillJob, processors: int, hopper: bool) -> Config | Tile | None:
    """From the tuned table of this GPU, else from the one above; None: nothing is known, or prefill.cu as it is."""
    length, tiles = max(job.max_seqlen_q, job.max_seqlen_k), job.sequences * job.heads * -(-job.max_seqlen_q // 128)
    if name := _name_of(job.q.device):
        choice = tuned.lookup("prefill", name, features(job.head_dim, length, job.causal, tiles))
        if choice and (found := _allowed(tuple(choice.items()), job.head_dim)):
            return found
    return nearest(job.head_dim, length, job.causal, tiles <= processors) if hopper else None


def cuda_first(job: PrefillJob) -> bool:
    """Whether prefill.cu is the first choice: where a table says so, and on GPUs that none speaks of."""
    return not isinstance(choice_of(job, *processors_of(job.q.device)), Config)


def config_of(job: PrefillJob, processors: int, hopper: bool) -> Config:
    """From the table, or the default; small blocks under the interpreter, which has no processors."""
    if processors == 0:
        return Config(16, 16, 4, 1)
    if job.q.dtype == torch.float32:
        return Config(64, 32, 4, 1) if job.head_dim <= 128 else Config(32, 16, 4, 1)
    found = choice_of(job, processors, hopper)
    return found if isinstance(found, Config) else default_of(job.head_dim, hopper)


def tuned_tile(job: PrefillJob) -> Tile | None:
    """Of prefill.cu, where the tuned table has one."""
    found = choice_of(job, *processors_of(job.q.device))
    return found if isinstance(found, Tile) else None
