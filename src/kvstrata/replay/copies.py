"""One checked copy of a plan: a source goes to the corner of a buffer, and the rest is filled.

::

    dst [D0, D1]   +--------------+-------+      copied: row < live rows and column < the row's length
                   |  src [n0, n1]| fill  |      everything else gets the fill value, if given
                   +--------------+       |
                   |         fill         |
                   +----------------------+

Kernels see three dimensions of bytes (``Move``): a 1-D copy is one row, and dimensions that are contiguous on both
sides are merged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# Ids of the dtypes between which the kernels can cast.
KINDS = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.bfloat16: 6,
    torch.float32: 7,
    torch.bool: 8,
}
BITS = 255  # kind of a copy without a cast
LAST = "last"
MOST_ELEMENTS = (1 << 31) - 1
Fill = float | int | bool | str | None


@dataclass(frozen=True)
class Bound:
    """Count on the device that bounds a copy: ``ceil(tensor / per) + extra``, clamped to 0 and the source's size.

    Args:
        tensor: int32 or int64, of one element or ``[rows]``. It is read when a copy runs, so a captured copy reads it
            at every replay.
        per: divisor, at least 1.
        extra: added after the division.

    ``Bound(seq_lens, per=16)`` bounds the rows of a page table to their live pages, ``Bound(batch, extra=1)`` bounds
    offsets to batch + 1 entries. `CopyPlan`, not ``Bound``, raises ValueError or TypeError for values that do not fit.

    Example:
        >>> from kvstrata.replay import Bound, CopyPlan
        >>> src, dst = torch.ones(2, 4), torch.zeros(2, 4)
        >>> CopyPlan([dst], [src], lengths=Bound(torch.tensor([33, 16]), per=16)).run()
        >>> dst.tolist()
        [[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    """

    tensor: torch.Tensor
    per: int = 1
    extra: int = 0


class Signature(NamedTuple):
    """Properties of a tensor that a kernel depends on, except its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Signature:
        return Signature(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


Three = tuple[int, int, int]


@dataclass(frozen=True)
class Move:
    """A copy in the form that kernels see; strides in bytes. ``size`` is the source's, ``extent`` includes the fill."""

    size: Three
    extent: Three
    source_stride: Three
    target_stride: Three
    source_kind: int
    target_kind: int  # BITS: no cast
    itemsize: int
    fill: int | None  # eight bytes of the value, repeated
    fill_last: bool

    @property
    def rows(self) -> int:
        return self.extent[0] * self.extent[1]

    @property
    def elements(self) -> int:
        return self.rows * self.extent[2]


def fill_bits(value: float | int | bool, dtype: torch.dtype) -> int:
    """64-bit pattern of a value of at most 8 bytes, repeated to fill it."""
    raw = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().tobytes()
    return struct.unpack("<Q", raw * (8 // len(raw)))[0]


def check_fill(fill: Fill, dst: torch.Tensor, name: str) -> None:
    if fill is None:
        return
    if isinstance(fill, str):
        if fill != LAST:
            raise ValueError(f"{name}: expected a number, None or {LAST!r}, got {fill!r}")
        if dst.dim() > 1:
            raise ValueError(f"{name}: expected {LAST!r} for a 1-D destination only, got one of shape {shape(dst)}")
        if dst.itemsize > 8:
            raise TypeError(f"{name}: expected None for {dst.dtype}, got {fill!r}")
        return
    if not isinstance(fill, (int, float)):
        raise TypeError(f"{name}: expected a number, None or {LAST!r}, got {type(fill).__name__}")
    if dst.itemsize > 8 or dst.is_complex():
        raise TypeError(f"{name}: expected None for {dst.dtype}, got {fill!r}")
    if not dst.is_floating_point():
        if dst.dtype is not torch.bool and not torch.iinfo(dst.dtype).min <= fill <= torch.iinfo(dst.dtype).max:
            raise ValueError(f"{name}: expected a value of {dst.dtype}, got {fill!r}")
        if fill != int(fill):
            raise ValueError(f"{name}: expected a whole number for {dst.dtype}, got {fill!r}")


def shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


class Names(NamedTuple):
    """Names of a copy's source and target in errors; ``casts``: whether the caller has a cast argument."""

    source: str
    target: str
    casts: bool = False


def names_of(count: int, casts: bool = False) -> list[Names]:
    return [Names(f"src[{i}]", f"dst[{i}]", casts) for i in range(count)]


def check_list(value: Any, name: str) -> None:
    """Raise TypeError unless ``value`` is a list; a tensor, whose rows could be iterated over, is refused."""
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a list of tensors, got one tensor of shape {shape(value)}")
    if not hasattr(value, "__iter__"):
        raise TypeError(f"{name}: expected a list of tensors, got {type(value).__name__}")


def check_count(src: Any, count: int) -> None:
    """Raise unless ``src`` is a list of ``count`` sources."""
    check_list(src, "src")
    if len(src) != count:
        raise ValueError(f"src: expected {count} tensors, one for each of dst, got {len(src)}")


def check_source(src: torch.Tensor, dst: torch.Tensor, cast: bool, names: Names) -> None:
    """Raise unless ``src`` fits into ``dst``; errors name the copy."""
    name, target, casts = names
    if src.dim() != dst.dim():
        raise ValueError(f"{name}: expected {dst.dim()} dimensions as {target} {shape(dst)} has, got {shape(src)}")
    if any(n > most for n, most in zip(src.shape, dst.shape, strict=True)):
        raise ValueError(f"{name}: expected at most {shape(dst)}, the shape of {target}, got {shape(src)}")
    if src.device != dst.device:
        raise ValueError(f"{name}: expected a tensor on {dst.device} as {target} is, got one on {src.device}")
    if src.dtype == dst.dtype:
        return
    if not cast:
        how = "cast=True" if casts else f".to({dst.dtype})"
        raise TypeError(
            f"{name}: expected {dst.dtype} as {target} has, got {src.dtype}; {how} converts, .view keeps the bits"
        )
    for side, dtype in ((name, src.dtype), (target, dst.dtype)):
        if dtype not in KINDS:
            raise TypeError(f"{side}: expected one of {', '.join(map(str, KINDS))} for a cast, got {dtype}")


def check_bound(bound: Bound, name: str, device: torch.device, rows: int | None) -> None:
    """Check a bound of one value (``rows=None``) or of at least ``rows`` values."""
    tensor = bound.tensor
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor or a Bound, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    if rows is None and tensor.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {shape(tensor)}")
    if rows is not None and (tensor.dim() != 1 or tensor.shape[0] < rows):
        raise ValueError(f"{name}: expected shape [at least {rows}], got {shape(tensor)}")
    if bound.per < 1:
        raise ValueError(f"{name}: expected per of at least 1, got {bound.per}")


def move_of(source: Signature, target: Signature, fill: Fill, bounded: bool) -> Move:
    """The kernels' view of a checked copy."""
    filled = fill is not None
    inner, outer = source.dtype.itemsize, target.dtype.itemsize
    # size, extent, source stride, target stride; strides of dimensions of size 1 are unused, and 0 keeps them aligned.
    dims = [
        (n, most if filled else n, s * inner if n > 1 else 0, t * outer if (most if filled else n) > 1 else 0)
        for n, most, s, t in zip(source.shape, target.shape, source.stride, target.stride, strict=True)
    ]
    if not bounded:
        dims = merged(dims)
    size, extent, source_stride, target_stride = _three(dims, inner, outer)
    cast = source.dtype != target.dtype
    bits = fill_bits(fill, target.dtype) if isinstance(fill, (int, float)) else (0 if filled else None)
    move = Move(
        size, extent, source_stride, target_stride,
        KINDS[source.dtype] if cast else BITS, KINDS[target.dtype] if cast else BITS,
        target.dtype.itemsize, bits, fill == LAST,
    )  # fmt: skip
    if move.elements > MOST_ELEMENTS:
        raise ValueError(f"dst: expected at most {MOST_ELEMENTS} elements in one copy, got {move.elements}")
    return move


Dim = tuple[int, int, int, int]


def merged(dims: Sequence[Dim]) -> list[Dim]:
    """Merge dimensions that are contiguous in source and target."""
    out: list[Dim] = []
    for dim in dims:
        n, extent, source, target = dim
        if out:
            above = out[-1]
            if n == extent == 1:
                continue
            if above[0] == above[1] == 1:
                out[-1] = dim
                continue
            whole = n == extent and above[0] > 0  # a row ends with the source: nothing to fill between two rows
            if whole and (above[0] == 1 or above[2] == source * n) and (above[1] <= 1 or above[3] == target * n):
                out[-1] = (above[0] * n, above[1] * n, source, target)
                continue
        out.append(dim)
    return out


def _three(dims: Sequence[Dim], inner: int, outer: int) -> tuple[Three, Three, Three, Three]:
    """Pad to three dimensions; the innermost stride is always set, because vector accesses depend on it."""
    n, extent, source, target = dims[-1] if dims else (1, 1, 0, 0)
    last = (n, extent, source or inner if n <= 1 else source, target or outer if extent <= 1 else target)
    above = list(dims[:-1])
    unit = (1, 1, 0, 0)
    first = above[0] if above else unit
    second = above[1] if len(above) > 1 else unit
    columns: Any = tuple(zip(first, second, last, strict=True))
    return columns
