"""Access to pages by handle, across slabs: gather, scatter, copy, clear; positions and importance of tokens.

Slabs are separate allocations, so every program looks up its page's address in the pool's pointers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import triton
import triton.language as tl

from kvstrata.layout.unpack_triton import page_address

BLOCK = 1024  # words of 4 bytes per program


class Slabs(Protocol):
    """The part of a pool that kernels need: addresses of its slabs and pages per slab."""

    pointers: torch.Tensor
    units: int
    device: torch.device


@triton.jit(
    do_not_specialize=["units", "start", "words"],
    do_not_specialize_on_alignment=["handles_ptr", "others_ptr", "data_ptr"],
)
def pages_kernel(
    pointers_ptr, handles_ptr, others_ptr, data_ptr, units, start, words,
    FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Words of page ``handles[i]``: FROM 'page', 'data' or 'zero'; TO 'page' (others[i], or handles[i]) or 'data'."""
    page = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < words
    offs_data = page.to(tl.int64) * words + offs
    address = page_address(pointers_ptr, tl.load(handles_ptr + page), units) + start
    page_ptr = address.to(tl.pointer_type(tl.int32))
    if FROM == "page":
        value = tl.load(page_ptr + offs, mask=mask)
    elif FROM == "data":
        value = tl.load(data_ptr + offs_data, mask=mask)
    else:
        value = tl.zeros((BLOCK,), tl.int32)
    if TO == "data":
        tl.store(data_ptr + offs_data, value, mask=mask)
    else:
        if FROM == "page":
            address = page_address(pointers_ptr, tl.load(others_ptr + page), units) + start
            page_ptr = address.to(tl.pointer_type(tl.int32))
        tl.store(page_ptr + offs, value, mask=mask)


def _block(words: int) -> int:
    return min(BLOCK, triton.next_power_of_2(words))


def _run(pool: Slabs, handles: torch.Tensor, others: torch.Tensor, data: torch.Tensor, start: int, size: int,
         source: str, to: str) -> None:  # fmt: skip
    assert start % 4 == 0
    assert size % 4 == 0
    words = size // 4
    block = _block(words)
    with torch.cuda.device_of(handles):
        pages_kernel[(len(handles), triton.cdiv(words, block))](
            pool.pointers, handles, others, data, pool.units, start, words, FROM=source, TO=to, BLOCK=block
        )


def gather(pool: Slabs, handles: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """uint8 ``[n, size]``: bytes ``start .. start + size`` of pages."""
    data = torch.empty(len(handles), size // 4, dtype=torch.int32, device=pool.device)
    _run(pool, handles, handles, data, start, size, "page", "data")
    return data.view(torch.uint8)


def scatter(pool: Slabs, handles: torch.Tensor, start: int, data: torch.Tensor) -> None:
    """Inverse of `gather`."""
    _run(pool, handles, handles, data.contiguous().view(torch.int32), start, data.shape[1], "data", "page")


def copy(pool: Slabs, old: torch.Tensor, new: torch.Tensor, size: int) -> None:
    """Copy pages ``old`` to pages ``new``; none may be in both."""
    _run(pool, old, new, old, 0, size, "page", "page")


def load_copy(pool: Slabs, sizes: Iterable[int]) -> None:
    """Compile what `copy` of pages of these sizes needs: else the first step that compacts slabs waits for it."""
    with torch.cuda.device(pool.device):
        for block in {_block(size // 4) for size in sizes}:
            handles = [torch.int64] * 3
            pages_kernel.warmup(
                pool.pointers, *handles, pool.units, 0, block, FROM="page", TO="page", BLOCK=block, grid=(1,)
            )


def clear(pool: Slabs, handles: torch.Tensor, size: int) -> None:
    _run(pool, handles, handles, handles, 0, size, "zero", "page")


@triton.jit(do_not_specialize=["units", "n"])
def side_kernel(
    pointers_ptr, handle_ptr, slot_ptr, tier_ptr, offset_ptr, position_ptr, importance_ptr, units, n,
    POSITION_BYTES: tl.constexpr, IMPORTANCE: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Position and importance of tokens, out of their pages or (WRITE) into them; a negative handle is skipped."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    handle = tl.load(handle_ptr + offs, mask=mask, other=-1)
    mask &= handle >= 0
    slot = tl.load(slot_ptr + offs, mask=mask, other=0).to(tl.int64)
    tier = tl.load(tier_ptr + offs, mask=mask, other=0)
    page = page_address(pointers_ptr, tl.maximum(handle, 0), units)
    address = page + tl.load(offset_ptr + 2 * tier, mask=mask, other=0) + slot * POSITION_BYTES
    POSITION: tl.constexpr = tl.int16 if POSITION_BYTES == 2 else tl.int32
    in_page = address.to(tl.pointer_type(POSITION))
    if WRITE:
        tl.store(in_page, tl.load(position_ptr + offs, mask=mask, other=0).to(POSITION), mask=mask)
    else:
        tl.store(position_ptr + offs, tl.load(in_page, mask=mask, other=0).to(tl.int64), mask=mask)
    if IMPORTANCE:
        address = page + tl.load(offset_ptr + 2 * tier + 1, mask=mask, other=0) + slot * 4
        in_page = address.to(tl.pointer_type(tl.float32))
        if WRITE:
            tl.store(in_page, tl.load(importance_ptr + offs, mask=mask, other=0.0), mask=mask)
        else:
            tl.store(importance_ptr + offs, tl.load(in_page, mask=mask, other=0.0), mask=mask)


def side(
    pool: Slabs, handle: torch.Tensor, slot: torch.Tensor, tier: torch.Tensor, offsets: torch.Tensor,
    position: torch.Tensor, importance: torch.Tensor, position_dtype: torch.dtype, kept: bool, write: bool,
) -> None:  # fmt: skip
    """Read or ``write`` position and importance of tokens.

    ``offsets`` int64 ``[tiers, 2]``: byte offsets of positions and importance in a page; ``kept``: importance exists.
    """
    if len(handle) == 0:
        return
    with torch.cuda.device_of(handle):
        side_kernel[(triton.cdiv(len(handle), 256),)](
            pool.pointers, handle, slot, tier, offsets, position, importance, pool.units, len(handle),
            POSITION_BYTES=position_dtype.itemsize, IMPORTANCE=kept, WRITE=write, BLOCK=256,
        )  # fmt: skip
