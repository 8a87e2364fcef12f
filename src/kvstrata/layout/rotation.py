"""The rotation that equalises the values of a row: an orthonormal Walsh-Hadamard transform, its own inverse.

It covers all of D if D is a power of two, otherwise it is block-diagonal with the largest power of two that divides D:
80 is five blocks of 16, 96 three of 32. The order of the additions is part of the definition (see ``rotate``), so
every backend that follows it gets the same float32 bits.
"""

from __future__ import annotations

import torch


def block_of(dim: int) -> int:
    """Width of a rotated block: the largest power of two that divides ``dim``."""
    if dim < 1:
        raise ValueError(f"dim: expected a positive number, got {dim}")
    return dim & -dim


def hadamard(dim: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The rotation as a float32 matrix ``[dim, dim]``, symmetric: ``rotate(x)`` is ``x @ hadamard(dim)``."""
    block = block_of(dim)
    h = torch.ones(1, 1, dtype=torch.float32, device=device)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.block_diag(*[h * block**-0.5] * (dim // block))


def butterflies(x: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Butterflies ``(a, b) -> (a + b, a - b)`` of rows ``[..., D]``; distances ``first``, 2 ``first``, .. < ``end``."""
    dim, y = x.shape[-1], x
    while first < end:
        a, b = y.reshape(*x.shape[:-1], dim // (2 * first), 2, first).unbind(-2)
        y = torch.stack([a + b, a - b], -2)
        first *= 2
    return y.reshape(x.shape)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [..., D]``; the result has the dtype of ``x``, computed in float64 for float64, else in float32.

    Butterflies at distance 1, 2, 4, ... block / 2, each rounded to nearest, and one product with ``block ** -0.5``,
    rounded to float32, at the end. ``rotate(rotate(x))`` is ``x`` up to rounding.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise TypeError(f"x: expected a floating-point tensor [..., D], got {x.dtype} of shape {tuple(x.shape)}")
    block = block_of(x.shape[-1])
    y = butterflies(x if x.dtype == torch.float64 else x.float(), 1, block)
    return (y * block**-0.5).to(x.dtype)
