"""Loops of `pages.py` compiled for the CPU: rotation, codes, and their fields in pages. Bit for bit what torch gives.

Torch walks over all rows once per operation and indexes single bytes with 8-byte numbers; these stay with a row.
Where numba is not installed, and for a few rows, torch does it.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvstrata.layout.rotation import block_of

# No fastmath: the order of the additions is part of the format, and a product is not fused.
compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


def rotate(x: torch.Tensor) -> torch.Tensor:
    """`layout.rotation.rotate` of float32 rows ``[n, D]`` on the CPU."""
    rotated = torch.empty(x.shape, dtype=torch.float32)
    block = block_of(x.shape[1])
    _rotate(x.contiguous().numpy(), block, np.float32(block**-0.5), rotated.numpy())
    return rotated


def encode(x: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """`quantize_reference.encode` of float32 rows ``[n, D]`` on the CPU."""
    codes = torch.empty(x.shape, dtype=torch.uint8)
    _encode(x.contiguous().numpy(), step.reciprocal().numpy(), 2 ** (bits - 1), codes.numpy())
    return codes


@compiled
def _rotate(x, block, scale, out):
    rows, dim = x.shape
    for i in range(rows):
        for j in range(dim):
            out[i, j] = x[i, j]
        distance = 1
        while distance < block:
            for first in range(0, dim, 2 * distance):
                for j in range(first, first + distance):
                    a, b = out[i, j], out[i, j + distance]
                    out[i, j], out[i, j + distance] = a + b, a - b
            distance *= 2
        for j in range(dim):
            out[i, j] *= scale


@compiled
def _encode(x, inverse, middle, codes):
    low, high = np.float64(-middle), np.float64(middle - 1)
    for i in range(x.shape[0]):
        by = np.float64(inverse[i])
        for j in range(x.shape[1]):
            level = np.floor(np.float64(x[i, j]) * by)  # exact in float64
            codes[i, j] = np.uint8(np.int64(min(max(level, low), high)) + middle)


@compiled
def write_fields(pages, stride, offset, page, slot, byte, bit, width, low, codes):
    """Bits ``low .. low + width`` of ``codes [n, D]`` into the bytes of ``pages``; the rest of each byte stays."""
    mask = np.uint8((1 << width) - 1)
    for i in range(len(page)):
        begin = page[i] * stride + offset
        for j in range(codes.shape[1]):
            at, shift = begin + byte[slot[i], j], bit[slot[i], j]
            field = (codes[i, j] >> np.uint8(low)) & mask
            pages[at] = (pages[at] & ~np.uint8(mask << shift)) | np.uint8(field << shift)


@compiled
def read_fields(pages, stride, offset, page, slot, byte, bit, width, low, codes):
    """The inverse: the fields are added to ``codes``, which begin as zeros."""
    mask = np.uint8((1 << width) - 1)
    for i in range(len(page)):
        begin = page[i] * stride + offset
        for j in range(codes.shape[1]):
            field = (pages[begin + byte[slot[i], j]] >> bit[slot[i], j]) & mask
            codes[i, j] |= np.uint8(field << np.uint8(low))
