"""Scratch memory of engines: one buffer per device and stream, shared by all layers, which use it one after the other.

Buffers are never freed: a captured CUDA graph may hold their addresses. A buffer that is too small is kept in addition
to a larger one, at least twice its size.
"""

from __future__ import annotations

import torch

_buffers: dict[tuple[int, int], list[torch.Tensor]] = {}  # by device and raw stream; the last one is the largest


def workspace(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """Uninitialised buffer of at least ``nbytes`` for calls on the current stream; None without CUDA or for 0 bytes."""
    if device.type != "cuda" or nbytes == 0:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    kept = _buffers.setdefault((index, torch._C._cuda_getCurrentRawStream(index)), [])
    if not kept or kept[-1].numel() < nbytes:
        size = max(nbytes, 2 * kept[-1].numel() if kept else 0)
        kept.append(torch.empty(size, dtype=torch.uint8, device=device))
    return kept[-1]
