"""Memory of an engine as blocks of packed pages, as the packed ops address it.

pages      uint8 [num_blocks, kv_heads, pages_per_block * page_bytes], any strides that are multiples of 16 bytes
block      pages_per_block * page_tokens tokens of all KV heads; the pages of one head are contiguous
slot       block * block_size + offset; the token is row offset % page_tokens of page offset // page_tokens
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .format import Format

ALIGNMENT = 16  # bytes: addresses and strides of blocks and heads


class Blocks(NamedTuple):
    """Sizes and strides of packed blocks, in bytes."""

    num_blocks: int
    kv_heads: int
    pages_per_block: int
    block_stride: int
    head_stride: int
    format: Format

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.pages_per_block * self.format.page_tokens

    @property
    def slots(self) -> int:
        return self.num_blocks * self.block_size


def check_format(format: Format, name: str = "fmt") -> None:
    if not isinstance(format, Format):
        raise TypeError(f"{name}: expected a Format such as Format.parse('K4V4', 128), got {type(format).__name__}")
    if format.plain:
        raise ValueError(f"{name}: expected a quantised format, got {format.name}")


def check_apart(pages: torch.Tensor, name: str, what: str = "blocks") -> None:
    """Raise ValueError if blocks or heads of ``pages [num_blocks, kv_heads, bytes]`` share bytes."""
    end = pages.shape[2]
    for stride, count in sorted(zip(pages.stride()[:2], pages.shape[:2], strict=True)):
        if count > 1 and stride < end:
            raise ValueError(f"{name}: expected {what} and heads that do not overlap, got strides {pages.stride()}")
        end += (count - 1) * stride


def blocks_of(pages: torch.Tensor, format: Format, name: str = "pages") -> Blocks:
    """Sizes of ``pages`` uint8 ``[num_blocks, kv_heads, pages_per_block * page_bytes]``; errors name the argument."""
    check_format(format)
    if not isinstance(pages, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(pages).__name__}")
    if pages.dtype != torch.uint8:
        raise TypeError(f"{name}: expected torch.uint8, got {pages.dtype}")
    size = format.page_bytes
    if pages.dim() != 3 or pages.shape[2] == 0 or pages.shape[2] % size or pages.shape[1] == 0:
        expected = f"[num_blocks, kv_heads, a multiple of {size}] for {format.name}"
        raise ValueError(f"{name}: expected {expected}, got shape {tuple(pages.shape)}")
    strides = pages.stride()
    if strides[2] != 1 or any(n % ALIGNMENT for n in strides[:2]):
        raise ValueError(f"{name}: expected strides of multiples of {ALIGNMENT} bytes and 1, got {strides}")
    check_apart(pages, name)
    return Blocks(pages.shape[0], pages.shape[1], pages.shape[2] // size, strides[0], strides[1], format)
