"""``copy_pages`` in Triton: the portable GPU path, run by the interpreter in CI."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    source_ptr, target_ptr, source_blocks_ptr, target_blocks_ptr, stride_source_block, stride_source_head,
    stride_target_block, stride_target_head, source_count, target_count, words,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the words of one pair of blocks."""
    source = tl.load(source_blocks_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(target_blocks_ptr + tl.program_id(0)).to(tl.int64)
    if (source >= 0) & (target >= 0) & (source < source_count) & (target < target_count):
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < HEADS * words
        head, word = (offs // words).to(tl.int64), offs % words
        x = tl.load(source_ptr + source * stride_source_block + head * stride_source_head + word, mask=mask)
        tl.store(target_ptr + target * stride_target_block + head * stride_target_head + word, x, mask=mask)


def copy_pages(src: torch.Tensor, dst: torch.Tensor, src_blocks: torch.Tensor, dst_blocks: torch.Tensor) -> None:
    """Launch for checked arguments."""
    source, target = src.view(torch.int32), dst.view(torch.int32)
    heads, words = source.shape[1:]
    block = min(4096, triton.next_power_of_2(heads * words))
    with torch.cuda.device_of(src_blocks):
        copy_kernel[(len(src_blocks), triton.cdiv(heads * words, block))](
            source, target, src_blocks, dst_blocks, *source.stride()[:2], *target.stride()[:2], source.shape[0],
            target.shape[0], words, HEADS=heads, BLOCK=block,
        )  # fmt: skip
