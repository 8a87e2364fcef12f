"""Plain tokens that fill new pages of codes: the kernel of ``quantize_pages``, rows and pages given by their addresses.

In `repack` a warp moves one token. Where many tokens arrive in pages that are new, the kernel that makes whole tiles
reads each row once and writes each word once; rows come from plain pages of any slab, or are new. Only in CUDA C++:
without it such tokens go the way of all others.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import jit
from ..layout import Format
from .pages_triton import side
from .quantize_op import PARAMS, SOURCE, entry_of, grid_of, rotated_centre

if TYPE_CHECKING:
    from .buckets import Buckets
    from .moves import Moves
    from .repack_op import Job


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows whose four values are one access."""
    size, access = x.element_size(), 4 * x.element_size()
    return x if x.data_ptr() % access == 0 and x.stride(0) * size % access == 0 else x.contiguous().clone()


def addresses(job: Job, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Of the K and V rows of moves from plain sources, int64, -1 where not chosen; and the tensors they point into."""
    kind, units = job.kinds[0], job.pool.units
    source, slot, tier = (job.packed[:, i].long() for i in range(3))
    page = job.pool.pointers[source // units] + source % units * 64 + slot * kind.row_bytes
    k_at, v_at = page, page + kind.v_offset
    rows: tuple[torch.Tensor, ...] = ()
    if job.k is not None and job.v is not None:
        rows = _aligned(job.k), _aligned(job.v)
        new = [x.data_ptr() + slot * (x.stride(0) * x.element_size()) for x in rows]
        k_at, v_at = (torch.where(tier < 0, mine, stored) for mine, stored in zip(new, (k_at, v_at), strict=True))
    return torch.where(chosen, k_at, -1), torch.where(chosen, v_at, -1), rows


@functools.lru_cache(maxsize=256)
def _kernel(format: Format, dtype: torch.dtype, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry_of(format, dtype, by_address=True), jit.arch_of(device))


def fill(buckets: Buckets, job: Job, plan: Moves, group: np.ndarray, page: np.ndarray, handles: np.ndarray) -> None:
    """Make the new pages ``page`` of ``group`` (ascending) from the moves in ``plan.whole``; all slots are written."""
    assert plan.whole is not None
    pool, tiers, p = job.pool, len(job.kinds), buckets.page_tokens
    if not len(handles):
        return
    # The number of a move's page among the new ones, from where its group's begin.
    groups = buckets.kv_heads * tiers * (int(group.max()) // (buckets.kv_heads * tiers) + 1)
    begins = np.zeros(groups, np.int64)
    first = np.unique(group, return_index=True)
    begins[first[0]] = first[1] - page[first[1]]
    base = pool.to_device(begins)
    number = torch.where(plan.whole, base[plan.group.clamp(max=groups - 1)] + plan.slot // p, len(handles))
    k_at, v_at, rows = addresses(job, plan.whole)
    lists = []
    for at in (k_at, v_at):
        spread = torch.full((len(handles) + 1, p), -1, dtype=torch.int64, device=pool.device)
        spread[number, plan.slot % p] = at
        lists.append(spread)
    there = pool.to_device(handles)
    pages = (pool.pointers[there // pool.units] + there % pool.units * 64) // 64
    bucket = pool.to_device((group // tiers).astype(np.int32))
    centre = job.centre.contiguous()
    for tier in range(1, tiers):
        mine = np.flatnonzero(group % tiers == tier)
        if len(mine):
            which = pool.to_device(mine)
            _launch(job, tier, pages[which], lists[0][which], lists[1][which], bucket[which], centre)
    kind = job.kinds[0]
    to = torch.where(plan.whole, job.packed[:, 3].long(), -1)
    slot, tier_of = job.packed[:, 4].long(), job.packed[:, 5].long()
    position, importance = job.packed[:, 9].long(), job.packed[:, 10].contiguous().view(torch.float32)
    side(
        pool, to, slot, tier_of, buckets.side_offsets, position, importance, kind.position_dtype, kind.keeps_importance,
        write=True,
    )  # fmt: skip
    del rows  # alive until the launches are in the stream


def _launch(
    job: Job,
    tier: int,
    pages: torch.Tensor,
    k_at: torch.Tensor,
    v_at: torch.Tensor,
    bucket: torch.Tensor,
    centre: torch.Tensor,
) -> None:
    format, dtype, device = job.kinds[tier].format, job.kinds[0].dtype, pages.get_device()
    rotated = rotated_centre(centre, format)
    centres = (centre.data_ptr(), rotated.data_ptr(), bucket.data_ptr()) if format.centre else (0, 0, 0)
    params = PARAMS.pack(
        0, 0, 0, pages.data_ptr(), k_at.data_ptr(), v_at.data_ptr(), bucket.data_ptr(), *centres, 1, 0, 1, 0
    )  # rows are addresses: bytes from 0 on, and the number of the head does not matter
    with torch.cuda.device(device):
        jit.bind_context(device)
        grid, block = grid_of(format, len(pages))
        launch = jit.Launch(_kernel(format, dtype, device), grid, block, params)
        launch(jit.current_stream(device))
