"""Loops for the CPU, compiled by numba: ``@exact`` and ``@fast``, with a disk cache that notices every change.

numba's own cache compares the time and size of the file in which a loop is defined. Machine code also contains the
loops that it calls and the constants that it reads, often from other files: after an upgrade, numba would go on with
what these once were. Here the key of an entry covers them too.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher

# In `fast`, sums in any order and fused products are allowed; infinities and NaN are preserved.
REORDERED = {"reassoc", "contract", "nsz"}
_CALLBACKS: list[CFunc] = []


class LoopCache(FunctionCache):
    """numba's disk cache of one loop, or of a function for C, with `digest` as part of the key."""

    def __init__(self, loop: Any) -> None:
        super().__init__(getattr(loop, "py_func", loop))
        self._loop = loop

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return sig, codegen.magic_tuple(), digest(self._loop)  # numba's own also pickles closures, in no fixed order


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    loop: Any = numba.njit(nogil=True, error_model="numpy", **options)(function)
    if hasattr(loop, "_cache"):  # not with NUMBA_DISABLE_JIT
        loop._cache = LoopCache(loop)
    return loop


exact: Any = _compile  # sums in the order written: part of the format, or the same as torch
fast: Any = functools.partial(_compile, fastmath=REORDERED)


def callback(function: Callable[[Any], None]) -> int:
    """Address of ``function(data)``, compiled for C: ``void (*)(void *)``. Never freed."""
    compiled: Any = CFunc(function, ((types.voidptr,), types.void), {}, {"error_model": "numpy"})
    compiled._cache = LoopCache(function)
    compiled.compile()
    _CALLBACKS.append(compiled)
    return compiled.address


@functools.cache
def digest(loop: Any) -> str:
    """Hash of the code, options and constants of a loop and of all loops that it calls."""
    told, seen = hashlib.sha256(), set()
    waiting: list[Any] = [loop]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (Dispatcher, FunctionType)) and id(value) in seen:
            continue
        seen.add(id(value))
        for text, used in _describe(value):
            told.update(text.encode() + b"\0")
            waiting += used
    return told.hexdigest()


def _describe(value: Any) -> Iterator[tuple[str, list[Any]]]:
    """Text that identifies a value in compiled code, and the values that it uses."""
    if isinstance(value, Dispatcher):
        options = {name: sorted(x) if isinstance(x, set) else x for name, x in value.targetoptions.items()}
        yield repr(sorted(options.items())), [value.py_func]
    elif isinstance(value, FunctionType):
        yield _code(value.__code__), list(_used(value))
    elif hasattr(value, "_defn"):  # an intrinsic
        yield "intrinsic", [value._defn]
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}", [value.tobytes()]
    elif isinstance(
        value, (bool, int, float, complex, str, bytes, tuple, type(None), np.generic, np.dtype, types.Type)
    ):
        yield f"{type(value).__name__} {value!r}", []
    else:  # modules, types, classes
        yield f"{type(value).__name__} {getattr(value, '__name__', '')}", []


def _code(code: CodeType) -> str:
    """Instructions and constants, without line numbers and file names."""
    constants = [_code(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _used(function: FunctionType) -> Iterator[Any]:
    """Values of the globals, the closure and, for our modules, the attributes that a function names."""
    names = list(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            if value.__name__.startswith("kvstrata"):
                yield from (getattr(value, other) for other in names if hasattr(value, other))
        elif name in function.__globals__:
            yield value
    for cell in function.__closure__ or ():
        yield cell.cell_contents
