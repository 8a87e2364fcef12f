"""Caches of checked calls and prepared launches, keyed by tensor signatures.

A guard decides whether tensors have the same type, dtype, device, shape, strides and dispatch state as earlier ones.
torch.compile does this on every call of a compiled function and has it in C++ (``TensorGuards``, about 0.1 us per
tensor); reading the same properties one by one from Python costs ten times that. If torch does not offer it, the
Python comparison below is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

Guard = Callable[..., bool]
Key = tuple[Hashable, ...]
Value = TypeVar("Value")
CAPACITY = 4096


class Bounded(dict[Key, Value]):
    """Dict of at most `CAPACITY` entries; a new entry beyond that drops all others first."""

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= CAPACITY:
            self.clear()
        super().__setitem__(key, value)


class PerThread(threading.local, Generic[Value]):
    """A `Bounded` per thread, for launches whose parameters are written in place."""

    def __init__(self) -> None:
        self.known: Bounded[Value] = Bounded()


def signature(tensors: Sequence[torch.Tensor | None]) -> Key:
    """Shape, strides, dtype and device of each tensor; None for None."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors)


def traced() -> bool:
    """True under a TorchDispatchMode or functorch transform."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None)


def dispatched(tensors: Sequence[torch.Tensor | None]) -> bool:
    """True if a call must be an operator: under ``torch.compile`` or dispatch modes, for fake tensors, subclasses."""
    if torch.compiler.is_compiling() or traced():
        return True
    return any(x is not None and type(x) is not torch.Tensor for x in tensors)


def python_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """Guard in plain Python."""

    def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    seen = tuple(looks(tensor) for tensor in tensors)

    def guard(*given: torch.Tensor) -> bool:
        if len(given) != len(seen) or not all(isinstance(tensor, torch.Tensor) for tensor in given):
            return False
        return tuple(looks(tensor) for tensor in given) == seen and not traced()

    return guard


def guard_of(tensors: Sequence[torch.Tensor]) -> Guard:
    """Guard that takes as many tensors and returns True if they have the same signatures."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):
        return python_guard(tensors)
