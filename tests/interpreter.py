"""Triton's interpreter with less work around each operation: the results are the same in a third of the time.

As it is, it wraps the whole language anew for every function that a kernel calls (and never unwraps it), builds a table
of dtypes for every look-up, spells out shape and name of every value's type, promotes types and compares shapes anew at
every operation, and computes overflow checks whose outcome only its debug mode reads. What is unusual, errors among it,
goes the interpreter's own way.
"""

from __future__ import annotations

import dataclasses
import functools
from types import FunctionType
from typing import Any

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl


@functools.cache
def _languages(fn: FunctionType) -> frozenset[str]:
    """Modules that `_patch_lang` wraps for a function."""
    return frozenset(m.__name__ for m in (tl, tl.core) if any(value is m for value in fn.__globals__.values()))


_wrap = interpreter._patch_lang
_wrapped: set[str] = set()
_scopes: list[interpreter._LangPatchScope] = []


class _Scope:
    """Wraps a module once per launch; `restore`, which only a launch calls, undoes all."""

    def __init__(self, fn: FunctionType) -> None:
        if new := _languages(fn) - _wrapped:
            _scopes.append(_wrap(fn))
            _wrapped.update(new)

    def restore(self) -> None:
        while _scopes:
            _scopes.pop().restore()
        _wrapped.clear()


_scalar_dtype = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: tl.dtype) -> np.dtype:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _scalar_dtype(scalar)


_init_block, _init_tensor, _unwrap_any = tl.core.block_type.__init__, tl.tensor.__init__, tl.core._unwrap_if_constexpr
_blocks: dict[tuple, dict[str, Any]] = {}  # attributes of a block type by element type and shape
_shapes: dict[tuple, Any] = {}  # one object for all block types of a shape
_scalar: list = []
NUMBERS = (int, float, bool)
PLAIN = frozenset({*NUMBERS, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type})


def _unwrap(x: Any) -> Any:
    kind = type(x)
    if kind is tl.constexpr:
        return x.value
    return x if kind in PLAIN else _unwrap_any(x)


def _block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    sizes = vars(shape).get("sizes") if type(shape) is tl.core.tuple else None
    if sizes is None:
        sizes = tuple([_unwrap(size) for size in shape])
    attributes = _blocks.get((element_ty.name, sizes))
    if attributes is None:
        _init_block(self, element_ty, shape)
        self.shape = _shapes.setdefault(sizes, self.shape)
        self.shape.sizes = sizes
        attributes = _blocks[element_ty.name, sizes] = vars(self) | {"of_tensors": []}
    vars(self).update(attributes)
    self.element_ty = element_ty


def _tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Shape and size are computed once for all tensors of a type."""
    both = type.of_tensors if type.is_block() else _scalar
    if not both:
        _init_tensor(self, handle, type)
        both.extend((self.shape, self.numel))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = both


def _handle(self: interpreter.TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize * 8 > getattr(dtype, "primitive_bitwidth", 64):  # pointers have none
        self.__post_init__()  # may refuse it


def _splat(self: interpreter.InterpreterBuilder, ret_ty: tl.block_type, arg: interpreter.TensorHandle) -> Any:
    data = np.empty(ret_ty.shape.sizes, _np_dtype(arg.dtype))
    data[...] = arg.data if not isinstance(arg.dtype, tl.block_type) else arg.data[0]
    return interpreter.TensorHandle(data, arg.dtype.scalar)


Semantic = interpreter.TritonSemantic
_check_types, _constant, _broadcast = (
    Semantic.binary_op_type_checking_impl, Semantic.scalar_constant, Semantic.broadcast_impl_value
)  # fmt: skip
_promoted: dict[tuple, tuple | None] = {}
_constants: dict[tuple, interpreter.TensorHandle] = {}


def _promote(semantic: Any, *types: Any) -> tuple | None:
    """Result type of two operands with the least and greatest scalar that it takes; None for pointers."""
    if types[0].is_ptr() or types[2].is_ptr():
        return None
    result = semantic.computation_type_impl(*types)
    if not result.is_int():
        return result, -np.inf, np.inf
    return result, result.get_int_min_value(), result.get_int_max_value()


def _operands(
    self: Any, lhs: Any, rhs: Any, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
) -> tuple:
    """Both operands in the type of the result and in one shape; numpy spreads a scalar, which gets a block's type."""
    a_is_scalar, b_is_scalar = type(lhs) in NUMBERS, type(rhs) in NUMBERS
    if arithmetic_check and (a_is_scalar or type(lhs) is tl.tensor) and (b_is_scalar or type(rhs) is tl.tensor):
        a = self.to_tensor_type(lhs) if a_is_scalar else lhs.type.scalar
        b = self.to_tensor_type(rhs) if b_is_scalar else rhs.type.scalar
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in _promoted:
            _promoted[key] = _promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        if _promoted[key] is not None:
            result, least, greatest = _promoted[key]
            if (not a_is_scalar or least <= lhs <= greatest) and (not b_is_scalar or least <= rhs <= greatest):
                if a_is_scalar:
                    lhs = self.scalar_constant(lhs, result)
                elif a.name != result.name:
                    lhs = self.cast(lhs, result)
                if b_is_scalar:
                    rhs = self.scalar_constant(rhs, result)
                elif b.name != result.name:
                    rhs = self.cast(rhs, result)
                return _spread(self, lhs, rhs)
        elif (a.is_ptr() and allow_lhs_ptr and b.is_int()) or (b.is_ptr() and allow_rhs_ptr and a.is_int()):
            lhs = self.scalar_constant(lhs, a) if a_is_scalar else lhs
            return _spread(self, lhs, self.scalar_constant(rhs, b) if b_is_scalar else rhs)
    return _check_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _spread(self: Any, lhs: Any, rhs: Any) -> tuple:
    a, b = lhs.type, rhs.type
    if a.is_block() and not b.is_block():
        return lhs, self.tensor(rhs.handle, a.with_element_ty(b))
    if b.is_block() and not a.is_block():
        return self.tensor(lhs.handle, b.with_element_ty(a)), rhs
    return self.broadcast_impl_value(lhs, rhs)


def _same_shape(self: Any, lhs: Any, rhs: Any) -> tuple:
    a, b = lhs.type, rhs.type
    same = a.is_block() == b.is_block() and (not a.is_block() or a.shape is b.shape)
    return (lhs, rhs) if same else _broadcast(self, lhs, rhs)


def _scalar_constant(self: Any, value: Any, dtype: tl.dtype) -> Any:
    if type(value) not in NUMBERS or dtype is None:
        return _constant(self, value, dtype)
    key = (dtype.name, value)
    if key not in _constants:
        _constants[key] = _constant(self, value, dtype).handle
    return self.tensor(_constants[key], dtype)


def _wrap_member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def new_member(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, new_member)


def speed_up() -> None:
    """Patch the interpreter of this process."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = _Scope
    tl.core._unwrap_if_constexpr = _unwrap
    tl.core.block_type.__init__, tl.tensor.__init__ = _block, _tensor
    interpreter.TensorHandle.__init__ = _handle
    interpreter.InterpreterBuilder.create_splat = _splat
    Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value = _operands, _same_shape
    Semantic.scalar_constant = _scalar_constant
    interpreter._patch_attr = _wrap_member
