"""Dot products of packed codes with float32 numbers in vector registers, for decode on the CPU.

Loops that numba vectorises by itself store every code as a float and load it again. So the innermost loop is written in
LLVM vector operations, on eight lanes at a time (two values of g, four of t) and with up to four rows of multipliers.
In a fragment (``layout/fragments.py``) register r and half of lane 4 g + t are

    K       token g + 8 (r % 2)                 dim 2 t + 8 (r // 2) + half
    V       token 2 t + 8 (r // 2) + half       dim g + 8 (r % 2)

so the multiplier of a code depends on t, r // 2 and half, and the sum it is added to on g and r % 2. A code is not
shifted in its word: masked and converted to float it is too large by a power of two, by which `arrange` divides its
multiplier. Codes count from 0; subtracting their middle is left to the caller.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvstrata.loops import fast

from .fragments import BITS
from .unpack_numba import LANES

ROWS = 4  # rows of multipliers per pass
WIDTH = 8  # lanes per vector
BLOCK = 16  # multipliers per row and fragment, by r // 2, half and t

WORD, INDEX, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS, FLOATS = ir.VectorType(WORD, WIDTH), ir.VectorType(FLOAT, WIDTH)
MASK = {2: 3, 3: 3, 4: 15, 8: 255}  # of a code, or of its two low bits
APART = {2: 2, 3: 2, 4: 4, 8: 16}  # bits from the field of r to that of r + 1, for even r


def _shift(bits, far, half):
    """Lowest bit of the field of r = 2 ``far`` and ``half``, in the words that `_words` returns."""
    return 8 * half if bits == 8 else 16 * half + (8 if bits == 4 else 4) * far


def _splat(number):
    return ir.Constant(WORDS, [number] * WIDTH)


def _spread(builder, word):
    """Broadcast a word to every lane."""
    one = builder.insert_element(ir.Constant(WORDS, ir.Undefined), word, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, one, _splat(0))


def _pick(builder, a, b, chosen):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(chosen)), list(chosen)))


def _pointer_at(builder, pointer, index, kind):
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _function(builder, name, kind):
    """LLVM intrinsic of three vectors of a kind."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)


def _words(builder, bits, load, above, j):
    """Words with the fields of fragment ``j``, for r // 2 = 0 and 1, and those with the high bits of 3-bit codes."""

    def part(number, times):
        """Bit ``number`` of j, times ``times``."""
        bit = builder.and_(builder.trunc(builder.lshr(j, INDEX(number)), WORD), WORD(1))
        return builder.mul(bit, WORD(times))

    if bits == 8:
        first = builder.mul(j, INDEX(2))
        return (load(first), load(builder.add(first, INDEX(1)))), None
    if bits == 4:
        return (load(j),) * 2, None
    low = builder.lshr(load(builder.lshr(j, INDEX(1))), _spread(builder, part(0, 8)))
    if bits == 2:
        return (low, low), None
    high = load(builder.add(above, builder.lshr(j, INDEX(2))))
    rotate = _function(builder, "llvm.fshr.v8i32", WORDS)
    by = _spread(builder, builder.add(part(0, 1), part(1, 8)))
    return (low, low), builder.call(rotate, [high, high, by])


def _fields(builder, bits, words, high):
    """Codes of a fragment as floats, each times a power of two: by r // 2 and half, r % 2 = 0 and 1."""
    for far in range(2):
        for half in range(2):
            shift, pair = _shift(bits, far, half), []
            for odd in range(2):
                down = _splat(odd * APART[bits])
                field = builder.and_(builder.lshr(words[far], down), _splat(MASK[bits] << shift))
                if high is not None:
                    field = builder.or_(field, builder.and_(builder.lshr(high, down), _splat(4 << shift)))
                pair.append(builder.sitofp(field, FLOATS))
            yield pair


def _add(builder, bits, rows, given):
    """`add_products` for eight lanes: the loop over fragments, then sums over t."""
    lanes, above, column, first, apart, count, by, by_stride, by_first, sums, sums_stride, sums_first = given
    zero, multiply_add = ir.Constant(FLOATS, [0.0] * WIDTH), _function(builder, "llvm.fmuladd.v8f32", FLOATS)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(rows)]  # [row][r % 2]
    for pair in totals:
        for total in pair:
            builder.store(zero, total)
    with cgutils.for_range(builder, count, intp=INDEX) as loop:

        def load(word):
            index = builder.add(builder.mul(word, INDEX(LANES)), column)
            return builder.load(_pointer_at(builder, lanes, index, WORDS), align=4)

        words, high = _words(builder, bits, load, above, builder.add(first, builder.mul(loop.index, apart)))
        block = builder.add(by_first, builder.mul(loop.index, INDEX(BLOCK)))
        for number, pair in enumerate(_fields(builder, bits, words, high)):
            for row in range(rows):
                index = builder.add(block, builder.add(builder.mul(by_stride, INDEX(row)), INDEX(4 * number)))
                four = builder.load(_pointer_at(builder, by, index, ir.VectorType(FLOAT, 4)), align=4)
                factor = _pick(builder, four, four, [0, 1, 2, 3] * 2)
                for field, total in zip(pair, totals[row], strict=True):
                    builder.store(builder.call(multiply_add, [field, factor, builder.load(total)]), total)
    for row in range(rows):
        even, odd = (builder.load(total) for total in totals[row])
        twos = builder.fadd(_pick(builder, even, odd, range(0, 16, 2)), _pick(builder, even, odd, range(1, 16, 2)))
        fours = builder.fadd(_pick(builder, twos, twos, range(0, 8, 2)), _pick(builder, twos, twos, range(1, 8, 2)))
        index = builder.add(sums_first, builder.mul(sums_stride, INDEX(row)))
        for r in range(2):
            place = _pointer_at(builder, sums, builder.add(index, INDEX(8 * r)), ir.VectorType(FLOAT, 2))
            two = _pick(builder, fours, fours, [2 * r, 2 * r + 1])
            builder.store(builder.fadd(builder.load(place, align=4), two), place, align=4)


@intrinsic
def _add_eight(
    typing, bits, rows, lanes, above, column, first, apart, count, by, by_stride, by_first, sums, sums_stride,
    sums_first,
):  # fmt: skip
    """`_add`, specialised by bits and rows."""

    def generate(context, builder, signature, arguments):
        given = list(arguments)
        for number in (2, 8, 11):
            given[number] = context.make_array(signature.args[number])(context, builder, arguments[number]).data
        for width in BITS:
            for count in range(1, ROWS + 1):
                is_width = builder.icmp_signed("==", arguments[0], INDEX(width))
                is_count = builder.icmp_signed("==", arguments[1], INDEX(count))
                with builder.if_then(builder.and_(is_width, is_count)):
                    _add(builder, width, count, given[2:])
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, lanes, i, i, i, i, i, by, i, i, sums, i, i), generate


@fast
def add_products(lanes, bits, above, first, apart, count, by, block, sums, to):
    """Add products of codes to the columns ``to`` to ``to + 15`` of ``sums [rows, n]``: tokens (K) or dims (V).

    Args:
        lanes: uint32 ``[words, 32]``, one side of a page as `lanes_of` sorts it.
        bits: 2, 3, 4 or 8.
        above: the word where the high bits of 3-bit codes begin.
        first, apart, count: fragments ``first``, ``first + apart`` and so on: steps of a tile (K), tiles of a step (V).
        by: float32 ``[rows, blocks, 16]``, multipliers of these fragments from ``block`` on, from `arrange`.
    """
    by_stride, sums_stride = by.shape[1] * BLOCK, sums.shape[1]
    for row in range(0, len(by), ROWS):
        by_first, sums_first = row * by_stride + block * BLOCK, row * sums_stride + to
        rows = min(len(by) - row, ROWS)
        for column in range(0, LANES, WIDTH):
            _add_eight(  # type: ignore[call-arg]  # numba gives the first argument
                bits, rows, lanes, above, column, first, apart, count, by, by_stride, by_first, sums, sums_stride,
                sums_first + column // 4,
            )  # fmt: skip


@fast
def arrange(values, bits, by):
    """Rearrange ``values [rows, n]`` of 16 dims (K) or tokens (V) each as multipliers ``by [rows, n / 16, 16]``."""
    for far in range(2):
        for half in range(2):
            shift = 8 * half if bits == 8 else 16 * half + (8 if bits == 4 else 4) * far
            shrink, first = np.float32(1) / np.float32(1 << shift), 8 * far + 4 * half
            for row in range(by.shape[0]):
                for block in range(by.shape[1]):
                    for t in range(4):
                        by[row, block, first + t] = values[row, 16 * block + 8 * far + 2 * t + half] * shrink
