"""Compiled loops as functions for C, for OpenMP regions, whose threads know nothing of Python.

A region gets one address: that of the number of units taken so far, the number of units, the units to take at a time,
and the arguments of the loop, which are read there as numba has them in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvstrata.loops import callback

UNITS, STEP, ARGUMENTS = 1, 2, 3  # words of a region's data
carray: Any = numba.carray  # type: ignore[attr-defined]


def _pointer_to(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _count_up(typing, address):
    """Add 1 to the int64 at an address and return its old value; what other threads wrote before is visible."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), generate


pointer_to: Any = intrinsic(_pointer_to)
count_up: Any = intrinsic(_count_up)


def _words(kind: Any) -> int:
    """Length of an argument in the data of a region, in words of 8 bytes."""
    return 5 + 2 * kind.ndim if isinstance(kind, types.Array) else 1


def _arguments_of(kinds: tuple[Any, ...]) -> Any:
    """Intrinsic that reads arguments of these types from an address: arrays are structs as numba has them."""

    def read(typing, address):
        def generate(context, builder, signature, given):
            values, word = [], 0
            for kind in kinds:
                place = builder.add(given[0], ir.Constant(ir.IntType(64), 8 * word))
                pointer = builder.inttoptr(place, context.get_value_type(kind).as_pointer())
                values.append(builder.load(pointer))
                word += _words(kind)
            return context.make_tuple(builder, signature.return_type, values)

        return types.Tuple(kinds)(types.int64), generate

    return intrinsic(read)


@functools.cache
def _address_of_region(loop: Any, given: tuple[Any, ...]) -> int:
    """Address of the region of a loop; of arrays are ``given`` dtype, dimensions and layout."""
    kinds = (types.Array(numba.from_dtype(x[0]), *x[1:]) if isinstance(x, tuple) else x for x in given)
    arguments_at = _arguments_of(tuple(kinds))

    def work(data):
        """Each thread takes the next units that are left."""
        head = carray(data, (ARGUMENTS,), np.int64)
        address = head.ctypes.data
        units, step = head[UNITS], head[STEP]
        arguments = arguments_at(address + 8 * ARGUMENTS)
        first = count_up(address) * step
        while first < units:
            loop(*arguments, first, min(first + step, units))
            first = count_up(address) * step

    return callback(work)


def region(loop: Any, arguments: Sequence[Any], units: int, step: int) -> tuple[int, np.ndarray]:
    """Address of a function of C and its data: threads that call it run ``loop(*arguments, first, last)``.

    Together they process ``range(units)``, each up to ``step`` units at a time. Arguments are arrays, integers and
    float32 numbers; arrays must live until all threads are done.
    """
    kinds: list[Any] = []
    words = [0, units, step]
    for x in arguments:
        if isinstance(x, np.ndarray):
            kinds.append((x.dtype, x.ndim, "C" if x.flags.c_contiguous else "A"))
            words += [0, 0, x.size, x.itemsize, x.ctypes.data, *x.shape, *x.strides]
        elif isinstance(x, np.float32):
            kinds.append(types.float32)
            words.append(int(np.array(x).view(np.int32)))
        elif isinstance(x, (int, np.integer)):
            kinds.append(types.int64)
            words.append(int(x))
        else:
            raise TypeError(f"arguments: expected arrays, integers and float32 numbers, got {x!r}")
    return _address_of_region(loop, tuple(kinds)), np.array(words, np.int64)
