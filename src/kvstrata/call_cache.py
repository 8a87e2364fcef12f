"""Guards that recognise tensors seen before by type, dtype, device, shape, strides and dispatch state.

torch.compile checks this on every call of a compiled function, in C++ (``TensorGuards``, about 0.1 us per tensor);
reading the same properties from Python costs ten times that. The Python version below is the fallback for a torch
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Guard = Callable[..., bool]


def traced() -> bool:
    """True under a TorchDispatchMode or a functorch transform."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None)


def python_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """Guard in Python, for a torch without ``TensorGuards``."""

    def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    seen = tuple(looks(tensor) for tensor in tensors)

    def guard(*given: torch.Tensor) -> bool:
        if len(given) != len(seen) or not all(isinstance(tensor, torch.Tensor) for tensor in given):
            return False
        return tuple(looks(tensor) for tensor in given) == seen and not traced()

    return guard


def guard_of(tensors: Sequence[torch.Tensor]) -> Guard:
    """Callable that takes as many tensors and returns True if they match these."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):
        return python_guard(tensors)
