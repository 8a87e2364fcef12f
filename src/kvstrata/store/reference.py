"""``store_kv`` in plain torch: the CPU path and the reference for the kernels."""

from __future__ import annotations

import torch

from .job import Tensors

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # widest first


def to_fp8(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Convert ``x [T, H, D]`` times 1 / scale to fp8 bytes, rounded to nearest even and saturated; NaN is 0x7f."""
    x = x.float()
    if scale is not None:
        x = x * (1.0 / scale).reshape(-1, 1)
    largest = torch.finfo(dtype).max
    rounded = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, rounded)


def _as_integers(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both as the widest integers that divide their rows: copies bits exactly, with fewer elements."""
    size = x.element_size()
    offsets = [x.shape[-1], *x.stride()[:-1], x.storage_offset(), *cache.stride()[:-1], cache.storage_offset()]
    integer = next(i for i in INTEGERS if i.itemsize <= size or all(n * size % i.itemsize == 0 for n in offsets))
    return x.view(integer), cache.view(integer)


def store_kv(tensors: Tensors, layout: str) -> None:
    """Store the rows of a checked call."""
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = tensors
    sides = [(k, k_cache, k_scale)]
    if v is not None and v_cache is not None:
        sides.append((v, v_cache, v_scale))
    for x, cache, scale in sides:
        if cache.dim() == 4:
            by_token = cache.transpose(1, 2) if layout == "HND" else cache  # [num_blocks, block_size, heads, dim]
        else:
            by_token = cache.unsqueeze(1)
        num_blocks, block_size = by_token.shape[:2]
        slot = slot_mapping.long()
        live = (slot >= 0) & (slot < num_blocks * block_size)
        if not live.all():
            slot, x = slot[live], x[live]
        if x.dtype != cache.dtype:
            x, by_token = to_fp8(x, scale, cache.dtype), by_token.view(torch.uint8)
        x, by_token = _as_integers(x, by_token)
        if block_size == 1 or by_token.stride(0) == block_size * by_token.stride(1):
            by_token.flatten(0, 1).index_copy_(0, slot, x)
        else:
            by_token[slot // block_size, slot % block_size] = x
