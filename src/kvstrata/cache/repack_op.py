"""``repack``: tokens move between pages, decoded and encoded anew where the format differs; many tiers in one launch.

    [K16V16 page] ──leaver: centre, rotate, quantise──▶ [K4V4 page] ──leaver: decode, quantise──▶ [K2V2 page]
          ▲ filler: copied into the hole                     ▲ filler: codes and scales copied

A job is a list of moves (`moves.Moves.packed`) in chains, see moves.py. The arithmetic is that of `PageKind.encode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..backends import resolve
from . import repack_reference as reference

if TYPE_CHECKING:
    from .pages import PageKind
    from .pool import Pool


class Job(NamedTuple):
    """The arguments of one call."""

    pool: Pool
    kinds: Sequence[PageKind]
    packed: torch.Tensor  # int32 [n, 12], columns as in moves.COLUMNS
    k: torch.Tensor | None  # new rows [rows, D] in the dtype of plain pages, inner stride 1
    v: torch.Tensor | None
    centre: torch.Tensor  # float32 [m, D], subtracted from plain K on its way into codes


def repack(job: Job, backend: str = "auto") -> None:
    """Do all moves of a job. Destination slots that are shared with nobody; safe under graph capture on a GPU."""
    backend = resolve(backend, job.pool.device)
    if len(job.packed) == 0:
        return
    if backend == "reference":
        reference.put(job, reference.take(job))
    elif backend == "triton":
        from .repack_triton import repack as run_triton

        run_triton(job)
    else:
        from .repack_cuda import repack as run_cuda

        run_cuda(job)
