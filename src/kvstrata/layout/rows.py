"""Codes of one row in plain order, for rows outside pages: ``quantize`` and files.

``8 / width`` neighbours share a byte, the first in the low bits. 3 bit is the low two bits of the whole row, then
its high bits.

    4 bit   byte i: value 2i + 1 | value 2i
    2 bit   byte i: value 4i + 3 | 4i + 2 | 4i + 1 | 4i
    3 bit   [2-bit plane: D / 4 bytes][1-bit plane: D / 8 bytes]
"""

from __future__ import annotations

import torch

from .fragments import check_bits, planes


def _check_dim(dim: int) -> int:
    if dim < 8 or dim % 8:
        raise ValueError(f"dim: expected a positive multiple of 8, got {dim}")
    return dim


def row_bytes(bits: int, dim: int) -> int:
    """Bytes of one row's codes."""
    return _check_dim(dim) * check_bits(bits) // 8


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes ``[..., D]`` below ``2 ** bits`` to uint8 ``[..., D * bits / 8]``."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes: expected torch.uint8, got {codes.dtype}")
    dim = _check_dim(codes.shape[-1])
    parts = []
    for width, low in planes(check_bits(bits)):
        fields = ((codes >> low) & (2**width - 1)).reshape(*codes.shape[:-1], dim * width // 8, 8 // width)
        packed = fields[..., 0]
        for i in range(1, 8 // width):
            packed = packed | (fields[..., i] << (i * width))
        parts.append(packed)
    return torch.cat(parts, -1)


def unpack_rows(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Inverse of `pack_rows`: uint8 ``[..., dim * bits / 8]`` -> uint8 codes ``[..., dim]``."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed: expected torch.uint8, got {packed.dtype}")
    if packed.shape[-1] != row_bytes(bits, dim):
        raise ValueError(f"packed: expected {row_bytes(bits, dim)} bytes per row, got {packed.shape[-1]}")
    codes = torch.zeros(*packed.shape[:-1], dim, dtype=torch.uint8, device=packed.device)
    start = 0
    for width, low in planes(bits):
        part = packed[..., start : start + dim * width // 8]
        fields = torch.stack([(part >> (i * width)) & (2**width - 1) for i in range(8 // width)], -1)
        codes |= fields.reshape(codes.shape) << low
        start += part.shape[-1]
    return codes
