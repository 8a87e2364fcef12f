"""Pages in the form that compiled loops read, for decode on the CPU: plain rows and scales as float32, codes by lane.

The words of a page's side come in chunks of four, two or one per lane (see ``layout/fragments.py``); sorted by lane,
word w of all lanes is one row of 32. ``layout/products_numba.py`` multiplies their codes.
"""

from __future__ import annotations

import numpy as np

from kvstrata.loops import fast

LANES = 32
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # kinds of plain rows
TO_FLOAT = np.float32(2.0**112)  # ratio between the exponent biases of fp16 and float32
ENDLESS = np.float32(2.0**16)  # value of fp16 infinities after that

# Inner loops stay fast because their index is that of a range, which cannot be negative; their end is unknown to the
# compiler, which would otherwise unroll them first; and they slice nothing, which would count references.


@fast
def lanes_of(words, count, lanes):
    """Sort ``words`` of one side of a page by lane into ``lanes [count, 32]``, ``count`` words per lane."""
    whole = count // 4 * 4
    for chunk in range(0, whole, 4):
        source = words[chunk * LANES : (chunk + 4) * LANES]
        first, second, third, fourth = lanes[chunk], lanes[chunk + 1], lanes[chunk + 2], lanes[chunk + 3]
        for lane in range(LANES):
            first[lane], second[lane] = source[4 * lane], source[4 * lane + 1]
            third[lane], fourth[lane] = source[4 * lane + 2], source[4 * lane + 3]
    done = whole
    if count % 4 >= 2:
        source = words[done * LANES : (done + 2) * LANES]
        first, second = lanes[done], lanes[done + 1]
        for lane in range(LANES):
            first[lane], second[lane] = source[2 * lane], source[2 * lane + 1]
        done += 2
    if count % 2:
        source, first = words[done * LANES : (done + 1) * LANES], lanes[done]
        for lane in range(LANES):
            first[lane] = source[lane]


@fast
def page_buffers(page_tokens, dim):
    """Scratch buffers for one page: bits of plain rows, words by lane, bits of scales."""
    lanes = np.empty((page_tokens // 8 * (dim // 16), LANES), np.uint32)
    return np.empty(page_tokens * dim, np.uint32), lanes, np.empty(2 * page_tokens, np.uint32)


@fast
def scales_of(words, halves, start, side, bits, out):
    """Scales of K (``side`` 0) or V (1) of a page's tokens from byte ``start`` on; ``bits`` is scratch.

    See ``layout/scales.py``.
    """
    both = bits.view(np.float32)
    kind = np.int64(FLOAT16)  # a literal would compile another specialisation of `floats`
    floats(words, halves, start, len(both), kind, bits, both)
    for tile in range(len(out) // 16):
        rows, own = both[32 * tile + 2 * side : 32 * tile + 32], out[16 * tile : 16 * tile + 16]
        for g in range(8):
            own[g], own[g + 8] = rows[4 * g], rows[4 * g + 1]


@fast
def powers_of_two(exponents, out):
    """``2 ** exponents``, for int8 exponents in the range of a balance."""
    bits = out.view(np.uint32)
    for i in range(len(out)):
        bits[i] = np.uint32(np.int32(exponents[i]) + np.int32(127)) << np.uint32(23)


@fast
def rotate(x, block):
    """Rotate float32 rows ``[n, D]`` in place, as `layout.rotation.rotate`."""
    rows, dim = x.shape
    shrink, distance = np.float32(1) / np.sqrt(np.float32(block)), 1
    while distance < block:
        for r in range(rows):
            for begin in range(0, dim, 2 * distance):
                low, high = x[r, begin : begin + distance], x[r, begin + distance : begin + 2 * distance]
                for i in range(len(low)):
                    a, b = low[i], high[i]
                    low[i], high[i] = a + b, a - b
        distance *= 2
    for r in range(rows):
        for d in range(dim):
            x[r, d] *= shrink


@fast
def floats(words, halves, start, n, kind, bits, out):
    """Convert ``n`` numbers of a kind from byte ``start`` on into ``out``; ``bits`` is ``out`` viewed as uint32."""
    if kind == FLOAT32:
        source = words[start // 4 : start // 4 + n]
        for i in range(len(source)):
            bits[i] = source[i]
        return
    short = halves[start // 2 : start // 2 + n]
    if kind == BFLOAT16:
        for i in range(len(short)):
            bits[i] = np.uint32(short[i]) << np.uint32(16)
        return
    for i in range(len(short)):  # as a float32, these bits have an exponent that is too small by a constant
        half = np.uint32(short[i])
        bits[i] = np.uint32(
            ((half & np.uint32(0x8000)) << np.uint32(16)) | ((half & np.uint32(0x7FFF)) << np.uint32(13))
        )
    for i in range(len(short)):
        value = out[i] * TO_FLOAT
        out[i] = value if abs(value) < ENDLESS else value * np.float32(np.inf)
