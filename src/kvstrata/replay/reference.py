"""The copies of a plan one by one, in plain torch: the CPU backend, and the reference of every test."""

from __future__ import annotations

import torch

from .copies import LAST, Bound, Fill

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def live(bound: Bound, most: int) -> torch.Tensor:
    """Counts of a bound, int64 on its device."""
    return (-(-bound.tensor.long() // bound.per) + bound.extra).clamp(0, most)


def covered(src: torch.Tensor, rows: Bound | None, lengths: Bound | None) -> torch.Tensor | None:
    """Mask of the elements of ``src`` that are copied, or None for all."""
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
    """Copy ``src`` to the corner of ``dst``; with ``fill`` the rest gets that value. Does not synchronise."""
    if dst.dim() == 0:
        dst, src = dst.reshape(1), src.reshape(1)
    buffer, mask = dst, covered(src, rows, lengths)
    src = src.to(dst.dtype)
    if (integer := INTEGER.get(dst.itemsize)) is not None:  # preserves every bit pattern
        dst, src = dst.view(integer), src.view(integer)
    corner = tuple(slice(0, n) for n in src.shape)
    if fill is None:
        dst[corner].copy_(src if mask is None else torch.where(mask, src, dst[corner]))
        return
    if fill == LAST:
        value = _last(src, mask)
    else:
        value = torch.full((), fill, dtype=buffer.dtype, device=dst.device).view(dst.dtype)  # type: ignore[arg-type]
    dst[corner].copy_(src if mask is None else torch.where(mask, src, value))
    for dim, n in enumerate(src.shape):  # the part after the source, dimension by dimension
        rest = dst[(*corner[:dim], slice(n, None))]
        if rest.numel():
            rest.fill_(value)


def _last(src: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Last copied element of a 1-D source, or 0."""
    zero = torch.zeros((), dtype=src.dtype, device=src.device)
    if src.numel() == 0:
        return zero
    if mask is None:
        return src[-1]
    count = mask.sum()
    last = src.index_select(0, (count - 1).clamp(min=0).reshape(1)).reshape(())  # src[..] would synchronise
    return torch.where(count > 0, last, zero)
