"""``repack``: moves tokens between pages and re-encodes them if the format differs; all tiers in one launch.

    [K16V16 page] ──leaver: centre, rotate, quantise──▶ [K4V4 page] ──leaver: decode, quantise──▶ [K2V2 page]
          ▲ filler: copied into the hole                     ▲ filler: codes and scales copied

A job is a list of moves in chains (moves.py). The arithmetic is that of `PageFormat.encode`. CUDA C++ works in phases
instead (phases.py) and uses this list for single arrivals only.
"""

from __future__ import annotations

from collections.abc import Callable

from . import repack_reference as reference
from .repack_job import Job


def prepare(job: Job, backend: str) -> Callable[[], None]:
    """Function that makes all moves of a job without allocating; ``backend`` is ``reference`` or ``triton``.

    Destination slots must have no other owner. The reference reads and encodes the tokens here; Triton reads them when
    called, and is safe under graph capture.
    """
    if len(job.packed) == 0:
        return lambda: None
    if backend == "reference":
        return reference.put(job, reference.take(job))
    from . import repack_triton

    return repack_triton.prepare(job)
