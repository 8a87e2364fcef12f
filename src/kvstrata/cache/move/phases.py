"""Executes the moves of a plan on the device, phase by phase, for all requests and layers: a handful of launches.

    tier by tier from the last, one launch for each list that is not empty:
        fillers ──────phases.cu─────▶ holes
        arrivals ──quantize.cu──▶ whole pages    their positions and importance: one launch for all tiers
        arrivals ──repack.cu──▶ slots of the page where the kept tokens end, and plain pages

Everything is prepared with the plan; running it only launches. The number of launches depends only on the tiers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.layout.format import MAX_TIERS

from . import repack_cuda, whole_pages
from .launches import kernel
from .moves_cuda import Lists
from .repack_job import Job

SOURCE = Path(__file__).with_name("phases.cu")
THREADS = 256
WARPS = 4096  # warps that copy tokens; more if each would have more than 32 of them
PARAMS = struct.Struct(f"4Q q 6i {2 * MAX_TIERS}i")


@lru_cache(maxsize=64)
def entry_of(kind: PageFormat, sides: bool = False) -> str:
    """Kernel that copies tokens of a tier from slot to slot, or writes positions and importance (``sides``)."""
    side = f"{'short' if kind.position_dtype == torch.int16 else 'int'}, {str(kind.keeps_importance).lower()}"
    f = kind.format
    if sides:
        return f"write_sides<{side}>"
    if f.plain:
        return f"copy_rows<{kind.row_bytes}, {side}>"
    return f"copy_codes<{f.head_dim}, {f.page_tokens}, {f.k_bits}, {f.v_bits}, {side}>"


def kernels_needed(page_formats: Sequence[PageFormat]) -> list[jit.Named]:
    """Kernels that execute moves between the tiers of a cache."""
    own = [entry_of(page_formats[0], sides=True), *map(entry_of, page_formats)]
    others = (*whole_pages.kernels_needed(page_formats), *repack_cuda.kernels_needed(page_formats))
    return [*((SOURCE, entry) for entry in own), *others]


def phases(
    buckets: Buckets,
    lists: Lists,
    rows: tuple[torch.Tensor | None, torch.Tensor | None],
    centre: torch.Tensor,
    direction: torch.Tensor | None = None,
) -> Iterator[jit.Launch]:
    """Launches for moves whose pages are allocated. ``rows``: k and v of new tokens, ``[n, D]``.

    ``centre``, ``direction``: aligned rows of head caches, see `centre_rows`. The device's context must be current.
    """
    pool, page_formats, tiers = buckets.pool, buckets.page_formats, len(buckets.page_formats)
    page_tokens, device = buckets.page_tokens, centre.get_device()
    job = Job(pool, page_formats, lists.packed, *rows, centre, direction)

    def own(n: int, tier: int = 0, first: int = 0, sides: bool = False) -> jit.Launch:
        """A launch of phases.cu for ``n`` tokens or slots."""
        f = page_formats[tier].format
        per_warp = 2 * min(-(-n // (2 * WARPS)), 16)  # two at a time
        params = PARAMS.pack(
            lists.copies.data_ptr() + 16 * first, lists.sides.data_ptr(), lists.owners.data_ptr(),
            pool.pointers.data_ptr(), n, pool.units, page_tokens, tier, f.v_offset,
            0 if f.plain else f.scale_offset, per_warp, *buckets.offsets,
        )  # fmt: skip
        entry = entry_of(page_formats[tier], sides)
        per_block = THREADS if sides else THREADS // 32 * per_warp
        return jit.Launch(kernel(SOURCE, entry, device), -(-n // per_block), THREADS, params)

    for tier in reversed(range(tiers)):
        (filler, fillers_end), (arrival, arrivals_end), (first, end) = lists.ranges[:, tier].tolist()
        if fillers_end > filler:
            yield own(fillers_end - filler, tier, filler)
        if end > first:
            yield whole_pages.launch(page_formats, tier, lists, first, end - first, centre, direction)
        if arrivals_end > arrival:
            launch = repack_cuda.launch(job, arrival, arrivals_end - arrival)
            lists.of_rows.append(launch.params)
            yield launch
    if slots := len(lists.pages) * page_tokens:
        yield own(slots, sides=True)
