"""One layer's buckets as device tensors, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvstrata.layout.format import Format


@dataclass(frozen=True)
class BucketedCacheLayer:
    """Views of one layer for kernels; no copies.

    ``page_table[r, h, t, j]`` is page j of a bucket, ``count[r, h, t]`` its tokens. The page's bytes begin at
    ``slab_pointers[handle // units] + handle % units * UNIT`` and are laid out by ``formats[t]``; positions and
    importance follow at the offsets given per tier (importance -1: not kept).

    Rows and codes hold K divided by the balance; the centre is in the space of the model's K.
    """

    page_table: torch.Tensor  # int32 [requests, kv_heads, tiers, max_pages]
    count: torch.Tensor  # int32 [requests, kv_heads, tiers]
    seq_lens: torch.Tensor  # int32 [requests], tokens appended
    centre: torch.Tensor  # float32 [requests, kv_heads, head_dim], zero until set
    slab_pointers: torch.Tensor  # int64 [slabs]
    slabs: list[torch.Tensor | None]
    units: int  # UNITs in a slab
    formats: tuple[Format, ...]
    strides: tuple[int, ...]  # bytes from page to page of a slab
    position_offsets: tuple[int, ...]
    importance_offsets: tuple[int, ...]
    position_dtype: torch.dtype
    balance: torch.Tensor | None = None  # int8 [requests, kv_heads, head_dim]: queries are multiplied by 2 ** it
    space: torch.Tensor | None = None  # on the CPU: uint8, all slabs end to end, so a page begins at handle * UNIT
    kept: dict[Any, Any] = field(init=False, default_factory=dict, compare=False, repr=False)  # derived by backends
