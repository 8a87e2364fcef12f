"""Search space of ``store.cu`` for `kvstrata tune`: the kernel and its launch shape.

``threads`` per block, vectors per thread (``per``) and bytes per ``vector`` for direct and staged copies; rows per
block (``rows``) for bulk copies.
"""

from __future__ import annotations

import torch

from kvstrata.jit.tuned import Choice

from .cuda import Config, Shape, cut, entry_of, takes

CHOICES: dict[str, tuple[int | str, ...]] = {
    "kernel": ("direct", "staged", "bulk"),
    "threads": (64, 128, 256, 512, 1024),
    "per": (1, 2, 4, 8),
    "vector": (16, 8, 4),
    "rows": (1, 2, 3, 4, 6, 8, 16, 32),
}
WHEN: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "threads": ("kernel", ("direct", "staged")),
    "per": ("kernel", ("direct", "staged")),
    "vector": ("kernel", ("direct", "staged")),
    "rows": ("kernel", ("bulk",)),
}


def choice_of(config: Config) -> Choice:
    """Inverse of `Config.of`."""
    if config.kernel == "bulk":
        return {"kernel": "bulk", "rows": config.per}
    return {"kernel": config.kernel, "threads": config.threads, "per": config.per, "vector": config.vector}


def invalid(shape: Shape, config: Config, arch: str) -> str | None:
    """Reason why a config cannot move these rows, or None."""
    if config.kernel == "bulk" and int(arch.removeprefix("sm_")) < 90:
        return f"bulk copies need sm_90, got {arch}"
    widest = shape.elements * shape.task.cache_dtype.itemsize
    if config.kernel != "bulk" and config.vector > widest:
        return f"vectors are {widest} bytes wide at most, got {config.vector}"
    if not takes(shape, config):
        return (
            f"{config.kernel} copies do not take vectors of {shape.elements * shape.task.source_dtype.itemsize} bytes"
        )
    return None


def entry(shape: Shape, slot_dtype: torch.dtype, config: Config) -> str:
    """Template instantiation that a config launches."""
    return entry_of(cut(shape, config), slot_dtype, config)
