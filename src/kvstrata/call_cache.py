"""Whether tensors look like those seen before: type, dtype, device, shape, strides and dispatch state.

torch.compile decides this on every call of a compiled function and has it in C++ (``TensorGuards``, about 0.1 us a
tensor); reading the same properties one by one from Python costs ten times that. Where torch does not offer it, the
Python comparison below stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Guard = Callable[..., bool]


def traced() -> bool:
    """Whether somebody listens to the dispatcher: a dispatch mode or functorch."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None)


def python_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """The comparison in Python."""

    def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    seen = tuple(looks(tensor) for tensor in tensors)

    def guard(*given: torch.Tensor) -> bool:
        if len(given) != len(seen) or not all(isinstance(tensor, torch.Tensor) for tensor in given):
            return False
        return tuple(looks(tensor) for tensor in given) == seen and not traced()

    return guard


def guard_of(tensors: Sequence[torch.Tensor]) -> Guard:
    """A callable that takes as many tensors and says whether they are like these."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):
        return python_guard(tensors)
