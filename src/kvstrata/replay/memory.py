"""Bytes that a strided tensor covers, whether two tensors share any, and alignment.

Comparing only first and last addresses would refuse interleaved columns of one buffer; so if the spans overlap, the
contiguous runs of both are compared.
"""

from __future__ import annotations

import numpy as np
import torch

ALIGN = 256  # bytes


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGN`."""
    return ALIGN * -(-nbytes // ALIGN)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte, and the one past the last; equal if there are no elements."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def runs(tensor: torch.Tensor) -> np.ndarray:
    """Contiguous runs of bytes in ascending order: ``[n, 2]`` of start and end; all have the same length."""
    if tensor.numel() == 0:
        return np.zeros((0, 2), dtype=np.int64)
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    starts = np.zeros(1, dtype=np.int64)
    for stride, size in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    starts = np.sort(starts) * tensor.itemsize + tensor.data_ptr()
    return np.stack([starts, starts + length * tensor.itemsize], axis=1)


def self_overlaps(tensor: torch.Tensor) -> bool:
    """True if two elements of the tensor share memory."""
    end = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < end:
            break
        end += stride * (size - 1)
    else:
        return False
    covered = runs(tensor)
    return bool((covered[1:, 0] < covered[:-1, 1]).any())


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if any byte belongs to both."""
    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    if a_first >= b_end or b_first >= a_end or a.numel() == 0 or b.numel() == 0:
        return False
    a_runs, b_runs = runs(a), runs(b)
    # Of b's runs, only the last one that begins before the end of a run of a can overlap it from below.
    before = np.searchsorted(b_runs[:, 0], a_runs[:, 1], side="left") - 1
    return bool((np.maximum.accumulate(b_runs[:, 1])[before] > a_runs[:, 0])[before >= 0].any())
