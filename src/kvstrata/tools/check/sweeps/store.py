"""store_kv: rows at random slots of a paged cache, every byte of the cache compared."""

from __future__ import annotations

import math
from typing import Any

import torch

import kvstrata

from .draw import FLOATS, FP8, POISON, Draw, unsupported_errors

BACKENDS = ("reference", "triton", "cuda", "cuda_direct", "cuda_staged", "cuda_bulk")
SANITIZED = ("cuda", "cuda_direct", "cuda_staged", "cuda_bulk")


def trial(draw: Draw, backend: str) -> str:
    """Any shapes, half of them aligned as bulk copies require; strided rows, padding slots, rounding to fp8."""
    tokens, heads, pages, page = draw.size(0, 40), draw.size(1, 5), draw.size(3, 8), draw.size(1, 17)
    k_dim, v_dim = draw.one(64, 128, draw.size(1, 160)), draw.one(None, 64, 128, draw.size(1, 160))
    source = draw.one(*FLOATS)
    cache = draw.one(source, source, *FP8)
    layout, gap = draw.one("NHD", "HND"), draw.one(0, 0, 8, 3)
    slots = draw.order(pages * page)[:tokens]
    slots = torch.cat([slots, torch.full((tokens - len(slots),), -1)])  # rows beyond the slots are padding
    slots[::5] = torch.tensor([-1, pages * page])[torch.arange(len(slots[::5])) % 2]
    scaled = cache != source and draw.one(False, True)
    what = f"{tokens}x{heads}x{k_dim},{v_dim} {source} to {cache}, {pages} pages of {page} {layout}, gap {gap}"
    given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    want: list[torch.Tensor] = []
    for dim in (k_dim, v_dim):
        if not isinstance(dim, int):
            continue
        rows = (4 * draw.normal(tokens, heads, dim + gap)).to(source)
        shape = (pages, page, heads, dim) if layout == "NHD" else (pages, heads, page, dim)
        before = torch.full((math.prod(shape) * cache.itemsize,), POISON, dtype=torch.uint8).view(cache).view(shape)
        scale = torch.rand(heads, generator=draw.generator) + 0.5 if scaled else None
        want.append(_stored(rows[..., :dim], before, slots, scale, layout))
        scale = None if scale is None else scale.to(draw.device)
        given.append((rows.to(draw.device)[..., :dim], before.to(draw.device), scale))
    (k, k_cache, k_scale), (v, v_cache, v_scale) = (*given, (None, None, None))[:2]
    assert k is not None
    assert k_cache is not None
    index = slots.to(draw.device, torch.int32 if draw.one(0, 1) else torch.int64)
    limited = backend in ("cuda_bulk", "cuda_staged")  # kernels that refuse some calls; auto would not choose them
    scales: dict[str, Any] = dict(k_scale=k_scale, v_scale=v_scale)
    with unsupported_errors(ValueError, *([""] if limited else [])):
        kvstrata.store_kv(k, v, k_cache, v_cache, index, **scales, layout=layout, backend=backend)
    for side, (_, stored, _), expected in zip("kv", given, want, strict=False):
        assert torch.equal(stored.cpu().view(torch.uint8), expected.view(torch.uint8)), f"{side}_cache differs: {what}"
    return what


def _stored(
    rows: torch.Tensor, before: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None, layout: str
) -> torch.Tensor:
    """The cache after the store, row by row."""
    after = before.clone()
    by_token = after.transpose(1, 2) if layout == "HND" else after
    page = by_token.shape[1]
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if not 0 <= slot < len(by_token) * page:
            continue
        if row.dtype != after.dtype:
            wide = row.float() * (1 / scale if scale is not None else torch.ones(len(row))).unsqueeze(1)
            most = torch.finfo(after.dtype).max
            row = wide.clamp(-most, most).to(after.dtype)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[after.dtype.itemsize]
        by_token[slot // page, slot % page].view(bits).copy_(row.contiguous().view(bits))
    return after
