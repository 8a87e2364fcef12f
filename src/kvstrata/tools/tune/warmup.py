"""Compiles kernels ahead of need: the tuned ones, the ops' defaults, and those of a cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from kvstrata import jit
from kvstrata.jit import tuned

from . import problems
from .compiler import Compiler
from .gates import Needs, multiprocessor
from .tables import arch_of


@dataclass
class Warmed:
    """Number of kernels that were compiled or already cached, and errors of those that failed."""

    arch: str
    tables: list[str]
    kernels: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def tables_for(arch: str, gpu: str | None) -> list[str]:
    """Slugs of the GPUs whose tables are used: the named one, or all of the architecture."""
    if gpu is not None:
        return [gpu]
    paths = [p for folder in (tuned.SHIPPED, tuned.user_folder()) for p in sorted(folder.glob("*.json"))]
    return sorted({path.stem for path in paths if arch_of(path) == arch})


def kernels(ops: Iterable[str], arch: str, gpus: Iterable[str]) -> list[Needs]:
    """Kernels of the top configurations of each table entry and of the defaults, without duplicates."""
    unique: dict[tuple[str, str], Needs] = {}
    for op in ops:
        known = {problem.case: problem for problem in problems.find(op, arch, torch.device("cpu"), "cuda")}
        entries = [entry for gpu in gpus for entry in tuned.table(gpu).get(op, [])]
        wanted = [
            (known[entry["case"]], choice) for entry in entries if entry["case"] in known for choice in entry["top"]
        ]
        for problem, choice in [*wanted, *((problem, problem.default) for problem in known.values())]:
            for kernel in [] if problem.invalid(choice) else problem.kernels(choice):
                unique.setdefault((str(kernel.source), kernel.entry), kernel)
    return list(unique.values())


def replay_kernels() -> list[Needs]:
    """Kernels of `CopyPlan` without casts, and of `HostStage`."""
    from kvstrata.replay import cuda as copy_cuda

    entries = [copy_cuda.entry_of(n, False, staged) for n in copy_cuda.CAPACITIES for staged in (False, True)]
    return [Needs(copy_cuda.SOURCE, entry, copy_cuda.THREADS) for entry in entries]


@dataclass(frozen=True)
class CacheSizes:
    """Arguments of a `TieredCache`, and its query heads, as far as kernels depend on them."""

    head_dim: int
    heads: int = 32
    kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    budget: float = 0.25
    tiers: tuple[str, ...] | None = None
    page_tokens: int = 64
    max_tokens: int = 32768
    max_requests: int = 256


def cache_kernels(sizes: CacheSizes, arch: str, gpus: Iterable[str]) -> list[Needs]:
    """Kernels of prompts, appends, settling and decode steps of a cache, with the tuned choices of these GPUs."""
    from kvstrata.attention.cache_warmup import kernels_needed
    from kvstrata.cache import TieredCache

    cache = TieredCache(
        1, sizes.kv_heads, sizes.head_dim, budget=sizes.budget, tiers=sizes.tiers, dtype=sizes.dtype,
        page_tokens=sizes.page_tokens, max_tokens=sizes.max_tokens,
    )  # fmt: skip
    cache.max_requests = sizes.max_requests  # after the tables are allocated: only steps depend on it
    shared, named = multiprocessor(arch).shared, []
    for gpu in [*gpus] or ["unknown"]:
        named += kernels_needed(cache, sizes.heads, 1, arch=arch, gpu=gpu, shared=shared)
    return [Needs(*kernel, threads=0) for kernel in dict.fromkeys(named)]


def packed_kernels(
    name: str, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, page_tokens: int, arch: str
) -> list[Needs]:
    """Kernels of stores into packed pages and decode steps over them, with and without a balance."""
    from kvstrata.attention.packed_warmup import kernels_needed
    from kvstrata.layout import Format

    fmt, named = Format.parse(name, head_dim, page_tokens), []
    for balanced in (False, True):
        for slot_dtype in (torch.int32, torch.int64):
            named += kernels_needed(fmt, heads, kv_heads, dtype, balanced=balanced, slot_dtype=slot_dtype, arch=arch)
    return [Needs(*kernel, threads=0) for kernel in dict.fromkeys(named)]


def compile_all(wanted: list[Needs], jobs: int | None, result: Warmed) -> Iterator[Needs]:
    """Compile in `jobs` processes (None: one per core); yields a kernel when it is done."""
    jobs = min(os.cpu_count() or 1, len(wanted)) if jobs is None else jobs
    with Compiler(result.arch, jobs) as compiler:
        compiler.start(wanted)
        for kernel in wanted:
            try:
                compiler.usage(kernel)
                result.kernels += 1
            except jit.CompileError as error:
                result.failed[kernel.entry] = str(error)
            yield kernel
