"""Which kernel and which tiles a shape of prefill runs with: a table of what was measured, and defaults beside it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .prefill import PrefillJob

LENGTHS = (128, 256, 512, 1024, 2048, 8192)


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


# (head_dim, longest of queries and keys, causal, few): few tiles of 128 queries, no more than multiprocessors. A length
# is looked up as the smallest that is not shorter, or the last. For Hopper; None: prefill.cu is faster.
TABLE: dict[tuple[int, int, bool, bool], Config | None] = {}


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


def _key(job: PrefillJob, processors: int) -> tuple[int, int, bool, bool]:
    length = max(job.max_seqlen_q, job.max_seqlen_k)
    nearest = next((n for n in LENGTHS if n >= length), LENGTHS[-1])
    few = job.sequences * job.heads * -(-job.max_seqlen_q // 128) <= processors
    return job.head_dim, nearest, job.causal, few


def cuda_first(job: PrefillJob) -> bool:
    """Whether prefill.cu is the first choice: where the table says so, and on GPUs that it does not speak of."""
    processors, hopper = processors_of(job.q.device)
    return not hopper or TABLE.get(_key(job, processors), DEFAULT) is None


def config_of(job: PrefillJob, processors: int, hopper: bool) -> Config:
    """From the table, or the default; small blocks under the interpreter, which has no processors."""
    if processors == 0:
        return Config(16, 16, 4, 1)
    if job.q.dtype == torch.float32:
        return Config(64, 32, 4, 1) if job.head_dim <= 128 else Config(32, 16, 4, 1)
    found = TABLE.get(_key(job, processors)) if hopper else None
    return found or default_of(job.head_dim, hopper)
