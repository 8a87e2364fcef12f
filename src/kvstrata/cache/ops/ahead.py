"""Kernels that the operations of a cache launch on a CUDA device."""

from __future__ import annotations

from kvstrata import jit
from kvstrata.cache.move import append_cuda, moves_cuda, phases
from kvstrata.cache.policy import centre_cuda, plan_cuda
from kvstrata.cache.state import CacheState
from kvstrata.cache.storage import table_cuda


def kernels_needed(cache: CacheState) -> list[jit.Named]:
    """Kernels of prompts, appends, steps and settling, those that take longest to compile first."""
    plain = cache.page_formats[0]
    written = [*append_cuda.kernels_needed(plain, cache.balance is not None), *table_cuda.kernels_needed()]
    if cache.budget.amount is None:  # nothing settles
        return written
    moved = sorted(phases.kernels_needed(cache.page_formats), key=lambda one: "quantize" not in one[0].name)
    planned = plan_cuda.kernels_needed(plain, cache.policy, cache.max_tokens)
    listed = moves_cuda.kernels_needed(plain, cache.max_tokens)
    return [*moved, *planned, *centre_cuda.kernels_needed(plain), *listed, *written]
