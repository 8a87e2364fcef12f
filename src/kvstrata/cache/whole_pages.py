"""Plain tokens that fill new pages of codes: the kernel of ``quantize_pages``, rows and pages given by their addresses.

In `repack` a warp moves one token. Where many tokens arrive in pages that are new, the kernel that makes whole tiles
reads each row once and writes each word once; rows come from plain pages of any slab, or are new.
"""

from __future__ import annotations

import functools

import torch

from .. import jit
from ..layout import Format
from .quantize_op import PARAMS, SOURCE, entry_of, grid_of


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows whose four values are one access."""
    size, access = x.element_size(), 4 * x.element_size()
    return x if x.data_ptr() % access == 0 and x.stride(0) * size % access == 0 else x.contiguous().clone()


@functools.lru_cache(maxsize=256)
def _kernel(format: Format, dtype: torch.dtype, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry_of(format, dtype, by_address=True), jit.arch_of(device))


def launch(
    format: Format,
    dtype: torch.dtype,
    pages: torch.Tensor,
    k_at: torch.Tensor,
    v_at: torch.Tensor | int,
    bucket: torch.Tensor,
    centre: torch.Tensor,
    rotated: torch.Tensor,
) -> jit.Launch:
    """Make pages at ``pages * 64`` of the rows at ``k_at [n, page_tokens]``, -1 for an empty slot.

    ``v_at``: the rows of V, or how far behind its K each is. ``bucket [n]``: the row of ``centre``.
    All slots are written.
    """
    device = pages.get_device()
    v, v_rows = (v_at, k_at) if isinstance(v_at, int) else (0, v_at)
    centres = (centre.data_ptr(), rotated.data_ptr(), bucket.data_ptr()) if format.centre else (0, 0, 0)
    params = PARAMS.pack(
        0, v, 0, pages.data_ptr(), k_at.data_ptr(), v_rows.data_ptr(), bucket.data_ptr(), *centres, 1, 0, 1, 0
    )  # rows are addresses: bytes from 0 on, and the number of the head does not matter
    grid, block = grid_of(format, len(pages))
    return jit.Launch(_kernel(format, dtype, device), grid, block, params)
