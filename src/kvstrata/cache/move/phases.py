"""The moves of a plan on the device, phase by phase, for all requests and layers together: a handful of launches.

    tier by tier from the last, a launch each, if there are any:
        fillers ──────phases.cu─────▶ holes
        arrivals ──quantize.cu──▶ whole pages    their positions and importance: one launch for all tiers
        arrivals ──repack.cu──▶ slots of the page where the kept tokens end, and plain pages

Everything is prepared with the plan; to run it is to launch. How many launches depends on the tiers only.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.quant.op import centre_rows

from . import repack_cuda, repack_op, whole_pages
from .moves_cuda import TIERS, Lists

if TYPE_CHECKING:
    from kvstrata.cache.storage.page_table import Buckets

SOURCE = Path(__file__).with_name("phases.cu")
PARAMS = struct.Struct(f"4Q q 5i {2 * TIERS}i 4x")


def entry_of(kind: PageFormat, sides: bool = False) -> str:
    """Of the kernel that copies tokens of a tier from slot to slot, or writes ``sides``."""
    side = f"{'short' if kind.position_dtype == torch.int16 else 'int'}, {str(kind.keeps_importance).lower()}"
    f = kind.format
    if sides:
        return f"write_sides<{side}>"
    if f.plain:
        return f"copy_rows<{kind.row_bytes}, {side}>"
    return f"copy_codes<{f.head_dim}, {f.page_tokens}, {f.k_bits}, {f.v_bits}, {side}>"


@functools.lru_cache(maxsize=64)
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry, jit.arch_of(device))


@dataclass(frozen=True)
class Phases:
    """Moves whose pages are taken, ready to go."""

    device: int
    launches: tuple[jit.Launch, ...]
    kept: tuple[object, ...]  # what the launches read

    def run(self) -> None:
        if self.launches:
            with torch.cuda.device(self.device):
                jit.bind_context(self.device)
                stream = jit.current_stream(self.device)
                for launch in self.launches:
                    launch(stream)


def phases(
    buckets: Buckets,
    lists: Lists,
    rows: tuple[torch.Tensor | None, torch.Tensor | None],
    centre: torch.Tensor,
) -> Phases:
    pool, page_formats, tiers, p = buckets.pool, buckets.page_formats, len(buckets.page_formats), buckets.page_tokens
    plain, device = page_formats[0], centre.get_device()
    centre = centre_rows(centre)
    offsets = [x for kind in page_formats for x in (kind.position_offset, kind.importance_offset)]
    offsets += [0] * (2 * (TIERS - tiers))
    pages = lists.whole[0].long()
    pages = (pool.pointers[pages // pool.units] + pages % pool.units * 64) // 64
    side_pages, head_cache = lists.whole[:2].T.contiguous(), lists.whole[2]
    kept: list[object] = [lists, rows, centre, pages, side_pages]

    def own(n: int, blocks: int, tier: int = 0, first: int = 0, sides: bool = False) -> jit.Launch:
        f = page_formats[tier].format
        params = PARAMS.pack(
            lists.copies[first:].data_ptr(), lists.sides.data_ptr(), side_pages.data_ptr(), pool.pointers.data_ptr(), n,
            pool.units, p, tier, f.v_offset, 0 if f.plain else f.scale_offset, *offsets,
        )  # fmt: skip
        return jit.Launch(_kernel(entry_of(page_formats[tier], sides), device), blocks, 256, params)

    launches = []
    with torch.cuda.device(device):
        jit.bind_context(device)
        job = repack_op.Job(pool, page_formats, lists.packed, *rows, centre)
        for tier in reversed(range(tiers)):
            (first, end), (begin, last), whole_range = lists.ranges[:, tier].tolist()
            if end > first:
                launches.append(own(end - first, -(-(end - first) // 256), tier, first))
            whole = slice(*whole_range)
            if whole.stop > whole.start:
                v_at = plain.v_offset if lists.v_at is None else lists.v_at[whole]
                mine = pages[whole], lists.k_at[whole], v_at, head_cache[whole]
                launches.append(whole_pages.launch(page_formats, tier, *mine, centre))
            if last > begin:
                launches.append(repack_cuda.launch(job, begin, last - begin))
        if slots := len(pages) * p:
            launches.append(own(slots, -(-slots // 256), sides=True))
    return Phases(device, tuple(launches), tuple(kept))
