"""Loops of `page.py` compiled for the CPU: rows to codes, and their fields in pages; bit-identical to torch.

Torch makes one pass over all rows per operation and indexes single bytes with 8-byte numbers. Here a tile of rows is
transposed so that a vector holds one dim of many rows: each row is summed in the order of `quant.reference.row_sum`,
and no sum crosses a vector. Without numba, and for a few rows, torch is used.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from kvstrata.layout import fragments
from kvstrata.layout.rotation import block_of
from kvstrata.layout.unpack_numba import BFLOAT16, ENDLESS, FLOAT16, FLOAT32, TO_FLOAT
from kvstrata.loops import exact
from kvstrata.quant.reference import (
    AIM_STEPS,
    GAUSSIAN_STEP,
    LARGEST,
    LEAST_POWER,
    SMALLEST_STEP,
    aim_factor,
    grid_block,
    length,
)
from kvstrata.threads import share_out

TILE = 64  # rows quantised together
AIM_DIMS = 64  # of these, codes times weights have a sum that 16 bits hold
SHARED_ROWS = 1024  # from this many rows on, torch's threads share them
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
LAST = np.float32(ENDLESS / TO_FLOAT)  # bits of an fp16 infinity as a float32; anything above is NaN
MOST = np.float32(LARGEST)
LEAST_BITS = np.float32(LEAST_POWER).view(np.uint32)


def _fma(typing, a, b, c):
    """``a * b + c`` of float32, rounded once."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


_multiply_add: Any = intrinsic(_fma)


class Source(NamedTuple):
    """Rows by index, gathered where they are read: row i is ``rows[numbers[i]]``."""

    rows: torch.Tensor  # [m, D]
    numbers: torch.Tensor  # integers [n]


def quantize_plain(
    x: torch.Tensor | Source,
    centre: torch.Tensor | Source | None,
    bits: int,
    rotate: bool,
    gain: float,
    direction: torch.Tensor | Source | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quant.reference.quantize_plain` of rows ``[n, D]`` on the CPU, D a multiple of 16.

    ``centre`` and int8 ``direction`` have a row ``[D]`` for each.
    """
    (rows, index), (centres, centre_index) = _numbered(x), _numbered(centre)
    if rows.dtype not in KINDS:
        rows = rows.float()
    flat, dim = rows.view(-1), rows.shape[1]
    words, halves = np.empty(0, np.uint32), np.empty(0, np.uint16)
    if rows.dtype == torch.float32:
        words = flat.numpy().view(np.uint32)
    else:
        halves = flat.view(torch.int16).numpy().view(np.uint16)
    given = (words, halves, KINDS[rows.dtype], index, centres.float().numpy(), centre_index)
    rotation = (block_of(dim), np.float32(3 * grid_block(dim))) if rotate else (1, np.float32(0))
    return _quantized(_quantize_plain, (*given, *rotation), len(index), dim, bits, rotate, gain, direction)


def quantize_coded(
    codes: torch.Tensor,
    scale: torch.Tensor,
    was: int,
    bits: int,
    rotate: bool,
    gain: float,
    direction: torch.Tensor | Source | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quant.reference.quantize_coded` of codes ``[n, D]`` on the CPU, D a multiple of 16; ``direction`` as above."""
    rows, dim = codes.shape
    longer = scale.float() * np.float32(1 / length(dim, rotate)).item()
    given = (codes.contiguous().numpy(), longer.numpy(), np.float32((2**was - 1) / 2))
    return _quantized(_quantize_coded, given, rows, dim, bits, rotate, gain, direction)


def _numbered(given: torch.Tensor | Source | None) -> tuple[torch.Tensor, np.ndarray]:
    """Rows in memory, and the index of each row that is used."""
    if given is None:
        return torch.empty(0, 0, dtype=torch.float32, device="cpu"), np.empty(0, np.int64)
    if isinstance(given, torch.Tensor):
        return given.detach().contiguous(), np.arange(len(given))
    return given.rows.detach().contiguous(), given.numbers.long().contiguous().numpy()


def _quantized(
    loop: Any, given: tuple[Any, ...], rows: int, dim: int, bits: int, rotate: bool, gain: float,
    direction: torch.Tensor | Source | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Codes and fp16 scales from ``loop``, whose first arguments are the ``given`` rows."""
    shrink = length(dim, rotate)
    per_norm = np.float32(2 / 255 if bits == 8 else GAUSSIAN_STEP[bits])
    smallest = np.float32(SMALLEST_STEP / shrink)
    per_step = np.float32(shrink) * np.float32(gain) / np.float32(128)
    codes = torch.empty(rows, dim, dtype=torch.uint8, device="cpu")
    scale = torch.empty(rows, dtype=torch.float32, device="cpu")
    threads = torch.get_num_threads() if rows >= SHARED_ROWS else 1
    weights, index = _numbered(None if bits == 8 else direction)
    aim = (weights.to(torch.int8).numpy(), index, aim_factor(gain))
    arguments = (*given, *aim, bits, per_norm, smallest, per_step, codes.numpy(), scale.numpy())
    share_out(loop, arguments, -(-rows // TILE), threads)
    return codes, scale.half()


@exact
def _quantize_plain(
    words, halves, kind, index, centre, centre_index, block, to_magic, direction, direction_index, per_gain,
    bits, per_norm, smallest, per_step, codes, scale, first_tile, last_tile,
):  # fmt: skip
    """Rows to codes and scales (float32, not yet rounded to fp16), a tile at a time."""
    rows, dim = codes.shape
    row = np.empty(dim, np.uint32)
    tile, shift, shift_index = np.zeros((dim, TILE), np.float32), np.zeros((dim, TILE), np.float32), np.full(TILE, -1)
    weights, weights_index = np.zeros((dim, TILE if len(direction_index) else 0), np.int16), np.full(TILE, -1)
    for first in range(first_tile * TILE, min(rows, last_tile * TILE), TILE):
        end = min(rows, first + TILE)
        _load(words, halves, kind, index[first:end], to_magic, row, tile)
        _butterflies(tile, 1, block)
        if len(centre_index):
            if _gather(centre, centre_index[first:end], shift_index, shift):
                _butterflies(shift, 1, block)
            for d in range(dim):
                for i in range(tile.shape[1]):
                    tile[d, i] -= shift[d, i]
        if len(direction_index):
            _gather(direction, direction_index[first:end], weights_index, weights)
        _encode_tile(tile, weights, per_gain, bits, per_norm, smallest, per_step, codes[first:end], scale[first:end])


@exact
def _quantize_coded(
    given, longer, middle, direction, direction_index, per_gain, bits, per_norm, smallest, per_step, codes, scale,
    first_tile, last_tile,
):  # fmt: skip
    """As `_quantize_plain`, for rows ``(given - middle) * longer`` that are transformed already."""
    rows, dim = codes.shape
    row, tile = np.empty(dim, np.float32), np.zeros((dim, TILE), np.float32)
    weights, weights_index = np.zeros((dim, TILE if len(direction_index) else 0), np.int16), np.full(TILE, -1)
    for first in range(first_tile * TILE, min(rows, last_tile * TILE), TILE):
        end = min(rows, first + TILE)
        for i in range(end - first):
            for d in range(dim):
                row[d] = (np.float32(given[first + i, d]) - middle) * longer[first + i]
            for d in range(dim):
                tile[d, i] = row[d]
        if len(direction_index):
            _gather(direction, direction_index[first:end], weights_index, weights)
        _encode_tile(tile, weights, per_gain, bits, per_norm, smallest, per_step, codes[first:end], scale[first:end])


@exact
def _load(words, halves, kind, index, to_magic, bits, tile):
    """Load rows as the columns of a tile: `quant.reference.clean`, then `on_grid`.

    ``to_magic`` is what its magic number is in powers of two, or 0 for no grid; ``bits`` is scratch memory for a row.
    """
    row, dim = bits.view(np.float32), len(bits)
    for i in range(len(index)):
        start = np.uint64(index[i] * dim)  # unsigned, otherwise every index is compared with 0
        if kind == FLOAT32:
            for d in range(dim):
                bits[d] = words[start + np.uint64(d)]
        elif kind == BFLOAT16:
            for d in range(dim):
                bits[d] = np.uint32(halves[start + np.uint64(d)]) << np.uint32(16)
        else:  # a float32 with these bits has an exponent that is too small by a constant
            for d in range(dim):
                half = np.uint32(halves[start + np.uint64(d)])
                sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
                bits[d] = sign | np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
            for d in range(dim):
                value = row[d] * TO_FLOAT
                value = value if abs(value) < ENDLESS else value * np.float32(np.inf)
                row[d] = value if abs(row[d]) <= LAST else np.float32(np.nan)
        for d in range(dim):
            value = row[d]
            value = value if value == value else np.float32(0)
            value = value if value < MOST else MOST
            row[d] = value if value > -MOST else -MOST
        if to_magic:
            largest = np.uint32(0)  # sizes are in the order of their bits
            for d in range(dim):
                largest = max(largest, np.uint32(bits[d] & np.uint32(0x7FFFFFFF)))
            power = np.uint32(max(largest, LEAST_BITS) & np.uint32(0x7F800000)).view(np.float32)
            magic = power * to_magic
            for d in range(dim):
                row[d] = (row[d] + magic) - magic
        for d in range(dim):
            tile[d, i] = row[d]


@exact
def _gather(rows, index, before, tile):
    """Load rows as the columns of a tile; False if it has them from the last call, whose index was ``before``."""
    changed = False
    for i in range(len(index)):
        changed |= index[i] != before[i]
    if changed:
        for i in range(len(index)):
            before[i] = index[i]
            r = np.uint64(index[i])
            for d in range(tile.shape[0]):
                tile[d, i] = rows[r, d]
        before[len(index) :] = -1
    return changed


@exact
def _butterflies(tile, distance, end):
    """`layout.rotation.butterflies` of columns ``[D, n]``, in place; two distances in one pass over the tile."""
    while 2 * distance < end:
        for begin in range(0, tile.shape[0], 4 * distance):
            for d in range(begin, begin + distance):
                _two_distances(tile[d], tile[d + distance], tile[d + 2 * distance], tile[d + 3 * distance])
        distance *= 4
    if distance < end:
        for begin in range(0, tile.shape[0], 2 * distance):
            for d in range(begin, begin + distance):
                for i in range(tile.shape[1]):
                    a, b = tile[d, i], tile[d + distance, i]
                    tile[d, i], tile[d + distance, i] = a + b, a - b


@exact
def _two_distances(a, b, c, d):
    for i in range(len(a)):
        sum_ab, rest_ab, sum_cd, rest_cd = a[i] + b[i], a[i] - b[i], c[i] + d[i], c[i] - d[i]
        a[i], b[i], c[i], d[i] = sum_ab + sum_cd, rest_ab + rest_cd, sum_ab - sum_cd, rest_ab - rest_cd


@exact
def _encode_tile(x, weights, per_gain, bits, per_norm, smallest, per_step, codes, scale):
    """`quant.reference.quantize_rows` of the first columns of a tile; scales in float32.

    ``weights [D, columns]`` are those of the direction, without columns if there is none.
    """
    dim, width = x.shape
    levels, step, inverse = np.empty((dim, width), np.uint8), np.zeros(width, np.float32), np.empty(width, np.float32)
    # Sums of integers, which fit up to D = 256.
    total, divisor = np.zeros(width, np.int32), np.zeros(width, np.int32)
    if bits == 8:
        for d in range(dim):
            for i in range(width):
                size = abs(x[d, i])
                step[i] = size if size > step[i] else step[i]
    else:
        _sum_squares(x, step)
        for i in range(width):
            step[i] = np.sqrt(step[i] / np.float32(dim))
    for i in range(width):
        own = step[i] * per_norm
        step[i] = own if own > smallest else smallest
        inverse[i] = np.float32(1) / step[i] * np.float32(256)
    middle = np.int32(1 << (bits - 1))
    if weights.shape[1]:
        _aim(x, inverse, weights, per_gain, middle, levels, total, divisor)
    else:
        for d in range(dim):
            _encode(x[d], inverse, middle, levels[d], total, divisor)
    for i in range(len(scale)):
        ratio = np.float32(total[i]) / np.float32(divisor[i])
        scale[i] = max(min(ratio * (step[i] * per_step), MOST), np.float32(0))  # aimed codes may oppose a tiny row
        for d in range(dim):
            codes[i, d] = levels[d, i]


@exact
def _value(x, inverse):
    """z of `quant.reference.encode`."""
    whole = np.floor(x * inverse)
    # A product that was rounded up to a whole number is slightly below it: the sign of the rest, even if it is -0.
    rest = np.float32(_multiply_add(x, inverse, -whole))
    return np.int32(np.int32(whole) + np.int32(rest.view(np.int32) >> np.int32(31)))


@exact
def _encode(x, inverse, middle, levels, total, divisor):
    """Codes of one dim, and its terms in the sums of `quant.reference.refit`."""
    for i in range(len(x)):
        z = _value(x[i], inverse[i])
        level = min(max(np.int32(z >> np.int32(8)), -middle), np.int32(middle - np.int32(1)))
        levels[i] = np.uint8(level + middle)
        c = np.int32(np.int32(2) * level + np.int32(1))  # twice the level
        total[i] += np.int32(z * c)
        divisor[i] += np.int32(c * c)


@exact
def _aim(x, inverse, weights, per_gain, middle, levels, total, divisor):
    """`_encode` of all dims, with the codes of `quant.reference.aim`."""
    dim, width = x.shape
    z, base = np.empty((dim, width), np.int16), np.empty((dim, width), np.int16)
    along, weight, part = np.zeros(width, np.int32), np.zeros(width, np.int32), np.empty(width, np.int16)
    shift, best = np.zeros(width, np.int16), np.zeros(width, np.int16)
    wanted, rest, least = np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, np.int32)
    start, most = np.int32(np.int32(2048) * middle), np.int32(np.int32(256) * middle - np.int32(64))
    for d in range(dim):
        for i in range(width):
            value, w = _value(x[d, i], inverse[i]), np.int32(weights[d, i])
            z[d, i] = np.int16(value)
            base[d, i] = np.int16(np.int32(np.int32(8) * min(max(value, -most), most)) + start)
            along[i] += np.int32(value * w)
            weight[i] += w
    for i in range(width):
        scaled = np.int32((np.int64(along[i]) * np.int64(per_gain)) >> np.int64(12))
        wanted[i] = scaled + np.int32(np.int32(np.int32(256) * middle - np.int32(128)) * weight[i])
    _rest(base, weights, shift, wanted, part, rest)
    for i in range(width):
        least[i] = abs(rest[i])
    for size in AIM_STEPS:
        for i in range(width):
            shift[i] += np.int16(size) if rest[i] > 0 else np.int16(-size)
        _rest(base, weights, shift, wanted, part, rest)
        for i in range(width):
            closer = abs(rest[i]) < least[i]
            best[i] = shift[i] if closer else best[i]
            least[i] = abs(rest[i]) if closer else least[i]
    for d in range(dim):
        for i in range(width):
            code = np.int16(np.int16(base[d, i] + np.int16(best[i] * weights[d, i])) >> np.int16(11))
            levels[d, i] = np.uint8(code)
            c = np.int32(np.int32(np.int32(2) * (np.int32(code) - middle)) + np.int32(1))  # as in `_encode`
            total[i] += np.int32(np.int32(z[d, i]) * c)
            divisor[i] += np.int32(c * c)


@exact
def _rest(base, weights, shift, wanted, part, rest):
    """Computes ``rest``, ``wanted`` less the sums of the codes of these shifts; ``part`` is scratch memory."""
    dim, width = base.shape
    for i in range(width):
        rest[i] = wanted[i]
    for first in range(0, dim, AIM_DIMS):
        for i in range(width):
            part[i] = np.int16(0)
        for d in range(first, min(dim, first + AIM_DIMS)):
            for i in range(width):
                code = np.int16(np.int16(base[d, i] + np.int16(shift[i] * weights[d, i])) >> np.int16(11))
                part[i] += np.int16(code * weights[d, i])
        for i in range(width):
            rest[i] -= np.int32(np.int32(256) * np.int32(part[i]))


@exact
def _sum_squares(x, total):
    """`quant.reference.row_sum` of the squares of columns ``[D, n]``."""
    blocks, columns = x.shape[0] // 16, x.shape[1]
    terms = np.empty((8 * blocks, columns), np.float32)
    for b in range(blocks):
        for d in range(8):
            for i in range(columns):
                one, other = x[16 * b + d, i], x[16 * b + 8 + d, i]
                terms[8 * b + d, i] = one * one + other * other
    half = 1
    while 2 * half < blocks:
        half *= 2
    while blocks > 1:
        for d in range(8 * (blocks - half)):
            for i in range(columns):
                terms[d, i] += terms[8 * half + d, i]
        blocks, half = half, half // 2
    for i in range(columns):
        even = (terms[0, i] + terms[1, i]) + (terms[4, i] + terms[5, i])
        total[i] = even + ((terms[2, i] + terms[3, i]) + (terms[6, i] + terms[7, i]))


def write_codes(
    pages: torch.Tensor, offset: int, page: torch.Tensor, slot: torch.Tensor, codes: torch.Tensor, tokens: int,
    bits: int, side: fragments.Side,
) -> None:  # fmt: skip
    """Codes uint8 ``[n, D]`` of one side into the bytes from ``offset`` on of ``pages [m, stride]`` of ``tokens``."""
    dim, stride = codes.shape[1], pages.shape[1]
    where = (page.contiguous().numpy(), slot.contiguous().numpy())
    for plane, (width, low) in enumerate(fragments.planes(bits)):
        tables = _tables(bits, dim, tokens, side, plane)
        _write_fields(pages.view(-1).numpy(), stride, offset, *where, *tables, width, low, codes.contiguous().numpy())


@functools.lru_cache(maxsize=1024)
def _tables(
    bits: int, dim: int, tokens: int, side: fragments.Side, plane: int
) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
    """Positions of the fields of a plane, by value and by byte.

    Returns byte and bit of every value ``[P, D]``; then the first byte with fields and the value of each field from
    there on, uint16 ``[8 / width, bytes]``. These are empty if other bits lie between the fields.
    """
    width, _ = fragments.planes(bits)[plane]
    byte, bit = (x.numpy() for x in fragments.places(bits, dim, tokens, side)[plane])
    first = int(byte.min())
    source = np.full((8 // width, int(byte.max()) + 1 - first), -1)
    source[bit // width, byte - first] = np.arange(byte.size).reshape(byte.shape)
    if (source < 0).any():
        source = source[:, :0]
    return byte, bit, first, source.astype(np.uint16)


@exact
def _write_fields(pages, stride, offset, page, slot, byte, bit, begin, source, width, low, codes):
    """Write bits ``low .. low + width`` of ``codes [n, D]`` into the bytes of ``pages``; other bits are kept.

    Tokens that fill a page, one slot after the other, are written byte by byte, all others value by value.
    """
    low, mask = np.uint8(low), np.uint8((1 << width) - 1)
    tokens, dim = byte.shape
    flat, fields, packed = codes.reshape(-1), np.empty(tokens * dim, np.uint8), np.empty(source.shape[1], np.uint8)
    i = 0
    while i < len(page):
        base = page[i] * stride + offset
        if len(packed) and _whole_page(page, slot, i, tokens):
            _shift(flat[i * dim : (i + tokens) * dim], low, mask, fields)
            for j in range(len(packed)):
                packed[j] = 0
            for field in range(len(source)):
                _put(fields, source[field], np.uint8(field * width), packed)
            for j in range(len(packed)):
                pages[base + begin + j] = packed[j]
            i += tokens
            continue
        for j in range(dim):
            index, shift = base + byte[slot[i], j], bit[slot[i], j]
            field = (codes[i, j] >> low) & mask
            pages[index] = (pages[index] & ~np.uint8(mask << shift)) | np.uint8(field << shift)
        i += 1


def write_numbers(
    pages: torch.Tensor, offset: int, page: torch.Tensor, slot: torch.Tensor, order: torch.Tensor,
    numbers: torch.Tensor,
) -> None:  # fmt: skip
    """The number of each token, 2 or 4 bytes, into its page: number ``order[slot]`` from byte ``offset`` on."""
    size = numbers.element_size()
    bits, kind = (torch.int16, np.uint16) if size == 2 else (torch.int32, np.uint32)
    _write_numbers(
        pages.view(-1).numpy().view(kind), pages.shape[1] // size, offset // size, page.contiguous().numpy(),
        slot.contiguous().numpy(), order.numpy(), numbers.contiguous().view(bits).numpy().view(kind),
    )  # fmt: skip


@exact
def _write_numbers(pages, stride, offset, page, slot, order, numbers):
    for i in range(len(page)):
        pages[page[i] * stride + offset + order[slot[i]]] = numbers[i]


@exact
def _shift(codes, low, mask, fields):
    for i in range(len(codes)):
        fields[i] = (codes[i] >> low) & mask


@exact
def _put(fields, source, shift, packed):
    """One field of every byte."""
    for i in range(len(packed)):
        packed[i] |= np.uint8(fields[source[i]] << shift)


@exact
def _whole_page(page, slot, first, tokens):
    """True if the tokens from ``first`` on are all slots of a page in order."""
    if first + tokens > len(page):
        return False
    wrong = 0
    for t in range(tokens):
        wrong += (page[first + t] != page[first]) | (slot[first + t] != t)
    return wrong == 0


@exact
def read_fields(pages, stride, offset, page, slot, byte, bit, width, low, codes):
    """Inverse of `_write_fields`: ORs the fields into ``codes``, which must begin as zeros."""
    mask = np.uint8((1 << width) - 1)
    for i in range(len(page)):
        begin = page[i] * stride + offset
        for j in range(codes.shape[1]):
            field = (pages[begin + byte[slot[i], j]] >> bit[slot[i], j]) & mask
            codes[i, j] |= np.uint8(field << np.uint8(low))
