"""CopyPlan: many copies into larger buffers, every byte of the buffers compared."""

from __future__ import annotations

import torch

import kvstrata

from .draw import Draw

BACKENDS = ("reference", "triton", "cuda")
SANITIZED = ("cuda",)


def trial(draw: Draw, backend: str) -> str:
    """Many copies into larger buffers, with fills and a row bound on the device."""
    buffers, sources, fills, wants, bounds = [], [], [], [], []
    live = draw.size(0, 6)
    count = draw.size(1, 12)
    on_device = torch.tensor([live], dtype=torch.int32, device=draw.device)
    for _ in range(count):
        dtype = draw.one(torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16)
        rows, width = draw.size(1, 9), draw.size(1, 70)
        more_rows, more = draw.size(0, 3), draw.size(0, 5)
        flat = draw.one(False, True)
        fill = draw.one(None, 3, None)
        bounded = draw.one(False, False, True)
        shape, full = ((rows,), (rows + more_rows,)) if flat else ((rows, width), (rows + more_rows, width + more))
        source = draw.integers(100, *shape).to(dtype)
        buffer = torch.full(full, 7).to(dtype)
        want = buffer.clone()
        taken = min(live, rows) if bounded else rows
        if fill is not None:
            want.fill_(fill)
        want[(slice(0, taken), *(() if flat else (slice(0, width),)))] = source[:taken]
        buffers.append(buffer.to(draw.device))
        sources.append(source.to(draw.device))
        fills.append(fill)
        wants.append(want)
        bounds.append(on_device if bounded else None)
    what = f"{count} copies, {live} rows live: " + ", ".join(f"{tuple(s.shape)} {s.dtype}" for s in sources)
    plan = kvstrata.CopyPlan(buffers, fill=fills, rows=bounds, backend=backend)
    for _ in range(2):  # the second run takes the path of known sources
        plan.run(sources)
    for i, (target, want) in enumerate(zip(buffers, wants, strict=True)):
        assert torch.equal(target.cpu(), want), f"copy {i} differs: {what}"
    return what
