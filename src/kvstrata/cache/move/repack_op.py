"""``repack``: tokens move between pages, decoded and encoded anew where the format differs; many tiers in one launch.

    [K16V16 page] ──leaver: centre, rotate, quantise──▶ [K4V4 page] ──leaver: decode, quantise──▶ [K2V2 page]
          ▲ filler: copied into the hole                     ▲ filler: codes and scales copied

A job is a list of moves (`moves.Moves.packed`) in chains, see moves.py. The arithmetic is that of `PageFormat.encode`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.backends import resolve

from . import repack_reference as reference
from .repack_job import Job

__all__ = ["Job", "prepare", "repack"]


def repack(job: Job, backend: str = "auto") -> None:
    """Do all moves of a job. Destination slots that are shared with nobody; safe under graph capture on a GPU."""
    prepare(job, backend)()


def prepare(job: Job, backend: str = "auto") -> Callable[[], None]:
    """What does all moves of a job; calling it allocates nothing. The reference reads and encodes them here."""
    backend = resolve(backend, job.pool.device)
    if len(job.packed) == 0:
        return lambda: None
    if backend == "reference":
        return reference.put(job, reference.take(job))
    if backend == "triton":
        from .repack_triton import prepare as prepare_triton

        return prepare_triton(job)
    from .repack_cuda import prepare as prepare_cuda

    return prepare_cuda(job)
