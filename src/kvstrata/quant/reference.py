"""Quantisation in plain torch: the reference for the kernels, and the CPU path. Every backend gives the same bits.

A row is D values of one token and KV head. It is quantised as follows, every operation in float32, rounded to nearest
even:

    clean      NaN becomes 0; clamped to +-65504
    on_grid    rounded to multiples of block * 2^-22 times the power of two of the row's largest value, at least 2^-30
    transform  butterflies at distance 1 to block / 2, less those of the centre (K, where the format has one)
    step_of    2, 3, 4 bit: sqrt(row_sum(y * y) / D) * GAUSSIAN_STEP[bits]; 8 bit: max|y| * (2 / 255);
               at least 2^-24 sqrt(block)
    encode     z = floor(y * inv * 256), inv = 1 / step, the product not rounded;
               code = clamp(z >> 8, -2^(b-1), 2^(b-1) - 1) + 2^(b-1)
    aim        K of 2, 3, 4 bit with a direction: other codes for some values near a threshold, all in integers
    refit      scale = sum(z * c) / sum(c * c) * (step / 256 * block^-0.5 * gain), c = code - (2^b - 1) / 2; in pages
               gain is K_GAIN[bits] or V_GAIN[bits]; clamped to 0 .. 65504, rounded to fp16
    decode     c * scale, which float32 holds exactly

Without a rotation, there is no grid, no butterfly and a block of 1. Rows that are given as codes of another format
begin at step_of, with y = c * (scale * sqrt(block)).

Why all backends agree, whatever order their hardware sums in: on the grid, float32 holds all sums of the rotation
exactly, so tensor cores may take them; z and c are integers; the sums that round are the butterflies of the centre and
`row_sum`, whose order is fixed. docs/formats.md has the reasons for these rules and the measurements behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.layout import fragments, rotation, rows, scales
from kvstrata.layout.format import Format

BACKENDS = ("auto", "reference")
LARGEST = 65504.0  # largest fp16: rows are clamped to it, scales saturate at it
SMALLEST_STEP = 2.0**-24  # the smallest fp16 above zero: 1 / step stays finite, and a row of zeros needs no branch
DIRECTION_MOST = 31  # largest weight of a direction
AIM_STEPS = (8, 4, 2, 1)  # of the search of `aim`
LEAST_POWER = 2.0**-30  # of a row, for its grid: no number that is computed becomes subnormal
# The step with the least squared error for a unit Gaussian and 2^bits mid-rise levels.
GAUSSIAN_STEP = {2: 0.9957, 3: 0.586, 4: 0.3352, 8: 0.0308}
# The closest row of codes is shorter than the row itself, since its error e is orthogonal to it. In an output, a sum
# over tokens, errors average out but a shorter norm does not, so scales have a gain: for K (1 - e)^-1/2, which restores
# the norm, otherwise tokens with fewer bits would get lower scores; for V (1 - e)^-3/4, between that and unbiased.
K_GAIN = {2: 1.0653, 3: 1.0193, 4: 1.0058, 8: 1.0}
V_GAIN = {2: 1.0995, 3: 1.0291, 4: 1.0087, 8: 1.0}


def clean(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32, all finite: NaN becomes 0, the rest is clamped to +-65504."""
    return x.detach().float().nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)


def on_grid(x: torch.Tensor) -> torch.Tensor:
    """Clean rows ``x [..., D]``, rounded so that all sums of their rotation are exact.

    They become multiples of block * 2^-22 times the power of two of their largest value, at least 2^-30.
    """
    power = (x.abs().amax(-1, keepdim=True).clamp(min=LEAST_POWER).view(torch.int32) & 0x7F800000).view(torch.float32)
    magic = power * (3 * grid_block(x.shape[-1]))  # its last bit is the grid
    return (x + magic) - magic


def grid_block(dim: int) -> int:
    """The block in the rule for the grid. Wider ones have this module as their only backend, and keep a fine grid."""
    return min(rotation.block_of(dim), 256)


def transform(x: torch.Tensor, centre: torch.Tensor | None, rotate: bool) -> torch.Tensor:
    """Clean rows, rotated and centred: sqrt(block) times too long. ``centre`` broadcasts against ``x``."""
    block = rotation.block_of(x.shape[-1]) if rotate else 1
    if rotate:
        x = rotation.butterflies(on_grid(x), 1, block)
    if centre is not None:
        x = x - rotation.butterflies(centre.detach().float(), 1, block)
    return x


def length(dim: int, rotate: bool) -> float:
    """block ^ -0.5 as a float32: makes transformed rows as long as they were."""
    return _float32(rotation.block_of(dim) ** -0.5) if rotate else 1.0


def _float32(x: float) -> float:
    return float(np.float32(x))


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of rows ``[..., D]`` in the order of all backends.

    Dims 8 apart first; then blocks of 16 dims, the second half added to the first until one is left, with zeros up to a
    power of two; then dims 1, 4 and 2 apart.
    """
    dim, lead = x.shape[-1], x.shape[:-1]
    steps = 1 << (-(-dim // 16) - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, 16 * steps - dim)).reshape(*lead, steps, 2, 8)
    x = x[..., 0, :] + x[..., 1, :]
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        x = x[..., :half, :] + x[..., half:, :]
    x = x.reshape(*lead, 2, 2, 2)
    x = x[..., 0] + x[..., 1]
    x = x[..., 0, :] + x[..., 1, :]
    return x[..., 0] + x[..., 1]


def step_of(x: torch.Tensor, bits: int, length: float = 1.0) -> torch.Tensor:
    """Step between levels for transformed rows ``x [..., D]``: float32 ``[...]``, positive."""
    fragments.check_bits(bits)
    if bits == 8:
        step = x.abs().amax(-1) * (2 / 255)
    else:
        # A tensor, not a number: on a GPU, torch replaces division by a number with a product.
        dim = torch.full((), x.shape[-1], dtype=x.dtype, device=x.device)
        step = (row_sum(x.square()) / dim).sqrt() * GAUSSIAN_STEP[bits]
    return step.clamp(min=_float32(SMALLEST_STEP / length))


def encode(x: torch.Tensor, step: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[..., D]`` of float32 rows, given their steps ``[...]``, and the values in 1/256 steps, float64."""
    middle = 2 ** (fragments.check_bits(bits) - 1)
    inverse = step.reciprocal().unsqueeze(-1) * 256
    # A product of two float32 is exact in float64, so its floor is that of a fused multiply-add rounded down.
    z = (x.double() * inverse).floor()
    return ((z / 256).floor().clamp(-middle, middle - 1) + middle).to(torch.uint8), z


def aims(formats: Sequence[Format]) -> bool:
    """True if K in one of the formats is rounded along a direction, when there is one: if it has less than 8 bits."""
    return any(f.k_bits < 8 for f in formats)


def direction_of(query: torch.Tensor, rotate: bool) -> torch.Tensor:
    """Direction of mean queries ``[..., D]``, in the space of transformed rows: int8 ``[..., D]``, at most 31.

    Zero where the query is zero or not finite.
    """
    x = query.detach().float()
    largest = x.abs().amax(-1, keepdim=True)
    known = (largest > 0) & largest.isfinite()
    unit = torch.where(known, x, 1.0) / torch.where(known, largest, 1.0)  # no sum overflows, none is subnormal
    turned = rotation.butterflies(unit, 1, rotation.block_of(x.shape[-1]) if rotate else 1)
    weights = (turned / turned.abs().amax(-1, keepdim=True) * DIRECTION_MOST).round()
    return torch.where(known, weights, 0.0).to(torch.int8)


def aim(z: torch.Tensor, direction: torch.Tensor, bits: int, gain: float) -> torch.Tensor:
    """Codes uint8 ``[..., D]`` whose error has the least component along a direction, for ``z`` of `encode`.

    Values are shifted by t times the weight of their dim before they are rounded, which changes the codes of those near
    a threshold. The component falls with t: a binary search over -15 .. 15 finds the codes with the smallest one.
    ``gain`` is that of the scale, which lengthens the decoded row.

    Args:
        direction: int8, from `direction_of`; broadcasts against ``z``. Zeros leave the codes as they are.
    """
    half = 2 ** (fragments.check_bits(bits) - 1)
    w = direction.long()
    # Far enough from the ends that a shift, less than 512, never leaves the range: 2,048 are one code.
    base = 8 * z.long().clamp(64 - 256 * half, 256 * half - 64) + 2048 * half
    per_gain = aim_factor(gain)
    along = (z.long() * w).sum(-1, keepdim=True)
    wanted = ((along * per_gain) >> 12) + (256 * half - 128) * w.sum(-1, keepdim=True)
    shift = torch.zeros_like(wanted)
    codes = best = base >> 11
    rest = least = wanted - 256 * (w * codes).sum(-1, keepdim=True)
    for size in AIM_STEPS:
        shift = shift + torch.where(rest > 0, size, -size)
        codes = (base + shift * w) >> 11
        rest = wanted - 256 * (w * codes).sum(-1, keepdim=True)
        better = rest.abs() < least.abs()
        best, least = torch.where(better, codes, best), torch.where(better, rest, least)
    return best.to(torch.uint8)


def aim_factor(gain: float) -> int:
    """4,096 / gain, by which `aim` multiplies a row's component along a direction."""
    return round(4096 / gain)


def levels(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as float32 multiples of the scale: -(2^b - 1) / 2 .. (2^b - 1) / 2 in steps of one, never 0."""
    return codes.float() - (2**bits - 1) / 2


def refit(
    z: torch.Tensor, step: torch.Tensor, codes: torch.Tensor, bits: int, gain: float = 1.0, length: float = 1.0
) -> torch.Tensor:
    """The fp16 scales ``[...]`` that fit the rows best with these codes, times ``gain``; ``z`` is that of `encode`."""
    c = levels(codes, bits).double()
    # Sums of integers below 2^53: exact. Levels are at least 1/2 in magnitude, so the divisor is never 0.
    ratio = (z * 2 * c).sum(-1).float() / (4 * c * c).sum(-1).float()
    scale = ratio * (step * (_float32(_float32(length) * _float32(gain)) / 128))
    return scale.clamp(0.0, LARGEST).half()


def decode(codes: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 rows ``[..., D]`` from codes and fp16 scales ``[...]``, without rounding."""
    return levels(codes, bits) * scale.float().unsqueeze(-1)


def quantize_rows(
    x: torch.Tensor, bits: int, gain: float, length: float, direction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[..., D]`` and fp16 scales ``[...]`` of transformed rows; ``direction`` as in `aim`."""
    step = step_of(x, bits, length)
    codes, z = encode(x, step, bits)
    if direction is not None and bits != 8:
        codes = aim(z, direction, bits, gain)
    return codes, refit(z, step, codes, bits, gain, length)


def quantize_plain(
    x: torch.Tensor,
    centre: torch.Tensor | None,
    bits: int,
    rotate: bool,
    gain: float,
    direction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the model's rows; ``centre`` and ``direction`` broadcast against ``x``."""
    return quantize_rows(transform(clean(x), centre, rotate), bits, gain, length(x.shape[-1], rotate), direction)


def quantize_coded(
    codes: torch.Tensor,
    scale: torch.Tensor,
    was: int,
    bits: int,
    rotate: bool,
    gain: float,
    direction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales with ``bits`` of rows that are given as codes of ``was`` bits."""
    shrink = length(codes.shape[-1], rotate)
    longer = scale.float() * _float32(1 / shrink)
    return quantize_rows(levels(codes, was) * longer.unsqueeze(-1), bits, gain, shrink, direction)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to ``dtype``, saturating: finite values stay finite."""
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a floating-point type, got {dtype}")
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return x.clamp(-largest, largest).to(dtype)


def quantize_page(
    k: torch.Tensor,
    v: torch.Tensor,
    format: Format,
    centre: torch.Tensor | None = None,
    direction: torch.Tensor | None = None,
) -> torch.Tensor:
    """The model's rows, ``k, v [..., P, D]``, to pages uint8 ``[..., page_bytes]``.

    ``centre`` broadcasts against ``k`` (``[D]`` for one head) and is only for a format with ``centre``; None is zero
    there. ``direction`` of K, see `aim`, broadcasts too. A page that is not full takes arbitrary rows for the rest.
    Plain formats copy the rows' bits.
    """
    shape = (format.page_tokens, format.head_dim)
    for name, x in (("k", k), ("v", v)):
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {x.dtype}")
        if x.dim() < 2 or tuple(x.shape[-2:]) != shape:
            raise ValueError(f"{name}: expected [..., {shape[0]}, {shape[1]}] as in the format, got {tuple(x.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected shape {tuple(k.shape)} as k, got {tuple(v.shape)}")
    if centre is not None and not format.centre:
        raise ValueError(f"centre: expected None for {format.name} with centre=False, got a tensor")
    if format.plain:
        for name, x in (("k", k), ("v", v)):
            if x.dtype.itemsize * 8 != format.k_bits:
                raise TypeError(f"{name}: expected a {format.k_bits}-bit type for {format.name}, got {x.dtype}")
        return torch.cat([x.detach().contiguous().view(torch.uint8).flatten(-2) for x in (k, v)], -1)
    k_gain = K_GAIN[format.k_bits]
    k_codes, k_scale = quantize_plain(k, centre, format.k_bits, format.rotate, k_gain, direction)
    v_codes, v_scale = quantize_plain(v, None, format.v_bits, format.rotate, V_GAIN[format.v_bits])
    parts = [
        fragments.pack(k_codes, format.k_bits, "k"),
        fragments.pack(v_codes, format.v_bits, "v"),
        scales.pack_scales(k_scale, v_scale),
    ]
    return torch.cat(parts, -1)


def dequantize_page(
    pages: torch.Tensor, format: Format, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages uint8 ``[..., page_bytes]`` to ``k, v [..., P, D]`` as stored: rotated, K without its centre.

    ``dtype`` is the dtype of the result, float32 if None; for plain formats it is the dtype of the rows and required.
    """
    if pages.dtype != torch.uint8:
        raise TypeError(f"pages: expected torch.uint8, got {pages.dtype}")
    if pages.dim() < 1 or pages.shape[-1] != format.page_bytes:
        raise ValueError(f"pages: expected [..., {format.page_bytes}] for {format.name}, got {tuple(pages.shape)}")
    k_raw, v_raw, scale_raw = pages.split([format.k_bytes, format.v_bytes, format.scale_bytes], -1)
    shape = (*pages.shape[:-1], format.page_tokens, format.head_dim)
    if format.plain:
        if dtype is None or dtype.itemsize * 8 != format.k_bits:
            raise TypeError(f"dtype: expected the {format.k_bits}-bit type of the rows, got {dtype}")
        k, v = (raw.clone(memory_format=torch.contiguous_format).view(dtype).reshape(shape) for raw in (k_raw, v_raw))
        return k, v
    k_scale, v_scale = scales.unpack_scales(scale_raw)
    k_codes = fragments.unpack(k_raw, format.k_bits, format.head_dim, format.page_tokens, "k")
    v_codes = fragments.unpack(v_raw, format.v_bits, format.head_dim, format.page_tokens, "v")
    dtype = dtype or torch.float32
    return (
        _cast(decode(k_codes, k_scale, format.k_bits), dtype),
        _cast(decode(v_codes, v_scale, format.v_bits), dtype),
    )


def restore(
    k: torch.Tensor, v: torch.Tensor, format: Format, centre: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform rows of `dequantize_page` to the model's space: undo the rotation, add K's centre if given."""
    if format.rotate:
        k, v = rotation.rotate(k), rotation.rotate(v)
    return (k if centre is None else (k + centre).to(k.dtype)), v


@dataclass(frozen=True, eq=False)
class Packed:
    """Quantised rows, from `quantize`: ``codes`` uint8 ``[..., D * bits / 8]`` (order: `layout.rows`), ``scale`` fp16
    ``[...]``, and the properties of the rows that `dequantize` needs."""

    codes: torch.Tensor
    scale: torch.Tensor
    bits: int
    head_dim: int
    rotated: bool
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the original rows, ``[..., D]``."""
        return torch.Size((*self.scale.shape, self.head_dim))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def quantize(x: torch.Tensor, bits: int, *, format: Format | None = None, backend: str = "auto") -> Packed:
    """Quantise rows to codes and one fp16 scale per row.

    Args:
        x: ``[..., D]`` of any floating-point type, D a multiple of 8. Not mutated. NaN counts as 0, values beyond
            +-65504 and infinities as +-65504.
        bits: 2, 3, 4 or 8.
        format: determines whether rows are rotated, and checks D and ``bits``; None rotates. Its centre is not applied.
        backend: ``auto`` or ``reference``.

    Does not synchronise with the device; safe under graph capture.

    Returns:
        Packed: codes uint8 ``[..., D * bits / 8]`` and scales float16 ``[...]``, for `dequantize`.

    Raises:
        ValueError: a ``bits``, D or ``backend`` that is not supported, or D or ``bits`` that differ from ``format``.
        TypeError: ``x`` is not a floating-point tensor, or ``format`` not a Format.

    Example:
        >>> packed = quantize(torch.randn(3, 8, 64), 4)
        >>> packed.codes.shape, packed.scale.shape
        (torch.Size([3, 8, 32]), torch.Size([3, 8]))
        >>> dequantize(packed).shape
        torch.Size([3, 8, 64])
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    fragments.check_bits(bits)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"x: expected a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 1 or x.shape[-1] % 8 or x.shape[-1] == 0:
        raise ValueError(f"x: expected [..., D] with D a positive multiple of 8, got shape {tuple(x.shape)}")
    if format is not None:
        if not isinstance(format, Format):
            raise TypeError(f"format: expected a Format, such as Format(4, 4, 64), got {format!r}")
        if format.head_dim != x.shape[-1]:
            raise ValueError(f"x: expected [..., {format.head_dim}] as in the format, got shape {tuple(x.shape)}")
        if bits not in (format.k_bits, format.v_bits):
            raise ValueError(f"bits: expected {format.k_bits} or {format.v_bits} as in {format.name}, got {bits}")
    rotated = format is None or format.rotate
    codes, scale = quantize_plain(x, None, bits, rotated, 1.0)
    return Packed(rows.pack_rows(codes, bits), scale, bits, x.shape[-1], rotated, x.dtype)


def dequantize(packed: Packed, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Restore rows from codes and scales, and undo the rotation.

    Args:
        packed: the result of `quantize`. Not mutated.
        dtype: floating-point type of the result; None is that of the original rows.

    Safe under graph capture.

    Returns a tensor ``[..., D]``, always finite: values that do not fit ``dtype`` saturate.

    Raises TypeError if ``packed`` is not a Packed or ``dtype`` not a floating-point type.

    Example:
        >>> x = torch.zeros(2, 64)
        >>> bool((dequantize(quantize(x, 2)) == 0).all())
        True
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"packed: expected a Packed as quantize returns, got {type(packed).__name__}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    x = decode(rows.unpack_rows(packed.codes, packed.bits, packed.head_dim), packed.scale, packed.bits)
    return _cast(rotation.rotate(x) if packed.rotated else x, packed.dtype if dtype is None else dtype)
