"""``warmup``: compiles everything ahead of time, so that the first prompt, settling and step are as fast as others."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata import backends, jit
from kvstrata.cache.ops.ahead import kernels_needed as cache_kernels
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.checks import check_int
from kvstrata.quant.calibration import Calibration

from .decode.op import decode_attention

TRIAL_TOKENS = 1024  # tokens of the trial prompt


def uses_mass(cache: TieredCache) -> bool:
    """True if attention mass decides which tokens are demoted."""
    return cache.policy.name == "importance" and cache.budget.amount is not None


def kernels_needed(
    cache: TieredCache, heads: int | None, q_len: int, *, arch: str, gpu: str, shared: int
) -> list[jit.Named]:
    """CUDA C++ kernels of a cache and, unless ``heads`` is None, of decode steps over it.

    ``arch``, ``gpu``: architecture and name of the GPU; ``shared``: shared memory of its multiprocessors, in bytes.
    """
    from .decode import space, stages

    needed = cache_kernels(cache)
    if heads is None or cache.dtype not in stages.NAMES:
        return needed
    steps = space.kernels_needed(
        cache.formats, cache.dtype, heads, cache.kv_heads, cache.buckets.max_pages * cache.page_tokens,
        cache.max_requests, q_len=q_len, mass=uses_mass(cache), balanced=cache.balance is not None, arch=arch, gpu=gpu,
        shared=shared,
    )  # fmt: skip
    return [*needed, *steps]


def load_kernels(
    cache: TieredCache, heads: int | None, q_len: int = 1, progress: bool | None = None
) -> list[jit.Named]:
    """Compile and load the kernels of `kernels_needed`; returns those compiled now. Nothing to do on a CPU."""
    if backends.resolve(cache.buckets.backend, cache.device) != "cuda":
        return []
    arch, gpu = jit.arch_of(cache.device), torch.cuda.get_device_properties(cache.device)
    shared = gpu.shared_memory_per_multiprocessor
    wanted = kernels_needed(cache, heads, q_len, arch=arch, gpu=gpu.name, shared=shared)
    compiled = jit.load_ahead(wanted, cache.device, progress)
    if cache.budget.amount is not None:
        cache.pool.load_copy()
    return compiled


def trial_run(cache: TieredCache) -> TieredCache:
    """Small cache with the same pages and one layer, after a trial run of a prompt, a settling and a step.

    It evicts, so it accepts any budget. The global random state is not used.
    """
    small: dict[str, Any] = dict(layers=1, max_requests=1, evict=True, debug=False, slab_bytes=None, sensitivity=None)
    if cache.budget.shared:
        small |= dict(budget=0.25, budget_bytes=None)
    if (calibration := cache._arguments["calibration"]) is not None:
        kinds = [(layer.shape is not None, layer.centre is not None) for layer in calibration.layers]
        small["calibration"] = Calibration([calibration.layers[kinds.index(max(kinds))]])
    trial = TieredCache(**cache._arguments | small)
    tokens = min(TRIAL_TOKENS, max(cache.max_tokens - 2, 0))
    shape = (tokens + 2, cache.kv_heads, cache.head_dim)
    k = torch.linspace(-1, 1, shape[2], device=cache.device).expand(shape).to(cache.dtype).contiguous()
    if tokens:
        mass = torch.full((1, cache.kv_heads, tokens), 1.0, device=cache.device)
        trial.append(0, k[:tokens], k[:tokens], mass=mass if trial.policy.name == "importance" else None)
        trial.settle()
    if cache.max_tokens > tokens + 1:
        trial.append(0, k[:1], k[:1])
        trial.advance()
        trial.write(0, k[1:2], k[1:2])
    if tokens:
        trial.update_importance(0, torch.full((1, cache.kv_heads, tokens + 2), 0.5, device=cache.device))
    _move_a_page(trial)
    return trial


def _move_a_page(cache: TieredCache) -> None:
    """Copy a page of every tier, as compaction does when the budget needs it."""
    for tier in range(len(cache.page_formats)):
        handles = cache.pool.allocate(tier, 2)
        cache.pool.copy(handles[:1], handles[1:], tier)
        cache.pool.release(handles)
    cache.pool.trim()


def warmup(
    cache: TieredCache, heads: int | None = None, *, q_len: int = 1, progress: bool | None = None
) -> list[jit.Named]:
    """Compile and load everything that prompts, appends, settling and decode steps of a cache need, ahead of time.

    CUDA C++ kernels that are not in the disk cache are compiled in parallel. Then a small copy of the cache gets a
    prompt, settles and is read, which loads what torch, Triton or numba (on a CPU) compile at first use. With
    everything on disk, a process was ready in 1.8 s on an H200. `kvstrata warmup cache` fills the disk cache in
    advance, on a host without a GPU if needed.

    Args:
        cache: the `TieredCache`; it may hold tokens and is not changed.
        heads: query heads of a layer; None skips decode steps.
        q_len: queries of a request in a decode step.
        progress: write a line to stderr while kernels are compiled; None does so on a terminal.

    Returns the kernels that were compiled in this call, as (source, entry).

    Raises ValueError or TypeError, naming the argument, and CompileError for a kernel that does not compile. Not safe
    under CUDA-graph capture.

    Example:
        >>> cache = kvstrata.TieredCache(2, 2, 64, budget=0.25, dtype=torch.float32)
        >>> kvstrata.warmup(cache, heads=8)
        []
    """
    if not isinstance(cache, TieredCache):
        raise TypeError(f"cache: expected a TieredCache, got {type(cache).__name__}")
    if heads is not None and (type(heads) is not int or heads < 1 or heads % cache.kv_heads):
        raise ValueError(f"heads: expected a multiple of {cache.kv_heads}, got {heads!r}")
    check_int("q_len", q_len, 1)
    compiled = load_kernels(cache, heads, q_len, progress)
    trial = trial_run(cache)
    if heads is not None and trial.length(0) >= q_len:
        q = torch.zeros(1, q_len, heads, cache.head_dim, dtype=cache.dtype, device=cache.device)
        decode_attention(q, trial)
        if uses_mass(cache):
            decode_attention(q, trial, return_mass=True)
    return compiled
