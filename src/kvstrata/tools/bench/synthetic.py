"""A synthetic layer of a tiered cache on the device: random codes in shuffled pages, as kernels read them.

Speed does not depend on the values of codes, and filling a real cache of that size takes longer than measuring it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.layout import Format

UNIT = 64


def layer(
    formats: Sequence[Format], counts: torch.Tensor, dtype: torch.dtype, device: torch.device, seed: int
) -> BucketedCacheLayer:
    """Layer with ``counts [requests, kv_heads, tiers]`` tokens, whose positions ascend from tier to tier."""
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    requests, heads, tiers = counts.shape
    size = formats[0].page_tokens
    pages = -(-counts // size)
    strides = [-(-(f.page_bytes + 6 * size) // UNIT) * UNIT for f in formats]  # with positions and importance
    most = int((-(-counts.sum(-1) // size)).max()) + tiers
    used = [int(pages[..., t].sum()) for t in range(tiers)]
    total = sum(n * stride for n, stride in zip(used, strides, strict=True))
    slab = torch.randint(0, 256, (total + UNIT,), dtype=torch.uint8, device=device, generator=generator)
    table = torch.full((requests, heads, tiers, most), -1, dtype=torch.int32)
    offset = 0
    for t, (f, n, stride) in enumerate(zip(formats, used, strides, strict=True)):
        rows = slab[offset : offset + n * stride].view(n, stride)
        if f.plain:
            for chunk in rows[:, : f.page_bytes].split(4096):
                chunk.view(dtype).normal_(generator=generator)
        else:
            scales = torch.rand(n, f.scale_bytes // 2, device=device, generator=generator) * 0.01 + 0.002
            rows[:, f.scale_offset : f.scale_offset + f.scale_bytes] = scales.half().view(torch.uint8)
        where = torch.arange(most) < pages[..., t : t + 1]
        table[:, :, t][where] = ((offset + torch.randperm(n, generator=order) * stride) // UNIT).int()
        first = counts[..., :t].sum(-1, keepdim=True)
        _write_positions(rows, table[:, :, t], where, first, f, size, offset, stride)
        offset += n * stride
    lengths = counts.sum(-1).amax(1).int().to(device)
    centre = torch.randn(requests, heads, formats[0].head_dim, device=device, generator=generator) * 0.1
    pointer = torch.tensor([slab.data_ptr()], dtype=torch.int64, device=device)
    offsets = tuple(f.page_bytes for f in formats)
    return BucketedCacheLayer(
        table.to(device), counts.int().to(device), lengths, centre, pointer, [slab], total // UNIT + 1,
        tuple(formats), tuple(strides), offsets, tuple(offset + 2 * size for offset in offsets), torch.int16,
    )  # fmt: skip


def _write_positions(
    rows: torch.Tensor, table: torch.Tensor, where: torch.Tensor, first: torch.Tensor, f: Format, size: int,
    offset: int, stride: int,
) -> None:  # fmt: skip
    """Write positions into the pages; beyond int16 they wrap, which is harmless because nothing reads them here."""
    page = torch.arange(table.shape[-1]).expand(table.shape)
    start = (first + page * size)[where]
    index = ((table[where].long() * UNIT - offset) // stride).to(rows.device)
    positions = (start.unsqueeze(1) + torch.arange(size)).to(torch.int16).to(rows.device)
    rows[index, f.page_bytes : f.page_bytes + 2 * size] = positions.view(torch.uint8)
