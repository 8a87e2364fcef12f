"""``PagedCache``: blocks of 16-bit, 32-bit or fp8 rows, as ``store_kv`` writes them, for `decode_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8)
LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True, eq=False)
class PagedCache:
    """K and V of one layer in an engine's blocks, listed by a block table; holds views, copies nothing.

    Args:
        k, v: ``[num_blocks, block_size, kv_heads, head_dim]`` (``layout="NHD"``) or ``[num_blocks, kv_heads,
            block_size, head_dim]`` (``"HND"``); float32, float16, bfloat16 or float8; any strides, the last one 1.
        block_table: int32 ``[requests, max_blocks]``. Token i of a request is row ``i % block_size`` of block
            ``block_table[request, i // block_size]``; entries past the length may hold anything.
        seq_lens: int32 ``[requests]``, number of tokens of each.
        k_scale, v_scale: for fp8: float32, one value or ``[kv_heads]``; multiplied with the stored values on reading.
        layout: ``NHD`` or ``HND``.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, stride, value, device or dtype; the error names it. Block
            numbers and lengths are not checked against their bounds, which would read them back from the device.

    Never mutates its tensors; ops read their contents at the time of the call. Safe under CUDA-graph capture: write the
    block table and lengths of the next step into the same tensors before a replay.

    Example:
        >>> k, v = torch.randn(2, 4, 16, 8, 64)  # 4 blocks of 16 slots, 8 KV heads
        >>> block_table = torch.tensor([[2, 0], [3, 0]], dtype=torch.int32)
        >>> cache = kvstrata.PagedCache(k, v, block_table, torch.tensor([20, 5], dtype=torch.int32))
        >>> kvstrata.decode_attention(torch.randn(2, 1, 32, 64), cache).shape
        torch.Size([2, 1, 32, 64])
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    layout: str = "NHD"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {self.layout!r}")
        tensors = {"k": self.k, "v": self.v, "block_table": self.block_table, "seq_lens": self.seq_lens}
        tensors |= {n: s for n, s in (("k_scale", self.k_scale), ("v_scale", self.v_scale)) if s is not None}
        for name, x in tensors.items():
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if self.k.dim() != 4:
            raise ValueError(f"k: expected 4 dimensions, got shape {tuple(self.k.shape)}")
        if 0 in self.k.shape:
            raise ValueError(f"k: expected no dimension of size 0, got shape {tuple(self.k.shape)}")
        if self.k.dtype not in DTYPES:
            raise TypeError(f"k: expected one of {DTYPES}, got {self.k.dtype}")
        if self.v.shape != self.k.shape:
            raise ValueError(f"v: expected shape {tuple(self.k.shape)} as k, got {tuple(self.v.shape)}")
        if self.v.dtype != self.k.dtype:
            raise TypeError(f"v: expected {self.k.dtype} as k, got {self.v.dtype}")
        for name, x in (("k", self.k), ("v", self.v)):
            if x.stride(3) != 1:
                raise ValueError(f"{name}: expected an inner stride of 1, got {x.stride(3)}")
        for name, x, dims in (("block_table", self.block_table, 2), ("seq_lens", self.seq_lens, 1)):
            if x.dtype != torch.int32:
                raise TypeError(f"{name}: expected torch.int32, got {x.dtype}")
            if x.dim() != dims or not x.is_contiguous():
                raise ValueError(f"{name}: expected {dims} contiguous dimensions, got shape {tuple(x.shape)}")
        if self.seq_lens.shape[0] != self.block_table.shape[0]:
            rows = self.block_table.shape[0]
            raise ValueError(f"seq_lens: expected {rows}, one per row of block_table, got {len(self.seq_lens)}")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is None:
                continue
            if not self.fp8:
                raise ValueError(f"{name}: expected None for {self.k.dtype}, got a tensor")
            if scale.dtype != torch.float32:
                raise TypeError(f"{name}: expected torch.float32, got {scale.dtype}")
            if scale.numel() != 1 and tuple(scale.shape) != (self.kv_heads,):
                raise ValueError(f"{name}: expected one value or [{self.kv_heads}], got shape {tuple(scale.shape)}")
        for name, x in tensors.items():
            if x.device != self.k.device:
                raise ValueError(f"{name}: expected a tensor on {self.k.device}, where k is, got {x.device}")

    @property
    def fp8(self) -> bool:
        return self.k.dtype in FP8

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        return self.k.shape[1 if self.layout == "NHD" else 2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def max_length(self) -> int:
        """Capacity of a row of the block table, in tokens."""
        return self.block_table.shape[1] * self.block_size

    @property
    def device(self) -> torch.device:
        return self.k.device

    def by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of k and v as ``[num_blocks, kv_heads, block_size, head_dim]``."""
        return (self.k.transpose(1, 2), self.v.transpose(1, 2)) if self.layout == "NHD" else (self.k, self.v)
