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
from kvstrata.quant.reference import GAUSSIAN_STEP, LARGEST, SMALLEST_STEP
from kvstrata.threads import share_out

TILE = 64  # rows quantised together
SHARED_ROWS = 2048  # from this many rows on, torch's threads share them
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
LAST = np.float32(ENDLESS / TO_FLOAT)  # bits of an fp16 infinity as a float32; anything above is NaN
SMALLEST, MOST = np.float32(SMALLEST_STEP), np.float32(LARGEST)


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
    x: torch.Tensor | Source, centre: torch.Tensor | Source | None, bits: int, rotate: bool, gain: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quant.reference.quantize_plain` of rows ``[n, D]`` on the CPU; ``centre [n, D]``."""
    return _quantized(x, centre, True, bits, rotate, gain)


def quantize_rows(x: torch.Tensor, bits: int, rotate: bool, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`quant.reference.quantize_rows` of float32 rows ``[n, D]`` on the CPU."""
    return _quantized(x, None, False, bits, rotate, gain)


def _numbered(given: torch.Tensor | Source | None) -> tuple[torch.Tensor, np.ndarray]:
    """Rows in memory, and the index of each row that is used."""
    if given is None:
        return torch.empty(0, 0, dtype=torch.float32, device="cpu"), np.empty(0, np.int64)
    if isinstance(given, torch.Tensor):
        return given.detach().contiguous(), np.arange(len(given))
    return given.rows.detach().contiguous(), given.numbers.long().contiguous().numpy()


def _quantized(
    x: torch.Tensor | Source, centre: torch.Tensor | Source | None, clean: bool, bits: int, rotate: bool, gain: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, index), (centres, centre_index) = _numbered(x), _numbered(centre)
    if rows.dtype not in KINDS:
        rows = rows.float()
    flat, dim = rows.view(-1), rows.shape[1]
    words, halves = np.empty(0, np.uint32), np.empty(0, np.uint16)
    if rows.dtype == torch.float32:
        words = flat.numpy().view(np.uint32)
    else:
        halves = flat.view(torch.int16).numpy().view(np.uint16)
    codes = torch.empty(len(index), dim, dtype=torch.uint8, device="cpu")
    scale = torch.empty(len(index), dtype=torch.float32, device="cpu")
    block = block_of(dim) if rotate else 1
    step = np.float32(2 / 255 if bits == 8 else GAUSSIAN_STEP[bits])
    arguments = (
        words, halves, KINDS[rows.dtype], index, centres.float().numpy(), centre_index, clean, block,
        np.float32(block**-0.5), bits, step, np.float32(gain), codes.numpy(), scale.numpy(),
    )  # fmt: skip
    threads = torch.get_num_threads() if len(index) >= SHARED_ROWS else 1
    share_out(_quantize, arguments, -(-len(index) // TILE), threads)
    return codes, scale.half()


@exact
def _load(words, halves, kind, index, centre, centre_index, first, rows, clean, bits, tile):
    """Load rows from ``first`` on as the columns of a tile; with ``clean`` as `quant.reference.clean` does.

    ``bits`` is scratch memory for a row.
    """
    row, dim = bits.view(np.float32), len(bits)
    for i in range(rows):
        start = np.uint64(index[first + i] * dim)  # unsigned, otherwise every index is compared with 0
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
        if clean:
            if len(centre_index):
                c = np.uint64(centre_index[first + i])
                for d in range(dim):
                    row[d] -= centre[c, d]
            for d in range(dim):
                value = row[d]
                value = value if value == value else np.float32(0)
                value = value if value < MOST else MOST
                row[d] = value if value > -MOST else -MOST
        for d in range(dim):
            tile[d, i] = row[d]


@exact
def _quantize(
    words, halves, kind, index, centre, centre_index, clean, block, shrink, bits, per_norm, gain, codes, scale,
    first_tile, last_tile,
):  # fmt: skip
    """Rows to codes and scales (float32, not yet rounded to fp16), a tile at a time."""
    rows, dim = codes.shape
    row_bits = np.empty(dim, np.uint32)
    tile, terms = np.zeros((dim, TILE), np.float32), np.empty((dim, TILE), np.float32)
    levels, step, divisor = np.empty((dim, TILE), np.uint8), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    middle = np.int32(1 << (bits - 1))
    low, high = np.float32(-middle), np.float32(middle - 1)
    for first in range(first_tile * TILE, min(rows, last_tile * TILE), TILE):
        here = min(rows - first, TILE)
        _load(words, halves, kind, index, centre, centre_index, first, here, clean, row_bits, tile)
        if block > 1:
            _rotate(tile, block, shrink)
        if bits == 8:
            for i in range(TILE):
                step[i] = 0
            for d in range(dim):
                for i in range(step.size):
                    size = abs(tile[d, i])
                    step[i] = size if size > step[i] else step[i]
        else:
            for d in range(dim):
                for i in range(terms.shape[1]):
                    terms[d, i] = tile[d, i] * tile[d, i]
            _sum(terms)
            for i in range(step.size):
                step[i] = np.sqrt(terms[0, i] / np.float32(dim))
        for i in range(step.size):
            width = step[i] * per_norm
            step[i] = np.float32(1) / (width if width > SMALLEST else SMALLEST)
            divisor[i] = 0
        for d in range(dim):
            _encode(tile[d], step, low, high, levels[d], terms[d], divisor)
        _sum(terms)
        for i in range(here):
            fitted = terms[0, i] / divisor[i] * gain
            scale[first + i] = min(max(fitted, np.float32(0)), MOST)
            for d in range(dim):
                codes[first + i, d] = levels[d, i]


@exact
def _encode(x, inverse, low, high, levels, terms, divisor):
    """Codes of one dim, and its terms in the sums of `quant.reference.refit`."""
    for i in range(len(x)):
        product = x[i] * inverse[i]
        level = np.floor(product)
        # A product that was rounded up to a whole number is slightly below it.
        missing = _multiply_add(x[i], inverse[i], -product)
        level = level - np.float32(1) if (product == level) & (missing < 0) else level
        level = level if level > low else low
        level = level if level < high else high
        levels[i] = np.uint8(np.int32(level - low))
        c = level + np.float32(0.5)
        terms[i] = x[i] * c
        divisor[i] += c * c  # exact


@exact
def _rotate(tile, block, shrink):
    """`layout.rotation.rotate` of columns ``[D, n]``, in place."""
    dim = tile.shape[0]
    distance = 1
    while distance < block:
        for begin in range(0, dim, 2 * distance):
            for d in range(begin, begin + distance):
                for i in range(tile.shape[1]):
                    a, b = tile[d, i], tile[d + distance, i]
                    tile[d, i], tile[d + distance, i] = a + b, a - b
        distance *= 2
    for d in range(dim):
        for i in range(tile.shape[1]):
            tile[d, i] *= shrink


@exact
def _sum(terms):
    """`quant.reference.row_sum` of columns ``[D, n]``, into the first row."""
    width = terms.shape[0]
    while width % 2 == 0:
        width //= 2
        for d in range(width):
            for i in range(terms.shape[1]):
                terms[d, i] += terms[d + width, i]
    for d in range(1, width):
        for i in range(terms.shape[1]):
            terms[0, i] += terms[d, i]


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
