"""Scales of a page: fp16, eight rows ``(k[g], k[g + 8], v[g], v[g + 8])`` per tile of 16 tokens.

Lane ``4 g + t`` of the reading warp works on tokens ``g`` and ``g + 8`` of a tile, so it loads its four scales in one
8-byte access; a tile's scales are 64 bytes.
"""

from __future__ import annotations

import torch

from .fragments import TILE_TOKENS, check_page_tokens

BYTES_PER_TOKEN = 4


def pack_scales(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Pack fp16 scales ``k, v [..., P]`` to uint8 ``[..., 4 P]``."""
    for name, scale in (("k", k), ("v", v)):
        if scale.dtype != torch.float16:
            raise TypeError(f"{name}: expected torch.float16, got {scale.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"v: expected shape {tuple(k.shape)} as k, got {tuple(v.shape)}")
    tokens = check_page_tokens(k.shape[-1])
    lead = k.shape[:-1]
    both = torch.stack([k, v], -2).reshape(*lead, 2, tokens // TILE_TOKENS, 2, 8)  # side, tile, g or g + 8, g
    rows = both.movedim((-4, -3, -2, -1), (-2, -4, -1, -3))  # tile, g, side, g or g + 8
    return rows.contiguous().view(torch.uint8).reshape(*lead, BYTES_PER_TOKEN * tokens)


def unpack_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of `pack_scales`: uint8 ``[..., 4 P]`` -> fp16 scales ``k, v [..., P]``."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed: expected torch.uint8, got {packed.dtype}")
    tokens = check_page_tokens(packed.shape[-1] // BYTES_PER_TOKEN)
    if packed.shape[-1] != BYTES_PER_TOKEN * tokens:
        raise ValueError(f"packed: expected [..., {BYTES_PER_TOKEN * tokens}], got shape {tuple(packed.shape)}")
    lead = packed.shape[:-1]
    # Copy, because a slice of a page may not be aligned for a view as fp16.
    raw = packed.clone(memory_format=torch.contiguous_format).view(torch.float16)
    rows = raw.reshape(*lead, tokens // TILE_TOKENS, 8, 2, 2)
    k, v = rows.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).reshape(*lead, 2, tokens).unbind(-2)
    return k, v
