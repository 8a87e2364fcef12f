"""Kernel and tile of a prefill shape: from the tuned table of the GPU, else from `TABLE` (measured on an H200), else
a default."""

from __future__ import annotations

import functools
import math

import torch

from kvstrata.jit import tuned

from .job import PrefillJob
from .tiles import Config, Tile, invalid, of_choice

# By (head_dim, longer of queries and keys, causal, few); few: no more tiles of 128 queries than multiprocessors. The
# fastest of a sweep on an H200 in float16; `nearest` serves other lengths. None: prefill.cu was faster.
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
    """Number of multiprocessors (0: the interpreter), and whether the GPU is a Hopper."""
    if device.type != "cuda":
        return 0, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major == 9


def default_of(dim: int, hopper: bool) -> Config:
    """Tile that fits any GPU of its kind; not measured."""
    if dim <= 64:
        return DEFAULT
    if dim <= 128:
        return Config(128, 64, 8, 3) if hopper else Config(128, 32, 8, 2)
    return Config(128, 32, 8, 2) if hopper else Config(64, 32, 8, 2)


@functools.lru_cache(maxsize=4096)
def nearest(dim: int, length: int, causal: bool, few: bool) -> Config | None:
    """`TABLE` entry of the nearest length, preferring those with the same ``few``; the default if head_dim has none.

    Heads of 96 are padded to 128 in every kernel. An entry of None serves only the same ``few`` and lengths within a
    factor of sqrt(2) of its own.
    """

    def distance(key: tuple[int, int, bool, bool]) -> tuple[bool, float]:
        return key[3] != few, abs(math.log2(key[1] / max(length, 1)))

    wide = 128 if 64 < dim <= 128 else dim
    known = [key for key, config in TABLE.items() if key[0] == wide and key[2] == causal]
    known = [key for key in known if TABLE[key] is not None or distance(key) <= (False, 0.5)]
    return TABLE[min(known, key=distance)] if known else default_of(dim, True)


def features(dim: int, length: int, causal: bool, tiles: int) -> dict[str, int | str]:
    """Key of a job in a tuned table; ``tiles`` are of 128 queries."""
    wide = 128 if 64 < dim <= 128 else dim
    sizes = {"tokens": max(length, 1), "tiles": max(tiles, 1)}
    return {"head_dim": str(wide), "mask": "causal" if causal else "full", **sizes}


@functools.lru_cache(maxsize=4096)
def _allowed(choice: tuple[tuple[str, tuned.Value], ...], dim: int) -> Config | Tile | None:
    """Tile of a tuned table's choice; None if the choice is invalid, as in a table that was edited by hand."""
    return None if invalid(dict(choice), dim) else of_choice(dict(choice), dim)


@functools.cache
def _name_of(device: torch.device) -> str:
    """Name of the GPU; empty under the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def choice_of(job: PrefillJob, processors: int, hopper: bool) -> Config | Tile | None:
    """Tuned tile of this GPU, else the entry of `TABLE`; None: neither has one, or prefill.cu with its default."""
    length, tiles = max(job.max_seqlen_q, job.max_seqlen_k), job.sequences * job.heads * -(-job.max_seqlen_q // 128)
    if name := _name_of(job.q.device):
        choice = tuned.lookup("prefill", name, features(job.head_dim, length, job.causal, tiles))
        if choice and (tile := _allowed(tuple(choice.items()), job.head_dim)):
            return tile
    return nearest(job.head_dim, length, job.causal, tiles <= processors) if hopper else None


def cuda_first(job: PrefillJob) -> bool:
    """True if prefill.cu is the first choice: a table says so, or no table covers the GPU."""
    return not isinstance(choice_of(job, *processors_of(job.q.device)), Config)


def config_of(job: PrefillJob, processors: int, hopper: bool) -> Config:
    """Triton or Gluon tile of a job: from a table, or the default; small under the interpreter (0 processors)."""
    if processors == 0:
        return Config(16, 16, 4, 1)
    if job.q.dtype == torch.float32:
        return Config(64, 32, 4, 1) if job.head_dim <= 128 else Config(32, 16, 4, 1)
    tile = choice_of(job, processors, hopper)
    return tile if isinstance(tile, Config) else default_of(job.head_dim, hopper)


def tuned_tile(job: PrefillJob) -> Tile | None:
    """Tile of prefill.cu that the tuned table has for a job, or None."""
    tile = choice_of(job, *processors_of(job.q.device))
    return tile if isinstance(tile, Tile) else None
