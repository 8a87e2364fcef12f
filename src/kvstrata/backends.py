"""Choice of an op's backend by device: torch reference, Triton or CUDA C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import jit

BACKENDS = ("auto", "reference", "triton", "cuda")
NEEDED = {"cuda_bulk": (9, 0)}  # compute capability, if it is not (8, 0)


def missing(backend: str, device: torch.device) -> str | None:
    """Reason why ``backend`` cannot run on ``device``, or None when it can."""
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
    needed, capability = NEEDED.get(backend, (8, 0)), torch.cuda.get_device_capability(device)
    if capability < needed:
        return f"{backend} needs compute capability {needed}, {device} has {capability}"
    return jit.missing()


def resolve(backend: str, device: torch.device, known: Sequence[str] = BACKENDS) -> str:
    """Backend to run: on a GPU ``auto`` prefers CUDA C++, then Triton; elsewhere it uses the reference."""
    return choose(backend, device, lambda name: missing(name, device), known)


def choose(
    backend: str, device: torch.device, missing: Callable[[str], str | None], known: Sequence[str] = BACKENDS
) -> str:
    """`resolve` for a call: ``missing(name)`` is the reason why a backend cannot run it, or None."""
    if backend not in known:
        raise ValueError(f"backend: expected one of {known}, got {backend!r}")
    if backend == "auto":
        ranked = [name for name in ("cuda", "triton") if name in known and device.type == "cuda"]
        return next((name for name in ranked if missing(name) is None), "reference")
    if reason := missing(backend):
        raise RuntimeError(f"backend: {reason}")
    return backend
