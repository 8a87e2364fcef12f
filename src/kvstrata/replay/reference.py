"""The copies of a plan one after the other, in plain torch: the CPU backend, and the truth of every test."""

from __future__ import annotations

import torch

from .copies import LAST, Bound, Fill


def live(bound: Bound, most: int) -> torch.Tensor:
    """The counts of a bound, as int64 on its device."""
    return (-(-bound.tensor.long() // bound.per) + bound.extra).clamp(0, most)


def covered(src: torch.Tensor, rows: Bound | None, lengths: Bound | None) -> torch.Tensor | None:
    """Which elements of ``src`` are copied, or None for all of them."""
    mask = None
    if rows is not None:
        n = src.shape[0]
        mask = torch.arange(n, device=src.device) < live(rows, n).reshape(())
        mask = mask.reshape(-1, *[1] * (src.dim() - 1))
    if lengths is not None:
        n = src.shape[-1]
        ends = live(lengths, n).reshape(-1)
        column = torch.arange(n, device=src.device)
        within = column < ends if src.dim() == 1 else column < ends[: src.shape[0], None]
        mask = within if mask is None else mask & within
    return mask


def copy(
    dst: torch.Tensor, src: torch.Tensor, fill: Fill = None, rows: Bound | None = None, lengths: Bound | None = None
) -> None:
    """``src`` into the corner of ``dst``; with ``fill`` the rest gets that value. Never waits for the GPU."""
    if dst.dim() == 0:
        dst, src = dst.reshape(1), src.reshape(1)
    corner = dst[tuple(slice(0, n) for n in src.shape)]
    mask = covered(src, rows, lengths)
    if fill is None:
        corner.copy_(src if mask is None else torch.where(mask, src.to(dst.dtype), corner))
        return
    new = src.to(dst.dtype) if mask is None else torch.where(mask, src.to(dst.dtype), torch.zeros_like(corner))
    if fill == LAST:
        last = torch.zeros((), dtype=dst.dtype, device=dst.device)
        if src.numel():
            count = src.shape[0] if mask is None else mask.sum()
            at = torch.as_tensor(count, device=src.device) - 1
            last = torch.where(at >= 0, new[at.clamp(min=0)], last)
        value = last
    else:
        value = torch.full((), fill, dtype=dst.dtype, device=dst.device)  # type: ignore[arg-type]
    if mask is not None:
        new = torch.where(mask, new, value)
    rest = torch.empty_like(dst).copy_(value.expand(dst.shape))
    rest[tuple(slice(0, n) for n in src.shape)].copy_(new)
    dst.copy_(rest)
