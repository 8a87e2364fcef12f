"""Which kernel and which tiles a shape of prefill runs with: a table of what was measured, and defaults beside it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from .prefill import PrefillJob


class Config(NamedTuple):
    """How a shape runs. ``specialize`` takes the kernel of prefill_gluon.py, else that of prefill_triton.py."""

    block_m: int  # queries of a program; of prefill_gluon.py 64, 128 or 192
    block_n: int
    warps: int  # of prefill_triton.py
    stages: int
    tma: bool = False  # blocks by tensor descriptors, sm_90
    specialize: bool = False
    pingpong: bool = False  # of prefill_gluon.py: warpgroups issue products in turns
    split: bool = False  # of prefill_gluon.py: two warpgroups share 64 queries; at least 4 stages
    persistent: bool = False
    order: int = 0  # of tiles, see prefill_triton.py
    registers: int | None = None  # at most so many a thread


# (head_dim, longest of queries and keys, causal, few): few tiles of 128 queries, no more than multiprocessors. The
# fastest of a sweep on an H200 in float16; other lengths go by `nearest`. None: prefill.cu is faster.
TABLE: dict[tuple[int, int, bool, bool], Config | None] = {
    (64, 512, False, True): Config(64, 128, 4, 2, specialize=True, registers=128),
    (64, 512, True, True): Config(64, 128, 4, 2, specialize=True, registers=168),
    (64, 512, False, False): Config(64, 64, 4, 3),
    (64, 512, True, False): Config(64, 64, 4, 3, order=2),
    (64, 1024, False, False): Config(64, 64, 4, 3),
    (64, 1024, True, False): Config(64, 64, 4, 3, order=2, registers=128),
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
    default. Heads of 96 are padded to 128 in every kernel."""
    wide = 128 if 64 < dim <= 128 else dim
    known = [key for key in TABLE if key[0] == wide and key[2] == causal]
    if not known:
        return default_of(dim, True)
    return TABLE[min(known, key=lambda key: (key[3] != few, abs(math.log2(key[1] / max(length, 1)))))]


def _choice(job: PrefillJob, processors: int) -> Config | None:
    few = job.sequences * job.heads * -(-job.max_seqlen_q // 128) <= processors
    return nearest(job.head_dim, max(job.max_seqlen_q, job.max_seqlen_k), job.causal, few)


def cuda_first(job: PrefillJob) -> bool:
    """Whether prefill.cu is the first choice: where the table says so, and on GPUs that it does not speak of."""
    processors, hopper = processors_of(job.q.device)
    return not hopper or _choice(job, processors) is None


def config_of(job: PrefillJob, processors: int, hopper: bool) -> Config:
    """From the table, or the default; small blocks under the interpreter, which has no processors."""
    if processors == 0:
        return Config(16, 16, 4, 1)
    if job.q.dtype == torch.float32:
        return Config(64, 32, 4, 1) if job.head_dim <= 128 else Config(32, 16, 4, 1)
    found = _choice(job, processors) if hopper else None
    return found or default_of(job.head_dim, hopper)
