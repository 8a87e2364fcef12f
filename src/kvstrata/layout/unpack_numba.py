"""Tokens of pages as float32 in compiled loops: rows, and codes one fragment at a time, for decode on the CPU.

A fragment is one tile of 16 tokens and one step of 16 dims: a word, half a word or two words of each of 32 lanes (see
``layout/fragments.py``). Its eight fields become rows of 32, so that every inner loop is one shift over neighbours,
which the compiler turns into vector instructions; two of them follow each other as one row of 64. With register r and
half, lane 4 g + t:

    row 2 (r // 2) + half                   token in tile            dim in step
    column 32 (r % 2) + lane         K      g + 8 (r % 2)            2 t + 8 (r // 2) + half
                                     V      2 t + 8 (r // 2) + half  g + 8 (r % 2)

What a column is multiplied with (K: the query, V: weights) depends on its row and t alone, what it is added to on
r % 2 and g: sums are kept by column, and the four of a token or dim are added at the end.
"""

from __future__ import annotations

import numba
import numpy as np

LANES, ROWS, COLUMNS = 32, 4, 64
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # kinds of plain rows
TO_FLOAT = np.float32(2.0**112)  # between the exponents of fp16 and of float32
ENDLESS = np.float32(2.0**16)  # what infinities of fp16 then are

# Sums in any order and fused products; infinities and NaN stay what they are. What keeps inner loops fast: their index
# is that of a range, which cannot be negative; they end at a size that the compiler does not know, or it would unroll
# them first; and they slice nothing, which counts references.
compiled = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


@compiled
def lanes_of(words, count, lanes):
    """Sort ``words`` of one side of a page by lane: ``lanes [count, 32]`` are the ``count`` words of every lane."""
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


@compiled
def levels(lanes, bits, j, fragments, out):
    """Levels (codes less their middle) of fragment ``j`` from the words of `lanes_of`, into ``out [8, 32]``."""
    middle, mask = np.float32(0.5) * np.float32((1 << bits) - 1), np.uint32((1 << bits) - 1)
    for field in range(8):
        odd, half, far = field % 2, field // 2 % 2, field // 4
        if bits == 8:
            word, shift = 2 * j + far, 16 * odd + 8 * half
        elif bits == 4:
            word, shift = j, 8 * far + 4 * odd + 16 * half
        else:
            word, shift = j // 2, 8 * (j % 2) + 4 * far + 2 * odd + 16 * half
        low = np.uint32(shift) & np.uint32(31)
        if bits != 3:
            for lane in range(out.shape[1]):
                out[field, lane] = np.float32(np.int32((lanes[word, lane] >> low) & mask)) - middle
            continue
        above, shift = (fragments + 1) // 2 + j // 4, 4 * far + 2 * odd + 2 + j % 2 + 8 * (j % 4 // 2) + 16 * half
        high = np.uint32(shift) & np.uint32(31)
        for lane in range(out.shape[1]):
            code = np.int32((lanes[word, lane] >> low) & np.uint32(3))
            top = np.int32((lanes[above, lane] >> high) & np.uint32(1))
            out[field, lane] = np.float32(code) + np.float32(4) * np.float32(top) - middle


@compiled
def scale_index(token, side):
    """Index of the fp16 scale of K (``side`` 0) or V (1) of a token among those of its page; see layout/scales.py."""
    return token // 16 * 32 + token % 8 * 4 + token % 16 // 8 + 2 * side


@compiled
def floats(words, halves, start, n, kind, bits, out):
    """``n`` numbers of a kind from byte ``start`` on, into ``out``; ``bits`` is the same memory as uint32."""
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
    for i in range(len(short)):  # a float32 with these bits has an exponent that is too small by a constant
        half = np.uint32(short[i])
        bits[i] = np.uint32(
            ((half & np.uint32(0x8000)) << np.uint32(16)) | ((half & np.uint32(0x7FFF)) << np.uint32(13))
        )
    for i in range(len(short)):
        value = out[i] * TO_FLOAT
        out[i] = value if abs(value) < ENDLESS else value * np.float32(np.inf)
