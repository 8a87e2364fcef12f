"""Kernels that the operations of a cache launch on a CUDA device."""

from __future__ import annotations

from kvstrata import jit
from kvstrata.cache.move import append_cuda, moves_cuda, phases
from kvstrata.cache.policy import plan_cuda
from kvstrata.cache.state import CacheState


def kernels_needed(cache: CacheState) -> list[jit.Named]:
    """Kernels of prompts, appends, steps and settling; those that take longest to compile come first."""
    plain = cache.page_formats[0]
    moved = sorted(phases.kernels_needed(cache.page_formats), key=lambda one: "quantize" not in one[0].name)
    if cache.budget.amount is None:  # nothing settles
        return append_cuda.kernels_needed(plain)
    listed = (*plan_cuda.kernels_needed(plain, cache.policy), *moves_cuda.kernels_needed(plain))
    return [*moved, *listed, *append_cuda.kernels_needed(plain)]
