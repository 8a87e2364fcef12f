"""Changes buckets: appends plain rows, or moves tokens to other tiers.

    tokens and targets ──▶ moves (moves.py; CUDA: moves_cuda.py) ──▶ allocate pages ──▶ launches when the transaction
    ends

Every change but an append is one call of `move`: a flat list of tokens, including new ones, and the tier each goes to.
It is part of a `Transaction`: pages are allocated first, tokens move when nothing can fail any more, and old pages are
released after that. A page with other owners is copied before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstrata import backends, jit
from kvstrata.cache.storage.page import NewRows
from kvstrata.cache.storage.page_table import Buckets, Exchanged
from kvstrata.cache.storage.tokens import Tokens
from kvstrata.cache.storage.transaction import Transaction
from kvstrata.quant.op import centre_rows

from . import moves, moves_cuda, repack_op, whole_pages
from . import phases as cuda_phases
from .append import prepare_append
from .append_job import Job
from .launches import Launches
from .launches import prepare as prepare_launches
from .repack_job import Job as RepackJob


@dataclass(frozen=True)
class Prepared:
    """Moves in chains whose pages are allocated; ``run`` allocates nothing."""

    job: RepackJob
    run: Callable[[], None]


@dataclass(frozen=True)
class CountedMoves:
    """Moves in phases whose pages are allocated; ``run`` allocates nothing."""

    launches: Launches
    counted: moves_cuda.Moves
    exchanged: Exchanged
    lists: moves_cuda.Lists

    def run(self) -> None:
        self.launches.run()


def append(job: Job, change: Transaction | None = None) -> None:
    """Write plain rows into the pages from `Buckets.room` or, in a transaction, `Buckets.make_room`; update counts."""
    run, index = prepare_append(job), (job.requests, job.layer, slice(None), 0)
    host_count, after = job.buckets.host_count, job.count + job.lengths[:, None]
    if change is None:
        run()
        host_count[index] = after
    else:
        change.launch(run)
        change.set(host_count, index, after)
    job.buckets.forget(job.requests, change)


def move(
    buckets: Buckets,
    change: Transaction,
    layers: int | Sequence[int],
    requests: Sequence[int],
    tokens: Tokens,
    target: torch.Tensor,
    fresh: NewRows | None,
    centre: torch.Tensor,
    direction: torch.Tensor | None = None,
) -> None:
    """Move every token to its target tier, or evict it (`DROP`), when the transaction completes; see `prepare`."""
    prepared = prepare(buckets, change, layers, requests, tokens, target, fresh, centre, direction)
    if prepared is not None:
        change.launch(prepared.run)


def prepare(
    buckets: Buckets,
    change: Transaction,
    layers: int | Sequence[int],
    requests: Sequence[int],
    tokens: Tokens,
    target: torch.Tensor,
    fresh: NewRows | None,
    centre: torch.Tensor,
    direction: torch.Tensor | None = None,
) -> Prepared | CountedMoves | None:
    """Plan the moves, allocate pages, update tables and counts; None if nothing moves.

    ``layers``: one for all requests, or one for each; then a head cache is (index of the pair) * kv_heads + head.
    ``tokens`` are all tokens of the head caches, those of a bucket contiguous and by slot. ``fresh`` are the plain rows
    of new tokens; ``centre [head_caches, D]`` is subtracted from plain K that becomes codes; ``direction``, int8 of the
    same shape, is that of the error of K (`quant.reference.aim`).
    """
    request_ids = np.array(requests, np.int64)
    layer_ids = np.broadcast_to(np.array(layers, np.int64), request_ids.shape)
    backend = backends.resolve(buckets.backend, buckets.device)
    if backend == "cuda":
        return _prepare_phases(buckets, change, layer_ids, request_ids, tokens, target, fresh, centre, direction)
    before = buckets.host_count[request_ids, layer_ids].reshape(-1).astype(np.int64)
    numbers = moves.change(tokens, target, buckets.pool.to_device(before), len(buckets.page_formats))
    left, came, holes = numbers.to_host()
    if not left.any() and not came.any():
        return None
    plan = moves.plan(numbers, tokens, target, int(came.sum()), int(holes.sum()))
    offsets = buckets.table_offsets(request_ids, layer_ids)
    packed = pack(buckets, plan, tokens, offsets)
    table = buckets.exchange_pages(change, request_ids, layer_ids, left, came, holes)
    packed[:, 3] = buckets.handles_at(offsets, plan.bucket, plan.slot, table)
    k, v = (None, None) if fresh is None else (fresh.k, fresh.v)
    job = RepackJob(buckets.pool, buckets.page_formats, packed, k, v, centre, direction)
    return Prepared(job, repack_op.prepare(job, backend))


def _prepare_phases(
    buckets: Buckets,
    change: Transaction,
    layers: np.ndarray,
    requests: np.ndarray,
    tokens: Tokens,
    target: torch.Tensor,
    fresh: NewRows | None,
    centre: torch.Tensor,
    direction: torch.Tensor | None = None,
) -> CountedMoves | None:
    """`prepare` in CUDA C++: lists by phase instead of chains."""
    places = requests * buckets.page_table.shape[1] + layers
    lease, rows = buckets.arena.lease(), aligned_rows(fresh)
    counted = moves_cuda.Moves(buckets, places, target.to(torch.int8), lease, tokens, rows=rows)
    return prepare_counted(buckets, change, layers, requests, counted, counted.to_host(), centre, direction)


def aligned_rows(fresh: NewRows | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """K and V of new tokens, aligned for the kernels."""
    return (None, None) if fresh is None else (whole_pages.aligned(fresh.k), whole_pages.aligned(fresh.v))


def prepare_counted(
    buckets: Buckets,
    change: Transaction,
    layers: np.ndarray,
    requests: np.ndarray,
    counted: moves_cuda.Moves,
    numbers: np.ndarray,
    centre: torch.Tensor,
    direction: torch.Tensor | None = None,
) -> CountedMoves | None:
    """Pages and launches for counted moves; None if there are none. ``numbers``: from `Moves.to_host`."""
    if not numbers[:2].any():
        return None
    if buckets.device.type == "cpu":
        counted.copy_tables()
    exchanged = buckets.exchange(change, requests, layers, *numbers)
    if not buckets.by_cuda:
        buckets.pool.clear(exchanged.added[0], 0)
    centre = centre_rows(centre)
    direction = None if direction is None else centre_rows(direction)
    lists: list[moves_cuda.Lists] = []

    def build() -> Iterator[jit.Launch]:
        filled, before, after = counted.place(numbers, exchanged)
        lists.append(filled)
        yield from before
        yield from cuda_phases.phases(buckets, filled, counted.rows, centre, direction)
        yield from after

    launches = prepare_launches(centre.get_device(), build, (counted, centre, direction, lists))
    return CountedMoves(launches, counted, exchanged, lists[0])


def pack(buckets: Buckets, plan: moves.Moves, tokens: Tokens, offsets: torch.Tensor) -> torch.Tensor:
    """Moves in the form that kernels read, int32 ``[n, columns]``; the destination page is set when it is allocated.

    ``offsets``: `Buckets.table_offsets` of the places.
    """
    tiers, page_tokens, moving = len(buckets.page_formats), buckets.page_tokens, tokens[plan.token]
    stored = moving.tier >= 0
    slot = torch.where(stored, moving.slot % page_tokens, moving.slot)
    bucket = moving.head_cache * tiers + moving.tier.clamp(min=0)
    source = torch.where(stored, buckets.handles_at(offsets, bucket, torch.where(stored, moving.slot, 0)), 0)
    columns = [
        source, slot, moving.tier, torch.zeros_like(slot), plan.slot % page_tokens, plan.bucket % tiers,
        moving.head_cache, plan.after, plan.head, moving.position,
    ]  # fmt: skip
    packed = torch.zeros(len(plan), len(moves.COLUMNS), dtype=torch.int32, device=buckets.device)
    for i, column in enumerate(columns):
        packed[:, i] = column
    packed[:, 10] = moving.importance.view(torch.int32)
    return packed
