"""quantize_pages: pages of random rows, decoded again; bytes outside the pages stay untouched."""

from __future__ import annotations

import torch

from kvstrata.layout import Format, fragments, rotate, scales
from kvstrata.layout.format import UNIT
from kvstrata.quant.op import quantize_pages
from kvstrata.quant.reference import direction_of

from .draw import DIMS, FLOATS, POISON, WORST, Draw, unsupported_errors

BACKENDS = ("reference", "triton", "cuda")
AIMED = 1.15  # a row is off by this much more with a direction, at most
SANITIZED = ("cuda",)


def trial(draw: Draw, backend: str) -> str:
    """Every row is as close to its source as its bits allow; empty slots have no scale."""
    k_bits, v_bits, dim = draw.one(2, 3, 4, 8), draw.one(2, 3, 4, 8), draw.one(*DIMS)
    size = draw.one(16, 32, 64)
    format = Format(k_bits, v_bits, dim, page_tokens=size, rotate=draw.one(True, False))
    dtype, pages, heads, gap = draw.one(*FLOATS), draw.size(1, 4), draw.size(1, 3), 8 * draw.size(0, 1)
    what = f"{format.name} D {dim}, {pages} pages of {size}, {heads} heads, {dtype}, rotate {format.rotate}"
    tokens = pages * size + 5
    rows = draw.normal(2, tokens, heads, dim + gap).to(dtype)
    k, v = rows.to(draw.device)[..., :dim]
    step = format.page_bytes // UNIT
    order = draw.order(pages + 2)[:pages]
    source = draw.order(tokens)[: pages * size].view(pages, size).int()
    source[-1, ::3] = -1
    head = draw.integers(heads, pages).int()
    pool = torch.full(((pages + 2) * format.page_bytes,), POISON, dtype=torch.uint8, device=draw.device)
    where, taken, whose = ((order * step).int().to(draw.device), source.to(draw.device), head.to(draw.device))
    aimed = {}
    if draw.one(True, False):
        aimed["direction"] = direction_of(draw.normal(heads, dim), format.rotate).to(draw.device)
        aimed["centres"] = whose
        what += ", aimed"
    with unsupported_errors(ValueError, *(["aligned"] if backend == "cuda" else [])):
        quantize_pages(k, v, pool, where, taken, whose, format, backend=backend, **aimed)
    written = pool.cpu().view(pages + 2, format.page_bytes)
    others = [i for i in range(pages + 2) if i not in order.tolist()]
    assert bool((written[others] == POISON).all()), f"a page that was not named was written: {what}"
    page = written[order]
    k_scale, v_scale = scales.unpack_scales(page[:, format.scale_offset :])
    empty = source < 0
    sides: tuple[tuple[fragments.Side, int, int, int, torch.Tensor], ...] = (
        ("k", k_bits, format.k_offset, format.k_bytes, k_scale),
        ("v", v_bits, format.v_offset, format.v_bytes, v_scale),
    )
    for (side, bits, offset, count, scale), x in zip(sides, rows[..., :dim], strict=True):
        codes = fragments.unpack(page[:, offset : offset + count], bits, dim, size, side).float()
        values = (codes - (2**bits - 1) / 2) * scale.float().unsqueeze(-1)
        truth = x[source.clamp(min=0).long(), head.long().unsqueeze(1)].float()
        truth = rotate(truth) if format.rotate else truth
        off = (values - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-6)
        assert bool((scale[empty] == 0).all()), f"an empty slot of {side} has a scale: {what}"
        worst = float(off[~empty].max()) if bool((~empty).any()) else 0.0
        allowed = WORST[bits] * (AIMED if aimed and side == "k" else 1.0)
        assert worst <= allowed, f"{side}: a row is off by {worst:.3f} of itself, {allowed} allowed: {what}"
    return what
