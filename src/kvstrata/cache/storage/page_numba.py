"""Loops of `page.py` compiled for the CPU: rows to codes, and their fields in pages. Bit for bit what torch gives.

Torch walks over all rows once per operation and indexes single bytes with 8-byte numbers. Here a tile of rows is turned
so that a vector holds one dim of many rows: each row is added up in the order of `quant.reference.row_sum`, and no
sum crosses a vector. Without numba, and for a few rows, torch does the work.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kvstrata.layout import fragments
from kvstrata.layout.rotation import block_of
from kvstrata.quant.reference import GAUSSIAN_STEP, LARGEST, SMALLEST_STEP

TILE = 64  # rows that are quantised side by side
SMALLEST, MOST = np.float32(SMALLEST_STEP), np.float32(LARGEST)

# No fastmath: the order of the additions is part of the format, and a product is not fused.
compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


def quantize_plain(
    x: torch.Tensor, centre: torch.Tensor | None, bits: int, rotate: bool, gain: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quant.reference.quantize_plain` of rows ``[n, D]`` on the CPU; ``centre [n, D]``."""
    by_row = np.empty((0, 0), np.float32) if centre is None else centre.detach().float().contiguous().numpy()
    return _quantized(x.detach().float(), by_row, True, bits, rotate, gain)


def quantize_rows(x: torch.Tensor, bits: int, rotate: bool, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`quant.reference.quantize_rows` of float32 rows ``[n, D]`` on the CPU."""
    return _quantized(x, np.empty((0, 0), np.float32), False, bits, rotate, gain)


def _quantized(
    x: torch.Tensor, centre: np.ndarray, clean: bool, bits: int, rotate: bool, gain: float
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), dtype=torch.float32)
    block = block_of(x.shape[1]) if rotate else 1
    step = np.float32(2 / 255 if bits == 8 else GAUSSIAN_STEP[bits])
    _quantize(
        x.contiguous().numpy(), centre, clean, block, np.float32(block**-0.5), bits, step, np.float32(gain),
        codes.numpy(), scale.numpy(),
    )  # fmt: skip
    return codes, scale.half()


@compiled
def _load(x, centre, first, rows, clean, tile):
    """Rows from ``first`` on as the columns of a tile; with ``clean`` as `quant.reference.clean` leaves them."""
    for i in range(rows):
        for d in range(x.shape[1]):
            value = x[first + i, d]
            if clean:
                value = value - centre[first + i, d] if len(centre) else value
                value = value if value == value else np.float32(0)
                value = value if value < MOST else MOST
                value = value if value > -MOST else -MOST
            tile[d, i] = value


@compiled
def _quantize(x, centre, clean, block, shrink, bits, per_norm, gain, codes, scale):
    """Rows to codes and scales (float32, not yet rounded to fp16), a tile at a time."""
    rows, dim = x.shape
    tile, terms = np.zeros((dim, TILE), np.float32), np.empty((dim, TILE), np.float32)
    levels, step, divisor = np.empty((dim, TILE), np.uint8), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    middle = np.int32(1 << (bits - 1))
    low, high = np.float64(-middle), np.float64(middle - 1)
    half = np.float32((1 << bits) - 1) / np.float32(2)
    for first in range(0, rows, TILE):
        here = min(rows - first, TILE)
        _load(x, centre, first, here, clean, tile)
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
            for i in range(step.size):
                level = np.floor(np.float64(tile[d, i]) * np.float64(step[i]))  # exact in float64
                level = level if level > low else low
                level = level if level < high else high
                code = np.int32(level) + middle
                levels[d, i] = np.uint8(code)
                c = np.float32(code) - half
                terms[d, i] = tile[d, i] * c
                divisor[i] += c * c  # exact
        _sum(terms)
        for i in range(here):
            fitted = terms[0, i] / divisor[i] * gain
            scale[first + i] = min(max(fitted, np.float32(0)), MOST)
            for d in range(dim):
                codes[first + i, d] = levels[d, i]


@compiled
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


@compiled
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
    """Places of the fields of a plane, by value and by byte.

    Returns byte and bit of every value ``[P, D]``; then the first byte with fields and the value of each field from
    there on, uint16 ``[8 / width, bytes]``. There are no bytes where other bits lie between the fields.
    """
    width, _ = fragments.planes(bits)[plane]
    byte, bit = (x.numpy() for x in fragments.places(bits, dim, tokens, side)[plane])
    first = int(byte.min())
    source = np.full((8 // width, int(byte.max()) + 1 - first), -1)
    source[bit // width, byte - first] = np.arange(byte.size).reshape(byte.shape)
    if (source < 0).any():
        source = source[:, :0]
    return byte, bit, first, source.astype(np.uint16)


@compiled
def _write_fields(pages, stride, offset, page, slot, byte, bit, begin, source, width, low, codes):
    """Bits ``low .. low + width`` of ``codes [n, D]`` into the bytes of ``pages``; the rest of each byte stays.

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


@compiled
def _shift(codes, low, mask, fields):
    for i in range(len(codes)):
        fields[i] = (codes[i] >> low) & mask


@compiled
def _put(fields, source, shift, packed):
    """One field of every byte."""
    for i in range(len(packed)):
        packed[i] |= np.uint8(fields[source[i]] << shift)


@compiled
def _whole_page(page, slot, first, tokens):
    """True if the tokens from ``first`` on are all slots of a page in order."""
    if first + tokens > len(page):
        return False
    wrong = 0
    for t in range(tokens):
        wrong += (page[first + t] != page[first]) | (slot[first + t] != t)
    return wrong == 0


@compiled
def read_fields(pages, stride, offset, page, slot, byte, bit, width, low, codes):
    """Inverse of `_write_fields`: ORs the fields into ``codes``, which must begin as zeros."""
    mask = np.uint8((1 << width) - 1)
    for i in range(len(page)):
        begin = page[i] * stride + offset
        for j in range(codes.shape[1]):
            field = (pages[begin + byte[slot[i], j]] >> bit[slot[i], j]) & mask
            codes[i, j] |= np.uint8(field << np.uint8(low))
