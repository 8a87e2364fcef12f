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
    pages: torch.Tensor,
    k_at: torch.Tensor,
    v_at: torch.Tensor | int,
    head_cache: torch.Tensor,
    centre: torch.Tensor,
) -> jit.Launch:
    """Quantise into pages of a tier at addresses ``pages * UNIT``; all slots are written.

    ``k_at [n, page_tokens]``: addresses of rows, codes of another tier as moves.cu encodes them, or -1 for an empty
    slot. ``v_at``: the same for V, or the distance of each V from its K. ``head_cache [n]``: the row of ``centre``.
    """
    device, format, dtype = pages.get_device(), page_formats[tier].format, page_formats[0].dtype
    v, v_rows = (v_at, k_at) if isinstance(v_at, int) else (0, v_at)
    centres = (centre.data_ptr(), head_cache.data_ptr()) if format.centre else (0, 0)
    formats = [kind.format for kind in page_formats[1:]]
    sources = [x for f in formats for x in (f.k_bits, f.v_bits, f.v_offset, f.scale_offset)]
    params = PARAMS.pack(  # rows are addresses, and the number of the head does not matter
        0, v, 0, pages.data_ptr(), k_at.data_ptr(), v_rows.data_ptr(), head_cache.data_ptr(), *centres,
        0, 0, 1, 1, len(pages), *[0] * 4, *sources, *[0] * (4 * MAX_TIERS - 4 - len(sources)),
    )  # fmt: skip
    entry = entry_of(format, dtype, by_address=True)
    return prepare(kernel(SOURCE, entry, device), format, dtype, len(pages), params)
