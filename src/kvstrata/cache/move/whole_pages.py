"""Tokens that fill whole pages of codes: the kernel of ``quantize_pages`` with rows and pages given by address.

In `repack` a warp moves one token. For new pages, the kernel that quantises whole tiles reads each row once and writes
each word once. Rows come from plain pages of any slab, from new tokens, or as codes of another tier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.layout.format import MAX_TIERS
from kvstrata.quant.op import PARAMS, ROW_BYTES, SOURCE, entry_of, prepare

from .launches import kernel
from .moves_cuda import Lists


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself or a copy, with rows aligned for the kernel."""
    fits = x.data_ptr() % ROW_BYTES == 0 and x.stride(0) * x.element_size() % ROW_BYTES == 0
    return x if fits else x.contiguous().clone()


def kernels_needed(page_formats: Sequence[PageFormat]) -> list[jit.Named]:
    """Kernels that write whole pages, one for each tier of codes."""
    dtype = page_formats[0].dtype
    return [(SOURCE, entry_of(kind.format, dtype, by_address=True)) for kind in page_formats[1:]]


def launch(
    page_formats: Sequence[PageFormat],
    tier: int,
    lists: Lists,
    first: int,
    n: int,
    centre: torch.Tensor,
    direction: torch.Tensor | None = None,
) -> jit.Launch:
    """Quantise into ``n`` whole pages of a tier, from index ``first`` on; all slots are written.

    ``lists.k_at`` has addresses of rows, codes of another tier as moves.cu encodes them, or -1 for an empty slot.
    Without ``lists.v_at`` all rows are in plain pages, where V is at a constant offset from K. ``direction``: int8 rows
    of head caches, as those of ``centre`` and aligned like them; see `quant.reference.aim`.
    """
    device, format, dtype = centre.get_device(), page_formats[tier].format, page_formats[0].dtype
    slots = 8 * first * format.page_tokens
    k_at, head_caches = lists.k_at.data_ptr() + slots, lists.head_caches.data_ptr() + 4 * first
    v, v_at = (page_formats[0].v_offset, k_at) if lists.v_at is None else (0, lists.v_at.data_ptr() + slots)
    centre_at = centre.data_ptr() if format.centre else 0
    direction_at = 0 if direction is None else direction.data_ptr()
    centres = head_caches if centre_at or direction_at else 0
    formats = [kind.format for kind in page_formats[1:]]
    sources = [x for f in formats for x in (f.k_bits, f.v_bits, f.v_offset, f.scale_offset)]
    params = PARAMS.pack(  # rows are addresses, and the head index does not matter
        0, v, 0, lists.pages.data_ptr() + 8 * first, k_at, v_at, head_caches, centre_at, centres, direction_at,
        0, 0, 1, 1, n, *[0] * 4, *sources, *[0] * (4 * MAX_TIERS - 4 - len(sources)),
    )  # fmt: skip
    entry = entry_of(format, dtype, by_address=True)
    return prepare(kernel(SOURCE, entry, device), format, dtype, n, params, direction is not None)
