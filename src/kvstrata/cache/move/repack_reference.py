"""``repack`` in plain torch: the reference of the kernels, and the CPU path.

All reads come before all writes, so that nothing is allocated once the first page changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from kvstrata.cache.storage.page import NewRows, Rows

from .repack_job import Job

Taken = list[tuple[torch.Tensor, int, Rows]]  # indices of moves, their target tier, rows encoded for it


def take(job: Job) -> Taken:
    """Read every moving token and encode it for its target tier."""
    taken: Taken = []
    pair = (job.packed[:, 2] + 1) * len(job.page_formats) + job.packed[:, 5]
    for number in torch.bincount(pair).nonzero().flatten().tolist():
        was, now = number // len(job.page_formats) - 1, number % len(job.page_formats)
        moves = (pair == number).nonzero().flatten()
        taken.append((moves, now, _rows(job, moves, was, now)))
    return taken


def _rows(job: Job, moves: torch.Tensor, was: int, now: int) -> Rows:
    """Tokens of moves from tier ``was`` (-1: new rows) to tier ``now``, encoded for it."""
    source, slot, _, _, _, _, centre, _, _, position, importance, _ = job.packed.index_select(0, moves).T.contiguous()
    kind = job.page_formats[max(was, 0)]
    if was < 0:
        assert job.k is not None
        assert job.v is not None
        notes = position.long(), importance.view(torch.float32)
        if now <= 0:
            return Rows(job.k.index_select(0, slot), job.v.index_select(0, slot), None, None, *notes)
        given = NewRows(job.k, job.v), slot, job.centre, centre, job.direction
        (k, k_scale), (v, v_scale) = job.page_formats[now].encode_new(*given)
        return Rows(k, v, k_scale, v_scale, *notes)
    handles, place = _distinct(source.cpu().numpy())
    pages = job.pool.read(handles, 0, kind.stride)
    rows = kind.read(pages, job.pool.to_device(place), slot.long())
    rows = replace(rows, position=position.long(), importance=importance.view(torch.float32))
    if now <= 0 or now == was:
        return rows
    own_centre = job.centre.index_select(0, centre) if was == 0 else None
    direction = None if job.direction is None else job.direction.index_select(0, centre)
    return job.page_formats[now].encode(rows, kind, own_centre, direction)


def put(job: Job, taken: Taken) -> Callable[[], None]:
    """Function that writes the tokens to their pages; copies of these pages, with the tokens, are prepared here."""
    written: list[tuple[np.ndarray, torch.Tensor]] = []
    for tier in sorted({tier for _, tier, _ in taken}):
        kind, parts = job.page_formats[tier], [(moves, rows) for moves, now, rows in taken if now == tier]
        to = torch.cat([job.packed[moves, 3] for moves, _ in parts]).cpu().numpy()
        handles, place = _distinct(to)
        pages = job.pool.read(handles, 0, kind.stride)
        places = job.pool.to_device(place).split([len(moves) for moves, _ in parts])
        for (moves, rows), page in zip(parts, places, strict=True):
            kind.write(pages, page, job.packed[moves, 4].long(), rows)
        written.append((handles, pages))

    def write() -> None:
        for handles, pages in written:
            job.pool.write(handles, 0, pages)

    return write


def _distinct(handles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique` with the inverse; mostly a page's tokens follow one another, so only one of a run is sorted."""
    first = np.flatnonzero(np.diff(handles, prepend=-1))
    pages, place = np.unique(handles[first], return_inverse=True)
    return pages, np.repeat(place.reshape(-1), np.diff(first, append=len(handles)))
