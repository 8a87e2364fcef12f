"""Which backend runs, and the comparison that recognises tensors seen before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import jit
from .copies import Look

BACKENDS = ("auto", "reference", "triton", "cuda")


def missing(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot run on ``device``, or None when it can."""
    if backend == "reference":
        return None
    if backend == "triton":
        try:
            import triton
        except ImportError:
            return "triton is not installed"
        if device.type == "cuda" or triton.knobs.runtime.interpret:
            return None
        return f"triton needs CUDA tensors (or TRITON_INTERPRET=1), got some on {device}"
    if device.type != "cuda":
        return f"{backend} needs CUDA tensors, got some on {device}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"{backend} needs compute capability (8, 0), {device} has {capability}"
    return jit.missing()


def resolve(backend: str, device: torch.device) -> str:
    """The backend that runs: ``auto`` takes CUDA C++, then Triton, on a GPU, and the reference elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    if backend == "auto":
        ranked = ("cuda", "triton") if device.type == "cuda" else ()
        return next((name for name in ranked if missing(name, device) is None), "reference")
    if reason := missing(backend, device):
        raise RuntimeError(f"backend: {reason}")
    return backend


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A callable that takes as many tensors and says whether they look like these; in C++ where torch offers it."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):
        seen = [(type(t), Look.of(t)) for t in tensors]
        return lambda *given: [(type(t), Look.of(t)) for t in given] == seen
