"""What kernels read of a cache: one layer's buckets as device tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstrata.layout.format import Format


@dataclass(frozen=True)
class BucketedCacheLayer:
    """What a kernel reads of one layer: views, no copies.

    ``page_table[r, h, t, j]`` is page j of a bucket, ``count[r, h, t]`` its tokens. The page's bytes begin at
    ``slab_pointers[handle // units] + handle % units * 64`` and are as ``formats[t]`` says; positions and importance
    follow at the offsets given per tier (importance -1: not kept).
    """

    page_table: torch.Tensor  # int32 [requests, kv_heads, tiers, max_pages]
    count: torch.Tensor  # int32 [requests, kv_heads, tiers]
    seq_lens: torch.Tensor  # int32 [requests], tokens appended
    centre: torch.Tensor  # float32 [requests, kv_heads, head_dim], zero until set
    slab_pointers: torch.Tensor  # int64 [slabs]
    slabs: list[torch.Tensor | None]
    units: int  # of 64 bytes in a slab
    formats: tuple[Format, ...]
    strides: tuple[int, ...]  # bytes from page to page of a slab
    position_offsets: tuple[int, ...]
    importance_offsets: tuple[int, ...]
    position_dtype: torch.dtype
    space: torch.Tensor | None = None  # on the CPU: uint8, all slabs end to end, so a page begins at handle * 64
