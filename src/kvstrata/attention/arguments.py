"""Argument checks that the attention ops share: errors name the argument, what is expected and what was given."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_positive(name: str, value: float | None) -> None:
    if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise ValueError(f"{name}: expected a positive number, got {value!r}")


def check_sliding_window(sliding_window: int | None) -> None:
    if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
        raise ValueError(f"sliding_window: expected an int of at least 1, got {sliding_window!r}")


def check_sinks(sinks: torch.Tensor | None, heads: int, device: torch.device) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
        given = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, torch.Tensor) else repr(sinks)
        raise ValueError(f"sinks: expected floats [{heads}], one per query head, got {given}")
    if sinks.device != device:
        raise ValueError(f"sinks: expected a tensor on {device}, where q is, got {sinks.device}")


def check_scoring(
    scale: float | None, softcap: float | None, sliding_window: int | None, sinks: torch.Tensor | None, q: torch.Tensor
) -> None:
    """Check the arguments that affect scores; ``q [tokens, heads, dim]``."""
    check_positive("scale", scale)
    check_positive("softcap", softcap)
    check_sliding_window(sliding_window)
    check_sinks(sinks, q.shape[1], q.device)


def kernel_sinks(sinks: torch.Tensor) -> torch.Tensor:
    """Sinks as kernels take them: float32, contiguous, detached."""
    return sinks.detach().float().contiguous()
