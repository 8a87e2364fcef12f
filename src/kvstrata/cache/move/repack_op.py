"""``repack``: tokens move between pages, decoded and encoded anew where the format differs; many tiers in one launch.

    [K16V16 page] ──leaver: centre, rotate, quantise──▶ [K4V4 page] ──leaver: decode, quantise──▶ [K2V2 page]
          ▲ filler: copied into the hole                     ▲ filler: codes and scales copied

A job is a list of moves (`moves.Moves.packed`) in chains, see moves.py. The arithmetic is that of `PageFormat.encode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvstrata.backends import resolve

from . import repack_reference as reference

if TYPE_CHECKING:
    from kvstrata.cache.storage.page import PageFormat
    from kvstrata.cache.storage.pool import Pool


class Job(NamedTuple):
    """The arguments of one call."""

    pool: Pool
    page_formats: Sequence[PageFormat]
    packed: torch.Tensor  # int32 [n, 12], columns as in moves.COLUMNS
    k: torch.Tensor | None  # new rows [rows, D] in the dtype of plain pages, inner stride 1
    v: torch.Tensor | None
    centre: torch.Tensor  # float32 [m, D], subtracted from plain K on its way into codes


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
