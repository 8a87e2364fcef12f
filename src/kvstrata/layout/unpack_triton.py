"""Reading pages in Triton: addresses, codes by (token, dim), scales, and the rotation in registers."""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl

from . import format

UNIT: tl.constexpr = tl.constexpr(format.UNIT)


@triton.jit
def _word(code_ptr, word, lane, live, WORDS: tl.constexpr):
    """A lane's word at its position in layout/fragments.py: 16-byte chunks, then an 8-byte and a 4-byte one."""
    WHOLE: tl.constexpr = WORDS // 4 * 4
    offset = word // 4 * 128 + lane * 4 + word % 4
    if WORDS % 4 >= 2:
        offset = tl.where(word >= WHOLE, WHOLE * 32 + lane * 2 + word - WHOLE, offset)
    if WORDS % 2 == 1:
        offset = tl.where(word >= WORDS - 1, (WORDS - 1) * 32 + lane, offset)
    return tl.load(code_ptr + offset, mask=live, other=0)


@triton.jit
def load_levels(code_ptr, token, dim, live, BITS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
                IS_K: tl.constexpr):  # fmt: skip
    """Mid-rise levels, float32, of the values at (token of the page, dim), in the shape that these broadcast to."""
    STEPS: tl.constexpr = DIM // 16
    FRAGMENTS: tl.constexpr = STEPS * TOKENS // 16
    PAIRS: tl.constexpr = (FRAGMENTS + 1) // 2
    if IS_K:
        far, near = token % 16, dim % 16  # g + 8 (r % 2); 2 t + 8 (r // 2) + half
    else:
        far, near = dim % 16, token % 16
    lane = far % 8 * 4 + near % 8 // 2
    r_low, r_high, half = far // 8, near // 8, near % 2
    j = token // 16 * STEPS + dim // 16
    if BITS == 8:
        code = _word(code_ptr, 2 * j + r_high, lane, live, 2 * FRAGMENTS) >> (16 * r_low + 8 * half)
    elif BITS == 4:
        code = _word(code_ptr, j, lane, live, FRAGMENTS) >> (8 * r_high + 4 * r_low + 16 * half)
    elif BITS == 2:
        code = _word(code_ptr, j // 2, lane, live, PAIRS) >> (8 * (j % 2) + 4 * r_high + 2 * r_low + 16 * half)
    else:
        field = 4 * r_high + 2 * r_low + 16 * half
        WORDS: tl.constexpr = PAIRS + (FRAGMENTS + 3) // 4
        low = _word(code_ptr, j // 2, lane, live, WORDS) >> (8 * (j % 2) + field)
        turned = (field + 2 + j % 2 + 8 * (j % 4 // 2)) % 32
        high = _word(code_ptr, PAIRS + j // 4, lane, live, WORDS) >> turned
        code = (low & 3) | ((high & 1) << 2)
    MIDDLE: tl.constexpr = ((1 << BITS) - 1) / 2
    return (code & ((1 << BITS) - 1)).to(tl.float32) - MIDDLE


@triton.jit
def _words(code_ptr, FROM: tl.constexpr, WORDS: tl.constexpr, FIELDS: tl.constexpr):
    """Words FROM .. of all lanes, each loaded once in memory order, as ``[WORDS, 32, FIELDS]`` to be shifted."""
    offs = tl.arange(0, WORDS * 32)
    flat = tl.reshape(tl.load(code_ptr + FROM * 32 + offs), (WORDS // 4, 32, 4))
    words = tl.reshape(tl.permute(flat, (0, 2, 1)), (WORDS, 32, 1))
    return tl.broadcast_to(words, (WORDS, 32, FIELDS))


@triton.jit
def page_levels(code_ptr, BITS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, IS_K: tl.constexpr):
    """`load_levels` of a whole page: each word is loaded once, and reshapes bring its fields into order.

    Below, axes of a word are (block of 16 tokens, step of 16 dims, g, t); those of its fields are as in
    layout/fragments.py: r_low, r_high and half, and which of two (``odd``) or four fragments if a word has several.
    """
    STEPS: tl.constexpr = DIM // 16
    BLOCKS: tl.constexpr = TOKENS // 16
    FRAGMENTS: tl.constexpr = STEPS * BLOCKS
    shape: tl.constexpr = (TOKENS, DIM)
    if BITS == 8:  # block, step, r_high, g, t, r_low, half
        code = _words(code_ptr, 0, 2 * FRAGMENTS, 4) >> (8 * tl.arange(0, 4))[None, None, :]
        code = tl.reshape(code, (BLOCKS, STEPS, 2, 8, 4, 2, 2))
        code = tl.permute(code, (0, 5, 3, 1, 2, 4, 6) if IS_K else (0, 2, 4, 6, 1, 5, 3))
    elif BITS == 4:  # block, step, g, t, half, r_high, r_low
        field = tl.arange(0, 8)
        code = _words(code_ptr, 0, FRAGMENTS, 8) >> (field // 4 * 16 + field % 4 * 4)[None, None, :]
        code = tl.reshape(code, (BLOCKS, STEPS, 8, 4, 2, 2, 2))
        code = tl.permute(code, (0, 6, 2, 1, 5, 3, 4) if IS_K else (0, 5, 3, 4, 1, 6, 2))
    else:  # block, pair of steps, g, t, half, odd, r_high, r_low
        field = tl.arange(0, 16)
        code = _words(code_ptr, 0, FRAGMENTS // 2, 16) >> (field // 8 * 16 + field % 8 * 2)[None, None, :]
        code = tl.reshape(code, (BLOCKS, STEPS // 2, 8, 4, 2, 2, 2, 2))
        code = tl.permute(code, (0, 7, 2, 1, 5, 6, 3, 4) if IS_K else (0, 6, 3, 4, 1, 5, 7, 2))
    code = tl.reshape(code, shape)
    if BITS == 3:  # block, four steps, g, t, half, which two, r_high, r_low, odd
        high = _words(code_ptr, FRAGMENTS // 2, FRAGMENTS // 4, 32) >> ((tl.arange(0, 32) + 2) % 32)[None, None, :]
        high = tl.reshape(high, (BLOCKS, STEPS // 4, 8, 4, 2, 2, 2, 2, 2))
        high = tl.permute(high, (0, 7, 2, 1, 5, 8, 6, 3, 4) if IS_K else (0, 6, 3, 4, 1, 5, 8, 7, 2))
        code = (code & 3) | ((tl.reshape(high, shape) & 1) << 2)
    MIDDLE: tl.constexpr = ((1 << BITS) - 1) / 2
    return (code & ((1 << BITS) - 1)).to(tl.float32) - MIDDLE


def whole_pages(dim: int, page_tokens: int, widths: Iterable[int]) -> bool:
    """True if `page_levels` supports such pages: dims are powers of two, and planes are whole 16-byte chunks."""
    fragments = dim // 16 * page_tokens // 16
    least = {8: 2, 4: 4, 3: 16, 2: 8}
    return dim >= 64 and dim & (dim - 1) == 0 and all(fragments >= least[bits] for bits in widths)


@triton.jit
def page_address(pointers_ptr, handle, units):
    """Addresses of pages by handle, int64; handle 0 is always valid."""
    handle = handle.to(tl.int64)
    return tl.load(pointers_ptr + handle // units) + handle % units * UNIT


@triton.jit
def scale_index(token, SIDE: tl.constexpr):
    """Index of the fp16 scale of K (SIDE 0) or V (1) of a token among those of its page; see layout/scales.py."""
    return token // 16 * 32 + token % 8 * 4 + token % 16 // 8 + 2 * SIDE


@triton.jit
def load_factors(exponents_ptr, mask):
    """Powers of two, float32, from int8 exponents; 1 where masked."""
    return ((tl.load(exponents_ptr, mask=mask, other=0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(scale_ptr, token, live, SIDE: tl.constexpr):
    """float32 scales of K (SIDE 0) or V (1) of tokens of the page; 0 where not live."""
    return tl.load(scale_ptr + scale_index(token, SIDE), mask=live, other=0.0).to(tl.float32)


@triton.jit
def butterflies(x, ROWS: tl.constexpr, WIDE: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """Butterflies of layout/rotation.py on float32 ``[ROWS, WIDE]``, at distances FIRST, 2 FIRST, .. < END."""
    for bit in tl.static_range(8):
        if (1 << bit) >= FIRST and (1 << bit) < END:
            pairs = tl.reshape(x, (ROWS * WIDE // (2 << bit), 2, 1 << bit))
            a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, WIDE))
    return x


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The rotation of layout/rotation.py, block-diagonal in blocks of BLOCK, on float32 ``[ROWS, WIDE]``."""
    return butterflies(x, ROWS, WIDE, 1, BLOCK) * (BLOCK**-0.5)


@triton.jit
def widen(x, MANTISSA: tl.constexpr):
    """Convert stored rows to float32: 16 or 32 bit, or bytes of e5m2 (MANTISSA 2) or e4m3 (3)."""
    if MANTISSA == 0:
        return x.to(tl.float32)
    bits = x.to(tl.uint16)
    if MANTISSA == 2:
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    magnitude = ((bits & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(bits >= 0x80, -magnitude, magnitude)
