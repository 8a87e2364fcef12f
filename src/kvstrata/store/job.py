"""Checks a call of ``store_kv`` and converts it to sizes and strides for the backends.

``Rows`` describes one side (K or V): the strides of its source rows and of its cache rows. All three cache layouts are
expressed as block, row-in-block and head strides, so kernels need not know about layouts. Heads that are contiguous in
source and cache are merged into one wide row, contiguous blocks into a flat cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvstrata.checks import fail

COPIED = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
ROUNDED_FROM = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("NHD", "HND")


class Tensors(NamedTuple):
    """Tensors of one call, as given."""

    k: torch.Tensor
    v: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


@dataclass(frozen=True)
class Rows:
    """One side: ``heads`` rows of ``dim`` elements per token; strides of source and cache, in elements."""

    heads: int
    dim: int
    source_token: int
    source_head: int
    cache_block: int
    cache_row: int
    cache_head: int
    num_blocks: int
    block_size: int

    @property
    def heads_contiguous(self) -> bool:
        return self.heads == 1 or self.source_head == self.cache_head == self.dim

    @property
    def blocks_contiguous(self) -> bool:
        return self.block_size == 1 or self.cache_block == self.block_size * self.cache_row

    def with_heads_merged(self) -> Rows:
        return replace(self, heads=1, dim=self.heads * self.dim, source_head=0, cache_head=0)

    def with_blocks_merged(self) -> Rows:
        step = self.cache_block if self.block_size == 1 else self.cache_row
        return replace(self, cache_block=step, cache_row=0, num_blocks=self.num_blocks * self.block_size, block_size=1)


@dataclass(frozen=True)
class Task:
    """Shape of one call: both sides, dtypes, and whether scales are per head."""

    tokens: int
    k: Rows
    v: Rows | None
    source_dtype: torch.dtype
    cache_dtype: torch.dtype
    scale_per_head: bool

    @property
    def rounds(self) -> bool:
        return self.source_dtype != self.cache_dtype

    @property
    def elements(self) -> int:
        """Elements of the source, K and V together."""
        return self.tokens * self.k.heads * (self.k.dim + (self.v.dim if self.v else 0))

    @property
    def slots_in_cache(self) -> int:
        return self.k.num_blocks * self.k.block_size

    def merged(self) -> Task:
        """Equivalent task with contiguous heads merged into one row and contiguous blocks into one-slot blocks."""
        sides = [self.k] if self.v is None else [self.k, self.v]
        if not self.scale_per_head and all(rows.heads_contiguous for rows in sides):
            sides = [rows.with_heads_merged() for rows in sides]
        if all(rows.blocks_contiguous for rows in sides):
            sides = [rows.with_blocks_merged() for rows in sides]
        return replace(self, k=sides[0], v=sides[1] if self.v else None)


def _rows(name: str, x: torch.Tensor, cache: torch.Tensor, layout: str) -> Rows:
    cache_name = f"{name}_cache"
    if x.dim() != 3:
        fail(name, "[tokens, heads, dim]", f"shape {tuple(x.shape)}")
    if cache.dim() not in (3, 4):
        fail(cache_name, "[slots, heads, dim] or 4-D blocks", f"shape {tuple(cache.shape)}")
    strides = cache.stride()
    if cache.dim() == 3:
        slots, heads, dim = cache.shape
        rows = Rows(heads, dim, 0, 0, strides[0], 0, strides[1], slots, 1)
    elif layout == "NHD":
        num_blocks, block_size, heads, dim = cache.shape
        rows = Rows(heads, dim, 0, 0, strides[0], strides[1], strides[2], num_blocks, block_size)
    else:
        num_blocks, heads, block_size, dim = cache.shape
        rows = Rows(heads, dim, 0, 0, strides[0], strides[2], strides[1], num_blocks, block_size)
    if tuple(x.shape[1:]) != (rows.heads, rows.dim):
        fail(name, f"[tokens, {rows.heads}, {rows.dim}] as in {cache_name}", f"shape {tuple(x.shape)}")
    for tensor_name, tensor in ((name, x), (cache_name, cache)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            fail(tensor_name, "an inner stride of 1", tensor.stride(-1))
    if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
        fail(cache_name, "rows that do not share memory (an expanded tensor cannot be written)", tuple(cache.stride()))
    # The stride of an axis of size 1 is arbitrary; zero does not reduce the alignment.
    return replace(
        rows,
        source_token=x.stride(0) if x.shape[0] > 1 else 0,
        source_head=x.stride(1) if x.shape[1] > 1 else 0,
        cache_head=rows.cache_head if rows.heads > 1 else 0,
    )


def _check_scale(name: str, scale: torch.Tensor | None, heads: int, rounds: bool, device: torch.device) -> bool:
    """Check a scale; returns True if it is per head."""
    if scale is None:
        return False
    if not rounds:
        fail(name, "None where nothing is rounded to fp8", f"a tensor of shape {tuple(scale.shape)}")
    if scale.dtype != torch.float32:
        fail(name, "torch.float32", scale.dtype, TypeError)
    if scale.device != device:
        fail(name, f"a tensor on {device}", scale.device)
    if scale.numel() not in (1, heads) or scale.dim() > 1:
        fail(name, f"one value or one per head ([{heads}])", f"shape {tuple(scale.shape)}")
    if scale.numel() > 1 and scale.stride(0) != 1:
        fail(name, "a contiguous tensor", f"stride {scale.stride(0)}")
    return scale.numel() > 1


def check(tensors: Tensors, layout: str) -> Task:
    """Task of a call; raises ValueError or TypeError, naming the argument, the expectation and the given value."""
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = tensors
    if layout not in LAYOUTS:
        fail("layout", f"one of {LAYOUTS}", repr(layout))
    if (v is None) != (v_cache is None):
        fail("v_cache" if v_cache is None else "v", "v and v_cache given together, or neither", None)
    sides = [("k", k, k_cache)]
    if v is not None and v_cache is not None:
        sides.append(("v", v, v_cache))
    for name, x, cache in sides:
        for tensor_name, tensor in ((name, x), (f"{name}_cache", cache)):
            if tensor.device != k_cache.device:
                fail(tensor_name, f"a tensor on {k_cache.device}, where k_cache is", tensor.device)
        if x.dtype != k.dtype:
            fail(name, f"{k.dtype}, the dtype of k", x.dtype, TypeError)
        if cache.dtype != k_cache.dtype:
            fail(f"{name}_cache", f"{k_cache.dtype}, the dtype of k_cache", cache.dtype, TypeError)
    if not (k.dtype == k_cache.dtype in COPIED or (k.dtype in ROUNDED_FROM and k_cache.dtype in FP8)):
        expected = "the cache's dtype (float32, float16, bfloat16, float8), or a float type into a float8 cache"
        fail("k", expected, f"{k.dtype} into {k_cache.dtype}", TypeError)
    rows = [_rows(name, x, cache, layout) for name, x, cache in sides]
    if len(rows) == 2:
        if v is not None and v.shape[:2] != k.shape[:2]:
            fail("v", f"[{k.shape[0]}, {k.shape[1]}, dim] as in k", f"shape {tuple(v.shape)}")
        if (rows[0].num_blocks, rows[0].block_size) != (rows[1].num_blocks, rows[1].block_size):
            expected = f"{rows[0].num_blocks} blocks of {rows[0].block_size} as in k_cache"
            fail("v_cache", expected, f"{rows[1].num_blocks} blocks of {rows[1].block_size}")
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] != k.shape[0]:
        fail("slot_mapping", f"shape ({k.shape[0]},), one per token of k", f"shape {tuple(slot_mapping.shape)}")
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        fail("slot_mapping", "torch.int32 or torch.int64", slot_mapping.dtype, TypeError)
    if slot_mapping.device != k_cache.device:
        fail("slot_mapping", f"a tensor on {k_cache.device}", slot_mapping.device)
    rounds = k.dtype != k_cache.dtype
    per_head = _check_scale("k_scale", k_scale, rows[0].heads, rounds, k_cache.device)
    if v is None and v_scale is not None:
        fail("v_scale", "None without v", "a tensor")
    v_per_head = _check_scale("v_scale", v_scale, rows[0].heads, rounds, k_cache.device)
    if k_scale is not None and v_scale is not None and per_head != v_per_head:
        fail("v_scale", f"the shape of k_scale {tuple(k_scale.shape)}", tuple(v_scale.shape))
    v_rows = rows[1] if len(rows) == 2 and rows[1].dim > 0 else None
    return Task(k.shape[0], rows[0], v_rows, k.dtype, k_cache.dtype, per_head or v_per_head)
