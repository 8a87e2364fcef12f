"""Pieces of a page in Triton: codes by (token, dim), scales, and the rotation in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _word(code_ptr, word, lane, live, WORDS: tl.constexpr):
    """A lane's word, where layout/fragments.py puts it: 16-byte chunks, then an 8-byte and a 4-byte one."""
    WHOLE: tl.constexpr = WORDS // 4 * 4
    at = word // 4 * 128 + lane * 4 + word % 4
    if WORDS % 4 >= 2:
        at = tl.where(word >= WHOLE, WHOLE * 32 + lane * 2 + word - WHOLE, at)
    if WORDS % 2 == 1:
        at = tl.where(word >= WORDS - 1, (WORDS - 1) * 32 + lane, at)
    return tl.load(code_ptr + at, mask=live, other=0)


@triton.jit
def load_levels(code_ptr, token, dim, live, BITS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
                IS_K: tl.constexpr):  # fmt: skip
    """Mid-rise levels, float32, of values (token of the page, dim) in any shape that the two broadcast to."""
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
def load_scales(scale_ptr, token, live, SIDE: tl.constexpr):
    """float32 scales of K (SIDE 0) or V (1) of tokens of the page; 0 where not live, whatever is there."""
    at = token // 16 * 32 + token % 8 * 4 + 2 * SIDE + token % 16 // 8
    return tl.load(scale_ptr + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The rotation of layout/rotation.py, block-diagonal in blocks of BLOCK, on float32 ``[ROWS, WIDE]``."""
    for bit in tl.static_range(8):
        if (2 << bit) <= BLOCK:
            pairs = tl.reshape(x, (ROWS * WIDE // (2 << bit), 2, 1 << bit))
            a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, WIDE))
    return x * (BLOCK**-0.5)


@triton.jit
def widen(x, MANTISSA: tl.constexpr):
    """float32 from rows as they are stored: 16 or 32 bit, or bytes of e5m2 (MANTISSA 2) or e4m3 (3)."""
    if MANTISSA == 0:
        return x.to(tl.float32)
    bits = x.to(tl.uint16)
    if MANTISSA == 2:
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    magnitude = ((bits & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(bits >= 0x80, -magnitude, magnitude)
